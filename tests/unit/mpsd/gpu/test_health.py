"""The health of one GPU over time (pure)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.common.reason import Reason, message_of
from mpsd.gpu import health
from mpsd.gpu.health import Policy, Reading, Track
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo
from mpsd.gpu.reasons import GpuCode

READING = Reading(GpuInfo(uuid="GPU-a", index=0, name="Fake", memory_total_bytes=1), ComputeMode.DEFAULT, ())
POLICY = Policy(recover_probes=2, failing_probes=2, quiet_s=60.0)


def because(message: str) -> Reason:
    return Reason(GpuCode.PROBE_FAILED, message)


def shown(track: Track) -> tuple[GpuHealth, str]:
    assert track.state is not None
    return track.state.health, message_of(track.state.reason)


def after(track: Track, *steps: str, now_s: float = 0.0) -> Track:
    for step in steps:
        match step:
            case "good":
                track = health.answered(track, READING, now_s, POLICY)
            case "fail":
                track = health.failed(track, because("cannot read"), POLICY)
            case "lost":
                track = health.lost(track, because("gone"))
            case "hang":
                track = health.silenced(track, because("silent"))
            case "xid":
                track = health.xid_seen(track, because("XID 79"), now_s)
    return track


GOOD = after(Track(), "good")


def test_nothing_is_shown_before_the_first_reading() -> None:
    assert Track().state is None
    assert after(Track(), "lost").state is None


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["good"], GpuHealth.OK),
        (["fail"], GpuHealth.OK),
        (["fail", "good", "fail"], GpuHealth.OK),
        (["fail", "fail"], GpuHealth.SICK),
        (["fail", "fail", "good"], GpuHealth.SICK),
        (["fail", "fail", "good", "good"], GpuHealth.OK),
        (["lost"], GpuHealth.LOST),
        (["lost", "good"], GpuHealth.LOST),
        (["lost", "good", "lost", "good"], GpuHealth.LOST),
        (["lost", "good", "fail", "good"], GpuHealth.LOST),
        (["lost", "good", "good"], GpuHealth.OK),
        (["hang"], GpuHealth.UNRESPONSIVE),
        (["hang", "good"], GpuHealth.OK),
        (["hang", "fail"], GpuHealth.OK),
        (["lost", "hang"], GpuHealth.LOST),
        (["xid", "hang"], GpuHealth.UNRESPONSIVE),
        (["xid", "hang", "good"], GpuHealth.SICK),
        (["lost", "xid"], GpuHealth.LOST),
        (["xid", "lost"], GpuHealth.LOST),
    ],
)
def test_steps(steps: list[str], expected: GpuHealth) -> None:
    assert shown(after(GOOD, *steps))[0] is expected


def test_sick_by_xid_needs_good_probes_and_quiet() -> None:
    sick = after(GOOD, "xid", now_s=100.0)
    assert shown(after(sick, "good", "good", "good", now_s=159.9)) == (GpuHealth.SICK, "XID 79")
    assert shown(after(sick, "good", now_s=160.0))[0] is GpuHealth.SICK
    assert shown(after(sick, "good", "good", now_s=160.0)) == (GpuHealth.OK, "")
    again = after(sick, "good", "xid", now_s=150.0)
    assert shown(after(again, "good", "good", now_s=170.0))[0] is GpuHealth.SICK


def test_first_reason_of_a_lost_gpu_stays() -> None:
    track = health.lost(health.lost(GOOD, because("NVML 15")), because("no longer listed"))
    assert shown(track) == (GpuHealth.LOST, "NVML 15")
    assert shown(health.lost(after(GOOD, "xid"), because("no longer listed"))) == (GpuHealth.LOST, "no longer listed")


def test_a_recovered_gpu_forgets_everything() -> None:
    track = after(GOOD, "xid", "lost", now_s=0.0)
    assert after(track, "good", "good", now_s=60.0) == GOOD


def test_last_known_facts_stay_through_loss() -> None:
    newer = replace(READING, compute_mode=ComputeMode.PROHIBITED)
    state = health.lost(health.answered(GOOD, newer, 0.0, POLICY), because("gone")).state
    assert state is not None
    assert state.compute_mode is ComputeMode.PROHIBITED
    assert state.info == READING.info


STEPS = st.lists(st.sampled_from(["good", "fail", "lost", "hang", "xid"]), max_size=30)


@given(STEPS)
def test_enough_good_probes_always_heal(steps: list[str]) -> None:
    track = after(GOOD, *steps, now_s=0.0)
    assert shown(after(track, "good", "good", now_s=60.0)) == (GpuHealth.OK, "")


@given(STEPS)
def test_trouble_always_has_a_reason_and_ok_none(steps: list[str]) -> None:
    state, reason = shown(after(GOOD, *steps))
    assert (state is GpuHealth.OK) == (reason == "")


@given(st.floats(min_value=5.0, max_value=1e6), st.floats(min_value=0.0, max_value=5.0))
def test_hang_text_never_exceeds_the_time_and_changes_rarely(hung_s: float, more_s: float) -> None:
    text = health.hang_text("processes", hung_s, 5.0)
    shown_s = float(text.split()[-2])
    assert 5.0 <= shown_s <= hung_s * 1.001
    assert hung_s < 2.001 * shown_s
    assert text.startswith("driver call processes() ")
    later_s = float(health.hang_text("processes", hung_s + more_s, 5.0).split()[-2])
    assert later_s in (shown_s, 2 * shown_s) or shown_s > 1e5
