"""The table of a daemon's life: total, and each row does what its name says."""

from itertools import product

import pytest

from mpsd.common.reason import message_of
from mpsd.config.model import WedgePolicy
from mpsd.daemon.lifecycle import (
    EVENTS,
    IGNORED,
    TABLE,
    Adopted,
    ConfigFailed,
    Configured,
    DeadlinePassed,
    Drained,
    Effect,
    Event,
    Exited,
    Gone,
    KillFailed,
    Lifecycle,
    Policy,
    ProbeFailed,
    ProbeOk,
    Replace,
    Respecified,
    Spawned,
    SpawnFailed,
    Troubled,
    Unwanted,
    Wanted,
    backoff_s,
    step,
)
from mpsd.localapi.snapshot import DaemonState
from tests.reasons import BECAUSE, because

POLICY = Policy()
REASON = BECAUSE
NEWER = because("newer")
LIVES_ON = because("pid 7 lives on")
PAIRS = list(product(EVENTS, DaemonState))
EXAMPLES: dict[type[Event], Event] = {
    **{kind: kind(REASON) for kind in (SpawnFailed, Exited, ConfigFailed, ProbeFailed, Troubled, Replace, KillFailed)},
    **{kind: kind() for kind in (Wanted, Unwanted, Respecified, Spawned, Adopted, Configured, ProbeOk, Drained, Gone)},
    DeadlinePassed: DeadlinePassed(),
}


def go(
    life: Lifecycle, *events: Event, now_s: float = 100.0, policy: Policy = POLICY
) -> tuple[Lifecycle, tuple[Effect, ...]]:
    """Feeds events at one time; the last one's effects."""
    effects: tuple[Effect, ...] = ()
    for event in events:
        life, effects = step(life, event, now_s, lambda: 0.0, policy)
    return life, effects


def at(state: DaemonState, **fields: object) -> Lifecycle:
    wanted = state is not DaemonState.ABSENT and state is not DaemonState.DRAINING
    deadline = None if state is DaemonState.ABSENT else 50.0
    return Lifecycle(**{"state": state, "wanted": wanted, "deadline_s": deadline, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "state"), PAIRS)
def test_each_pair_is_a_row_or_ignored_by_name(kind: type[Event], state: DaemonState) -> None:
    assert (state in TABLE[kind]) != (state in IGNORED[kind])


@pytest.mark.parametrize(("kind", "state"), PAIRS)
@pytest.mark.parametrize("wanted", [False, True])
def test_every_step_leaves_a_deadline_and_an_ignored_one_changes_nothing(
    kind: type[Event], state: DaemonState, wanted: bool
) -> None:
    before = at(state, wanted=wanted)
    after, effects = go(before, EXAMPLES[kind])
    if state in IGNORED[kind]:
        assert (after, effects) == (before, ())
    assert (after.deadline_s is None) == (after.state is DaemonState.ABSENT)


def test_examples_cover_all_events() -> None:
    assert set(EXAMPLES) == set(EVENTS) == set(TABLE) == set(IGNORED)


def test_the_way_to_ready() -> None:
    life, effects = go(Lifecycle(), Wanted())
    assert (life.state, life.deadline_s, effects) == (DaemonState.STARTING, 130.0, (Effect.SPAWN,))
    life, effects = go(life, Spawned())
    assert (life.state, effects) == (DaemonState.CONFIGURING, (Effect.CONFIGURE,))
    life, effects = go(life, Configured())
    assert (life.state, life.deadline_s, life.restarts, effects) == (DaemonState.READY, 110.0, 0, ())


def test_ready_is_probed_and_stays_ready_meanwhile() -> None:
    life, effects = go(at(DaemonState.READY), DeadlinePassed())
    assert (life.state, life.pending, effects) == (DaemonState.READY, True, (Effect.PROBE,))
    life, effects = go(life, ProbeOk())
    assert (life.state, life.pending, life.deadline_s, effects) == (DaemonState.READY, False, 110.0, ())


@pytest.mark.parametrize("events", [(ProbeFailed(REASON),), (DeadlinePassed(), DeadlinePassed())])
def test_a_failed_or_unanswered_probe_ends_ready_and_sets_the_limits_again(events: tuple[Event, ...]) -> None:
    life, effects = go(at(DaemonState.READY), *events)
    assert (life.state, life.strikes, effects) == (DaemonState.CONFIGURING, 1, (Effect.CONFIGURE,))
    assert life.reason


FAILS_TO_ANSWER = (ProbeFailed(REASON), ConfigFailed(REASON), DeadlinePassed(), ConfigFailed(REASON))


@pytest.mark.parametrize("trouble", [ProbeFailed(REASON), ConfigFailed(REASON), Troubled(REASON)])
def test_trouble_makes_it_not_ready_and_asks_again(trouble: Event) -> None:
    life, _ = go(at(DaemonState.READY), trouble)
    assert (life.state, life.strikes, life.wedged) == (DaemonState.CONFIGURING, 1, False)
    assert life.reason == REASON


def test_a_wedged_daemon_is_replaced_at_once_where_the_policy_says_so() -> None:
    policy = Policy(on_wedge=WedgePolicy.REPLACE)
    life, effects = go(at(DaemonState.READY), *FAILS_TO_ANSWER, policy=policy)
    assert (life.state, life.wanted, effects) == (DaemonState.STOPPING, True, (Effect.QUIT,))
    assert message_of(life.reason) == f"replaced after 3 failed attempts: {REASON}"
    life, effects = go(life, Exited(REASON), Gone(), policy=policy)
    assert (life.state, life.failures) == (DaemonState.BACKOFF, 1)


@pytest.mark.parametrize(
    ("on_wedge", "next_"),
    [
        (WedgePolicy.REPORT, "it is left as it is (mps.onWedge): gpufrac mpsd replace --now"),
        (
            WedgePolicy.REPLACE_WHEN_IDLE,
            "it is replaced when its clients have ended (gpufrac clients; gpufrac mpsd replace --now)",
        ),
    ],
)
def test_a_wedged_daemon_is_asked_on_and_comes_back_when_it_answers(on_wedge: WedgePolicy, next_: str) -> None:
    policy = Policy(on_wedge=on_wedge)
    life, effects = go(at(DaemonState.READY), *FAILS_TO_ANSWER, policy=policy)
    assert (life.state, life.wedged, effects) == (DaemonState.CONFIGURING, True, ())
    assert message_of(life.reason) == f"3 attempts in a row failed: {REASON}; {next_}"
    life, effects = go(life, DeadlinePassed(), policy=policy)
    assert (life.wedged, effects) == (True, (Effect.CONFIGURE,))
    again, _ = go(life, ConfigFailed(REASON), policy=policy)
    assert (again.state, again.wedged, again.reason) == (life.state, True, life.reason), "one failure more is no news"
    life, _ = go(life, Configured(), policy=policy)
    assert (life.state, life.wedged, life.strikes) == (DaemonState.READY, False, 0)


@pytest.mark.parametrize(
    ("on_wedge", "state"),
    [(WedgePolicy.REPORT, DaemonState.CONFIGURING), (WedgePolicy.REPLACE_WHEN_IDLE, DaemonState.STOPPING)],
)
def test_without_clients_a_wedged_daemon_is_replaced_where_the_policy_says_so(
    on_wedge: WedgePolicy, state: DaemonState
) -> None:
    life, _ = go(at(DaemonState.READY), *FAILS_TO_ANSWER, Drained(), policy=Policy(on_wedge=on_wedge))
    assert (life.state, life.wanted) == (state, True)
    if state is DaemonState.STOPPING:
        assert message_of(life.reason) == f"replaced as nobody uses it: wedged, 3 attempts in a row failed: {REASON}"


def test_a_daemon_that_is_only_configuring_is_not_ended_for_having_no_clients() -> None:
    assert go(at(DaemonState.CONFIGURING), Drained())[0] == at(DaemonState.CONFIGURING)


@pytest.mark.parametrize("state", [DaemonState.CONFIGURING, DaemonState.READY, DaemonState.DRAINING])
def test_replaced_now_stops_and_starts_again(state: DaemonState) -> None:
    life, effects = go(at(state, wanted=True), Replace(REASON, now=True))
    assert (life.state, effects) == (DaemonState.STOPPING, (Effect.QUIT,))
    life, effects = go(life, Exited(REASON), Gone())
    assert (life.state, life.failures, effects) == (DaemonState.STARTING, 0, (Effect.SPAWN,))


def test_replaced_gracefully_it_serves_until_it_is_drained() -> None:
    life, effects = go(at(DaemonState.READY), Replace(NEWER))
    assert (life.state, life.wanted, life.replacing, effects) == (DaemonState.DRAINING, True, NEWER, (Effect.PROBE,))
    life, effects = go(life, Drained())
    assert (life.state, life.reason, effects) == (DaemonState.STOPPING, NEWER, (Effect.QUIT,))
    life, effects = go(life, Exited(REASON), Gone())
    assert (life.state, life.replacing, effects) == (DaemonState.STARTING, None, (Effect.SPAWN,))


def test_one_that_is_to_be_replaced_is_made_ready_first_and_then_drained() -> None:
    life, _ = go(at(DaemonState.CONFIGURING), Replace(NEWER))
    assert life.state is DaemonState.CONFIGURING
    life, _ = go(life, Configured())
    assert (life.state, life.replacing) == (DaemonState.DRAINING, NEWER)


@pytest.mark.parametrize("trouble", [ProbeFailed(REASON), Troubled(REASON)])
def test_trouble_while_draining_is_said_and_over_with_an_answer(trouble: Event) -> None:
    life, _ = go(at(DaemonState.READY), Replace(NEWER), trouble)
    assert (life.state, life.strikes) == (DaemonState.DRAINING, 1)
    assert message_of(life.reason).endswith(REASON.message)
    life, _ = go(life, ProbeOk())
    assert (life.strikes, message_of(life.reason).endswith("newer")) == (0, True)


def test_no_longer_wanted_ends_a_replacement() -> None:
    life, _ = go(at(DaemonState.READY), Replace(NEWER), Unwanted(busy=True))
    assert (life.state, life.wanted, life.replacing) == (DaemonState.DRAINING, False, None)
    assert go(life, Drained(), Exited(REASON), Gone())[0].state is DaemonState.ABSENT


@pytest.mark.parametrize("state", [DaemonState.BACKOFF, DaemonState.FAILED])
def test_a_replacement_does_not_wait_out_a_pause(state: DaemonState) -> None:
    assert go(at(state), Replace(REASON))[1] == (Effect.SPAWN,)


def test_an_answer_in_time_forgives() -> None:
    life, _ = go(at(DaemonState.READY), ProbeFailed(REASON), ConfigFailed(REASON), DeadlinePassed(), Configured())
    assert (life.state, life.strikes, life.reason) == (DaemonState.READY, 0, None)


def test_a_crash_is_waited_out_longer_each_time_until_it_was_stable() -> None:
    life = at(DaemonState.READY, ready_at_s=90.0)
    waits = []
    for _ in range(3):
        life, effects = go(life, Exited(REASON))
        assert (life.state, life.reason, effects) == (DaemonState.BACKOFF, REASON, (Effect.KILL,))
        assert life.deadline_s is not None
        waits.append(life.deadline_s - 100.0)
        life, effects = go(life, Gone(), DeadlinePassed())
        assert (life.state, effects) == (DaemonState.STARTING, (Effect.SPAWN,))
        life, _ = go(life, Spawned(), Configured())
    assert waits == [1.0, 2.0, 4.0]
    life, _ = go(life, Exited(REASON), now_s=100.0 + POLICY.stable_s)
    assert life.failures == 1


def test_a_start_that_fails_is_tried_again_and_a_hopeless_one_rarely() -> None:
    life, effects = go(at(DaemonState.STARTING), SpawnFailed(REASON))
    assert (life.state, life.reason, effects) == (DaemonState.BACKOFF, REASON, ())
    life, effects = go(at(DaemonState.STARTING), SpawnFailed(REASON, permanent=True))
    assert (life.state, life.deadline_s) == (DaemonState.FAILED, 100.0 + POLICY.failed_retry_s)
    life, effects = go(life, DeadlinePassed())
    assert (life.state, effects) == (DaemonState.STARTING, (Effect.SPAWN,))


def test_an_overdue_start_is_killed_and_counts_as_a_failure() -> None:
    life, effects = go(at(DaemonState.STARTING, failures=2), DeadlinePassed())
    assert (life.state, effects) == (DaemonState.KILLING, (Effect.KILL,))
    life, _ = go(life, Gone())
    assert (life.state, life.failures) == (DaemonState.BACKOFF, 3)
    assert message_of(life.reason) == "it did not start within 30 s"


def test_a_stop_asks_then_insists() -> None:
    life, effects = go(at(DaemonState.READY), Unwanted())
    assert (life.state, effects) == (DaemonState.STOPPING, (Effect.QUIT,))
    life, effects = go(life, DeadlinePassed())
    assert (life.state, effects) == (DaemonState.KILLING, (Effect.TERMINATE,))
    for _ in range(POLICY.kill_attempts):
        life, effects = go(life, DeadlinePassed())
        assert (life.state, effects) == (DaemonState.KILLING, (Effect.KILL,))
    life, effects = go(life, DeadlinePassed())
    assert (life.state, message_of(life.reason)) == (DaemonState.FAILED, "it can't be killed: ")


def test_a_stop_is_over_only_when_its_servers_are_gone_too() -> None:
    life, _ = go(at(DaemonState.READY), Unwanted())
    life, effects = go(life, Exited(REASON))
    assert (life.state, effects) == (DaemonState.STOPPING, (Effect.KILL,))
    life, effects = go(life, Gone())
    assert (life, effects) == (Lifecycle(starts=life.starts), ())


def test_wanted_again_while_stopping_starts_at_once() -> None:
    life, effects = go(at(DaemonState.READY), Unwanted(), Wanted(), Exited(REASON), Gone())
    assert (life.state, effects) == (DaemonState.STARTING, (Effect.SPAWN,))


def test_unwanted_while_starting_ends_what_comes_up() -> None:
    life, effects = go(at(DaemonState.STARTING), Unwanted())
    assert (life.state, effects) == (DaemonState.STARTING, ())
    assert go(life, Spawned())[1] == (Effect.QUIT,)
    assert go(life, Adopted())[0].state is DaemonState.DRAINING
    assert go(life, SpawnFailed(REASON))[1] == (Effect.KILL,)


def test_a_busy_daemon_drains_first() -> None:
    life, effects = go(at(DaemonState.READY), Unwanted(busy=True))
    assert (life.state, life.wanted, effects) == (DaemonState.DRAINING, False, (Effect.PROBE,))
    assert go(life, DeadlinePassed())[1] == (Effect.PROBE,)
    assert go(life, Drained())[1] == (Effect.QUIT,)
    assert go(life, Unwanted())[1] == (Effect.QUIT,)
    life, effects = go(life, Wanted())
    assert (life.state, life.wanted, life.reason, effects) == (DaemonState.CONFIGURING, True, None, (Effect.CONFIGURE,))


def test_an_adopted_daemon_has_its_limits_set_again() -> None:
    assert go(at(DaemonState.STARTING), Adopted())[1] == (Effect.CONFIGURE,)
    life, effects = go(Lifecycle(), Adopted())
    assert (life.state, life.wanted, effects) == (DaemonState.DRAINING, False, (Effect.PROBE,))


def test_a_new_limit_is_configured_without_a_restart() -> None:
    life, effects = go(at(DaemonState.READY), Respecified())
    assert (life.state, life.pending, effects) == (DaemonState.READY, True, (Effect.CONFIGURE,))
    assert go(life, Configured())[0].state is DaemonState.READY
    assert go(life, ConfigFailed(REASON))[0].state is DaemonState.CONFIGURING


def test_what_was_left_behind_is_ended_before_absent() -> None:
    for state in (DaemonState.BACKOFF, DaemonState.FAILED):
        life, effects = go(at(state), Unwanted())
        assert (life.state, effects) == (DaemonState.KILLING, (Effect.KILL,))
        assert go(life, Gone())[0].state is DaemonState.ABSENT


def test_a_kill_that_fails_is_repeated_and_then_said() -> None:
    life = at(DaemonState.KILLING, kills=1)
    life, effects = go(life, KillFailed(LIVES_ON))
    assert (life.state, effects) == (DaemonState.KILLING, ())
    life, _ = go(life, DeadlinePassed(), KillFailed(LIVES_ON), DeadlinePassed())
    life, _ = go(life, KillFailed(LIVES_ON))
    assert (life.state, message_of(life.reason)) == (DaemonState.FAILED, "it can't be killed: pid 7 lives on")


def test_backoff_doubles_to_its_maximum_with_jitter() -> None:
    assert [backoff_s(n, lambda: 0.0, POLICY) for n in (1, 2, 3, 7, 8, 1000)] == [1.0, 2.0, 4.0, 60.0, 60.0, 60.0]
    assert backoff_s(3, lambda: 0.999, POLICY) == pytest.approx(2.0, abs=0.01)


def test_a_daemon_that_is_replaced_goes_on_draining_when_it_is_wanted_again_unless_it_may_stay() -> None:
    draining = at(DaemonState.DRAINING, wanted=False, replacing=NEWER)
    life, effects = go(draining, Wanted())
    assert (life.state, life.wanted, life.replacing, effects) == (DaemonState.DRAINING, True, NEWER, ())
    life, effects = go(life, Replace(None))
    assert (life.state, life.replacing, effects) == (DaemonState.CONFIGURING, None, (Effect.CONFIGURE,))


def test_who_is_to_be_replaced_ends_when_nobody_is_left_whatever_it_was_doing() -> None:
    life, effects = go(at(DaemonState.CONFIGURING, replacing=NEWER), Drained())
    assert (life.state, effects) == (DaemonState.STOPPING, (Effect.QUIT,))


def test_a_draining_daemon_that_stops_answering_is_replaced_where_the_policy_says_so() -> None:
    draining = at(DaemonState.DRAINING, wanted=True, replacing=NEWER)
    failed = [ProbeFailed(REASON)] * POLICY.replace_after
    assert go(draining, *failed)[0].state is DaemonState.DRAINING
    assert go(draining, *failed, policy=Policy(on_wedge=WedgePolicy.REPLACE))[0].state is DaemonState.STOPPING


def test_configuring_begins_anew_at_its_deadline_where_nothing_is_under_way() -> None:
    life, effects = go(at(DaemonState.CONFIGURING, pending=False), DeadlinePassed())
    assert (life.state, life.strikes, effects) == (DaemonState.CONFIGURING, 0, (Effect.CONFIGURE,))


def test_configuring_that_is_not_answered_by_its_deadline_counts_as_a_failed_attempt() -> None:
    life, effects = go(at(DaemonState.CONFIGURING, pending=True), DeadlinePassed())
    assert (life.state, life.strikes, effects) == (DaemonState.CONFIGURING, 1, ())
    assert "did not answer within" in str(life.reason)
    assert go(life, DeadlinePassed())[1] == (Effect.CONFIGURE,)
