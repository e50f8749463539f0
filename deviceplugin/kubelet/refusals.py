"""Refused Allocates: counted by what they asked for and why, and said."""

import threading
import time
from collections import Counter
from collections.abc import Callable

from deviceplugin.plan.allocation import Refusal
from mpsd.common.log import get_logger

log = get_logger("plugin")

CODE_METADATA = "gpufrac-code"
"""Key of the trailing metadata that has a refusal's code. A kubelet passes on the message alone."""
AGAIN_S = 60.0
"""How often the same words are a warning: a controller whose pods are refused makes new ones all the time."""


class Refusals:
    """Of all resources, since the plugin started. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._said: dict[str, tuple[Refusal, float]] = {}
        """Resource -> the last warning of it, and when that was."""

    def note(self, resource: str, refusal: Refusal) -> None:
        """One more; a warning where it is news."""
        now_s = self._monotonic()
        with self._lock:
            self._counts[resource, str(refusal.code)] += 1
            said, said_s = self._said.get(resource, (None, 0.0))
            news = said != refusal or now_s - said_s >= AGAIN_S
            if news:
                self._said[resource] = refusal, now_s
        tell = log.warning if news else log.debug
        tell("an Allocate is refused", resource=resource, code=refusal.code, reason=refusal.message)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Resource -> code -> how many."""
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            for (resource, code), count in sorted(self._counts.items()):
                found.setdefault(resource, {})[code] = count
        return found
