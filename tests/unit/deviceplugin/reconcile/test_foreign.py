"""GPUs that other plugins' pods hold by the checkpoint's word alone."""

from deviceplugin.grants.holders.model import Holder, Observation
from deviceplugin.kubelet.podresources import Containers
from deviceplugin.plan.allocation import Allocation, Refusal
from deviceplugin.plan.ids import device_id
from deviceplugin.reconcile.foreign import InitHolders, foreign_holders, reservations
from mpsd.config.model import AnnotationsConfig, Enforcement, GpuSelection
from tests.builders import uuid
from tests.world import World

WHOLE = "nvidia.com/gpu"
SHARES = (WHOLE, (uuid(0),))
INIT = Observation({}, {SHARES: Holder("", "", "warm-up", "uid-1")})
GPUS = {uuid(0), uuid(1)}


def test_a_plain_init_container_holds_its_gpu() -> None:
    holders = InitHolders()
    reason = "the pod of UID uid-1 holds it through nvidia.com/gpu in its init container warm-up"
    held = holders.look(INIT, ["gpufrac.dev/a"], GPUS)
    assert {gpu: found.message for gpu, found in held.items()} == {uuid(0): reason}
    assert holders.entries
    assert holders.look(INIT, [WHOLE], GPUS) == {}, "ours are shares"
    assert holders.look(INIT, [], {uuid(1)}) == {}, "what a scheduler has reserved is no stranger's"


def test_a_checkpoint_that_cannot_be_read_takes_nothing_back() -> None:
    holders = InitHolders()
    holders.look(INIT, [], GPUS)
    assert uuid(0) in holders.look(Observation({}, None), [], GPUS)
    assert holders.look(Observation({}, {}), [], GPUS) == {}


def test_of_a_container_that_was_listed_once_a_stale_entry_says_nothing() -> None:
    holders = InitHolders()
    both = Observation({SHARES: Holder("ns", "job", "main")}, {SHARES: Holder("ns", "job", "main", "uid-1")})
    assert holders.look(both, [], GPUS) == {}, "PodResources says so itself"
    assert holders.look(Observation({}, both.checkpointed), [], GPUS) == {}
    assert holders.entries == frozenset()


def test_nothing_of_ours_comes_to_a_gpu_that_another_plugins_init_container_holds(world: World) -> None:
    entry: dict[str, object] = {"PodUID": "uid-1", "ContainerName": "warm-up", "ResourceName": WHOLE}
    world.write_checkpoint([entry | {"DeviceIDs": {"-1": [uuid(0)]}}])
    (world.root / "pods" / "uid-1").mkdir()
    world.keeper.observe()
    outcome = world.broker.allocate("gpufrac.dev/a", [device_id(uuid(0), 0)])
    assert isinstance(outcome, Refusal)
    assert "in its init container warm-up" in outcome.message
    assert isinstance(world.broker.allocate("gpufrac.dev/a", [device_id(uuid(1), 0)]), Allocation)
    world.broker.publish()
    before = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    world.keeper.collect()
    after = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    assert before is not None
    assert after is not None
    assert after.generation > before.generation, "the kubelet rewrites its checkpoint: the entry may be stale"
    (world.root / "pods" / "uid-1").rmdir()
    world.keeper.observe()
    assert isinstance(world.broker.allocate("gpufrac.dev/a", [device_id(uuid(0), 0)]), Allocation)


def test_gpus_of_other_plugins_are_found_by_their_device_ids() -> None:
    containers: Containers = {
        ("ns", "p", "c"): {"nvidia.com/gpu": (uuid(0),), "gpufrac.dev/a": (device_id(uuid(1), 0),)},
        ("ns", "q", "c"): {"nvidia.com/gpu.shared": (f"{uuid(2)}::3",), "rdma/x": ("mlx5_0",)},
    }
    gpus = {uuid(i) for i in range(3)}
    got = foreign_holders(containers, ["gpufrac.dev/a"], gpus, {})
    assert set(got) == {uuid(0), uuid(2)}
    assert str(got[uuid(0)]) == "pod ns/p holds it through nvidia.com/gpu"


def test_a_reservation_pod_reserves_its_gpu_and_holds_it_for_nobody_else() -> None:
    annotations = AnnotationsConfig(gpus=GpuSelection(), enforcement=Enforcement.COOPERATIVE)
    gpus = {uuid(i) for i in range(3)}
    real = ("kai-resource-reservation", "gpu-reservation-0123456789abcdef", "resource-reservation")
    containers: Containers = {
        real: {"nvidia.com/gpu": (uuid(0),)},
        ("ns", "gpu-reservation-0123456789abcdef", "c"): {"nvidia.com/gpu": (uuid(1),)},
        ("kai-resource-reservation", "other", "c"): {"nvidia.com/gpu": (uuid(2),)},
    }
    reserved = reservations(containers, annotations, gpus)
    assert reserved == {uuid(0): "kai-resource-reservation/gpu-reservation-0123456789abcdef"}
    assert set(foreign_holders(containers, [], gpus, reserved)) == {uuid(1), uuid(2)}
    assert reservations(containers, None, gpus) == {}, "on a node without annotated pods it is another plugin's pod"
