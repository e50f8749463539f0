"""Parts of a GPU that sum to a whole one fit on it, each of the same size, whoever comes first."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import Allocation, ContainerAsk, ContainerRef, Refusal
from deviceplugin.plan.annotated import plan_container
from mpsd.config.model import AnnotationsConfig, Enforcement, GpuSelection
from mpsd.gpu.model import MIB, Mode
from tests.builders import HARD, config, info, node, uuid

ANNOTATIONS = AnnotationsConfig(gpus=GpuSelection(), enforcement=Enforcement.NONE)
SIZES_MIB = st.integers(4 << 10, 512 << 10)


def asking(n: int, request_mib: int, limit_mib: int, mode: Mode, gpus: tuple[int, ...] = (0,)) -> ContainerAsk:
    return ContainerAsk(
        container=ContainerRef(namespace="ns", pod=f"p{n}", pod_uid=f"uid{n}", container="main"),
        request_bytes=request_mib * MIB,
        limit_bytes=limit_mib * MIB,
        mode=mode,
        gpus=tuple(map(uuid, gpus)),
        of_total=True,
    )


@given(
    parts=st.integers(1, 8),
    total_mib=SIZES_MIB,
    reserved_bytes=st.integers(0, 1 << 30),
    reserve_part=st.floats(0, 0.9),
    limit_part=st.none() | st.floats(0, 1, exclude_max=True),
    mode=st.sampled_from(Mode),
)
def test_equal_parts_all_fit_and_are_equal(
    parts: int, total_mib: int, reserved_bytes: int, reserve_part: float, limit_part: float | None, mode: Mode
) -> None:
    """As KAI's binder computes them: of a portion with two decimals, and cut to whole MiB."""
    gpu = info(0, memory_total_bytes=total_mib * MIB, memory_reserved_bytes=min(reserved_bytes, total_mib * MIB // 10))
    cfg = config(annotations=ANNOTATIONS, memory_reserve_bytes=int(total_mib * MIB * reserve_part * 0.9))
    request_mib = int(total_mib * (int(100 / parts) / 100))
    limit_mib = request_mib if limit_part is None else max(request_mib, int(total_mib * limit_part))
    accounts, got = Accounts(), set()
    view = node(cfg, gpu, hard=HARD, protocol=3)
    for n in range(parts):
        outcome = plan_container(asking(n, request_mib, limit_mib, mode), view, accounts, generation=n)
        assert isinstance(outcome, Allocation), outcome
        accounts.add(outcome)
        got.add((outcome.request_bytes, outcome.limit_bytes))
        assert (outcome.asked_request_bytes, outcome.asked_limit_bytes) == (request_mib * MIB, limit_mib * MIB)
        assert outcome.request_bytes <= outcome.limit_bytes <= view.gpus[gpu.uuid].usable_bytes
    assert len(got) == 1
    assert accounts.granted_bytes(gpu.uuid) <= view.gpus[gpu.uuid].usable_bytes


@given(
    total_mib=SIZES_MIB,
    percents=st.lists(st.integers(1, 99), min_size=1, max_size=8).filter(lambda percents: sum(percents) <= 100),
    data=st.data(),
)
def test_unequal_parts_fit_in_any_order_and_get_the_same(
    total_mib: int, percents: list[int], data: st.DataObject
) -> None:
    view = node(config(annotations=ANNOTATIONS), info(0, memory_total_bytes=total_mib * MIB), hard=HARD, protocol=3)
    sizes: list[dict[int, int]] = []
    for order in (range(len(percents)), data.draw(st.permutations(range(len(percents))))):
        accounts = Accounts()
        for n in order:
            request_mib = max(int(total_mib * (percents[n] / 100)), 1)
            ask = asking(n, request_mib, request_mib, Mode.TIME_SLICING)
            outcome = plan_container(ask, view, accounts, generation=n)
            assert not isinstance(outcome, Refusal), outcome
            accounts.add(outcome)
        sizes.append({a.generation: a.request_bytes for a in accounts})
    assert sizes[0] == sizes[1]


def test_of_several_gpus_the_one_that_keeps_back_most_decides() -> None:
    view = node(
        config(annotations=ANNOTATIONS), info(0, 80), info(1, 80, memory_reserved_bytes=4 << 30), hard=HARD, protocol=3
    )
    ask = asking(0, 40 << 10, 40 << 10, Mode.TIME_SLICING, gpus=(0, 1))
    outcome = plan_container(ask, view, Accounts(), generation=0)
    assert isinstance(outcome, Allocation)
    least = min(view.gpus[uuid(index)].usable_bytes for index in (0, 1))
    assert outcome.request_bytes == least // 2 // MIB * MIB


def test_who_names_a_size_still_takes_room_of_a_part() -> None:
    """What is left is for the part that came later, as for anybody."""
    view = node(config(annotations=ANNOTATIONS), info(0, 80), hard=HARD, protocol=3)
    accounts = Accounts()
    for n, of_total in enumerate((False, True)):
        ask = structs.replace(asking(n, 40 << 10, 40 << 10, Mode.TIME_SLICING), of_total=of_total)
        outcome = plan_container(ask, view, accounts, generation=n)
        assert isinstance(outcome, Allocation)
        accounts.add(outcome)
    exact, part = sorted(accounts, key=lambda a: a.generation)
    assert exact.request_bytes == 40 << 30
    assert part.request_bytes == view.gpus[uuid(0)].usable_bytes - (40 << 30)
