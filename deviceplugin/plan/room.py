"""How much more the GPUs that a share lies on can take (pure)."""

from collections.abc import Collection

import msgspec

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.enforcement import conflict, must_add_up, takes_back
from deviceplugin.plan.model import GpuView, GroupView, ResourceView
from deviceplugin.plan.reasons import OfferCode
from mpsd.common.reason import Reason
from mpsd.config.model import Enforcement, UnitMemory
from mpsd.gpu.model import Mode
from mpsd.shares.sizes import ShareSize, has_burst

NOT_OPEN = Reason(OfferCode.NO_GPU_SELECTED, "it is not open to this resource")


class Room(msgspec.Struct, frozen=True):
    """What a GPU has left for a resource. `limit_bytes`: what more limits may add up to, None where they may to any.
    `clients`: None where it does not count how many shares a container has."""

    free_bytes: int
    clients: int | None
    limit_bytes: int | None

    def shares(self, size: ShareSize) -> int:
        """How many shares there is room for."""
        counts = [max(0, self.free_bytes // size.request_bytes)]
        if self.clients is not None:
            counts.append(max(0, self.clients))
        if self.limit_bytes is not None:
            counts.append(max(0, self.limit_bytes // size.limit_bytes))
        return min(counts)

    def less(self, size: ShareSize, shares: int) -> "Room":
        """What so many shares leave."""
        return Room(
            self.free_bytes - size.request_bytes * shares,
            None if self.clients is None else self.clients - shares,
            None if self.limit_bytes is None else self.limit_bytes - size.limit_bytes * shares,
        )


def rooms(view: ResourceView, group: GroupView, accounts: Accounts, unreached: Reason | None = None) -> dict[str, Room]:
    """What each GPU of a group has left for the resource. `unreached`: see enforcement.conflict."""
    borrows, takes = has_burst(view.resource.memory), takes_back(view, group, accounts, unreached)
    # One container may take any number of units, but each fixed share is a client of its own.
    fixed = not isinstance(view.resource.memory, UnitMemory)
    return {
        gpu.uuid: Room(
            gpu.usable_bytes - accounts.granted_bytes(gpu.uuid),
            client_room(view.resource.mode, gpu, accounts) if fixed else None,
            gpu.usable_bytes - accounts.limit_bytes(gpu.uuid)
            if must_add_up(gpu, accounts, borrows=borrows, takes_back=takes)
            else None,
        )
        for gpu in group.members
    }


def free_fit(
    view: ResourceView, group: GroupView, accounts: Accounts, unreached: Reason | None = None
) -> tuple[int, Reason | None]:
    """How many more shares the group has memory and clients for; with 0 comes the reason. `unreached`: see
    enforcement.conflict."""
    mode = view.resource.mode
    if reason := takes_nothing(view, group):
        return 0, reason
    size = view.sizes.get(group.name)
    if size is None:
        return 0, view.unfit.get(group.name, NOT_OPEN)
    for gpu in group.members:
        bound = accounts.mode(gpu.uuid)
        if bound is not None and bound is not mode:
            held_by = _count(len(accounts.on_gpu(gpu.uuid)), "allocation")
            return 0, group.of_member(gpu, Reason(OfferCode.MODE_BOUND, f"it is bound to {bound} by {held_by}"))
        if client_room(mode, gpu, accounts) <= 0:
            taken = Reason(OfferCode.CLIENTS_TAKEN, f"its {gpu.client_limit} MPS clients are taken")
            return 0, group.of_member(gpu, taken)
        free_bytes = gpu.usable_bytes - accounts.granted_bytes(gpu.uuid)
        if free_bytes < size.request_bytes:
            free = f"{max(0, free_bytes) >> 20} MiB of {gpu.usable_bytes >> 20} MiB free"
            taken = Reason(OfferCode.MEMORY_TAKEN, f"its memory is taken by other shares: {free}")
            over = Reason(OfferCode.OVER_COMMITTED, f"over-committed: {free}")
            return 0, group.of_member(gpu, over if free_bytes < 0 else taken)
    if reason := conflict(view, group, accounts, unreached=unreached):
        return 0, reason
    return min((room.shares(size) for room in rooms(view, group, accounts, unreached).values()), default=0), None


def client_room(mode: Mode, gpu: GpuView, accounts: Accounts, after: Collection[str] = ()) -> int:
    """How many more containers the GPU takes. The MPS client cap counts allocations over all resources. `after`: see
    Accounts.clients."""
    if mode is not Mode.SM_SHARING:
        return gpu.client_limit
    return gpu.client_limit - accounts.clients(gpu.uuid, after)


def takes_nothing(view: ResourceView, group: GroupView) -> Reason | None:
    """Why the group takes no new share of the resource, whatever is held there."""
    needs_daemon = view.resource.mode is Mode.SM_SHARING or (group.burst and view.enforcement is Enforcement.HARD)
    daemon_waiting = group.daemon_waiting if needs_daemon else None
    hindered = group.lost or group.blocked or group.reserved or group.waiting or daemon_waiting
    return view.closed or view.waiting or hindered


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
