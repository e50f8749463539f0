"""Which devices a resource lists now and which of them are Healthy (pure).

Listed IDs are fixed; health moves. A share that the kubelet holds is Unhealthy only when its GPU is lost: an in-use
Unhealthy share kills running pods at the next kubelet restart (verified on kubelet 1.36.2).
"""

from collections.abc import Mapping

import msgspec

from deviceplugin.plan import ids
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.choice import fits
from deviceplugin.plan.model import Device, DeviceList, GroupView, NodeView, ResourceView
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.plan.room import takes_nothing
from deviceplugin.plan.view import numa_nodes
from mpsd.common.reason import Reason
from mpsd.config.model import UnitMemory

NOTHING = DeviceList((), ())
NO_PARTS: Mapping[str, "Part"] = {}
ALL_TAKEN = Reason(OfferCode.ALL_TAKEN, "all of its shares are taken")


class Part(msgspec.Struct, frozen=True):
    """What a list says of one group. `made_of` is all that its devices follow from: where that stays the same, so does
    the part, and whoever serialises it can tell by its identity."""

    devices: tuple[Device, ...]
    made_of: tuple[object, ...] = ()


class Advertisement(msgspec.Struct, frozen=True):
    """What a resource lists, group by group. `reason` says why nothing more can be had, None while something can.

    `group_reasons` says the same per group (a GPU's UUID, or the name of a declared one), and of sets of GPUs once for
    each code; `offer` is the GPU whose free units are on offer (unit resources only).
    """

    parts: Mapping[str, Part]
    reason: Reason | None = None
    group_reasons: tuple[tuple[str, Reason], ...] = ()
    offer: str | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """All of them, in the order in which they are listed."""
        return tuple(device for part in self.parts.values() for device in part.devices)

    @property
    def healthy(self) -> int:
        """How many devices are Healthy."""
        return sum(device.healthy for part in self.parts.values() for device in part.devices)

    def lists_as(self, other: "Advertisement") -> bool:
        """Whether a kubelet would see no difference."""
        ours, theirs = ([part.devices for part in one.parts.values() if part.devices] for one in (self, other))
        return ours == theirs


def advertise(
    view: ResourceView,
    node: NodeView,
    accounts: Accounts,
    offer: str | None = None,
    before: Mapping[str, Part] = NO_PARTS,
) -> Advertisement:
    """The list of one resource.

    Args:
        offer: for a unit resource, the GPU on offer before; it is kept while the caller wants the offer to rest
            (None: take the GPU with most free units). A pod's later containers must find the units of the GPU its
            earlier ones got.
        before: the parts of its last list, to keep those that stay as they are.
    """
    held = accounts.held_shares(view.name)
    held_by_group: dict[str, list[str]] = {}
    for share in held:
        held_by_group.setdefault(ids.group_of(share), []).append(share)
    room_of = fits(view, node, accounts)
    room = {name: _available(view, name, count, held) for name, (count, _) in room_of.items()}
    unit = isinstance(view.resource.memory, UnitMemory)
    if unit and (offer is None or not room.get(offer)):
        offer = max(room, key=lambda name: room[name], default=None)
    parts: dict[str, Part] = {}
    for name in dict.fromkeys((*view.device_ids, *held_by_group)):
        offered = not unit or name == offer
        held_here = {share: held[share] for share in held_by_group.get(name, ())}
        parts[name] = _part(view, name, node.group(name), held_here, room.get(name, 0), offered, before.get(name))
    reasons = tuple((name, reason) for name, (_, reason) in room_of.items() if reason) + tuple(view.unfit.items())
    if view.on_sets:  # which overlap, so that many say the same
        codes = [reason.code for _, reason in reasons]
        reasons = tuple(pair for n, pair in enumerate(reasons) if pair[1].code not in codes[:n])
    reason = view.closed
    if reason is None and not any(room.values()):
        reason = reasons[0][1] if reasons else ALL_TAKEN
    return Advertisement(parts, reason, reasons, offer if unit else None)


def _available(view: ResourceView, name: str, fit: int, held: Mapping[str, bool]) -> int:
    """How many free listed shares can be Healthy; those only waiting for release count as free."""
    if fit == 0:
        return 0
    return min(fit, len(view.device_ids[name]) - sum(1 for share in held if view.group_of.get(share) == name))


def _part(
    view: ResourceView,
    name: str,
    group: GroupView | None,
    held: Mapping[str, bool],
    room: int,
    offered: bool,
    before: Part | None,
) -> Part:
    """The devices of one group in slot order, then held ones that the config no longer lists. `held`: those of the
    group, and whether the kubelet still holds them."""
    listed = view.devices.get(name, NOTHING)
    free = room if offered else 0
    lost = group is not None and group.lost is not None
    # A share whose pod is gone, but which we still count, may be taken again unless the GPU takes nothing new.
    vacated_healthy = offered and group is not None and not takes_nothing(view, group)
    numa = () if group is None else numa_nodes(view.resource, group)
    made_of = (listed, tuple(held.items()), free, lost, vacated_healthy, numa)
    if before is not None and before.made_of == made_of:
        return before
    if not held and free in (0, len(listed.healthy)):
        return Part(listed.healthy if free else listed.unhealthy, made_of)
    devices = []
    for well, ill in zip(listed.healthy, listed.unhealthy, strict=True):
        at_kubelet = held.get(well.id)
        if at_kubelet is None:
            healthy = free > 0
            free -= healthy
        else:
            healthy = not lost and (at_kubelet or vacated_healthy)
        devices.append(well if healthy else ill)
    extra = [share for share in held if share not in view.group_of]
    devices += [Device(share, not lost and held[share], numa) for share in sorted(extra, key=ids.slot_of)]
    found = tuple(devices)
    return Part(before.devices if before is not None and before.devices == found else found, made_of)
