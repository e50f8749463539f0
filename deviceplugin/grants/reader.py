"""Questions about what is known, granted and held, for who changes nothing: each answer is of one moment."""

import threading
from collections.abc import Collection

from deviceplugin.grants import inspection
from deviceplugin.grants.changes import Changes
from deviceplugin.grants.drains import Drains
from deviceplugin.grants.grants import Grants
from deviceplugin.grants.holders.holders import Holders
from deviceplugin.grants.holders.model import Holder, Pods
from deviceplugin.grants.inspection import Inspection
from deviceplugin.grants.lists import Lists
from deviceplugin.grants.nodestate import NodeState
from deviceplugin.grants.nodeview import CurrentView
from deviceplugin.grants.store import AllocationStore
from deviceplugin.plan.allocation import Allocation, ContainerRef
from deviceplugin.plan.render import desired_allocation
from deviceplugin.plan.start import RELEASED, Grant
from mpsd.common.reason import Reason
from mpsd.localapi.snapshot import Desired


class Reader:
    """What the Broker shows. Thread-safe: the parts are the Broker's, and so is the lock."""

    def __init__(
        self,
        lock: threading.Lock,
        changes: Changes,
        node: NodeState,
        view: CurrentView,
        store: AllocationStore,
        holders: Holders,
        grants: Grants,
        lists: Lists,
        drains: Drains,
    ) -> None:
        self._lock, self._changes = lock, changes
        self._listed_version = -1
        """Of the changes that are in the lists."""
        self._node, self._view = node, view
        self._store, self._accounts = store, store.accounts
        self._holders, self._grants, self._lists, self._drains = holders, grants, lists, drains

    @property
    def node(self) -> NodeState:
        """The node as known now."""
        return self._node

    @property
    def problems(self) -> tuple[str, ...]:
        """What was not usable at the start: a sentence for each file."""
        return (*self._store.problems, *filter(None, [self._drains.problem]))

    @property
    def ledger_error(self) -> Reason | None:
        """Why nothing can be recorded, and so nothing is offered; None when fine."""
        return self._store.ledger_error

    @property
    def runtime_heard(self) -> bool:
        """Whether the container runtime tells of annotated pods now."""
        return self._holders.annotated.heard

    def inspect(self) -> Inspection:
        """All in one consistent picture."""
        with self._lock:
            return inspection.inspect(
                self._node,
                self._view.now,
                self._lists.by_resource,
                self._accounts,
                self._holders,
                self._drains.by_gpu,
                lists_are_new=self._listed_version == self._changes.version,
            )

    def allocations(self) -> list[Allocation]:
        """All live allocations, oldest first."""
        with self._lock:
            return list(self._accounts)

    def desired(self) -> Desired:
        """The whole desired state for mpsd: every live allocation, whether its GPU was heard of yet or not, oldest
        first."""
        return Desired(allocations=tuple(map(desired_allocation, self.allocations())))

    def pods(self) -> Pods:
        """The UIDs of the pods that were seen to hold each live allocation."""
        with self._lock:
            return self._holders.pods_by_key()

    def has_unnamed(self) -> bool:
        """Whether a live allocation's holder was not shown by the kubelet yet."""
        with self._lock:
            return any(self._holders.holder(a) is None and not self._accounts.is_vacated(a.key) for a in self._accounts)

    def checkpoint_only(self) -> set[str]:
        """See ShareHolders.checkpoint_only."""
        with self._lock:
            return set(self._holders.shares.checkpoint_only())

    def unseen(self) -> set[str]:
        """Shares that may have started and that the kubelet never showed."""
        with self._lock:
            return self._holders.shares.unseen()

    def judgeable(self) -> dict[str, int]:
        """What an observation that begins now may judge; to be handed to `observe_kubelet` with it."""
        with self._lock:
            return self._holders.judgeable()

    def resource_names(self) -> list[str]:
        """Resources that need a server: those in the config, then those with live allocations only."""
        with self._lock:
            return list(self._view.now.resources)

    def is_idle(self, gpu: str) -> bool:
        """Whether nobody holds anything on a GPU."""
        with self._lock:
            return not self._accounts.on_gpu(gpu)

    # --- of one allocation ---------------------------------------------------------------------------------------

    def of_container(self, container: ContainerRef) -> Allocation | None:
        """What an annotated container holds now."""
        with self._lock:
            return self._accounts.of_container(container)

    def takers(self, allocation: Allocation) -> list[Allocation]:
        """Containers that took the turn of an annotated one; see Accounts."""
        with self._lock:
            return self._accounts.takers(allocation)

    def has_turns_over(self, container: ContainerRef) -> bool:
        """Whether another container of its pod holds something and has ended."""
        with self._lock:
            of_pod = self._accounts.of_pod(container.pod_uid)
            others = (a.container for a in of_pod if a.container is not None and a.container != container)
            return any(self._holders.turns.is_over(other.id) for other in others)

    def living_pods(self, allocation: Allocation) -> Collection[str]:
        """UIDs of the pod of an annotated allocation that may be let go though its pod is there."""
        with self._lock:
            there = allocation.container is not None and not self._accounts.is_vacated(allocation.key)
            return self._holders.pods(allocation).keys() if there else ()

    def share(self, key: str) -> tuple[Allocation, Holder | None] | None:
        """A live share of the device plugin by its key, and who holds it as far as the kubelet has shown."""
        with self._lock:
            found = self._accounts.get(key)
            return None if found is None or found.container is not None else (found, self._holders.holder(found))

    def is_live(self, key: str) -> bool:
        """Whether it is not released, nor about to be."""
        with self._lock:
            return self._grants.is_live(key)

    def grant(self, key: str) -> Grant | None:
        """What `Broker.permissions` has for it."""
        with self._lock:
            found = self._accounts.get(key)
            return None if found is None else self._node.permitted((found,)).get(key)

    def waits_for(self, key: str) -> Reason | None:
        """Why its container may not start now; None when it may."""
        with self._lock:
            found = self._accounts.get(key)
            return RELEASED if found is None else self._node.waits_for(found)

    def predecessors(self, allocation: Allocation) -> set[str]:
        """Older allocations of its shares; see Grants."""
        with self._lock:
            return self._grants.predecessors(allocation)
