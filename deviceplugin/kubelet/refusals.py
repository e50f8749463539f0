"""Allocates that were refused: the pods that this costs are gone, so that it happened is kept here, and told."""

import threading
from collections import Counter

from deviceplugin.plan.allocation import Refusal
from mpsd.events.kinds import EventKind
from mpsd.events.model import Subject
from mpsd.events.teller import Teller

CODE_METADATA = "gpufrac-code"
"""Key of the trailing metadata that has a refusal's code. A kubelet passes on the message alone."""


class Refusals:
    """Of all resources, since the plugin started. Thread-safe."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, resource: str, refusal: Refusal) -> None:
        """One more."""
        with self._lock:
            self._counts[resource, str(refusal.code)] += 1
        self._teller.tell(EventKind.REFUSED, Subject(resource=resource), refusal)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Resource -> code -> how many."""
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            for (resource, code), count in sorted(self._counts.items()):
                found.setdefault(resource, {})[code] = count
        return found
