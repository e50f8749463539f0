"""Reasons on the wire: a message and a code, each in a field of its own."""

import msgspec
import pytest

from mpsd.common.reason import OlderCode, Reason, code_of, joined, message_of, reason_of, reasons_of
from mpsd.gpu.reasons import GpuCode, InventoryCode
from mpsd.localapi.reasons import DaemonCode, HardLimitCode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, HardLimits, Snapshot

EXITED = Reason(DaemonCode.EXITED, "the MPS control daemon (pid 7) exited")


@pytest.mark.parametrize("reason", [None, EXITED, Reason(GpuCode.XID, "XID 79")])
def test_a_reason_survives_its_two_fields(reason: Reason | None) -> None:
    assert reason_of(message_of(reason), code_of(reason)) == reason


def test_a_message_without_a_code_is_of_an_older_process() -> None:
    assert reason_of("something", "") == Reason(OlderCode.UNKNOWN, "something")
    assert reasons_of(("a", "b"), (GpuCode.XID,)) == (Reason(GpuCode.XID, "a"), Reason(OlderCode.UNKNOWN, "b"))


def test_several_reasons_are_one_with_the_code_of_the_first() -> None:
    no_gpu = Reason(InventoryCode.NO_GPU, "no GPU")
    assert joined([None, no_gpu, EXITED]) == Reason(InventoryCode.NO_GPU, f"no GPU; {EXITED}")
    assert joined([None]) is None


def test_a_status_gives_the_reason_that_it_was_made_of() -> None:
    made = DaemonStatus(state=DaemonState.BACKOFF, reason=message_of(EXITED), reason_code=code_of(EXITED))
    read = msgspec.json.decode(msgspec.json.encode(made), type=DaemonStatus)
    assert read.why == EXITED
    assert read.why_unheld is None


def test_an_older_plugin_reads_the_message_where_it_always_was() -> None:
    sent = msgspec.to_builtins(
        DaemonStatus(state=DaemonState.BACKOFF, reason=message_of(EXITED), reason_code=code_of(EXITED))
    )
    assert (sent["reason"], sent["reason_code"]) == (EXITED.message, "Exited")


def test_an_older_mpsd_sends_no_codes() -> None:
    sent = b"""{"instance": "a", "generation": 1, "reason": "no driver", "warnings": ["late", "low"],
        "hard_limits": {"backend": "", "missing": ["driver 580.1 has no memory limits"]}}"""
    read = msgspec.json.decode(sent, type=Snapshot)
    assert read.why == Reason(OlderCode.UNKNOWN, "no driver")
    assert read.why_config_refused is None
    assert [str(reason) for reason in read.shortfalls] == ["late", "low"]
    assert [reason.code for reason in read.hard_limits.why_not] == [OlderCode.UNKNOWN]
    assert read.hard_limits.probed


def test_hard_limits_that_were_not_probed_are_told_from_all_others() -> None:
    sent = b'{"instance": "a", "generation": 1, "hard_limits": {"missing": ["it is not probed yet"]}}'
    for limits in (HardLimits(), msgspec.json.decode(sent, type=Snapshot).hard_limits):
        assert not limits.probed
        assert [reason.code for reason in limits.why_not] == [HardLimitCode.NOT_PROBED]
    assert HardLimits(missing=()).probed
