"""A scheduler's view of one node: what a pod asks for as a whole, what keeps it waiting, and what its author can do."""

import pytest

from deviceplugin.sim.node.config import default_config
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec, Role
from deviceplugin.sim.scheduling import placement
from deviceplugin.sim.scheduling.placement import Lack, Offer, dealt, lacks

OURS = default_config().resources
SHARE, UNITS = "gpufrac.dev/gpu-8gi", "gpufrac.dev/memory-gib"
OFFERS = {SHARE: Offer(9, 9), UNITS: Offer(70, 78, 60, "memory is taken")}


def pod(*containers: ContainerSpec, **fields: tuple[str, ...]) -> PodSpec:
    return PodSpec("p", containers, **fields)  # type: ignore[arg-type]


def message(asker: PodSpec) -> str:
    return placement.message(asker, lacks(asker, OFFERS, OURS), OURS)


def test_a_pod_asks_for_its_apps_and_sidecars_or_for_one_init_container() -> None:
    def container(name: str, role: Role, count: int) -> ContainerSpec:
        return ContainerSpec(name, {"r/a": count}, role)

    early, side = container("early", Role.INIT, 5), container("side", Role.SIDECAR, 2)
    late, main = container("late", Role.INIT, 4), container("main", Role.APP, 3)
    assert placement.requests(pod(early, side, main)) == {"r/a": 5}
    assert placement.requests(pod(early, side, late, main)) == {"r/a": 6}, "an init container beside a sidecar"
    assert placement.requests(pod(side, main, container("other", Role.APP, 3))) == {"r/a": 8}
    assert placement.requested([pod(main), pod(main, early)]) == {"r/a": 8}


def test_devices_of_an_init_container_are_dealt_again() -> None:
    init, side = ContainerSpec("init", {"r/a": 2}, Role.INIT), ContainerSpec("side", {"r/a": 1}, Role.SIDECAR)
    given = dealt(pod(init, side, ContainerSpec("none"), ContainerSpec("main", {"r/a": 1})), "r/a", ["x", "y"])
    assert given == {"init": ("x", "y"), "side": ("x",), "main": ("y",)}


def test_what_is_free_is_what_is_allocatable_and_not_asked_for() -> None:
    assert lacks(pod(ContainerSpec("main", {SHARE: 9, UNITS: 10})), OFFERS, OURS) == ()
    (lack,) = lacks(pod(ContainerSpec("main", {UNITS: 11})), OFFERS, OURS)
    assert lack == Lack(UNITS, 11, OFFERS[UNITS], offered=True)
    assert message(pod(ContainerSpec("main", {UNITS: 11}))) == (
        f"0/1 nodes are available: 1 Insufficient {UNITS}. Asked for 11 {UNITS}, free 10 "
        "(70 of 78 allocatable, 60 held by pods): memory is taken."
    )
    assert Offer(3, 9, 5).free == 0, "shares turned unhealthy under pods"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gpufrac.dev/gpu8gi", SHARE),
        ("gpufrac.dev/GPU-8Gi", SHARE),
        ("gpufrac.dev/gpu-8g", SHARE),
        ("gpufrac.io/gpu-8gi", SHARE),
        ("gpu-frac.dev/memory-gib", UNITS),
        ("gpufrac.dev/gpu-16gib", "gpufrac.dev/gpu-16gi"),
        ("nvidia.com/gpu", ""),
        ("gpufrac.dev/gpu", ""),
        ("rdma/ib", ""),
    ],
)
def test_a_name_that_nobody_offers_and_the_one_that_was_meant(name: str, meant: str) -> None:
    asker = pod(ContainerSpec("main", {name: 1}))
    (lack,) = lacks(asker, OFFERS, OURS)
    assert (lack.offered, lack.meant) == (False, meant)
    assert f"No device plugin of this node offers {name}." in message(asker)
    assert (f"did you mean {meant}?" in message(asker)) == bool(meant)


@pytest.mark.parametrize(
    ("resources", "advice"),
    [
        ({"nvidia.com/gpu": 1}, f"instead {SHARE}: 1 (8Gi), gpufrac.dev/gpu-16gi: 1 (16Gi) or {UNITS}: N (N x 1Gi of"),
        ({"nvidia.com/gpu": 1}, "--schedule simulates it, too"),
        ({"aliyun.com/gpu-mem": 3}, f"write instead {UNITS}: 3 (for 3Gi) in container main."),
        ({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 1500}, f"{UNITS}: 2 (for 1500Mi) in container main."),
        ({"gpufrac.dev/gpu": 1}, f"write instead {SHARE}: 1 (8Gi)"),
        ({"rdma/ib": 1}, "rdma/ib is for another device plugin to offer, and this node has none: to try the rest"),
    ],
)
def test_what_to_write_instead_of_a_resource_that_nobody_offers(resources: dict[str, int], advice: str) -> None:
    assert advice in message(pod(ContainerSpec("main", resources)))


def test_where_no_units_are_offered_the_smallest_share_that_is_large_enough_is_named() -> None:
    asker = pod(ContainerSpec("main", {"aliyun.com/gpu-mem": 9}))
    text = placement.message(asker, lacks(asker, {}, OURS[:2]), OURS[:2])
    assert "write instead gpufrac.dev/gpu-16gi: 1 (16Gi) in container main." in text


def test_resource_claims_are_not_for_device_plugins() -> None:
    text = message(pod(ContainerSpec("main"), claims=("gpu",)))
    assert text.startswith(
        "0/1 nodes are available: 1 cannot allocate all claims. Resource claims (gpu) are served by DRA"
    )
