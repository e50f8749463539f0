"""Threads that outlive what their body raises: every long-lived thread of both processes is one.

A thread that ends on an exception takes its duty with it, and nobody notices until it is missed. Here the body is
called again, after a pause that grows, and what it raised is logged once and counted.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from mpsd.common.errors import TransientError
from mpsd.common.log import Logger, get_logger
from mpsd.common.pacing import Backoff

PAUSE_FIRST_S: Final = 0.1
PAUSE_LAST_S: Final = 5.0
STEADY_S: Final = 60.0
"""A body that ran so long before it raised owes nothing to what it raised before."""

log = get_logger("threads")

_lock = threading.Lock()
_failures: Counter[str] = Counter()


def failures() -> dict[str, int]:
    """How often bodies of threads raised in this process, by name of the thread; by class for those of libraries."""
    with _lock:
        return dict(_failures)


class Mishaps:
    """What the rounds of one loop raise: said with its stack once, as long as it stays the same, and counted each time.

    Args:
        name: of the thread, or of what goes round in it.
        event: what is said.
    """

    def __init__(self, name: str, event: str, logger: Logger = log) -> None:
        self._name, self._event, self._log = name, event, logger
        self._told = ""

    def note(self, error: BaseException, **fields: object) -> None:
        """In the handler of the error."""
        _count(self._name)
        text = f"{type(error).__name__}: {error}"
        if text != self._told:
            self._told = text
            with suppress(Exception):
                self._log.exception(self._event, **fields)

    def none(self) -> None:
        """A round went well: the same is news again."""
        self._told = ""


class GuardedThread(threading.Thread):
    """A daemon thread that calls `body` until it returns.

    The body is an endless loop that ends when its owner says so. Where it raises, whatever that is, it is called again:
    it must be able to begin anew. Whoever joins the thread has told it to end: it does not pause any more then, and a
    body that raises once more is let go.
    """

    def __init__(self, body: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._body = body
        self._ending = threading.Event()

    def start(self) -> None:
        """Raises TransientError when the process may have no more threads; it can be tried again then."""
        try:
            super().start()
        except RuntimeError as error:
            if self.ident is not None:
                raise  # started twice: a mistake of ours
            raise _no_thread(self.name, error) from error

    def join(self, timeout: float | None = None) -> None:
        self._ending.set()
        super().join(timeout)

    def run(self) -> None:
        mishaps = Mishaps(self.name, "a thread failed and goes on")
        backoff, last = Backoff(PAUSE_FIRST_S, PAUSE_LAST_S), False
        while True:
            begun_s = time.monotonic()
            try:
                self._body()
                return
            except BaseException as error:  # noqa: BLE001 - nothing may end it
                if time.monotonic() - begun_s >= STEADY_S:
                    backoff.reset()
                    mishaps.none()
                mishaps.note(error, thread=self.name)
            if last:
                return
            last = self._ending.wait(backoff.pause_s())


def _count(name: str) -> None:
    with _lock:
        _failures[name] += 1


def full_pool(workers: int, name: str) -> ThreadPoolExecutor:
    """A pool that has all its threads at once, so that no call waits for one or fails for want of it.

    Raises TransientError when the process may have no more threads.
    """
    pool = ThreadPoolExecutor(workers, name)
    together = threading.Barrier(workers)
    try:
        for _ in range(workers):
            pool.submit(together.wait)
    except RuntimeError as error:
        together.abort()
        pool.shutdown()
        raise _no_thread(name, error) from error
    return pool


def _no_thread(name: str, error: RuntimeError) -> TransientError:
    return TransientError(
        f"cannot start the thread {name}: {error}: raise the limit of processes (TasksMax of the unit, the pod's pids "
        "limit), or look for what uses them up"
    )


def catch_all() -> None:
    """Counts and logs what ends any other thread of this process, a library's: never as a raw traceback."""
    threading.excepthook = _on_uncaught


def _on_uncaught(args: threading.ExceptHookArgs) -> None:
    name = type(args.thread).__name__ if args.thread is not None else "unknown"
    _count(name)
    with suppress(Exception):
        text = f"{args.exc_type.__name__}: {args.exc_value}"
        log.error("a thread of a library ended", thread=name, error=text)
