"""Threads for calls of the driver that may hang or block: one per subject, so that none holds up another."""

import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.pacing import Backoff
from mpsd.common.threads import GuardedThread, Mishaps
from mpsd.gpu.backend import GpuBackend, GpuError, GpuLostError, XidEvent

log = get_logger("gpu")

_XID_WAIT_S: Final = 1.0


class Worker:
    """A thread for calls that may hang, one job at a time.

    `call`: which of the driver's is under way, for messages. `since_s`: since when (its owner's clock), None while
    idle; only the owner reads and ends it.

    Args:
        done: told, in this thread, what a job returned, or the GpufracError that it raised.
    """

    def __init__(self, name: str, done: "Callable[[Worker, Any], None]") -> None:
        self.call = ""
        self.since_s: float | None = None
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done = done
        self._thread = GuardedThread(self._run, name)
        self._thread.start()

    def busy(self) -> bool:
        """Whether a call runs, or waits to."""
        return self.since_s is not None

    def submit(self, job: Callable[[], Any], now_s: float) -> None:
        """Hands it a job; call only while it is not busy."""
        self.since_s = now_s
        self._jobs.put(job)

    def stop(self) -> None:
        """Ends the thread after the call that runs."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            outcome: Any
            try:
                outcome = job()
            except GpufracError as exc:
                outcome = exc
            except Exception as exc:
                log.exception("driver call failed in an unforeseen way")
                outcome = GpuError(f"cannot finish {self.call}(): {type(exc).__name__}: {exc}")
            self._done(self, outcome)


class XidWatch:
    """Waits for XID events while the driver is open.

    Args:
        opened: whether it is; also set when it stops.
        stopping: ends the watch.
        retry_s: first and longest pause after a wait that failed.
        on_event: told of each, from the watch's thread.
        on_lost: told that a GPU was lost while it was waited.
    """

    def __init__(
        self,
        backend: GpuBackend,
        opened: threading.Event,
        stopping: threading.Event,
        retry_s: tuple[float, float],
        on_event: Callable[[XidEvent], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._backend, self._opened, self._stopping, self._retry_s = backend, opened, stopping, retry_s
        self._on_event, self._on_lost = on_event, on_lost
        self._thread = GuardedThread(self._run, "gpu-xid")

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended, or never began."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        backoff = Backoff(*self._retry_s)
        mishaps = Mishaps("gpu-xid", "waiting for XID events failed", log)
        while not self._stopping.is_set():
            self._opened.wait()
            if self._stopping.is_set():
                return
            try:
                event = self._backend.wait_xid(_XID_WAIT_S)
            except GpuLostError:
                self._on_lost()
            except GpuError as exc:
                log.debug("cannot wait for XID events", error=exc)
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error)
            else:
                backoff.reset()
                if event is not None:
                    self._on_event(event)
                continue
            self._stopping.wait(backoff.pause_s())
