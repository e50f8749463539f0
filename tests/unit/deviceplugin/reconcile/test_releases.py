"""Allocations are let go once nobody holds them, and not before."""

from collections.abc import Callable

import pytest

from deviceplugin.cli.node import missing_shares
from deviceplugin.grants.holders.shares import ABSENT_S
from deviceplugin.grants.ledger import LedgerError
from deviceplugin.plan.allocation import Allocation, Refusal
from deviceplugin.plan.ids import device_id
from mpsd.localapi.snapshot import GpuClient
from tests.builders import uuid
from tests.unit.deviceplugin.reconcile.looking import hold_by_checkpoint
from tests.world import World


def test_release_after_the_grace_removes_file_and_record(world: World) -> None:
    got = world.grant()
    world.run(got)
    world.pass_time(5)
    world.kubelet.containers.clear()
    world.pass_time(ABSENT_S)
    assert got.key in world.specs.files
    world.pass_time(5)
    assert world.specs.files == {}
    assert world.broker.allocations() == []
    assert world.ledger.load() == ([], [])


def hold_by_process(world: World, got: Allocation) -> None:
    world.mpsd.on_gpu[uuid(0)] = (GpuClient(pid=42, allocation_key=got.key),)


def hold_by_silence_of_mpsd(world: World, got: Allocation) -> None:
    world.mpsd.down = True


def hold_by_silence_of_the_kubelet(world: World, got: Allocation) -> None:
    world.kubelet.down = True


@pytest.mark.parametrize(
    "hold", [hold_by_process, hold_by_checkpoint, hold_by_silence_of_mpsd, hold_by_silence_of_the_kubelet]
)
def test_nothing_is_released_while_something_may_still_hold_it(
    world: World, hold: Callable[[World, Allocation], None]
) -> None:
    got = world.grant()
    world.run(got)
    world.pass_time(5)
    world.kubelet.containers.clear()
    hold(world, got)
    world.pass_time(300)
    assert [a.key for a in world.broker.allocations()] == [got.key]


def test_a_stale_checkpoint_entry_holds_nothing(world: World) -> None:
    got = world.grant()
    world.write_checkpoint([world.checkpoint(got, "uid-gone")])
    world.pass_time(30)
    assert world.broker.allocations() == []


def test_the_list_is_sent_once_more_for_entries_that_only_the_checkpoint_keeps(world: World) -> None:
    got = world.grant()
    hold_by_checkpoint(world, got)
    world.broker.publish()
    before = world.broker.wait_list(got.resource, -1, 0, lambda: False)
    world.pass_time(60)
    after = world.broker.wait_list(got.resource, -1, 0, lambda: False)
    assert before is not None
    assert after is not None
    assert after.generation == before.generation + 1


def test_before_a_refusal_what_is_gone_is_let_go_at_once(world: World) -> None:
    for n in range(9):
        world.run(world.grant("a", device_id(uuid(0), n)), pod=f"p{n}")
    world.keeper.observe()
    for n in range(6):
        del world.kubelet.containers["ns", f"p{n}", "c"]
    assert world.grant("b", device_id(uuid(0), 0)).request_bytes == 40 << 30


def test_a_refusal_stays_one_when_the_kubelet_still_holds_everything(world: World) -> None:
    for n in range(9):
        world.run(world.grant("a", device_id(uuid(0), n)), pod=f"p{n}")
    outcome = world.broker.allocate("gpufrac.dev/b", [device_id(uuid(0), 0)], world.keeper.recheck)
    assert isinstance(outcome, Refusal)


def test_a_pod_in_admission_on_reused_shares_does_not_lose_them_to_its_next_container(world: World) -> None:
    """The kubelet shows a pod only once it is admitted; its first container was answered from a live record."""
    first = world.grant("b", device_id(uuid(0), 0))
    world.run(first, pod="old")
    world.keeper.observe()
    world.kubelet.containers.clear()  # the old pod is gone, unobserved; a new one gets its share
    new = world.broker.allocate(first.resource, first.device_ids, world.keeper.recheck)
    assert isinstance(new, Allocation)
    assert new.key != first.key
    outcome = world.broker.allocate("gpufrac.dev/b", [device_id(uuid(0), 1)], world.keeper.recheck)
    assert isinstance(outcome, Refusal)
    assert new.key in {a.key for a in world.broker.allocations()}


def test_an_allocation_given_out_again_during_the_look_at_its_processes_is_not_released(world: World) -> None:
    got = world.grant()
    world.pass_time(ABSENT_S)
    again: list[object] = []
    world.mpsd.on_clients = lambda: again.append(world.broker.allocate(got.resource, got.device_ids))
    world.now_s += 5
    world.keeper.observe()
    world.keeper.collect()
    assert again == [got]
    assert world.broker.allocations() == [got]


def test_a_list_that_was_on_its_way_when_shares_were_given_out_again_says_nothing_of_them(world: World) -> None:
    got = world.grant()
    world.run(got, pod="old")
    world.keeper.observe()
    world.keeper.observe()
    again: list[Allocation | Refusal] = []
    world.kubelet.on_list = lambda: again.append(world.broker.allocate(got.resource, got.device_ids))
    world.keeper.observe()  # still shows the old pod
    (new,) = again
    world.kubelet.on_list = lambda: None
    world.kubelet.containers.clear()  # the new one is in admission
    assert isinstance(world.broker.allocate("gpufrac.dev/b", [device_id(uuid(0), 0)], world.keeper.recheck), Allocation)
    outcome = world.broker.allocate("gpufrac.dev/b", [device_id(uuid(0), 1)], world.keeper.recheck)
    assert isinstance(outcome, Refusal)
    assert new in world.broker.allocations()


def test_the_first_list_of_a_new_kubelet_releases_nothing(world: World) -> None:
    pods = [world.grant("a", device_id(uuid(0), n)) for n in range(9)]
    for n, pod in enumerate(pods):
        world.run(pod, pod=f"p{n}")
    world.keeper.observe()
    world.start_kubelet()
    world.kubelet.containers.clear()  # it has read no pod yet
    outcome = world.broker.allocate("gpufrac.dev/b", [device_id(uuid(0), 0)], world.keeper.recheck)
    assert isinstance(outcome, Refusal)
    world.pass_time(50)
    assert len(world.broker.allocations()) == 9


def test_a_list_during_which_the_kubelet_changed_is_not_believed(world: World) -> None:
    got = world.grant()
    world.run(got)
    world.keeper.observe()
    world.kubelet.containers.clear()
    world.kubelet.on_list = world.start_kubelet
    assert not world.keeper.observe()
    assert world.broker.releasable(pressed=True) == []


def test_a_hung_gpu_blocks_the_release_of_its_own_allocations_only(world: World) -> None:
    stuck, free = world.grant("a", device_id(uuid(0), 0)), world.grant("a", device_id(uuid(1), 0))
    world.mpsd.hung[uuid(0)] = "driver call hangs"
    world.pass_time(ABSENT_S + 10)
    assert world.broker.allocations() == [stuck]
    assert "driver call hangs" in str(world.keeper.report.release_blocked[stuck.key])
    assert free.key not in world.specs.files


def test_a_share_waits_for_the_process_of_its_last_owner(world: World) -> None:
    old = world.grant("b", device_id(uuid(0), 0))
    world.run(old, pod="forced")
    world.keeper.observe()
    world.kubelet.containers.clear()
    world.keeper.observe()
    world.mpsd.on_gpu[uuid(0)] = (GpuClient(pid=42, allocation_key=old.key),)
    new = world.grant("b", device_id(uuid(0), 0))
    assert new.key != old.key
    assert new.key not in world.specs.files
    assert "pid 42" in str(world.keeper.report.held_back[new.key])
    world.mpsd.on_gpu.clear()
    world.keeper.attach()
    assert new.key in world.specs.files


def test_a_record_that_cannot_be_removed_stops_nobody_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = world.grant("a", device_id(uuid(0), 0)), world.grant("a", device_id(uuid(0), 1))
    remove = world.ledger.remove

    def fail(key: str) -> None:
        if key == first.key:
            raise LedgerError("cannot remove the record: read-only file system")
        remove(key)

    monkeypatch.setattr(world.ledger, "remove", fail)
    world.pass_time(ABSENT_S + 10)
    assert world.broker.allocations() == [first]
    assert "read-only" in str(world.keeper.report.release_blocked[first.key])
    assert second.key not in world.specs.files


def test_shares_that_the_kubelet_holds_for_pods_that_are_gone_are_shown_as_waiting(world: World) -> None:
    got = world.grant()
    world.run(got)
    world.holds((got, "uid-1"))
    world.keeper.observe()
    resource_before = world.picture().resources[0]
    world.kubelet.containers.clear()
    (world.root / "pods" / "uid-1").rmdir()  # its entry in the checkpoint stays
    world.pass_time(ABSENT_S + 5)
    assert world.broker.allocations() == []
    lists = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    shown = world.picture().resources[0]
    assert (shown.held, shown.waiting, shown.free) == (0, 1, resource_before.free)
    assert missing_shares(shown, {}).startswith("1 share waiting: the kubelet's checkpoint holds them")
    world.pass_time(5)
    again = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    assert lists is not None
    assert again is not None
    assert again.generation == lists.generation  # the list was sent again once, which has the kubelet let go
    world.write_checkpoint([])
    world.keeper.observe()
    shown = world.picture().resources[0]
    assert (shown.waiting, shown.free) == (0, resource_before.free + 1)
