"""The loop that owns all of mpsd's state: what is wanted and what is seen go in, effects and snapshots come out.

One thread changes state. It never blocks: effects run in lanes (two per GPU: one for its daemon, one for driver calls)
and report back through the inbox. It is level-triggered: after each message it compares desired with observed, so a
lost hint costs seconds, never correctness.
"""

import queue
import random
import threading
import time
import uuid as uuids
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from mpsd.clients import Census, Counted, take_census, with_usage
from mpsd.computemode import fits, hold_mode
from mpsd.config.model import NodeConfig
from mpsd.daemon import lifecycle as life
from mpsd.daemon import process
from mpsd.daemon.adopt import DaemonIdentity, ProcessIdentity
from mpsd.daemon.host import DaemonHost, ForeignDaemonError, Running
from mpsd.daemon.lifecycle import Effect, Event, Jitter, Lifecycle, Policy
from mpsd.errors import ConfigError, GpufracError, TransientError
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuProcess, GpuState, Inventory, Mode
from mpsd.lanes import Lane
from mpsd.log import get_logger
from mpsd.plan import DaemonSpec, GpuPlan, daemon_spec, plan
from mpsd.published import Published
from mpsd.snapshot import DaemonState, DaemonStatus, Desired, DesiredGpu, GpuClient, GpuClients, GpuStatus, Snapshot
from mpsd.state import StateFile

log = get_logger("mpsd")

MODE_RETRY_S = 5.0
LOOK_S = 5.0
"""When stopping: how long to wait for a last look at who uses a GPU, before what was seen last decides."""
STOP_S = 40.0
"""Longer than a stop takes by the lifecycle's deadlines, so what is cut off here hangs in the kernel."""

_TROUBLE = (DaemonState.BACKOFF, DaemonState.FAILED, DaemonState.KILLING)

Reply = queue.SimpleQueue[GpuClients]


@dataclass(frozen=True, slots=True)
class _Question:
    """Somebody waits for who uses a GPU, not longer than until `deadline_s`."""

    reply: Reply
    deadline_s: float


@dataclass(slots=True, eq=False)
class _Gpu:
    """One GPU as the loop knows it. `settled`: the last mode target reached, `...` while none is."""

    state: GpuState
    plan: GpuPlan
    spec: DaemonSpec
    daemon_lane: Lane
    driver_lane: Lane
    life: Lifecycle = field(default_factory=Lifecycle)
    since_unix_s: float = 0.0
    identity: DaemonIdentity | None = None
    limit_bytes: int | None = None
    servers: tuple[ProcessIdentity, ...] = ()
    clients: tuple[GpuClient, ...] = ()
    counted: tuple[GpuProcess, ...] | None = None
    """The processes the driver showed at the last count; None before the first."""
    counting: bool = False
    asked: tuple[_Question, ...] = ()
    """What the look-up under way is to answer; empty while there is none."""
    waiting: tuple[_Question, ...] = ()
    """Asked after that look-up began: what it finds may be older than these, so the next one answers them."""
    applied: Mode | None = None
    settled: object = ...
    mode_busy: bool = False
    mode_retry_s: float = 0.0
    mode_trouble: str = ""
    mode_held_s: float = 0.0
    """When the compute mode was last set or checked by us (monotonic): readings begun before may be older."""
    leaving: bool | None = None
    """When stopping: None until decided, then whether the daemon is left running."""

    @property
    def uuid(self) -> str:
        return self.state.info.uuid


@dataclass(slots=True)
class _Cleanup:
    done: "queue.SimpleQueue[list[str]]"
    deadline_s: float


@dataclass(slots=True)
class _Stop:
    decide_s: float
    deadline_s: float


class Supervisor:
    """See the module. Public methods are for any thread; none but `clients`, `cleanup` and `close` waits.

    Args:
        kick: asks the prober for a probe now.
    """

    def __init__(
        self,
        config: NodeConfig,
        backend: GpuBackend,
        host: DaemonHost,
        state: StateFile,
        *,
        kick: Callable[[], None] = lambda: None,
        policy: Policy | None = None,
        rng: Jitter = random.random,
    ) -> None:
        self._config, self._backend, self._host, self._state = config, backend, host, state
        self._kick, self._policy, self._rng = kick, policy or Policy(), rng
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gpus: dict[str, _Gpu] = {}
        self._desired = _by_uuid(state.saved.desired)
        self._inherited = frozenset(uuid for uuid, gpu in self._desired.items() if gpu.mode is not None)
        self._inventory = Inventory(reason="GPUs are not probed yet")
        self._config_error = ""
        self._cleanup: _Cleanup | None = None
        self._held = False
        self._stop: _Stop | None = None
        self._watcher = process.ExitWatcher(lambda identity: self._post(partial(self._on_exit, identity)))
        self._disk = Lane("state")
        self._started_unix_s = time.time()
        self._instance = uuids.uuid4().hex[:12]
        self._published = Published(self._snapshot(generation=0))
        self._loop = threading.Thread(target=self._run, name="supervisor", daemon=True)

    # --- for other threads ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._watcher.start()
        self._loop.start()

    @property
    def snapshot(self) -> Snapshot:
        return self._published.snapshot

    def watch(self, instance: str, generation: int, timeout_s: float) -> Snapshot:
        """The first snapshot that differs from this cursor; the same one when the time is over."""
        return self._published.wait(instance, generation, timeout_s)

    def inventory_changed(self, inventory: Inventory) -> None:
        self._post(partial(self._on_inventory, inventory))

    def config_changed(self, config: NodeConfig) -> None:
        """A new config in force. What was read at start (paths, backend) stays as it was."""
        self._post(partial(self._on_config, config))

    def config_refused(self, error: str) -> None:
        """The config file is bad; the old one stays in force."""
        self._post(partial(self._on_config_refused, error))

    def apply(self, desired: Desired) -> None:
        """Takes the whole desired state; what it does not name is unbound."""
        self._post(partial(self._on_desired, desired))

    def clients(self, gpus: Iterable[str], timeout_s: float = 15.0) -> dict[str, GpuClients]:
        """Who uses these GPUs, asked now, side by side: one that can't tell in time spoils no other."""
        deadline_s = time.monotonic() + timeout_s
        replies: dict[str, Reply] = {uuid: queue.SimpleQueue() for uuid in gpus}
        for uuid, reply in replies.items():
            self._post(partial(self._on_clients_asked, uuid, _Question(reply, deadline_s)))
        found: dict[str, GpuClients] = {}
        for uuid, reply in replies.items():
            try:
                found[uuid] = reply.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                found[uuid] = _untold(uuid, f"no answer in {timeout_s:g} s")
        return found

    def cleanup(self, timeout_s: float = 60.0) -> list[str]:
        """Ends every daemon, with clients or not, and leaves the GPUs as they were found. Nothing is started again
        before mpsd is.

        Returns:
            What could not be undone; empty when nothing is left.
        """
        done: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._post(partial(self._on_cleanup, _Cleanup(done, time.monotonic() + timeout_s)))
        try:
            return done.get(timeout=timeout_s + 5.0)
        except queue.Empty:
            raise TransientError(f"cannot clean up within {timeout_s:g} s") from None

    def close(self) -> None:
        """Ends the daemons of GPUs that nobody uses and restores their compute mode; leaves and records the others."""
        if self._loop.is_alive():
            self._post(self._on_stop)
            self._loop.join(STOP_S + LOOK_S)
        self._published.close()
        self._watcher.close()
        for lane in (self._disk, *(lane for gpu in self._gpus.values() for lane in (gpu.daemon_lane, gpu.driver_lane))):
            lane.join(1.0)

    # --- the loop ------------------------------------------------------------------------------------------------

    def _post(self, message: Callable[[], None]) -> None:
        self._inbox.put(message)

    def _run(self) -> None:
        while not self._finished():
            try:
                message = self._inbox.get(timeout=self._pause_s())
            except queue.Empty:
                message = None
            try:
                if message is not None:
                    message()
                self._pass_deadlines()
                for gpu in self._gpus.values():
                    self._reconcile(gpu)
                self._finish_cleanup()
                self._published.put(self._snapshot())
            except Exception:
                log.exception("the supervisor failed on a message and goes on")

    def _pause_s(self) -> float:
        deadlines = [gpu.life.deadline_s for gpu in self._gpus.values() if not gpu.leaving]
        deadlines += [gpu.mode_retry_s for gpu in self._gpus.values() if gpu.mode_retry_s]
        if self._stop is not None:
            undecided = any(gpu.leaving is None for gpu in self._gpus.values())
            deadlines += [self._stop.deadline_s, self._stop.decide_s if undecided else None]
        if self._cleanup is not None:
            deadlines.append(self._cleanup.deadline_s)
        now_s = time.monotonic()
        # Never 0: a deadline of the past that changes nothing must not make the loop spin.
        return max(0.01, min((d for d in deadlines if d is not None), default=now_s + 3600.0) - now_s)

    def _pass_deadlines(self) -> None:
        now_s = time.monotonic()
        for gpu in self._gpus.values():
            if gpu.life.deadline_s is not None and now_s >= gpu.life.deadline_s and not gpu.leaving:
                self._feed(gpu, life.DeadlinePassed())
        if self._stop is not None and now_s >= self._stop.decide_s:
            for gpu in self._gpus.values():
                self._decide(gpu)

    # --- messages ------------------------------------------------------------------------------------------------

    def _on_inventory(self, inventory: Inventory) -> None:
        self._inventory = inventory
        listed = {state.info.uuid for state in inventory.gpus}
        for seen in inventory.gpus:
            state, gpu = seen, self._gpus.get(seen.info.uuid)
            if gpu is not None:
                if not fits(gpu.applied, state.compute_mode):
                    gpu.settled = ...  # changed behind our back, or seen before our change; either way look again
                if state.read_s is not None and state.read_s < gpu.mode_held_s:
                    state = msgspec.structs.replace(state, compute_mode=gpu.state.compute_mode)
                gpu.state = state
        for uuid, gpu in self._gpus.items():
            if uuid not in listed:
                gpu.state = msgspec.structs.replace(
                    gpu.state, health=GpuHealth.LOST, reason="the driver no longer lists this GPU", processes=()
                )
        self._replan()

    def _on_config(self, config: NodeConfig) -> None:
        old = self._config
        self._config = msgspec.structs.replace(
            config, mps=old.mps, backend=old.backend, simulated=old.simulated, state_root=old.state_root
        )
        fixed = [name for name in ("mps", "backend", "simulated", "state_root") if _differs(name, config, old)]
        self._config_error = f"changes of {', '.join(fixed)} take effect when mpsd is restarted" if fixed else ""
        if fixed:
            log.warning("config changed in part", reason=self._config_error)
        self._replan()

    def _on_config_refused(self, error: str) -> None:
        if error != self._config_error:
            log.error("config file refused; the old config stays in force", error=error)
        self._config_error = error

    def _on_desired(self, desired: Desired) -> None:
        wanted = _by_uuid(desired)
        if wanted == self._desired:
            return
        self._desired = wanted
        self._disk.submit(partial(self._write_desired, desired))
        self._replan()

    def _write_desired(self, desired: Desired) -> None:
        try:
            self._state.record_desired(desired)
        except GpufracError as error:
            log.warning("the desired state will not survive a restart of mpsd", error=str(error))

    def _on_clients_asked(self, uuid: str, question: _Question) -> None:
        gpu = self._gpus.get(uuid)
        if gpu is None:
            question.reply.put(_untold(uuid, "mpsd does not know this GPU (yet)"))
            return
        gpu.waiting = (*gpu.waiting, question)
        self._look(gpu)

    def _look(self, gpu: _Gpu) -> None:
        """Starts the look-up that was asked for. One at a time: while the driver hangs none piles up in its lane."""
        now_s = time.monotonic()
        gpu.waiting = tuple(question for question in gpu.waiting if question.deadline_s > now_s)
        if gpu.waiting and not gpu.asked:
            gpu.asked, gpu.waiting = gpu.waiting, ()
            self._count(gpu, gpu.asked)

    def _on_cleanup(self, cleanup: _Cleanup) -> None:
        log.info("cleanup: every daemon ends")
        self._held = True
        self._cleanup = cleanup
        for gpu in self._gpus.values():
            gpu.mode_retry_s, gpu.mode_trouble = 0.0, ""

    def _on_stop(self) -> None:
        now_s = time.monotonic()
        self._stop = _Stop(now_s + LOOK_S, now_s + STOP_S)
        for gpu in self._gpus.values():
            self._count(gpu, fresh=True)

    def _on_exit(self, identity: DaemonIdentity) -> None:
        for gpu in self._gpus.values():
            if gpu.identity == identity:
                gpu.identity = None
                self._feed(gpu, life.Exited(f"the MPS control daemon (pid {identity.pid}) exited"))

    # --- planning and comparing ----------------------------------------------------------------------------------

    def _replan(self) -> None:
        for gpu_plan in plan(self._config, Inventory(gpus=self._known())):
            uuid = gpu_plan.info.uuid
            gpu = self._gpus.get(uuid)
            spec = daemon_spec(self._config, gpu_plan.info, self._live_limit_bytes(uuid))
            if gpu is None:
                state = next(state for state in self._inventory.gpus if state.info.uuid == uuid)
                self._take_in(_Gpu(state, gpu_plan, spec, Lane(f"mps-{uuid[-8:]}"), Lane(f"driver-{uuid[-8:]}")))
                continue
            changed = spec != gpu.spec
            gpu.plan, gpu.spec = gpu_plan, spec
            if changed and gpu.life.wanted:
                self._feed(gpu, life.Respecified())

    def _known(self) -> tuple[GpuState, ...]:
        """All GPUs seen since start, by index: a lost one keeps its daemon and its place."""
        states = {gpu.uuid: gpu.state for gpu in self._gpus.values()}
        states.update({state.info.uuid: state for state in self._inventory.gpus})
        return tuple(sorted(states.values(), key=lambda state: (state.info.index, state.info.uuid)))

    def _take_in(self, gpu: _Gpu) -> None:
        self._gpus[gpu.uuid] = gpu
        gpu.since_unix_s = time.time()
        if gpu.uuid not in self._state.saved.compute_modes:
            gpu.settled = None
        if not self._wanted(gpu) and gpu.uuid in self._state.saved.daemons:
            gpu.daemon_lane.submit(partial(self._find, gpu))
        log.info("GPU", gpu=gpu.uuid, index=gpu.state.info.index, not_shared=gpu.plan.not_shared)

    def _find(self, gpu: _Gpu) -> None:
        """A daemon of an earlier run whose GPU is no longer shared."""
        try:
            running = self._host.find(gpu.spec)
        except GpufracError as error:
            log.warning("cannot judge a recorded MPS daemon", gpu=gpu.uuid, error=str(error))
            return
        if running is not None:
            self._post(partial(self._on_running, gpu, running))

    def _reconcile(self, gpu: _Gpu) -> None:
        if gpu.leaving:
            return
        if self._stop is None:
            self._reconcile_daemon(gpu)
        if gpu.state.processes != gpu.counted and self._stop is None:
            self._recount(gpu)
        self._reconcile_mode(gpu)

    def _reconcile_daemon(self, gpu: _Gpu) -> None:
        wanted = self._wanted(gpu)
        if wanted and not gpu.life.wanted:
            self._feed(gpu, life.Wanted())
        elif not wanted and gpu.life.wanted:
            self._feed(gpu, life.Unwanted(busy=self._busy(gpu) and not self._held))
        elif self._held and gpu.life.state is DaemonState.DRAINING:
            self._feed(gpu, life.Unwanted(busy=False))

    def _wanted(self, gpu: _Gpu) -> bool:
        """Whether its daemon should run. Allocations outlive a reload that no longer shares their GPU."""
        return (gpu.plan.daemon is not None or self._bound(gpu.uuid) is not None) and not self._held

    def _bound(self, uuid: str) -> Mode | None:
        desired = self._desired.get(uuid)
        return None if desired is None else desired.mode

    def _live_limit_bytes(self, uuid: str) -> int:
        """The largest limit of an allocation on the GPU, 0 without."""
        desired = self._desired.get(uuid)
        return 0 if desired is None or desired.mode is None else desired.limit_bytes

    def _busy(self, gpu: _Gpu) -> bool:
        """Whether an allocation or a client of ours is on the GPU."""
        return self._bound(gpu.uuid) is not None or any(
            client.mps or client.allocation_key is not None for client in gpu.clients
        )

    # --- daemons -------------------------------------------------------------------------------------------------

    def _feed(self, gpu: _Gpu, event: Event) -> None:
        before = gpu.life
        gpu.life, effects = life.step(before, event, time.monotonic(), self._rng, self._policy)
        if gpu.life.state is not before.state:
            gpu.since_unix_s = time.time()
            said = log.warning if gpu.life.state in _TROUBLE else log.info
            said(
                "daemon " + gpu.life.state.value,
                gpu=gpu.uuid,
                was=before.state.value,
                on=type(event).__name__,
                pid=gpu.identity.pid if gpu.identity else None,
                reason=gpu.life.reason,
            )
        for effect in effects:
            gpu.daemon_lane.submit(partial(self._perform, gpu, effect, gpu.spec, gpu.identity, gpu.servers))

    def _perform(
        self,
        gpu: _Gpu,
        effect: Effect,
        spec: DaemonSpec,
        identity: DaemonIdentity | None,
        servers: tuple[ProcessIdentity, ...],
    ) -> None:
        """Runs one effect (in the daemon's lane) and posts what came of it."""
        try:
            self._post(self._outcome(gpu, effect, spec, identity, servers))
        except Exception as error:
            if not isinstance(error, GpufracError):
                log.exception("an effect failed in an unforeseen way", effect=effect.value, gpu=gpu.uuid)
            self._post(partial(self._on_failed, gpu, effect, error))

    def _outcome(
        self,
        gpu: _Gpu,
        effect: Effect,
        spec: DaemonSpec,
        identity: DaemonIdentity | None,
        servers: tuple[ProcessIdentity, ...],
    ) -> Callable[[], None]:
        match effect:
            case Effect.SPAWN:
                return partial(self._on_running, gpu, self._host.spawn(spec))
            case Effect.CONFIGURE:
                return partial(self._on_configured, gpu, spec.pinned_limit_bytes, self._host.configure(spec))
            case Effect.PROBE:
                self._host.probe(spec)
                return partial(self._on_probed, gpu, life.ProbeOk())
            case Effect.QUIT:
                self._host.quit(spec, self._policy.quit_s)
                return _nothing
            case Effect.TERMINATE:
                if identity is not None:
                    self._host.terminate(identity)
                return _nothing
            case Effect.KILL:
                self._host.kill(spec, identity, servers)
                return partial(self._feed, gpu, life.Gone())

    def _on_failed(self, gpu: _Gpu, effect: Effect, error: Exception) -> None:
        reason = str(error)
        match effect:
            case Effect.SPAWN:
                permanent = isinstance(error, ConfigError | ForeignDaemonError)
                self._feed(gpu, life.SpawnFailed(reason, permanent=permanent))
            case Effect.CONFIGURE:
                self._feed(gpu, life.ConfigFailed(reason))
            case Effect.PROBE:
                self._on_probed(gpu, life.ProbeFailed(reason))
            case Effect.KILL:
                self._feed(gpu, life.KillFailed(reason))
            case Effect.QUIT | Effect.TERMINATE:
                log.warning("the MPS control daemon does not end when asked", gpu=gpu.uuid, error=reason)

    def _on_running(self, gpu: _Gpu, running: Running) -> None:
        gpu.identity, gpu.limit_bytes, gpu.servers = running.identity, None, ()
        self._feed(gpu, life.Adopted() if running.adopted else life.Spawned())
        self._watcher.watch(running.identity)

    def _on_configured(self, gpu: _Gpu, limit_bytes: int, note: str) -> None:
        if limit_bytes != gpu.spec.pinned_limit_bytes:
            return  # the config changed meanwhile; the answer that counts is under way
        gpu.limit_bytes = limit_bytes
        self._feed(gpu, life.Configured(note))

    def _on_probed(self, gpu: _Gpu, event: Event) -> None:
        self._feed(gpu, event)
        if gpu.state.processes or gpu.clients or gpu.life.state is DaemonState.DRAINING:
            self._count(gpu)

    # --- clients -------------------------------------------------------------------------------------------------

    def _count(self, gpu: _Gpu, asked: tuple[_Question, ...] = (), *, fresh: bool = False) -> None:
        """Looks who uses the GPU, in its driver lane. When asked or `fresh` the driver is asked now."""
        fresh = fresh or bool(asked)
        if gpu.counting and not fresh:
            return
        gpu.counting = True
        processes = gpu.state.processes
        gpu.counted = processes
        ask = gpu.life.state in (DaemonState.READY, DaemonState.DRAINING)
        mps_pids = frozenset(client.pid for client in gpu.clients if client.mps)
        census = Census(gpu.spec, gpu.identity, None if fresh else processes, ask, mps_pids)
        gpu.driver_lane.submit(partial(self._run_census, gpu, census, asked))

    def _recount(self, gpu: _Gpu) -> None:
        """The driver shows something new; where it is memory only, nobody need be asked."""
        processes = gpu.state.processes
        if gpu.counted is not None and {p.pid for p in processes} == {p.pid for p in gpu.counted}:
            gpu.counted, gpu.clients = processes, with_usage(gpu.clients, processes)
        else:
            self._count(gpu)

    def _run_census(self, gpu: _Gpu, census: Census, asked: tuple[_Question, ...]) -> None:
        try:
            result: Counted | None = take_census(census, self._backend, self._host)
        except Exception as error:
            if not isinstance(error, GpufracError):
                log.exception("counting clients failed in an unforeseen way", gpu=gpu.uuid)
            result, answer = None, _untold(gpu.uuid, str(error))
        else:
            answer = GpuClients(clients=result.clients if result is not None else ())
        self._post(partial(self._on_counted, gpu, census, asked, result))
        for question in asked:
            question.reply.put(answer)

    def _on_counted(self, gpu: _Gpu, census: Census, asked: tuple[_Question, ...], result: Counted | None) -> None:
        if asked:
            gpu.asked = ()
            self._look(gpu)
        gpu.counting = False
        if result is not None:
            gpu.clients = result.clients
            gpu.servers = gpu.servers if result.servers is None else result.servers
        if self._stop is not None:
            if census.processes is None:
                self._decide(gpu)
        elif gpu.life.state is DaemonState.DRAINING and not self._busy(gpu) and result is not None:
            self._feed(gpu, life.Drained())

    # --- compute mode --------------------------------------------------------------------------------------------

    def _reconcile_mode(self, gpu: _Gpu) -> None:
        target = self._target(gpu)
        if gpu.mode_busy:
            return
        if gpu.settled == target:
            gpu.mode_trouble = ""
            return
        now_s = time.monotonic()
        if now_s < gpu.mode_retry_s or (self._stop is not None and gpu.leaving is None):
            return
        if target is not None and gpu.settled is None and gpu.uuid not in self._inherited:
            if gpu.counting or gpu.counted is None:
                return
            if foreign := [client.pid for client in gpu.clients if client.allocation_key is None]:
                self._note_mode_trouble(
                    gpu,
                    f"cannot bind it to {target}: foreign processes use it (pid {', '.join(map(str, foreign[:5]))})",
                )
                return
        gpu.mode_busy, gpu.mode_retry_s = True, 0.0
        if gpu.applied is not target:
            gpu.applied = None
        gpu.driver_lane.submit(partial(self._hold_mode, gpu, target))

    def _target(self, gpu: _Gpu) -> Mode | None:
        return None if self._held or self._stop is not None else self._bound(gpu.uuid)

    def _hold_mode(self, gpu: _Gpu, target: Mode | None) -> None:
        try:
            compute_mode = hold_mode(gpu.uuid, target, self._backend, self._state)
        except Exception as error:
            if not isinstance(error, GpufracError):
                log.exception("setting the compute mode failed in an unforeseen way", gpu=gpu.uuid)
            self._post(partial(self._on_mode, gpu, target, None, str(error)))
        else:
            self._post(partial(self._on_mode, gpu, target, compute_mode, "", time.monotonic()))

    def _on_mode(
        self, gpu: _Gpu, target: Mode | None, compute_mode: ComputeMode | None, trouble: str, held_s: float = 0.0
    ) -> None:
        gpu.mode_busy = False
        self._note_mode_trouble(gpu, trouble)
        if compute_mode is None:
            gpu.settled, gpu.applied = ..., None
            gpu.mode_retry_s = time.monotonic() + MODE_RETRY_S
            return
        gpu.settled = gpu.applied = target
        gpu.mode_held_s = held_s
        gpu.state = msgspec.structs.replace(gpu.state, compute_mode=compute_mode)
        log.info("GPU " + (f"bound to {target}" if target else "idle"), gpu=gpu.uuid, compute_mode=compute_mode.value)
        self._kick()

    def _note_mode_trouble(self, gpu: _Gpu, text: str) -> None:
        if text and text != gpu.mode_trouble:
            log.error("GPU not bound", gpu=gpu.uuid, reason=text)
        gpu.mode_trouble = text

    # --- the end -------------------------------------------------------------------------------------------------

    def _decide(self, gpu: _Gpu) -> None:
        """When stopping: leave the daemon to its clients, or end it."""
        if gpu.leaving is not None:
            return
        gpu.leaving = self._busy(gpu) and not self._held
        gpu.mode_retry_s, gpu.mode_trouble = 0.0, ""
        if gpu.leaving:
            log.info("daemon left running: its GPU has clients or allocations", gpu=gpu.uuid, clients=len(gpu.clients))
        else:
            self._feed(gpu, life.Unwanted(busy=False))

    def _finished(self) -> bool:
        if self._stop is None:
            return False
        if time.monotonic() >= self._stop.deadline_s:
            log.error("stopping took too long; what is still under way is left", after_s=STOP_S)
            return True
        return all(gpu.leaving or (gpu.leaving is False and self._is_down(gpu)) for gpu in self._gpus.values())

    def _is_down(self, gpu: _Gpu) -> bool:
        """Nothing of ours is on the GPU, or all was tried."""
        ended = gpu.life.state in (DaemonState.ABSENT, DaemonState.FAILED)
        return ended and not gpu.mode_busy and (gpu.settled is None or bool(gpu.mode_trouble))

    def _finish_cleanup(self) -> None:
        cleanup = self._cleanup
        if cleanup is None:
            return
        overdue = time.monotonic() >= cleanup.deadline_s
        if not overdue and not all(self._is_down(gpu) for gpu in self._gpus.values()):
            return
        self._cleanup = None
        left = [f"GPU {gpu.uuid}: {gpu.mode_trouble}" for gpu in self._gpus.values() if gpu.settled is not None]
        left += [
            f"GPU {gpu.uuid}: its MPS daemon is {gpu.life.state}: {gpu.life.reason}"
            for gpu in self._gpus.values()
            if gpu.life.state is not DaemonState.ABSENT
        ]
        for gpu in self._gpus.values():
            if gpu.life.state is DaemonState.ABSENT:
                gpu.daemon_lane.submit(partial(self._host.remove, gpu.spec))
        cleanup.done.put(left)

    # --- publishing ----------------------------------------------------------------------------------------------

    def _snapshot(self, generation: int = 0) -> Snapshot:
        ordered = sorted(self._gpus.values(), key=lambda gpu: (gpu.state.info.index, gpu.uuid))
        return Snapshot(
            instance=self._instance,
            generation=generation,
            driver_version=self._inventory.driver_version,
            gpus=tuple(self._status(gpu) for gpu in ordered),
            reason=self._inventory.reason,
            config_error=self._config_error,
            backend=self._config.backend,
            started_unix_s=self._started_unix_s,
        )

    def _status(self, gpu: _Gpu) -> GpuStatus:
        not_shared = gpu.plan.not_shared
        if self._held and not not_shared:
            not_shared = "everything was cleaned up on request: restart mpsd to share it again"
        return GpuStatus(
            info=gpu.state.info,
            health=gpu.state.health,
            reason=gpu.state.reason or gpu.mode_trouble,
            not_shared=not_shared,
            mode=gpu.applied if fits(gpu.applied, gpu.state.compute_mode) else None,
            driver_compute_mode=gpu.state.compute_mode,
            daemon=self._daemon_status(gpu),
            clients=gpu.clients,
        )

    def _daemon_status(self, gpu: _Gpu) -> DaemonStatus | None:
        state = gpu.life.state
        if state is DaemonState.ABSENT and gpu.plan.daemon is None:
            return None
        relied_on = state in (DaemonState.READY, DaemonState.DRAINING)
        return DaemonStatus(
            state=state,
            reason=gpu.life.reason,
            since_unix_s=gpu.since_unix_s,
            pid=gpu.identity.pid if gpu.identity is not None else None,
            pipe_directory=gpu.spec.dirs.pipe,
            log_directory=gpu.spec.dirs.log,
            pinned_limit_bytes=gpu.limit_bytes if relied_on else None,
            restarts=gpu.life.restarts,
        )


def _by_uuid(desired: Desired) -> Mapping[str, DesiredGpu]:
    return {gpu.uuid: gpu for gpu in desired.gpus}


def _untold(uuid: str, reason: str) -> GpuClients:
    return GpuClients(error=f"cannot list the clients of GPU {uuid}: {reason}")


def _differs(name: str, new: NodeConfig, old: NodeConfig) -> bool:
    return bool(getattr(new, name) != getattr(old, name))


def _nothing() -> None:
    """An effect that is answered by something else that happens."""
