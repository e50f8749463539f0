import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.config.model import (
    Enforcement,
    FixedMemory,
    FractionMemory,
    GpuSelection,
    Memory,
    NodeConfig,
    Resource,
    UnitMemory,
)
from mpsd.gpu.model import MIB, GpuInfo, Mode
from mpsd.shares.groups import Group
from mpsd.shares.sizes import ShareSize, fraction_of, is_allowed, largest_limit_bytes, share_size, slots, usable_bytes

GIB = 1024 * MIB


def gpu(total_bytes: int = 80 * GIB, reserved_bytes: int = 0, index: int = 0) -> GpuInfo:
    return GpuInfo(
        uuid=f"GPU-{index}", index=index, name="", memory_total_bytes=total_bytes, memory_reserved_bytes=reserved_bytes
    )


def resource(memory: Memory, mode: Mode = Mode.SM_SHARING, **more: object) -> Resource:
    return Resource(name="x/y", memory=memory, mode=mode, enforcement=Enforcement.NONE, **more)  # type: ignore[arg-type]


def fixed(request_gib: int, limit_gib: int | None = None) -> FixedMemory:
    return FixedMemory(request_bytes=request_gib * GIB, limit_bytes=(limit_gib or request_gib) * GIB)


@pytest.mark.parametrize(
    ("total", "reserved", "reserve", "usable"),
    [
        (80 * GIB, 0, 0, 80 * GIB),
        (80 * GIB, 512 * MIB, GIB, 80 * GIB - 512 * MIB - GIB),
        (80 * GIB - 1, 0, 0, 80 * GIB - MIB),
        (GIB, 0, GIB, 0),
        (GIB, GIB, GIB, 0),
        (0, 0, 0, 0),
    ],
)
def test_usable(total: int, reserved: int, reserve: int, usable: int) -> None:
    assert usable_bytes(gpu(total, reserved), reserve) == usable


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        (fixed(8), ShareSize(8 * GIB, 8 * GIB)),
        (fixed(8, 16), ShareSize(8 * GIB, 16 * GIB)),
        (fixed(78), ShareSize(78 * GIB, 78 * GIB)),
        (FractionMemory(fraction=0.5, limit_fraction=0.8), ShareSize(39 * GIB, 63897 * MIB)),
        (UnitMemory(unit_bytes=GIB), ShareSize(GIB, GIB)),
    ],
)
def test_share_size(memory: Memory, size: ShareSize) -> None:
    assert share_size(resource(memory), 78 * GIB) == size


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (fixed(100), "request 100Gi is more than the 78Gi usable on this GPU"),
        (fixed(8, 79), "limit 79Gi is more than the 78Gi usable on this GPU"),
        (UnitMemory(unit_bytes=79 * GIB), "unit 79Gi is more than the 78Gi usable on this GPU"),
        (
            FractionMemory(fraction=0.00001, limit_fraction=0.5),
            "fraction 1e-05 of the 78Gi usable on this GPU is less than 1 MiB",
        ),
    ],
)
def test_what_does_not_fit_says_why(memory: Memory, reason: str) -> None:
    assert share_size(resource(memory), 78 * GIB) == reason
    assert slots(resource(memory), 78 * GIB) == 0


def test_a_fraction_counts_as_the_decimal_it_is_written_as() -> None:
    # The double nearest to 0.7 is below it, and 0.1 is above it.
    assert fraction_of(10 * MIB, 0.7) == 7 * MIB
    assert slots(resource(FractionMemory(fraction=0.1, limit_fraction=0.1)), 80 * GIB) == 10


@pytest.mark.parametrize(
    ("memory", "count"), [(fixed(8), 9), (fixed(8, 16), 9), (UnitMemory(unit_bytes=GIB), 78), (fixed(40), 1)]
)
def test_slots(memory: Memory, count: int) -> None:
    assert slots(resource(memory), 78 * GIB) == count


@given(
    st.integers(0, 2**40),
    st.one_of(
        st.integers(1, 2**20).map(lambda n: FixedMemory(request_bytes=n * MIB, limit_bytes=n * MIB)),
        st.floats(0.0001, 0.9999).map(lambda f: FractionMemory(fraction=f, limit_fraction=f)),
        st.integers(64, 2**20).map(lambda n: UnitMemory(unit_bytes=n * MIB)),
    ),
)
def test_slots_fit_side_by_side_and_one_more_does_not(usable: int, memory: Memory) -> None:
    size = share_size(resource(memory), usable)
    count = slots(resource(memory), usable)
    if isinstance(size, str):
        assert count == 0
        return
    assert size.request_bytes % MIB == size.limit_bytes % MIB == 0
    assert MIB <= size.request_bytes <= size.limit_bytes <= usable
    assert count * size.request_bytes <= usable < (count + 1) * size.request_bytes


@given(st.integers(1, 1000), st.integers(2, 1000))
def test_decimal_fractions_are_exact(mib: int, parts: int) -> None:
    fraction = round(1 / parts, 3)
    if 0 < fraction < 1:
        thousandths = round(fraction * 1000)
        assert fraction_of(mib * MIB, fraction) == mib * thousandths // 1000 * MIB


def test_admission() -> None:
    config = NodeConfig(resources=(), gpus=GpuSelection(exclude=(1,)))
    zero, one = gpu(index=0), gpu(index=1)
    lone, pair = Group("g", ("g",)), Group("pair", ("g",), declared=True)
    of_pair = resource(fixed(8), groups=("pair",))
    assert is_allowed(resource(fixed(8)), config, lone, [zero])
    assert not is_allowed(resource(fixed(8)), config, lone, [one])
    assert not is_allowed(resource(fixed(8), gpus=GpuSelection(include=(2,))), config, lone, [zero])
    assert not is_allowed(of_pair, config, lone, [zero])
    assert is_allowed(of_pair, config, pair, [zero])
    assert not is_allowed(resource(fixed(8)), config, pair, [zero])
    assert not is_allowed(resource(fixed(8), groups=("other",)), config, pair, [zero])


def test_the_largest_limit_is_over_what_may_use_the_gpu_under_mps() -> None:
    config = NodeConfig(resources=())
    usable = 78 * GIB + 512 * MIB

    def largest(*resources: Resource) -> int | None:
        return largest_limit_bytes(resources, config, Group("g", ("g",)), [gpu()], usable)

    assert largest() is None
    assert largest(resource(fixed(8), Mode.TIME_SLICING)) is None
    assert largest(resource(fixed(100))) is None
    assert largest(resource(fixed(8), groups=("pair",))) is None
    assert largest(resource(fixed(8)), resource(fixed(16)), resource(fixed(70), Mode.TIME_SLICING)) == 16 * GIB
    assert largest(resource(fixed(8)), resource(fixed(4, 16))) == 8 * GIB, "burst is not granted under protocol 2"
    assert largest(resource(fixed(8)), resource(UnitMemory(unit_bytes=GIB))) == 78 * GIB
    assert largest(resource(FractionMemory(fraction=0.5, limit_fraction=0.5))) == fraction_of(usable, 0.5)
