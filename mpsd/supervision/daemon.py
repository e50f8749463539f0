"""Keeps one control daemon: feeds its lifecycle, runs the effects in a lane, and knows what can be relied on."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mpsd.common.errors import ConfigError, GpufracError
from mpsd.common.lanes import Lane, Post
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason, code_of, message_of
from mpsd.daemon import adopt
from mpsd.daemon import lifecycle as life
from mpsd.daemon.adopt import DaemonIdentity, ProcessIdentity
from mpsd.daemon.controller import Configured
from mpsd.daemon.host import DaemonHost, ForeignDaemonError, ProtocolChoice, Running
from mpsd.daemon.lifecycle import Effect, Event, Jitter, Lifecycle, Policy
from mpsd.daemon.plan import DaemonSpec, DomainPlan
from mpsd.localapi.reasons import DaemonCode
from mpsd.localapi.snapshot import Attached, DaemonState, DaemonStatus, DesiredAllocation
from mpsd.supervision.effects import Configure, Kill, Probe, Quit, Spawn, Terminate, Work
from mpsd.supervision.ends import ENDS, End, Fate, Then
from mpsd.supervision.inforce import InForce, read_back
from mpsd.supervision.serverhold import ServerHold

log = get_logger("mpsd")

FIND_RETRY_S = 5.0
_TROUBLE = (DaemonState.BACKOFF, DaemonState.FAILED, DaemonState.KILLING)


@dataclass(frozen=True, slots=True)
class Outside:
    """What a keeper reaches beyond itself. `protocol`: what daemons to be started speak, or why none can be.
    `starting`, from the lane: a daemon is about to run, what its logs hold by now is another's. `started`: it runs, its
    end is to be watched. `judged`: is it the one to have? `ended`: it runs no more. `tried`: it was asked for
    something, whatever came of it."""

    host: DaemonHost
    protocol: Callable[[], ProtocolChoice]
    post: Post
    policy: Policy
    rng: Jitter
    starting: Callable[[DaemonSpec], None]
    started: Callable[["DaemonKeeper"], None]
    judged: Callable[["DaemonKeeper"], None]
    ended: Callable[["DaemonKeeper"], None]
    tried: Callable[["DaemonKeeper"], None]


class DaemonKeeper:
    """Of one domain's daemon. Every method is for the supervisor's thread; the host is called in the lane."""

    def __init__(self, spec: DaemonSpec, outside: Outside, lane: Lane) -> None:
        self._outside, self.lane = outside, lane
        self.plan: DomainPlan | None = None
        """None: no domain of this name is left; what runs is to end."""
        self.spec = spec
        self.life = Lifecycle()
        self.since_s = time.monotonic()
        """Since when it waits for what it waits for: a count of clients from before says nothing."""
        self._since_unix_s = time.time()
        self.identity: DaemonIdentity | None = None
        self.servers: tuple[ProcessIdentity, ...] = ()
        self.finding = False
        """Whether a daemon of an earlier run is looked for: until then it is not known to be absent."""
        self.find_retry_s: float | None = None
        self.outdated: Reason | None = None
        """Why the daemon that runs is not the one wanted, though it works."""
        self.server_trouble: Reason | None = None
        """What its logs say of its servers; while they do it is not ready."""
        self.in_force = InForce()
        self.hold = ServerHold(lane, outside.host, outside.post)
        self.fate: Fate | None = None
        """When mpsd stops: None until decided, then whether it ends or stays."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def state(self) -> DaemonState:
        return self.life.state

    @property
    def is_absent(self) -> bool:
        """Whether nothing of it is on its GPUs."""
        return self.state is DaemonState.ABSENT and not self.finding

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is on its GPUs, or ending it failed."""
        return self.is_absent or self.state is DaemonState.FAILED

    @property
    def answers(self) -> bool:
        """Whether it is fit to be asked."""
        return self.state is DaemonState.READY or (self.state is DaemonState.DRAINING and not self.life.strikes)

    @property
    def awaits_drain(self) -> bool:
        """Whether something happens once nobody uses its GPUs."""
        return self.state is DaemonState.DRAINING or (
            self.state is DaemonState.CONFIGURING and (self.life.wedged or self.life.replacing is not None)
        )

    # --- what it is told -----------------------------------------------------------------------------------------

    def take(self, plan: DomainPlan | None) -> None:
        """The plan of its domain now."""
        self.plan = plan
        if self.state is DaemonState.ABSENT:
            self.spec = self._wanted_spec()
        elif self.life.wanted and self._wanted_spec() != self.spec:
            self.feed(life.Respecified())

    def _wanted_spec(self) -> DaemonSpec:
        """What it should have by now, in terms of the daemon that runs: that may be of an earlier config."""
        spec = self.spec if self.plan is None else self.plan.spec
        gpus = self.identity.gpus if self.identity is not None else ()
        return replace(spec, gpus=gpus) if gpus else spec

    def judge(self, protocol: int) -> None:
        """Whether the daemon that runs is the one to have, where daemons speak this protocol: else another is to take
        its place as soon as nobody needs it any more."""
        reason = None
        if self.identity is not None and self.plan is not None:
            reason = adopt.outdated(self.identity, replace(self.plan.spec, protocol=protocol))
        before, self.outdated = self.outdated, reason
        if reason is not None and self.life.replacing != reason:
            self.end(End.REPLACED, reason=reason)
        elif before is not None and reason is None:
            self.feed(life.Replace(None))

    def end(self, end: End, *, busy: bool = True, reason: Reason | None = None) -> Fate:
        """Has it end as the table of ends says. `busy`: whether somebody uses it. `reason`: why it is replaced."""
        row = ENDS[end]
        fate = row.fate(busy=busy)
        if fate is not Fate.STAYS:
            replaced = row.then is Then.ANOTHER
            now = fate is Fate.ENDS
            self.feed(life.Replace(reason, now=now) if replaced else life.Unwanted(busy=not now))
        return fate

    def find(self) -> None:
        """Looks for a daemon of an earlier run that nothing wants now: it has to be known to end."""
        self.finding = True
        self.lane.submit(partial(self._find, self.spec))

    def _find(self, spec: DaemonSpec) -> None:
        running: Running | None = None
        retry_s = None
        try:
            self._outside.starting(spec)
            running = self._outside.host.find(spec)
        except ForeignDaemonError as error:
            log.warning("a recorded MPS daemon is not ours any more", daemon=self.name, error=str(error))
        except Exception as error:
            if not isinstance(error, GpufracError):
                log.exception("looking for an MPS daemon failed in an unforeseen way", daemon=self.name)
            log.warning("cannot judge a recorded MPS daemon", daemon=self.name, error=str(error))
            retry_s = time.monotonic() + FIND_RETRY_S
        self._outside.post(partial(self._on_found, running, retry_s))

    def _on_found(self, running: Running | None, retry_s: float | None) -> None:
        """Not to have found out is no proof that none is there."""
        self.find_retry_s = retry_s
        self.finding = retry_s is not None
        if running is not None:
            self._on_running(running)

    def on_exit(self, identity: DaemonIdentity) -> None:
        """A process ended that was watched."""
        if self.identity == identity:
            self.identity, self.outdated = None, None
            text = f"the MPS control daemon (pid {identity.pid}) exited"
            self.feed(life.Exited(Reason(DaemonCode.EXITED, text)))
            self._outside.ended(self)

    def note_servers(self, trouble: Reason | None) -> None:
        """What its logs say of its servers now; None when that is over."""
        if trouble == self.server_trouble:
            return
        self.server_trouble = trouble
        if trouble is not None:
            log.warning("MPS server in trouble", daemon=self.name, reason=trouble.message)
            self.feed(life.Troubled(trouble))

    def hold_server(self, *, closed: bool) -> None:
        """Has an MPS server held where its GPUs are, by their compute mode, `closed` to all others while there is one.
        That needs a daemon that answers."""
        wanted = closed and self.spec.protocol == 2 and self.answers
        self.hold.reconcile(self.spec, self.identity if wanted else None)

    def try_again(self, reason: Reason) -> None:
        """What kept it from being started may be over."""
        if self.state in (DaemonState.BACKOFF, DaemonState.FAILED):
            self.feed(life.Replace(reason, now=True))

    def pass_deadline(self, now_s: float) -> None:
        """Tells the lifecycle when its deadline is over."""
        if self.find_retry_s is not None and now_s >= self.find_retry_s:
            self.find_retry_s = None
            self.find()
        if self.life.deadline_s is not None and now_s >= self.life.deadline_s and self.fate is not Fate.STAYS:
            self.feed(life.DeadlinePassed())

    def feed(self, event: Event) -> None:
        """One event of its life: its effects are begun."""
        before = self.life
        policy = self._outside.policy
        self.life, effects = life.step(before, event, time.monotonic(), self._outside.rng, policy)
        now = self.life
        if (now.state, now.wedged, now.replacing) != (before.state, before.wedged, before.replacing):
            self.since_s = time.monotonic()
        if now.state is not before.state or (now.wedged and not before.wedged):
            self._since_unix_s = time.time() if now.state is not before.state else self._since_unix_s
            said = log.warning if now.state in _TROUBLE or now.wedged else log.info
            said(
                "daemon " + ("wedged" if now.wedged else now.state.value),
                daemon=self.name,
                was=before.state.value,
                on=type(event).__name__,
                pid=self.identity.pid if self.identity else None,
                reason=message_of(now.reason),
            )
        for effect in effects:
            self.lane.submit(partial(self._perform, self._work(effect)))

    def _work(self, effect: Effect) -> Work:
        """The effect with what it needs as it is now."""
        ask_servers = bool(self.servers) or bool(self.life.strikes)
        match effect:
            case Effect.SPAWN:
                self.spec = self._wanted_spec()
                return Spawn(self.spec, self._outside.protocol())
            case Effect.CONFIGURE:
                self.spec = self._wanted_spec()
                return Configure(self.spec, ask_servers)
            case Effect.PROBE:
                return Probe(self.in_force.of(self.spec), ask_servers)
            case Effect.QUIT:
                return Quit(self.spec, self._outside.policy.quit_s)
            case Effect.TERMINATE:
                return Terminate(self.identity)
            case Effect.KILL:
                return Kill(self.spec, self.identity, self.servers)

    def remove_directories(self, *, homes: bool) -> None:
        """Removes what an ended daemon leaves on disk, and with `homes` what containers mount of it."""
        self.lane.submit(partial(self._outside.host.remove, self.spec, homes=homes))

    def _perform(self, work: Work) -> None:
        """Runs one effect, in the lane, and posts what came of it."""
        host = self._outside.host
        answer: Callable[[], None]
        try:
            match work:
                case Spawn():
                    self._outside.starting(work.spec)
                    answer = partial(self._on_running, work.run(host))
                case Configure():
                    answer = partial(self._on_configured, work.spec, work.run(host))
                case Probe():
                    answer = partial(self._on_answered, work.spec, work.run(host))
                case Kill():
                    work.run(host)
                    answer = self._on_gone
                case Quit() | Terminate():
                    work.run(host)
                    answer = _nothing
        except Exception as error:
            if not isinstance(error, GpufracError):
                log.exception("an effect failed in an unforeseen way", effect=work.effect.value, daemon=self.name)
            answer = partial(self._on_failed, work.effect, error)
        self._outside.post(answer)

    # --- what came of them ---------------------------------------------------------------------------------------

    def _on_failed(self, effect: Effect, error: Exception) -> None:
        text = str(error)
        match effect:
            case Effect.SPAWN:
                permanent = isinstance(error, ConfigError | ForeignDaemonError)
                self.feed(life.SpawnFailed(Reason(_spawn_code(error), text), permanent=permanent))
            case Effect.CONFIGURE:  # the logs name who faulted
                self.feed(life.ConfigFailed(self.server_trouble or Reason(DaemonCode.CONFIGURE_FAILED, text)))
                self._outside.tried(self)
            case Effect.PROBE:
                self._on_probed(life.ProbeFailed(self.server_trouble or Reason(DaemonCode.QUERY_FAILED, text)))
            case Effect.KILL:
                self.feed(life.KillFailed(Reason(DaemonCode.KILL_FAILED, text)))
            case Effect.QUIT | Effect.TERMINATE:
                log.warning("the MPS control daemon does not end when asked", daemon=self.name, error=text)

    def _on_gone(self) -> None:
        # Its exit is seen elsewhere, too, and must not be taken for that of the next one.
        self.identity, self.outdated = None, None
        self._outside.ended(self)
        self.feed(life.Gone())

    def _on_running(self, running: Running) -> None:
        self.identity, self.outdated = running.identity, None
        self.in_force, self.servers, self.server_trouble = InForce(), (), None
        self._outside.started(self)
        self.feed(life.Adopted() if running.adopted else life.Spawned())
        self._outside.judged(self)

    def _on_configured(self, spec: DaemonSpec, configured: Configured) -> None:
        if spec != self.spec:
            return  # the plan changed meanwhile; the answer that counts is under way
        self.in_force = read_back(spec, configured)
        if self.server_trouble is not None:
            self.feed(life.ConfigFailed(self.server_trouble))
        else:
            self.feed(life.Configured(configured.note))
        self._outside.tried(self)

    def _on_answered(self, spec: DaemonSpec, objections: Mapping[str, Reason]) -> None:
        """A probe found the daemon well, but maybe not each namespace: a tenant can spoil its own, and nobody else's
        allocation may suffer from that."""
        spoilt = self.in_force.spoilt(spec, objections)
        for name in spoilt.keys() & (self.in_force.verified.keys() | self.in_force.linked.keys()):
            link, why = self.in_force.linked.get(name), spoilt[name].message
            namespace = name if link is None else link.namespace
            log.warning("MPS namespace is not as it was set", daemon=self.name, namespace=namespace, reason=why)
        self.in_force = self.in_force.without(spoilt)
        trouble = self.server_trouble
        self._on_probed(life.ProbeOk() if trouble is None else life.ProbeFailed(trouble))

    def _on_probed(self, event: Event) -> None:
        self.feed(event)
        if self.in_force.refused and isinstance(event, life.ProbeOk):
            self.feed(life.Respecified())  # what could not be set up then may be by now
        self._outside.tried(self)

    # --- what can be said of it ----------------------------------------------------------------------------------

    def status(
        self, allocations: Iterable[DesiredAllocation], last_log: Callable[[], tuple[str, ...]]
    ) -> DaemonStatus | None:
        """For the snapshot; None where nothing is and nothing is to be.

        Args:
            allocations: the live ones on its GPUs that are to reach the daemon.
        """
        if self.state is DaemonState.ABSENT and not self.life.wanted and (self.plan is None or self.plan.not_shared):
            return None
        attached: tuple[Attached, ...] = ()
        if self.answers:
            by_socket = (a for a in allocations if self.spec.protocol == 3 or a.default_socket)
            attached = tuple(self.in_force.attached(self.spec, allocation) for allocation in by_socket)
        fine = self.answers and not self.life.wedged
        return DaemonStatus(
            state=self.state,
            name=self.name,
            reason=message_of(self.life.reason),
            reason_code=code_of(self.life.reason),
            since_unix_s=self._since_unix_s,
            protocol=self.spec.protocol,
            pid=self.identity.pid if self.identity is not None else None,
            pipe_directory=self.spec.dirs.pipe,
            log_directory=self.spec.dirs.log,
            pinned_limit_bytes=self.in_force.limit_bytes if self.answers else None,
            attached=attached,
            unheld=message_of(self.hold.objection),
            unheld_code=code_of(self.hold.objection),
            shared_memory=self.spec.dirs.shared_memory if self.identity and self.identity.shared_memory else "",
            restarts=self.life.restarts,
            wedged=self.life.wedged,
            last_log=() if fine else last_log(),
        )


def _spawn_code(error: Exception) -> DaemonCode:
    if isinstance(error, ForeignDaemonError):
        return DaemonCode.FOREIGN_DAEMON
    return DaemonCode.CANNOT_START if isinstance(error, ConfigError) else DaemonCode.START_FAILED


def _nothing() -> None:
    """An effect that is answered by something else that happens."""
