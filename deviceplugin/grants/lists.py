"""What each resource lists to the kubelet now (pure state; the caller brings times and wakes who waits)."""

from collections.abc import Mapping

import msgspec

from deviceplugin.grants.offers import Offers
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import Advertisement, advertise
from deviceplugin.plan.model import Allocation, NodeView

EMPTY = Advertisement(())


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
            advertisement = advertise(resource, view, accounts, offer)
            new = before.generation == 0 or advertisement.devices != before.advertisement.devices
            self._by_resource[name] = Published(before.generation + new, advertisement)
            changed = changed or new
        self._offers.published(now_s)
        for name in self._by_resource.keys() - view.resources.keys():
            before = self._by_resource[name]
            if before.advertisement.devices:
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
