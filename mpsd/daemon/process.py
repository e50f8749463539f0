"""Starts, finds and ends processes of the driver. The only module of ours that starts any.

Control daemons outlive us: they are started with `-d`, in a session of their own, with no descriptor of ours. So they
are not our children; their exit is seen through a pidfd and their identity is PID + start time, never the PID alone.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpsd.common import processes
from mpsd.common.errors import ProtocolError, TransientError
from mpsd.common.log import get_logger
from mpsd.daemon import adopt, children
from mpsd.daemon.adopt import PIPE_DIRECTORY, Candidate, DaemonIdentity, ProcessIdentity
from mpsd.daemon.dirs import read_file
from mpsd.daemon.paths import DaemonDirs
from mpsd.daemon.plan import DAEMON_MARKER

log = get_logger("daemon")

PID_FILE_S = 3.0
"""How long a daemon's pid file may follow its parent's return."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Completed:
    """What a command said. Standard error is part of `output`: which stream carries errors is not documented."""

    returncode: int
    output: bytes


def run(
    arguments: Sequence[str], environment: Mapping[str, str], text: bytes, timeout_s: float, max_bytes: int
) -> Completed:
    """Runs a short command with `text` on its stdin and nothing of our environment.

    Raises:
        TransientError: it can't be run or did not end in time; then its whole process group was killed.
        ProtocolError: it said more than `max_bytes`.
    """
    deadline_s = time.monotonic() + timeout_s
    command = text.decode(errors="replace").strip() or " ".join(arguments[1:])
    pipe = subprocess.PIPE
    try:
        with children.started(
            arguments,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd="/",
            process_group=0,
        ) as child:
            return _answer(child, command, text, deadline_s, timeout_s, max_bytes)
    except OSError as error:
        raise _cannot_run(arguments[0], error) from error


def _answer(
    child: "subprocess.Popen[bytes]", command: str, text: bytes, deadline_s: float, timeout_s: float, max_bytes: int
) -> Completed:
    """What a child says until it ends; afterwards it has ended in any case."""
    try:
        output = _exchange(child, text, deadline_s, max_bytes)
        return Completed(child.wait(max(0.05, deadline_s - time.monotonic())), output)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise TransientError(f"cannot get an answer to {command!r} within {timeout_s:.3g} s") from error
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _exchange(child: "subprocess.Popen[bytes]", text: bytes, deadline_s: float, max_bytes: int) -> bytes:
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it ended without reading: its output says why
        child.stdin.write(text)  # far below a pipe's capacity: never blocks
        child.stdin.close()
    descriptor = child.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    output = bytearray()
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError
        chunk = os.read(descriptor, 8192)
        if not chunk:
            return bytes(output)
        output += chunk
        if len(output) > max_bytes:
            raise ProtocolError(f"cannot take a reply of more than {max_bytes} bytes")


Explain = Callable[[int, str], str]
"""What an exit status and the output of a start mean, empty where only the output tells."""


def no_explanation(_returncode: int, _output: str) -> str:
    """An `Explain` that knows nothing."""
    return ""


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    dirs: DaemonDirs,
    timeout_s: float,
    explain: Explain = no_explanation,
) -> None:
    """Starts a control daemon; returns once its parent says that it listens.

    Args:
        arguments: the control binary with those that put it in the background, or what becomes it.

    Raises:
        TransientError: with what the binary printed, or what `explain` makes of it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # A file, not a pipe: a pipe would break when we die, and its holder could hang the end of our pod. A new one,
        # so that it is no link, device or pipe that lies there.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(dirs.start_output)
        output = os.open(dirs.start_output, flags, 0o600)
    except OSError as error:
        raise TransientError(f"cannot write {dirs.start_output}: {error.strerror}") from error
    try:
        with children.started(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            cwd="/",
            umask=0o022,
            start_new_session=True,
        ) as child:
            try:
                returncode = child.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                raise TransientError(f"cannot start the MPS control daemon: not up within {timeout_s:g} s") from error
        if returncode != 0:
            said = os.pread(output, 2000, 0).decode(errors="replace")
            text = "; ".join(line.strip() for line in said.split("\n") if line.strip())[:300]
            why = explain(returncode, said) or f"exit {returncode}: {text or 'it said nothing'}"
            raise TransientError(f"cannot start the MPS control daemon: {why}")
    except OSError as error:
        raise _cannot_run(arguments[0], error) from error
    finally:
        os.close(output)


def find_started(name: str, dirs: DaemonDirs, boot_id: str, *, simulated: bool = False) -> DaemonIdentity:
    """The daemon that was just started in these directories, by its pid file; whether protocol 3 writes one is not
    documented, so without one by its environment.

    Raises TransientError when there is no such process.
    """
    deadline_s = time.monotonic() + PID_FILE_S
    while True:
        pid = read_pid_file(dirs)
        if pid is not None:
            found = host_candidate(pid, simulated=simulated)
        else:
            found = find_unrecorded(name, dirs.pipe, simulated=simulated)
        if found is not None and (found.environment or {}).get(PIPE_DIRECTORY) == dirs.pipe:
            return adopt.identify(found, boot_id, dirs.pipe)
        if time.monotonic() >= deadline_s:
            raise TransientError(
                f"cannot find the MPS control daemon after its start: {dirs.pid_file} names "
                + ("no process" if pid is None else f"pid {pid}, which is no daemon of this directory")
            )
        time.sleep(_POLL_S)


def find_unrecorded(name: str, pipe_directory: str, *, simulated: bool = False) -> Candidate | None:
    """The daemon of a domain by its environment only: of all that have it, servers are its children."""
    found = members(name, pipe_directory, simulated=simulated)
    pids = {member.pid for member in found}
    roots = [member for member in found if processes.parent(member.pid) not in pids]
    return candidate(min(roots, key=lambda member: member.start_time).pid) if roots else None


def read_pid_file(dirs: DaemonDirs) -> int | None:
    """The PID in the pipe directory's pid file, None when there is none."""
    try:
        text = read_file(dirs.pid_file, 32).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and 0 < int(text) < 2**31 else None


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    process_group: int
    start_time: int


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the command in parentheses and may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Stat(fields[0].decode(), int(fields[2]), int(fields[19]))


def candidate(pid: int) -> Candidate | None:
    """What is known of a living process; None when it is gone or a zombie."""
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    environment = processes.environ(pid) if _may_read(pid) else None
    return Candidate(pid, stat.start_time, stat.process_group, environment)


def host_candidate(pid: int, *, simulated: bool = False) -> Candidate | None:
    """The same, but None for a process of a pod that is not ours: a pid file may name it, and its environment is a
    tenant's word."""
    return None if processes.in_a_pod_of_others(pid, simulated=simulated) else candidate(pid)


def _may_read(pid: int) -> bool:
    try:
        os.close(os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        pass  # gone by now
    return True


def is_alive(identity: DaemonIdentity | ProcessIdentity) -> bool:
    """Whether exactly this process lives (of this boot; zombies don't)."""
    stat = _stat(identity.pid)
    return stat is not None and stat.state not in "ZX" and stat.start_time == identity.start_time


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a living process."""
    stat = _stat(pid)
    return None if stat is None else ProcessIdentity(pid=pid, start_time=stat.start_time)


def in_group(pid: int, identity: DaemonIdentity) -> bool:
    """Whether a process belongs to the process group of this living daemon."""
    stat = _stat(pid)
    return stat is not None and stat.process_group == identity.process_group and is_alive(identity)


def members(name: str, pipe_directory: str, *, simulated: bool = False) -> list[ProcessIdentity]:
    """The living daemon and servers of one domain, known by the environment that servers inherit from our daemon.

    Clients are never among them: they have the same pipe directory at most. Nobody is known by the name of an
    executable: every daemon of the node has the same one, ours and those of others.
    """
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        process = candidate(int(entry))
        environment = process.environment if process is not None else None
        if process is None or not environment or process.pid == os.getpid():
            continue
        # Below the pipe directory: what a server of protocol 3 is told there is not documented.
        pipe = f"{environment.get(PIPE_DIRECTORY, '')}/"
        ours = environment.get(DAEMON_MARKER) == name and pipe.startswith(f"{pipe_directory}/")
        if ours and not processes.in_a_pod_of_others(process.pid, simulated=simulated):
            found.append(ProcessIdentity(pid=process.pid, start_time=process.start_time))
    return found


@contextlib.contextmanager
def _held(identity: DaemonIdentity | ProcessIdentity) -> Iterator[int | None]:
    """A pidfd of exactly this process, None where it is gone. Looked at after it was opened: from then on the
    descriptor means this process and no later one of its PID."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError:
        yield None
        return
    try:
        yield descriptor if is_alive(identity) else None
    finally:
        os.close(descriptor)


def _send(identity: DaemonIdentity | ProcessIdentity, number: signal.Signals) -> None:
    """Signals exactly this process, where it lives."""
    with _held(identity) as descriptor, contextlib.suppress(ProcessLookupError, PermissionError):
        if descriptor is not None:
            signal.pidfd_send_signal(descriptor, number)


def signal_group(identity: DaemonIdentity, number: signal.Signals) -> None:
    """Signals the members of a living daemon's process group, or the daemon alone where the group is not its own."""
    if not is_alive(identity):
        return
    pids = [identity.pid]
    if identity.process_group not in (0, 1, os.getpgrp()):
        found = {int(entry): _stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
        pids = [pid for pid, stat in found.items() if stat and stat.process_group == identity.process_group]
    known = [member for pid in pids if (member := identify(pid)) is not None]
    if is_alive(identity):  # the group was the daemon's for as long as that lived
        for member in known:
            _send(member, number)


def kill_and_wait(victims: Callable[[], Sequence[ProcessIdentity | DaemonIdentity]], timeout_s: float) -> list[int]:
    """SIGKILLs what `victims` names, again and again until it names nobody or the time is over; then returns the PIDs
    that live on."""
    deadline_s = time.monotonic() + timeout_s
    while alive := [identity for identity in victims() if is_alive(identity)]:
        for identity in alive:
            _send(identity, signal.SIGKILL)
        if time.monotonic() >= deadline_s:
            return [identity.pid for identity in alive]
        for identity in alive:
            _await_exit(identity, deadline_s)
    children.reap()
    return []


def _await_exit(identity: ProcessIdentity | DaemonIdentity, deadline_s: float) -> None:
    with _held(identity) as descriptor:
        if descriptor is not None:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000)


def _cannot_run(binary: str, error: OSError) -> TransientError:
    return TransientError(
        f"cannot run {binary}: {error.strerror}: is the driver's MPS package installed, and are mps.binary and "
        "mps.driverRoot right?"
    )
