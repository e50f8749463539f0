"""Whose a process is, whatever it says of itself."""

import pytest

from deviceplugin.grants.holders.shares import ABSENT_S
from deviceplugin.plan.ids import device_id
from deviceplugin.status import metrics
from tests.builders import told, uuid
from tests.unit.deviceplugin.reconcile.looking import client, outside
from tests.world import World, answer_with


@pytest.mark.parametrize(
    ("claims", "pod_uid", "holds"),
    [
        (True, "uid-1", True),
        (True, "", True),  # its pod is not known
        (False, "uid-1", True),  # it cleaned its environment
        (True, "uid-2", False),
        (False, "uid-2", False),
        (False, "", False),
    ],
)
def test_only_processes_of_its_own_pod_hold_a_share(world: World, claims: bool, pod_uid: str, holds: bool) -> None:
    """Anybody can call himself the owner of an allocation, for ever."""
    got = world.grant("b", device_id(uuid(0), 0))
    world.run(got)
    world.holds((got, "uid-1"))
    world.keeper.observe()
    world.kubelet.containers.clear()
    world.write_checkpoint([])
    world.mpsd.on_gpu[uuid(0)] = (client(key=got.key if claims else None, pod_uid=pod_uid),)
    world.keeper.observe()
    new = world.grant("b", device_id(uuid(0), 0))
    assert new.key != got.key
    assert (new.key in world.keeper.report.held_back) is holds
    world.run(new)
    world.pass_time(ABSENT_S + 10)
    assert (got.key in {a.key for a in world.broker.allocations()}) is holds


def test_while_its_pod_is_not_known_a_process_is_believed(world: World) -> None:
    got = world.grant()
    world.mpsd.on_gpu[uuid(0)] = (client(key=got.key, pod_uid="uid-2"),)
    world.pass_time(300)
    assert world.broker.allocations() == [got]


def test_an_entry_of_an_earlier_pod_on_the_same_shares_says_nothing_of_the_new_one(world: World) -> None:
    got = world.grant()
    world.run(got)
    world.holds((got, "uid-old"))
    entry = world.checkpoint(got, "uid-old")
    world.write_checkpoint([entry | {"AllocResp": answer_with("d" * 20)}])
    world.keeper.observe()
    assert world.broker.pods() == {got.key: ()}


def test_every_pod_that_held_it_is_remembered_until_it_is_released(world: World) -> None:
    got = world.grant()
    world.run(got)
    for uid in ("uid-1", "uid-2"):  # the second took it over, unobserved
        world.holds((got, uid))
        world.keeper.observe()
    assert world.broker.pods() == {got.key: ("uid-1", "uid-2")}
    world.kubelet.containers.clear()
    world.write_checkpoint([])
    world.keeper.observe()
    (left,) = world.picture().allocations
    assert (left.state, left.pod, left.pod_uids) == ("leaving", "pod", ("uid-1", "uid-2"))
    world.pass_time(ABSENT_S + 10)
    assert world.broker.pods() == {}


def test_who_claims_the_allocation_of_another_pod_is_named(world: World) -> None:
    got, other = world.grant(), world.grant("a", device_id(uuid(0), 1))
    world.run(got, pod="victim")
    world.run(other, pod="tenant")
    world.holds((got, "uid-1"), (other, "uid-2"))
    world.keeper.observe()
    outside(world, client(7, got.key, "uid-2"), client(8, got.key, "uid-3"), client(9, got.key, "uid-1"))
    by_key = {a.key: a.claimed_by for a in world.picture().allocations}
    assert by_key == {got.key: "pid 7 of pod ns/tenant, pid 8 of pod uid-3", other.key: ""}
    (line,) = [line for line in told(None, world.picture()) if "claims" in line]
    assert line == "pid 7 of pod ns/tenant, pid 8 of pod uid-3 claims the allocation of pod ns/victim/c"
    assert "gpufrac_allocations_claimed 1" in metrics.render(world.picture()).splitlines()
