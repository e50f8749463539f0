"""What to try on a GPU, so that each limit the node claims is shown to hold (pure).

Sizes leave room for a CUDA context, which counts against limits: up to 816 MiB were seen on r615.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deviceplugin.status.model import GpuAccount, ResourceStatus
from mpsd.common.quantity import format_bytes
from mpsd.config.model import GIB, Enforcement
from mpsd.gpu.model import MIB, ComputeMode, GpuHealth, Mode
from mpsd.localapi.snapshot import GpuStatus

LIMIT_BYTES = 2 * GIB
"""The limit that is put on our own process."""
WITHIN_BYTES = 512 * MIB
HALF_BYTES = LIMIT_BYTES // 2 + MIB
"""Fits once, not twice."""
CONTEXT_BYTES = GIB
ROOM_BYTES = LIMIT_BYTES + 2 * CONTEXT_BYTES
"""What must be free, so that no refusal is due to a full GPU, and nobody is harmed where a limit does not hold."""

NOTHING_RUNS = "/nonexistent"
"""A pipe directory for processes that are to stay out of MPS."""

GRANTED, REFUSED = "granted", "refused"


class Way(NamedTuple):
    """A directory through which a client gets to MPS, and the limit that MPS holds it to."""

    pipe_directory: str
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU. `free_bytes` is what is neither granted nor used; None: can't be told. `ways` are those that no
    container has. `trouble` says why nothing can be tried there."""

    uuid: str
    index: int
    mode: Mode | None = None
    free_bytes: int | None = None
    protocol: int = 2
    ways: tuple[Way, ...] = ()
    alone: bool = True
    """Whether its daemon serves no other GPU."""
    shared_by_default: bool = True
    """Whether its compute mode lets a process in beside the MPS server."""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """One allocation by a process of our own, and what must become of it. `why`: it can't be tried now.

    `holding_bytes`: while another process has them. `bare`: in an empty environment. `in_cgroup`: in a cgroup that is
    limited to LIMIT_BYTES. `client_limit`: with LIMIT_BYTES in the client's own environment.
    """

    mode: Mode
    level: Enforcement
    what: str
    expected: str = REFUSED
    size_bytes: int = 0
    pipe_directory: str = NOTHING_RUNS
    holding_bytes: int = 0
    bare: bool = False
    in_cgroup: bool = False
    client_limit: bool = False
    why: str = ""


def claims(resources: Iterable[ResourceStatus]) -> dict[Mode, Enforcement]:
    """The level that the node promises in each mode, by the resources it offers; modes without a limit are left out."""
    found: dict[Mode, Enforcement] = {}
    for resource in resources:
        mode, level = Mode(resource.mode), Enforcement(resource.enforcement)
        if (resource.listed or resource.held) and level.rank > found.get(mode, Enforcement.NONE).rank:
            found[mode] = level
    return found


def facts(gpu: GpuStatus, account: GpuAccount | None, ways: tuple[Way, ...]) -> GpuFacts:
    """A GPU as both processes describe it."""
    daemon, granted_bytes = gpu.daemon, account.granted_bytes if account is not None else 0
    strangers = [client.used_bytes for client in gpu.clients if client.allocation_key is None]
    known = [used_bytes for used_bytes in strangers if used_bytes is not None]
    ours_bytes = sum(client.used_bytes or 0 for client in gpu.clients if client.allocation_key is not None)
    total_bytes = gpu.info.memory_total_bytes - gpu.info.memory_reserved_bytes
    trouble = gpu.not_shared
    if not trouble and gpu.health is not GpuHealth.OK:
        trouble = f"it is {gpu.health}: {gpu.reason}"
    return GpuFacts(
        uuid=gpu.info.uuid,
        index=gpu.info.index,
        mode=gpu.mode,
        free_bytes=total_bytes - max(granted_bytes, ours_bytes) - sum(known) if len(known) == len(strangers) else None,
        protocol=daemon.protocol if daemon is not None else 2,
        ways=ways,
        alone=gpu.group in ("", gpu.info.uuid),
        shared_by_default=gpu.driver_compute_mode in (ComputeMode.DEFAULT, ComputeMode.UNKNOWN),
        trouble=trouble,
    )


def trials(gpu: GpuFacts, claimed: Mapping[Mode, Enforcement]) -> Iterator[Trial]:
    """Everything to try on a GPU, in order. What can't be tried now is named, too."""
    for mode, level in sorted(claimed.items()):
        levels = (Enforcement.COOPERATIVE, level) if mode is Mode.SM_SHARING else (level,)
        for each in dict.fromkeys(levels):
            if why := _objection(gpu, mode):
                yield Trial(mode, each, "all", why=why)
            elif each is Enforcement.HARD:
                yield from _hard(gpu, mode)
            elif gpu.protocol == 2:
                yield from _by_daemon(gpu)
            else:
                yield from _by_namespace(gpu)


def _objection(gpu: GpuFacts, mode: Mode) -> str:
    if gpu.trouble:
        return gpu.trouble
    if gpu.mode not in (None, mode):
        return f"it is bound to {gpu.mode}: try when it is idle"
    if gpu.free_bytes is None:
        return "how much of it is free can't be told, as a process without an allocation uses it"
    if gpu.free_bytes < ROOM_BYTES:
        return (
            f"{format_bytes(max(0, gpu.free_bytes))} of it are not granted, and {format_bytes(ROOM_BYTES)} are needed: "
            "try when fewer pods hold it"
        )
    return ""


def _by_daemon(gpu: GpuFacts) -> Iterator[Trial]:
    """Protocol 2: the daemon's default holds everybody, a client's own environment may lower it."""
    mode, level = Mode.SM_SHARING, Enforcement.COOPERATIVE
    if not gpu.ways:
        yield Trial(mode, level, "all", why="its MPS daemon is not ready")
        return
    way = gpu.ways[0]
    yield Trial(mode, level, "below its limit", GRANTED, WITHIN_BYTES, way.pipe_directory, client_limit=gpu.alone)
    if gpu.alone:
        size_bytes = LIMIT_BYTES + MIB
        yield Trial(
            mode,
            level,
            "above the limit in its environment",
            REFUSED,
            size_bytes,
            way.pipe_directory,
            client_limit=True,
        )
    yield _above(gpu, "above the daemon's default limit", way)


def _by_namespace(gpu: GpuFacts) -> Iterator[Trial]:
    """Protocol 3: the smallest free one, as that needs least."""
    mode, level = Mode.SM_SHARING, Enforcement.COOPERATIVE
    if not gpu.ways:
        yield Trial(mode, level, "all", why="no MPS namespace is free: all fixed shares are held, or none is offered")
        return
    way = min(gpu.ways, key=lambda way: way.limit_bytes)
    if way.limit_bytes >= WITHIN_BYTES + CONTEXT_BYTES:
        yield Trial(mode, level, "below its namespace's limit", GRANTED, WITHIN_BYTES, way.pipe_directory)
    yield _above(gpu, "above its namespace's limit", way)


def _above(gpu: GpuFacts, what: str, way: Way) -> Trial:
    size_bytes = way.limit_bytes + MIB
    why = ""
    if size_bytes + CONTEXT_BYTES > (gpu.free_bytes or 0):
        why = f"its limit of {format_bytes(way.limit_bytes)} is too near to all that is not granted"
    return Trial(Mode.SM_SHARING, Enforcement.COOPERATIVE, what, REFUSED, size_bytes, way.pipe_directory, why=why)


def _hard(gpu: GpuFacts, mode: Mode) -> Iterator[Trial]:
    level, size_bytes = Enforcement.HARD, LIMIT_BYTES + MIB
    no_plain = "" if gpu.shared_by_default else "its compute mode lets no process in"
    pipe_directory, why = NOTHING_RUNS, no_plain
    if mode is Mode.SM_SHARING:
        # One whose own limit is far above, so that it is the cgroup that refuses.
        way = max(gpu.ways, key=lambda way: way.limit_bytes, default=Way("", 0))
        pipe_directory, why = way.pipe_directory, ""
        if way.limit_bytes < ROOM_BYTES:
            why = f"no way to MPS with a limit of {format_bytes(ROOM_BYTES)} or more is free"
        no_plain = no_plain or ("" if gpu.mode is None else "it is bound to sm-sharing: try when it is idle")
    if why:
        yield Trial(mode, level, "the container's limit", why=why)
    else:
        yield Trial(mode, level, "below the cgroup's limit", GRANTED, WITHIN_BYTES, pipe_directory, in_cgroup=True)
        yield Trial(mode, level, "above the cgroup's limit", REFUSED, size_bytes, pipe_directory, in_cgroup=True)
        yield Trial(
            mode, level, "above it in two processes", REFUSED, HALF_BYTES, pipe_directory, HALF_BYTES, in_cgroup=True
        )
    what = "above it in an empty environment"
    yield Trial(mode, level, what, REFUSED, size_bytes, bare=True, in_cgroup=True, why=no_plain)
