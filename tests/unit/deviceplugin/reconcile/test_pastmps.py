"""Processes that use a GPU past the MPS daemon that should hold them."""

from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.plan.ids import device_id
from deviceplugin.status import metrics
from mpsd.config.model import CdiConfig, Delivery, Enforcement
from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import DaemonState
from tests.builders import config, fixed, reported, resource, snapshot, told, uuid
from tests.unit.deviceplugin.reconcile.looking import client, outside
from tests.world import World


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_process_past_mps_is_told_within_a_look(world: World, protocol: int) -> None:
    got, other = world.grant(), world.grant("a", device_id(uuid(0), 1))
    for n, allocation in enumerate((got, other)):
        world.run(allocation, pod=f"p{n}")
    world.holds((got, "uid-1"), (other, "uid-2"))
    world.keeper.observe()
    assert outside(world, client(7, got.key, "uid-1"), client(8, other.key, "uid-2"), protocol=protocol) == {}
    for key, uid, blamed in (
        (got.key, "uid-1", got),
        (None, "uid-1", got),
        (got.key, "uid-2", other),  # whatever it says of itself
        (got.key, "", got),
    ):
        found = outside(world, client(9, key, uid, mps=False), protocol=protocol)
        assert set(found) == {blamed.key}, (key, uid)
        assert "pid 9 uses its GPU past MPS" in found[blamed.key]
    shown = {a.key: a.enforcement for a in world.picture().allocations}
    assert shown == {got.key: "none", other.key: "cooperative"}
    assert "gpufrac_allocations_unenforced 1" in metrics.render(world.picture()).splitlines()
    assert any("past MPS" in line for line in told(None, world.picture()))
    assert outside(world) == {}


def test_nobody_is_called_past_mps_while_its_clients_cannot_be_told(world: World) -> None:
    got = world.grant()
    plain = client(9, got.key, mps=False)
    for changes in ({"state": DaemonState.STARTING}, {"state": DaemonState.DRAINING}, {"wedged": True}):
        assert outside(world, plain, **changes) == {}
    world.mpsd.hung[uuid(0)] = "the query hangs"
    assert outside(world, plain) == {}
    del world.mpsd.hung[uuid(0)]
    assert set(outside(world, plain)) == {got.key}
    world.mpsd.hung[uuid(0)] = "the query hangs"
    assert set(outside(world, plain)) == {got.key}, "what was told stays until it is known better"


def test_what_mpsd_knew_before_its_daemon_answered_accuses_nobody(world: World) -> None:
    got = world.grant()
    first, second = reported(world.broker.node.config, world.infos, world.broker.desired())
    stale = structs.replace(first, clients=(client(9, got.key, mps=False),))
    world.broker.observe_snapshot(snapshot(stale, second))
    world.mpsd.on_gpu[uuid(0)] = (client(9, got.key),)
    world.keeper.check_markers()
    assert world.keeper.report.unenforced == {}


def test_time_slicing_and_unenforced_shares_need_no_mps(short_tmp: Path) -> None:
    none = Enforcement.NONE
    cfg = config(resource("t", fixed(8), Mode.TIME_SLICING), resource("a", fixed(8), enforcement=none))
    cfg = structs.replace(cfg, enforcement_minimum=none, cdi=CdiConfig(delivery=Delivery.BOTH))
    world = World(short_tmp, cfg)
    for name, index in (("t", 0), ("a", 1)):
        world.mpsd.on_gpu[uuid(index)] = (client(9, world.grant(name, device_id(uuid(index), 0)).key, mps=False),)
    gpus = reported(cfg, world.infos, world.broker.desired())
    clients = [structs.replace(gpu, clients=world.mpsd.on_gpu[gpu.info.uuid]) for gpu in gpus]
    world.broker.observe_snapshot(snapshot(*clients))
    world.keeper.check_markers()
    assert world.keeper.report.unenforced == {}
    world.ledger.close()
