"""Hard limits of running containers: read back, set again, cleared, and what is said meanwhile."""

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from deviceplugin.grants import lastknown
from deviceplugin.grants.holders.shares import ABSENT_S
from deviceplugin.plan.allocation import Allocation
from deviceplugin.reconcile.hardlimits import VERIFIED_S, MarkedCgroup, marked_cgroups
from deviceplugin.status import metrics
from deviceplugin.status.model import AllocationStatus
from mpsd.config.model import GIB, CdiConfig, Delivery, Enforcement
from mpsd.gpu.model import MIB, Mode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, HardLimits, LimitReading
from tests.builders import CAN, CANNOT, HOOKED_KIND, PLAIN_KIND, config, fixed, resource, uuid
from tests.world import World

CONFIG = config(
    resource("a", fixed(8)),
    resource("burst", fixed(8, 16)),
    resource("t", fixed(8), Mode.TIME_SLICING),
    resource("pair", fixed(8), groups=("pair0",)),
    groups=(("pair0", (1, 2)),),
)
PROTOCOL_3 = DaemonStatus(state=DaemonState.READY, protocol=3, pipe_directory="/run/mps")
HOOKED = frozenset({HOOKED_KIND})


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp, CONFIG, gpus=3)
    made.daemon, made.hard_limits = PROTOCOL_3, CAN
    made.broker.set_gpu_kind(HOOKED_KIND, {}, HOOKED)
    made.tell()
    yield made
    made.ledger.close()


def started(world: World, name: str = "a", share: str = f"{uuid(0)}::0") -> tuple[Allocation, str]:
    """An allocation whose container runs with its limits in force, as seen by the first look, and its cgroup."""
    got = world.grant(name, share)
    world.run(got, pod=got.key)
    cgroup = world.start(got)
    look(world)
    return got, cgroup


def look(world: World, after_s: float = 5.0) -> AllocationStatus:
    world.now_s += after_s
    world.keeper.observe()
    world.keeper.check_limits()
    return world.picture().allocations[0]


def change(world: World, cgroup: str, **changes: object) -> None:
    world.mpsd.limits_of = {
        place: structs.replace(limit, **changes) if place[1] == cgroup else limit
        for place, limit in world.mpsd.limits_of.items()
    }


def test_a_limit_that_is_in_force_is_left_alone_and_not_read_all_the_time(world: World) -> None:
    got, cgroup = started(world)
    assert got.enforcement is Enforcement.HARD
    change(world, cgroup, hard_bytes=None)
    assert look(world).reason == "", "it was verified a moment ago"
    assert "not in force" in look(world, VERIFIED_S).reason
    assert world.keeper.report.limit_drifts == 1


class Drift(NamedTuple):
    changes: dict[str, object]
    said: str


DRIFTS = {
    "forgotten": Drift({"hard_bytes": None, "soft_bytes": 0}, "reads back no limit instead of 16Gi"),
    "higher": Drift({"hard_bytes": 20 * GIB}, "reads back a limit of 20Gi instead of 16Gi"),
    "one-mib-higher": Drift({"hard_bytes": 16 * GIB + MIB}, "is not in force"),
    "soft": Drift({"soft_bytes": 0}, "its guaranteed memory is not in force: reads back 0"),
}


@pytest.mark.parametrize("drift", DRIFTS.values(), ids=DRIFTS)
def test_a_limit_that_is_not_in_force_is_reported_and_set_again_until_it_reads_right(
    world: World, drift: Drift
) -> None:
    _, cgroup = started(world, "burst")
    change(world, cgroup, **drift.changes)
    said = look(world, VERIFIED_S)
    assert drift.said in said.reason
    assert said.reason.endswith("set again")
    assert (said.enforcement, said.granted_enforcement) == ("cooperative", "hard")
    exposition = metrics.render(world.picture()).splitlines()
    assert "gpufrac_allocations_unenforced 1" in exposition
    assert "gpufrac_limit_drift_total 1" in exposition
    assert world.mpsd.set_calls == [(uuid(0), cgroup, 8 * GIB, 16 * GIB)]
    healed = look(world)
    assert (healed.reason, healed.enforcement) == ("", "hard")
    assert len(world.mpsd.set_calls) == 1
    assert world.keeper.report.limit_drifts == 1


def test_a_lower_limit_than_ours_is_reported_and_never_raised(world: World) -> None:
    """A container of a pod with several allocations can claim to hold the larger one."""
    _, cgroup = started(world, "burst")
    change(world, cgroup, hard_bytes=4 * GIB, soft_bytes=4 * GIB)
    for after_s in (VERIFIED_S, VERIFIED_S):
        said = look(world, after_s)
        assert "reads back a limit of 4Gi instead of 16Gi: left as it is" in said.reason
        assert said.enforcement == "cooperative", "it is not the one that was granted"
    assert world.mpsd.set_calls == []
    change(world, cgroup, hard_bytes=16 * GIB, soft_bytes=8 * GIB)
    assert look(world, VERIFIED_S).reason == ""


def test_one_that_cannot_be_set_is_tried_with_every_look_and_counted_once(world: World) -> None:
    got = world.grant("t", f"{uuid(0)}::0")
    cgroup = world.start(got)
    change(world, cgroup, hard_bytes=None)
    world.mpsd.refuses = "permission denied"
    for tries in (1, 2, 3):
        said = look(world)
        assert said.reason.endswith("it can't be set again: permission denied")
        assert said.enforcement == "none", "time-slicing has nothing else"
        assert (len(world.mpsd.set_calls), world.keeper.report.limit_drifts) == (tries, 1)


def test_while_mpsd_is_silent_nothing_is_concluded(world: World) -> None:
    _, cgroup = started(world)
    change(world, cgroup, hard_bytes=None)
    world.mpsd.down = True
    said = look(world, VERIFIED_S)
    assert "whether its memory limit is in force can't be told: cannot reach mpsd" in said.reason
    assert said.enforcement == "hard"
    world.mpsd.down = False
    assert "not in force" in look(world).reason
    world.mpsd.down = True
    said = look(world)
    assert "not in force" in said.reason, "what was seen stands"
    assert said.enforcement == "cooperative"


def test_a_restarted_container_is_looked_at_at_once(world: World) -> None:
    got, old = started(world)
    world.end(old)
    assert look(world).reason == ""
    new = world.start(got)
    change(world, new, hard_bytes=None)
    assert "not in force" in look(world).reason


def test_every_gpu_of_a_group_is_read(world: World) -> None:
    _, cgroup = started(world, "pair", "pair0::0")
    world.mpsd.limits_of[uuid(2), cgroup] = LimitReading()
    assert "not in force" in look(world, VERIFIED_S).reason
    assert [gpu for gpu, *_ in world.mpsd.set_calls] == [uuid(2)]


def test_another_pod_with_our_marker_gets_nobodys_limits(world: World) -> None:
    got, _ = started(world)
    world.write_checkpoint([world.checkpoint(got, "uid-1")])
    (world.root / "pods" / "uid-1").mkdir()
    liar = world.cgroups / "liar"
    liar.mkdir()
    world.mpsd.limits_of[uuid(0), str(liar)] = LimitReading(hard_bytes=GIB)
    world.marked.append(MarkedCgroup(got.key, "uid-2", str(liar)))
    look(world, VERIFIED_S)
    assert world.mpsd.set_calls == []


def test_a_cgroup_stays_its_first_owners(world: World) -> None:
    _, cgroup = started(world, "burst")
    other, _ = started(world, "a", f"{uuid(0)}::1")
    world.marked = [MarkedCgroup(other.key, "uid-1", cgroup)]
    look(world, VERIFIED_S)
    assert world.mpsd.set_calls == []


def test_what_is_guaranteed_is_given_back_before_the_cgroup_goes(world: World) -> None:
    got, cgroup = started(world, "burst")
    world.kubelet.containers.clear()
    look(world)
    look(world)
    assert world.mpsd.set_calls == [(uuid(0), cgroup, 0, 16 * GIB)], "its ceiling stays while it may live"
    world.pass_time(ABSENT_S + 5)
    assert got.key not in {a.key for a in world.broker.allocations()}
    world.keeper.check_limits()
    assert world.mpsd.set_calls[1:] == [(uuid(0), cgroup, 0, 16 * GIB)], "and goes with the cgroup"
    world.keeper.check_limits()
    assert len(world.mpsd.set_calls) == 2


def test_where_nothing_is_guaranteed_nothing_is_given_back(short_tmp: Path) -> None:
    world = World(short_tmp, config(resource("a", fixed(8))))
    world.daemon, world.hard_limits = PROTOCOL_3, CAN
    world.broker.set_gpu_kind(HOOKED_KIND, {}, HOOKED)
    world.tell()
    got, cgroup = started(world)
    assert world.mpsd.limits_of[uuid(0), cgroup] == LimitReading(soft_bytes=0, hard_bytes=8 * GIB)
    world.broker.release(got.key)
    world.keeper.check_limits()
    assert world.mpsd.set_calls == []
    world.ledger.close()


# --- the node's ability


def test_a_driver_goes_up_and_down_between_restarts(short_tmp: Path) -> None:
    """580 -> 615 -> 580: each grant has the level of its day, what starts has that of today, and it is said."""
    world = World(short_tmp, CONFIG, gpus=3)
    world.broker.set_gpu_kind(HOOKED_KIND, {}, HOOKED)
    early = world.grant("a", f"{uuid(0)}::0")
    assert early.enforcement is Enforcement.COOPERATIVE
    resources = {r.name: r for r in world.picture().resources}
    assert "driver 580" in resources["gpufrac.dev/a"].not_hard
    world.daemon, world.hard_limits = PROTOCOL_3, CAN
    world.tell()
    late = world.grant("a", f"{uuid(0)}::1")
    assert late.enforcement is Enforcement.HARD
    assert world.picture().hard_limits.startswith("yes (dmem")
    assert early in world.broker.allocations()
    world.daemon, world.hard_limits = None, CANNOT
    world.tell()
    world.keeper.attach()
    env = world.specs.files[late.key].devices[0].container_edits.env
    assert "GPUFRAC_ENFORCEMENT=cooperative" in env
    said = next(a for a in world.picture().allocations if a.key == late.key)
    assert (said.granted_enforcement, said.enforcement, said.state) == ("hard", "cooperative", "attached")
    assert "granted hard, and is cooperative on this node by now: driver 580" in said.reason
    assert world.grant("a", f"{uuid(0)}::2").enforcement is Enforcement.COOPERATIVE
    world.ledger.close()


def test_who_may_borrow_does_not_start_on_a_node_that_lost_hard_limits(world: World) -> None:
    got, _ = started(world, "burst")
    world.hard_limits = CANNOT
    world.tell()
    world.keeper.attach()
    assert world.specs.files == {}
    assert got in world.broker.allocations(), "it is held"
    assert "this node has lost them" in world.picture().allocations[0].reason


def test_without_the_hook_nothing_hard_starts_and_new_grants_are_of_a_lesser_level(world: World) -> None:
    got, _ = started(world)
    world.broker.set_gpu_kind(PLAIN_KIND, {}, frozenset())
    world.keeper.attach()
    assert world.specs.files == {}
    said = look(world, VERIFIED_S)
    assert "has no hook" in said.reason
    assert said.enforcement == "hard", "the limit of the one that runs reads right"
    assert world.grant("a", f"{uuid(0)}::3").enforcement is Enforcement.COOPERATIVE
    world.broker.set_gpu_kind(HOOKED_KIND, {}, HOOKED)
    world.keeper.attach()
    assert got.key in world.specs.files


def test_a_young_mpsd_that_has_not_looked_yet_changes_nothing(world: World) -> None:
    got, _ = started(world)
    world.hard_limits = HardLimits()
    world.tell()
    world.keeper.attach()
    assert set(world.specs.files) == {got.key}
    assert world.grant("a", f"{uuid(0)}::3").enforcement is Enforcement.HARD


def test_a_plugin_that_starts_again_knows_what_the_last_one_knew(short_tmp: Path) -> None:
    strict = config(resource("hard", fixed(8), enforcement=Enforcement.HARD))
    world = World(short_tmp, strict)
    fresh = world.open_broker(strict)
    path = str(short_tmp / "plugin" / "node.json")
    known = lastknown.LastKnown(
        gpus=lastknown.without_moments(world.broker.node.gpus), gpu_kind=HOOKED_KIND, hooked=HOOKED, hard_limits=CAN
    )
    lastknown.store(path, known)
    read = lastknown.load(path, "another boot")
    fresh.set_gpu_kind(read.gpu_kind, {}, read.hooked)
    fresh.restore(read.gpus, read.hard_limits)
    published = fresh.wait_list("gpufrac.dev/hard", -1, 0, lambda: False)
    assert published is not None
    assert published.advertisement.healthy == 18
    world.ledger.close()


# --- in words


@pytest.mark.parametrize(
    ("used_gib", "said"),
    [(0, "may borrow 8Gi while it is free"), (8, "may borrow 8Gi"), (11, "borrows 3Gi: its processes are evicted")],
)
def test_who_borrows_and_who_would_be_evicted(world: World, used_gib: int, said: str) -> None:
    _, cgroup = started(world, "burst")
    change(world, cgroup, used_bytes=used_gib * GIB)
    shown = look(world, VERIFIED_S)
    assert shown.used_bytes == used_gib * GIB
    assert shown.burst.startswith(said)
    assert shown.reason == ""
    other, _ = started(world, "a", f"{uuid(0)}::1")
    assert next(a for a in world.picture().allocations if a.key == other.key).burst == ""


def test_limits_that_add_up_to_more_than_there_is_are_information(world: World) -> None:
    for slot in range(6):
        world.grant("burst", f"{uuid(0)}::{slot}")
    gpu = world.picture().gpus[0]
    assert (gpu.granted_bytes, gpu.limit_bytes, gpu.usable_bytes) == (48 * GIB, 96 * GIB, 79 * GIB)
    assert gpu.reason == ""


# --- whose cgroup


def process(proc: Path, pid: int, cgroup: str, marker: str = "", started: int = 0) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
    (proc / str(pid) / "environ").write_text(f"GPUFRAC_ALLOCATION={marker}\0" if marker else "")
    (proc / str(pid) / "comm").write_text("python3\n")
    fields = ["S", "1", *["0"] * 17, str(started)]
    (proc / str(pid) / "stat").write_text(f"{pid} (python3) {' '.join(fields)}\n")


def test_a_container_is_what_its_oldest_process_says(short_tmp: Path) -> None:
    pod = "/kubepods.slice/kubepods-podaaaa_bbbb.slice"
    one, two = f"{pod}/cri-containerd-1.scope", f"{pod}/cri-containerd-2.scope"
    process(short_tmp, 30, one, "k1", started=5)
    process(short_tmp, 20, f"{one}/made/below", "k9", started=9)
    process(short_tmp, 40, two, "k2", started=7)
    process(short_tmp, 41, f"{pod}/cri-containerd-3.scope", started=1)
    process(short_tmp, 42, "/system.slice/x.service", "k3", started=1)
    assert sorted(marked_cgroups("/cg/", proc=str(short_tmp))) == [
        ("k1", "aaaa-bbbb", f"/cg{one}"),
        ("k2", "aaaa-bbbb", f"/cg{two}"),
    ]


def all_in(directory: str) -> Callable[[Iterable[int]], Mapping[int, str]]:
    """A simulated tree in which every process is in one cgroup."""
    return lambda pids: dict.fromkeys(pids, directory)


def test_on_a_simulated_node_the_simulated_tree_tells_the_cgroup() -> None:
    env = {"GPUFRAC_ALLOCATION": "k1", "GPUFRAC_SIM_POD_UID": f"uid-{os.getpid()}", "GPUFRAC_SIM_CONTAINER": "c"}
    with subprocess.Popen(["/bin/cat"], env=env, stdin=subprocess.PIPE) as child:
        try:
            for directory, found in (("/sim/x", ["/sim/x"]), ("/sim", [])):
                got = marked_cgroups("/sim", simulated=all_in(directory))
                assert [m.directory for m in got if m.pod_uid == env["GPUFRAC_SIM_POD_UID"]] == found
        finally:
            child.kill()


def test_what_could_not_be_given_back_is_tried_again(world: World) -> None:
    _, cgroup = started(world, "burst")
    world.kubelet.containers.clear()
    world.mpsd.refuses = "cannot set limits now"
    look(world)
    look(world)
    world.mpsd.refuses = ""
    before = len(world.mpsd.set_calls)
    look(world)
    assert world.mpsd.set_calls[before:] == [(uuid(0), cgroup, 0, 16 * GIB)]


# -- containers whose limit is not their cgroup's


@pytest.mark.parametrize(("limits", "written"), [(CAN, True), (CANNOT, False)])
def test_the_hook_is_told_our_limits_at_every_level_where_they_can_be_set(
    short_tmp: Path, limits: HardLimits, written: bool
) -> None:
    loose = resource("a", fixed(8), enforcement=Enforcement.NONE)
    made = World(short_tmp, config(loose, cdi=CdiConfig(delivery=Delivery.BOTH)))
    made.hard_limits = limits
    made.tell()
    got = made.grant()
    assert got.enforcement is Enforcement.NONE
    env = made.specs.files[got.key].devices[0].container_edits.env
    told = {"NVIDIA_GPU_MEMORY_REQUEST=0", "NVIDIA_GPU_MEMORY_LIMIT=8192"}
    assert (told <= set(env)) is written
    assert any(entry.startswith("NVIDIA_GPU_MEMORY") for entry in env) is written
    made.hard_limits = CANNOT if written else CAN
    made.tell()
    made.keeper.attach()
    env = made.specs.files[got.key].devices[0].container_edits.env
    assert (told <= set(env)) is not written, "a file follows what the node can"
    made.ledger.close()


def test_a_guarantee_that_was_not_granted_is_taken_back_and_told(short_tmp: Path) -> None:
    loose = resource("a", fixed(8), enforcement=Enforcement.NONE)
    made = World(short_tmp, config(loose, cdi=CdiConfig(delivery=Delivery.BOTH)))
    made.hard_limits = CAN
    made.tell()
    got, cgroup = started(made)
    assert look(made).reason == ""
    taken = LimitReading(soft_bytes=70 * GIB, hard_bytes=70 * GIB)
    made.mpsd.limits_of[uuid(0), cgroup] = taken
    shown = look(made, VERIFIED_S)
    assert made.mpsd.set_calls == [(uuid(0), cgroup, 0, 70 * GIB)]
    assert "70Gi of GPU memory was guaranteed" in shown.reason
    assert "taken back" in shown.reason
    assert (shown.key, shown.enforcement) == (got.key, "none")
    assert look(made).reason == ""
    made.mpsd.refuses = "no permission"
    made.mpsd.limits_of[uuid(0), cgroup] = taken
    assert "it can't be taken back: no permission" in look(made, VERIFIED_S).reason
    made.ledger.close()
