"""A container's request -> an allocation or a refusal (pure).

It refuses only for lack of room, a mode conflict or a bad request. A refusal is final for the pod and its controller
makes about ten new pods a second (verified on kubelet 1.36.2), so what may heal by itself never refuses: such a
container is granted its share and waits for its CDI file.
"""

from collections.abc import Sequence

from deviceplugin.plan.accounts import Accounts, gpus_of
from deviceplugin.plan.advertise import client_room
from deviceplugin.plan.model import Allocation, GpuView, NodeView, Refusal, RefusalCode, ResourceView, allocation_key
from mpsd.config.model import Delivery, UnitMemory
from mpsd.errors import ProtocolError
from mpsd.quantity import format_bytes


def plan(
    view: ResourceView,
    node: NodeView,
    accounts: Accounts,
    device_ids: Sequence[str],
    *,
    generation: int,
    delivery: Delivery = Delivery.CDI,
    gpu_kind: str = "",
    force: bool = False,
) -> Allocation | Refusal:
    """Plans what a container gets for these shares.

    Args:
        generation: makes the key; must be new.
        force: plan without asking for room or mode: the kubelet already runs this container and we take it as it is.
    """
    wanted = tuple(sorted(device_ids))
    if refusal := _bad_request(view, node, wanted):
        return refusal
    try:
        gpu = node.gpus[gpus_of(wanted)[0]]
    except (ProtocolError, KeyError):
        return _invalid(view, f"{wanted[0][:80]!r} is on no GPU of this node")
    size = view.sizes.get(gpu.uuid)
    if size is None:
        return _invalid(
            view, f"{gpu.label} is not open to it: {view.unfit.get(gpu.uuid) or view.closed or 'not in its config'}"
        )
    if not force:
        if view.closed:
            return _invalid(view, view.closed)
        refusal = _no_room(view, gpu, node, accounts, wanted, size.request_bytes)
        if refusal is not None:
            return refusal
    count = len(wanted)
    return Allocation(
        key=allocation_key(view.name, wanted, generation),
        resource=view.name,
        device_ids=wanted,
        generation=generation,
        gpus=(gpu.uuid,),
        request_bytes=size.request_bytes * count,
        limit_bytes=size.limit_bytes * count,
        share_bytes=size.request_bytes,
        memory_total_bytes=gpu.total_bytes,
        mode=view.resource.mode,
        enforcement=view.enforcement,
        thread_percent=view.resource.thread_percent,
        gpu_kind=gpu_kind,
        delivery=delivery,
        adopted=force,
    )


def _bad_request(view: ResourceView, node: NodeView, wanted: tuple[str, ...]) -> Refusal | None:
    if not wanted:
        return _invalid(view, "the request names no device")
    if len(set(wanted)) != len(wanted):
        return _invalid(view, "the request names a device twice")
    try:
        gpus = gpus_of(wanted)
    except ProtocolError as error:
        return _invalid(view, str(error))
    unit = isinstance(view.resource.memory, UnitMemory)
    if not unit and len(wanted) > 1:
        return _invalid(
            view,
            f"a container may ask for exactly 1 of it, not {len(wanted)}: {_larger(view, node, gpus[0], len(wanted))}",
        )
    if len(gpus) > 1:
        return _invalid(
            view,
            f"all {len(wanted)} units of a container must lie on one GPU, but the kubelet chose {len(gpus)} GPUs: "
            f"ask for fewer units; {_most_free(view, node)}",
        )
    return None


def _no_room(
    view: ResourceView, gpu: GpuView, node: NodeView, accounts: Accounts, wanted: tuple[str, ...], share_bytes: int
) -> Refusal | None:
    asked = _asked(view, wanted, share_bytes)
    if gpu.blocked:
        return Refusal(RefusalCode.NO_ROOM, f"{view.name}: {asked} on {gpu.label}, but {gpu.blocked}")
    bound = accounts.mode(gpu.uuid)
    if bound is not None and bound is not view.resource.mode:
        return Refusal(
            RefusalCode.MODE_CONFLICT,
            f"{view.name}: {asked} with {view.resource.mode} on {gpu.label}, which "
            f"{len(accounts.on_gpu(gpu.uuid))} allocation(s) keep bound to {bound}: "
            f"wait for them to end, or ask for a {bound} resource",
        )
    new_bytes = sum(max(0, share_bytes - accounts.share_bytes(view.name, share)) for share in wanted)
    free_bytes = gpu.usable_bytes - accounts.granted_bytes(gpu.uuid)
    if new_bytes > free_bytes:
        return Refusal(
            RefusalCode.NO_ROOM,
            f"{view.name}: {asked} on {gpu.label}, but {format_bytes(max(0, free_bytes))} of "
            f"{format_bytes(gpu.usable_bytes)} usable is free ({len(accounts.on_gpu(gpu.uuid))} allocation(s) hold "
            f"{format_bytes(accounts.granted_bytes(gpu.uuid))}): wait for one to end, or "
            f"{_smaller(view, node, gpu, free_bytes)}",
        )
    if client_room(view.resource.mode, gpu.uuid, node, accounts) <= 0:
        return Refusal(
            RefusalCode.NO_ROOM,
            f"{view.name}: {asked} on {gpu.label}, but its {node.client_limit} MPS clients are taken: "
            "wait for an allocation to end",
        )
    return None


def _asked(view: ResourceView, wanted: tuple[str, ...], share_bytes: int) -> str:
    total = format_bytes(share_bytes * len(wanted))
    return (
        f"the container asks for {total}"
        if len(wanted) == 1
        else f"the container asks for {len(wanted)} units ({total})"
    )


def _larger(view: ResourceView, node: NodeView, gpu: str, count: int) -> str:
    """The resource to ask for instead of several shares: the smallest that holds them."""
    size = view.sizes.get(gpu)
    need = size.request_bytes * count if size else 0
    fitting: list[tuple[int, str]] = []
    for other in node.resources.values():
        share = other.sizes.get(gpu)
        if share is None or other.closed or other.resource.mode is not view.resource.mode:
            continue
        if isinstance(other.resource.memory, UnitMemory):
            units = -(-need // share.request_bytes)
            if units * share.request_bytes <= node.gpus[gpu].usable_bytes:
                fitting.append((units * share.request_bytes, f"{units} of {other.name}"))
        elif share.request_bytes >= need:
            fitting.append((share.request_bytes, f"1 of {other.name} ({format_bytes(share.request_bytes)})"))
    if not need or not fitting:
        return "ask for 1, or have a larger resource or a `unit` resource configured"
    return f"ask for {min(fitting)[1]} instead"


def _smaller(view: ResourceView, node: NodeView, gpu: GpuView, free_bytes: int) -> str:
    """What would fit now, for the pod's owner."""
    fitting = [
        (share.request_bytes, other)
        for other in node.resources.values()
        if not other.closed
        and other.resource.mode is view.resource.mode
        and (share := other.sizes.get(gpu.uuid)) is not None
        and share.request_bytes <= free_bytes
    ]
    if not fitting:
        return "use another node"
    size, other = max(fitting, key=lambda pair: pair[0])
    if isinstance(other.resource.memory, UnitMemory):
        return f"ask for at most {free_bytes // size} of {other.name}"
    return f"ask for {other.name} ({format_bytes(size)})"


def _most_free(view: ResourceView, node: NodeView) -> str:
    largest = max((len(all_ids) for all_ids in view.device_ids.values()), default=0)
    return f"one GPU of this node holds at most {largest}"


def _invalid(view: ResourceView, text: str) -> Refusal:
    return Refusal(RefusalCode.INVALID, f"{view.name}: {text}")
