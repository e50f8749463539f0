"""The loop that owns all of mpsd's state: what is wanted and what is seen go in, effects and snapshots come out.

One thread changes state. It never blocks: effects run in lanes (one per daemon, one per GPU for driver calls) and
report back through the inbox. It is level-triggered: after each message it compares desired with observed, so a lost
hint costs seconds, never correctness. What one daemon or GPU needs is in its keeper; here is what lies between them.
"""

import dataclasses
import math
import queue
import random
import time
import uuid as uuids
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from mpsd.common.errors import ConfigError, GpufracError, TransientError
from mpsd.common.lanes import Lane
from mpsd.common.log import get_logger
from mpsd.common.threads import GuardedThread, Mishaps
from mpsd.config import numbering
from mpsd.config.model import NodeConfig
from mpsd.config.show import differing
from mpsd.daemon import lifecycle as life
from mpsd.daemon import process
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.controller import NotAClientError
from mpsd.daemon.host import DaemonHost, ProtocolChoice
from mpsd.daemon.lifecycle import Jitter, Policy
from mpsd.daemon.logs.parse import LogEvent, ServerExited
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.plan import DaemonSpec, plan
from mpsd.daemon.state import StateFile
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo, GpuState, Inventory, Mode
from mpsd.limits.api import GpuLimits, Job
from mpsd.limits.hardlimits import HardLimitsKeeper
from mpsd.localapi.snapshot import DaemonState, Desired, DesiredAllocation, GpuClients, GpuStatus, Snapshot
from mpsd.shares.groups import group_of
from mpsd.supervision.computemode import Hold, fits, hold_for
from mpsd.supervision.daemon import DaemonKeeper, Outside
from mpsd.supervision.indices import Indices
from mpsd.supervision.mode import ModeKeeper
from mpsd.supervision.published import Published
from mpsd.supervision.servers import NO_HOST_PIDS, DaemonLogs, ServerWatch
from mpsd.supervision.usage import Count, Daemon, Question, Reply, Usage, untold

log = get_logger("mpsd")

STARVED_S = 0.5
"""How often it is tried again to give waiting work a thread, where the process may have no more."""
LOOK_S = 5.0
"""When stopping: how long to wait for a last look at who uses a GPU, before what was seen last decides."""
PROTOCOL_RETRY_S = 10.0
STOP_S = 40.0
"""Longer than a stop takes by the lifecycle's deadlines, so what is cut off here hangs in the kernel."""

HOLDERS_FIRST = (
    "it ends by itself once nothing granted on them is left: delete the pods that `gpufrac allocations` names for it"
)
"""What helps with a daemon whose GPUs are gone. A cleanup would end the daemons of all other GPUs, too."""
NOT_FOUND_SO = (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED)
"""Compute modes that GPUs are rarely found in, and that we set."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Gpu:
    """One GPU as the loop knows it. `counted_s`: when the driver was last asked who uses it, with an answer
    (monotonic)."""

    state: GpuState
    lane: Lane
    mode: ModeKeeper
    usage: Usage
    limits: GpuLimits
    counted_s: float = 0.0

    @property
    def uuid(self) -> str:
        return self.state.info.uuid


@dataclass(slots=True)
class _Cleanup:
    done: "queue.SimpleQueue[list[str]]"
    deadline_s: float


@dataclass(slots=True)
class _Stop:
    """`looked`: GPUs whose use was asked of the driver since it began."""

    begun_s: float
    looked: set[str] = field(default_factory=set)

    @property
    def decide_s(self) -> float:
        return self.begun_s + LOOK_S

    @property
    def deadline_s(self) -> float:
        return self.begun_s + STOP_S


class Supervisor:
    """See the module. Public methods are for any thread; only `clients`, `terminate_client`, `replace`, `cleanup` and
    `close` wait.

    Args:
        logs: the log files of daemons; their events come in by `log_event`.
        kick: asks the prober for a probe now.
        warnings: what is short of perfect on this host, for people.
    """

    def __init__(
        self,
        config: NodeConfig,
        backend: GpuBackend,
        host: DaemonHost,
        state: StateFile,
        *,
        logs: DaemonLogs,
        kick: Callable[[], None] = lambda: None,
        policy: Policy | None = None,
        rng: Jitter = random.random,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._config, self._backend, self._host, self._state, self._logs = config, backend, host, state, logs
        self._kick, self._warnings = kick, warnings
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        policy = policy or Policy(on_wedge=config.mps.on_wedge)
        self._outside = Outside(
            host=host,
            protocol=self._choice,
            post=self._post,
            policy=policy,
            rng=rng,
            starting=self._follow_logs,
            started=self._on_started,
            judged=self._judge,
            ended=self._on_ended,
            tried=self._on_tried,
        )
        self._gpus: dict[str, _Gpu] = {}
        self._first_modes: dict[str, ComputeMode] = {}
        """Compute modes seen first that may be an earlier mpsd's, where no record tells."""
        self._daemons: dict[str, DaemonKeeper] = {}
        self._lanes: dict[str, Lane] = {}
        """Of daemons by name: one that goes and comes again must not overtake itself."""
        self._servers: dict[str, ServerWatch] = {}
        self._owner: dict[str, str] = {}
        """The daemon that serves each GPU."""
        self._desired = state.saved.desired
        self._inherited = {uuid for a in self._desired.allocations for uuid in a.gpus}
        """GPUs that were bound before we came: who is on them is no stranger until they were bound by us, too."""
        self._inventory = Inventory(reason="GPUs are not probed yet")
        self._protocol: ProtocolChoice | None = None
        self._protocol_of = ""
        """The driver version that the choice was made for, or is being made."""
        self._protocol_retry_s: float | None = None
        self._hard_limits = HardLimitsKeeper(backend, self._post)
        self._recalled = False
        self._config_error = self._config_restart_needed = ""
        self._cleanups: list[_Cleanup] = []
        self._held = False
        self._stop: _Stop | None = None
        self._watcher = process.ExitWatcher(lambda identity: self._post(partial(self._on_exit, identity)))
        self._disk, self._protocol_lane = Lane("state"), Lane("protocol")
        self._indices = Indices(state, self._disk)
        self._started_unix_s = time.time()
        self._instance = uuids.uuid4().hex[:12]
        self._published = Published(self._snapshot(generation=0))
        self._loop = GuardedThread(self._run, "supervisor")

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

    def desired(self) -> Desired:
        """What was handed over last, if need be to a process before this one."""
        return self._ask(lambda: self._desired)

    def log_event(self, name: str, event: LogEvent) -> None:
        """Something that a daemon's log says."""
        self._post(partial(self._on_log_event, name, event))

    def clients(self, gpus: Iterable[str], timeout_s: float = 15.0) -> dict[str, GpuClients]:
        """Who uses these GPUs, asked now, side by side: one that can't tell in time spoils no other."""
        deadline_s = time.monotonic() + timeout_s
        replies: dict[str, Reply] = {uuid: queue.SimpleQueue() for uuid in gpus}
        for uuid, reply in replies.items():
            self._post(partial(self._on_clients_asked, uuid, Question(reply, deadline_s)))
        found: dict[str, GpuClients] = {}
        for uuid, reply in replies.items():
            try:
                found[uuid] = reply.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                found[uuid] = untold(uuid, f"no answer in {round(timeout_s, 1):g} s")
        return found

    def ask_limits(self, uuid: str, job: Job) -> None:
        """Has a GPU's driver asked for memory limits of cgroups, or told to set them."""
        self._post(partial(self._on_limits_asked, uuid, job))

    def soft_limit_seen(self) -> None:
        """A container has guaranteed memory by its cgroup."""
        self._post(self._hard_limits.soft_limit_seen)

    @property
    def simulated(self) -> bool:
        """Whether GPUs and pods are simulated."""
        return self._config.backend == "simulated"

    def gpus_of(self, keys: Collection[str], pod_uids: Collection[str] = ()) -> tuple[str, ...]:
        """The GPUs of these allocations, and those on which clients of them or of these pods were seen."""
        return self._ask(partial(self._on_gpus_asked, frozenset(keys), frozenset(pod_uids)))

    def _on_gpus_asked(self, keys: frozenset[str], pod_uids: frozenset[str]) -> tuple[str, ...]:
        desired = {uuid for a in self._desired.allocations if a.key in keys for uuid in a.gpus}
        seen = {
            uuid
            for uuid, gpu in self._gpus.items()
            if any(c.allocation_key in keys or c.pod_uid in pod_uids for c in gpu.usage.clients)
        }
        return tuple(uuid for uuid in self._gpus if uuid in desired | seen)

    def terminate_client(self, uuid: str, pid: int, timeout_s: float) -> None:
        """Has the daemon on a GPU destroy the contexts of one client. Raises GpufracError when it does not confirm."""
        answer: queue.SimpleQueue[GpufracError | None] = queue.SimpleQueue()
        self._post(partial(self._on_terminate, uuid, pid, time.monotonic() + timeout_s, answer))
        try:
            error = answer.get(timeout=timeout_s)
        except queue.Empty:
            error = TransientError(f"cannot terminate MPS client {pid}: no answer in {round(timeout_s, 1):g} s")
        if error is not None:
            raise error

    def replace(self, name: str, reason: str, *, now: bool) -> None:
        """Has another daemon take the place of one: when nobody uses it, or `now`, whoever does.

        Args:
            name: a GPU's UUID or a group's name.

        Raises:
            ConfigError: no such daemon, or it is to end anyway.
        """
        self._ask(partial(self._on_replace, name, reason, now))

    def confirm_indices(self) -> None:
        """Has the indices in the config mean what the driver says now. Raises TransientError while not all GPUs are
        seen."""
        self._ask(self._on_confirm_indices)

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
        for lane in self._all_lanes():
            lane.join(1.0)

    # --- the loop ------------------------------------------------------------------------------------------------

    def _post(self, message: Callable[[], None]) -> None:
        self._inbox.put(message)

    def _ask(self, question: Callable[[], T], timeout_s: float = 5.0) -> T:
        """Has the loop answer a question. Raises what it raised."""
        answer: queue.SimpleQueue[T | GpufracError] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(question())
            except GpufracError as error:
                answer.put(error)

        self._post(run)
        try:
            found = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TransientError(f"cannot get an answer of the supervisor within {timeout_s:g} s") from None
        if isinstance(found, GpufracError):
            raise found
        return found

    def _run(self) -> None:
        mishaps = Mishaps("supervisor", "the supervisor failed on a message and goes on", log)
        while not self._finished():
            try:
                message = self._inbox.get(timeout=min(self._pause_s(), self._revive_lanes()))
            except queue.Empty:
                message = None
            try:
                if message is not None:
                    message()
                self._pass_deadlines()
                self._reconcile()
                self._finish_cleanup()
                self._published.put(self._snapshot())
                mishaps.none()
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error)

    def _all_lanes(self) -> list[Lane]:
        of_gpus = (gpu.lane for gpu in self._gpus.values())
        return [self._disk, self._protocol_lane, self._hard_limits.lane, *of_gpus, *self._lanes.values()]

    def _revive_lanes(self) -> float:
        """Gives lanes the threads that could not be had before; after how long to try again."""
        starving = [lane for lane in self._all_lanes() if lane.revive()]
        return STARVED_S if starving else math.inf

    def _pause_s(self) -> float:
        deadlines = [daemon.life.deadline_s for daemon in self._daemons.values() if not daemon.leaving]
        deadlines += [daemon.find_retry_s for daemon in self._daemons.values()]
        deadlines += [daemon.hold.retry_s for daemon in self._daemons.values() if self._stop is None]
        if self._stop is None:
            deadlines += [retry_s for gpu in self._gpus.values() for retry_s in (gpu.mode.retry_s, gpu.usage.retry_s)]
        deadlines += [servers.deadline_s(time.monotonic()) for servers in self._servers.values()]
        if self._stop is not None:
            undecided = any(daemon.leaving is None for daemon in self._daemons.values())
            deadlines += [self._stop.deadline_s, self._stop.decide_s if undecided else None]
        deadlines += [cleanup.deadline_s for cleanup in self._cleanups]
        deadlines += [self._protocol_retry_s, self._hard_limits.deadline_s if self._stop is None else None]
        now_s = time.monotonic()
        # Never 0: a deadline of the past that changes nothing must not make the loop spin.
        return max(0.01, min((d for d in deadlines if d is not None), default=now_s + 3600.0) - now_s)

    def _pass_deadlines(self) -> None:
        now_s = time.monotonic()
        if self._protocol_retry_s is not None and now_s >= self._protocol_retry_s:
            self._ask_protocol()
        if self._stop is None:
            self._hard_limits.pass_deadline(now_s)
        for daemon in self._daemons.values():
            daemon.pass_deadline(now_s)
        for name, servers in self._servers.items():
            self._note_servers(name, servers)
        if self._stop is not None and now_s >= self._stop.decide_s:
            for daemon in self._daemons.values():
                self._decide(daemon)

    # --- messages ------------------------------------------------------------------------------------------------

    def _on_inventory(self, inventory: Inventory) -> None:
        self._inventory = inventory
        listed = {state.info.uuid for state in inventory.gpus}
        for seen in inventory.gpus:
            gpu = self._gpus.get(seen.info.uuid)
            if gpu is None:
                self._gpus[seen.info.uuid] = self._new_gpu(seen)
                if self._state.begins_anew and seen.compute_mode in NOT_FOUND_SO:
                    self._first_modes[seen.info.uuid] = seen.compute_mode
                log.info("GPU", gpu=seen.info.uuid, index=seen.info.index)
            else:
                compute_mode = gpu.mode.observe(seen, gpu.state.compute_mode)
                gpu.state = msgspec.structs.replace(seen, compute_mode=compute_mode)
        for uuid, gpu in self._gpus.items():
            if uuid not in listed:
                gpu.state = msgspec.structs.replace(
                    gpu.state, health=GpuHealth.LOST, reason="the driver no longer lists this GPU", processes=()
                )
        self._number()
        version = inventory.driver_version
        if version is not None and version != self._protocol_of:
            self._protocol_of = version
            self._ask_protocol()
        self._replan()

    def _number(self) -> None:
        """Gives each GPU the index that means it in the config."""
        self._indices.settle(self._config, self._listed())
        for gpu in self._gpus.values():
            gpu.state = msgspec.structs.replace(gpu.state, info=self._indices.of(gpu.state.info))

    def _listed(self) -> list[GpuInfo]:
        """All GPUs as the driver numbers them, lost ones last."""
        states = sorted(self._inventory.gpus, key=lambda state: state.health is GpuHealth.LOST)
        return [state.info for state in states]

    def _on_confirm_indices(self) -> None:
        if self._inventory.reason:
            raise TransientError(f"cannot confirm the numbers of GPUs, as not all are seen: {self._inventory.reason}")
        self._indices.confirm(self._listed())
        self._number()
        self._replan()

    def _ask_protocol(self) -> None:
        self._protocol_retry_s = None
        self._protocol_lane.submit(partial(self._choose_protocol, self._protocol_of))

    def _new_gpu(self, state: GpuState) -> _Gpu:
        uuid = state.info.uuid
        lane = Lane(f"driver-{uuid[-8:]}")
        mode = ModeKeeper(uuid, lane, self._backend, self._state, self._post, partial(self._on_mode_set, uuid))
        usage = Usage(
            uuid,
            lane,
            self._backend,
            self._host,
            self._post,
            partial(self._daemon_to_ask, uuid),
            partial(self._on_counted, uuid),
            simulated=self.simulated,
        )
        return _Gpu(state, lane, mode, usage, GpuLimits(self._backend, lane, self._post))

    def _choose_protocol(self, driver_version: str) -> None:
        try:
            choice = self._host.protocol(driver_version)
        except Exception as error:
            if not isinstance(error, GpufracError):
                log.exception("choosing the MPS protocol failed in an unforeseen way")
            choice = ProtocolChoice(3, objection=str(error), unsure=str(error))
        self._post(partial(self._on_protocol, driver_version, choice))

    def _on_protocol(self, driver_version: str, choice: ProtocolChoice) -> None:
        if driver_version != self._protocol_of:
            return
        before, self._protocol = self._protocol, choice
        self._protocol_retry_s = time.monotonic() + PROTOCOL_RETRY_S if choice.unsure else None
        self._replan()
        if choice == before:
            return
        reason = choice.unsure or choice.objection
        said = log.warning if reason else log.info
        said("MPS protocol", protocol=choice.protocol, driver=driver_version, reason=reason)
        if not choice.objection:
            for daemon in self._daemons.values():
                daemon.try_again("the MPS protocol to speak is known")

    def _on_config(self, config: NodeConfig) -> None:
        old = self._config
        self._config = msgspec.structs.replace(
            config, mps=old.mps, backend=old.backend, simulated=old.simulated, state_root=old.state_root
        )
        self._config_error, self._config_restart_needed = "", ", ".join(differing(self._config, config))
        if self._config_restart_needed:
            log.warning("config changed in part; the rest takes a restart of mpsd", rest=self._config_restart_needed)
        self._number()
        self._replan()

    def _on_config_refused(self, error: str) -> None:
        if error != self._config_error:
            log.error("config file refused; the old config stays in force", error=error)
        self._config_error = error

    def _on_desired(self, desired: Desired) -> None:
        if desired == self._desired:
            if self._state.problem:
                self._disk.submit(partial(self._write_desired, desired))  # it may be mended
            return
        self._desired = desired
        self._inherited &= {uuid for a in desired.allocations for uuid in a.gpus}
        self._disk.submit(partial(self._write_desired, desired))
        self._replan()

    def _write_desired(self, desired: Desired) -> None:
        try:
            self._state.record_desired(desired)
        except GpufracError as error:
            log.warning("the desired state will not survive a restart of mpsd", error=str(error))
        self._post(lambda: None)  # what became of it is shown

    def _on_log_event(self, name: str, event: LogEvent) -> None:
        servers = self._servers.get(name)
        if servers is not None:
            servers.note(event, time.monotonic())
            self._note_servers(name, servers)
            if isinstance(event, ServerExited):
                self._daemons[name].hold.doubt()

    def _note_servers(self, name: str, servers: ServerWatch) -> None:
        daemon = self._daemons[name]
        clients = {client.pid: client for gpu in self._members(daemon) for client in gpu.usage.clients}
        daemon.note_servers(servers.trouble(time.monotonic(), clients))

    def _on_clients_asked(self, uuid: str, question: Question) -> None:
        gpu = self._gpus.get(uuid)
        if gpu is None or uuid not in self._owner:
            question.reply.put(untold(uuid, "mpsd does not know this GPU (yet)"))
        else:
            gpu.usage.ask(question)

    def _on_limits_asked(self, uuid: str, job: Job) -> None:
        gpu = self._gpus.get(uuid)
        if gpu is None:
            job.refuse("mpsd does not know this GPU (yet)")
        else:
            gpu.limits.ask(job)

    def _on_terminate(
        self, uuid: str, pid: int, deadline_s: float, answer: "queue.SimpleQueue[GpufracError | None]"
    ) -> None:
        daemon = self._daemon_on(uuid)
        if daemon is not None and daemon.is_absent:
            answer.put(NotAClientError(f"cannot terminate pid {pid}: GPU {uuid} has no MPS daemon"))
            return
        if daemon is None or daemon.identity is None or daemon.state in (DaemonState.STOPPING, DaemonState.KILLING):
            answer.put(TransientError(f"cannot terminate MPS client {pid}: no MPS daemon runs on GPU {uuid}"))
            return
        spec = daemon.spec

        def run() -> None:
            if time.monotonic() >= deadline_s:
                return  # nobody waits for it any more
            try:
                self._host.terminate_client(spec, pid)
                answer.put(None)
            except GpufracError as error:
                answer.put(error)
            except Exception as error:
                log.exception("terminating a client failed in an unforeseen way", pid=pid)
                answer.put(GpufracError(f"cannot terminate MPS client {pid}: {error}"))

        daemon.lane.submit(run)  # among its other commands: one may take long

    def _on_replace(self, name: str, reason: str, now: bool) -> None:
        daemon = self._daemons.get(name) or self._daemons.get(self._owner.get(name, ""))
        if daemon is None:
            known = ", ".join(self._daemons) or "none"
            raise ConfigError(f"cannot replace the MPS daemon of {name}: there is none; known: {known}")
        if not daemon.life.wanted:
            raise ConfigError(f"cannot replace the MPS daemon of {name}: it is {daemon.state} and not to come back")
        log.info("daemon is to be replaced", daemon=daemon.name, reason=reason, now=now)
        daemon.feed(life.Replace(reason, now))

    def _on_cleanup(self, cleanup: _Cleanup) -> None:
        log.info("cleanup: every daemon ends")
        self._held = True
        self._cleanups.append(cleanup)
        self._recall()  # those of an earlier run too, though the driver may show no GPU yet
        for gpu in self._gpus.values():
            gpu.mode.try_again()

    def _on_stop(self) -> None:
        self._stop = _Stop(time.monotonic())
        for gpu in self._gpus.values():
            gpu.usage.count(None)

    def _on_exit(self, identity: DaemonIdentity) -> None:
        for daemon in self._daemons.values():
            daemon.on_exit(identity)

    def _follow_logs(self, spec: DaemonSpec) -> None:
        """What the files hold by now was said by a daemon before this one."""
        self._logs.remove(spec.name)
        self._logs.add(spec.name, spec.dirs.log, 3 if spec.protocol == 3 else 2)

    def _on_started(self, daemon: DaemonKeeper) -> None:
        assert daemon.identity is not None
        self._servers[daemon.name] = ServerWatch()
        if daemon.identity.protocol != daemon.spec.protocol:
            spec = dataclasses.replace(daemon.spec, protocol=daemon.identity.protocol)
            daemon.lane.submit(partial(self._follow_logs, spec))
        self._watcher.watch(daemon.identity)
        self._replan()  # it is spoken to in its own protocol, and on its own GPUs

    def _judge(self, daemon: DaemonKeeper) -> None:
        if self._protocol is not None and self._protocol_retry_s is None:  # else what is wanted is not known
            daemon.judge(self._protocol.protocol)

    def _on_ended(self, daemon: DaemonKeeper) -> None:
        self._replan()  # the next one speaks what is chosen now

    def _on_tried(self, daemon: DaemonKeeper) -> None:
        """The daemon answered, or failed to: time to see who uses its GPUs, where somebody may or it matters."""
        daemon.hold.check()
        for gpu in self._members(daemon):
            if daemon.awaits_drain:
                gpu.usage.count(None)
            elif gpu.state.processes or gpu.usage.clients:
                gpu.usage.count(gpu.state.processes)
        if daemon.awaits_drain and not self._members(daemon) and self._is_drained(daemon):
            daemon.feed(life.Drained())  # of GPUs that are not on this node nobody is counted

    def _on_counted(self, uuid: str, count: Count) -> None:
        gpu, daemon = self._gpus[uuid], self._daemon_on(uuid)
        if count.complete and count.fresh_s is not None:
            gpu.counted_s = count.fresh_s
        if daemon is None:
            return
        if count.servers is not None:
            daemon.servers = count.servers
            if not count.servers:
                daemon.hold.check()
        if self._stop is not None:
            if count.fresh_s is not None and count.fresh_s >= self._stop.begun_s:
                self._stop.looked.add(uuid)
            if self._stop.looked.issuperset(gpu.uuid for gpu in self._members(daemon)):
                self._decide(daemon)
        elif daemon.awaits_drain and self._is_drained(daemon):
            daemon.feed(life.Drained())

    def _on_mode_set(self, uuid: str, compute_mode: ComputeMode) -> None:
        gpu = self._gpus[uuid]
        gpu.state = msgspec.structs.replace(gpu.state, compute_mode=compute_mode)
        self._inherited.discard(uuid)
        self._kick()

    # --- planning and comparing ----------------------------------------------------------------------------------

    def _replan(self) -> None:
        """The config, the GPUs, what is allocated or a daemon's protocol changed: what should run now?"""
        choice = self._protocol
        if choice is None:
            return
        infos = [state.info for state in self._known()]
        plans = {p.group.name: p for p in plan(self._config, infos, self._desired.allocations, self._protocol_spoken)}
        self._owner = {uuid: group.name for uuid, group in group_of(p.group for p in plans.values()).items()}
        for name, group_plan in plans.items():
            if name not in self._daemons:
                self._daemons[name] = self._new_daemon(group_plan.spec)
            self._daemons[name].take(group_plan)
        for name in self._daemons.keys() - plans.keys():
            self._daemons[name].take(None)
        self._recall()
        for daemon in self._daemons.values():
            self._judge(daemon)

    def _recall(self) -> None:
        """Daemons of an earlier run that nothing wants now have to end, and until then no other is on their GPUs. Once:
        later ones are our own."""
        if self._recalled:
            return
        self._recalled = True
        for name, recorded in self._state.saved.daemons.items():
            if name not in self._daemons:
                dirs = daemon_dirs(self._config.mps, name)
                gpus = recorded.gpus or (name,)  # an old record has one for its only GPU
                self._daemons[name] = self._new_daemon(DaemonSpec(name, gpus, recorded.protocol, 0, dirs, ()))
            if not self._wanted(self._daemons[name]):
                self._daemons[name].find()

    def _new_daemon(self, spec: DaemonSpec) -> DaemonKeeper:
        lane = self._lanes.setdefault(spec.name, Lane(f"mps-{spec.name[-8:]}"))
        return DaemonKeeper(spec, self._outside, lane)

    def _protocol_spoken(self, name: str) -> int:
        """What a group's daemon speaks; the chosen protocol where none runs."""
        daemon = self._daemons.get(name)
        if daemon is not None and daemon.identity is not None:
            return daemon.identity.protocol
        assert self._protocol is not None
        return self._protocol.protocol

    def _known(self) -> tuple[GpuState, ...]:
        """All GPUs seen since start, by index: a lost one keeps its daemon and its place."""
        states = [gpu.state for gpu in self._gpus.values()]
        return tuple(sorted(states, key=lambda state: (state.info.index, state.info.uuid)))

    def _reconcile(self) -> None:
        if self._stop is None:
            self._hard_limits.observe(
                self._inventory.driver_version,
                [gpu.state for gpu in self._gpus.values()],
                enable_dmem=self._config.enable_dmem,
                policy=self._config.leaks,
            )
        for daemon in list(self._daemons.values()):
            if self._stop is None:
                self._reconcile_daemon(daemon)
            elif daemon.leaving is False and daemon.state is DaemonState.DRAINING:
                daemon.feed(life.Unwanted(busy=False))  # it was adopted while we stop
        for gpu in self._gpus.values():
            on_it = self._daemon_on(gpu.uuid)
            if on_it is not None and not on_it.leaving:
                if self._stop is None:
                    gpu.usage.observe(gpu.state.processes)
                self._reconcile_mode(gpu, on_it)
        if self._stop is None:
            for daemon in self._daemons.values():
                daemon.hold_server(closed=self._is_closed(daemon))

    def _reconcile_daemon(self, daemon: DaemonKeeper) -> None:
        wanted = self._wanted(daemon)
        if wanted and not daemon.life.wanted:
            if not (daemon.is_absent and self._is_blocked(daemon)) and not daemon.finding:
                daemon.feed(life.Wanted())
        elif not wanted and daemon.life.wanted:
            daemon.feed(life.Unwanted(busy=self._is_busy(daemon) and not self._held))
        elif self._held and daemon.state is DaemonState.DRAINING:
            daemon.feed(life.Unwanted(busy=False))
        if daemon.plan is None and daemon.is_absent:
            del self._daemons[daemon.name]
            self._servers.pop(daemon.name, None)
            daemon.lane.submit(partial(self._logs.remove, daemon.name))

    def _wanted(self, daemon: DaemonKeeper) -> bool:
        """Whether it should run. Allocations outlive a reload that no longer shares their GPU."""
        if self._held or daemon.plan is None:
            return False
        return not daemon.plan.not_shared or any(a.group == daemon.name for a in self._desired.allocations)

    def _choice(self) -> ProtocolChoice:
        """For lanes, once daemons are planned."""
        assert self._protocol is not None
        return self._protocol

    def _is_blocked(self, daemon: DaemonKeeper) -> bool:
        """Whether another daemon is still on one of its GPUs: they were grouped otherwise."""
        gpus = set(daemon.spec.gpus)
        return any(
            other is not daemon and not other.is_absent and not gpus.isdisjoint(other.spec.gpus)
            for other in self._daemons.values()
        )

    def _members(self, daemon: DaemonKeeper) -> list[_Gpu]:
        return [gpu for uuid in daemon.spec.gpus if (gpu := self._gpus.get(uuid)) is not None]

    def _daemon_of(self, uuid: str) -> DaemonKeeper | None:
        return self._daemons.get(self._owner.get(uuid, ""))

    def _daemon_on(self, uuid: str) -> DaemonKeeper | None:
        """The daemon that is on a GPU now: of an earlier grouping while that ends, else the one that serves it."""
        there = (d for d in self._daemons.values() if uuid in d.spec.gpus and not d.is_absent)
        return next(there, None) or self._daemon_of(uuid)

    def _daemon_to_ask(self, uuid: str) -> Daemon | None:
        daemon = self._daemon_on(uuid)
        return None if daemon is None else Daemon(daemon.spec, daemon.identity, daemon.answers)

    def _bound(self, uuid: str) -> Mode | None:
        """The mode that allocations on the GPU need; None without."""
        return next((a.mode for a in self._desired.allocations if uuid in a.gpus), None)

    def _is_busy(self, daemon: DaemonKeeper) -> bool:
        """Whether an allocation or a client of ours is on its GPUs."""
        return any(self._bound(uuid) is not None for uuid in daemon.spec.gpus) or self._has_clients(daemon)

    def _has_clients(self, daemon: DaemonKeeper) -> bool:
        return any(
            client.mps or client.allocation_key is not None
            for gpu in self._members(daemon)
            for client in gpu.usage.clients
        )

    def _is_drained(self, daemon: DaemonKeeper) -> bool:
        """Whether nobody uses it, asked since it waits for that. Allocations whose containers are down don't count
        where the same daemon comes back to them."""
        members = self._members(daemon)
        if not all(gpu.counted_s >= daemon.since_s or gpu.state.health is GpuHealth.LOST for gpu in members):
            return False
        comes_back_same = daemon.life.wanted and not daemon.outdated
        return not (self._has_clients(daemon) if comes_back_same else self._is_busy(daemon))

    # --- compute mode --------------------------------------------------------------------------------------------

    def _reconcile_mode(self, gpu: _Gpu, daemon: DaemonKeeper) -> None:
        if self._stop is not None and daemon.leaving is None:
            return
        if daemon.state is DaemonState.STARTING and gpu.uuid in self._inherited:
            return  # the daemon of its clients is being looked for, and what it speaks decides
        target = self._target(gpu, daemon)
        if gpu.mode.needs_check(target) and gpu.uuid not in self._inherited:
            if not gpu.usage.known:
                return
            if foreign := [client.pid for client in gpu.usage.clients if client.allocation_key is None]:
                assert target is not None
                pids = ", ".join(map(str, foreign[:5]))
                gpu.mode.refuse(f"cannot bind it to {target.mode}: foreign processes use it (pid {pids})")
                return
        gpu.mode.reconcile(target)

    def _is_closed(self, daemon: DaemonKeeper) -> bool:
        """Whether all of its GPUs are bound so that one process at a time may open them."""
        holds = [gpu.mode.applied for gpu in self._members(daemon)]
        return bool(holds) and all(h is not None and h.compute_mode is ComputeMode.EXCLUSIVE_PROCESS for h in holds)

    def _target(self, gpu: _Gpu, daemon: DaemonKeeper) -> Hold | None:
        mode = None if self._held or self._stop is not None else self._bound(gpu.uuid)
        if mode is None:
            return None
        prohibit = self._config.mps.prohibit_while_down
        return hold_for(mode, daemon.spec.protocol, daemon_ready=daemon.answers, prohibit=prohibit)

    # --- the end -------------------------------------------------------------------------------------------------

    def _decide(self, daemon: DaemonKeeper) -> None:
        """When stopping: leave the daemon to its clients, or end it."""
        if daemon.leaving is not None:
            return
        daemon.leaving = self._is_busy(daemon) and not self._held
        for gpu in self._members(daemon):
            gpu.mode.try_again()
        if daemon.leaving:
            log.info("daemon left running: its GPUs have clients or allocations", daemon=daemon.name)
        else:
            daemon.feed(life.Unwanted(busy=False))

    def _finished(self) -> bool:
        if self._stop is None:
            return False
        if time.monotonic() >= self._stop.deadline_s:
            log.error("stopping took too long; what is still under way is left", after_s=STOP_S)
            return True
        if not self._daemons:
            return time.monotonic() >= self._stop.decide_s or not self._gpus
        return all(d.leaving or (d.leaving is False and self._is_down(d)) for d in self._daemons.values())

    def _is_down(self, daemon: DaemonKeeper) -> bool:
        """Nothing of ours is on its GPUs, or all was tried."""
        ended = daemon.is_absent or daemon.state is DaemonState.FAILED
        return ended and all(gpu.mode.idle or gpu.mode.given_up for gpu in self._members(daemon))

    def _finish_cleanup(self) -> None:
        if not self._cleanups:
            return
        now_s = time.monotonic()
        down = all(self._is_down(daemon) for daemon in self._daemons.values())
        saved = self._state.saved
        unseen = [uuid for uuid in saved.compute_modes if uuid not in self._gpus]
        over = [c for c in self._cleanups if now_s >= c.deadline_s or (down and not unseen)]
        if not over:
            return
        self._cleanups = [cleanup for cleanup in self._cleanups if cleanup not in over]
        left = [f"GPU {gpu.uuid}: {gpu.mode.trouble}" for gpu in self._gpus.values() if not gpu.mode.idle]
        left += [
            f"the MPS daemon of {daemon.name} is {daemon.state}: {daemon.life.reason}"
            for daemon in self._daemons.values()
            if not daemon.is_absent
        ]
        left += [f"GPU {uuid}: its compute mode {saved.compute_modes[uuid]} is to be given back" for uuid in unseen]
        for daemon in self._daemons.values():
            if daemon.is_absent:
                daemon.remove_directories()
        for cleanup in over:
            cleanup.done.put(left)

    # --- publishing ----------------------------------------------------------------------------------------------

    def _snapshot(self, generation: int = 0) -> Snapshot:
        allocations: dict[str, list[DesiredAllocation]] = {}
        for allocation in self._desired.allocations:
            if allocation.mode is Mode.SM_SHARING or allocation.default_socket:
                allocations.setdefault(allocation.group, []).append(allocation)
        known = [self._gpus[state.info.uuid] for state in self._known()] if self._protocol is not None else []
        return Snapshot(
            instance=self._instance,
            generation=generation,
            driver_version=self._inventory.driver_version,
            gpus=tuple(self._status(gpu, allocations) for gpu in known),
            reason=self._inventory.reason,
            config_error=self._config_error,
            config_restart_needed=self._config_restart_needed,
            backend=self._config.backend,
            started_unix_s=self._started_unix_s,
            hard_limits=self._hard_limits.found,
            cgroup_root=self._backend.cgroup_root,
            warnings=(
                *self._warnings,
                *filter(None, [self._state.problem, never_seen(self._inventory.never_seen)]),
                *self._misnamed(),
                *self._nameless(),
                *self._homeless(),
                *self._inherited_modes(),
                *self._unlisted_processes(),
                *(text for gpu in self._gpus.values() if (text := gpu.mode.contested(gpu.state.info.index))),
                *self._hard_limits.warnings,
            ),
        )

    def _misnamed(self) -> Iterable[str]:
        if self._inventory.reason or not self._gpus:
            return ()  # not all are seen: one that is missing may only be late
        return numbering.warnings(
            self._config, self._indices.numbering, [gpu.state.info for gpu in self._gpus.values()]
        )

    def _inherited_modes(self) -> Iterable[str]:
        """A compute mode that may be an earlier mpsd's, where nothing tells what was found before it."""
        for uuid, first in self._first_modes.items():
            gpu = self._gpus[uuid]
            if self._state.saved.compute_modes.get(uuid, gpu.state.compute_mode) is first:
                yield (
                    f"GPU {gpu.state.info.index}: it was in compute mode {first} when mpsd started, without a record "
                    "of who set it (there was no mpsd.json of use), and is given back so: if that is not wanted: "
                    f"nvidia-smi -i {uuid} -c DEFAULT while nothing is bound there"
                )

    def _unlisted_processes(self) -> Iterable[str]:
        return (
            f"GPU {gpu.state.info.index}: its driver lists no processes: who uses it besides MPS clients is not known"
            for gpu in self._gpus.values()
            if not gpu.state.processes_told
        )

    def _homeless(self) -> Iterable[str]:
        return (
            f"the MPS daemon of {daemon.name} runs (pid {daemon.identity.pid}), and none of its GPUs is on this node: "
            + (HOLDERS_FIRST if self._is_busy(daemon) else "it is being ended")
            for daemon in self._daemons.values()
            if daemon.identity is not None and not self._members(daemon)
        )

    def _nameless(self) -> Iterable[str]:
        return (f"MPS daemon of {name}: {NO_HOST_PIDS}" for name, s in self._servers.items() if s.nameless_clients)

    def _status(self, gpu: _Gpu, allocations: Mapping[str, Sequence[DesiredAllocation]]) -> GpuStatus:
        daemon = self._daemons[self._owner[gpu.uuid]]
        not_shared = daemon.plan.not_shared if daemon.plan is not None else "its group is being dissolved"
        if self._held and not not_shared:
            not_shared = "everything was cleaned up on request: restart mpsd to share it again"
        if not not_shared and not daemon.life.wanted and self._is_blocked(daemon):
            not_shared = "daemons of an earlier grouping are still on its GPUs"
        applied = gpu.mode.applied
        held = applied is not None and applied.compute_mode is not ComputeMode.PROHIBITED
        return GpuStatus(
            info=gpu.state.info,
            health=gpu.state.health,
            reason=gpu.state.reason or gpu.mode.trouble,
            not_shared=not_shared,
            excluded=numbering.is_excluded(self._config, gpu.state.info),
            group=daemon.name,
            mode=applied.mode if applied is not None and held and fits(applied, gpu.state.compute_mode) else None,
            driver_compute_mode=gpu.state.compute_mode,
            daemon=daemon.status(allocations.get(daemon.name, ()), partial(self._logs.last_lines, daemon.name)),
            clients=gpu.usage.clients,
            evictions=servers.evictions(gpu.uuid) if (servers := self._servers.get(daemon.name)) is not None else 0,
        )


def never_seen(count: int) -> str:
    """That GPUs are missing which nobody could name since mpsd started; empty where none is (pure)."""
    if not count:
        return ""
    what, them = ("a GPU", "it") if count == 1 else (f"{count} GPUs", "them")
    return (
        f"the driver counts {what} more than it can read: lost since before mpsd started; look for NVRM and Xid in the "
        f"kernel's log, then reset {them} or reboot"
    )
