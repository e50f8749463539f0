"""What parts of a process tell, in place of a recorder."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from mpsd.common.reason import Reason, code_of
from mpsd.events.kinds import EventKind
from mpsd.events.model import Subject
from mpsd.events.teller import NOBODY


class Word(NamedTuple):
    """Of one `tell`."""

    kind: str
    subject: Subject
    reason: Reason | None
    times: int
    total: int
    pid: int
    detail: str
    unix_s: float | None


class Heard:
    """A Teller that remembers each word; what nobody told yet is no news here."""

    counts: Mapping[str, int] = {"Xid": 3}
    lost = 2

    def __init__(self) -> None:
        self.words: list[Word] = []
        self.settled: list[tuple[str, frozenset[str]]] = []

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
        self.words.append(Word(str(kind), subject, reason, count, total, pid, detail, unix_s))

    def settle(self, rest: EventKind, there: Collection[str]) -> None:
        self.settled.append((str(rest), frozenset(there)))

    def take(self) -> list[tuple[str, str]]:
        """Kind and code of what was told since the last time."""
        words, self.words = self.words, []
        return [(word.kind, code_of(word.reason)) for word in words]
