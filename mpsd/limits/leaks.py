"""Guarantees that outlived their containers, and giving them back. Only where the kernel keeps limits (dmem).

The driver adds a container's soft limit to `dmem.min` of every cgroup above it and takes it away again when the soft
limit is set to 0; a cgroup that is removed takes nothing away (NVIDIA, memory partitioning, r615). So what a cgroup
has and nobody below it explains is for containers that are gone. Limits are set on containers only: what stands on
them is theirs.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mpsd.common.errors import TransientError
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import MIB
from mpsd.limits import cgroups

MAX_CGROUPS = 8192
_TRIES = 3


class Leak(NamedTuple):
    """`reserved_bytes` of a region stand on a cgroup, and what is below it explains only `explained_bytes`."""

    cgroup: str
    region: str
    reserved_bytes: int
    explained_bytes: int

    @property
    def lost_bytes(self) -> int:
        """What is protected for nobody."""
        return self.reserved_bytes - self.explained_bytes


@dataclass(frozen=True, slots=True)
class Reserved:
    """A cgroup, its `dmem.min` by region, and the cgroups below it down to `container`s, which explain themselves."""

    cgroup: str
    minimum: Mapping[str, int]
    below: tuple["Reserved", ...] = ()
    container: bool = False

    def explained_bytes(self, region: str) -> int:
        return sum(child.minimum.get(region, 0) for child in self.below)


def find(tree: Reserved) -> tuple[Leak, ...]:
    """Every leak in a tree, the deepest first (pure). One is named only where it happened: the cgroups above have it in
    both sums. Below 1 MiB is rounding."""
    found = [leak for child in tree.below for leak in find(child)]
    if not tree.container:
        for region in sorted(tree.minimum):
            leak = Leak(tree.cgroup, region, tree.minimum[region], tree.explained_bytes(region))
            if leak.lost_bytes >= MIB:
                found.append(leak)
    return tuple(found)


def standing(before: Iterable[Leak], now: Iterable[Leak]) -> tuple[Leak, ...]:
    """Those of now that were there before, too (pure): a container that ends while the tree is read looks like one."""
    known = {(leak.cgroup, leak.region) for leak in before}
    return tuple(leak for leak in now if (leak.cgroup, leak.region) in known)


def reserves(tree: Reserved) -> bool:
    """Whether anything is reserved in it (pure)."""
    return any(tree.minimum.values()) or any(reserves(child) for child in tree.below)


def read(root: str) -> tuple[Reserved, ...]:
    """The trees of pods below the top of the hierarchy.

    Raises:
        TransientError: there are more than MAX_CGROUPS.
    """
    left = itertools.count(MAX_CGROUPS, -1)
    return tuple(_read(path, left) for path in cgroups.children(root) if cgroups.is_branch(path))


def give_back(backend: GpuBackend, uuid: str, leak: Leak) -> None:
    """Takes from a cgroup what nothing below it explains, by the driver's own calls: it keeps sums of what it set, so
    that the kernel's files are not to be written. The hard limit stays. What hardware does otherwise is put right here.

    Raises:
        GpufracError: the driver refuses, or the leak is still there.
    """
    now = _now(leak)
    if now.lost_bytes < MIB:
        return
    for _ in range(_TRIES):
        hard_bytes = backend.memory_limits(uuid, leak.cgroup).hard_bytes
        backend.set_memory_limits(uuid, leak.cgroup, now.explained_bytes, hard_bytes)
        now = _now(leak)
        if abs(now.lost_bytes) < MIB:  # below 0: a container started meanwhile and its part was taken, too
            return
    raise TransientError(f"it reads back as {now.reserved_bytes} bytes, {now.explained_bytes} of them explained")


def _now(leak: Leak) -> Leak:
    tree = _read(leak.cgroup, itertools.count(MAX_CGROUPS, -1))
    return Leak(leak.cgroup, leak.region, tree.minimum.get(leak.region, 0), tree.explained_bytes(leak.region))


def _read(path: str, left: Iterator[int]) -> Reserved:
    # What stands on a cgroup is read before what is below it: a container that starts meanwhile explains more than
    # there is, which is no leak.
    minimum, is_pod = _minimum(path, left), cgroups.is_pod(path)
    below = []
    for child in cgroups.children(path):
        if not is_pod and (cgroups.is_pod(child) or cgroups.is_branch(child)):
            below.append(_read(child, left))
        else:
            below.append(Reserved(child, _minimum(child, left), container=True))
    return Reserved(path, minimum, tuple(below))


def _minimum(path: str, left: Iterator[int]) -> Mapping[str, int]:
    if next(left) <= 0:
        raise TransientError(f"cannot look for leaked guarantees: there are more than {MAX_CGROUPS} cgroups of pods")
    return cgroups.regions(path, "dmem.min")
