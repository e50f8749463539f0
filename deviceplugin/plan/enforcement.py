"""At which level a limit can be enforced on this node, and what to do where that is not enough (pure)."""

from collections.abc import Iterable

from msgspec import structs

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.model import GpuView, GroupView, HardAbility, ResourceView
from deviceplugin.plan.reasons import EnforcementCode, OfferCode
from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason, joined
from mpsd.config.model import Delivery, Enforcement, Resource
from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import HardLimits
from mpsd.shares import capability
from mpsd.shares.groups import is_set_name
from mpsd.shares.sizes import has_burst

UNKNOWN = Reason(EnforcementCode.NOT_KNOWN, "whether this node can enforce hard limits is not known yet")


def level(mode: Mode, delivery: Delivery, hard: HardAbility) -> Enforcement:
    """What this node gives: hard where nothing is missing, else what MPS gives: a per-process limit for sm-sharing,
    nothing for time-slicing.

    With `delivery: both`, and on a runtime where CDI devices lose, a pod's own environment can override the limit, so
    it counts as none.
    """
    if delivery is Delivery.BOTH or hard.cdi_loses:
        return Enforcement.NONE
    if not hard.missing:
        return Enforcement.HARD
    return mps_level(mode)


def mps_level(mode: Mode) -> Enforcement:
    """What MPS alone gives."""
    return Enforcement.COOPERATIVE if mode is Mode.SM_SHARING else Enforcement.NONE


def level_words(given: Enforcement) -> str:
    """Limits of a level, as texts go on about limits."""
    return "none" if given is Enforcement.NONE else f"{given} ones"


def not_hard(delivery: Delivery, hard: HardAbility) -> Reason | None:
    """Why limits are not hard on this node, None when they are. All pieces that are missing, with the first one's
    code."""
    if not hard.known:
        return UNKNOWN
    missing = hard.missing
    if delivery is Delivery.BOTH:
        text = "with `cdi.delivery: both` a pod can override its limits: use `delivery: cdi`"
        missing = (Reason(EnforcementCode.DELIVERY_BOTH, text), *missing)
    if hard.cdi_loses is not None:
        missing = (hard.cdi_loses, *missing)
    return joined(missing)


def objection(resource: Resource, delivery: Delivery, hard: HardAbility) -> Reason | None:
    """Why a resource may not be advertised on this node, None when it may."""
    given = level(resource.mode, delivery, hard)
    if has_burst(resource.memory) and given is not Enforcement.HARD:
        return Reason(
            EnforcementCode.BURST_NEEDS_HARD,
            "its limit is above its request, which needs hard enforcement (driver r615 or newer), and this node "
            f"does not have it: {not_hard(delivery, hard)}; or set the limit equal to the request",
        )
    if given.rank >= resource.enforcement.rank:
        return None
    if resource.enforcement is Enforcement.HARD:
        return Reason(
            EnforcementCode.HARD_DEMANDED,
            f"it demands hard limits (driver r615 or newer), but this node enforces {level_words(given)}: "
            f"{not_hard(delivery, hard)}; or lower its `enforcement`",
        )
    if delivery is Delivery.BOTH:
        return Reason(
            EnforcementCode.DELIVERY_BOTH,
            "with `cdi.delivery: both` a pod can override its limit: use `delivery: cdi` with a CDI-enabled runtime, "
            "or accept it unenforced with `enforcement: none`",
        )
    if hard.cdi_loses is not None:
        return hard.cdi_loses.reworded(f"{hard.cdi_loses}; or accept it unenforced with `enforcement: none`")
    return Reason(
        EnforcementCode.TIME_SLICING_NEEDS_HARD,
        "time-slicing has a memory limit only with hard enforcement (driver r615 or newer), which this node "
        f"does not have: {not_hard(delivery, hard)}; or use `compute.mode: sm-sharing`, or accept it unenforced with "
        "`enforcement: none`",
    )


def config_note(resource: Resource, delivery: Delivery) -> str:
    """Where a resource will advertise nothing and why, as far as the config alone tells; empty for nothing to say."""
    able = HardAbility(HardLimits(missing=()), "-", frozenset("-"))
    if reason := objection(resource, delivery, able):
        return f": {reason}"
    unable = structs.replace(able, limits=HardLimits(missing=("`gpufrac status` names what a node lacks",)))
    reason = objection(resource, delivery, unable)
    return f" on nodes without hard enforcement: {reason}" if reason else ""


def burst_objection(resource: Resource, group: GroupView) -> Reason | None:
    """Why a share that may borrow can't lie on a group, None when it can: who borrows must be evictable, and only
    daemons of MPS protocol 3 evict."""
    if not has_burst(resource.memory) or group.speaks_protocol_3:
        return None
    return Reason(
        EnforcementCode.BURST_NEEDS_PROTOCOL_3,
        "its limit is above its request, which needs an MPS daemon of protocol 3 (driver r615 or newer, `mps.protocol` "
        "auto or 3): set the limit equal to the request",
    )


def soft_bytes(given: Enforcement, group: GroupView, accounts: Accounts, request_bytes: int) -> int:
    """What the driver is to protect of a new share: its request where a neighbour may borrow, else nothing."""
    borrowers = any(accounts.has_borrowers(gpu) for gpu in group.gpus)
    return request_bytes if given is Enforcement.HARD and (group.burst or borrowers) else 0


def capability_objection(resource: Resource, group: GroupView, given: Enforcement) -> Reason | None:
    """Why a share's limit would not be held on GPUs of this kind, None when it is: where it is MPS that holds it."""
    if resource.mode is not Mode.SM_SHARING or given is not Enforcement.COOPERATIVE:
        return None
    if not (why := capability.objection(gpu.info for gpu in group.members)):
        return None
    return Reason(
        EnforcementCode.GPU_CANNOT_LIMIT,
        f"{why}: give the resource other GPUs (`gpus.include`), or accept it unenforced with `enforcement: none`",
    )


def percentage_objection(resource: Resource, group: GroupView) -> Reason | None:
    """Why a share's thread percentage would not be held there, None when it is or it has none."""
    if resource.thread_percent is None or not (why := capability.objection(gpu.info for gpu in group.members)):
        return None
    return Reason(
        EnforcementCode.GPU_CANNOT_CAP_THREADS,
        f"{why}: give the resource other GPUs (`gpus.include`), or drop `compute.threadPercent`",
    )


def one_limit_objection(resource: Resource, group: GroupView, limit_bytes: int, default_bytes: int) -> Reason | None:
    """Why a share's limit would not be held on a group of several GPUs under MPS protocol 2 alone, None when it is.

    There only the daemon's default holds, which is the largest limit of the resources allowed on the group: a container
    gets no limit of its own, as a process that narrows CUDA_VISIBLE_DEVICES would drop every limit.
    """
    if resource.mode is not Mode.SM_SHARING or not group.has_one_limit or limit_bytes >= default_bytes:
        return None
    return Reason(
        EnforcementCode.ONE_LIMIT_PER_GROUP,
        f"its limit of {format_bytes(limit_bytes)} is not held on group {group.name}: MPS protocol 2 has one limit for "
        f"all containers on a group of several GPUs, {format_bytes(default_bytes)}, the largest of its resources: give "
        "these the same limit, or this one a group of its own, or use a driver with MPS protocol 3 (r615 or newer), or "
        "accept it unenforced with `enforcement: none`",
    )


def conflict(
    view: ResourceView, group: GroupView, accounts: Accounts, shares: int = 1, unreached: Reason | None = None
) -> Reason | None:
    """Why a container of so many new shares would have to wait for live ones there to end; None when it need not.

    Args:
        unreached: why no one MPS daemon can serve it now, None where one does or it needs none. In time-slicing it then
            goes without as long as limits don't add up to more than there is.
    """
    if unreached is not None and (view.resource.mode is Mode.SM_SHARING or has_burst(view.resource.memory)):
        return unreached
    return (
        _other_gpus_conflict(view, group, accounts)
        or _one_limit_conflict(view, group, accounts)
        or _borrowing_conflict(view, group, accounts, shares, unreached)
    )


def _other_gpus_conflict(view: ResourceView, group: GroupView, accounts: Accounts) -> Reason | None:
    """Of other GPUs: under MPS protocol 2 a daemon's containers all use the same ones, those of a set among them."""
    if view.resource.mode is not Mode.SM_SHARING or group.speaks_protocol_3:
        return None
    for gpu in group.members:
        for live in accounts.on_gpu(gpu.uuid).values():
            if live.group != group.name and (group.is_set or is_set_name(live.group)):
                return Reason(
                    OfferCode.OTHER_GPUS,
                    f"{live.container or live.resource} uses {len(live.gpus)} GPUs, {gpu.label} among them, and with "
                    "MPS protocol 2 all containers there have to use the same: wait for it to end, or use a driver "
                    "with MPS protocol 3 (r615 or newer)",
                )
    return None


def _one_limit_conflict(view: ResourceView, group: GroupView, accounts: Accounts) -> Reason | None:
    """Of another limit: a reload changed the one limit of the group, and either they or the new one would not be held
    to theirs."""
    if view.resource.mode is not Mode.SM_SHARING or not group.has_one_limit:
        return None
    limit_bytes = view.sizes[group.name].limit_bytes
    accepts_none = view.resource.enforcement is Enforcement.NONE or view.enforcement is Enforcement.HARD
    for live in accounts.on_gpu(group.gpus[0]).values():
        higher = live.limit_bytes < limit_bytes and live.enforcement is Enforcement.COOPERATIVE
        lower = live.limit_bytes > limit_bytes and not accepts_none
        if higher or lower:
            return Reason(
                OfferCode.OTHER_LIMIT,
                f"live allocations there have a limit of {format_bytes(live.limit_bytes)}, and MPS protocol 2 holds "
                f"containers on several GPUs to one limit: {format_bytes(limit_bytes)} must wait for them to end",
            )
    return None


def takes_back(view: ResourceView, group: GroupView, accounts: Accounts, unreached: Reason | None = None) -> bool:
    """Whether a new share would get memory back from who borrowed it: it has a guarantee, and reaches the daemon."""
    size, given = view.sizes[group.name], view.enforcement_on(group.name)
    guaranteed = soft_bytes(given, group, accounts, size.request_bytes) > 0
    return guaranteed and group.speaks_protocol_3 and unreached is None


def _borrowing_conflict(
    view: ResourceView, group: GroupView, accounts: Accounts, shares: int, unreached: Reason | None
) -> Reason | None:
    found = borrowing_conflict(
        group.members,
        view.sizes[group.name].limit_bytes * shares,
        accounts,
        borrows=has_burst(view.resource.memory),
        takes_back=takes_back(view, group, accounts, unreached),
    )
    return found if found is None or unreached is None else found.reworded(f"{found}; its own daemon: {unreached}")


def must_add_up(gpu: GpuView, accounts: Accounts, *, borrows: bool, takes_back: bool) -> bool:
    """Whether limits on a GPU must not add up to more than there is, once somebody new is there; see
    `borrowing_conflict`."""
    return (borrows or accounts.has_borrowers(gpu.uuid)) and (not takes_back or accounts.has_helpless(gpu.uuid))


def borrowing_conflict(
    gpus: Iterable[GpuView], limit_bytes: int, accounts: Accounts, *, borrows: bool, takes_back: bool
) -> Reason | None:
    """Why somebody new on these GPUs would put a guarantee at risk, None when nobody would.

    Memory that was borrowed is taken back by the MPS daemon of who lent it and who borrowed it, which both have to
    reach. Where somebody does not, limits must not add up to more than there is.

    Args:
        borrows: whether its limit is above its request.
        takes_back: whether it reaches the daemon, and has a guarantee.
    """
    for gpu in gpus:
        if not must_add_up(gpu, accounts, borrows=borrows, takes_back=takes_back):
            continue
        free_bytes = gpu.usable_bytes - accounts.limit_bytes(gpu.uuid)
        if limit_bytes > free_bytes:
            who = next((a for a in accounts.on_gpu(gpu.uuid).values() if not a.takes_back), None)
            whose = f"{who.container or who.resource}" if who is not None else "this one"
            lower = f"set its limit to at most {format_bytes(free_bytes)}, or " if borrows and free_bytes > 0 else ""
            return Reason(
                OfferCode.NOT_GUARANTEED,
                f"with its limit of {format_bytes(limit_bytes)} those on {gpu.label} would add up to more than "
                f"the {format_bytes(gpu.usable_bytes)} usable there, and no daemon takes back for {whose} what others "
                f"borrow: {lower}wait for {'that one' if who is not None else 'an allocation there'} to end",
            )
    return None
