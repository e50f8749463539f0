"""Is an allocation still held? Judged from what the kubelet shows (pure; the caller brings times and observations).

An allocation may go when, for long enough, PodResources does not show it and no entry of the kubelet's checkpoint whose
pod directory exists names it. PodResources omits plain init containers, which is why the checkpoint has a say; the
checkpoint keeps stale entries, which is why the pod directory has one (both verified on kubelet 1.36.2).
"""

from collections.abc import Iterable, Mapping

import msgspec

from deviceplugin.plan.model import Allocation

ABSENT_S = 15.0
"""How long an allocation must be absent before it is released."""
ABSENT_AFTER_RESTART_S = 60.0
"""How long after a kubelet restart an allocation from before it is held, unless the new kubelet has shown it: it shows
pods late."""

Shares = tuple[str, tuple[str, ...]]
"""Resource and sorted device IDs of one container."""


class Holder(msgspec.Struct, frozen=True):
    """A container that holds shares. `pod_uid` and `key` (of its cached answer) come from the checkpoint only."""

    namespace: str = ""
    pod: str = ""
    container: str = ""
    pod_uid: str = ""
    key: str | None = None


class Observation(msgspec.Struct, frozen=True):
    """What a kubelet shows at one moment.

    `listed`: PodResources, one entry per container and resource. `checkpointed`: entries of the checkpoint whose pod
    directory exists, or None where the checkpoint can't be read: unknown is not absent, so nothing is believed gone.
    """

    listed: dict[Shares, Holder]
    checkpointed: dict[Shares, Holder] | None


class Presence:
    """Since when each allocation is absent, and who holds it. State of one owner; times are monotonic seconds.

    `seen` allocations were shown by the kubelet that runs now. `older` ones were granted before it started and not
    shown by it yet.
    """

    def __init__(self) -> None:
        self._absent_since_s: dict[str, float] = {}
        self._seen: set[str] = set()
        self._older: set[str] = set()
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

    def renew(self, key: str) -> None:
        """The allocation was given out again just now: its new holder may not be shown yet."""
        self._absent_since_s.pop(key, None)
        self._seen.discard(key)
        self._renewals[key] = self._renewals.get(key, 0) + 1

    def renewals(self, key: str) -> int:
        """How often it was given out again. An observation begun before the last time says nothing about it."""
        return self._renewals.get(key, 0)

    def observe(self, allocations: Iterable[Allocation], seen: Observation, now_s: float) -> None:
        """Takes in one observation."""
        newest: dict[Shares, Allocation] = {}
        everything = list(allocations)
        for allocation in everything:
            shares = (allocation.resource, allocation.device_ids)
            if shares not in newest or newest[shares].generation < allocation.generation:
                newest[shares] = allocation
        live = {allocation.key for allocation in everything}
        for gone in self._absent_since_s.keys() - live:
            del self._absent_since_s[gone]
        self._renewals = {key: count for key, count in self._renewals.items() if key in live}
        self._seen &= live
        self._older &= live
        self._observed_s = now_s
        self._holders = {}
        self._checkpoint_only = set()
        for allocation in everything:
            shares = (allocation.resource, allocation.device_ids)
            holder = _holder(shares, seen)
            superseded = newest[shares].key != allocation.key
            if holder is not None and not superseded:
                self._holders[allocation.key] = holder
                self._remember(allocation.key, holder)
                self._seen.add(allocation.key)
                self._older.discard(allocation.key)
                if shares not in seen.listed:
                    self._checkpoint_only.add(allocation.key)
                self._absent_since_s.pop(allocation.key, None)
            elif seen.checkpointed is None:
                self._absent_since_s.pop(allocation.key, None)
            else:
                self._absent_since_s.setdefault(allocation.key, now_s)

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
        """Allocations that this kubelet held once and no longer does. One never seen may still be on its way."""
        return set(self._absent_since_s) & self._seen

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
        return gone | self.vacated() if pressed else gone


def _holder(shares: Shares, seen: Observation) -> Holder | None:
    listed = seen.listed.get(shares)
    checkpointed = seen.checkpointed.get(shares) if seen.checkpointed is not None else None
    if listed is None or checkpointed is None:
        return listed or checkpointed
    return Holder(listed.namespace, listed.pod, listed.container, checkpointed.pod_uid, checkpointed.key)
