"""Who is hit together."""

from msgspec import structs

from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.faults import FaultDomain, fault_domains, fault_id
from mpsd.gpu.model import Mode
from tests.builders import allocation, uuid


def on(*gpus: int, name: str = "a", mode: Mode = Mode.SM_SHARING) -> Allocation:
    made = allocation(name, f"{uuid(gpus[0])}::0", mode=mode, gpus=tuple(map(uuid, gpus)))
    return structs.replace(made, key=f"{name}-{'-'.join(map(str, gpus))}")


def shown(*live: Allocation) -> dict[str, tuple[list[int], int]]:
    """Key -> the GPUs of its fault domain, and how many are hit together."""
    index = {uuid(n): n for n in range(9)}
    return {key: ([index[gpu] for gpu in d.gpus], d.containers) for key, d in fault_domains(live).items()}


def test_sm_sharing_on_one_gpu_is_hit_together() -> None:
    assert shown(on(0, name="a"), on(0, name="b"), on(1, name="c")) == {
        "a-0": ([0], 2),
        "b-0": ([0], 2),
        "c-1": ([1], 1),
    }


def test_containers_on_several_gpus_connect_those_on_any_of_them() -> None:
    live = (on(0, name="a"), on(2, 1, name="b"), on(1, 0, name="c"), on(3, name="d"))
    assert shown(*live) == {"a-0": ([0, 1, 2], 3), "b-2-1": ([0, 1, 2], 3), "c-1-0": ([0, 1, 2], 3), "d-3": ([3], 1)}
    assert shown(*live[:2]) == {"a-0": ([0], 1), "b-2-1": ([1, 2], 1)}


def test_time_slicing_is_hit_alone_and_connects_nobody() -> None:
    live = [on(0, 1, name=name, mode=Mode.TIME_SLICING) for name in "ab"]
    assert shown(*live) == {"a-0-1": ([0, 1], 1), "b-0-1": ([0, 1], 1)}


def test_the_id_stays_whoever_comes() -> None:
    one, two = on(0), on(1, 0)
    for live in ((one,), (one, two)):
        assert fault_domains(live)[one.key].id == fault_id(one) == uuid(0)
    assert fault_id(two) == f"{uuid(0)},{uuid(1)}", "the same for the same GPUs, however they were named"


def test_no_two_containers_of_time_slicing_have_the_same_id() -> None:
    one, other = (on(0, name=name, mode=Mode.TIME_SLICING) for name in "ab")
    assert fault_domains([one])[one.key] == FaultDomain(one.key, (uuid(0),), 1)
    assert fault_id(one) != fault_id(other)
