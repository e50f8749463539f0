"""The table of ends is total, and a daemon ends as its row says."""

import itertools

import pytest

from mpsd.supervision.ends import ENDS, End, Fate, Modes, Then, ruling


def test_each_end_has_a_row_and_no_row_is_of_nothing() -> None:
    assert set(ENDS) == set(End)


@pytest.mark.parametrize("end", End)
def test_nobody_who_uses_a_gpu_loses_it_where_an_idle_one_does_not(end: End) -> None:
    severity = [Fate.STAYS, Fate.DRAINS, Fate.ENDS]
    row = ENDS[end]
    assert severity.index(row.fate(busy=True)) <= severity.index(row.fate(busy=False))


def test_only_what_is_ended_by_hand_ends_under_its_users() -> None:
    assert {end for end, row in ENDS.items() if row.in_use is Fate.ENDS} == {End.CLEANED_UP, End.REPLACED_NOW}


def test_what_another_follows_keeps_its_compute_mode() -> None:
    assert all(row.modes is Modes.AS_BOUND for row in ENDS.values() if row.then is Then.ANOTHER)


def test_a_cleanup_rules_over_a_stop_in_whatever_order_they_came() -> None:
    assert ruling(()) is None
    for both in itertools.permutations((End.STOPPING, End.CLEANED_UP)):
        assert ruling(both) is End.CLEANED_UP
