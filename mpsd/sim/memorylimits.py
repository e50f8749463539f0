"""Memory limits of cgroups as driver r615 keeps them: through the kernel's dmem controller, or inside the driver.

| backend | limits are in          | and hold for                                                             |
|---------|------------------------|--------------------------------------------------------------------------|
| dmem    | dmem.min and dmem.max  | every cgroup of the chain                                                |
| misc    | sim.soft and sim.hard  | the nearest limited cgroup alone: a limit above it does not bound it     |

With dmem a soft limit is also added to the cgroups above, and stays there when the cgroup itself goes. The files of
misc stand for what a real driver has in its memory.

Source: NVIDIA MPS documentation r615, 'Memory Partitioning'; NVML API r615. Guessed: a cgroup without a hard or soft
limit is no candidate for eviction; with the misc backend only a limit on the own cgroup shows as the device's total.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from mpsd.sim.cgroups import (
    CURRENT,
    MAX,
    MIN,
    UNLIMITED,
    CgroupTree,
    is_within,
    read_bytes,
    write_value,
)
from mpsd.sim.model import Context, SimulatedGpuFacts, region_of

DMEM, MISC, OFF = "dmem", "misc", "off"

NVML_INVALID_ARGUMENT, NVML_NOT_SUPPORTED, NVML_NOT_FOUND, NVML_FUNCTION_NOT_FOUND = 2, 3, 6, 13
FIRST_DRIVER = 615

_SOFT, _HARD = "sim.soft", "sim.hard"


class LimitError(Exception):
    """A call was refused; `code` is the nvmlReturn_t."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Limits:
    """Limits of one cgroup on one GPU. `hard_bytes` None: no ceiling."""

    __slots__ = ("cgroup", "hard_bytes", "soft_bytes")

    def __init__(self, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        self.cgroup = cgroup
        self.soft_bytes = soft_bytes
        self.hard_bytes = hard_bytes


class MemoryLimits:
    """What the driver knows of limits. `backend` as above, or OFF; it is a value of the moment."""

    def __init__(self, tree: CgroupTree, backend: str) -> None:
        self._tree = tree
        self._backend = backend
        self._soft, self._hard = (MIN, MAX) if backend == DMEM else (_SOFT, _HARD)

    # Calls

    def get(self, gpu: SimulatedGpuFacts, contexts: Iterable[Context], cgroup: str) -> tuple[Limits, int]:
        """Limits in force for a cgroup, and what is charged to them in bytes. Raises LimitError."""
        limits = self._nearest(gpu, self._known(cgroup))
        if limits is None:
            raise LimitError(NVML_NOT_SUPPORTED, f"no limit on {cgroup} or above it: Not Supported")
        return limits, Charges(self, gpu, contexts).of(limits.cgroup)

    def set(self, gpu: SimulatedGpuFacts, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        """Sets both. Raises LimitError."""
        cgroup = self._known(cgroup)
        if soft_bytes < 0 or (hard_bytes is not None and not soft_bytes <= hard_bytes):
            raise LimitError(NVML_INVALID_ARGUMENT, "the soft limit is above the hard one: Invalid Argument")
        region, path = region_of(gpu), os.path.join(cgroup, self._soft)
        with self._tree.lock():
            if self._backend == DMEM and not os.path.exists(path):
                raise LimitError(NVML_NOT_FOUND, f"{cgroup} has no dmem files: Not Found")
            grown_bytes = soft_bytes - (read_bytes(path, region) or 0)
            write_value(path, region, soft_bytes)
            write_value(os.path.join(cgroup, self._hard), region, UNLIMITED if hard_bytes is None else hard_bytes)
            for ancestor in self._tree.above(cgroup)[1:] if self._backend == DMEM else ():
                path = os.path.join(ancestor, MIN)
                if not os.path.exists(path):
                    return  # a gap ends the chain
                write_value(path, region, max(0, (read_bytes(path, region) or 0) + grown_bytes))

    def drift(self, gpu: SimulatedGpuFacts, hard_bytes: int | None) -> None:
        """Gives every hard limit of a GPU another value, behind the back of whoever set it."""
        with self._tree.lock():
            for directory, _, files in os.walk(self._tree.root):
                path = os.path.join(directory, self._hard)
                if self._hard in files and read_bytes(path, region_of(gpu)) is not None:
                    write_value(path, region_of(gpu), UNLIMITED if hard_bytes is None else hard_bytes)

    # Questions of the driver

    def room_bytes(self, gpu: SimulatedGpuFacts, contexts: Iterable[Context], pid: int) -> int | None:
        """What the limits on its cgroups leave to a process; None: no limit."""
        charges = Charges(self, gpu, contexts)
        left = [
            limits.hard_bytes - charges.of(limits.cgroup)
            for limits in self._bounds(gpu, self._tree.cgroup_of(pid))
            if limits.hard_bytes is not None
        ]
        return min(left, default=None)

    def total_bytes(self, gpu: SimulatedGpuFacts, pid: int) -> int:
        """The size of the GPU as a process sees it: only a limit on its own cgroup changes it."""
        cgroup = self._tree.cgroup_of(pid)
        limits = self._nearest(gpu, cgroup)
        own = limits.hard_bytes if limits is not None and limits.cgroup == cgroup else None
        return gpu.memory_bytes if own is None else min(own, gpu.memory_bytes)

    def is_protected(self, gpu: SimulatedGpuFacts, contexts: Iterable[Context], pid: int, size_bytes: int) -> bool:
        """Whether a process stays within the soft limit of its cgroup when it gets this much more."""
        limits = self._nearest(gpu, self._tree.cgroup_of(pid))
        if limits is None:
            return False
        return Charges(self, gpu, contexts).of(limits.cgroup) + size_bytes <= limits.soft_bytes

    def over_soft(self, gpu: SimulatedGpuFacts, contexts: Iterable[Context]) -> dict[int, int]:
        """By PID, how far its cgroup is above its soft limit: processes that hold memory and may be evicted."""
        charges = Charges(self, gpu, contexts)
        found = {}
        for pid, (cgroup, used_bytes) in charges.by_pid.items():
            limits = self._nearest(gpu, cgroup)
            if used_bytes and limits is not None and (limits.soft_bytes or limits.hard_bytes is not None):
                over_bytes = charges.of(limits.cgroup) - limits.soft_bytes
                if over_bytes > 0:
                    found[pid] = over_bytes
        return found

    def publish(self, gpu: SimulatedGpuFacts, contexts: Iterable[Context]) -> None:
        """Brings dmem.current up to date."""
        if self._backend != DMEM:
            return
        charges, region = Charges(self, gpu, contexts), region_of(gpu)
        with self._tree.lock():
            for directory, _, files in os.walk(self._tree.root):
                if CURRENT in files:
                    write_value(os.path.join(directory, CURRENT), region, charges.of(directory))

    # Inside

    def _known(self, cgroup: str) -> str:
        """The directory's own path. Raises LimitError where it is none of the tree."""
        directory = os.path.realpath(cgroup)
        root = os.path.realpath(self._tree.root)
        if not os.path.isdir(directory) or not is_within(directory, root):
            raise LimitError(NVML_NOT_FOUND, f"{cgroup} is not a cgroup: Not Found")
        return self._tree.root + directory[len(root) :]

    def _nearest(self, gpu: SimulatedGpuFacts, cgroup: str) -> Limits | None:
        """What a cgroup is charged against first."""
        return next(iter(self._bounds(gpu, cgroup)), None)

    def _bounds(self, gpu: SimulatedGpuFacts, cgroup: str) -> list[Limits]:
        """All that bounds a cgroup, nearest first."""
        region, soft, hard = region_of(gpu), self._soft, self._hard
        found = [
            Limits(d, read_bytes(os.path.join(d, soft), region) or 0, read_bytes(os.path.join(d, hard), region))
            for d in self._tree.above(cgroup)
            if os.path.exists(os.path.join(d, hard))
        ]
        if self._backend == DMEM:
            return found
        limited = [limits for limits in found if limits.soft_bytes or limits.hard_bytes is not None]
        return limited[:1]


class Charges:
    """Who is charged for what on one GPU. `by_pid`: the cgroup of each process, and its bytes."""

    def __init__(self, limits: MemoryLimits, gpu: SimulatedGpuFacts, contexts: Iterable[Context]) -> None:
        used = {context.pid: context.used_bytes for context in contexts}
        cgroups = limits._tree.cgroups_of(used)
        self.by_pid = {pid: (cgroups[pid], used_bytes) for pid, used_bytes in used.items()}
        self._flat = limits._backend == MISC
        self._governing = {
            cgroup: nearest.cgroup
            for cgroup in ({*cgroups.values()} if self._flat else ())
            if (nearest := limits._nearest(gpu, cgroup)) is not None
        }

    def of(self, directory: str) -> int:
        """Bytes charged to a cgroup: with dmem all below it, with misc what has no nearer limit."""
        if self._flat:
            return sum(used for cgroup, used in self.by_pid.values() if self._governing.get(cgroup) == directory)
        return sum(used for cgroup, used in self.by_pid.values() if is_within(cgroup, directory))
