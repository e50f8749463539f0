"""Real children: small shell scripts and Python snippets."""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsd.common.errors import ProtocolError, TransientError
from mpsd.config.model import MpsConfig
from mpsd.daemon import process
from mpsd.daemon.adopt import DaemonIdentity, ProcessIdentity
from mpsd.daemon.exits import ExitWatcher
from mpsd.daemon.paths import DaemonDirs, daemon_dirs
from tests.waiting import WAIT_S

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def sh(script: str, text: bytes = b"", timeout_s: float = 10.0, max_bytes: int = 1000) -> process.Completed:
    return process.run(["sh", "-c", script], ENVIRONMENT, text, timeout_s, max_bytes)


@contextmanager
def child(environment: dict[str, str] | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that ends when its stdin does, in a group of its own, known to run its program."""
    arguments = [sys.executable, "-ISc", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def family(environment: dict[str, str]) -> Iterator[tuple[int, int]]:
    """A process and a child of it that has the same environment; their PIDs."""
    code = "import os, sys; r, w = os.pipe(); pid = os.fork(); pid or (os.close(w), os.read(r, 1), os._exit(0)); "
    code += "print(pid, flush=True); sys.stdin.read(); os.close(w); os.waitpid(pid, 0)"
    arguments = [sys.executable, "-ISc", code]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        parent.stdin.close()


def identity_of(pid: int, start_time: int | None = None) -> DaemonIdentity:
    found = process.candidate(pid)
    assert found is not None
    return DaemonIdentity(
        boot_id="boot",
        pid=pid,
        start_time=found.start_time if start_time is None else start_time,
        process_group=found.process_group,
        pipe_directory="/pipe",
    )


def test_run_gives_both_streams_and_the_status() -> None:
    done = sh("cat; echo oops >&2; exit 3", b"hello\n")
    assert (done.returncode, done.output) == (3, b"hello\noops\n")


def test_run_gives_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G")
    assert b"CUDA" not in sh("env").output


def test_run_ends_the_whole_group_when_it_is_late() -> None:
    with pytest.raises(TransientError, match=r"cannot get an answer to 'get_server_list' within 0.2 s"):
        sh("sleep 1000 & sleep 1000", b"get_server_list\n", timeout_s=0.2)


def test_a_child_that_closes_its_output_and_stays_is_late_too() -> None:
    with pytest.raises(TransientError, match=r"within 0\.2 s"):
        sh("exec >&- 2>&-; exec sleep 1000", timeout_s=0.2)


def test_run_bounds_what_it_takes() -> None:
    with pytest.raises(ProtocolError, match="cannot take a reply of more than 1000 bytes"):
        sh("while :; do echo too much; done")


def test_a_child_that_does_not_read_is_no_error() -> None:
    assert sh("exec <&-; echo no", b"x\n").output == b"no\n"


def test_a_missing_binary_says_what_to_do() -> None:
    with pytest.raises(TransientError, match=r"cannot run /no/such: No such file or directory: is the driver's MPS"):
        process.run(["/no/such"], ENVIRONMENT, b"", 1.0, 10)


@pytest.fixture
def dirs(short_tmp: Path) -> DaemonDirs:
    dirs = daemon_dirs(MpsConfig(run_root=f"{short_tmp}/run", log_root=f"{short_tmp}/log"), "GPU-1")
    os.makedirs(dirs.pipe)
    os.makedirs(dirs.log)
    return dirs


def binary(short_tmp: Path, script: str) -> str:
    path = short_tmp / "control"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_start_that_fails_tells_what_the_binary_said(short_tmp: Path, dirs: DaemonDirs) -> None:
    path = binary(short_tmp, 'echo "An instance of this daemon is already running"; exit 1')
    with pytest.raises(TransientError, match=r"exit 1: An instance of this daemon is already running"):
        process.start([path, "-d"], ENVIRONMENT, dirs, 5.0)


def test_a_start_is_explained_by_who_knows_its_exit_status(short_tmp: Path, dirs: DaemonDirs) -> None:
    def explain(returncode: int, output: str) -> str:
        return f"the launcher said {output.strip()}" if returncode == 97 else ""

    for status, text in ((97, "the launcher said oops"), (1, "exit 1: oops")):
        with pytest.raises(TransientError, match=f"cannot start the MPS control daemon: {text}"):
            process.start([binary(short_tmp, f"echo oops; exit {status}")], ENVIRONMENT, dirs, 5.0, explain)


def test_start_passes_flags_and_environment_only(short_tmp: Path, dirs: DaemonDirs) -> None:
    path = binary(short_tmp, f'echo "$@" >{short_tmp}/args; env >{short_tmp}/env')
    process.start([path, "-d", "-m"], {"PATH": "/usr/bin:/bin", "A": "b"}, dirs, 5.0)
    assert (short_tmp / "args").read_text() == "-d -m\n"
    names = {line.partition("=")[0] for line in (short_tmp / "env").read_text().splitlines()}
    assert names <= {"PATH", "A", "PWD", "SHLVL", "_", "OLDPWD"}


def test_a_start_that_hangs_is_ended(short_tmp: Path, dirs: DaemonDirs) -> None:
    with pytest.raises(TransientError, match=r"not up within 0\.2 s"):
        process.start([binary(short_tmp, "sleep 1000")], {}, dirs, 0.2)


@pytest.mark.parametrize(
    ("text", "pid"), [(b"12\n", 12), (b"12", 12), (b"", None), (b"-1", None), (b"x", None), (b"0", None), (None, None)]
)
def test_pid_file(dirs: DaemonDirs, text: bytes | None, pid: int | None) -> None:
    if text is not None:
        Path(dirs.pid_file).write_bytes(text)
    assert process.read_pid_file(dirs) == pid


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: os.symlink("/proc/self/stat", path)])
def test_a_pid_file_that_is_no_file_names_nobody(dirs: DaemonDirs, plant: Callable[[str], None]) -> None:
    plant(dirs.pid_file)
    assert process.read_pid_file(dirs) is None


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: os.symlink("/dev/full", path)])
def test_what_lies_where_the_start_writes_is_replaced(
    short_tmp: Path, dirs: DaemonDirs, plant: Callable[[str], None]
) -> None:
    plant(dirs.start_output)
    with pytest.raises(TransientError, match=r"exit 3: oops"):
        process.start([binary(short_tmp, "echo oops; exit 3")], ENVIRONMENT, dirs, 5.0)


def test_a_started_daemon_is_found_by_its_environment(dirs: DaemonDirs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PID_FILE_S", 0.0)
    with pytest.raises(TransientError, match="names no process"):
        process.find_started("GPU-1", dirs, "boot")
    with child({"CUDA_MPS_PIPE_DIRECTORY": "/other"}) as other:
        Path(dirs.pid_file).write_text(str(other.pid))
        with pytest.raises(TransientError, match=f"names pid {other.pid}, which is no daemon of this directory"):
            process.find_started("GPU-1", dirs, "boot")
    with child({"CUDA_MPS_PIPE_DIRECTORY": dirs.pipe}) as daemon:
        Path(dirs.pid_file).write_text(str(daemon.pid))
        identity = process.find_started("GPU-1", dirs, "boot")
        assert (identity.pid, identity.process_group, identity.boot_id) == (daemon.pid, daemon.pid, "boot")
        assert process.is_alive(identity)


def test_a_started_daemon_without_a_pid_file_is_the_parent_of_its_servers(dirs: DaemonDirs) -> None:
    ours = {"GPUFRAC_DAEMON": "GPU-1", "CUDA_MPS_PIPE_DIRECTORY": dirs.pipe, "CUDA_MPS_PROTOCOL_VERSION": "3"}
    with child({**ours, "GPUFRAC_DAEMON": "GPU-2"}), family(ours) as (daemon, server):
        assert {member.pid for member in process.members("GPU-1", dirs.pipe)} == {daemon, server}
        found = process.find_started("GPU-1", dirs, "boot")
        assert (found.pid, found.protocol) == (daemon, 3)


def test_alive_means_the_same_start_time_and_no_zombie() -> None:
    with child() as running:
        identity = identity_of(running.pid)
        assert process.is_alive(identity)
        assert not process.is_alive(identity_of(running.pid, start_time=identity.start_time - 1))
        running.kill()
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        assert not process.is_alive(identity)
        assert process.candidate(running.pid) is None
    assert not process.is_alive(identity)


def test_members_are_known_by_marker_and_directory(dirs: DaemonDirs) -> None:
    ours = {"GPUFRAC_DAEMON": "GPU-1", "CUDA_MPS_PIPE_DIRECTORY": dirs.pipe}
    with child(ours) as server, child({"CUDA_MPS_PIPE_DIRECTORY": dirs.pipe}):  # the second one is a client
        assert [member.pid for member in process.members("GPU-1", dirs.pipe)] == [server.pid]
        assert process.members("GPU-2", dirs.pipe) == []
    with child({**ours, "CUDA_MPS_PIPE_DIRECTORY": f"{dirs.pipe}/s"}) as server:
        assert [member.pid for member in process.members("GPU-1", dirs.pipe)] == [server.pid]
    with child({**ours, "CUDA_MPS_PIPE_DIRECTORY": f"{dirs.pipe}0"}):
        assert process.members("GPU-1", dirs.pipe) == []


def test_a_process_of_a_pod_is_no_member_whatever_it_says(dirs: DaemonDirs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PID_FILE_S", 0.0)
    ours = {"GPUFRAC_DAEMON": "GPU-1", "CUDA_MPS_PIPE_DIRECTORY": dirs.pipe}
    with child({**ours, "GPUFRAC_SIM_POD_UID": "uid-1"}) as tenant:
        assert process.members("GPU-1", dirs.pipe, simulated=True) == []
        assert process.find_unrecorded("GPU-1", dirs.pipe, simulated=True) is None
        Path(dirs.pid_file).write_text(str(tenant.pid))
        with pytest.raises(TransientError, match="which is no daemon of this directory"):
            process.find_started("GPU-1", dirs, "boot", simulated=True)
        assert [member.pid for member in process.members("GPU-1", dirs.pipe)] == [tenant.pid]  # not simulated: no pod


def test_kill_and_wait_ends_exactly_its_victims() -> None:
    with child() as victim, child() as reused:
        ours = process.identify(victim.pid)
        assert ours is not None
        other = ProcessIdentity(pid=reused.pid, start_time=1)
        assert process.kill_and_wait(lambda: (ours, other), 5.0) == []
        assert victim.wait(WAIT_S) == -signal.SIGKILL
        assert reused.poll() is None


def test_a_pid_that_is_used_again_between_the_look_and_the_kill_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    really, looks = process.is_alive, iter((True,))
    with child() as reused:
        gone = ProcessIdentity(pid=reused.pid, start_time=1)
        monkeypatch.setattr(process, "is_alive", lambda identity: next(looks, None) or really(identity))
        assert process.kill_and_wait(lambda: (gone,), 5.0) == []
        looks = iter((True,))
        process.signal_group(identity_of(reused.pid, start_time=1), signal.SIGTERM)
        assert reused.poll() is None


def test_a_signal_goes_to_the_group_of_the_living_daemon_only() -> None:
    with child() as running:
        process.signal_group(identity_of(running.pid, start_time=1), signal.SIGTERM)
        assert running.poll() is None
        process.signal_group(identity_of(running.pid), signal.SIGTERM)
        assert running.wait(WAIT_S) == -signal.SIGTERM


def test_a_group_is_that_of_a_living_daemon() -> None:
    with child() as daemon, child() as other:
        assert process.in_group(daemon.pid, identity_of(daemon.pid))
        assert not process.in_group(other.pid, identity_of(daemon.pid))
        assert not process.in_group(daemon.pid, identity_of(daemon.pid, start_time=1))


def test_the_watcher_tells_exits_once_and_late_comers_at_once() -> None:
    exits: queue.SimpleQueue[DaemonIdentity] = queue.SimpleQueue()
    watcher = ExitWatcher(exits.put)
    watcher.start()
    try:
        with child() as first, child() as second:
            one, two = identity_of(first.pid), identity_of(second.pid)
            watcher.watch(one)
            watcher.watch(two)
            second.kill()
            assert exits.get(timeout=WAIT_S) == two
            reused = identity_of(first.pid, start_time=1)
            watcher.watch(reused)
            assert exits.get(timeout=WAIT_S) == reused
            second.wait()
            watcher.watch(two)
            assert exits.get(timeout=WAIT_S) == two
            first.kill()
            assert exits.get(timeout=WAIT_S) == one
        assert exits.empty()
    finally:
        watcher.close()
