"""Is a share of the device plugin still held, and by whom? Judged from what the kubelet shows (pure; the caller brings
times and observations).

An allocation may go when, for long enough, PodResources does not show it and no entry of the kubelet's checkpoint whose
pod directory exists names it. PodResources omits plain init containers, which is why the checkpoint has a say; the
checkpoint keeps stale entries, which is why the pod directory has one (both verified on kubelet 1.36.2). Where the
directories of all pods that held it are gone, its end is proven and it may go at once.

One that was ever shown is past its pod's admission: only another pod can ask for its shares (docs/adr/0014).
"""

from collections.abc import Collection, Iterable, Mapping

from deviceplugin.grants.holders.model import Holder, Observation, Shares
from deviceplugin.plan.allocation import Allocation

ABSENT_S = 15.0
"""How long an allocation must be absent before it is released, unless its end is proven."""
ABSENT_AFTER_RESTART_S = 60.0
"""How long after a kubelet restart an allocation from before it is held, unless the new kubelet has shown it: it shows
pods late."""


class ShareHolders:
    """Since when each allocation is absent, and who holds it. State of one owner; times are monotonic seconds.

    `seen` allocations were shown by the kubelet that runs now, `shown` ones by any, ever. `older` ones were granted
    before this kubelet started and not shown by it yet. `startable` ones had the permission to start.
    """

    def __init__(self) -> None:
        self._absent_since_s: dict[str, float] = {}
        self._seen: set[str] = set()
        self._shown: set[str] = set()
        self._listed: set[str] = set()
        self._startable: set[str] = set()
        self._older: set[str] = set()
        self._ended: set[str] = set()
        self._holders: dict[str, Holder] = {}
        self._pods: dict[str, dict[str, Holder]] = {}
        self._checkpoint_only: set[str] = set()
        self._restart_s = float("-inf")
        self._observed_s = float("-inf")
        self._renewals: dict[str, int] = {}

    def kubelet_restarted(self, allocations: Iterable[Allocation], at_s: float) -> None:
        """A new kubelet runs since `at_s`: what its predecessor showed counts no longer."""
        self._older = {allocation.key for allocation in allocations}
        self._restart_s = at_s
        self._absent_since_s.clear()
        self._seen.clear()

    # --- whose it is ---------------------------------------------------------------------------------------------

    def admitted(self, key: str) -> None:
        """Its pod's admission is over: the allocation is of an earlier run of ours, or a process was started with
        it."""
        self._shown.add(key)

    def unseen(self) -> set[str]:
        """Allocations that had the permission to start, and of which nothing tells that their pod was admitted."""
        return self._startable - self._shown

    def may_start(self, keys: Iterable[str]) -> None:
        """Containers of these allocations may start from now on, so their pods may live and go unseen."""
        self._startable.update(keys)

    def is_doubtful(self, key: str) -> bool:
        """Whether who asks for its shares may be another pod than the one that has them."""
        return key in self._shown or key in self._startable

    def question(self, key: str) -> None:
        """Its shares are asked for: only what the kubelet shows from now on tells by whom."""
        self._listed.discard(key)
        self._renewals[key] = self._renewals.get(key, 0) + 1

    def is_left(self, key: str) -> bool:
        """Whether who asks for its shares is another pod, after a look that began after `question`."""
        return key in self._shown and key not in self._listed

    def renew(self, key: str) -> None:
        """The allocation was given out again just now: its new holder may not be shown yet."""
        self._absent_since_s.pop(key, None)
        self._seen.discard(key)
        self._ended.discard(key)
        self._renewals[key] = self._renewals.get(key, 0) + 1

    def renewals(self, key: str) -> int:
        """How often it was given out again or asked for. An observation begun before the last time says nothing about
        it."""
        return self._renewals.get(key, 0)

    # --- is it held ----------------------------------------------------------------------------------------------

    def observe(
        self, allocations: Iterable[Allocation], seen: Observation, now_s: float, unjudged: Collection[str] = ()
    ) -> None:
        """Takes in one observation.

        Args:
            allocations: all live ones.
            unjudged: keys of those that it says nothing about: they stay as they were.
        """
        newest: dict[Shares, Allocation] = {}
        everything = list(allocations)
        for allocation in everything:
            shares = (allocation.resource, allocation.device_ids)
            if shares not in newest or newest[shares].generation < allocation.generation:
                newest[shares] = allocation
        live = {allocation.key for allocation in everything}
        self._keep(live)
        self._observed_s = now_s
        for allocation in everything:
            key = allocation.key
            if key in unjudged:
                continue
            shares = (allocation.resource, allocation.device_ids)
            own = newest[shares].key == key
            listed = seen.listed.get(shares) if own else None
            entry = seen.keyed.get(key) or (_entry(key, shares, seen, live) if own else None)
            for keys in (self._listed, self._checkpoint_only, self._ended):
                keys.discard(key)
            self._holders.pop(key, None)
            if listed is not None or entry is not None:
                self._held(key, listed, entry)
            elif seen.checkpointed is None:
                self._absent_since_s.pop(key, None)
            else:
                self._absent_since_s.setdefault(key, now_s)
            if listed is None and entry is None and (pods := self._pods.get(key)) and seen.removed >= pods.keys():
                self._absent_since_s.setdefault(key, now_s)
                self._ended.add(key)

    def _keep(self, live: set[str]) -> None:
        """Forgets what is no longer live."""
        self._absent_since_s = {key: since_s for key, since_s in self._absent_since_s.items() if key in live}
        self._renewals = {key: count for key, count in self._renewals.items() if key in live}
        self._holders = {key: holder for key, holder in self._holders.items() if key in live}
        kept = (self._seen, self._shown, self._listed, self._startable, self._older, self._ended, self._checkpoint_only)
        for keys in kept:
            keys.intersection_update(live)

    def _held(self, key: str, listed: Holder | None, entry: Holder | None) -> None:
        holder = listed or entry
        if listed is None:
            self._checkpoint_only.add(key)
        else:
            self._listed.add(key)
            if entry is not None and entry.key in (None, key):
                holder = Holder(listed.namespace, listed.pod, listed.container, entry.pod_uid, entry.key)
        assert holder is not None
        self._holders[key] = holder
        self._remember(key, holder)
        self._seen.add(key)
        self._shown.add(key)
        self._older.discard(key)
        self._absent_since_s.pop(key, None)

    def _remember(self, key: str, holder: Holder) -> None:
        # An entry with another key is that of an earlier pod on the same shares, whose directory is still there.
        if holder.pod_uid and holder.key in (None, key):
            pods = self._pods.setdefault(key, {})
            before = pods.pop(holder.pod_uid, holder)  # the newest is the last
            pods[holder.pod_uid] = holder if holder.pod else before

    def holder(self, key: str) -> Holder | None:
        """Who held the allocation at the last observation."""
        return self._holders.get(key)

    def pods(self, key: str) -> Mapping[str, Holder]:
        """Every pod that was seen to hold the allocation, by UID, the newest last. Remembered until `forget`: its
        processes may outlive it."""
        return self._pods.get(key, {})

    def forget(self, key: str) -> None:
        """The allocation was released."""
        self._pods.pop(key, None)

    def checkpoint_only(self) -> set[str]:
        """Allocations that only the kubelet's checkpoint shows: of plain init containers, or stale."""
        return self._checkpoint_only

    def vacated(self) -> set[str]:
        """Allocations that this kubelet held once and no longer does, or whose end is proven. One never seen may still
        be on its way."""
        return (set(self._absent_since_s) & self._seen) | self._ended

    def releasable(self, now_s: float, *, pressed: bool = False) -> set[str]:
        """Allocations that may go, as far as the kubelet is concerned.

        Args:
            pressed: a request is about to be refused: what was seen and is gone need not wait out the grace.
        """
        # A kubelet that has been silent since shows nothing: its last word counts, not the clock.
        now_s = min(now_s, self._observed_s)
        gone = {key for key, since_s in self._absent_since_s.items() if now_s - since_s >= ABSENT_S}
        if now_s - self._restart_s < ABSENT_AFTER_RESTART_S:
            gone -= self._older
        gone |= self._ended
        return gone | self.vacated() if pressed else gone


def _entry(key: str, shares: Shares, seen: Observation, live: Collection[str]) -> Holder | None:
    """The checkpoint's entry with the newest allocation's shares, unless it is known to be an earlier pod's."""
    entry = seen.checkpointed.get(shares) if seen.checkpointed is not None else None
    return None if entry is not None and entry.key != key and entry.key in live else entry
