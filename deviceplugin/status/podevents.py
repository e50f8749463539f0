"""What users read of their pods in `kubectl describe pod`: that and why a container waits for its share, and that one
uses more than its limit. What annotated containers are refused for is told where that is decided."""

import time
from collections.abc import Callable, Iterable, Iterator

from deviceplugin.kubernetes.model import Events
from deviceplugin.plan.allocation import ANNOTATED
from deviceplugin.status.model import AllocationStatus
from mpsd.common.log import get_logger

log = get_logger("plugin")

WAITING, OVER_LIMIT = "GpuShareWaiting", "GpuMemoryOverLimit"
PATIENCE_S = 2.0
"""How long a wait goes untold: files are written within milliseconds, and daemons restart within a second."""
AGAIN_S = 600.0
"""How often what lasts is told again: API servers forget events after an hour."""
WHAT_NOW = (
    "; it starts by itself once that is over: until then the runtime finds no CDI device for it ('unresolvable CDI "
    "devices'), and neither another pod nor a new one would fare better on this node"
)


class PodNews:
    """Tells once of each time, and now and then of what lasts. Of one thread."""

    def __init__(self, events: Events, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._events, self._monotonic = events, monotonic
        self._since_s: dict[tuple[str, str], float] = {}
        self._told: dict[tuple[str, str], tuple[str, float]] = {}
        """(allocation, what) -> what was said, and when."""

    def observe(self, allocations: Iterable[AllocationStatus]) -> None:
        """Takes in what status shows of all allocations."""
        now_s = self._monotonic()
        found = {(a.key, what): (a, text) for a in allocations for what, text in news(a)}
        self._since_s = {what: self._since_s.get(what, now_s) for what in found}
        self._told = {what: told for what, told in self._told.items() if what in found}
        for what, (allocation, text) in found.items():
            self._tell(what, allocation, text, now_s)

    def _tell(self, what: tuple[str, str], allocation: AllocationStatus, text: str, now_s: float) -> None:
        _, kind = what
        before, told_s = self._told.get(what, ("", float("-inf")))
        # Use changes all the time; why a container waits is news when it is something else.
        same = text == before or (kind == OVER_LIMIT and before)
        young = kind == WAITING and now_s - self._since_s[what] < PATIENCE_S
        if young or (same and now_s - told_s < AGAIN_S):
            return
        self._told[what] = text, now_s
        if kind == OVER_LIMIT and not before:
            log.warning("a container uses more than its limit", key=allocation.key, reason=text)
        message = f"{allocation.container}: {text}"
        self._events.pod(allocation.namespace, allocation.pod, allocation.pod_uids[-1], "Warning", kind, message)


def news(allocation: AllocationStatus) -> Iterator[tuple[str, str]]:
    """What the user of an allocation should know: what it is, and the text (pure). Nobody where its pod is not known
    yet: it is by the next look."""
    if not (allocation.pod and allocation.pod_uids) or allocation.state == "leaving":
        return
    if allocation.state == "waiting" and allocation.resource != ANNOTATED:
        yield WAITING, allocation.reason + WHAT_NOW
    if allocation.over_limit:
        yield OVER_LIMIT, allocation.over_limit
