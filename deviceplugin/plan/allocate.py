"""A container's request -> an allocation or a refusal (pure).

It refuses only for lack of room, a mode conflict or a bad request. A refusal is final for the pod and its controller
makes about ten new pods a second (verified on kubelet 1.36.2), so what may heal by itself never refuses: such a
container is granted its share and waits for its CDI file.
"""

from collections.abc import Sequence

from deviceplugin.plan import ids
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import Allocation, Refusal, allocation_key
from deviceplugin.plan.choice import fits, goes_without_daemon
from deviceplugin.plan.enforcement import conflict, soft_bytes
from deviceplugin.plan.model import GpuView, GroupView, NodeView, ResourceView
from deviceplugin.plan.reasons import OfferCode, RefusalCode
from deviceplugin.plan.room import client_room
from mpsd.common.errors import ProtocolError
from mpsd.common.quantity import format_bytes
from mpsd.config.model import Delivery, UnitMemory


def plan(
    view: ResourceView,
    node: NodeView,
    accounts: Accounts,
    device_ids: Sequence[str],
    *,
    generation: int,
    delivery: Delivery = Delivery.CDI,
    gpu_kind: str = "",
    after: tuple[str, ...] = (),
    force: bool = False,
) -> Allocation | Refusal:
    """Plans what a container gets for these shares.

    Args:
        generation: makes the key; must be new.
        after: see Allocation.
        force: plan without asking for room or mode: the kubelet already runs this container and we take it as it is.
    """
    wanted = tuple(sorted(device_ids))
    if refusal := _bad_request(view, node, accounts, wanted):
        return refusal
    name = ids.group_of(wanted[0])
    group = node.group(name)
    if group is None:
        text = f"{wanted[0]!r} is on no GPU of this node and in no group of its config"
        return _refused(view, RefusalCode.UNKNOWN_GPU, text)
    size = view.sizes.get(name)
    if size is None:
        why = view.unfit.get(name) or view.closed or "not in its config"
        return _refused(view, RefusalCode.NOT_OFFERED_THERE, f"{group.label} is not open to it: {why}")
    if not force:
        if view.closed:
            return _refused(view, RefusalCode.RESOURCE_CLOSED, view.closed.message)
        refusal = _no_room(view, group, node, accounts, wanted, size.request_bytes, after)
        if refusal is not None:
            return refusal
        if unlisted := [share for share in wanted if not _is_known(view, accounts, share)]:
            text = f"{unlisted[0][:80]!r} is none of its shares: ask for one that this node lists"
            return _refused(view, RefusalCode.UNKNOWN_SHARE, text)
    count = len(wanted)
    given = view.enforcement_on(name)
    return Allocation(
        key=allocation_key(view.name, wanted, generation),
        resource=view.name,
        device_ids=wanted,
        generation=generation,
        group=name,
        gpus=group.gpus,
        slot=None if isinstance(view.resource.memory, UnitMemory) or group.is_set else ids.slot_of(wanted[0]),
        request_bytes=size.request_bytes * count,
        limit_bytes=size.limit_bytes * count,
        share_bytes=size.request_bytes,
        # Of the largest, so that a workload that takes its fraction of each GPU stays within the limit on all.
        memory_total_bytes=max(gpu.info.memory_total_bytes for gpu in group.members),
        mode=view.resource.mode,
        enforcement=given,
        minimum=view.resource.enforcement,
        soft_bytes=soft_bytes(given, group, accounts, size.request_bytes * count),
        main_socket=False if goes_without_daemon(view, group, node, accounts) else None,
        thread_percent=view.resource.thread_percent,
        gpu_kind=gpu_kind,
        delivery=delivery,
        adopted=force,
        after=after,
    )


def _is_known(view: ResourceView, accounts: Accounts, share: str) -> bool:
    """Whether a share is listed, or held since it was."""
    return share in view.group_of or accounts.is_held(view.name, share)


def _bad_request(view: ResourceView, node: NodeView, accounts: Accounts, wanted: tuple[str, ...]) -> Refusal | None:
    if not wanted:
        return _refused(view, RefusalCode.NO_SHARE, "the request names no device")
    if len(set(wanted)) != len(wanted):
        return _refused(view, RefusalCode.SHARE_TWICE, "the request names a device twice")
    try:
        groups = ids.groups_of(wanted)
    except ProtocolError as error:
        return _refused(view, RefusalCode.NOT_A_SHARE, str(error))
    unit = isinstance(view.resource.memory, UnitMemory)
    if not unit and len(wanted) > 1:
        larger = _larger(view, node, groups[0], len(wanted))
        text = f"a container may ask for exactly 1 of it, not {len(wanted)}: {larger}"
        return _refused(view, RefusalCode.ONE_SHARE_ONLY, text)
    if len(groups) > 1:
        return _refused(
            view,
            RefusalCode.SEVERAL_GPUS,
            f"all {len(wanted)} units of a container must lie on one GPU, but the kubelet chose units of "
            f"{len(groups)} GPUs: {_whole(view, node, accounts, wanted)}",
        )
    return None


def _no_room(
    view: ResourceView,
    group: GroupView,
    node: NodeView,
    accounts: Accounts,
    wanted: tuple[str, ...],
    share_bytes: int,
    after: tuple[str, ...],
) -> Refusal | None:
    asked = _asked(view, wanted, share_bytes)
    if reason := group.blocked or group.reserved:
        return _refused(view, reason.code, f"{asked} on {group.label}, but {reason}")
    for gpu in group.members:
        if refusal := _no_room_on(view, gpu, node, accounts, wanted, share_bytes, after):
            return refusal
    if reason := conflict(view, group, accounts, len(wanted)):
        return _refused(view, reason.code, f"{asked} on {group.label}, but {reason}")
    return None


def _no_room_on(
    view: ResourceView,
    gpu: GpuView,
    node: NodeView,
    accounts: Accounts,
    wanted: tuple[str, ...],
    share_bytes: int,
    after: tuple[str, ...],
) -> Refusal | None:
    asked = _asked(view, wanted, share_bytes)
    bound = accounts.mode(gpu.uuid)
    if bound is not None and bound is not view.resource.mode:
        others = (other for other in node.resources.values() if other.resource.mode is bound and not other.closed)
        group = ids.group_of(wanted[0])
        instead = next((f"ask for {other.name}, which is {bound}" for other in others if group in other.sizes), "")
        return _refused(
            view,
            OfferCode.MODE_BOUND,
            f"{asked} with {view.resource.mode} on {gpu.label}, which "
            f"{len(accounts.on_gpu(gpu.uuid))} allocation(s) keep bound to {bound}: "
            f"wait for them to end, or {instead or 'use another node'}",
        )
    new_bytes = sum(max(0, share_bytes - accounts.share_bytes(view.name, share, gpu.uuid)) for share in wanted)
    free_bytes = gpu.usable_bytes - accounts.granted_bytes(gpu.uuid)
    if new_bytes > free_bytes:
        return _refused(
            view,
            OfferCode.MEMORY_TAKEN,
            f"{asked} on {gpu.label}, but {format_bytes(max(0, free_bytes))} of "
            f"{format_bytes(gpu.usable_bytes)} usable is free ({len(accounts.on_gpu(gpu.uuid))} allocation(s) hold "
            f"{format_bytes(accounts.granted_bytes(gpu.uuid))}): wait for one to end, or "
            f"{_smaller(view, node, ids.group_of(wanted[0]), free_bytes)}",
        )
    if client_room(view.resource.mode, gpu, accounts, after) <= 0:
        return _refused(
            view,
            OfferCode.CLIENTS_TAKEN,
            f"{asked} on {gpu.label}, but its {gpu.client_limit} MPS clients are taken: wait for an allocation to end",
        )
    return None


def _asked(view: ResourceView, wanted: tuple[str, ...], share_bytes: int) -> str:
    total = format_bytes(share_bytes * len(wanted))
    return (
        f"the container asks for {total}"
        if len(wanted) == 1
        else f"the container asks for {len(wanted)} units ({total})"
    )


def _larger(view: ResourceView, node: NodeView, group: str, count: int) -> str:
    """The resource to ask for instead of several shares: the smallest that holds them."""
    size = view.sizes.get(group)
    need = size.request_bytes * count if size else 0
    fitting: list[tuple[int, str]] = []
    for other in node.resources.values():
        share = other.sizes.get(group)
        if share is None or other.closed or other.resource.mode is not view.resource.mode:
            continue
        if isinstance(other.resource.memory, UnitMemory):
            units = -(-need // share.request_bytes)
            if units * share.request_bytes <= node.groups[group].usable_bytes:
                fitting.append((units * share.request_bytes, f"{units} of {other.name}"))
        elif share.request_bytes >= need:
            fitting.append((share.request_bytes, f"1 of {other.name} ({format_bytes(share.request_bytes)})"))
    if not need or not fitting:
        return "ask for 1, or have a larger resource or a `unit` resource configured"
    return f"ask for {min(fitting)[1]} instead"


def _smaller(view: ResourceView, node: NodeView, group: str, free_bytes: int) -> str:
    """What would fit now, for the pod's owner."""
    fitting = [
        (share.request_bytes, other)
        for other in node.resources.values()
        if not other.closed
        and other.resource.mode is view.resource.mode
        and (share := other.sizes.get(group)) is not None
        and share.request_bytes <= free_bytes
    ]
    if not fitting:
        return "use another node"
    size, other = max(fitting, key=lambda pair: pair[0])
    if isinstance(other.resource.memory, UnitMemory):
        return f"ask for at most {free_bytes // size} of {other.name}"
    return f"ask for {other.name} ({format_bytes(size)})"


def _whole(view: ResourceView, node: NodeView, accounts: Accounts, wanted: tuple[str, ...]) -> str:
    """What to do where a container's units came from several GPUs. Those that its pod's init containers have are free
    again when the pod is gone."""
    room, now = 0, fits(view, node, accounts)
    for name in view.device_ids:
        again = sum(1 for share in wanted if view.group_of.get(share) == name and accounts.is_held(view.name, share))
        room = max(room, now[name][0] + again)
    if room >= len(wanted):
        return "what was on offer changed while its pod was admitted; create the pod again, one GPU has room for it"
    if room:
        return f"no GPU has that many free: ask for at most {room}, or wait for an allocation to end"
    return "no GPU has any free now: wait for an allocation to end, or use another node"


def _refused(view: ResourceView, code: str, text: str) -> Refusal:
    return Refusal(code, f"{view.name}: {text}")
