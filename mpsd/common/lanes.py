"""Threads for calls that block: each lane runs its jobs one after the other, and lanes don't wait for each other.

A lane has a thread only while it has work. A call that hangs for good costs its lane, nothing else.
"""

import threading
from collections import deque
from collections.abc import Callable

from mpsd.common.errors import TransientError
from mpsd.common.log import get_logger
from mpsd.common.threads import GuardedThread

log = get_logger("mpsd")

Job = Callable[[], None]
Post = Callable[[Job], None]
"""Has a job run by the thread that owns the state: how a lane hands in what came of its own."""


class Lane:
    """Jobs of one subject, in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._thread: GuardedThread | None = None
        self._starved = False

    def submit(self, job: Job) -> None:
        """Runs the job after those submitted before; returns at once. A job reports its own failures."""
        with self._lock:
            self._jobs.append(job)
        self.revive()

    def revive(self) -> bool:
        """Gives a lane with work a thread, where it has none: the process may have had no more when the work came.

        Returns:
            Whether that is so still, and it is to be called again.
        """
        with self._lock:
            if not self._jobs or self._thread is not None:
                return False
            thread = GuardedThread(self._run, self._name)
            try:
                thread.start()
            except TransientError as error:
                if not self._starved:
                    self._starved = True
                    log.error("work waits for a thread", lane=self._name, error=str(error))
                return True
            if self._starved:
                self._starved = False
                log.info("waiting work has a thread again", lane=self._name)
            self._thread = thread
            return False

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
