"""What an annotated container asks for -> an allocation or a refusal (pure).

Other than Allocate, a creation that is refused is tried again by the kubelet, so everything that is in the way now
refuses, with its reason. The scheduler chose the GPUs; here it is only judged whether the choice can hold.
"""

from collections.abc import Collection, Iterable

from msgspec import structs

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import ANNOTATED, Allocation, ContainerAsk, Refusal, allocation_key
from deviceplugin.plan.domains import domain_by_gpu, joining_objection
from deviceplugin.plan.enforcement import (
    borrowing_conflict,
    level,
    level_words,
    mps_level,
    not_hard,
)
from deviceplugin.plan.isolation import level_left
from deviceplugin.plan.model import AnnotatedView, GpuView, GroupView, NodeView
from deviceplugin.plan.reasons import EnforcementCode, OfferCode, RefusalCode
from deviceplugin.plan.room import client_room
from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason, message_of
from mpsd.config.model import Delivery, Enforcement
from mpsd.gpu.model import MIB, Mode
from mpsd.shares import capability
from mpsd.shares.groups import set_name


def plan_container(
    ask: ContainerAsk,
    node: NodeView,
    accounts: Accounts,
    *,
    generation: int,
    gpu_kind: str = "",
    after: tuple[str, ...] = (),
    force: bool = False,
) -> Allocation | Refusal:
    """Plans what an annotated container gets.

    Args:
        accounts: without what the same container held before, and without `after`.
        generation: makes the key; must be new.
        after: keys of other containers' allocations of its pod, whose turn it takes.
        gpu_kind: the CDI kind its GPUs come by, empty where the runtime makes devices from NVIDIA_VISIBLE_DEVICES.
        force: plan without asking for room and level: it runs already, and what it takes must count.
    """
    gpus = [node.gpus[uuid] for uuid in ask.gpus if uuid in node.gpus]
    group = _group(ask, node)
    view = node.annotated
    if view is None:
        return Refusal(
            RefusalCode.NOT_SERVED,
            "pods described by annotations are not served on this node: its config has no `annotations`",
        )
    if len(gpus) < len(ask.gpus) or not gpus:
        unknown = ", ".join(uuid for uuid in ask.gpus if uuid not in node.gpus)
        return Refusal(RefusalCode.UNKNOWN_GPU, f"GPU {unknown or '(none)'} is not on this node")
    given = _given(ask, view, gpus)
    asked = ask
    if view.reduces:
        ask = reduced(ask, gpus, accounts)
    refusal = (
        _not_for_annotated(gpus)
        or _too_large(ask, gpus)
        or (None if force else _not_enforceable(ask, view, gpus, given))  # before what waiting would help with
        or _of_group(group)
        or _mode_conflict(ask, view, gpus, accounts, asked.request_bytes)
    )
    unreached = joining_objection(gpus, node, accounts) if _wants_daemon(ask, gpus, given) else None
    if refusal is None and not force:
        refusal = (
            _no_room(ask, gpus, accounts, asked.request_bytes)
            or _one_limit(ask, gpus, node, accounts, given)
            or _out_of_reach(ask, gpus, accounts, given, unreached)
        )
    if refusal is not None:
        return refusal
    reaches = _wants_daemon(ask, gpus, given) and unreached is None
    return Allocation(
        key=allocation_key(ANNOTATED, (ask.container.id,), generation),
        resource=ANNOTATED,
        device_ids=(ask.container.id,),
        generation=generation,
        group=set_name(ask.gpus) if group is None and reaches else group.name if group is not None else "",
        gpus=ask.gpus,
        request_bytes=ask.request_bytes,
        limit_bytes=ask.limit_bytes,
        share_bytes=ask.request_bytes,
        memory_total_bytes=max(gpu.info.memory_total_bytes for gpu in gpus),
        mode=ask.mode,
        enforcement=given,
        minimum=view.minimum,
        soft_bytes=ask.request_bytes if given is Enforcement.HARD else 0,
        main_socket=reaches and ask.mode is Mode.TIME_SLICING,
        thread_percent=ask.thread_percent,
        gpu_kind=gpu_kind,
        adopted=force,
        after=after,
        container=ask.container,
        asked_request_bytes=asked.request_bytes,
        asked_limit_bytes=asked.limit_bytes,
    )


def reduced(ask: ContainerAsk, gpus: Collection[GpuView], accounts: Accounts) -> ContainerAsk:
    """What is left of a request whose scheduler counted the whole memory of its GPUs: as KAI does, which knows nothing
    of what drivers and nodes keep back. A part of a GPU is that part of what is usable, whoever else is there. The same
    request where it fits, or where more than that is missing."""
    counted_bytes = ask.request_bytes
    if ask.of_total:
        ask = _scaled(ask, gpus)
    request_bytes, limit_bytes = ask.request_bytes, ask.limit_bytes
    for gpu in gpus:
        if accounts.booked_bytes(gpu.uuid) + counted_bytes > gpu.info.memory_total_bytes:
            return ask
        if ask.limit_bytes <= gpu.info.memory_total_bytes:
            limit_bytes = min(limit_bytes, gpu.usable_bytes)
        free_bytes = gpu.usable_bytes - accounts.granted_bytes(gpu.uuid)
        request_bytes = min(request_bytes, limit_bytes, max(0, free_bytes))
    if request_bytes * 2 < ask.request_bytes:
        return ask
    if ask.limit_bytes == ask.request_bytes:
        limit_bytes = request_bytes
    return structs.replace(ask, request_bytes=request_bytes, limit_bytes=limit_bytes)


def _scaled(ask: ContainerAsk, gpus: Iterable[GpuView]) -> ContainerAsk:
    """Sizes made of total memory, made of usable memory: parts that sum to a whole GPU fit on it, in any order."""

    def scaled_bytes(size_bytes: int) -> int:
        least = min(size_bytes * gpu.usable_bytes // gpu.info.memory_total_bytes for gpu in gpus)
        return max(least // MIB, 1) * MIB

    return structs.replace(
        ask, request_bytes=scaled_bytes(ask.request_bytes), limit_bytes=scaled_bytes(ask.limit_bytes)
    )


def shortfall(allocation: Allocation) -> str:
    """That and why an annotated container has less than it asks for, empty when it has not (pure)."""
    request, limit = allocation.request_bytes, allocation.limit_bytes
    asked_request, asked_limit = allocation.asked_request_bytes, allocation.asked_limit_bytes
    if allocation.container is None or (request >= asked_request and limit >= asked_limit):
        return ""
    got = f"{format_bytes(request)} of the {format_bytes(asked_request)}"
    if request >= asked_request:
        got = f"a limit of {format_bytes(limit)} instead of the {format_bytes(asked_limit)}"
    return f"it gets {got} it asks for: its scheduler counts memory that the driver and `memory.reserve` keep back"


def same_plan(old: Allocation, new: Allocation) -> bool:
    """Whether two plans of one container mean the same, whenever they were made and whosever turn they take."""
    same = structs.replace(
        new,
        key=old.key,
        generation=old.generation,
        created_unix_s=old.created_unix_s,
        adopted=old.adopted,
        after=old.after,
    )
    return same == old


def same_ask(old: Allocation, ask: ContainerAsk) -> bool:
    """Whether a plan is one of this request."""
    wanted = (ask.request_bytes, ask.limit_bytes, ask.mode, frozenset(ask.gpus))
    return (old.asked_request_bytes, old.asked_limit_bytes, old.mode, frozenset(old.gpus)) == wanted


def _group(ask: ContainerAsk, node: NodeView) -> GroupView | None:
    """The group of exactly these GPUs, None when the config has none."""
    named = set(ask.gpus)
    groups = [group for group in node.groups.values() if set(group.gpus) == named]
    return next((group for group in groups if not group.unlisted), next(iter(groups), None))


def _not_for_annotated(gpus: list[GpuView]) -> Refusal | None:
    for gpu in gpus:
        if reason := gpu.lost or gpu.blocked:
            return Refusal(reason.code, f"{gpu.label} takes nothing new: {reason}")
        if not gpu.for_annotated:
            return Refusal(
                RefusalCode.NOT_FOR_ANNOTATED,
                f"{gpu.label} is not for annotated pods: `annotations.gpus` in the node's config does not name it",
            )
    return None


def _too_large(ask: ContainerAsk, gpus: list[GpuView]) -> Refusal | None:
    if ask.request_bytes > ask.limit_bytes:
        return Refusal(
            RefusalCode.REQUEST_ABOVE_LIMIT,
            f"its request of {format_bytes(ask.request_bytes)} is above its limit of {format_bytes(ask.limit_bytes)}",
        )
    for gpu in gpus:
        for name, size_bytes in (("request", ask.request_bytes), ("limit", ask.limit_bytes)):
            if size_bytes > gpu.usable_bytes:
                return Refusal(
                    RefusalCode.MORE_THAN_USABLE,
                    f"its {name} of {format_bytes(size_bytes)} is above the {format_bytes(gpu.usable_bytes)} usable on "
                    f"{gpu.label}: ask for at most that",
                )
    return None


def _of_group(group: GroupView | None) -> Refusal | None:
    """Why a declared group, or one GPU, takes nothing new."""
    reason = None if group is None else group.lost or group.blocked or group.unlisted
    return (
        None if group is None or reason is None else Refusal(reason.code, f"{group.label} takes nothing new: {reason}")
    )


def _wants_daemon(ask: ContainerAsk, gpus: Iterable[GpuView], given: Enforcement) -> bool:
    """Whether an MPS daemon is to serve it: for sm-sharing; in time-slicing it is asked to take borrowed memory back,
    which only protocol 3 knows and hard limits need."""
    return ask.mode is Mode.SM_SHARING or (given is Enforcement.HARD and all(gpu.protocol == 3 for gpu in gpus))


def _out_of_reach(
    ask: ContainerAsk, gpus: list[GpuView], accounts: Accounts, given: Enforcement, unreached: Reason | None
) -> Refusal | None:
    """Why it can't be served by the daemons there are. In time-slicing it needs none as long as limits don't add up to
    more than there is: nobody can have borrowed what is its own."""
    if ask.mode is Mode.SM_SHARING:
        if unreached is None:
            conflict = _borrowing(ask, gpus, accounts, takes_back=given is Enforcement.HARD)
            return None if conflict is None else Refusal(conflict.code, conflict.message)
        return Refusal(unreached.code, unreached.message)
    takes_back = unreached is None and _wants_daemon(ask, gpus, given)
    conflict = _borrowing(ask, gpus, accounts, takes_back=takes_back)
    if conflict is None:
        return None
    if unreached is None:
        return Refusal(conflict.code, conflict.message)
    return Refusal(conflict.code, f"{conflict}; its own daemon: {unreached}")


def _borrowing(ask: ContainerAsk, gpus: list[GpuView], accounts: Accounts, *, takes_back: bool) -> Reason | None:
    borrows = ask.limit_bytes > ask.request_bytes
    return borrowing_conflict(gpus, ask.limit_bytes, accounts, borrows=borrows, takes_back=takes_back)


def _one_limit(
    ask: ContainerAsk, gpus: list[GpuView], node: NodeView, accounts: Accounts, given: Enforcement
) -> Refusal | None:
    """Why MPS protocol 2 would not hold it, or another, to its limit: all clients of a daemon on several GPUs have its
    one limit, and a container that sees some of them only may number them otherwise."""
    view = node.annotated
    if ask.mode is not Mode.SM_SHARING or all(gpu.protocol == 3 for gpu in gpus) or view is None:
        return None
    by_gpu, named = domain_by_gpu(node, accounts), {gpu.uuid for gpu in gpus}
    joint = (by_gpu[gpu.uuid].gpus for gpu in gpus if gpu.uuid in by_gpu)
    around = {uuid for gpus in joint if len(gpus) > 1 for uuid in gpus}
    live = {a.key: a for uuid in sorted(around) for a in accounts.on_gpu(uuid).values() if a.mode is Mode.SM_SHARING}
    loose = given is not Enforcement.HARD and view.minimum is not Enforcement.NONE
    todo = "wait for that to end, name other GPUs, or use a driver with MPS protocol 3 (r615 or newer)"
    if len(gpus) > 1 and view.share and loose:
        return Refusal(
            EnforcementCode.ONE_LIMIT_PER_GROUP,
            "MPS protocol 2 can't hold a container on several GPUs to a limit of its own where resources use these, "
            "too (`annotations.share`): name one GPU, or use a driver with MPS protocol 3 (r615 or newer)",
        )
    for other in live.values():
        if set(other.gpus) != named and max(len(other.gpus), len(named)) > 1:
            return Refusal(
                OfferCode.OTHER_LIMIT,
                f"its GPUs and others have an MPS daemon of protocol 2 for {other.container or other.resource}"
                f", and with that protocol all containers of a daemon use the same GPUs: {todo}",
            )
        if len(named) > 1 and loose and other.limit_bytes != ask.limit_bytes:
            return Refusal(
                OfferCode.OTHER_LIMIT,
                f"it asks for {format_bytes(ask.limit_bytes)}, and MPS protocol 2 has one limit for all containers on "
                f"several GPUs, which is {format_bytes(other.limit_bytes)} for {other.container or other.resource}: "
                f"ask for the same limit, or {todo}",
            )
    return None


def _incapable(gpus: Iterable[GpuView]) -> str:
    """Why MPS holds nobody to limits on these GPUs, empty when it does."""
    return capability.objection(gpu.info for gpu in gpus)


def _not_enforceable(ask: ContainerAsk, view: AnnotatedView, gpus: list[GpuView], given: Enforcement) -> Refusal | None:
    why = message_of(ask.isolation or not_hard(Delivery.CDI, view.hard))
    incapable = _incapable(gpus)
    if incapable and ask.thread_percent is not None:
        text = f"{incapable}: name another GPU, or no thread percentage"
        return Refusal(EnforcementCode.GPU_CANNOT_CAP_THREADS, text)
    if ask.limit_bytes > ask.request_bytes and given is not Enforcement.HARD:
        return Refusal(
            EnforcementCode.BURST_NEEDS_HARD,
            "its limit is above its request, which needs hard enforcement (driver r615 or newer), and this node "
            f"does not have it: {why}; or set the limit to the request",
        )
    if ask.limit_bytes > ask.request_bytes and not all(gpu.protocol == 3 for gpu in gpus):
        return Refusal(
            EnforcementCode.BURST_NEEDS_PROTOCOL_3,
            "its limit is above its request, and memory is borrowed and taken back under MPS protocol 3 only "
            "(`mps.protocol` auto or 3): set the limit to the request",
        )
    if given.rank >= view.minimum.rank:
        return None
    sharing = level_left(ask.isolation, Enforcement.NONE if incapable else mps_level(Mode.SM_SHARING))
    if incapable and ask.mode is Mode.SM_SHARING:
        why = f"{incapable}; {why}"
    elif ask.mode is Mode.TIME_SLICING and sharing.rank >= view.minimum.rank:
        return Refusal(
            EnforcementCode.TIME_SLICING_NEEDS_HARD,
            "its mode is time-slicing (the default), which has a memory limit only with hard enforcement (driver r615 "
            f"or newer), and this node does not have it: {why}; or set gpu-compute.mode to sm-sharing",
        )
    text = f"this node's `annotations.enforcement` demands {view.minimum} limits, and it gives {level_words(given)}"
    return Refusal(
        EnforcementCode.BELOW_MINIMUM if ask.isolation is None else ask.isolation.code,
        f"{text}: {why}",
    )


def _given(ask: ContainerAsk, view: AnnotatedView, gpus: list[GpuView]) -> Enforcement:
    """The level that it gets."""
    given = level_left(ask.isolation, level(ask.mode, Delivery.CDI, view.hard))
    return Enforcement.NONE if given is Enforcement.COOPERATIVE and _incapable(gpus) else given


def _mode_conflict(
    ask: ContainerAsk,
    view: AnnotatedView,
    gpus: list[GpuView],
    accounts: Accounts,
    asked_bytes: int,
) -> Refusal | None:
    for gpu in gpus:
        bound = accounts.mode(gpu.uuid)
        if bound is not None and bound is not ask.mode:
            instead = structs.replace(ask, mode=bound)
            can = _not_enforceable(instead, view, gpus, _given(instead, view, gpus)) is None
            return Refusal(
                OfferCode.MODE_BOUND,
                f"it asks for {format_bytes(asked_bytes)} with {ask.mode} on {gpu.label}, which "
                f"{len(accounts.on_gpu(gpu.uuid))} allocation(s) keep bound to {bound}: a GPU has one compute mode: "
                f"wait for them to end, {f'set gpu-compute.mode to {bound}, ' if can else ''}or use another GPU",
            )
    return None


def _no_room(ask: ContainerAsk, gpus: list[GpuView], accounts: Accounts, asked_bytes: int) -> Refusal | None:
    asked = f"it asks for {format_bytes(asked_bytes)}"
    for gpu in gpus:
        held = accounts.on_gpu(gpu.uuid)
        free_bytes = gpu.usable_bytes - accounts.granted_bytes(gpu.uuid)
        if ask.request_bytes > free_bytes:
            return Refusal(
                OfferCode.MEMORY_TAKEN,
                f"{asked} on {gpu.label}, but {format_bytes(max(0, free_bytes))} of {format_bytes(gpu.usable_bytes)} "
                f"usable is free ({len(held)} allocation(s) hold {format_bytes(accounts.granted_bytes(gpu.uuid))}): "
                f"{_of_the_same_pod(ask, held.values())}",
            )
        if client_room(ask.mode, gpu, accounts) <= 0:
            return Refusal(
                OfferCode.CLIENTS_TAKEN,
                f"{asked} on {gpu.label}, but its {gpu.client_limit} MPS clients are taken: wait for an allocation to "
                "end",
            )
    return None


def _of_the_same_pod(ask: ContainerAsk, held: Iterable[Allocation]) -> str:
    """What to do about a lack of room."""
    own = {
        live.container.container: live.request_bytes
        for live in held
        if live.container and live.container.pod_uid == ask.container.pod_uid
    }
    if not own:
        return "wait for one to end, or ask for less"
    return (
        f"{format_bytes(sum(own.values()))} of it are of {', '.join(own)} in the same pod, which have not ended as far "
        "as the container runtime tells: wait for that, or ask for less"
    )
