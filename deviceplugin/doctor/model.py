"""A prerequisite and how it is: one row of `gpufrac doctor` (pure)."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from deviceplugin.doctor.reasons import DoctorCode
from mpsd.common.reason import Reason


class State(StrEnum):
    """UNKNOWN is an answer of its own: it could not be found out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Row(msgspec.Struct, frozen=True):
    """`found` says what is there; `reason` and `remedy` are None and empty where all is well."""

    check: str
    state: State
    found: str = ""
    reason: Reason | None = None
    remedy: str = ""


def well(check: str, found: str = "") -> Row:
    """A row that is as it should be."""
    return Row(check, State.OK, found)


def row(check: str, state: State, code: DoctorCode, message: str) -> Row:
    """One that is not, with the advice of its code."""
    return Row(check, state, "", Reason(code, message), code.advice)


def of_reason(check: str, state: State, reason: Reason) -> Row:
    """What somebody else found: its message says what to do, its code is explained."""
    return Row(check, state, "", reason, f"gpufrac explain {reason.code}")


def exit_code(rows: Iterable[Row], *, down: bool) -> int:
    """0: nothing is worse than a warning. 1: something fails. 3: both processes are down."""
    if down:
        return 3
    return 1 if any(one.state == State.FAIL for one in rows) else 0
