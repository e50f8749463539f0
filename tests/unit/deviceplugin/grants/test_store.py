"""Accounts and ledger as one: what can't be recorded does not count, and is not tried again and again unseen."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.grants.ledger import Ledger, LedgerError
from deviceplugin.grants.store import AllocationStore
from mpsd.common.reason import message_of
from tests.builders import allocation, uuid

A, B = (allocation("a", f"{uuid(0)}::{n}") for n in range(2))


@pytest.fixture
def ledger(short_tmp: Path) -> Iterator[Ledger]:
    made = Ledger(str(short_tmp / "ledger"))
    yield made
    made.close()


def opened(ledger: Ledger, told: list[str], now_s: float = 1.0) -> AllocationStore:
    store = AllocationStore(ledger, lambda: told.append(message_of(store.ledger_error)), lambda: now_s)
    return store


def fails(*_: object) -> None:
    raise LedgerError("disk full")


def test_what_is_added_is_there_after_a_restart(ledger: Ledger) -> None:
    store = opened(ledger, [])
    store.add(A)
    store.add(B)
    store.update(structs.replace(B, limit_bytes=1))
    store.remove(A.key)
    (again,) = opened(ledger, []).accounts
    assert (again.key, again.limit_bytes) == (B.key, 1)


def test_nothing_counts_that_could_not_be_recorded(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    store = opened(ledger, told)
    store.add(A)
    with monkeypatch.context() as full:
        full.setattr(ledger, "put", fails)
        for change in (lambda: store.add(B), lambda: store.replace(A, B), lambda: store.update(A)):
            with pytest.raises(LedgerError):
                change()
    assert [a.key for a in store.accounts] == [A.key]
    assert told == ["disk full"], "told once"
    store.probe()
    assert told == ["disk full", ""]


def test_a_record_that_cannot_go_closes_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    store = opened(ledger, told)
    store.add(A)
    monkeypatch.setattr(ledger, "remove", fails)
    with pytest.raises(LedgerError):
        store.remove(A.key)
    assert A.key in store.accounts
    assert (store.ledger_error, told) == (None, [])


def test_generations_never_repeat_though_the_clock_stands_or_goes_back(ledger: Ledger) -> None:
    store = opened(ledger, [], now_s=5.0)
    first, second = store.next_generation(), store.next_generation()
    assert (first, second) == (5000, 5001)
    store.add(allocation("a", f"{uuid(0)}::0", generation=second))
    assert opened(ledger, [], now_s=1.0).next_generation() == second + 1
