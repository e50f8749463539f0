"""The world made to match the broker, with every neighbour faked."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.cli.node import missing_shares
from deviceplugin.grants import lastknown
from deviceplugin.grants.holders.model import Holder
from deviceplugin.grants.holders.shares import ABSENT_S
from deviceplugin.grants.ledger import Ledger, LedgerError
from deviceplugin.grants.nodeview import DAEMON_GRACE_S
from deviceplugin.kubelet.places import KubeletPlaces
from deviceplugin.kubelet.podresources import Containers
from deviceplugin.kubelet.refusals import Refusals
from deviceplugin.kubelet.servicer import DevicePlugin
from deviceplugin.plan.ids import device_id
from deviceplugin.plan.model import Allocation, Refusal
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.reconcile.foreign import foreign_holders, reservations
from deviceplugin.reconcile.keeper import Keeper
from deviceplugin.status import metrics
from mpsd.common.processes import PodProcess
from mpsd.common.reason import Reason
from mpsd.config.model import AnnotationsConfig, CdiConfig, Delivery, Enforcement, GpuDevices, GpuSelection
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.plan import namespace_of
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, Desired, GpuClient
from tests.builders import CANNOT, config, fixed, info, reported, resource, snapshot, status, told, units, uuid
from tests.mpspaths import mount_directory
from tests.world import CONFIG, SHARE, World, answer_with


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    yield made
    made.ledger.close()


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


def hold_by_checkpoint(world: World, got: Allocation) -> None:
    world.holds((got, "uid-1"))


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


def test_a_container_without_a_record_is_adopted_under_its_key(world: World) -> None:
    import base64

    from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb

    key = "f" * 20
    answer = pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=f"gpufrac.dev/allocation=s{key}")])
    world.kubelet.containers["ns", "old", "c"] = {"gpufrac.dev/a": (SHARE,)}
    entry: dict[str, object] = {
        "PodUID": "uid-1",
        "ContainerName": "c",
        "ResourceName": "gpufrac.dev/a",
        "DeviceIDs": {"-1": [SHARE]},
        "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
    }
    world.write_checkpoint([entry])
    (world.root / "pods" / "uid-1").mkdir(exist_ok=True)
    world.keeper.observe()
    world.tell()
    world.keeper.attach()
    (adopted,) = world.broker.allocations()
    assert (adopted.key, adopted.adopted, adopted.device_ids) == (key, True, (SHARE,))
    assert set(world.specs.files) == {key}


def test_a_container_with_two_of_our_resources_is_unenforced(world: World) -> None:
    first, second = world.grant("a"), world.grant("b", device_id(uuid(0), 0))
    world.run(first)
    world.run(second)
    world.keeper.observe()
    world.keeper.check_markers()
    assert set(world.keeper.report.unenforced) == {first.key, second.key}
    assert "gpufrac.dev/a and gpufrac.dev/b" in str(world.keeper.report.unenforced[first.key])


AS_GRANTED = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8192M"}


def running(
    *markers: str | None, variables: Mapping[str, str] = AS_GRANTED, unreadable: bool = False
) -> list[PodProcess]:
    """Processes of a pod: the pause container, and one container per marker."""
    pause = PodProcess(1, "sandbox", None, "pause", unreadable=unreadable)
    return [
        pause,
        *(
            PodProcess(10 + n, f"c{n}", marker, "python3", unreadable and marker is None, variables)
            for n, marker in enumerate(markers)
        ),
    ]


def looks(world: World, seconds: float) -> set[str]:
    """The unenforced after looking for that long."""
    end_s = world.now_s + seconds
    while world.now_s < end_s:
        world.now_s += 5
        world.keeper.observe()
        world.keeper.check_markers()
    return set(world.keeper.report.unenforced)


def begun(world: World, got: Allocation) -> None:
    world.run(got)
    hold_by_checkpoint(world, got)
    (world.root / "pods" / "uid-1" / "containers" / "c").mkdir(parents=True)


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


@pytest.mark.parametrize("part", [{"delivery": Delivery.BOTH}, {"gpu_devices": GpuDevices.CDI}])
def test_a_pod_on_shares_answered_differently_now_gets_the_new_answer(world: World, part: dict[str, object]) -> None:
    world.broker.apply_config(config(resource("a", fixed(8), enforcement=Enforcement.NONE), *CONFIG.resources[1:]))
    old = world.grant()
    world.run(old)
    world.keeper.observe()
    world.kubelet.containers.clear()
    world.broker.apply_config(structs.replace(world.broker.node.config, cdi=CdiConfig(**part)))  # type: ignore[arg-type]
    if "gpu_devices" in part:
        world.broker.set_gpu_kind("nvidia.com/gpu", {})
    new = world.broker.allocate(old.resource, old.device_ids, world.keeper.recheck)
    assert isinstance(new, Allocation)
    assert new.key != old.key
    assert new.delivery is part.get("delivery", Delivery.CDI)
    assert bool(new.gpu_kind) is ("gpu_devices" in part)


def test_a_pod_on_shares_whose_size_changed_gets_the_new_size_once_the_old_pod_is_gone(world: World) -> None:
    old = world.grant()
    world.run(old)
    world.keeper.observe()
    world.broker.apply_config(config(resource("a", fixed(16)), *CONFIG.resources[1:]))
    again = world.broker.allocate(old.resource, old.device_ids, world.keeper.recheck)
    assert again == old  # its pod lives: another container of it
    world.keeper.observe()
    world.kubelet.containers.clear()
    new = world.broker.allocate(old.resource, old.device_ids, world.keeper.recheck)
    assert isinstance(new, Allocation)
    assert new.request_bytes == 16 << 30


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


def test_an_init_container_without_a_record_is_adopted_and_a_dead_pods_key_is_not_taken(world: World) -> None:
    lost = world.grant("u", device_id(uuid(0), 5))
    world.broker.release(lost.key)
    (world.root / "pods" / "uid-live").mkdir()
    entries = [world.checkpoint(lost, "uid-live"), world.checkpoint(lost, "uid-dead")]
    entries[0]["AllocResp"], entries[1]["AllocResp"] = answer_with("a" * 20), answer_with("d" * 20)
    world.write_checkpoint(entries)
    world.keeper.observe()
    assert [(a.key, a.device_ids) for a in world.broker.allocations()] == [("a" * 20, lost.device_ids)]


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


# --- whose a process is


def client(pid: int = 42, key: str | None = None, pod_uid: str = "", *, mps: bool = True) -> GpuClient:
    return GpuClient(pid=pid, allocation_key=key, pod_uid=pod_uid, mps=mps)


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


def outside(world: World, *clients: GpuClient, **changes: object) -> dict[str, str]:
    """The unenforced after one look at a GPU with these clients."""
    world.mpsd.on_gpu[uuid(0)] = clients
    first, second = reported(world.broker.node.config, world.infos, world.broker.desired())
    assert first.daemon is not None
    daemon = structs.replace(first.daemon, **changes)
    world.broker.observe_snapshot(snapshot(structs.replace(first, clients=clients, daemon=daemon), second))
    world.keeper.check_markers()
    return {key: reason.message for key, reason in world.keeper.report.unenforced.items()}


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


# --- groups, and namespaces of MPS protocol 3

GROUPED = config(
    resource("pair", fixed(20), groups=("pair0",)),
    resource("a", fixed(8)),
    resource("u", units()),
    groups=(("pair0", (0, 1)),),
)
PROTOCOL_3 = DaemonStatus(state=DaemonState.READY, protocol=3, pipe_directory="/run/mps")


@pytest.fixture
def grouped(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp, GROUPED, gpus=3)
    yield made
    made.ledger.close()


def mounted(world: World, key: str) -> str:
    (device,) = world.specs.files[key].devices
    (mount,) = device.container_edits.mounts
    return mount.host_path


def test_a_group_share_is_desired_on_all_members_and_starts_when_all_are_fit(grouped: World) -> None:
    got = grouped.grant("pair", "pair0::1")
    (wanted,) = grouped.mpsd.told[-1].allocations
    assert (wanted.group, wanted.gpus, wanted.limit_bytes, wanted.slot) == ("pair0", (uuid(0), uuid(1)), 20 << 30, 1)
    assert set(grouped.specs.files) == {got.key}
    first, second, third = reported(grouped.broker.node.config, grouped.infos, grouped.broker.desired())
    grouped.broker.observe_snapshot(snapshot(first, structs.replace(second, mode=None), third))
    grouped.keeper.attach()
    assert grouped.specs.files == {}
    assert "GPU 1: its GPU is not in sm-sharing yet" in grouped.picture().allocations[0].reason


def test_units_are_told_without_a_slot(grouped: World) -> None:
    grouped.grant("u", f"{uuid(2)}::3")
    assert [a.slot for a in grouped.mpsd.told[-1].allocations] == [None]


def test_under_protocol_3_a_container_mounts_its_namespace_only_and_only_once_it_is_there(grouped: World) -> None:
    grouped.tell(PROTOCOL_3)
    outcome = grouped.broker.allocate("gpufrac.dev/a", [f"{uuid(2)}::4"])
    assert isinstance(outcome, Allocation)
    grouped.keeper.attach()
    assert grouped.specs.files == {}, "nothing is attached yet"
    grouped.tell(PROTOCOL_3)
    grouped.keeper.attach()
    (wanted,) = grouped.broker.desired().allocations
    assert mounted(grouped, outcome.key) == f"/run/ns/{namespace_of(wanted, wanted.group).name}"


def test_a_file_follows_when_what_is_mounted_changes(grouped: World) -> None:
    got = grouped.grant("pair", "pair0::0")
    assert mounted(grouped, got.key) == "/run/mps"
    grouped.tell(PROTOCOL_3)
    grouped.keeper.attach()
    assert mounted(grouped, got.key).startswith("/run/ns/")


@pytest.mark.parametrize("pid_on", [0, 1])
def test_a_process_on_any_member_holds_a_group_share(grouped: World, pid_on: int) -> None:
    got = grouped.grant("pair", "pair0::0")
    grouped.mpsd.on_gpu[uuid(pid_on)] = (GpuClient(pid=42, allocation_key=got.key),)
    grouped.pass_time(300)
    assert grouped.broker.allocations() == [got]
    grouped.mpsd.on_gpu.clear()
    grouped.pass_time(30)
    assert grouped.broker.allocations() == []


def test_a_share_of_a_known_group_is_adopted_on_its_gpus_and_one_of_no_group_is_refused(grouped: World) -> None:
    grouped.kubelet.containers["ns", "old", "c"] = {"gpufrac.dev/pair": ("pair0::0",)}
    grouped.kubelet.containers["ns", "older", "c"] = {"gpufrac.dev/pair": ("pair9::0",)}
    grouped.keeper.observe()
    (adopted,) = grouped.broker.allocations()
    assert (adopted.device_ids, adopted.gpus, adopted.adopted) == (("pair0::0",), (uuid(0), uuid(1)), True)
    outcome = grouped.broker.adopt("gpufrac.dev/pair", ("pair9::0",), None)
    assert isinstance(outcome, Refusal)
    assert "in no group of its config" in outcome.message


def test_a_share_of_a_group_whose_gpus_cannot_be_told_is_not_adopted(grouped: World) -> None:
    grouped.broker.apply_config(structs.replace(GROUPED, groups=(("pair0", (0, 7)),)))
    outcome = grouped.broker.adopt("gpufrac.dev/pair", ("pair0::0",), None)
    assert isinstance(outcome, Refusal)
    assert "its GPU 7 is not on this node" in outcome.message


def test_records_of_versions_without_groups_are_of_their_only_gpu(world: World) -> None:
    got = world.grant()
    world.ledger.put(structs.replace(got, group="", slot=None))
    assert world.open_broker(CONFIG).allocations() == [structs.replace(got, slot=None)]


def test_a_group_reformed_by_a_reload_is_served_once_its_allocations_are_gone(grouped: World) -> None:
    got = grouped.grant("pair", "pair0::0")
    grouped.broker.apply_config(structs.replace(GROUPED, groups=(("pair0", (1, 2)),)))
    grouped.tell()
    grouped.keeper.attach()
    assert set(grouped.specs.files) == {got.key}, "what is held goes on as it was granted"
    assert isinstance(grouped.broker.allocate("gpufrac.dev/pair", ["pair0::1"]), Refusal)
    assert isinstance(grouped.broker.allocate("gpufrac.dev/a", [f"{uuid(0)}::0"]), Refusal)
    grouped.pass_time(30)
    grouped.tell()
    new = grouped.grant("pair", "pair0::1")
    assert new.gpus == (uuid(1), uuid(2))
    assert grouped.grant("a", f"{uuid(0)}::0").gpus == (uuid(0),)


@pytest.mark.parametrize("protocol", [2, 3])
def test_an_answer_names_what_will_be_mounted_before_mpsd_made_it(short_tmp: Path, protocol: int) -> None:
    """Also right after a restart, before mpsd has answered."""
    cfg = structs.replace(GROUPED, cdi=CdiConfig(delivery=Delivery.BOTH), enforcement_minimum=Enforcement.NONE)
    cfg = structs.replace(cfg, resources=tuple(structs.replace(r, enforcement=Enforcement.NONE) for r in cfg.resources))
    world = World(short_tmp, cfg, gpus=3)
    world.tell(structs.replace(PROTOCOL_3, protocol=protocol, pinned_limit_bytes=80 << 30))
    known = lastknown.without_moments(world.broker.node.gpus)
    world.broker = world.open_broker(cfg)
    world.broker.restore(known, CANNOT)
    service = DevicePlugin("gpufrac.dev/pair", world.broker, world.keeper.recheck, Refusals())
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["pair0::1"])])
    (answer,) = service.Allocate(request, context=None).container_responses  # type: ignore[arg-type]
    (mount,) = answer.mounts
    (wanted,) = world.broker.desired().allocations
    dirs = daemon_dirs(cfg.mps, "pair0")
    assert mount.container_path == "/tmp/nvidia-mps"
    assert mount.host_path == (
        dirs.pipe if protocol == 2 else mount_directory(dirs, namespace_of(wanted, wanted.group).name)
    )
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == f"{uuid(0)},{uuid(1)}"
    world.ledger.close()


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
