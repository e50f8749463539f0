"""The world made to match the broker, with every neighbour faked."""

from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.grants import lastknown
from deviceplugin.grants.ledger import Ledger, LedgerError
from deviceplugin.grants.nodeview import DAEMON_GRACE_S
from deviceplugin.kubelet.places import KubeletPlaces
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.ids import device_id
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.reconcile.keeper import Keeper
from mpsd.common.reason import Reason
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, Desired
from tests.builders import info, snapshot, status, uuid
from tests.world import CONFIG, SHARE, World


def test_a_grant_becomes_a_file_and_a_desired_mode(world: World) -> None:
    got = world.grant()
    assert set(world.specs.files) == {got.key}
    assert [(a.key, a.gpus, a.mode, a.slot) for a in world.mpsd.told[-1].allocations] == [
        (got.key, (uuid(0),), Mode.SM_SHARING, 0)
    ]


@pytest.mark.parametrize(
    "daemon",
    [
        DaemonStatus(state=DaemonState.BACKOFF, reason="it died"),
        DaemonStatus(state=DaemonState.CONFIGURING, pipe_directory="/run/mps"),
        DaemonStatus(state=DaemonState.READY, pipe_directory="/run/mps"),
        DaemonStatus(state=DaemonState.READY, pipe_directory="/run/mps", pinned_limit_bytes=1),
        DaemonStatus(state=DaemonState.READY, pinned_limit_bytes=2**40),
    ],
)
def test_the_file_is_withdrawn_when_the_daemon_is_not_verified(world: World, daemon: DaemonStatus) -> None:
    got = world.grant()
    world.tell(daemon)
    world.keeper.attach()
    assert world.specs.files == {}
    world.tell()
    world.keeper.attach()
    assert set(world.specs.files) == {got.key}


def test_the_file_is_withdrawn_when_mpsd_is_gone_and_shares_turn_unhealthy_only_after_the_grace(world: World) -> None:
    world.grant()
    world.run(world.broker.allocations()[0])
    world.broker.publish()
    world.broker.observe_snapshot(None)
    world.keeper.attach()
    world.broker.publish()
    assert world.specs.files == {}
    published = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    assert published is not None
    assert published.advertisement.healthy == 18
    world.now_s += DAEMON_GRACE_S
    world.broker.publish()
    published = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    assert published is not None
    assert [d.id for d in published.advertisement.devices if d.healthy] == [SHARE]


def test_a_new_plugin_leaves_files_alone_until_mpsd_spoke_or_a_while_passed(short_tmp: Path) -> None:
    world = World(short_tmp)
    key = world.grant().key
    world.ledger.close()
    world.ledger = Ledger(str(short_tmp / "ledger"))
    world.broker = world.open_broker(CONFIG)
    keeper = Keeper(
        world.broker,
        world.specs,
        world.mpsd,
        world.kubelet,
        places=KubeletPlaces(str(world.root), str(world.root / "device-plugins")),
        kubelet_socket=world.kubelet_socket,
        pod_processes=dict,
        marked_cgroups=lambda root: (),
        monotonic=lambda: world.now_s,
    )
    keeper.attach()
    assert set(world.specs.files) == {key}
    world.now_s += 6
    keeper.attach()
    assert world.specs.files == {}
    world.ledger.close()


def test_a_full_disk_is_reported_and_healed(world: World) -> None:
    world.specs.full = True
    got = world.grant()
    assert "No space left" in str(world.keeper.report.spec_error)
    world.specs.full = False
    world.keeper.attach()
    assert set(world.specs.files) == {got.key}
    assert world.keeper.report.spec_error is None


def test_a_file_that_someone_removed_comes_back(world: World) -> None:
    got = world.grant()
    world.specs.files.clear()
    world.now_s += 31
    world.keeper.attach()
    assert set(world.specs.files) == {got.key}


def test_a_plugin_that_has_not_heard_of_a_gpu_does_not_have_it_unbound(short_tmp: Path) -> None:
    world = World(short_tmp)
    world.grant()
    world.ledger.close()
    world.ledger = Ledger(str(short_tmp / "ledger"))
    (wanted,) = world.open_broker(CONFIG).desired().allocations
    assert (wanted.gpus, wanted.mode, wanted.limit_bytes) == ((uuid(0),), Mode.SM_SHARING, 8 << 30)
    world.ledger.close()


def test_a_gpu_that_mpsd_has_not_read_yet_is_not_lost_and_one_that_is_gone_is(world: World) -> None:
    got = world.grant("a", device_id(uuid(1), 0))
    for reason, healthy in (("GPU 1: info() has not returned", True), ("", False)):
        world.broker.observe_snapshot(structs.replace(snapshot(status(info(0))), reason=reason))
        world.broker.publish()
        published = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
        assert published is not None
        assert {d.id: d.healthy for d in published.advertisement.devices}[got.device_ids[0]] is healthy


def test_missing_device_nodes_wait_and_do_not_refuse(world: World) -> None:
    world.broker.set_gpu_kind("nvidia.com/gpu", {uuid(0): Reason(OfferCode.NO_CDI_DEVICE, "no spec names it")})
    outcome = world.broker.allocate("gpufrac.dev/a", [SHARE], world.keeper.recheck)
    assert isinstance(outcome, Allocation)


def test_files_are_withdrawn_before_mpsd_is_asked_for_anything(world: World) -> None:
    world.grant()
    seen: list[int] = []
    world.mpsd.apply = lambda desired: seen.append(len(world.specs.files))  # type: ignore[method-assign]
    world.broker.observe_snapshot(None)
    world.keeper.mpsd_returned()
    world.keeper.attach()
    assert seen == [0]


def test_a_new_mpsd_that_came_up_during_a_push_is_told_again(world: World) -> None:
    told: list[Desired] = []

    def apply(desired: Desired) -> None:
        told.append(desired)
        if len(told) == 1:
            world.keeper.mpsd_returned()

    world.mpsd.apply = apply  # type: ignore[method-assign]
    world.grant()
    world.keeper.attach()
    assert len(told) == 2


def test_what_was_wrong_before_a_reboot_is_not_believed_after_it(short_tmp: Path) -> None:
    path = str(short_tmp / "plugin" / "node.json")
    lost = status(info(0), health=GpuHealth.LOST, reason="off the bus")
    lastknown.store(path, lastknown.LastKnown(gpus=(lost, status(info(1))), boot_id="one"))
    assert [gpu.health for gpu in lastknown.load(path, "one").gpus] == [GpuHealth.LOST, GpuHealth.OK]
    assert [gpu.health for gpu in lastknown.load(path, "two").gpus] == [GpuHealth.UNRESPONSIVE, GpuHealth.OK]


def test_while_nothing_can_be_recorded_nothing_is_offered_and_it_heals(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refused pod would only be followed by the next."""
    got = world.grant()
    world.run(got)
    world.keeper.observe()

    def full(*_: object) -> None:
        raise LedgerError("cannot record the allocation: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(world.ledger, "put", full)
        patch.setattr(world.ledger, "probe", full)
        with pytest.raises(LedgerError):
            world.broker.allocate("gpufrac.dev/a", [device_id(uuid(0), 1)])
        world.broker.probe_ledger()
        world.broker.publish()
        published = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
        assert published is not None
        assert [d.id for d in published.advertisement.devices if d.healthy] == [SHARE], "held ones stay Healthy"
        assert "No space left" in str(published.advertisement.reason)
        assert "No space left" in str(world.broker.ledger_error)
    world.broker.probe_ledger()
    world.broker.publish()
    published = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    assert published is not None
    assert published.advertisement.healthy == 18
    assert world.broker.ledger_error is None
