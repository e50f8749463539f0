"""Again and again: what happens once in a while must leave nothing behind, and nobody else may notice."""

import difflib
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pprint import pformat

import pytest

from mpsd.common import processes
from mpsd.config.model import GIB
from mpsd.daemon import process
from mpsd.daemon.paths import DaemonDirs
from mpsd.gpu.model import Mode
from mpsd.host import survival
from mpsd.host.place import HostPlace
from mpsd.localapi.snapshot import Desired, GpuStatus
from mpsd.sim.switches import set_switch
from tests.descriptors import descriptors
from tests.desired import allocation
from tests.e2e.mpsdnode import DRIVERS, ROOT, end, first_line, is_ready, mpsd_node, saved_state
from tests.faults.mpsd.node import POLICY, Node, opened, pid_of, quick
from tests.waiting import WAIT_S, until

__all__ = ["quick"]
pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.parametrize("protocol", [2, 3])]

CALM = replace(POLICY, probe_interval_s=1000.0, quit_s=2.0, backoff_min_s=0.01, backoff_max_s=0.01)
"""Between two blows nothing goes on."""


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def quiet(node: Node) -> dict[str, object]:
    """What is left once nothing is under way: no call of the simulated driver either, which opens files there."""
    deadline_s = time.monotonic() + WAIT_S
    while is_busy(node) or (now := left(node)) != left(node) or is_busy(node):
        assert time.monotonic() < deadline_s, (children(), names(), kinds())
        threading.Event().wait(0.01)
    return now


def is_busy(node: Node) -> bool:
    lane = re.compile(r"(mps|driver)-\d+|state")
    calls = any(target.startswith(f"{node.simulation}/") for target in kinds())
    return bool(children()) or any(map(lane.fullmatch, names())) or calls or not are_followed(node)


def until_same(node: Node, before: dict[str, object]) -> None:
    """Threads and servers that have told their result may still be on their way out, or in."""
    deadline_s = time.monotonic() + WAIT_S
    while (now := left(node)) != before:
        if time.monotonic() >= deadline_s:
            lines = difflib.ndiff(pformat(before).split("\n"), pformat(now).split("\n"))
            pytest.fail("\n".join(line for line in lines if not line.startswith(" ")))
        threading.Event().wait(0.01)


def all_of(root: Path, kind: Callable[[int], bool]) -> set[str]:
    """Files of a kind below a directory."""
    paths = (os.path.join(base, name) for base, names, files in os.walk(root) for name in (*names, *files))
    return {path for path in paths if kind(os.lstat(path).st_mode)}


def seen_of(node: Node, kind: Callable[[int], bool]) -> set[str]:
    """The same without what is the simulated driver's own: who is killed while he writes there leaves half a file."""
    return {path for path in all_of(node.root, kind) if not path.startswith(node.simulation)}


def children() -> set[int]:
    """Of this process and all its threads, zombies too."""
    found = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    return {pid for pid in found if processes.parent(pid) == os.getpid()}


def kinds() -> Counter[str]:
    """What our descriptors are, without the numbers of pipes and sockets."""
    return Counter(re.sub(r"\[\d+\]", "", target) for target in descriptors().values())


def are_followed(node: Node) -> bool:
    """Whether every log is open; a server of protocol 3 is started with its daemon, and may come after that."""
    logs = {f"{node.dirs_of(uuid).log}/control.log" for uuid in node.uuids}
    logs |= {node.dirs_of(uuid).server_log for uuid in node.uuids if node.protocol == 3}
    return logs <= kinds().keys()


def left(node: Node) -> dict[str, object]:
    """All that could pile up, without PIDs."""
    return {
        "descriptors": sorted(kinds().items()),
        "threads": threading.active_count(),
        "children": children(),
        "processes": [len(node.mps_pids(uuid)) for uuid in node.uuids],
        "files": sorted(seen_of(node, lambda mode: not stat.S_ISDIR(mode))),
        "directories": sorted(seen_of(node, stat.S_ISDIR)),
    }


class Apart(HostPlace):
    """With cgroups that no other test has, though its GPUs have the same names."""

    def launch(
        self, name: str, dirs: DaemonDirs, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        return super().launch(f"{os.getpid()}-{name}", dirs, arguments, environment)

    def leave(self, name: str) -> None:
        super().leave(f"{os.getpid()}-{name}")


def place() -> tuple[HostPlace | None, Sequence[str]]:
    """Cgroups of their own for the daemons, where this machine allows it."""
    found = survival.probe(lambda arguments: process.run(arguments, {}, b"", WAIT_S, 4096), init=os.getpid())
    return (Apart(found), found.places) if found.ok else (None, ())


def cgroups_of(places: Sequence[str], node: Node) -> list[bool]:
    return [os.path.exists(f"{place}/{os.getpid()}-{uuid}") for place in places for uuid in node.uuids]


def test_a_hundred_starts_and_stops_leave_nothing(short_tmp: Path, protocol: int) -> None:
    """Half of them in order, half by SIGKILL; under both protocols 200."""
    where, places = place()
    with opened(Node(short_tmp, protocol, gpus=4, policy=CALM, place=where)) as node:
        node.guarded = False
        node.start()
        node.until_ready()
        first, seen = quiet(node), set[int]()
        for cycle in range(25):
            pids = {gpu.info.uuid: pid_of(gpu) for gpu in node.supervisor.snapshot.gpus}
            seen.update(pids.values())
            for uuid, pid in pids.items():
                if cycle % 2:
                    os.kill(pid, signal.SIGKILL)
                else:
                    node.supervisor.replace(uuid, "for the test", now=True)
            node.mark()
            node.until_all(lambda s, pids=pids: all(another(gpu, pids) for gpu in s.gpus))  # type: ignore[misc]
        assert len(seen) == 100
        until_same(node, first)
        assert all(cgroups_of(places, node))
        node.stop()
        assert [node.mps_pids(uuid) for uuid in node.uuids] == [set()] * 4
        # Stable directories keep the names of their sockets: the next daemon's come in their place.
        assert {path for path in all_of(node.root, stat.S_ISSOCK) if ".ns/" not in path} == set()
        assert not any(cgroups_of(places, node))


def another(gpu: GpuStatus, pids: dict[str, int]) -> bool:
    """Whether the daemon is ready and not the one of before."""
    return is_ready(gpu) and pid_of(gpu) != pids[gpu.info.uuid]


def test_fifty_kills_of_a_daemon_leave_the_clients_of_other_gpus_alone(short_tmp: Path, protocol: int) -> None:
    """Each snapshot must show their daemons ready and the same: see `Node`. Under both protocols together 50."""
    with opened(Node(short_tmp, protocol, gpus=3, policy=replace(CALM, probe_interval_s=1.0))) as node:
        set_switch(node.simulation, "server-after-daemon-death", "stay")
        node.start()
        node.until_ready()
        node.bind(*(node.share(gpu=gpu, key=f"k{gpu}") for gpu in range(3)))
        node.until_all(lambda s: all(gpu.mode is Mode.SM_SHARING for gpu in s.gpus))
        held = [node.hold(gpu=gpu) for gpu in (1, 2)]
        for kill in range(25):
            victim = node.cuda("--allocate", "1Gi", "--hold")
            assert first_line(victim) == str(GIB)
            node.mark()
            os.kill(pid_of(node.gpu), signal.SIGKILL)
            node.until(lambda gpu, kill=kill: is_ready(gpu) and gpu.daemon.restarts == kill + 1)  # type: ignore[misc]
            assert victim.wait(WAIT_S) == 1
        assert node.is_untouched()
        assert [node.driver.used_bytes(node.uuids[gpu], held[gpu - 1].pid) for gpu in (1, 2)] == [GIB, GIB]
        for gpu in (1, 2):
            assert first_line(node.cuda("--allocate", "7Gi", gpu=gpu)) == str(7 * GIB)
            assert first_line(node.cuda("--allocate", "9Gi", gpu=gpu)) == "CUDA_ERROR_OUT_OF_MEMORY"
        assert set(node.others) == set(node.uuids[1:])


def test_ten_kills_of_mpsd_itself_go_unnoticed_and_cleanup_leaves_the_node_as_found(
    short_tmp: Path, protocol: int
) -> None:
    with mpsd_node(short_tmp, gpus=2, driver=DRIVERS[protocol]) as node:
        mpsd = node.start()
        uuids = [gpu.info.uuid for gpu in node.until_ready().gpus]
        node.driver.set_compute_mode(uuids[1], "PROHIBITED")
        shares = [
            allocation(uuid, resource="gpufrac.dev/gpu", limit_bytes=8 * GIB, key=f"k{n}")
            for n, uuid in enumerate(uuids)
        ]
        node.apply(Desired(allocations=tuple(shares)))
        before = node.until(lambda s: all(gpu.mode is Mode.SM_SHARING for gpu in s.gpus))
        held = [
            node.cuda(gpu, "--allocate", "1Gi", "--hold", GPUFRAC_ALLOCATION=f"k{gpu.info.index}")
            for gpu in before.gpus
        ]
        assert [first_line(program) for program in held] == [str(GIB)] * 2
        for _ in range(10):
            mpsd.kill()
            mpsd.wait()
            mpsd = node.start()
            after = node.until(lambda s: [*map(is_as_ever, s.gpus)] == [True, True], before)
            assert [pid_of(gpu) for gpu in after.gpus] == [pid_of(gpu) for gpu in before.gpus]
            before = after
        assert [program.poll() for program in held] == [None, None]
        exclusive = "EXCLUSIVE_PROCESS" if protocol == 2 else "DEFAULT"
        assert [node.driver.compute_mode(uuid) for uuid in uuids] == [exclusive] * 2
        for program in held:
            end(program)
        command = [
            sys.executable,
            "-m",
            "deviceplugin.cli.main",
            "mpsd",
            "cleanup",
            "--yes",
            "--run-root",
            node.run_root,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert node.mps_processes() == []
        assert [node.driver.compute_mode(uuid) for uuid in uuids] == ["DEFAULT", "PROHIBITED"]
        assert (saved_state(node)["daemons"], saved_state(node)["compute_modes"]) == ({}, {})
        until(lambda: os.listdir(f"{node.run_root}/mps") == [], "the directories of daemons are removed")


def is_as_ever(gpu: GpuStatus) -> bool:
    keys = [client.allocation_key for client in gpu.clients]
    return is_ready(gpu) and gpu.mode is Mode.SM_SHARING and keys == [f"k{gpu.info.index}"]
