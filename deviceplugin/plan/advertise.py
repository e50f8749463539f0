"""Which devices a resource lists now and which of them are Healthy (pure).

Listed IDs are fixed; health moves. A share that the kubelet holds is Unhealthy only when its GPU is lost: an in-use
Unhealthy share kills running pods at the next kubelet restart (verified on kubelet 1.36.2).
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from deviceplugin.plan import ids
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.enforcement import conflict
from deviceplugin.plan.model import Device, DeviceList, GpuView, GroupView, NodeView, ResourceView
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.plan.view import numa_nodes
from mpsd.common.reason import Reason
from mpsd.config.model import Enforcement, UnitMemory
from mpsd.gpu.model import Mode

NOTHING = DeviceList((), ())
ALL_TAKEN = Reason(OfferCode.ALL_TAKEN, "all of its shares are taken")
NOT_OPEN = Reason(OfferCode.NO_GPU_SELECTED, "it is not open to this resource")


class Advertisement(msgspec.Struct, frozen=True):
    """What a resource lists. `reason` says why nothing more can be had, None while something can.

    `group_reasons` says the same per group (a GPU's UUID, or the name of a declared one); `offer` is the GPU whose free
    units are on offer (unit resources only).
    """

    devices: tuple[Device, ...]
    reason: Reason | None = None
    group_reasons: tuple[tuple[str, Reason], ...] = ()
    offer: str | None = None

    @property
    def healthy(self) -> int:
        """How many devices are Healthy."""
        return sum(device.healthy for device in self.devices)


def advertise(view: ResourceView, node: NodeView, accounts: Accounts, offer: str | None = None) -> Advertisement:
    """The list of one resource.

    Args:
        offer: for a unit resource, the GPU on offer before; it is kept while the caller wants the offer to rest
            (None: take the GPU with most free units). A pod's later containers must find the units of the GPU its
            earlier ones got.
    """
    held = accounts.held_shares(view.name)
    held_by_group: dict[str, list[str]] = {}
    for share in held:
        held_by_group.setdefault(ids.group_of(share), []).append(share)
    fits = {name: free_fit(view, node.groups[name], accounts) for name in view.device_ids}
    room = {name: _available(view, name, count, held) for name, (count, _) in fits.items()}
    unit = isinstance(view.resource.memory, UnitMemory)
    if unit and (offer is None or not room.get(offer)):
        offer = max(room, key=lambda name: room[name], default=None)
    devices: list[Device] = []
    for name in dict.fromkeys((*view.device_ids, *held_by_group)):
        offered = not unit or name == offer
        free = room.get(name, 0) if offered else 0
        held_here = held_by_group.get(name, [])
        devices.extend(_group_devices(view, name, node.groups.get(name), held, held_here, free, offered))
    reasons = tuple((name, reason) for name, (_, reason) in fits.items() if reason) + tuple(view.unfit.items())
    reason = view.closed
    if reason is None and not any(room.values()):
        reason = reasons[0][1] if reasons else ALL_TAKEN
    return Advertisement(tuple(devices), reason, reasons, offer if unit else None)


def free_fit(view: ResourceView, group: GroupView, accounts: Accounts) -> tuple[int, Reason | None]:
    """How many more shares the group has memory and clients for; with 0 comes the reason."""
    mode = view.resource.mode
    if reason := _takes_nothing(view, group):
        return 0, reason
    size = view.sizes.get(group.name)
    if size is None:
        return 0, view.unfit.get(group.name, NOT_OPEN)
    fits = []
    for gpu in group.members:
        bound = accounts.mode(gpu.uuid)
        if bound is not None and bound is not mode:
            held_by = _count(len(accounts.on_gpu(gpu.uuid)), "allocation")
            return 0, group.of_member(gpu, Reason(OfferCode.MODE_BOUND, f"it is bound to {bound} by {held_by}"))
        clients = client_room(mode, gpu, accounts)
        if clients <= 0:
            taken = Reason(OfferCode.CLIENTS_TAKEN, f"its {gpu.client_limit} MPS clients are taken")
            return 0, group.of_member(gpu, taken)
        free_bytes = gpu.usable_bytes - accounts.granted_bytes(gpu.uuid)
        count = max(0, free_bytes // size.request_bytes)
        if count == 0:
            free = f"{max(0, free_bytes) >> 20} MiB of {gpu.usable_bytes >> 20} MiB free"
            taken = Reason(OfferCode.MEMORY_TAKEN, f"its memory is taken by other shares: {free}")
            over = Reason(OfferCode.OVER_COMMITTED, f"over-committed: {free}")
            return 0, group.of_member(gpu, over if free_bytes < 0 else taken)
        # One container may take any number of units, but each fixed share is a client of its own.
        fits.append(count if isinstance(view.resource.memory, UnitMemory) else min(count, clients))
    if reason := conflict(view, group, accounts):
        return 0, reason
    return min(fits, default=0), None


def client_room(mode: Mode, gpu: GpuView, accounts: Accounts, after: Collection[str] = ()) -> int:
    """How many more containers the GPU takes. The MPS client cap counts allocations over all resources. `after`: see
    Accounts.clients."""
    if mode is not Mode.SM_SHARING:
        return gpu.client_limit
    return gpu.client_limit - accounts.clients(gpu.uuid, after)


def _available(view: ResourceView, name: str, fit: int, held: Mapping[str, bool]) -> int:
    """How many free listed shares can be Healthy; those only waiting for release count as free."""
    if fit == 0:
        return 0
    return min(fit, len(view.device_ids[name]) - sum(1 for share in held if view.group_of.get(share) == name))


def _group_devices(
    view: ResourceView,
    name: str,
    group: GroupView | None,
    held: Mapping[str, bool],
    held_here: list[str],
    free: int,
    offered: bool,
) -> Iterable[Device]:
    """The devices of one group in slot order, then held ones that the config no longer lists."""
    listed = view.devices.get(name, NOTHING)
    if not held_here and free in (0, len(listed.healthy)):
        return listed.healthy if free else listed.unhealthy
    lost = group is not None and group.lost is not None
    # A share whose pod is gone, but which we still count, may be taken again unless the GPU takes nothing new.
    vacated_healthy = offered and group is not None and not _takes_nothing(view, group)
    devices = []
    for well, ill in zip(listed.healthy, listed.unhealthy, strict=True):
        at_kubelet = held.get(well.id)
        if at_kubelet is None:
            healthy = free > 0
            free -= healthy
        else:
            healthy = not lost and (at_kubelet or vacated_healthy)
        devices.append(well if healthy else ill)
    extra = [share for share in held_here if share not in view.group_of]
    numa = () if group is None else numa_nodes(view.resource, group)
    devices += [Device(share, not lost and held[share], numa) for share in sorted(extra, key=ids.slot_of)]
    return devices


def _takes_nothing(view: ResourceView, group: GroupView) -> Reason | None:
    needs_daemon = view.resource.mode is Mode.SM_SHARING or (group.burst and view.enforcement is Enforcement.HARD)
    daemon_waiting = group.daemon_waiting if needs_daemon else None
    hindered = group.lost or group.blocked or group.reserved or group.waiting or daemon_waiting
    return view.closed or view.waiting or hindered


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
