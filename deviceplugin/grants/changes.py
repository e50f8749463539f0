"""A mark that something changed, and who waits for it."""

import threading

GRANT_REST_S = 0.01
"""How long grants alone rest, so that a burst of them is worked off together; all else is told at once."""


class Changes:
    """Under the lock of its owner, which every method but `wait` must be called with. Marked at the start."""

    def __init__(self, lock: threading.Lock) -> None:
        self._condition = threading.Condition(lock)
        self._marked = self._urgent = True
        self.version = 0
        """Grows with every change that could matter to anybody."""

    def mark(self, *, urgent: bool = True) -> None:
        """Something changed. `urgent`: it need not rest with others."""
        self._marked = True
        self._urgent = self._urgent or urgent
        self.version += 1
        self._condition.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits until something changed (true) or the time passed (false); clears the mark."""
        with self._condition:
            self._condition.wait_for(lambda: self._marked, max(0.0, timeout_s))
            if self._marked and not self._urgent:
                self._condition.wait_for(lambda: self._urgent, GRANT_REST_S)
            marked = self._marked
            self._marked = self._urgent = False
            return marked
