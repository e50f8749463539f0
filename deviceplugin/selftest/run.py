"""Tries it: CUDA processes of our own, in a cgroup of our own where a limit is on the cgroup."""

import contextlib
import errno
import os
import select
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from deviceplugin.selftest.plan import LIMIT_BYTES, GpuFacts, Trial, Way
from mpsd.common.errors import GpufracError
from mpsd.common.quantity import parse_bytes
from mpsd.daemon.namespaces import SERVER
from mpsd.gpu.model import MIB
from mpsd.localapi.snapshot import DaemonState, GpuStatus, LimitReading

NAME = "gpufrac-selftest"
ANSWER_S = 20.0
"""A first CUDA context takes seconds."""
END_S = 5.0

_WAIT = ("/bin/sh", "-c", 'read -r _ && exec "$@"', "sh")
"""Runs its arguments once a line is on its stdin: it is in its cgroup by then."""
_KEPT = ("PATH", "LD_LIBRARY_PATH")
"""Without these a program may not start at all."""


class Limits(Protocol):
    """Reads and sets memory limits through mpsd; raises GpufracError."""

    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading: ...


class Cgroup(Protocol):
    """A cgroup for us alone; every call raises OSError."""

    directory: str

    def make(self) -> None:
        """One that is there already stays."""

    def add(self, pid: int) -> None: ...
    def remove(self) -> None:
        """None is fine; OSError EBUSY while processes end."""


class RealCgroup:
    """Directly below the root of cgroup v2, where the root's controllers reach."""

    def __init__(self, root: str) -> None:
        self.directory = f"{root}/{NAME}"

    def make(self) -> None:
        os.makedirs(self.directory, exist_ok=True)

    def add(self, pid: int) -> None:
        with open(f"{self.directory}/cgroup.procs", "w", encoding="ascii") as file:
            file.write(str(pid))

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.directory)


class Client:
    """A CUDA program that is run as `PROGRAM --allocate BYTES --hold`: it prints the bytes granted, or the name of the
    CUDA error."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = tuple(command), dict(environment)

    @contextlib.contextmanager
    def holding(self, size_bytes: int, environment: Mapping[str, str], cgroup: Cgroup | None) -> Iterator[str]:
        """What it says to an allocation, which it keeps meanwhile. Raises GpufracError where it can't be run."""
        arguments = (*_WAIT, *self._command, "--allocate", str(size_bytes), "--hold")
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**self._environment, **environment},
                text=True,
                start_new_session=True,  # Ctrl-C is for us: we end it in order
            )
        except OSError as error:
            raise GpufracError(f"cannot run {arguments[0]}: {error.strerror}") from error
        with process:
            try:
                if cgroup is not None:
                    cgroup.add(process.pid)
                yield _answer(process)
            finally:
                _end(process)

    @staticmethod
    def environment(trial: Trial, uuid: str) -> dict[str, str]:
        """What the process gets of us (pure)."""
        chosen = {"CUDA_VISIBLE_DEVICES": uuid}
        if trial.bare:
            return chosen
        chosen["CUDA_MPS_PIPE_DIRECTORY"] = trial.pipe_directory
        if trial.client_limit:
            chosen["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={LIMIT_BYTES // MIB}M"
        return chosen


def real_client(command: Sequence[str]) -> Client:
    """A CUDA client by this command, with the few variables of ours that it needs."""
    return Client(command, {name: os.environ[name] for name in _KEPT if name in os.environ})


def _answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n")
        process.stdin.flush()
    if not select.select([process.stdout], [], [], ANSWER_S)[0]:
        return f"no answer in {ANSWER_S:g} s"
    return process.stdout.readline().strip() or f"it ended without a word, exit status {process.wait(END_S)}"


def _end(process: "subprocess.Popen[str]") -> None:
    """By its own end first: an MPS client should not be killed."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def attempt(client: Client, cgroup: Cgroup, uuid: str, trial: Trial) -> str:
    """What the process of a trial says, or why it says nothing."""
    inside, environment = cgroup if trial.in_cgroup else None, Client.environment(trial, uuid)
    try:
        with contextlib.ExitStack() as stack:
            if trial.holding_bytes:
                first = stack.enter_context(client.holding(trial.holding_bytes, environment, inside))
                if first != str(trial.holding_bytes):
                    return f"the first process alone: {first}"
            return stack.enter_context(client.holding(trial.size_bytes, environment, inside))
    except OSError as error:
        return f"cannot put the process into {cgroup.directory}: {error.strerror or error}"


@contextlib.contextmanager
def limited(mpsd: Limits, cgroup: Cgroup, gpu: GpuFacts) -> Iterator[str]:
    """The cgroup with its hard limit on a GPU, as long as it lasts; gives what is in the way of that, or nothing."""
    try:
        cgroup.make()
    except OSError as error:
        yield f"cannot make {cgroup.directory}: {error.strerror}: run as root on the host"
        return
    try:
        try:
            mpsd.set_limits(gpu.uuid, cgroup.directory, 0, LIMIT_BYTES)
            trouble = ""
        except GpufracError as error:
            trouble = str(error)
        yield trouble
    finally:
        clean_up(mpsd, cgroup, [gpu.uuid])


def clean_up(mpsd: Limits, cgroup: Cgroup, uuids: Sequence[str]) -> None:
    """Takes limits and cgroup away, also what an earlier run left. Raises GpufracError when that can't be done."""
    if not os.path.isdir(cgroup.directory):
        return
    for uuid in uuids:
        with contextlib.suppress(GpufracError):  # none is there, or it goes with its cgroup
            mpsd.set_limits(uuid, cgroup.directory, 0, None)
    deadline_s, pause = time.monotonic() + END_S, threading.Event()
    while True:
        try:
            cgroup.remove()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                raise GpufracError(f"cannot remove {cgroup.directory}: {error.strerror}: remove it yourself") from error
            pause.wait(0.05)
        else:
            return


def ways(gpu: GpuStatus) -> tuple[Way, ...]:
    """How a client that is no container's gets to MPS on a GPU: under protocol 2 as everybody, under protocol 3 through
    the namespaces in the daemon's config file that no allocation has."""
    daemon = gpu.daemon
    if daemon is None or daemon.state is not DaemonState.READY or daemon.wedged or not daemon.pipe_directory:
        return ()
    if daemon.protocol == 2:
        return (Way(daemon.pipe_directory, daemon.pinned_limit_bytes or 0),)
    held = {os.path.basename(attached.pipe_directory) for attached in daemon.attached}
    try:
        with open(f"{daemon.pipe_directory}.toml", "rb") as file:
            namespaces = tomllib.load(file)["servers"][SERVER]["namespaces"]
        found = {name: parse_bytes(f"{table['pinned_memory_limit']}i") for name, table in namespaces.items()}
    except (OSError, ValueError, LookupError, TypeError, GpufracError):
        return ()
    directories = {name: f"{daemon.pipe_directory}/{SERVER}/{name}" for name in found.keys() - held}
    # The last ones: shares are granted from the first.
    names = sorted((name for name, path in directories.items() if os.path.exists(f"{path}/control")), reverse=True)
    return tuple(Way(directories[name], found[name]) for name in names)
