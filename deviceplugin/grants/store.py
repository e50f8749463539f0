"""Live allocations: each is recorded durably in the ledger before it counts in the accounts."""

import contextlib
from collections.abc import Callable

from msgspec import structs

from deviceplugin.grants.ledger import Ledger, LedgerError
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.reasons import OfferCode
from mpsd.common.reason import Reason


class AllocationStore:
    """Accounts and ledger as one. State of one owner.

    Args:
        on_ledger: called when it turns out that records can't be written, or can be again.
        wall: Unix seconds.
    """

    def __init__(self, ledger: Ledger, on_ledger: Callable[[], None], wall: Callable[[], float]) -> None:
        self._ledger, self._on_ledger, self._wall = ledger, on_ledger, wall
        self.accounts = Accounts()
        self.ledger_error: Reason | None = None
        """Why nothing can be recorded, and so nothing is offered; None when fine."""
        self._generation = 0
        allocations, problems = ledger.load()
        self.problems: tuple[str, ...] = tuple(problems)
        """A sentence for each record that was not usable."""
        for allocation in allocations:  # the oldest first
            if allocation.container is not None and (older := self.accounts.of_container(allocation.container)):
                self._drop(older)  # a crash came between its record and the end of the older one
            self.accounts.add(allocation)
            self._generation = max(self._generation, allocation.generation)

    def next_generation(self) -> int:
        """A number that no allocation has had: the time in milliseconds, or the next one."""
        self._generation = max(self._generation + 1, int(self._wall() * 1000))
        return self._generation

    def add(self, allocation: Allocation) -> Allocation:
        """Takes in a new allocation, as it is now created. Raises LedgerError; then nothing changed."""
        return self.replace(None, allocation)

    def replace(self, old: Allocation | None, new: Allocation) -> Allocation:
        """Puts a new allocation in the place of an old one with another key, if any. A crash between the two records
        leaves both; the newer one counts. Raises LedgerError; then nothing changed."""
        new = structs.replace(new, created_unix_s=round(self._wall(), 3))
        self._record(new)
        if old is not None:
            self._drop(old)
        self.accounts.add(new)
        return new

    def update(self, allocation: Allocation) -> None:
        """Changes a live allocation of the same key, shares and GPUs. Raises LedgerError; then nothing changed."""
        self._record(allocation)
        self.accounts.replace(allocation)

    def remove(self, key: str) -> None:
        """Forgets a live allocation. Raises LedgerError; then it stays."""
        try:
            self._ledger.remove(key)
        except LedgerError:
            self.probe()  # one record that can't go closes nothing; a disk that takes none does
            raise
        self.accounts.remove(key)

    def probe(self) -> None:
        """Looks whether records can be written."""
        try:
            self._ledger.probe()
        except LedgerError as error:
            self._note(Reason(OfferCode.NO_RECORDS, str(error)))
        else:
            self._note(None)

    def _record(self, allocation: Allocation) -> None:
        """Writes the record. When that fails, nothing more is offered until `probe` finds it mended: each refused pod
        would only be followed by the next."""
        try:
            self._ledger.put(allocation)
        except LedgerError as error:
            self._note(Reason(OfferCode.NO_RECORDS, str(error)))
            raise

    def _drop(self, old: Allocation) -> None:
        self.accounts.remove(old.key)
        with contextlib.suppress(LedgerError):
            self._ledger.remove(old.key)

    def _note(self, error: Reason | None) -> None:
        if error != self.ledger_error:
            self.ledger_error = error
            self._on_ledger()
