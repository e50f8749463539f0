"""The keeper of one daemon by itself: no thread, the lane and the inbox are worked off by hand."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from mpsd.common.errors import ConfigError, TransientError
from mpsd.common.lanes import Job, Lane
from mpsd.common.reason import Reason
from mpsd.config.model import GIB, MpsConfig
from mpsd.daemon import lifecycle as life
from mpsd.daemon.host import ProtocolChoice
from mpsd.daemon.lifecycle import Policy
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.plan import DaemonSpec, DomainPlan
from mpsd.localapi.snapshot import DaemonState
from mpsd.shares.domains import Domain
from mpsd.supervision.daemon import DaemonKeeper, Outside
from mpsd.supervision.ends import ENDS, End, Fate
from mpsd.supervision.inforce import InForce
from tests.reasons import BECAUSE
from tests.unit.mpsd.supervision.fakes import FakeHost

NAME = "GPU-1"
SPEC = DaemonSpec(NAME, (NAME,), 2, 8 * GIB, daemon_dirs(MpsConfig(), NAME), ())
PLAN = DomainPlan(Domain(NAME, (NAME,)), SPEC)


class HandLane(Lane):
    """Runs nothing by itself."""

    def __init__(self) -> None:
        super().__init__("by-hand")
        self.jobs: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        self.jobs.append(job)


class Rig:
    """A keeper with all that it reaches. `told`: what it said to the supervisor, in order."""

    def __init__(self) -> None:
        self.host, self.lane = FakeHost(), HandLane()
        self.inbox: deque[Callable[[], None]] = deque()
        self.told: list[str] = []
        self.choice = ProtocolChoice(2)
        outside = Outside(
            host=self.host,
            protocol=lambda: self.choice,
            post=self.inbox.append,
            policy=Policy(),
            rng=lambda: 0.0,
            starting=lambda spec: self.told.append(f"starting {spec.name}"),
            started=lambda _: self.told.append("started"),
            judged=lambda _: self.told.append("judged"),
            ended=lambda _: self.told.append("ended"),
            tried=lambda _: self.told.append("tried"),
        )
        self.keeper = DaemonKeeper(SPEC, outside, self.lane)
        self.keeper.take(PLAN)

    def effect(self) -> None:
        """Runs the next effect, and hands its answer in."""
        self.lane.jobs.popleft()()
        self.inbox.popleft()()

    def ready(self) -> DaemonKeeper:
        """Until it serves."""
        self.keeper.feed(life.Wanted())
        self.effect()
        self.effect()
        assert self.keeper.state is DaemonState.READY
        self.told.clear()
        self.host.calls.clear()
        return self.keeper


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_it_starts_configures_and_is_ready(rig: Rig) -> None:
    rig.keeper.feed(life.Wanted())
    assert not rig.told
    rig.effect()
    assert (rig.keeper.state.value, rig.told) == ("configuring", ["starting GPU-1", "started", "judged"])
    assert rig.keeper.in_force == InForce()
    rig.effect()
    assert (rig.keeper.state.value, rig.told[3:]) == ("ready", ["tried"])
    assert rig.keeper.in_force.limit_bytes == 8 * GIB
    assert rig.host.verbs(NAME) == ["spawn", "find", "configure"]
    assert not rig.lane.jobs


def test_an_effect_carries_what_held_when_it_was_begun(rig: Rig) -> None:
    """Whatever changes while it waits in the lane."""
    rig.keeper.feed(life.Wanted())
    rig.choice = ProtocolChoice(2, objection=BECAUSE)
    rig.effect()
    assert rig.keeper.state is DaemonState.CONFIGURING


def test_where_none_can_be_started_one_that_runs_is_adopted(rig: Rig) -> None:
    rig.choice = ProtocolChoice(2, objection=BECAUSE)
    rig.host.adoptable[NAME] = rig.host.identity(SPEC)
    rig.keeper.feed(life.Wanted())
    rig.effect()
    assert rig.keeper.identity == rig.host.adoptable[NAME]
    assert rig.host.verbs(NAME) == ["find"]


@pytest.mark.parametrize(
    ("unsure", "state"), [(None, DaemonState.FAILED), (BECAUSE, DaemonState.BACKOFF)], ids=["sure", "unsure"]
)
def test_where_none_can_be_started_and_none_runs_it_is_tried_again_by_how_sure_that_is(
    rig: Rig, unsure: Reason | None, state: DaemonState
) -> None:
    rig.choice = ProtocolChoice(2, objection=BECAUSE, unsure=unsure)
    rig.keeper.feed(life.Wanted())
    rig.effect()
    assert rig.keeper.state is state


@pytest.mark.parametrize(
    ("verb", "error", "state"),
    [
        ("spawn", TransientError("busy"), DaemonState.BACKOFF),
        ("spawn", ConfigError("wrong"), DaemonState.FAILED),
        ("configure", TransientError("no answer"), DaemonState.CONFIGURING),
    ],
)
def test_an_effect_that_fails_is_an_event(rig: Rig, verb: str, error: ConfigError, state: DaemonState) -> None:
    rig.host.fail[verb] = error
    rig.keeper.feed(life.Wanted())
    rig.effect()
    if verb == "configure":
        rig.effect()
    assert rig.keeper.state is state
    assert rig.keeper.life.reason is not None
    assert str(error) in rig.keeper.life.reason.message


def test_a_crash_is_an_end_with_a_pause_and_nothing_of_it_stays_in_force(rig: Rig) -> None:
    keeper = rig.ready()
    identity = keeper.identity
    assert identity is not None
    keeper.on_exit(structs.replace(identity, pid=identity.pid + 1))
    assert keeper.state is DaemonState.READY  # that was another process
    keeper.on_exit(identity)
    assert (keeper.state, keeper.identity, rig.told) == (DaemonState.BACKOFF, None, ["ended"])
    rig.effect()
    assert rig.host.verbs(NAME) == ["kill"]  # its servers may have survived
    status = keeper.status((), tuple)
    assert status is not None
    assert (status.pid, status.pinned_limit_bytes) == (None, None)


def test_an_answer_to_what_is_not_wanted_any_more_counts_for_nothing(rig: Rig) -> None:
    keeper = rig.ready()
    more, most = (replace(SPEC, pinned_limit_bytes=size * GIB) for size in (16, 32))
    keeper.take(replace(PLAN, spec=more))
    rig.lane.jobs.popleft()()
    keeper.take(replace(PLAN, spec=most))
    rig.inbox.popleft()()
    assert keeper.in_force.limit_bytes == 8 * GIB
    rig.effect()
    assert keeper.in_force.limit_bytes == 32 * GIB


def test_one_of_an_earlier_run_is_not_absent_before_it_was_looked_for(rig: Rig) -> None:
    rig.keeper.find()
    assert not rig.keeper.is_absent
    rig.effect()
    assert rig.keeper.is_absent


def test_one_that_is_found_and_not_wanted_drains(rig: Rig) -> None:
    rig.host.adoptable[NAME] = rig.host.identity(SPEC)
    rig.keeper.find()
    rig.effect()
    assert rig.keeper.state is DaemonState.DRAINING
    assert rig.keeper.awaits_drain


@pytest.mark.parametrize("end", End)
@pytest.mark.parametrize("busy", [True, False], ids=["in use", "idle"])
def test_it_ends_as_the_row_of_its_end_says(rig: Rig, end: End, busy: bool) -> None:
    keeper = rig.ready()
    fate = keeper.end(end, busy=busy, reason=BECAUSE)
    states = {Fate.ENDS: DaemonState.STOPPING, Fate.DRAINS: DaemonState.DRAINING, Fate.STAYS: DaemonState.READY}
    assert fate is ENDS[end].fate(busy=busy)
    assert keeper.state is states[fate]
