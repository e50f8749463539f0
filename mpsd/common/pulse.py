"""Whether a thread that goes round and round still does: it says so itself, at the start of each round."""

import time
from collections.abc import Callable


class Pulse:
    """Of one loop. Beaten by its thread, read by any.

    Args:
        name: of the thread.
        most_s: as long as a round and the pause behind it may last, whatever its neighbours do.
    """

    def __init__(self, name: str, most_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.name, self.most_s, self._monotonic = name, most_s, monotonic
        self._beat_s = monotonic()

    def beat(self) -> None:
        """A round begins."""
        self._beat_s = self._monotonic()

    @property
    def silent_s(self) -> float:
        """How long ago the last round began, or the pulse was made."""
        return self._monotonic() - self._beat_s
