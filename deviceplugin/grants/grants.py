"""What is given, to whom it is given again, and when it may go (decisions; the store keeps what comes of them)."""

from collections.abc import Callable, Collection

from msgspec import structs

from deviceplugin.grants.holders.holders import Holders
from deviceplugin.grants.nodestate import NodeState
from deviceplugin.grants.store import AllocationStore
from deviceplugin.plan.allocate import plan
from deviceplugin.plan.allocation import Allocation, ContainerAsk, Refusal
from deviceplugin.plan.annotated import plan_container, same_ask, same_plan
from deviceplugin.plan.model import NodeView
from deviceplugin.plan.reasons import OfferCode, RefusalCode
from mpsd.common.errors import GpufracError
from mpsd.config.model import Delivery, Enforcement

_NO_ROOM = (OfferCode.MEMORY_TAKEN, OfferCode.CLIENTS_TAKEN)
_NO_DAEMON = (OfferCode.DAEMONS_IN_USE, OfferCode.NOT_GUARANTEED)


class Grants:
    """State of one owner. Who plans gets the node as it is known and as the planner sees it.

    Args:
        changed: called after every change that the rest of the node has to follow.
    """

    def __init__(self, store: AllocationStore, holders: Holders, changed: Callable[[], None]) -> None:
        self._store, self._accounts, self._holders = store, store.accounts, holders
        self._changed = changed
        self._releasing: set[str] = set()

    # --- shares of the device plugin -----------------------------------------------------------------------------

    def again(self, resource: str, wanted: tuple[str, ...]) -> Allocation | None:
        """The live allocation of just these shares, where another container of its pod asks for them, or the kubelet
        asks once more."""
        live = self._accounts.newest(resource, wanted)
        if live is None or live.key in self._releasing or self._holders.shares.is_left(live.key):
            return None
        self._holders.shares.renew(live.key)
        return live

    def allocate(self, resource: str, wanted: tuple[str, ...], view: NodeView, node: NodeState) -> Allocation | Refusal:
        """Grants shares durably, or refuses. Does not tell of it as changed: a burst of grants is worked off together.

        Raises:
            LedgerError: it can't be recorded; nothing is granted.
        """
        left = self._holders.left(resource, wanted)
        outcome = self._plan(resource, wanted, view, node, after=left)
        if isinstance(outcome, Refusal):
            return outcome
        outcome = self._store.add(outcome)
        if outcome.delivery is Delivery.BOTH:  # a runtime without CDI waits for no file
            self._holders.may_start((outcome,))
        if left:
            self._holders.note_vacated()
        return outcome

    def adopt(
        self, resource: str, device_ids: tuple[str, ...], key: str | None, view: NodeView, node: NodeState
    ) -> Allocation | Refusal:
        """Takes in what the kubelet runs without a record of ours, under the key it was answered with if known.

        Raises:
            LedgerError: as `allocate`.
        """
        if (live := self._accounts.newest(resource, device_ids)) is not None:
            return live
        if resource not in view.resources:
            return Refusal(RefusalCode.UNKNOWN_RESOURCE, f"{resource}: it is no longer in the config")
        outcome = self._plan(resource, device_ids, view, node, force=True)
        if isinstance(outcome, Refusal):
            return outcome
        outcome = structs.replace(outcome, key=key or outcome.key)
        if outcome.key in self._accounts:
            return Refusal(RefusalCode.KEY_IN_USE, f"{resource}: key {outcome.key} already names other shares")
        outcome = self._store.add(outcome)
        self._holders.shares.admitted(outcome.key)
        self._changed()
        return outcome

    def _plan(
        self,
        resource: str,
        wanted: tuple[str, ...],
        view: NodeView,
        node: NodeState,
        *,
        after: tuple[str, ...] = (),
        force: bool = False,
    ) -> Allocation | Refusal:
        offered = view.resources.get(resource)
        if offered is None:
            return Refusal(RefusalCode.UNKNOWN_RESOURCE, f"{resource}: this node does not offer it")
        return plan(
            offered,
            view,
            self._accounts,
            wanted,
            generation=self._store.next_generation(),
            delivery=node.config.cdi.delivery,
            gpu_kind=node.hard.kind,
            after=after,
            force=force,
        )

    # --- annotated containers ------------------------------------------------------------------------------------

    def allocate_container(
        self, ask: ContainerAsk, view: NodeView, gpu_kind: str, lasting: Collection[str] = ()
    ) -> Allocation | Refusal:
        """Grants an annotated container what it asks for, durably, or refuses. One that is made anew keeps what it
        held, unless it asks for something else now, can have better, or another container of its pod took its turn.
        One that was never made gives way where the MPS daemon that it waits for can't start before others end.

        Args:
            gpu_kind: the CDI kind that brings it its GPUs, empty where its runtime takes no CDI devices from us.
            lasting: the pod's containers but for plain init containers, empty where they are not known.

        Raises:
            LedgerError: as `allocate`.
        """
        self._holders.pod_runs(ask.container.pod_uid)
        self._holders.turns.asked(ask.container.id)
        old = self._accounts.of_container(ask.container)
        if old is not None and old.key in self._releasing:
            return Refusal(RefusalCode.BEING_RELEASED, "what it held before is just being released")
        if old is not None and same_ask(old, ask):
            self._holders.turns.outdated.discard(old.key)
        lost_to = self._accounts.takers(old) if old is not None else []
        over = self._turns_over(ask)
        by_kind = [a for a in over if lasting and not {ask.container.container, _name(a)} <= set(lasting)]
        outcome = self._plan_container(ask, view, gpu_kind, old, by_kind)
        if isinstance(outcome, Refusal) and outcome.code in _NO_ROOM and len(over) > len(by_kind):
            outcome = self._plan_container(ask, view, gpu_kind, old, over)
        if isinstance(outcome, Refusal):
            if old is None or lost_to or old.adopted or not same_ask(old, ask):
                return _with_takers(outcome, lost_to)
            if outcome.code not in _NO_DAEMON or old.key not in self._holders.unstarted:
                return old
            self.release(old.key)  # a client came before its daemon did: others must not wait with it
            return outcome
        if old is not None and not same_ask(old, ask):
            self._holders.turns.outdated.add(old.key)
            return Refusal(
                RefusalCode.BEING_RELEASED,
                "it asks for something else than before: what it held is let go first, once no process of it is left",
            )
        if old is not None and not lost_to and same_plan(old, outcome):
            return old
        outcome = self._store.replace(old, outcome)
        self._holders.unstarted.add(outcome.key)
        self._changed()
        return outcome

    def _plan_container(
        self, ask: ContainerAsk, view: NodeView, gpu_kind: str, old: Allocation | None, before: list[Allocation]
    ) -> Allocation | Refusal:
        """Plans it in the place of what it held itself, and of these, whose turn it takes."""
        own = () if old is None else (old.key,)
        taken = () if old is None else tuple(key for key in old.after if key in self._accounts)
        after = tuple(dict.fromkeys((*taken, *(allocation.key for allocation in before))))
        return plan_container(
            ask,
            view,
            self._accounts.without({*own, *after}, undone=self._holders.unstarted.intersection(own)),
            generation=self._store.next_generation(),
            gpu_kind=gpu_kind,
            after=after,
        )

    def _turns_over(self, ask: ContainerAsk) -> list[Allocation]:
        """What other containers of its pod hold on just its GPUs, in its mode, and have ended."""
        return [
            allocation
            for allocation in self._accounts.of_pod(ask.container.pod_uid)
            if allocation.container != ask.container
            and allocation.container is not None
            and self._holders.turns.is_over(allocation.container.id)
            and allocation.mode is ask.mode
            and set(allocation.gpus) == set(ask.gpus)
        ]

    def adopt_container(
        self, ask: ContainerAsk, key: str | None, view: NodeView, gpu_kind: str, *, trusted: bool
    ) -> Allocation:
        """Takes in an annotated container that runs without a record of ours: what it takes counts, fit or not.

        Args:
            key: what it says it was started with. With a hard limit it is believed: that is set again where it is not
                in force.
            gpu_kind: as `allocate_container`.
            trusted: believe it whatever the limit is.

        Raises:
            LedgerError: as `allocate`.
            GpufracError: it can't be planned at all.
        """
        self._holders.pod_runs(ask.container.pod_uid)
        self._holders.turns.asked(ask.container.id)
        if (known := self._accounts.of_container(ask.container)) is not None:
            return known
        generation = self._store.next_generation()
        outcome = plan_container(ask, view, self._accounts, generation=generation, gpu_kind=gpu_kind, force=True)
        if isinstance(outcome, Refusal):
            raise GpufracError(outcome.message)
        believed = trusted or outcome.enforcement is Enforcement.HARD
        if key is not None and key not in self._accounts and believed:
            outcome = structs.replace(outcome, key=key)
        else:
            outcome = structs.replace(outcome, enforcement=Enforcement.NONE, soft_bytes=0)
        outcome = self._store.add(outcome)
        self._changed()
        return outcome

    # --- a live one ----------------------------------------------------------------------------------------------

    def lower_limit(self, key: str, limit_bytes: int) -> Allocation:
        """Lowers the limit of a live share for as long as it lives. Raises LedgerError; then nothing changed."""
        old = self._accounts.get(key)
        if old is None:
            raise GpufracError(f"allocation {key} is gone")
        if limit_bytes >= old.limit_bytes:
            return old
        new = structs.replace(old, limit_bytes=limit_bytes, soft_bytes=min(old.soft_bytes, limit_bytes))
        self._store.update(new)
        self._changed()
        return new

    def is_live(self, key: str) -> bool:
        """Whether it is not released, nor about to be."""
        return key in self._accounts and key not in self._releasing

    def predecessors(self, allocation: Allocation) -> set[str]:
        """Older allocations of the same shares, not released yet, that were another pod's or whose pod is gone."""
        mine = set(allocation.device_ids)
        return {key for key in allocation.after if key in self._accounts} | {
            other.key
            for other in self._accounts.on_gpu(allocation.gpus[0]).values()
            if other.generation < allocation.generation
            and other.resource == allocation.resource
            and mine & set(other.device_ids)
            and self._accounts.is_vacated(other.key)
        }

    # --- its end -------------------------------------------------------------------------------------------------

    def releasable(self, now_s: float, *, pressed: bool) -> list[Allocation]:
        """Allocations that nobody holds any more, to be released once no process of theirs lives; see Holders."""
        keys = self._holders.releasable(now_s, pressed=pressed)
        return [allocation for allocation in self._accounts if allocation.key in keys]

    def begin_release(self, key: str, now_s: float, *, pressed: bool) -> bool:
        """Whether an allocation may still go. From now on it is not given out again."""
        if key not in self._accounts or key not in self._holders.releasable(now_s, pressed=pressed):
            return False
        self._releasing.add(key)
        return True

    def end_release(self, key: str) -> None:
        """A release came to nothing."""
        self._releasing.discard(key)

    def release(self, key: str) -> None:
        """Forgets an allocation. Raises LedgerError; then it stays."""
        if key in self._accounts:
            self._store.remove(key)
            self._releasing.discard(key)
            self._holders.forget(key)
            self._changed()


def _name(allocation: Allocation) -> str:
    """Of the container that annotations describe."""
    return allocation.container.container if allocation.container is not None else ""


def _with_takers(refusal: Refusal, takers: list[Allocation]) -> Refusal:
    """A refusal for lack of room, and who took what it held."""
    if not takers or refusal.code not in _NO_ROOM:
        return refusal
    names = ", ".join(map(_name, takers))
    return Refusal(refusal.code, f"{refusal}; what it held went to {names} of its own pod after it had ended")
