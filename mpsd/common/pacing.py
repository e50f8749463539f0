"""How often something may be tried or sent (pure; times are monotonic seconds)."""

from collections.abc import Callable
from enum import Enum

QUICK_REFUSALS = 4
"""A kube-apiserver that has just started refuses what is granted, with 403, until it has read the roles."""


def pause_s(before: int, first_s: float, last_s: float, jitter: Callable[[], float]) -> float:
    """The pause after a failure that `before` others came before: doubled with each, from `first_s` to `last_s`, and up
    to half of it less, so that nodes don't come in step.

    Args:
        jitter: gives 0 <= x < 1.
    """
    return min(last_s, first_s * 2.0 ** min(before, 32)) * (1.0 - jitter() / 2.0)


def whole() -> float:
    """The jitter of pauses that nobody can come in step with."""
    return 0.0


class Failure(Enum):
    """AWAY: nobody answers. BUSY: an answer that may soon be another. REFUSED: nothing will change within moments, as
    where rights are missing."""

    AWAY = "away"
    BUSY = "busy"
    REFUSED = "refused"


class Backoff:
    """Pauses after failures in a row, see `pause_s`.

    Each kind of failure has its own count: a server that comes again after long refuses, and is busy, for a moment.
    After QUICK_REFUSALS the pauses of refusals are the longest at once.
    """

    def __init__(self, first_s: float, last_s: float, jitter: Callable[[], float] = whole) -> None:
        self._first_s, self._last_s, self._jitter = first_s, last_s, jitter
        self._counts: dict[Failure, int] = {}

    def pause_s(self, retry_after_s: float | None = None, kind: Failure = Failure.BUSY) -> float:
        """The pause after one more failure, never shorter than the server asks for."""
        before = self._counts.get(kind, 0)
        self._counts[kind] = before + 1
        refused_for_good = kind is Failure.REFUSED and before >= QUICK_REFUSALS
        first_s = self._last_s if refused_for_good else self._first_s
        return max(pause_s(before, first_s, self._last_s, self._jitter), retry_after_s or 0.0)

    def reset(self) -> None:
        """It worked: the next pause is the shortest again."""
        self._counts.clear()


class Bucket:
    """`burst` at once, then one more every `every_s`."""

    __slots__ = ("_at_s", "_burst", "_every_s", "_left")

    def __init__(self, burst: int, every_s: float, now_s: float) -> None:
        self._burst, self._every_s = burst, every_s
        self._left, self._at_s = float(burst), now_s

    def wait_s(self, now_s: float) -> float:
        """How long until one may be taken; 0.0 when now."""
        left = self._fill(now_s)
        return 0.0 if left >= _ONE else (1.0 - left) * self._every_s

    def take(self, now_s: float) -> bool:
        """Takes one if one is there."""
        left = self._fill(now_s)
        if left < _ONE:
            return False
        self._left, self._at_s = max(0.0, left - 1.0), now_s
        return True

    def _fill(self, now_s: float) -> float:
        return min(float(self._burst), self._left + (now_s - self._at_s) / self._every_s)


_ONE = 1.0 - 1e-6  # who waits exactly as long as told must find one
