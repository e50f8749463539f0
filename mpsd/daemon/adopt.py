"""Whose daemon is it: ours, foreign or gone? Judged on evidence (pure).

"Gone" needs proof and so does "ours"; what stays unknown is foreign: left alone and reported. A PID alone proves
nothing, it may be another process by now.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from mpsd.common.ranges import Count, MpsProtocol, Name, Path, Pid
from mpsd.common.reason import Reason
from mpsd.daemon.plan import DAEMON_MARKER, SHARED_MEMORY_MARKER, DaemonSpec
from mpsd.localapi.reasons import DaemonCode

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
PROTOCOL_VERSION = "CUDA_MPS_PROTOCOL_VERSION"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process for good: its PID can be used again, but not with the same start time (clock ticks since boot)."""

    pid: int
    start_time: int


class DaemonIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A control daemon as recorded. Servers stay in its process group."""

    boot_id: str
    pid: Pid
    start_time: Count
    process_group: Pid
    pipe_directory: Path
    protocol: MpsProtocol = 2
    gpus: tuple[Name, ...] = ()
    """UUIDs by its ordinals."""
    shared_memory: bool = False
    """Whether it was given a /dev/shm of its own."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A living process that may be the daemon. `environment` is None where it can't be read."""

    pid: int
    start_time: int
    process_group: int
    environment: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known when one daemon is looked for.

    `candidates`: living processes named by the record or by the pid file in the pipe directory; zombies don't live.
    """

    boot_id: str
    name: str
    pipe_directory: str
    recorded: DaemonIdentity | None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Ours:
    """The daemon that we started runs."""

    identity: DaemonIdentity


@dataclass(frozen=True, slots=True)
class Foreign:
    """A process that is not ours has the directory."""

    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """No daemon lives there: what it left may be cleared away."""


def judge(evidence: Evidence) -> Ours | Foreign | Gone:
    """The verdict on the daemon of one domain."""
    foreign: Foreign | None = None
    for candidate in evidence.candidates:
        recorded = evidence.recorded
        is_recorded = (
            recorded is not None
            and (recorded.boot_id, recorded.pid, recorded.start_time)
            == (evidence.boot_id, candidate.pid, candidate.start_time)
            and recorded.pipe_directory == evidence.pipe_directory
        )
        environment = candidate.environment
        if environment is None:
            if not is_recorded:
                foreign = Foreign(candidate.pid, "its environment can't be read, so whose it is stays unknown")
                continue
        elif environment.get(PIPE_DIRECTORY) != evidence.pipe_directory:
            continue  # the PID was used again by something else
        elif not is_recorded and environment.get(DAEMON_MARKER) != evidence.name:
            foreign = Foreign(candidate.pid, "we did not start it")
            continue
        return Ours(identify(candidate, evidence.boot_id, evidence.pipe_directory, recorded))
    return foreign or Gone()


def identify(
    candidate: Candidate, boot_id: str, pipe_directory: str, recorded: DaemonIdentity | None = None
) -> DaemonIdentity:
    """A daemon of ours as its environment describes it, or else its record: what it was started with holds for good."""
    environment = candidate.environment
    if environment is not None:
        protocol = 3 if environment.get(PROTOCOL_VERSION) == "3" else 2
        gpus = tuple(uuid for uuid in environment.get(VISIBLE_DEVICES, "").split(",") if uuid)
        shared_memory = environment.get(SHARED_MEMORY_MARKER) == "1"
    else:
        protocol, gpus = (recorded.protocol, recorded.gpus) if recorded is not None else (2, ())
        shared_memory = recorded is not None and recorded.shared_memory
    return DaemonIdentity(
        boot_id=boot_id,
        pid=candidate.pid,
        start_time=candidate.start_time,
        process_group=candidate.process_group,
        pipe_directory=pipe_directory,
        protocol=protocol,
        gpus=gpus,
        shared_memory=shared_memory,
    )


def outdated(identity: DaemonIdentity, wanted: DaemonSpec) -> Reason | None:
    """Why a daemon is not the one wanted though it works."""
    if identity.protocol != wanted.protocol:
        text = f"it speaks MPS protocol {identity.protocol}, and {wanted.protocol} is wanted"
    elif identity.gpus and identity.gpus != wanted.gpus:  # an old record may not name them
        text = f"it serves {', '.join(identity.gpus)}, and {', '.join(wanted.gpus)} are wanted"
    elif identity.shared_memory != wanted.shared_memory:
        text = "it has no shared memory of its own" if wanted.shared_memory else "it has a shared memory of its own"
    else:
        return None
    return Reason(DaemonCode.OUTDATED, text)
