"""What each resource lists to the kubelet now (pure state; the caller brings times and wakes who waits)."""

from collections.abc import Mapping

import msgspec

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import Advertisement, advertise
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.model import NodeView

REST_S = 1.0
"""How long after a grant an offer stays on its GPU, so that a pod's next container finds its units there."""
REST_LONGEST_S = 5.0
"""For how long grants of other resources keep it there: without an end it would never reach an emptier GPU."""
EMPTY = Advertisement({})


class Published(msgspec.Struct, frozen=True):
    """A resource's list and its generation, which grows with every change."""

    generation: int
    advertisement: Advertisement


class Lists:
    """State of one owner; times are monotonic seconds."""

    def __init__(self) -> None:
        self._offers = Offers()
        self._by_resource: dict[str, Published] = {}

    @property
    def by_resource(self) -> Mapping[str, Published]:
        """The last list of each resource."""
        return self._by_resource

    def of(self, resource: str) -> Published:
        """Its list; generation 0 where there was none yet."""
        return self._by_resource.get(resource) or Published(0, EMPTY)

    def granted(self, allocation: Allocation, now_s: float) -> bool:
        """A share was granted. Whether the resource offers another group by now, while the pod is admitted: then it has
        to go back, before the pod's next container asks."""
        self._offers.granted(allocation.resource, allocation.group, now_s)
        return self.of(allocation.resource).advertisement.offer not in (None, allocation.group)

    def publish(self, view: NodeView, accounts: Accounts, now_s: float) -> bool:
        """Computes every list. Whether one changed."""
        changed = False
        for name, resource in view.resources.items():
            before = self.of(name)
            offer = self._offers.kept(name, before.advertisement.offer, now_s)
            advertisement = advertise(resource, view, accounts, offer, before.advertisement.parts)
            new = before.generation == 0 or not advertisement.lists_as(before.advertisement)
            self._by_resource[name] = Published(before.generation + new, advertisement)
            changed = changed or new
        self._offers.published(now_s)
        for name in self._by_resource.keys() - view.resources.keys():
            before = self._by_resource[name]
            if not before.advertisement.lists_as(EMPTY):
                self._by_resource[name] = Published(before.generation + 1, EMPTY)
                changed = True
        return changed

    def resend(self) -> None:
        """Every list counts as changed."""
        self._by_resource = {
            name: Published(list_.generation + 1, list_.advertisement) for name, list_ in self._by_resource.items()
        }

    def changes_s(self, now_s: float) -> list[float]:
        """When a list may change by time alone."""
        return self._offers.next_s(now_s)


class Offers:
    """Which GPU's free units each resource offers, over time. State of one owner; times are monotonic seconds.

    All units of a container lie on one GPU, and only one GPU's free units are Healthy. A list reaches the kubelet at
    any time, so an offer that moves while a pod is admitted gives its init container units of one GPU and its app
    container those of another. Pods are admitted in bursts: an offer rests until none was for a while, whatever they
    asked for.
    """

    def __init__(self) -> None:
        self._granted: dict[str, tuple[float, str]] = {}
        self._last_s = self._since_s = float("-inf")

    def granted(self, resource: str, group: str, now_s: float) -> None:
        """Shares of a resource were granted on a group."""
        if now_s - self._last_s >= REST_S:
            self._since_s = now_s
        self._last_s = now_s
        self._granted[resource] = (now_s, group)

    def kept(self, resource: str, before: str | None, now_s: float) -> str | None:
        """The group that stays on offer, None where the offer may move. `before`: the one on offer now."""
        own_s, group = self._granted.get(resource, (float("-inf"), ""))
        if now_s - own_s < REST_S:
            return group  # where its pod's next container must find more, whatever is on offer by now
        return before if self._rests(now_s) else None

    def published(self, now_s: float) -> None:
        """All offers that might move have done so."""
        if not self._rests(now_s):
            self._since_s = now_s

    def next_s(self, now_s: float) -> list[float]:
        """When offers may move next."""
        ends = [at_s + REST_S for at_s, _ in self._granted.values()]
        return [end_s for end_s in (*ends, self._last_s + REST_S) if end_s > now_s]

    def _rests(self, now_s: float) -> bool:
        return now_s - self._last_s < REST_S and now_s - self._since_s < REST_LONGEST_S
