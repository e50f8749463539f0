"""Use beyond a limit that nothing holds a container to as a whole (pure).

MPS holds each client to its limit by itself, and only one that keeps its environment (MPS documentation, pinned device
memory limits); without a limit in force nobody holds anything. The driver shows what each process uses, so that the sum
can be told, if not kept.
"""

from collections.abc import Iterable, Mapping

import msgspec

from deviceplugin.grants.clients import is_of, pids_text
from deviceplugin.grants.holders.model import Pods
from deviceplugin.plan.allocation import Allocation
from deviceplugin.reconcile.reasons import HeldCode
from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason
from mpsd.config.model import Enforcement
from mpsd.gpu.model import MIB
from mpsd.localapi.snapshot import GpuClient, GpuStatus


class Use(msgspec.Struct, frozen=True):
    """What an allocation's processes use together: the most on any of its GPUs, and who that is. `complete` says
    whether the driver told it of each of them."""

    used_bytes: int
    gpu_index: int
    clients: tuple[GpuClient, ...]
    complete: bool


def use_of(allocation: Allocation, gpus: Mapping[str, GpuStatus], pods: Pods) -> Use | None:
    """As the driver showed it last; None where no process of it is known."""
    found = [
        Use(sum(c.used_bytes or 0 for c in own), gpu.info.index, own, all(c.used_bytes is not None for c in own))
        for uuid in allocation.gpus
        if (gpu := gpus.get(uuid)) is not None and (own := _own(allocation, gpu.clients, pods))
    ]
    return max(found, key=lambda use: use.used_bytes, default=None)


def _own(allocation: Allocation, clients: Iterable[GpuClient], pods: Pods) -> tuple[GpuClient, ...]:
    """Its processes. One that names no allocation of its pod is of the only one its pod has: with several it can't be
    told whose limit it is beyond."""

    def alone(uid: str) -> bool:
        return sum(uid in held_by for held_by in pods.values()) == 1

    mine = (c for c in clients if is_of(c, allocation.key, pods))
    return tuple(c for c in mine if c.allocation_key == allocation.key or alone(c.pod_uid))


def over_limit(use: Use | None, limit_bytes: int, level: Enforcement) -> Reason | None:
    """That and how far processes are beyond their container's limit, and what to do; None where they are not, as far
    as is known.

    Args:
        level: what holds for the container now. A hard limit is the kernel's to hold.
    """
    if use is None or level is Enforcement.HARD or use.used_bytes <= limit_bytes:
        return None
    used = f"{'' if use.complete else 'at least '}{format_bytes(-(-use.used_bytes // MIB) * MIB)}"
    several = len(use.clients) > 1
    return Reason(
        HeldCode.OVER_LIMIT,
        f"{'its processes' if several else 'its process'} (pid {pids_text(use.clients)}) "
        f"{'have' if several else 'has'} "
        f"{used} on GPU {use.gpu_index}{' together' if several else ''}, beyond its limit of "
        f"{format_bytes(limit_bytes)}: {_NOT_HELD[level]}; neighbours may not get what was granted to them: "
        "give it a larger share, or end it",
    )


_NOT_HELD = {
    Enforcement.COOPERATIVE: "MPS limits each process by itself, and on drivers before r615 only one that keeps its "
    "environment",
    Enforcement.NONE: "nothing holds it to that",
}
