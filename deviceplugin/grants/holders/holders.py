"""Who holds each allocation, and is it still held? Of shares the kubelet says so, of annotated containers the runtime
that makes their pods: each in its own way, and here in one (pure state; the owner brings times)."""

from collections.abc import Callable, Collection, Iterable, Mapping

from deviceplugin.grants.holders.model import Holder, Observation, Pods
from deviceplugin.grants.holders.pods import PodHolders
from deviceplugin.grants.holders.shares import ShareHolders
from deviceplugin.grants.holders.turns import Instance, Turns
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import Allocation


class Holders:
    """Over the accounts of the same owner, in which it notes what nobody holds any more. Times are monotonic seconds.

    `shares` and `annotated` are the two ways; `turns` tells which containers of annotated pods ended.

    Args:
        changed: called when other allocations than before are held by nobody.
    """

    def __init__(self, accounts: Accounts, changed: Callable[[], None]) -> None:
        self._accounts, self._changed = accounts, changed
        self.shares = ShareHolders()
        self.annotated = PodHolders()
        self.turns = Turns()
        self.unstarted: set[str] = set()
        """Of annotated containers: granted since we started, and none of them could be made so far."""

    def holder(self, allocation: Allocation) -> Holder | None:
        """Who holds it now, as far as known."""
        if (own := allocation.container) is not None:
            return Holder(own.namespace, own.pod, own.container, own.pod_uid, allocation.key)
        return self.shares.holder(allocation.key)

    def pods(self, allocation: Allocation) -> Mapping[str, Holder]:
        """Every pod that was seen to hold it, by UID, the newest last."""
        if allocation.container is not None and (holder := self.holder(allocation)) is not None:
            return {holder.pod_uid: holder}
        return self.shares.pods(allocation.key)

    def pods_by_key(self) -> Pods:
        """UIDs of the pods that were seen to hold each live allocation."""
        return {allocation.key: tuple(self.pods(allocation)) for allocation in self._accounts}

    def vacated(self) -> set[str]:
        """Allocations that were held once and are no more, as far as is known. Shares that the kubelet has given to
        another pod are of nobody else, whatever its checkpoint still says."""
        passed_on = {key for allocation in self._shares() for key in allocation.after if key in self._accounts}
        return self.shares.vacated() | passed_on | self._of(self.annotated.gone())

    def note_vacated(self) -> None:
        """Has the accounts know what nobody holds any more."""
        if self._accounts.set_vacated(self.vacated()):
            self._changed()

    def question(self, resource: str, wanted: tuple[str, ...]) -> bool:
        """Shares are asked for. Whether it takes a look at the kubelet, begun from now on, to tell whether another pod
        had them: containers of one pod ask for the same ones again."""
        doubtful = [a.key for a in self._accounts.overlapping(resource, wanted) if self.shares.is_doubtful(a.key)]
        for key in doubtful:
            self.shares.question(key)
        return bool(doubtful)

    def left(self, resource: str, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Allocations of any of these shares whose pod is not the one that asks for them now, the oldest first."""
        return tuple(a.key for a in self._accounts.overlapping(resource, wanted) if self.shares.is_left(a.key))

    def may_start(self, allocations: Iterable[Allocation]) -> None:
        """Containers of these may start from now on."""
        startable = tuple(allocations)
        self.shares.may_start(a.key for a in startable if a.container is None)
        self.unstarted.difference_update(a.key for a in startable)

    def releasable(self, now_s: float, *, pressed: bool = False) -> set[str]:
        """Allocations that may go, as far as kubelet and runtime are concerned.

        Args:
            pressed: a request is about to be refused: what is known to be gone need not wait out a grace.
        """
        pods = self.annotated.releasable(now_s, pressed=pressed)
        return self.shares.releasable(now_s, pressed=pressed) | self._of(pods) | self.turns.outdated

    def forget(self, key: str) -> None:
        """An allocation was released, and is in the accounts no more."""
        self.shares.forget(key)
        self.unstarted.discard(key)
        self.annotated.keep(self.annotated_pods())
        held = [(allocation.key, container.id) for allocation, container in self._accounts.annotated()]
        self.turns.keep({container for _, container in held}, {key for key, _ in held})

    def judgeable(self) -> dict[str, int]:
        """What an observation of the kubelet that begins now may judge."""
        return {allocation.key: self.shares.renewals(allocation.key) for allocation in self._shares()}

    def observe_kubelet(self, seen: Observation, judged: Mapping[str, int], now_s: float) -> None:
        """What the kubelet holds. `judged`: from `judgeable`, before it was asked."""
        shares = list(self._shares())
        unjudged = {a.key for a in shares if judged.get(a.key) != self.shares.renewals(a.key)}
        self.shares.observe(shares, seen, now_s, unjudged)
        annotated = self.annotated_pods()
        self.annotated.directories(seen.there & annotated, seen.removed & annotated, now_s)
        self.note_vacated()

    def kubelet_restarted(self, at_s: float) -> None:
        self.shares.kubelet_restarted(self._shares(), at_s)

    def observe_containers(self, running: Mapping[str, Instance]) -> None:
        """All containers of annotated pods that have not ended, by their IDs."""
        self.turns.synchronized(running, {container.id for _, container in self._accounts.annotated()})

    def observe_pods(self, alive: Collection[str] | None, now_s: float) -> None:
        """All pods with a sandbox, by UID; None: the runtime is not heard of any more."""
        if alive is None:
            self.annotated.unheard()
            self.turns.unheard()
        else:
            self.annotated.synchronized(self.annotated_pods(), alive, now_s)
        self.note_vacated()

    def pod_runs(self, uid: str) -> None:
        """A pod has a sandbox."""
        self.annotated.runs(uid)
        self.note_vacated()

    def pod_stopped(self, uid: str, now_s: float) -> None:
        """A pod's last sandbox was stopped."""
        if uid in self.annotated_pods():
            self.annotated.stopped(uid, now_s)
        self.note_vacated()

    def annotated_pods(self) -> set[str]:
        """UIDs of the pods that hold annotated allocations."""
        return {container.pod_uid for _, container in self._accounts.annotated()}

    def _of(self, pod_uids: Collection[str]) -> set[str]:
        return {a.key for a, container in self._accounts.annotated() if container.pod_uid in pod_uids}

    def _shares(self) -> Iterable[Allocation]:
        return [allocation for allocation in self._accounts if allocation.container is None]
