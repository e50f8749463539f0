"""How large one share of a resource is on one GPU (pure).

Both processes ask here: mpsd for a daemon's default memory limit, the plugin's planner for what it may grant. All
sizes are whole MiB: limits and fractions are rounded down.
"""

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

import msgspec

from mpsd.common.quantity import format_bytes
from mpsd.config.model import FixedMemory, FractionMemory, Memory, NodeConfig, Resource, UnitMemory
from mpsd.gpu.model import MIB, GpuInfo, Mode
from mpsd.shares.groups import Group


class ShareSize(msgspec.Struct, frozen=True):
    """Bytes on each GPU of one share: guaranteed and at most. For a unit resource both are one unit."""

    request_bytes: int
    limit_bytes: int


def usable_bytes(info: GpuInfo, reserve_bytes: int) -> int:
    """What shares of a GPU may add up to: total less driver-reserved less our reserve, whole MiB, never below 0."""
    return max(0, floor_mib(info.memory_total_bytes - info.memory_reserved_bytes - reserve_bytes))


def share_size(resource: Resource, usable_bytes: int) -> ShareSize | str:
    """The size of one share on a GPU with this much usable memory, or the reason why none fits."""
    match resource.memory:
        case FixedMemory(request_bytes=request, limit_bytes=limit):
            size = ShareSize(request, limit)
        case FractionMemory(fraction=fraction, limit_fraction=limit_fraction):
            size = ShareSize(fraction_of(usable_bytes, fraction), fraction_of(usable_bytes, limit_fraction))
            if size.request_bytes < MIB:
                return (
                    f"fraction {fraction:g} of the {format_bytes(usable_bytes)} usable on this GPU is less than 1 MiB"
                )
        case UnitMemory(unit_bytes=unit):
            if unit > usable_bytes:
                return f"unit {_more_than_usable(unit, usable_bytes)}"
            size = ShareSize(unit, unit)
    if size.request_bytes > usable_bytes:
        return f"request {_more_than_usable(size.request_bytes, usable_bytes)}"
    if size.limit_bytes > usable_bytes:
        return f"limit {_more_than_usable(size.limit_bytes, usable_bytes)}"
    return size


def has_burst(memory: Memory) -> bool:
    """Whether the limit of a share is above its request: it may borrow what is free (driver r615 or newer)."""
    match memory:
        case FixedMemory():
            return memory.limit_bytes > memory.request_bytes
        case FractionMemory():
            return memory.limit_fraction > memory.fraction
        case UnitMemory():
            return False


def slots(resource: Resource, usable_bytes: int) -> int:
    """How many shares (units) of the resource lie side by side on a GPU; 0 when none fits."""
    size = share_size(resource, usable_bytes)
    return usable_bytes // size.request_bytes if isinstance(size, ShareSize) else 0


def slot_count(resource: Resource, usable_bytes: int, client_limit: int) -> int:
    """How many shares of the resource a GPU lists: what fits, and under MPS no more than it takes clients."""
    count = slots(resource, usable_bytes)
    if resource.mode is Mode.SM_SHARING and not isinstance(resource.memory, UnitMemory):
        return min(count, client_limit)
    return count


def is_allowed(resource: Resource, config: NodeConfig, group: Group, members: Iterable[GpuInfo]) -> bool:
    """Whether shares of the resource may lie on this group: it is selected, and not set aside for annotated pods."""
    members = tuple(members)
    return is_selected(resource, config, group, members) and not set_aside(config, members)


def is_selected(resource: Resource, config: NodeConfig, group: Group, members: Iterable[GpuInfo]) -> bool:
    """Whether the resource names the group, or it is of as many GPUs as a share needs, which selections admit."""
    if resource.groups or group.declared:
        return group.name in resource.groups
    return len(group.gpus) == resource.gpu_count and all(is_open(resource, config, info) for info in members)


def is_open(resource: Resource, config: NodeConfig, info: GpuInfo) -> bool:
    """Whether selections admit a GPU to a resource that names no group."""
    return config.gpus.admits(info) and resource.gpus.admits(info)


def for_annotated(config: NodeConfig, members: Iterable[GpuInfo]) -> bool:
    """Whether annotated pods may use these GPUs: all of them."""
    annotations, members = config.annotations, tuple(members)
    if annotations is None or not members:
        return False
    return all(config.gpus.admits(info) and annotations.gpus.admits(info) for info in members)


def set_aside(config: NodeConfig, members: Iterable[GpuInfo]) -> bool:
    """Whether one of these GPUs is for annotated pods only, so that resources can't have it."""
    annotations = config.annotations
    if annotations is None or annotations.share:
        return False
    return any(annotations.gpus.admits(info) for info in members)


def burst_allowed(config: NodeConfig, group: Group, members: Iterable[GpuInfo], usable_bytes: int) -> bool:
    """Whether a share that may borrow memory could lie on this group, or on GPUs of it, in any mode. An annotated
    container may always turn out to be one."""
    members = tuple(members)
    return for_annotated(config, members) or any(
        has_burst(resource.memory)
        and (is_allowed(resource, config, group, members) or _reaches_into(resource, config, group, members))
        and isinstance(share_size(resource, usable_bytes), ShareSize)
        for resource in config.resources
    )


def _reaches_into(resource: Resource, config: NodeConfig, group: Group, members: Iterable[GpuInfo]) -> bool:
    """Whether shares of a resource that names no group may lie on a GPU of this one."""
    if resource.groups or (group.declared and not group.shared):
        return False
    return any(is_open(resource, config, info) and not set_aside(config, [info]) for info in members)


def largest_limit_bytes(
    resources: Iterable[Resource], config: NodeConfig, group: Group, members: Iterable[GpuInfo], usable_bytes: int
) -> int | None:
    """The largest limit an sm-sharing container could get here, None when there can be none: all that is usable where
    it may be annotated, else that of the largest resource.

    A container may ask for all units of a unit resource, so that one counts with every whole unit of the GPU. One with
    burst counts as nothing: it is granted under MPS protocol 3 only, where each container has a limit of its own.
    """
    members = tuple(members)
    if for_annotated(config, members):
        return usable_bytes
    limits = []
    for resource in resources:
        if resource.mode is not Mode.SM_SHARING or not is_allowed(resource, config, group, members):
            continue
        size = share_size(resource, usable_bytes)
        if isinstance(size, ShareSize) and not has_burst(resource.memory):
            units = slots(resource, usable_bytes) if isinstance(resource.memory, UnitMemory) else 1
            limits.append(size.limit_bytes * units)
    return max(limits, default=None)


def floor_mib(size_bytes: int) -> int:
    """Bytes rounded down to whole MiB."""
    return size_bytes // MIB * MIB


@lru_cache(maxsize=1024)  # a node has a few, and each look at it asks for them all
def fraction_of(size_bytes: int, fraction: float) -> int:
    """That fraction of the bytes, rounded down to whole MiB, by exact arithmetic.

    The fraction counts as the decimal it is written as: 0.7 of 10 MiB is 7 MiB, though the double nearest to 0.7 lies
    below it.
    """
    return floor_mib(int(size_bytes * Fraction(repr(fraction))))


def _more_than_usable(size_bytes: int, usable_bytes: int) -> str:
    return f"{format_bytes(size_bytes)} is more than the {format_bytes(usable_bytes)} usable on this GPU"
