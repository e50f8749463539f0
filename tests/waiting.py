"""Waiting for what must happen."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 90.0
"""Longest wait for something that must happen: a guard against hangs, reached only by a failing test, and no measure of
how quick something has to be. Quick enough on a machine that is ten times too busy."""

NEVER_S = 3600.0
"""For a deadline of the product that nothing in a test may wait for."""


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """Fails where what is in it waited for a deadline that is NEVER_S."""
    begun_s = time.monotonic()
    yield
    assert time.monotonic() - begun_s < WAIT_S


def until(condition: Callable[[], T | None], what: str | Callable[[], str] = "it did not happen") -> T:
    """Waits for something that nobody announces, and returns it. `what` is said where it does not come."""
    deadline_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline_s, what if isinstance(what, str) else what()
        pause.wait(0.01)
    return found
