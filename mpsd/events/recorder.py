"""Takes what parts of a process tell, and makes events of what is news: in its file, in its log, and counted.

Whoever tells something puts it into a queue and goes on. One thread does the rest, some of it together; a disk that is
full or slow costs events, which are counted, and never anybody's time.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpsd.common.log import Logger, get_logger
from mpsd.common.processes import boot_id
from mpsd.common.reason import Reason
from mpsd.common.threads import GuardedThread
from mpsd.events.bound import RateBound
from mpsd.events.file import MAX_BYTES, EventFile, read
from mpsd.events.kinds import STATE_OF, WARNINGS, EventKind, RunCode
from mpsd.events.model import Event, Subject, event
from mpsd.events.teller import NOBODY
from mpsd.events.told import Told

log = get_logger("events")

REST_S = 0.05
"""What is told within this time is written together."""
MOST_WAITING = 5000
CLOSE_S = 2.0
"""How long a disk that hangs may hold up the end of the process."""


class Recorder:
    """Of one process: see the module. A Teller.

    Args:
        process: `mpsd` or `plugin`.
        say: where each event is a line; None where what happens is logged by whom it happens to.
        on_counted: told, by the thread, after events were counted.
    """

    def __init__(
        self,
        state_root: str,
        process: str,
        *,
        say: Logger | None = None,
        on_counted: Callable[[], object] = lambda: None,
        max_bytes: int = MAX_BYTES,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._process = state_root, process
        self._instance, self._boot = os.urandom(6).hex(), boot_id()
        self._say, self._on_counted, self._wall, self._monotonic = say, on_counted, wall, monotonic
        self._told, self._bound = Told(), RateBound()
        self._file = EventFile(state_root, process, lambda: self._told.held, max_bytes=max_bytes)
        self._counts = dict.fromkeys(map(str, EventKind), 0)
        self._lock = threading.Lock()
        self._queue: list[_Word | _All] = []
        self._number = self._lost = self._reported = 0
        """Words so far; events that could not be written; how many of them an event says."""
        self._replayed, self._objection = False, ""
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = GuardedThread(self._run, "events")

    @property
    def counts(self) -> Mapping[str, int]:
        """Kind -> how many since the process began, also of those that could not be written."""
        return dict(self._counts)

    @property
    def lost(self) -> int:
        """How many could not be written since the process began."""
        return self._lost

    def start(self) -> None:
        """Begins to write; what is told before waits for it."""
        self._thread.start()

    def close(self) -> None:
        """Writes what was told, and ends."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        else:
            self._file.close()

    def tell(
        self,
        kind: EventKind,
        subject: Subject = NOBODY,
        reason: Reason | None = None,
        *,
        count: int = 1,
        total: int = 0,
        pid: int = 0,
        detail: str = "",
        unix_s: float | None = None,
    ) -> None:
        """See Teller."""
        self._put(_Word(kind, subject, reason, count, total, pid, detail, self._wall() if unix_s is None else unix_s))

    def settle(self, rest: EventKind, there: Collection[str]) -> None:
        """See Teller."""
        self._put(_All(rest, there, self._wall()))

    def _put(self, word: "_Word | _All") -> None:
        with self._lock:
            if len(self._queue) < MOST_WAITING:
                self._queue.append(word)
            elif isinstance(word, _Word):
                self._lost += word.times
        if not self._wake.is_set():
            self._wake.set()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            stopping = self._stop.is_set()
            self.work(last=stopping)
            if stopping:
                self._file.close()
                return
            if self._wake.wait(self._bound.wait_s(self._monotonic())):
                self._stop.wait(REST_S)
                self._wake.clear()

    def work(self, *, last: bool = False) -> None:
        """Makes events of what was told by now. The thread's, or a test's in its place.

        Args:
            last: nothing comes after it.
        """
        if not self._replayed:
            self._replayed = True
            self._replay()
        with self._lock:
            queue, self._queue = self._queue, []
        now_s = self._monotonic()
        news = [one for word in queue for one in self._news(word)]
        for one in news:
            self._counts[one.kind] += one.count
        admitted = [told for one in news if (told := self._bound.admit(one, now_s)) is not None]
        admitted += self._bound.rest() if last else self._bound.due(now_s)
        self._write(admitted)
        if self._say is not None:
            for one in admitted:
                _log(self._say, one)
        if news:
            self._on_counted()

    def _replay(self) -> None:
        """Takes in what was told before this process began."""
        try:
            self._told.replay(read(self._root, self._process))
        except OSError as error:
            self._object(error)

    def _news(self, word: "_Word | _All") -> Iterator[Event]:
        if isinstance(word, _All):
            for was in self._told.missing(word.rest, word.there):
                why = was.why if STATE_OF[word.rest].field == "reason_code" else None
                yield from self._noted(_Word(word.rest, was.subject, why, unix_s=word.unix_s))
        elif word.kind == EventKind.STARTED and word.reason is None:
            yield from self._noted(word._replace(reason=self._silence()))
        else:
            yield from self._noted(word)

    def _silence(self) -> Reason | None:
        """That the process before this one did not say that it stopped."""
        before = self._told.last(EventKind.STARTED, NOBODY)
        if before is None or before.kind != EventKind.STARTED:
            return None
        text = f"the {self._process} before it (pid {before.pid}) ended without a word"
        return Reason(RunCode.ENDED_IN_SILENCE, text)

    def _noted(self, word: "_Word") -> Iterator[Event]:
        self._number += 1
        made = event(
            word.kind,
            self._told.named(word.subject),
            word.reason,
            unix_s=word.unix_s,
            process=self._process,
            instance=self._instance,
            number=self._number,
            boot=self._boot,
            count=word.times,
            total=word.total,
            pid=word.pid,
            detail=word.detail,
        )
        for one in (self._told.unseen(made), self._told.news(made)):
            if one is not None:
                self._told.note(one)
                yield one

    def _write(self, events: Sequence[Event]) -> None:
        with self._lock:
            lost, unreported = self._lost, self._lost - self._reported
        if unreported:
            word = _Word(EventKind.EVENTS_DROPPED, NOBODY, None, unreported, unix_s=self._wall())
            events = [*self._noted(word), *events]
        if not events:
            return
        written = 0
        try:
            written = self._file.append(events)
            self._objection = ""
        except OSError as error:
            self._object(error)
        if unreported and written:
            self._reported = lost
            self._counts[EventKind.EVENTS_DROPPED] += unreported
        dropped = sum(one.count for one in events[written:] if one.kind != EventKind.EVENTS_DROPPED)
        if dropped:
            with self._lock:
                self._lost += dropped

    def _object(self, error: OSError) -> None:
        text = str(error)
        if text != self._objection:
            log.warning("events can't be written or read, and are counted only", error=text)
        self._objection = text


class _Word(NamedTuple):
    """Something that was told."""

    kind: EventKind
    subject: Subject
    reason: Reason | None
    times: int = 1
    total: int = 0
    pid: int = 0
    detail: str = ""
    unix_s: float = 0.0


class _All(NamedTuple):
    """All things that a state is of."""

    rest: EventKind
    there: Collection[str]
    unix_s: float


_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


def _log(say: Logger, one: Event) -> None:
    """One line, without the fields that it does not have."""
    fields = {
        "key": one.key,
        "pod": f"{one.namespace}/{one.pod}" if one.pod else "",
        "container": one.container,
        "resource": one.resource,
        "gpu": ",".join(one.gpus),
        "daemon": one.daemon,
        "pid": one.pid,
        "count": one.count if one.count > 1 else 0,
        "detail": one.detail,
        "code": one.reason_code,
        "reason": one.reason,
    }
    write = say.warning if one.kind in WARNINGS else say.info
    write(_HUMP.sub(" ", one.kind).lower(), **{name: value for name, value in fields.items() if value})
