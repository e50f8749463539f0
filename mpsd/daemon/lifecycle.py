"""The life of one control daemon as a pure, total table: (state, event) -> state and effects.

Every pair of state and event is a row of `TABLE` or named in `IGNORED`. The module knows no process, no socket and no
clock: who runs the effects reports what came of them as events, a failed one too, so nothing parks. Every state that
waits has a deadline, and every stop ends: quit, SIGTERM, SIGKILL, and after that FAILED, which says so.

Over 400 lines: the table, its rows and their events are read together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import msgspec

from mpsd.common.pacing import pause_s
from mpsd.common.reason import Reason, message_of
from mpsd.config.model import WedgePolicy
from mpsd.localapi.reasons import DaemonCode
from mpsd.localapi.snapshot import DaemonState as State

Jitter = Callable[[], float]
"""Random source: uniform in [0, 1)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """All times in seconds (monotonic)."""

    start_s: float = 30.0
    """Longer than starting may take by its own timeouts (clear survivors, run the parent, find the daemon)."""
    configure_s: float = 60.0
    """Longer than all queries of one configuration with their own timeouts."""
    retry_s: float = 2.0
    probe_interval_s: float = 10.0
    replace_after: int = 3
    """Failed attempts in a row to query or configure before a daemon counts as wedged."""
    on_wedge: WedgePolicy = WedgePolicy.REPLACE_WHEN_IDLE
    wedged_retry_s: float = 10.0
    quit_s: float = 10.0
    terminate_s: float = 5.0
    kill_s: float = 10.0
    kill_attempts: int = 3
    drain_check_s: float = 10.0
    backoff_min_s: float = 1.0
    backoff_max_s: float = 60.0
    stable_s: float = 300.0
    """Uptime after which earlier failures are forgotten."""
    failed_retry_s: float = 300.0


class Effect(Enum):
    """What the owner of the daemon does next, each answered by an event.

    SPAWN: adopt the daemon that lives, or clear what is left and start one -> Adopted, Spawned, SpawnFailed.
    CONFIGURE: set every limit and read it back -> Configured, ConfigFailed.
    PROBE: query, read limits back -> ProbeOk, ProbeFailed (and Drained, where nobody is left).
    QUIT: ask it to end. TERMINATE: SIGTERM to its group. Both -> Exited when it is gone.
    KILL: SIGKILL to the daemon, its group and surviving servers, and wait -> Gone, KillFailed.
    """

    SPAWN = "spawn"
    CONFIGURE = "configure"
    PROBE = "probe"
    QUIT = "quit"
    TERMINATE = "terminate"
    KILL = "kill"


class Event(msgspec.Struct, frozen=True):
    """Base of everything that can happen to a daemon."""


class Wanted(Event, frozen=True):
    """Its GPU is to be shared."""


class Unwanted(Event, frozen=True):
    """It is to end. `busy`: not before its clients and allocations are gone."""

    busy: bool = False


class Respecified(Event, frozen=True):
    """What it should be configured with changed."""


class Spawned(Event, frozen=True):
    """It runs, not yet configured."""


class SpawnFailed(Event, frozen=True):
    """It could not be started. `permanent`: trying again soon can't help."""

    reason: Reason
    permanent: bool = False


class Adopted(Event, frozen=True):
    """A daemon of ours was found running."""


class Exited(Event, frozen=True):
    """The daemon process is gone; its servers may not be."""

    reason: Reason


class Configured(Event, frozen=True):
    """Every limit was read back. `note` says what is still short of perfect."""

    note: Reason | None = None


class ConfigFailed(Event, frozen=True):
    reason: Reason


class ProbeOk(Event, frozen=True):
    pass


class ProbeFailed(Event, frozen=True):
    reason: Reason


class Drained(Event, frozen=True):
    """No client is left on its GPUs, and no allocation either where it must not come back as it is."""


class Troubled(Event, frozen=True):
    """It said itself that a server of it is lost to its clients."""

    reason: Reason


class Replace(Event, frozen=True):
    """Another is to take its place: when it is drained, or `now`, whoever uses it. No reason: it may stay after all."""

    reason: Reason | None
    now: bool = False


class Gone(Event, frozen=True):
    """Nothing of the daemon lives any more."""


class KillFailed(Event, frozen=True):
    reason: Reason


class DeadlinePassed(Event, frozen=True):
    """The state's deadline is over."""


EVENTS: tuple[type[Event], ...] = (
    Wanted, Unwanted, Respecified, Spawned, SpawnFailed, Adopted, Exited, Configured, ConfigFailed, ProbeOk,
    ProbeFailed, Troubled, Replace, Drained, Gone, KillFailed, DeadlinePassed,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Where a daemon is in its life.

    `deadline_s` is monotonic, None only in ABSENT. `pending`: an answer to CONFIGURE or PROBE is awaited. `strikes`:
    queries failed in a row. `wedged`: so many that `Policy.on_wedge` decides, the last for the `cause`. `replacing`:
    why another is to take its place, None when none is. `failures`: ends in a row without stable uptime between.
    `kills`: KILLs of this stop. `ready_at_s`: when this daemon was first ready, monotonic.
    """

    state: State = State.ABSENT
    wanted: bool = False
    deadline_s: float | None = None
    reason: Reason | None = None
    pending: bool = False
    strikes: int = 0
    wedged: bool = False
    cause: Reason | None = None
    replacing: Reason | None = None
    failures: int = 0
    kills: int = 0
    starts: int = 0
    ready_at_s: float | None = None

    @property
    def restarts(self) -> int:
        """Starts after the first."""
        return max(0, self.starts - 1)


Effects = tuple[Effect, ...]
Step = tuple[Lifecycle, Effects]


def step(life: Lifecycle, event: Event, now_s: float, rng: Jitter, policy: Policy | None = None) -> Step:
    """What follows from an event. An ignored one returns the same state and no effects."""
    row = TABLE[type(event)].get(life.state)
    if row is None:
        return life, ()
    return row(_Turn(life, event, now_s, rng, policy or _DEFAULT))


def backoff_s(failures: int, rng: Jitter, policy: Policy) -> float:
    """Wait before start number `failures` + 1: from the minimum to the maximum, see `pause_s`."""
    return pause_s(failures - 1, policy.backoff_min_s, policy.backoff_max_s, rng)


_DEFAULT = Policy()
_WHAT_NEXT = {
    WedgePolicy.REPORT: "; it is left as it is (mps.onWedge): gpufrac mpsd replace --now",
    WedgePolicy.REPLACE_WHEN_IDLE: (
        "; it is replaced when its clients have ended (gpufrac clients; gpufrac mpsd replace --now)"
    ),
}
"""Of a wedged daemon. One that is replaced at once is never seen wedged."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One event at one state, with what rows need to write their answer."""

    life: Lifecycle
    event: Event
    now_s: float
    rng: Jitter
    policy: Policy

    @property
    def reason(self) -> Reason:
        """Of an event that has one."""
        reason = getattr(self.event, "reason", None)
        assert isinstance(reason, Reason)
        return reason

    def to(self, state: State, wait_s: float | None, *effects: Effect, **changes: object) -> Step:
        deadline_s = None if wait_s is None else self.now_s + wait_s
        values = {"pending": False, "wedged": False, "cause": None, **changes}
        return replace(self.life, state=state, deadline_s=deadline_s, **values), effects  # type: ignore[arg-type]

    def keep(self, **changes: object) -> Step:
        return replace(self.life, **changes), ()  # type: ignore[arg-type]


Row = Callable[[_Turn], Step]


def _start(turn: _Turn) -> Step:
    starts = turn.life.starts + 1
    changes = {"wanted": True, "strikes": 0, "kills": 0, "replacing": None, "ready_at_s": None, "starts": starts}
    return turn.to(State.STARTING, turn.policy.start_s, Effect.SPAWN, **changes)


def _configure(turn: _Turn) -> Step:
    kept = {"wedged": turn.life.wedged, "cause": turn.life.cause}
    return turn.to(State.CONFIGURING, turn.policy.configure_s, Effect.CONFIGURE, pending=True, **kept)


def _drain(turn: _Turn, *effects: Effect, replacing: Reason | None = None) -> Step:
    """Waits for its clients: to end it for good, or to put another in its place."""
    changes = {"wanted": replacing is not None, "replacing": replacing, "reason": _drain_reason(replacing)}
    return turn.to(State.DRAINING, turn.policy.drain_check_s, *effects, strikes=0, **changes)


def _drain_reason(replacing: Reason | None) -> Reason:
    if replacing is None:
        return Reason(DaemonCode.WAITS_FOR_CLIENTS, "waiting for its clients to end")
    return Reason(DaemonCode.REPLACED_WHEN_IDLE, f"it is replaced when its clients have ended: {replacing}")


def _stop(turn: _Turn, reason: Reason | None = None) -> Step:
    """It is no failure of the daemon's, so one that was stable starts anew with none counted."""
    failures = 0 if _was_stable(turn) else turn.life.failures
    return turn.to(State.STOPPING, turn.policy.quit_s, Effect.QUIT, reason=reason, kills=0, failures=failures)


def _kill(turn: _Turn, reason: Reason | None) -> Step:
    return turn.to(State.KILLING, turn.policy.kill_s, Effect.KILL, reason=reason, kills=turn.life.kills + 1)


def _failures(turn: _Turn) -> int:
    """Failures in a row with the one that happens now."""
    return 1 if _was_stable(turn) else turn.life.failures + 1


def _was_stable(turn: _Turn) -> bool:
    ready_at_s = turn.life.ready_at_s
    return ready_at_s is not None and turn.now_s - ready_at_s >= turn.policy.stable_s


def _back_off(turn: _Turn, failures: int, reason: Reason | None, *effects: Effect) -> Step:
    wait_s = backoff_s(failures, turn.rng, turn.policy)
    return turn.to(
        State.BACKOFF, wait_s, *effects, reason=reason, failures=failures, strikes=0, kills=0, ready_at_s=None
    )


def _on_wanted_again(turn: _Turn) -> Step:
    return turn.keep(wanted=True)


def _on_wanted_failed(turn: _Turn) -> Step:
    return turn.keep() if turn.life.wanted else _start(turn)


def _on_wanted_draining(turn: _Turn) -> Step:
    if turn.life.replacing:
        return turn.keep(wanted=True)
    life, effects = _configure(turn)
    return replace(life, wanted=True, reason=None), effects


def _on_unwanted_later(turn: _Turn) -> Step:
    return turn.keep(wanted=False)


def _on_unwanted_running(turn: _Turn) -> Step:
    assert isinstance(turn.event, Unwanted)
    if turn.event.busy:
        return _drain(turn, Effect.PROBE)  # after it who uses it is asked
    life, effects = _stop(turn)
    return replace(life, wanted=False), effects


def _on_unwanted_draining(turn: _Turn) -> Step:
    assert isinstance(turn.event, Unwanted)
    if turn.event.busy:
        return turn.keep(wanted=False, replacing=None, reason=_drain_reason(None))
    life, effects = _stop(turn)
    return replace(life, wanted=False), effects


def _on_unwanted_down(turn: _Turn) -> Step:
    """Nothing should run, but something may have been left behind: ABSENT is only said once that is known gone."""
    life, effects = _kill(turn, turn.life.reason)
    return replace(life, wanted=False, kills=1), effects


def _on_started(turn: _Turn) -> Step:
    if turn.life.wanted:
        return _configure(turn)
    return _drain(turn, Effect.PROBE) if isinstance(turn.event, Adopted) else _stop(turn)


def _on_spawn_failed(turn: _Turn) -> Step:
    assert isinstance(turn.event, SpawnFailed)
    if not turn.life.wanted:
        return _kill(turn, turn.reason)
    if turn.event.permanent:
        return turn.to(State.FAILED, turn.policy.failed_retry_s, reason=turn.reason)
    return _back_off(turn, _failures(turn), turn.reason)


def _on_start_overdue(turn: _Turn) -> Step:
    overdue = Reason(DaemonCode.START_OVERDUE, f"it did not start within {turn.policy.start_s:g} s")
    life, effects = _kill(turn, overdue)
    return replace(life, failures=_failures(turn)), effects


def _on_exited_wanted(turn: _Turn) -> Step:
    if not turn.life.wanted:
        return turn.to(State.STOPPING, turn.policy.kill_s, Effect.KILL)
    return _back_off(turn, _failures(turn), turn.reason, Effect.KILL)


def _on_exited_stopping(turn: _Turn) -> Step:
    """The daemon is gone as asked; its servers must be too."""
    return turn.to(turn.life.state, turn.policy.kill_s, Effect.KILL)


def _on_configured(turn: _Turn) -> Step:
    assert isinstance(turn.event, Configured)
    ready_at_s = turn.now_s if turn.life.ready_at_s is None else turn.life.ready_at_s
    if turn.life.replacing:
        life, effects = _drain(turn, replacing=turn.life.replacing)
        return replace(life, ready_at_s=ready_at_s), effects
    return turn.to(State.READY, turn.policy.probe_interval_s, reason=turn.event.note, strikes=0, ready_at_s=ready_at_s)


def _respecify(turn: _Turn) -> Step:
    """What was read back stays in force until the answer, so the daemon stays ready."""
    return turn.to(State.READY, turn.policy.configure_s, Effect.CONFIGURE, pending=True)


def _strike(turn: _Turn, reason: Reason) -> Step:
    strikes = turn.life.strikes + 1
    if strikes < turn.policy.replace_after:
        return turn.to(State.CONFIGURING, turn.policy.retry_s, reason=reason, strikes=strikes)
    if turn.policy.on_wedge is WedgePolicy.REPLACE:
        return _give_up(turn, f"replaced after {strikes} failed attempts: {reason}")
    text = f"{_attempts(turn, reason)}{_WHAT_NEXT[turn.policy.on_wedge]}"
    return turn.to(
        State.CONFIGURING,
        turn.policy.wedged_retry_s,
        reason=Reason(DaemonCode.WEDGED, text),
        strikes=strikes,
        wedged=True,
        cause=reason,
    )


def _attempts(turn: _Turn, cause: Reason | None) -> str:
    """How many it took, not how many there were since: a count that grows would be news to every reader for ever."""
    return f"{turn.policy.replace_after} attempts in a row failed: {cause}"


def _give_up(turn: _Turn, text: str) -> Step:
    life, effects = _stop(turn, Reason(DaemonCode.REPLACED, text))
    return replace(life, strikes=0, failures=_failures(turn)), effects


def _on_config_failed(turn: _Turn) -> Step:
    return _strike(turn, turn.reason)


def _on_configuring_deadline(turn: _Turn) -> Step:
    if turn.life.pending:
        text = f"it did not answer within {turn.policy.configure_s:g} s"
        return _strike(turn, Reason(DaemonCode.NO_ANSWER, text))
    return _configure(turn)


def _on_probe_ok(turn: _Turn) -> Step:
    return turn.to(State.READY, turn.policy.probe_interval_s, strikes=0)


def _on_probe_failed(turn: _Turn) -> Step:
    """Not ready from now on. Setting the limits again is the way back, and the next probe."""
    life, effects = _configure(turn)
    return replace(life, reason=turn.reason, strikes=turn.life.strikes + 1), effects


def _on_ready_deadline(turn: _Turn) -> Step:
    if turn.life.pending:
        life, effects = _configure(turn)
        reason = Reason(DaemonCode.NO_ANSWER, "a query was not answered")
        return replace(life, reason=reason, strikes=turn.life.strikes + 1), effects
    return turn.to(State.READY, turn.policy.configure_s, Effect.PROBE, pending=True)


def _on_draining_deadline(turn: _Turn) -> Step:
    return turn.to(State.DRAINING, turn.policy.drain_check_s, Effect.PROBE)


def _on_probe_ok_draining(turn: _Turn) -> Step:
    return turn.keep(strikes=0, reason=_drain_reason(turn.life.replacing))


def _on_trouble_draining(turn: _Turn) -> Step:
    """It still waits for its clients, but nobody new may rely on it."""
    strikes = turn.life.strikes + 1
    if turn.life.wanted and strikes >= turn.policy.replace_after and turn.policy.on_wedge is WedgePolicy.REPLACE:
        return _give_up(turn, f"replaced after {strikes} failed attempts: {turn.reason}")
    waits = _drain_reason(turn.life.replacing)
    return turn.keep(strikes=strikes, reason=Reason(waits.code, f"{waits}; {turn.reason}"))


def _on_drained(turn: _Turn) -> Step:
    return _stop(turn, turn.life.replacing)


def _on_drained_configuring(turn: _Turn) -> Step:
    if turn.life.replacing:
        return _stop(turn, turn.life.replacing)
    if turn.life.wedged and turn.policy.on_wedge is WedgePolicy.REPLACE_WHEN_IDLE:
        return _give_up(turn, f"replaced as nobody uses it: wedged, {_attempts(turn, turn.life.cause)}")
    return turn.keep()


def _on_replace(turn: _Turn) -> Step:
    """Only what serves now is drained. One that does not answer is ended as soon as nobody is left."""
    assert isinstance(turn.event, Replace)
    reason = turn.event.reason
    if turn.event.now:
        return _stop(turn, reason)
    if turn.life.state is State.READY and reason is not None:
        return _drain(turn, Effect.PROBE, replacing=reason)
    return turn.keep(replacing=reason)


def _on_replace_draining(turn: _Turn) -> Step:
    assert isinstance(turn.event, Replace)
    reason = turn.event.reason
    if turn.event.now:
        return _stop(turn, reason)
    if not turn.life.wanted:
        return turn.keep()
    if reason is None:
        life, effects = _configure(turn)
        return replace(life, replacing=None, reason=None), effects
    return turn.keep(replacing=reason, reason=_drain_reason(reason))


def _on_replace_down(turn: _Turn) -> Step:
    """Nothing to replace: the next start comes now."""
    assert isinstance(turn.event, Replace)
    return _start(turn) if turn.life.wanted and turn.event.reason is not None else turn.keep()


def _on_stopping_deadline(turn: _Turn) -> Step:
    return turn.to(State.KILLING, turn.policy.terminate_s, Effect.TERMINATE, reason=turn.life.reason, kills=0)


def _on_killing_deadline(turn: _Turn) -> Step:
    if turn.life.kills >= turn.policy.kill_attempts:
        return _cannot_kill(turn, turn.life.reason)
    return _kill(turn, turn.life.reason)


def _on_kill_failed(turn: _Turn) -> Step:
    if turn.life.kills >= turn.policy.kill_attempts:
        return _cannot_kill(turn, turn.reason)
    return turn.to(State.KILLING, turn.policy.retry_s, reason=turn.reason)


def _cannot_kill(turn: _Turn, cause: Reason | None) -> Step:
    reason = cause
    if cause is None or cause.code != DaemonCode.CANNOT_BE_KILLED:
        reason = Reason(DaemonCode.CANNOT_BE_KILLED, f"it can't be killed: {message_of(cause)}")
    return turn.to(State.FAILED, turn.policy.failed_retry_s, reason=reason, kills=0)


def _on_gone(turn: _Turn) -> Step:
    """A stop has ended."""
    if not turn.life.wanted:
        return turn.to(State.ABSENT, None, reason=None, strikes=0, failures=0, kills=0, ready_at_s=None)
    if turn.life.failures:
        return _back_off(turn, turn.life.failures, turn.life.reason)
    return _start(turn)


def _on_adopted_absent(turn: _Turn) -> Step:
    return _configure(turn) if turn.life.wanted else _drain(turn, Effect.PROBE)


def _on_failed_deadline(turn: _Turn) -> Step:
    return _start(turn) if turn.life.wanted else _kill(turn, turn.life.reason)


TABLE: Mapping[type[Event], Mapping[State, Row]] = {
    Wanted: {
        State.ABSENT: _start,
        State.STARTING: _on_wanted_again,
        State.DRAINING: _on_wanted_draining,
        State.STOPPING: _on_wanted_again,
        State.KILLING: _on_wanted_again,
        State.FAILED: _on_wanted_failed,
    },
    Unwanted: {
        State.STARTING: _on_unwanted_later,
        State.CONFIGURING: _on_unwanted_running,
        State.READY: _on_unwanted_running,
        State.DRAINING: _on_unwanted_draining,
        State.STOPPING: _on_unwanted_later,
        State.KILLING: _on_unwanted_later,
        State.BACKOFF: _on_unwanted_down,
        State.FAILED: _on_unwanted_down,
    },
    Respecified: {State.CONFIGURING: _configure, State.READY: _respecify, State.FAILED: _on_failed_deadline},
    Spawned: {State.STARTING: _on_started},
    SpawnFailed: {State.STARTING: _on_spawn_failed},
    Adopted: {State.ABSENT: _on_adopted_absent, State.STARTING: _on_started},
    Exited: {
        State.STARTING: _on_exited_wanted,
        State.CONFIGURING: _on_exited_wanted,
        State.READY: _on_exited_wanted,
        State.DRAINING: _on_exited_wanted,
        State.STOPPING: _on_exited_stopping,
        State.KILLING: _on_exited_stopping,
    },
    Configured: {State.CONFIGURING: _on_configured, State.READY: _on_configured},
    ConfigFailed: {State.CONFIGURING: _on_config_failed, State.READY: _on_config_failed},
    ProbeOk: {State.READY: _on_probe_ok, State.DRAINING: _on_probe_ok_draining},
    ProbeFailed: {State.READY: _on_probe_failed, State.DRAINING: _on_trouble_draining},
    Troubled: {State.READY: _on_probe_failed, State.DRAINING: _on_trouble_draining},
    Replace: {
        State.CONFIGURING: _on_replace,
        State.READY: _on_replace,
        State.DRAINING: _on_replace_draining,
        State.BACKOFF: _on_replace_down,
        State.FAILED: _on_replace_down,
    },
    Drained: {State.DRAINING: _on_drained, State.CONFIGURING: _on_drained_configuring},
    Gone: {State.STOPPING: _on_gone, State.KILLING: _on_gone, State.FAILED: _on_gone},
    KillFailed: {State.KILLING: _on_kill_failed},
    DeadlinePassed: {
        State.STARTING: _on_start_overdue,
        State.CONFIGURING: _on_configuring_deadline,
        State.READY: _on_ready_deadline,
        State.DRAINING: _on_draining_deadline,
        State.STOPPING: _on_stopping_deadline,
        State.KILLING: _on_killing_deadline,
        State.BACKOFF: _start,
        State.FAILED: _on_failed_deadline,
    },
}

_DOWN = (State.ABSENT, State.BACKOFF, State.FAILED)
_ENDING = (State.STOPPING, State.KILLING)

IGNORED: Mapping[type[Event], tuple[State, ...]] = {
    Wanted: (State.CONFIGURING, State.READY, State.BACKOFF),  # wanted already
    Unwanted: (State.ABSENT,),
    Respecified: (State.ABSENT, State.STARTING, State.DRAINING, *_ENDING, State.BACKOFF),  # configured later anyway
    # Late answers of effects: a KILL or SPAWN that runs after them has the last word.
    Spawned: (State.ABSENT, State.CONFIGURING, State.READY, State.DRAINING, *_ENDING, State.BACKOFF, State.FAILED),
    SpawnFailed: (State.ABSENT, State.CONFIGURING, State.READY, State.DRAINING, *_ENDING, State.BACKOFF, State.FAILED),
    Adopted: (State.CONFIGURING, State.READY, State.DRAINING, *_ENDING, State.BACKOFF, State.FAILED),
    Exited: _DOWN,
    Configured: (State.STARTING, State.DRAINING, *_ENDING, *_DOWN),
    ConfigFailed: (State.STARTING, State.DRAINING, *_ENDING, *_DOWN),
    ProbeOk: (State.STARTING, State.CONFIGURING, *_ENDING, *_DOWN),
    ProbeFailed: (State.STARTING, State.CONFIGURING, *_ENDING, *_DOWN),
    Troubled: (State.STARTING, State.CONFIGURING, *_ENDING, *_DOWN),  # CONFIGURE asks its servers itself
    Replace: (State.ABSENT, State.STARTING, *_ENDING),  # another comes anyway
    Drained: (State.STARTING, State.READY, *_ENDING, *_DOWN),
    Gone: (State.STARTING, State.CONFIGURING, State.READY, State.DRAINING, State.ABSENT, State.BACKOFF),
    # In STOPPING the deadline follows and leads on to KILLING.
    KillFailed: (State.STARTING, State.CONFIGURING, State.READY, State.DRAINING, State.STOPPING, *_DOWN),
    DeadlinePassed: (State.ABSENT,),
}
