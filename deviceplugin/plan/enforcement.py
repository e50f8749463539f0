"""At which level a limit can be enforced on this node, and what to do where that is not enough (pure)."""

from mpsd.config.model import Delivery, Enforcement, FixedMemory, FractionMemory, Memory, Resource
from mpsd.gpu.model import Mode


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
    """What MPS protocol 2 gives: a per-process limit for sm-sharing, nothing for time-slicing.

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
