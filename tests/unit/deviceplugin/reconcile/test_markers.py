"""Containers that run without our edits are found by their processes, and nobody else is accused."""

from deviceplugin.grants.holders.model import Holder
from deviceplugin.plan.ids import device_id
from mpsd.localapi.snapshot import GpuClient
from tests.builders import info, snapshot, status, uuid
from tests.unit.deviceplugin.reconcile.looking import begun, hold_by_checkpoint, looks, running
from tests.world import World


def test_a_container_with_two_of_our_resources_is_unenforced(world: World) -> None:
    first, second = world.grant("a"), world.grant("b", device_id(uuid(0), 0))
    world.run(first)
    world.run(second)
    world.keeper.observe()
    world.keeper.check_markers()
    assert set(world.keeper.report.unenforced) == {first.key, second.key}
    assert "gpufrac.dev/a and gpufrac.dev/b" in str(world.keeper.report.unenforced[first.key])


def test_a_container_that_runs_without_our_marker_is_unenforced_after_a_while(world: World) -> None:
    got = world.grant()
    begun(world, got)
    world.processes = {"uid-1": running(None)}
    assert looks(world, 15) == set()
    assert looks(world, 15) == {got.key}
    world.processes = {"uid-1": running(got.key)}
    assert looks(world, 5) == set()


def test_nobody_is_accused_whose_container_may_not_run_yet(world: World) -> None:
    got = world.grant()
    begun(world, got)
    other = ("ns", "pod", "plain")
    for processes, containers in (
        (running(), ()),  # the image is being pulled, or it crashed
        (running(None), (other,)),  # one of two runs
        (running(None, got.key), (other,)),
    ):
        world.processes = {"uid-1": processes}
        world.kubelet.containers = {
            ("ns", "pod", "c"): {got.resource: got.device_ids},
            **{other: {} for other in containers},
        }
        assert looks(world, 120) == set(), processes


def test_a_long_init_container_accuses_nobody(world: World) -> None:
    got = world.grant()
    world.run(got)
    hold_by_checkpoint(world, got)  # but the kubelet has not begun to create the container
    world.processes = {"uid-1": running(None)}
    assert looks(world, 600) == set()


def test_a_process_of_the_pod_on_the_gpu_without_marker_is_enough(world: World) -> None:
    got = world.grant()
    begun(world, got)
    world.processes = {"uid-1": running(None, None)}
    gpu = status(info(0), mode=got.mode, clients=(GpuClient(pid=11),))
    world.broker.observe_snapshot(snapshot(gpu, status(info(1))))
    assert looks(world, 5) == {got.key}
    assert "pid 11" in str(world.keeper.report.unenforced[got.key])


def test_a_finished_init_container_is_not_called_unenforced(world: World) -> None:
    init, app = world.grant("u", device_id(uuid(0), 0)), world.grant("a")
    world.run(app)
    world.write_checkpoint([world.checkpoint(init, "uid-1"), world.checkpoint(app, "uid-1")])
    (world.root / "pods" / "uid-1" / "containers" / "c").mkdir(parents=True)
    world.processes = {"uid-1": running(app.key)}
    assert looks(world, 120) == set()
    holder = world.broker.inspect().holders[init.key]
    assert holder == Holder("ns", "pod", "c", "uid-1"), "its pod is named by the container beside it"
