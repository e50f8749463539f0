"""Waiting for what must happen."""

import threading
import time
from collections.abc import Callable

WAIT_S = 60.0
"""Longest wait for something that must happen: a guard against hangs, reached only by a failing test, and no measure of
how quick something has to be. Quick enough on a machine that is ten times too busy."""


def until(condition: Callable[[], object], what: str | Callable[[], str] = "it did not happen") -> None:
    """Waits for something that nobody announces. `what` is said where it does not come."""
    deadline_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, what if isinstance(what, str) else what()
        pause.wait(0.01)
