"""Waiting for SIGTERM or SIGINT in the main thread, so that none is ever missed.

A handler of Python's runs between two steps of the main thread, which a blocking wait on a lock may never reach; and
one that takes a lock can meet the holder below itself. So the signal itself writes to a pipe, and the wait is a poll.
"""

import os
import select
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Protocol


class Stop(Protocol):
    """What ends a wait: a StopSignal, or an event."""

    def wait(self, timeout_s: float | None = None, /) -> bool: ...


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Context manager of the main thread. After the first signal, a second one ends the process at once."""

    def __enter__(self) -> "StopSignal":
        assert threading.current_thread() is threading.main_thread()
        self._came = False
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._came:  # after a signal the next one is to end the process, however far it is by then
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._came = True
        for other in SIGNALS:
            signal.signal(other, signal.SIG_DFL)

    def is_set(self) -> bool:
        """Whether a signal came."""
        return self._came

    def wait(self, timeout_s: float | None = None, /) -> bool:
        """Waits for a signal, or until the time is over; whether one came."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while not self._came:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            if poll.poll(None if left_s is None else left_s * 1000 + 1):
                os.read(self._read, 64)  # another signal's, or ours: then its handler ran before this line
        return self._came
