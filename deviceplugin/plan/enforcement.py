"""At which level a limit can be enforced on this node, and what to do where that is not enough (pure)."""

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.model import GroupView, ResourceView
from mpsd.config.model import Delivery, Enforcement, FixedMemory, FractionMemory, Memory, Resource
from mpsd.gpu.model import Mode
from mpsd.quantity import format_bytes


def has_burst(memory: Memory) -> bool:
    """Whether the limit of a share is above its request."""
    match memory:
        case FixedMemory():
            return memory.limit_bytes > memory.request_bytes
        case FractionMemory():
            return memory.limit_fraction > memory.fraction
        case _:
            return False


def level(mode: Mode, delivery: Delivery) -> Enforcement:
    """What MPS gives: a per-process limit for sm-sharing, nothing for time-slicing.

    With `delivery: both` a pod's own environment can override the limit, so it counts as none.
    """
    if mode is Mode.TIME_SLICING or delivery is Delivery.BOTH:
        return Enforcement.NONE
    return Enforcement.COOPERATIVE


def objection(resource: Resource, delivery: Delivery) -> str:
    """Why a resource may not be advertised on this node, empty when it may."""
    if has_burst(resource.memory):
        return (
            "its limit is above its request, which needs soft limits (hard enforcement on driver r615 or newer, not "
            "part of this version): set the limit equal to the request"
        )
    given = level(resource.mode, delivery)
    if given.rank >= resource.enforcement.rank:
        return ""
    if resource.enforcement is Enforcement.HARD:
        return (
            "it demands hard enforcement (driver r615 or newer), which is not part of this version: this node enforces "
            f"{given} limits only; lower its `enforcement`"
        )
    if resource.mode is Mode.TIME_SLICING:
        return (
            "time-slicing has a memory limit only with hard enforcement (driver r615 or newer, not part of this "
            "version): use `compute.mode: sm-sharing`, or accept it unenforced with `enforcement: none`"
        )
    return (
        "with `cdi.delivery: both` a pod can override its limit: use `delivery: cdi` with a CDI-enabled runtime, or "
        "accept it unenforced with `enforcement: none`"
    )


def one_limit_objection(resource: Resource, group: GroupView, limit_bytes: int, default_bytes: int) -> str:
    """Why a share's limit would not be held on a group of several GPUs under MPS protocol 2, empty when it is.

    There only the daemon's default holds, which is the largest limit of the resources allowed on the group: a container
    gets no limit of its own, as a process that narrows CUDA_VISIBLE_DEVICES would drop every limit.
    """
    if resource.mode is not Mode.SM_SHARING or not group.has_one_limit or limit_bytes >= default_bytes:
        return ""
    return (
        f"its limit of {format_bytes(limit_bytes)} is not held on group {group.name}: MPS protocol 2 has one limit for "
        f"all containers on a group of several GPUs, {format_bytes(default_bytes)}, the largest of its resources: give "
        "these the same limit, or this one a group of its own, or use a driver with MPS protocol 3 (r615 or newer), or "
        "accept it unenforced with `enforcement: none`"
    )


def one_limit_conflict(view: ResourceView, group: GroupView, accounts: Accounts) -> str:
    """Why a new share would have to wait for live ones of another limit there: a reload changed the one limit of the
    group, and either they or the new one would not be held to theirs."""
    if view.resource.mode is not Mode.SM_SHARING or not group.has_one_limit:
        return ""
    limit_bytes = view.sizes[group.name].limit_bytes
    for live in accounts.on_gpu(group.gpus[0]).values():
        higher = live.limit_bytes < limit_bytes and live.enforcement is not Enforcement.NONE
        lower = live.limit_bytes > limit_bytes and view.resource.enforcement is not Enforcement.NONE
        if higher or lower:
            return (
                f"live allocations there have a limit of {format_bytes(live.limit_bytes)}, and MPS protocol 2 holds "
                f"containers on several GPUs to one limit: {format_bytes(limit_bytes)} must wait for them to end"
            )
    return ""
