"""How much of one daemon's log goes on to ours (pure)."""


class FloodGate:
    """Admits so many lines a minute, counts the rest, and says a lasting condition once an hour only."""

    def __init__(self, *, lines: int = 50, window_s: float = 60.0, repeat_s: float = 3600.0) -> None:
        self._lines, self._window_s, self._repeat_s = lines, window_s, repeat_s
        self._began_s = 0.0
        self._admitted = 0
        self._suppressed = 0
        self._said_s: dict[str, float] = {}

    def admit(self, now_s: float, lasting: str = "") -> bool:
        """Whether to pass a line on. `lasting` names the condition it tells of, one of a few; empty: it tells news."""
        if lasting:
            said_s = self._said_s.get(lasting)
            if said_s is not None and now_s - said_s < self._repeat_s:
                return False
            self._said_s[lasting] = now_s
            return True  # rare enough, and not to be lost in a flood
        if not self._admitted:
            self._began_s = now_s
        if self._admitted >= self._lines:
            self._suppressed += 1
            return False
        self._admitted += 1
        return True

    def take_suppressed(self, now_s: float) -> int:
        """How many were held back, once their minute is over; 0 before."""
        if not self._admitted or now_s - self._began_s < self._window_s:
            return 0
        suppressed, self._suppressed, self._admitted = self._suppressed, 0, 0
        return suppressed
