"""XID verdicts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.gpu import xid
from mpsd.gpu.news import meaning


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 109])
def test_application_errors_of_the_device_plugin_are_ignored(number: int) -> None:
    assert xid.verdict(number).verdict is xid.Verdict.IGNORE


@pytest.mark.parametrize("number", [46, 48, 62, 64, 74, 79, 95, 119, 120, 140])
def test_hardware_errors_are_critical(number: int) -> None:
    assert xid.verdict(number).verdict is xid.Verdict.CRITICAL


def test_text_names_number_and_meaning() -> None:
    assert xid.verdict(79).text == "XID 79 (GPU has fallen off the bus)"


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(31, "XidOfAProgram", "RESTART_APP"), (79, "CriticalXid", "RESTART_BM"), (9999, "CriticalXid", "nothing new")],
)
def test_what_one_means_is_said_with_its_code(number: int, code: str, text: str) -> None:
    reason = meaning(xid.verdict(number))
    assert reason.code == code
    assert text in reason.message


def test_no_number_has_two_rows() -> None:
    assert len(xid.TABLE) == len(xid._ROWS)


def test_only_actions_that_leave_the_gpu_usable_are_ignored() -> None:
    harmless = {"RESTART_APP", "IGNORE", "WORKFLOW_XID_45", "XID_154"}
    assert {r.xid for r in xid.TABLE.values() if r.verdict is xid.Verdict.IGNORE and r.action not in harmless} == {109}
    assert not [r for r in xid.TABLE.values() if r.verdict is xid.Verdict.CRITICAL and r.action in harmless]


@given(st.integers(min_value=-(2**63), max_value=2**64))
def test_any_number_has_a_verdict_and_unknown_is_critical(number: int) -> None:
    row = xid.verdict(number)
    assert row.xid == number
    assert row.verdict is xid.Verdict.CRITICAL or number in xid.TABLE
