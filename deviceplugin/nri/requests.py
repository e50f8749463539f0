"""What a front end is to be told, in order, and until when each request must be answered (pure: callers bring times).

One worker takes what is next; whoever serves the runtime answers what is overdue meanwhile. A request has one answer:
whoever comes first gives it.
"""

import math
from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from deviceplugin.nri.model import Container, Inventory, Pod, Runtime
from mpsd.common.errors import ProtocolError

MAX_ENTRIES: Final = 4096
MAX_BYTES: Final = 64 << 20
"""What may wait for a worker that is stuck. More than one message at a time is rare: a runtime asks one by one."""


class Kind(StrEnum):
    """What there is to tell."""

    CONNECTED = "connected"
    SYNCHRONIZE = "synchronize"
    RUN_POD = "run pod"
    STOP_POD = "stop pod"
    REMOVE_POD = "remove pod"
    CREATE_CONTAINER = "create container"
    START_CONTAINER = "start container"
    STOP_CONTAINER = "stop container"
    REMOVE_CONTAINER = "remove container"
    DISCONNECTED = "disconnected"


REFUSABLE: Final = frozenset((Kind.CREATE_CONTAINER, Kind.START_CONTAINER))
"""Requests whose answer decides something. Once refused, nobody needs to be told of them any more."""


class Entry(msgspec.Struct, eq=False, kw_only=True):
    """One thing to tell. `link`: number of the link it came over; `stream`: that of its answer, 0 where none is due;
    `inventory`: what a SYNCHRONIZE tells."""

    kind: Kind
    link: int
    stream: int = 0
    pod: Pod | None = None
    container: Container | None = None
    inventory: Inventory = ((), ())
    size_bytes: int = 0
    runtime: Runtime | None = None
    reason: str = ""
    arrived_s: float = 0.0
    budget_s: float = math.inf
    begun_s: float = math.inf
    answered: bool = False

    @property
    def due_s(self) -> float:
        """When its answer must be there (monotonic clock); infinite where none is owed."""
        return math.inf if self.answered or not self.stream else self.arrived_s + self.budget_s


class RequestQueue:
    """State of one owner, over all its links."""

    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()
        self._running: Entry | None = None
        self._bytes = 0
        self._told: set[int] = set()
        self._slowest_s: dict[str, float] = {}
        self.late = 0
        """Requests that were answered without the front end."""

    @property
    def slowest_s(self) -> Mapping[str, float]:
        """The longest that a request of each kind has waited for its answer."""
        return dict(self._slowest_s)

    def stuck_s(self, now_s: float) -> float:
        """How long the front end has been over its time with one call, 0 while it isn't."""
        running = self._running
        return 0.0 if running is None else max(0.0, now_s - running.begun_s - running.budget_s)

    def add(self, entry: Entry, now_s: float) -> bool:
        """Puts it at the end. False when it must be answered as overdue at once: the worker is stuck.

        Raises ProtocolError when too much waits; what waits is dropped with its link then.
        """
        if len(self._waiting) >= MAX_ENTRIES or self._bytes + entry.size_bytes > MAX_BYTES:
            raise ProtocolError(
                f"cannot remember more than {MAX_ENTRIES} requests or {MAX_BYTES >> 20} MiB while one is worked on"
            )
        entry.arrived_s = now_s
        in_time = not entry.stream or not self.stuck_s(now_s)
        if not in_time:
            self._answer(entry, now_s, late=True)
            if entry.kind in REFUSABLE:
                return False
        self._waiting.append(entry)
        self._bytes += entry.size_bytes
        return in_time

    def begin(self, now_s: float) -> Entry | None:
        """The next thing to tell, None while there is none or one is being told."""
        if self._running is not None or not self._waiting:
            return None
        entry = self._running = self._waiting.popleft()
        entry.begun_s = now_s
        self._bytes -= entry.size_bytes
        if entry.kind is Kind.CONNECTED:
            self._told.add(entry.link)
        return entry

    def finish(self, now_s: float) -> bool:
        """What was begun is over. Whether its answer is still wanted."""
        entry, self._running = self._running, None
        if entry is None or not entry.stream or entry.answered:
            return False
        self._answer(entry, now_s, late=False)
        return True

    def overdue(self, now_s: float) -> list[Entry]:
        """Those whose time is up: each is to be answered now, and no more later."""
        entries = list(self._waiting) if self._running is None else [self._running, *self._waiting]
        late = [entry for entry in entries if entry.due_s <= now_s]
        for entry in late:
            self._answer(entry, now_s, late=True)
            if entry.kind in REFUSABLE and entry is not self._running:
                self._waiting.remove(entry)
                self._bytes -= entry.size_bytes
        return late

    def due_s(self) -> float:
        """When the next one will be overdue."""
        running_s = self._running.due_s if self._running is not None else math.inf
        return min(running_s, *(entry.due_s for entry in self._waiting), math.inf)

    def drop(self, link: int, reason: str, budget_s: float) -> None:
        """The link has ended: what came over it and was not told yet is void, the next link brings it all anew."""
        kept = [entry for entry in self._waiting if entry.link != link or entry.kind is Kind.DISCONNECTED]
        self._bytes = sum(entry.size_bytes for entry in kept)
        self._waiting = deque(kept)
        if self._running is not None and self._running.link == link:
            self._running.answered = True
        if link in self._told:
            self._told.discard(link)
            self._waiting.append(Entry(kind=Kind.DISCONNECTED, link=link, reason=reason, budget_s=budget_s))

    def _answer(self, entry: Entry, now_s: float, *, late: bool) -> None:
        entry.answered = True
        self.late += late
        kind = entry.kind.value
        self._slowest_s[kind] = max(self._slowest_s.get(kind, 0.0), now_s - entry.arrived_s)
