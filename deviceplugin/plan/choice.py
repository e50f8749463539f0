"""Which sets of GPUs give shares of a resource that takes any so many (pure).

Sets overlap, so what each has room for is together more than there is. They are taken in the order in which they would
be chosen, each with what those before it leave: whatever a kubelet picks of it can be granted side by side. One MPS
daemon serves a container, so a set whose GPUs must be joined for it is taken only apart from the others.
"""

from collections.abc import Mapping

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.domains import domain_by_gpu, joining_objection
from deviceplugin.plan.enforcement import conflict, soft_bytes
from deviceplugin.plan.model import GroupView, NodeView, ResourceView
from deviceplugin.plan.room import Room, free_fit, rooms
from mpsd.common.reason import Reason
from mpsd.config.model import Enforcement
from mpsd.gpu.model import Mode
from mpsd.shares.sizes import has_burst

Fits = Mapping[str, tuple[int, Reason | None]]
"""By group or set: how many more shares it gives, and why none."""


class Reach:
    """Which sets of GPUs one MPS daemon serves or could serve, for a resource, as things are at one moment."""

    def __init__(self, view: ResourceView, node: NodeView, accounts: Accounts) -> None:
        self._view, self._node, self._accounts = view, node, accounts
        self._by_gpu = domain_by_gpu(node, accounts)
        self._objections: dict[str, Reason | None] = {}

    def needs_daemon(self, group: GroupView) -> bool:
        """Whether a new share is to be served by a daemon: for sm-sharing; else where it has a guarantee."""
        view = self._view
        if view.resource.mode is Mode.SM_SHARING:
            return True
        guaranteed = soft_bytes(view.enforcement_on(group.name), group, self._accounts, 1) > 0
        return guaranteed and group.speaks_protocol_3

    def objection(self, group: GroupView) -> Reason | None:
        """Why no daemon can serve it now, None when one can, or it needs none."""
        if not self.joins(group):
            return None
        if group.name not in self._objections:
            self._objections[group.name] = joining_objection(
                group.members, self._node, self._accounts, self._by_gpu, "or use another node"
            )
        return self._objections[group.name]

    def joins(self, group: GroupView) -> bool:
        """Whether daemons must make way for one that owns all of its GPUs."""
        return self.needs_daemon(group) and len({self._by_gpu[gpu].name for gpu in group.gpus}) > 1

    def way(self, group: GroupView) -> int:
        """How far it is to a daemon for all of its GPUs: 0 where none is needed or one has them, 1 where daemons must
        make way for it, 2 where they can't."""
        return 0 if not self.joins(group) else 1 if self.objection(group) is None else 2

    def span(self, group: GroupView) -> frozenset[str]:
        """The GPUs of all domains that it has to do with."""
        return frozenset(gpu for own in group.gpus for gpu in self._by_gpu[own].gpus)


def fits(view: ResourceView, node: NodeView, accounts: Accounts) -> Fits:
    """How many more shares each group or set gives now; of sets, so that all can be granted side by side."""
    if not view.on_sets:
        return {name: free_fit(view, node.groups[name], accounts) for name in view.device_ids}
    reach = Reach(view, node, accounts)
    sets = [node.sets[name] for name in view.device_ids]
    unreached = {group.name: reach.objection(group) for group in sets}
    found = {group.name: free_fit(view, group, accounts, unreached[group.name]) for group in sets}
    fitting = [group for group in sets if found[group.name][0]]
    left: dict[str, Room] = {}
    spans: list[frozenset[str]] = []
    for group in sorted(fitting, key=lambda group: rank(group, accounts, reach.way(group))):
        # Of one GPU it is the same for all sets that are taken with it.
        left = rooms(view, group, accounts, unreached[group.name]) | left
        size = view.sizes[group.name]
        count = min(left[gpu].shares(size) for gpu in group.gpus)
        if count and reach.needs_daemon(group):
            span = reach.span(group)
            apart = reach.joins(group) or not group.speaks_protocol_3
            if apart and any(not span.isdisjoint(other) for other in spans):
                count = 0
            else:
                spans.append(span)
        left.update({gpu: left[gpu].less(size, count) for gpu in group.gpus})
        found[group.name] = count, None
    return found


def rank(group: GroupView, accounts: Accounts, way: int = 0) -> tuple[int, int, int, int, tuple[int, ...]]:
    """Smaller is better: the way to a daemon, idle GPUs touched, least memory left on one and on all, index."""
    idle = sum(1 for gpu in group.members if not accounts.on_gpu(gpu.uuid))
    free = [gpu.usable_bytes - accounts.granted_bytes(gpu.uuid) for gpu in group.members]
    return (way, idle, min(free), sum(free), tuple(gpu.index for gpu in group.members))


def goes_without_daemon(view: ResourceView, group: GroupView, node: NodeView, accounts: Accounts) -> bool:
    """Whether a new share on a set is served without a daemon that it would have: in time-slicing nobody needs one as
    long as limits don't add up to more than there is."""
    hard = view.enforcement_on(group.name) is Enforcement.HARD
    if not group.is_set or not hard or view.resource.mode is Mode.SM_SHARING or has_burst(view.resource.memory):
        return False
    unreached = Reach(view, node, accounts).objection(group)
    return unreached is not None and conflict(view, group, accounts, unreached=unreached) is None
