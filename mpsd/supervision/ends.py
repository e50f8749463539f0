"""The table of ends: for every way in which daemons end by will, what becomes of them and what is restored (pure).

What ends by failure is in the lifecycle's table. Each end here is a row of `ENDS`, and nobody else decides: the keeper
of a daemon feeds its lifecycle by the row, the loop restores compute modes by it. docs/lifecycle.md shows it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


class End(Enum):
    """Why. Where two of everything are under way, the first rules."""

    CLEANED_UP = "an operator has all of mpsd cleaned up"
    STOPPING = "mpsd stops"
    BEGINS_ANEW = "the driver was replaced, and mpsd begins anew to load its library"
    UNPLANNED = "the config no longer shares its GPUs, or they are of another domain by now"
    REPLACED = "another is to take its place when nobody uses it: an operator asked, or it is of an earlier config"
    REPLACED_NOW = "another is to take its place, whoever uses it: an operator asked"


class Fate(Enum):
    """What becomes of a daemon."""

    ENDS = "ends now"
    DRAINS = "ends when nobody uses it"
    STAYS = "is left running"


class Then(Enum):
    """What comes after it."""

    NOTHING = "none, or that of the new domain"
    ANOTHER = "another, at once"
    NEXT_MPSD = "what the next mpsd finds or starts"


class Modes(Enum):
    """The compute mode of its GPUs."""

    AS_BOUND = "as their allocations need it"
    AS_FOUND = "as it was found, once the daemon is gone"


@dataclass(frozen=True, slots=True)
class Row:
    """What an end does to a daemon that is in use and to one that is not.

    `look_s`: how long a fresh look at who uses a GPU is waited for, before what was seen last decides. `most_s`: how
    long is waited in all; None: as long as it takes, or its caller does. `clears`: whether its directories go.
    """

    in_use: Fate
    idle: Fate
    then: Then
    modes: Modes
    look_s: float = 0.0
    most_s: float | None = None
    clears: bool = False

    def fate(self, *, busy: bool) -> Fate:
        return self.in_use if busy else self.idle


ENDS: Mapping[End, Row] = {
    End.CLEANED_UP: Row(Fate.ENDS, Fate.ENDS, Then.NEXT_MPSD, Modes.AS_FOUND, clears=True),
    # 40 s: longer than a stop takes by the lifecycle's deadlines, so what is cut off then hangs in the kernel.
    End.STOPPING: Row(Fate.STAYS, Fate.ENDS, Then.NEXT_MPSD, Modes.AS_FOUND, look_s=5.0, most_s=40.0),
    End.BEGINS_ANEW: Row(Fate.STAYS, Fate.STAYS, Then.NEXT_MPSD, Modes.AS_BOUND),
    End.UNPLANNED: Row(Fate.DRAINS, Fate.ENDS, Then.NOTHING, Modes.AS_BOUND),
    End.REPLACED: Row(Fate.DRAINS, Fate.DRAINS, Then.ANOTHER, Modes.AS_BOUND),
    End.REPLACED_NOW: Row(Fate.ENDS, Fate.ENDS, Then.ANOTHER, Modes.AS_BOUND),
}


def ruling(ends: Collection[End]) -> End | None:
    """Which of several ends decides; None where none is under way."""
    return next((end for end in End if end in ends), None)
