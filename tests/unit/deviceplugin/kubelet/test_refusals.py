"""Refused Allocates: counted each time, a warning where they are news."""

import logging

import pytest

from deviceplugin.kubelet.refusals import AGAIN_S, Refusals
from deviceplugin.plan.allocation import Refusal
from deviceplugin.plan.reasons import OfferCode

FULL = Refusal(OfferCode.ALL_TAKEN, "all shares are taken")
TAKEN = Refusal(OfferCode.MEMORY_TAKEN, "the memory is taken")


def test_a_flood_of_the_same_refusal_is_one_warning_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    refusals = Refusals(lambda: now_s[0])
    for resource, refusal in (("a", FULL), ("a", FULL), ("b", FULL), ("a", TAKEN), ("a", FULL)):
        refusals.note(resource, refusal)
    assert refusals.counts == {"a": {"AllTaken": 3, "MemoryTaken": 1}, "b": {"AllTaken": 1}}
    assert warnings(caplog) == 4
    now_s[0] = AGAIN_S
    refusals.note("a", FULL)
    assert warnings(caplog) == 5, "what lasts is said again"


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.levelno == logging.WARNING for record in caplog.records)
