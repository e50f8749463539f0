"""No pod gets an allocation that another pod has, however its shares come to it; containers of one pod share it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deviceplugin.grants.holders.shares import ABSENT_S
from deviceplugin.plan.allocation import Allocation, Refusal
from deviceplugin.plan.ids import device_id
from mpsd.common.processes import PodProcess
from mpsd.config.model import MpsConfig
from mpsd.localapi.snapshot import GpuClient
from tests.builders import config, fixed, resource, uuid
from tests.world import World, answer_with

BIG = device_id(uuid(0), 0)


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    yield made
    made.ledger.close()


def admitted(world: World, allocation: Allocation, uid: str, *, pod: str = "web-0", container: str = "c") -> None:
    """The kubelet shows the container everywhere, and its pod's directory is there."""
    world.run(allocation, pod=pod, container=container)
    enter(world, allocation, uid, container)


def enter(world: World, allocation: Allocation, uid: str, container: str = "c") -> None:
    """Its entry in the checkpoint is one more, and its pod's directory is there."""
    entry = world.checkpoint(allocation, uid) | {"ContainerName": container, "AllocResp": answer_with(allocation.key)}
    world.write_checkpoint([*entries(world), entry])
    (world.root / "pods" / uid).mkdir(exist_ok=True)


def entries(world: World) -> list[dict[str, object]]:
    path = world.root / "device-plugins" / "kubelet_internal_checkpoint"
    found: list[dict[str, object]] = json.loads(path.read_text())["Data"]["PodDeviceEntries"]
    return found


def runs(world: World, allocation: Allocation, uid: str) -> None:
    """A process of it holds memory of its GPU."""
    world.mpsd.on_gpu[uuid(0)] = (GpuClient(pid=42, allocation_key=allocation.key, pod_uid=uid),)


def deleted_by_force(world: World) -> None:
    """PodResources forgets it at once; its entry in the checkpoint and its directory stay."""
    world.kubelet.containers.clear()


def its_entry_is_rewritten(world: World) -> None:
    deleted_by_force(world)
    world.write_checkpoint([])


def the_checkpoint_is_unreadable(world: World) -> None:
    deleted_by_force(world)
    (world.root / "device-plugins" / "kubelet_internal_checkpoint").unlink()


def the_kubelet_does_not_answer(world: World) -> None:
    deleted_by_force(world)
    world.kubelet.down = True


def the_kubelet_restarts(world: World) -> None:
    deleted_by_force(world)
    world.start_kubelet()


def the_plugin_restarts(world: World) -> None:
    deleted_by_force(world)
    world.restart()


def the_plugin_restarts_and_sees_nothing(world: World) -> None:
    deleted_by_force(world)
    world.kubelet.down = True
    world.restart()


FOUND_BY_A_LOOK = [deleted_by_force, the_kubelet_restarts, the_plugin_restarts, the_plugin_restarts_and_sees_nothing]
KNOWN_BEFORE = [its_entry_is_rewritten, the_checkpoint_is_unreadable, the_kubelet_does_not_answer]


@pytest.mark.parametrize(
    ("happens", "observed"),
    [(happens, False) for happens in FOUND_BY_A_LOOK] + [(happens, True) for happens in FOUND_BY_A_LOOK + KNOWN_BEFORE],
)
def test_another_pod_on_the_same_shares_is_a_new_generation_and_waits_for_the_last_ones_process(
    world: World, happens: Callable[[World], None], observed: bool
) -> None:
    old = world.grant("b", BIG)
    admitted(world, old, "uid-1")
    runs(world, old, "uid-1")
    if observed:
        world.keeper.observe()
    happens(world)
    new = world.grant("b", BIG)
    assert new.key != old.key
    assert new.after == (old.key,)
    assert new.key not in world.specs.files
    assert "pid 42" in str(world.keeper.report.held_back[new.key])
    world.mpsd.on_gpu.clear()
    world.keeper.attach()
    assert new.key in world.specs.files


def test_shares_that_overlap_are_told_apart_the_same(world: World) -> None:
    units = [device_id(uuid(0), n) for n in range(3)]
    old = world.grant("u", *units[:2])
    admitted(world, old, "uid-1")
    world.keeper.observe()
    runs(world, old, "uid-1")
    deleted_by_force(world)
    new = world.grant("u", *units[1:])
    assert new.after == (old.key,)
    assert new.key not in world.specs.files


def test_a_pod_of_the_same_name_is_another_one_and_status_names_each(world: World) -> None:
    old = world.grant("b", BIG)
    admitted(world, old, "uid-1")
    world.keeper.observe()
    runs(world, old, "uid-1")
    deleted_by_force(world)
    new = world.grant("b", BIG)
    admitted(world, new, "uid-2")
    world.keeper.observe()
    shown = {a.key: a for a in world.picture().allocations}
    assert (shown[old.key].state, shown[old.key].pod_uids) == ("leaving", ("uid-1",))
    assert (shown[new.key].state, shown[new.key].pod, shown[new.key].pod_uids) == ("waiting", "web-0", ("uid-2",))


def test_a_share_waits_for_a_process_that_holds_no_memory_of_the_gpu_yet(world: World) -> None:
    old = world.grant("b", BIG)
    admitted(world, old, "uid-1")
    world.keeper.observe()
    world.processes = {"uid-1": [PodProcess(7, "c", old.key, "python")]}
    deleted_by_force(world)
    new = world.grant("b", BIG)
    assert "pid 7" in str(world.keeper.report.held_back[new.key])
    (world.root / "pods" / "uid-1").rmdir()  # the kubelet has ended and cleaned it up
    world.keeper.attach()
    assert new.key in world.specs.files


def test_whom_a_share_waits_for_is_still_known_after_a_restart(world: World) -> None:
    units = [device_id(uuid(0), n) for n in range(3)]
    old = world.grant("u", *units[:2])
    admitted(world, old, "uid-1")
    world.keeper.observe()
    runs(world, old, "uid-1")
    deleted_by_force(world)
    new = world.grant("u", *units[1:])
    admitted(world, new, "uid-2", pod="other")
    world.restart()
    assert new.key not in world.specs.files
    assert "pid 42" in str(world.keeper.report.held_back[new.key])


def test_a_pod_that_no_look_caught_is_known_by_its_process(world: World) -> None:
    """It was admitted, started and deleted by force between two looks, or its kubelet's checkpoint was lost."""
    old = world.grant("b", BIG)
    assert old.key in world.specs.files
    world.processes = {"uid-1": [PodProcess(7, "c", old.key, "python")]}
    new = world.grant("b", BIG)
    assert (new.key != old.key, new.after) == (True, (old.key,))
    assert new.key not in world.specs.files
    assert "pid 7" in str(world.keeper.report.held_back[new.key])


def test_an_idle_process_of_the_last_owner_is_waited_for_after_a_restart_too(world: World) -> None:
    """Which pods had the shares is known no more; what their processes were started with is."""
    old = world.grant("b", BIG)
    admitted(world, old, "uid-1")
    world.keeper.observe()
    world.processes = {"uid-1": [PodProcess(7, "c", old.key, "python")]}
    deleted_by_force(world)
    new = world.grant("b", BIG)
    its_entry_is_rewritten(world)
    admitted(world, new, "uid-2", pod="other")
    world.restart()
    assert new.key not in world.specs.files
    world.pass_time(ABSENT_S + 100)
    assert "pid 7" in str(world.keeper.report.release_blocked[old.key])
    world.processes = {}
    world.keeper.attach()
    assert new.key in world.specs.files


@pytest.mark.parametrize("name", ["python", "pause"])
def test_no_process_of_the_last_owner_hides_behind_its_name(world: World, name: str) -> None:
    old = world.grant("b", BIG)
    admitted(world, old, "uid-1")
    world.keeper.observe()
    world.processes = {"uid-1": [PodProcess(6, "p", None, "pause"), PodProcess(7, "c", old.key, name)]}
    deleted_by_force(world)
    new = world.grant("b", BIG)
    assert str(world.keeper.report.held_back[new.key]).startswith("pid 7 of")


@pytest.mark.parametrize("looked", [True, False])
def test_containers_of_a_pod_in_admission_share_what_its_init_container_has(world: World, looked: bool) -> None:
    """Its directory is made after admission, and PodResources has no plain init containers."""
    init = world.grant("b", BIG)
    entry = world.checkpoint(init, "uid-1") | {"ContainerName": "i", "AllocResp": answer_with(init.key)}
    world.write_checkpoint([entry])
    if looked:
        world.now_s += 5
        world.keeper.observe()
    assert world.broker.allocate(init.resource, init.device_ids, world.keeper.recheck) == init
    units = [device_id(uuid(1), n) for n in range(2)]
    small = world.grant("u", *units[:1])
    assert world.grant("u", *units).after == ()
    assert small.key in world.specs.files


def test_an_init_container_keeps_its_file_even_where_its_pods_next_container_was_taken_for_another_pods(
    world: World,
) -> None:
    """A pod that was there before the kubelet lost its checkpoint is admitted anew, and its directory is there."""
    init = world.grant("b", BIG)
    enter(world, init, "uid-1", "i")
    world.keeper.observe()
    app = world.grant("b", BIG)
    assert app.key != init.key
    admitted(world, app, "uid-1")
    world.pass_time(ABSENT_S + 30)
    assert set(world.specs.files) == {init.key, app.key}
    assert len(world.broker.allocations()) == 2


def test_the_kubelet_is_looked_at_only_where_the_shares_may_be_another_pods(world: World) -> None:
    looks: list[int] = []
    world.kubelet.on_list = lambda: looks.append(1)
    first = world.broker.allocate("gpufrac.dev/b", [BIG], world.keeper.recheck)
    assert world.broker.allocate("gpufrac.dev/b", [BIG], world.keeper.recheck) == first, "before it could start"
    world.grant("a", device_id(uuid(1), 0))
    assert looks == []
    world.grant("b", BIG)
    assert looks == [1]


def test_a_gpu_whose_clients_are_all_taken_still_gives_a_share_on(world: World) -> None:
    """The new pod waits for the last one's end: they are never there side by side."""
    world.broker.apply_config(config(resource("tiny", fixed(1)), mps=MpsConfig(client_limit=3)))
    world.broker.publish()
    held = [world.grant("tiny", device_id(uuid(0), n)) for n in range(3)]
    for n, allocation in enumerate(held):
        admitted(world, allocation, f"uid-{n}", pod=f"p{n}")
    world.keeper.observe()
    runs(world, held[0], "uid-0")
    world.kubelet.containers.pop(("ns", "p0", "c"))
    new = world.grant("tiny", *held[0].device_ids)
    assert new.after == (held[0].key,)
    assert isinstance(world.broker.allocate("gpufrac.dev/tiny", [device_id(uuid(0), 3)], world.keeper.recheck), Refusal)
