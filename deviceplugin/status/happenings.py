"""Tells of what status shows of allocations: whose they are by now. What was told is told no more."""

from collections.abc import Iterable

from deviceplugin.status.model import AllocationStatus
from mpsd.events.kinds import EventKind
from mpsd.events.model import Subject
from mpsd.events.teller import Teller


class AllocationNews:
    """Of one thread, which looks now and then."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._named: frozenset[str] = frozenset()

    def observe(self, allocations: Iterable[AllocationStatus]) -> None:
        """Takes in what status shows of all of them."""
        named = {a.key: a for a in allocations if a.pod}
        for key, allocation in named.items():
            if key not in self._named:
                self._teller.tell(EventKind.POD_KNOWN, subject_of(allocation))
        self._named = frozenset(named)


def subject_of(allocation: AllocationStatus) -> Subject:
    """An allocation as what an event is about (pure)."""
    return Subject(
        key=allocation.key,
        namespace=allocation.namespace,
        pod=allocation.pod,
        container=allocation.container,
        pod_uid=allocation.pod_uids[-1] if allocation.pod_uids else "",
        resource=allocation.resource,
        gpus=allocation.gpus,
    )
