"""Threads for calls that block: each lane runs its jobs one after the other, and lanes don't wait for each other.

A lane has a thread only while it has work. A call that hangs for good costs its lane, nothing else.
"""

import threading
from collections import deque
from collections.abc import Callable

from mpsd.log import get_logger

log = get_logger("mpsd")

Job = Callable[[], None]


class Lane:
    """Jobs of one subject, in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Runs the job after those submitted before; returns at once. A job reports its own failures."""
        with self._lock:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits until the lane is idle. False when the time was over first."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                log.exception("a job failed in an unforeseen way", lane=self._name)
