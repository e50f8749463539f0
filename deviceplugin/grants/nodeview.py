"""The node as the planner sees it: what is known of it, joined with what is granted and what is drained."""

from collections.abc import Mapping

from msgspec import structs

from deviceplugin.grants.drains import Drain
from deviceplugin.grants.nodestate import NodeState
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.model import NodeView, ResourceView
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.plan.view import RESERVED, daemon_trouble, gpu_view, node_view
from mpsd.common.reason import Reason
from mpsd.config.model import FixedMemory, Resource, UnitMemory
from mpsd.localapi.snapshot import GpuStatus
from mpsd.shares.groups import is_set_name

NOT_IN_CONFIG = Reason(OfferCode.NOT_IN_CONFIG, "it is no longer in the config")
DAEMON_GRACE_S = 10.0
"""How long a daemon (or mpsd) may be away before free shares turn Unhealthy: a restart takes about a second."""


class CurrentView:
    """The last view that was made, and since when each GPU's daemon is away. State of one owner; times are monotonic
    seconds."""

    def __init__(self) -> None:
        self.now = NodeView(gpus={}, groups={}, resources={})
        self._configured = self.now
        self._made_of: tuple[object, ...] = ()
        self._away_since_s: dict[str, float] = {}

    def rebuild(
        self,
        node: NodeState,
        accounts: Accounts,
        drained: Mapping[str, Drain],
        *,
        ledger_error: Reason | None,
        now_s: float,
    ) -> None:
        """Makes the view anew.

        Args:
            drained: by GPU.
            ledger_error: why nothing can be recorded, None when fine.
        """
        views = []
        for status in node.gpus:
            uuid = status.info.uuid
            away = self._graced(uuid, node.absence or daemon_trouble(status), now_s)
            views.append(
                gpu_view(
                    status,
                    node.config,
                    blocked=_blocked(status, node, accounts, drained.get(uuid)),
                    waiting=ledger_error or node.kind_trouble.get(uuid) or (away if node.absence else None),
                    daemon_waiting=away,
                    reserved=RESERVED if uuid in node.reserved else None,
                    protocol=node.protocol(uuid),
                )
            )
        held, held_sets = accounts.held_groups(), accounts.held_sets()
        made_of = (node.config, views, held, held_sets, node.hard, node.complete)
        if made_of != self._made_of:
            self._configured = node_view(
                node.config,
                views,
                held,
                held_sets=held_sets,
                hard=node.hard,
                complete=node.complete,
                previous=self.now,
            )
            self._made_of = made_of
        resources = dict(self._configured.resources)
        for name in sorted(accounts.resources() - resources.keys()):
            resources[name] = _dropped(name, accounts)
        self.now = structs.replace(self._configured, resources=resources)

    def changes_s(self) -> list[float]:
        """When the view changes by time alone."""
        return [since_s + DAEMON_GRACE_S for since_s in self._away_since_s.values()]

    def _graced(self, uuid: str, trouble: Reason | None, now_s: float) -> Reason | None:
        if trouble is None:
            self._away_since_s.pop(uuid, None)
            return None
        since_s = self._away_since_s.setdefault(uuid, now_s)
        return trouble if now_s - since_s >= DAEMON_GRACE_S else None


def _blocked(status: GpuStatus, node: NodeState, accounts: Accounts, drain: Drain | None) -> Reason | None:
    """Why nothing new comes to a GPU, None when it may."""
    uuid = status.info.uuid
    if drain is not None:
        return Reason(OfferCode.DRAINED, drain.text)
    if reason := node.foreign.get(uuid):
        return reason
    foreign = status.foreign_processes
    if foreign and accounts.mode(uuid) is None:
        pids = ", ".join(str(pid) for pid in foreign[:5])
        text = f"foreign processes use it (pid {pids}): end them before it is shared"
        return Reason(OfferCode.FOREIGN_PROCESSES, text)
    return None


def _dropped(name: str, accounts: Accounts) -> ResourceView:
    """The view of a resource that only live allocations keep."""
    sample = next(allocation for allocation in accounts if allocation.resource == name)
    on_set = is_set_name(sample.group)
    memory = (
        UnitMemory(unit_bytes=sample.share_bytes)
        if sample.slot is None and not on_set
        else FixedMemory(request_bytes=sample.share_bytes, limit_bytes=sample.limit_bytes)
    )
    count = len(sample.gpus) if on_set else 1
    resource = Resource(name=name, memory=memory, mode=sample.mode, enforcement=sample.enforcement, gpu_count=count)
    return ResourceView(resource=resource, enforcement=sample.enforcement, objection=NOT_IN_CONFIG)
