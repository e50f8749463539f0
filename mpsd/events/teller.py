"""How parts of a process tell what happens, whoever makes events of it."""

from collections.abc import Collection, Mapping
from typing import Final, Protocol

from mpsd.common.reason import Reason
from mpsd.events.kinds import EventKind
from mpsd.events.model import Subject

NOBODY: Final = Subject()


class Teller(Protocol):
    """What parts of a process need to tell of what happens. For any thread; takes no time."""

    def tell(
        self,
        kind: EventKind,
        subject: Subject = NOBODY,
        reason: Reason | None = None,
        *,
        count: int = 1,
        total: int = 0,
        pid: int = 0,
        detail: str = "",
        unix_s: float | None = None,
    ) -> None:
        """Something happened, or a state is what it is: of that only a change is an event.

        Args:
            count: so often at once.
            total: so often by now, for a kind that is told so; what it grew by is an event.
            pid: of the process that it is about.
            detail: what is worth knowing besides the reason.
            unix_s: when it was; None: now.
        """
        ...

    def settle(self, rest: EventKind, there: Collection[str]) -> None:
        """These are all things that a state is of now: of any other it was told of before, it is at `rest`."""
        ...


class Counting(Teller, Protocol):
    """A Teller that knows how many events came of it since the process began."""

    @property
    def counts(self) -> Mapping[str, int]:
        """By kind, also those that could not be written."""
        ...

    @property
    def lost(self) -> int:
        """How many could not be written."""
        ...


class _Silent:
    counts: Mapping[str, int] = {}
    lost = 0

    def tell(
        self,
        kind: EventKind,
        subject: Subject = NOBODY,
        reason: Reason | None = None,
        *,
        count: int = 1,
        total: int = 0,
        pid: int = 0,
        detail: str = "",
        unix_s: float | None = None,
    ) -> None: ...
    def settle(self, rest: EventKind, there: Collection[str]) -> None: ...


SILENT: Final[Counting] = _Silent()
"""Tells nobody: for a part by itself."""
