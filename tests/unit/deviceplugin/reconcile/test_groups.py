"""Groups of GPUs, and namespaces of MPS protocol 3."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.grants import lastknown
from deviceplugin.kubelet.refusals import Refusals
from deviceplugin.kubelet.servicer import DevicePlugin
from deviceplugin.plan.allocation import Allocation, Refusal
from mpsd.config.model import CdiConfig, Delivery, Enforcement
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.plan import namespace_of
from mpsd.events.teller import SILENT
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuClient
from tests.builders import CANNOT, config, fixed, reported, resource, snapshot, units, uuid
from tests.mpspaths import mount_directory
from tests.world import World

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
    service = DevicePlugin("gpufrac.dev/pair", world.broker, world.keeper.recheck, Refusals(SILENT))
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
