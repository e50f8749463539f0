"""Tails the logs of every MPS daemon of a node, in one thread: events for the supervisor, lines for our own log.

Polled, not watched through inotify: a look at the 16 files of 8 idle GPUs takes 0.05 ms of CPU. A wake-up costs more
than that, and inotify would have one, of two threads, for each of the lines that every query leaves.
"""

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, ParamSpec

from mpsd.common.log import get_logger
from mpsd.common.threads import GuardedThread
from mpsd.daemon.logs.flood import FloodGate
from mpsd.daemon.logs.follow import Item, LogFile, Note
from mpsd.daemon.logs.parse import (
    ClientConnected,
    ClientLimit,
    ClientUnaccounted,
    Interpreter,
    LogEvent,
    Severity,
    Skipped,
    is_routine,
    parse_line,
    severity,
)

log = get_logger("daemon")

P = ParamSpec("P")

POLL_S = 2.0
"""With 8 idle GPUs 0.015 % of a core; every second, it is 0.03 %."""
FULL_LOOK_EVERY = 15
"""Steps after which a log is looked at though nothing seems to have changed."""
MAX_BYTES = 16 << 20
LAST_LINES = 20
MAX_SERVERS = 64
"""Server directories looked at below one log directory; a daemon of ours has one or two."""

_LINE_CHARS = 500
"""The most of a line that goes on to people."""
_SERVER = re.compile(r"[a-z0-9_]{1,64}")
"""Names of servers (NVIDIA MPS v3 interface, release 615)."""
_LASTING: dict[type[LogEvent], str] = {
    ClientConnected: "clients without PID",
    ClientUnaccounted: "clients unaccounted",
    ClientLimit: "client limit",
}
"""Conditions that every further client would tell of again."""
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

OnEvent = Callable[[str, LogEvent], None]
"""Name of the daemon, event."""
OnLine = Callable[[str, Severity, str], None]
"""Name of the daemon, severity, text."""


class LogTails:
    """See the module. Public methods but `step` are for any thread; none raises.

    Args:
        on_event, on_line: called from the tail thread, in order for each daemon. Lines are fit to be logged as they
            are: bounded in length and number.
        max_bytes: disk space of one log file. Larger ones are cut, their end stays in `<file>.1`.
    """

    def __init__(
        self,
        on_event: OnEvent,
        on_line: OnLine,
        *,
        max_bytes: int = MAX_BYTES,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_event, self._on_line = on_event, on_line
        self._max_bytes, self._poll_s, self._clock = max_bytes, poll_s, clock
        self._lock = threading.Lock()
        self._tails: dict[str, _Tail] = {}
        self._left: list[_Tail] = []
        """Removed; whoever runs `step` closes their files."""
        self._wake = threading.Event()
        self._closed = False
        self._thread = GuardedThread(self._run, "mps-logs")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, name: str, log_directory: str, protocol: Literal[2, 3], *, from_start: bool = False) -> None:
        """Tails the logs of one daemon from now on; the same again changes nothing.

        Call it before the daemon is started: what the files hold by then is of the past and passed over, files that
        come later are read from their start.

        Args:
            log_directory: may be missing yet. Protocol 3 has a directory for each server in it.
            from_start: read what the files hold by now, too.
        """
        with self._lock:
            old = self._tails.get(name)
            if self._closed or (old is not None and (old.directory, old.protocol) == (log_directory, protocol)):
                return
            tail = _Tail(log_directory, protocol, self._max_bytes)
            if not from_start:
                tail.begin()
            self._drop(name)
            self._tails[name] = tail

    def remove(self, name: str) -> None:
        """Forgets a daemon. A callback for it that is under way may still come to its end."""
        with self._lock:
            self._drop(name)
        self._wake.set()

    def last_lines(self, name: str) -> tuple[str, ...]:
        """What a daemon and its servers logged last, without what every query leaves, oldest first."""
        tail = self._tails.get(name)
        return () if tail is None else tail.last

    def close(self) -> None:
        """Ends the thread and waits for it, unless called from a callback. May be called again, or without start()."""
        with self._lock:
            self._closed = True
            for name in list(self._tails):
                self._drop(name)
        self._wake.set()
        if self._thread is threading.current_thread():
            return
        if self._thread.ident is not None:
            self._thread.join()
        self.step()

    def step(self) -> None:
        """One look at every file. The thread's, or a test's in its place."""
        with self._lock:
            left, self._left = self._left, []
            tails = list(self._tails.items())
        for tail in left:
            tail.close()
        for name, tail in tails:
            try:
                self._look(name, tail)
            except Exception:
                log.exception("reading the logs of an MPS daemon failed in an unforeseen way", daemon=name)

    def _run(self) -> None:
        while not self._closed:
            self.step()
            self._wake.wait(self._poll_s)
            self._wake.clear()
        self.step()

    def _drop(self, name: str) -> None:
        tail = self._tails.pop(name, None)
        if tail is not None:
            tail.removed = True
            self._left.append(tail)

    def _look(self, name: str, tail: "_Tail") -> None:
        for event, text, lasting in tail.look():
            if tail.removed:
                return
            if event is not None:
                self._pass_on(self._on_event, name, event)
            loud = Severity.WARNING if event is None else severity(event)
            if loud is not None and tail.gate.admit(self._clock(), lasting):
                self._pass_on(self._on_line, name, loud, text[:_LINE_CHARS])
        if suppressed := tail.gate.take_suppressed(self._clock()):
            self._pass_on(self._on_line, name, Severity.WARNING, f"{suppressed} more lines suppressed")

    def _pass_on(self, callback: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:
            log.exception("cannot pass on what an MPS daemon logged")


_Told = tuple[LogEvent | None, str, str]
"""Event, words for our log, name of the lasting condition if it is one. No event: something about a file."""


class _Followed:
    """One file with the state of reading it."""

    __slots__ = ("file", "interpreter")

    def __init__(self, name: str, max_bytes: int) -> None:
        self.file = LogFile(name, max_bytes)
        self.interpreter = Interpreter()


class _Tail:
    """The log files of one daemon."""

    def __init__(self, directory: str, protocol: Literal[2, 3], max_bytes: int) -> None:
        self.directory, self.protocol = directory, protocol
        self.gate = FloodGate()
        self.last: tuple[str, ...] = ()
        self.removed = False
        self._max_bytes = max_bytes
        self._objection = ""
        self._directories = [directory]
        self._seen: list[tuple[int, int] | None] = []
        self._full = self._passed = 0
        """Full looks since the marks changed; steps since the last full look."""
        self._recent: deque[str] = deque(maxlen=LAST_LINES)
        self._files: dict[str, _Followed] = {}
        """By the directory below `directory`, empty for its own, and the name."""

    def begin(self) -> None:
        """Passes over what the files hold by now."""
        for followed, directory in self._present():
            if directory is not None:
                followed.file.begin(directory)

    def look(self) -> Iterator[_Told]:
        """What is new. Opens nothing while names, sizes and times are as they were at the last two full looks: two,
        because one tick of a file system's clock can hold a look and a change after it."""
        marks = self._marks()
        if marks != self._seen:
            self._seen, self._full = marks, 0
        elif self._full >= 2 and self._passed < FULL_LOOK_EVERY:
            self._passed += 1
            return
        self._full, self._passed = self._full + 1, 0
        for followed, directory in self._present():
            yield from self._take(followed, followed.file.look(directory))
        if self._objection:
            yield None, self._objection, "directory"
        halves = (followed.file.half_line[:_LINE_CHARS] for followed in self._files.values())
        self.last = (*self._recent, *(half for half in halves if half))[-LAST_LINES:]

    def _marks(self) -> list[tuple[int, int] | None]:
        """Cheap to take, and changes when there is something to look at: what comes, goes or is renamed changes the
        time of its directory."""
        marks = [followed.file.mark() for followed in self._files.values()]
        return [_directory_mark(path) for path in self._directories] + marks

    def close(self) -> None:
        """Lets every file go."""
        for followed in self._files.values():
            followed.file.close()
        self._files.clear()

    def _take(self, followed: _Followed, items: list[Item]) -> Iterator[_Told]:
        for item in items:
            if isinstance(item, Note):
                yield None, item.text, item.lasting
            elif isinstance(item, Skipped):
                followed.interpreter = Interpreter()
                text = f"{item.size_bytes} bytes of the log skipped: more was written at once than is read"
                self._recent.append(f"({text})")
                yield item, text, ""
            else:
                line = parse_line(item)
                if is_routine(line):
                    continue
                self._recent.append(item[:_LINE_CHARS])
                for event, text in followed.interpreter.feed(line):
                    yield event, text, _LASTING.get(type(event), "")
        if not items:
            for event, text in followed.interpreter.settle():
                yield event, text, ""

    def _present(self) -> Iterator[tuple[_Followed, int | None]]:
        """Every file that may be there, with its directory, which is open until the next one is asked for."""
        with _opened(self.directory) as directory:
            fine = directory is not None or not os.path.lexists(self.directory)
            self._objection = "" if fine else f"cannot open {self.directory}: it is a link, or not for us to read"
            yield self._followed("", "control.log"), directory
            if self.protocol == 2:
                yield self._followed("", "server.log"), directory
                return
            servers = _servers(directory)
            self._directories = [self.directory, *(f"{self.directory}/{server}" for server in servers)]
            for server in servers:
                with _opened(server, directory) as below:
                    yield self._followed(server, "server.log"), below
            for gone in [key for key in self._files if "/" in key and key.partition("/")[0] not in servers]:
                yield self._files[gone], None
                self._files.pop(gone).file.close()

    def _followed(self, server: str, name: str) -> _Followed:
        key = f"{server}/{name}" if server else name
        followed = self._files.get(key)
        if followed is None:
            followed = self._files[key] = _Followed(name, self._max_bytes)
        return followed


def _directory_mark(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


@contextlib.contextmanager
def _opened(path: str, directory: int | None = None) -> Iterator[int | None]:
    """A directory, never through a link at its own name; None when it can't be opened."""
    try:
        fd = os.open(path, _DIRECTORY_FLAGS, dir_fd=directory)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _servers(directory: int | None) -> list[str]:
    if directory is None:
        return []
    try:
        with os.scandir(directory) as entries:
            found = [e.name for e in entries if _SERVER.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(found)[:MAX_SERVERS]
