"""Why something is as it is: `{code, message}`, as Kubernetes' conditions have it, and None where all is well.

A code is for programs: an enum per subject, in CamelCase, stable. A message is for people, and no code reads one.
"""

from enum import StrEnum
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
