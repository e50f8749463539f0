"""Random lives of a daemon: nothing parks, every stop ends, and no daemon is left behind by a state that says so."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mpsd.config.model import WedgePolicy
from mpsd.daemon import lifecycle as life
from mpsd.daemon.lifecycle import Effect, Lifecycle, Policy
from mpsd.localapi.snapshot import DaemonState as State
from tests.reasons import BECAUSE

REASON = BECAUSE


class Daemon(RuleBasedStateMachine):
    """The world of one daemon: effects are queued as in its lane and end in any of their outcomes, or not in time."""

    @initialize(on_wedge=st.sampled_from(WedgePolicy))
    def begin(self, on_wedge: WedgePolicy) -> None:
        self.policy = Policy(on_wedge=on_wedge)
        self.life = Lifecycle()
        self.now_s = 0.0
        self.alive = False  # the daemon
        self.servers = False  # what survives it
        self.queue: list[Effect] = []

    def feed(self, event: life.Event, jitter: float = 0.5) -> None:
        before = self.life
        self.life, effects = life.step(before, event, self.now_s, lambda: jitter, self.policy)
        if before.state in life.IGNORED[type(event)]:
            assert (self.life, effects) == (before, ())
        self.queue += effects

    @rule()
    def wanted(self) -> None:
        self.feed(life.Wanted())

    @rule(busy=st.booleans())
    def unwanted(self, busy: bool) -> None:
        if self.life.wanted or self.life.state is State.DRAINING:
            self.feed(life.Unwanted(busy))

    @rule()
    def respecified(self) -> None:
        self.feed(life.Respecified())

    @rule()
    def drained(self) -> None:
        self.feed(life.Drained())

    @rule(now=st.booleans())
    def replaced(self, now: bool) -> None:
        self.feed(life.Replace(REASON, now))

    @rule()
    def troubled(self) -> None:
        self.feed(life.Troubled(REASON))

    @precondition(lambda self: self.alive)
    @rule(leaves_servers=st.booleans())
    def crashes(self, leaves_servers: bool) -> None:
        self.alive, self.servers = False, leaves_servers
        self.feed(life.Exited(REASON))

    @precondition(lambda self: self.life.deadline_s is not None)
    @rule(jitter=st.floats(0, 0.999))
    def time_passes(self, jitter: float) -> None:
        assert self.life.deadline_s is not None
        self.now_s = max(self.now_s, self.life.deadline_s)
        self.feed(life.DeadlinePassed(), jitter)

    @precondition(lambda self: self.queue)
    @rule(good=st.booleans(), permanent=st.booleans())
    def effect_ends(self, good: bool, permanent: bool) -> None:
        self.run(self.queue.pop(0), good, permanent)

    def run(self, effect: Effect, good: bool, permanent: bool = False) -> None:
        match effect:
            case Effect.SPAWN if self.alive:
                self.feed(life.Adopted())
            case Effect.SPAWN if good:
                self.alive, self.servers = True, False
                self.feed(life.Spawned())
            case Effect.SPAWN:
                self.feed(life.SpawnFailed(REASON, permanent))
            case Effect.CONFIGURE:
                self.feed(life.Configured() if good and self.alive else life.ConfigFailed(REASON))
            case Effect.PROBE:
                self.feed(life.ProbeOk() if good and self.alive else life.ProbeFailed(REASON))
            case Effect.QUIT | Effect.TERMINATE:
                if good and self.alive:
                    self.alive = False
                    self.feed(life.Exited(REASON))
            case Effect.KILL if good:
                was, self.alive, self.servers = self.alive, False, False
                self.feed(life.Gone())
                if was:
                    self.feed(life.Exited(REASON))
            case Effect.KILL:
                self.feed(life.KillFailed(REASON))

    @invariant()
    def waiting_has_a_deadline(self) -> None:
        assert (self.life.deadline_s is None) == (self.life.state is State.ABSENT)

    @invariant()
    def absent_means_nothing_is_wanted(self) -> None:
        assert not (self.life.state is State.ABSENT and self.life.wanted)
        assert (self.life.state is not State.DRAINING) or self.life.wanted == (self.life.replacing is not None)

    @invariant()
    def only_policy_or_an_operator_ends_a_daemon_that_answers_nothing(self) -> None:
        if self.life.wedged:
            assert self.life.state is State.CONFIGURING
            assert self.policy.on_wedge is not WedgePolicy.REPLACE

    @invariant()
    def a_stop_ends(self) -> None:
        """Whatever the world does from here on: when all effects fail, time alone leads to an end."""
        current = replace(self.life, wanted=False)
        if current.state not in (State.STOPPING, State.KILLING):
            return
        for _ in range(2 + self.policy.kill_attempts):
            current, _ = life.step(current, life.DeadlinePassed(), self.now_s, lambda: 0.0, self.policy)
            if current.state is State.FAILED:
                return
        raise AssertionError(f"still {current}")

    @invariant()
    def a_good_world_leads_to_what_is_wanted(self) -> None:
        """From every state, with effects that succeed, the daemon becomes ready or goes, and nothing is left."""
        saved = (self.life, self.now_s, self.alive, self.servers, list(self.queue))
        for _ in range(40):
            settled = State.READY if self.life.wanted else State.ABSENT
            if self.life.state is settled and not self.queue:
                break
            if self.queue:
                self.run(self.queue.pop(0), good=True)
            elif self.life.state is State.DRAINING:
                self.feed(life.Drained())
            else:
                self.time_passes(0.0)
        assert self.life.state is (State.READY if self.life.wanted else State.ABSENT)
        assert self.alive == self.life.wanted
        assert not self.servers
        self.life, self.now_s, self.alive, self.servers, self.queue = saved


TestDaemon = Daemon.TestCase
TestDaemon.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
