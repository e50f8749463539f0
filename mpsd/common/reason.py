"""Why something is as it is: `{code, message}`, as Kubernetes' conditions have it, and None where all is well.

A code is for programs: an enum per subject, in CamelCase, stable. A message is for people, and no code reads one.
"""

from collections.abc import Iterable
from enum import StrEnum
from itertools import zip_longest
from typing import Self

import msgspec


class Code(StrEnum):
    """The codes of one subject. Each is written with what it means and what to do about it, which is all that
    docs/reasons.md is generated from:

        class DaemonCode(Code):
            CRASHED = "Crashed", "The daemon's process ended by itself.", "Nothing: it is started again after a pause."
    """

    meaning: str
    advice: str

    def __new__(cls, code: str, meaning: str, advice: str) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.advice = advice
        return member


class Reason(msgspec.Struct, frozen=True):
    """`code` is a `Code` of its subject; `message` says what was asked, what is missing and what to do."""

    code: str
    message: str

    def __str__(self) -> str:
        return self.message

    def reworded(self, message: str) -> "Reason":
        """The same reason in other words, such as with the name of what it is of."""
        return Reason(self.code, message)


class OlderCode(Code):
    """Stands for the code that is missing beside a message."""

    UNKNOWN = (
        "Unknown",
        "A process of an earlier version gave a message without a code.",
        "Read the message; the code comes once both processes are of this version.",
    )


# On a wire a reason is two fields, so that who knows no codes reads the message as ever: `reason` and `reason_code`,
# both empty where all is well.


def message_of(reason: Reason | None) -> str:
    """The message as a field of its own; empty where all is well."""
    return "" if reason is None else reason.message


def code_of(reason: Reason | None) -> str:
    """The code as a field of its own; empty where all is well."""
    return "" if reason is None else str(reason.code)


def reason_of(message: str, code: str) -> Reason | None:
    """The reason that two fields have; `Unknown` is the code of one that came without."""
    return Reason(code or OlderCode.UNKNOWN, message) if message else None


def reasons_of(messages: Iterable[str], codes: Iterable[str]) -> tuple[Reason, ...]:
    """The same of fields that hold several, in the same order."""
    pairs = zip_longest(messages, codes, fillvalue="")
    return tuple(reason for message, code in pairs if (reason := reason_of(message, code)) is not None)


def joined(reasons: Iterable[Reason | None]) -> Reason | None:
    """Several as one, with the code of the first; None where there is none."""
    found = [reason for reason in reasons if reason is not None]
    return Reason(found[0].code, "; ".join(reason.message for reason in found)) if found else None
