"""How often something may be tried or sent (pure; times are monotonic seconds)."""

from collections.abc import Callable

QUICK_REFUSALS = 4
"""A kube-apiserver that has just started refuses what is granted, with 403, until it has read the roles."""


class Backoff:
    """Pauses that double from `first_s` to `last_s`, each up to half of it less, so that nodes don't come in step.

    Args:
        jitter: gives 0 <= x < 1.
    """

    def __init__(self, first_s: float, last_s: float, jitter: Callable[[], float]) -> None:
        self._first_s, self._last_s, self._jitter = first_s, last_s, jitter
        self._failures = 0
        self._refusals = 0

    def pause_s(self, retry_after_s: float | None = None, *, slow: bool = False) -> float:
        """The pause after one more failure, never shorter than the server asks for.

        Args:
            slow: nothing will change within moments, as where rights are missing. After QUICK_REFUSALS of them in a
                row it is the longest pause at once.
        """
        self._refusals = self._refusals + 1 if slow else 0
        doublings = self._refusals - 1 if slow else self._failures
        full_s = min(self._last_s, self._first_s * 2.0 ** min(doublings, 32))
        if self._refusals > QUICK_REFUSALS:
            full_s = self._last_s
        self._failures += 1
        return max(full_s * (1.0 - self._jitter() / 2.0), retry_after_s or 0.0)

    def reset(self) -> None:
        self._failures = self._refusals = 0


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
