"""Who may have a connection of the local API when many want one (no I/O).

Whoever only holds one gives way: a caller of ours connects, asks, and leaves. Places for callers of our own are kept
besides, for when methods run on all the others.
"""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

MAX_CONNECTIONS: Final = 64
KEPT: Final = 8
"""More, for our own processes alone."""

K = TypeVar("K")


@dataclass(slots=True)
class _Seat:
    since_s: float
    asking: bool = False


@dataclass(frozen=True, slots=True)
class Admission(Generic[K]):
    """Whether there is a place, and who has to leave for it."""

    admitted: bool
    leaves: K | None = None


class Seats(Generic[K]):
    """Not thread-safe."""

    def __init__(self) -> None:
        self._seats: dict[K, _Seat] = {}

    def __len__(self) -> int:
        return len(self._seats)

    def admit(self, key: K, now_s: float, *, ours: bool) -> Admission[K]:
        """A place for another connection, if there is one. `ours`: it is of one of our own processes."""
        leaves = None
        if len(self._seats) >= MAX_CONNECTIONS:
            waiting = [key for key, seat in self._seats.items() if not seat.asking]
            leaves = min(waiting, key=lambda key: self._seats[key].since_s, default=None)
            if leaves is not None:
                del self._seats[leaves]
            elif not ours or len(self._seats) >= MAX_CONNECTIONS + KEPT:
                return Admission(admitted=False)
        self._seats[key] = _Seat(now_s)
        return Admission(admitted=True, leaves=leaves)

    def asks(self, key: K) -> bool:
        """A whole request came, and its method runs. False where it had to leave meanwhile."""
        seat = self._seats.get(key)
        if seat is not None:
            seat.asking = True
        return seat is not None

    def answered(self, key: K, now_s: float) -> None:
        """The method has run: it takes its answer, or is about to ask again."""
        if (seat := self._seats.get(key)) is not None:
            seat.since_s, seat.asking = now_s, False

    def leave(self, key: K) -> None:
        """A connection has ended."""
        self._seats.pop(key, None)
