"""The owner of all of mpsd's state: what is wanted and what is seen go in, effects and snapshots come out.

One thread changes state (loop.py). It never blocks: effects run in lanes (one per daemon, one per GPU for driver calls)
and report back through its inbox. It is level-triggered: after each message it compares desired with observed, so a
lost hint costs seconds, never correctness. What it knows is one value (node.py); its GPUs, its daemons, the ends of
everything and the snapshot are a file each, and what one daemon or GPU needs is in its keeper. Here they are joined.
"""

import math
import queue
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from mpsd.common.errors import GpufracError, TransientError
from mpsd.common.lanes import Lane
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.config.model import NodeConfig
from mpsd.config.reload import Process, merge
from mpsd.daemon.exits import ExitWatcher
from mpsd.daemon.host import DaemonHost
from mpsd.daemon.lifecycle import Jitter, Policy
from mpsd.daemon.logs.parse import LogEvent
from mpsd.daemon.state import StateFile
from mpsd.events.kinds import EventKind
from mpsd.events.teller import SILENT, Counting
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import Inventory, Mode
from mpsd.limits.api import Job
from mpsd.limits.hardlimits import HardLimitsKeeper
from mpsd.localapi.reasons import ClientsCode, LimitReadingCode
from mpsd.localapi.snapshot import Desired, GpuClients, Snapshot
from mpsd.supervision.daemons import Daemons
from mpsd.supervision.ending import Cleanup, Ending
from mpsd.supervision.ends import ENDS, End, Fate
from mpsd.supervision.gpus import Gpus
from mpsd.supervision.happenings import NodeNews
from mpsd.supervision.indices import Indices
from mpsd.supervision.loop import Loop
from mpsd.supervision.node import Node
from mpsd.supervision.protocol import ProtocolKeeper
from mpsd.supervision.published import Published
from mpsd.supervision.servers import DaemonLogs
from mpsd.supervision.usage import Count, Question, Reply, untold
from mpsd.supervision.view import View

GPU_NOT_KNOWN = "mpsd does not know this GPU (yet)"
log = get_logger("mpsd")

STARVED_S = 0.5
"""How often it is tried again to give waiting work a thread, where the process may have no more."""


class Supervisor:
    """See the module. Public methods are for any thread; only `clients`, `terminate_client`, `replace`, `cleanup` and
    `close` wait.

    Args:
        logs: the log files of daemons; their events come in by `log_event`.
        kick: asks the prober for a probe now.
        warnings: what is short of perfect on this host, for people.
        teller: is told of what happens.
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
        warnings: tuple[Reason, ...] = (),
        teller: Counting = SILENT,
    ) -> None:
        self._host, self._state = host, state
        self._loop = Loop(self._turn, self._pause_s, lambda: self._ending.finished)
        self._post = post = self._loop.post
        self._node = node = Node(config, state.saved.desired)
        self._disk = Lane("state")
        indices = Indices(state, self._disk)
        self._hard_limits = HardLimitsKeeper(backend, post)
        self._watcher = ExitWatcher(lambda identity: post(partial(self._daemons.on_exit, identity)))
        self._protocol = ProtocolKeeper(host, post, lambda changed: self._daemons.protocol_chosen(changed=changed))
        self._gpus = Gpus(node, backend, host, state, indices, post, on_counted=self._on_counted, kick=kick)
        self._daemons = Daemons(
            node,
            self._protocol,
            host,
            state,
            logs,
            post,
            watch=self._watcher.watch,
            policy=policy or Policy(on_wedge=config.mps.on_wedge),
            rng=rng,
        )
        self._ending = Ending(node, state)
        self._view = View(node, state, indices, self._hard_limits, backend, logs, warnings, teller)
        self._teller, self._news = teller, NodeNews(teller)
        self._published = Published(self._view.snapshot())

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

    def look_again(self) -> None:
        """Something that the snapshot shows changed elsewhere."""
        self._post(lambda: None)

    def inventory_changed(self, inventory: Inventory) -> None:
        self._post(partial(self._on_inventory, inventory))

    def config_changed(self, config: NodeConfig) -> None:
        """A new config: what of it waits for a restart (config/reload.py) stays as it was."""
        self._post(partial(self._on_config, config))

    def config_refused(self, error: Reason) -> None:
        """The config file is bad; the old one stays in force."""
        self._post(partial(self._on_config_refused, error))

    def apply(self, desired: Desired) -> None:
        """Takes the whole desired state; what it does not name is unbound."""
        self._post(partial(self._on_desired, desired))

    def desired(self) -> Desired:
        """What was handed over last, if need be to a process before this one."""
        return self._loop.ask(lambda: self._node.desired)

    def log_event(self, name: str, event: LogEvent) -> None:
        """Something that a daemon's log says."""
        self._post(partial(self._daemons.log_event, name, event))

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
                found[uuid] = untold(uuid, Reason(ClientsCode.NO_ANSWER, f"no answer in {round(timeout_s, 1):g} s"))
        return found

    def ask_limits(self, uuid: str, job: Job) -> None:
        """Has a GPU's driver asked for memory limits of cgroups, or told to set them."""
        self._post(partial(self._on_limits_asked, uuid, job))

    def soft_limit_seen(self) -> None:
        """A container has guaranteed memory by its cgroup."""
        self._post(self._hard_limits.soft_limit_seen)

    def turns(self, timeout_s: float) -> bool:
        """Whether its loop goes round: it is made to, and waited for."""
        return self._loop.turns(timeout_s)

    @property
    def serves_by_mps(self) -> bool:
        """Whether something that the config offers needs an MPS daemon."""
        config = self._node.config
        return config.annotations is not None or any(r.mode is Mode.SM_SHARING for r in config.resources)

    @property
    def config(self) -> NodeConfig:
        """What is in force."""
        return self._node.config

    def gpus_of(self, keys: Collection[str], pod_uids: Collection[str] = ()) -> tuple[str, ...]:
        """The GPUs of these allocations, and those on which clients of them or of these pods were seen."""
        return self._loop.ask(partial(self._on_gpus_asked, frozenset(keys), frozenset(pod_uids)))

    def terminate_client(self, uuid: str, pid: int, timeout_s: float) -> None:
        """Has the daemon on a GPU destroy the contexts of one client. Raises GpufracError when it does not confirm."""
        answer: queue.SimpleQueue[GpufracError | None] = queue.SimpleQueue()
        self._post(partial(self._daemons.terminate_client, uuid, pid, time.monotonic() + timeout_s, answer))
        try:
            error = answer.get(timeout=timeout_s)
        except queue.Empty:
            error = TransientError(f"cannot terminate MPS client {pid}: no answer in {round(timeout_s, 1):g} s")
        if error is not None:
            raise error

    def replace(self, name: str, reason: str, *, now: bool) -> None:
        """Has another daemon take the place of one: when nobody uses it, or `now`, whoever does.

        Args:
            name: the daemon's, which is its domain's.

        Raises:
            ConfigError: no such daemon, or it is to end anyway.
        """
        self._loop.ask(partial(self._daemons.replace, name, reason, now=now))

    def confirm_indices(self) -> None:
        """Has the indices in the config mean what the driver says now. Raises TransientError while not all GPUs are
        seen."""
        self._loop.ask(self._on_confirm_indices)

    def cleanup(self, timeout_s: float = 60.0) -> list[str]:
        """Ends every daemon, with clients or not, and leaves the GPUs as they were found. Nothing is started again
        before mpsd is.

        Returns:
            What could not be undone; empty when nothing is left.
        """
        done: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._post(partial(self._on_cleanup, Cleanup(done, time.monotonic() + timeout_s)))
        try:
            return done.get(timeout=timeout_s + 5.0)
        except queue.Empty:
            raise TransientError(f"cannot clean up within {timeout_s:g} s") from None

    def close(self) -> None:
        """Ends the daemons of GPUs that nobody uses and restores their compute mode; leaves and records the others."""
        stop = ENDS[End.STOPPING]
        self._loop.end(self._ending.stop, (stop.most_s or 0.0) + stop.look_s)
        self._published.close()
        self._watcher.close()
        for lane in self._lanes():
            lane.join(1.0)

    # --- in the loop ---------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Compares desired with observed."""
        node, now_s = self._node, time.monotonic()
        self._protocol.pass_deadline(now_s)
        if not node.stopping:
            self._hard_limits.pass_deadline(now_s)
        self._daemons.pass_deadlines(now_s)
        self._ending.pass_deadline(now_s)
        if not node.stopping:
            self._hard_limits.observe(
                node.inventory.driver_version,
                [gpu.state for gpu in node.gpus.values()],
                enable_dmem=node.config.enable_dmem,
                policy=node.config.leaks,
            )
            self._daemons.reconcile()
        self._ending.reconcile()
        self._gpus.reconcile()
        if not node.stopping:
            self._daemons.hold_servers()
        self._ending.finish_cleanups()
        if self._published.put(self._view.snapshot()):
            self._news.observe(self._published.snapshot, now_s, time.time())
        self._news.tend(now_s)

    def _pause_s(self) -> float:
        """Until the next deadline. Lanes that wait for a thread get one, or the pause is short."""
        starving = [lane for lane in self._lanes() if lane.revive()]
        now_s = time.monotonic()
        # Never 0: a deadline of the past that changes nothing must not make the loop spin.
        pause_s = max(0.01, min((d for d in self._deadlines_s(now_s) if d is not None), default=now_s + 3600.0) - now_s)
        return min(pause_s, STARVED_S if starving else math.inf)

    def _deadlines_s(self, now_s: float) -> Iterator[float | None]:
        node = self._node
        for daemon in node.daemons.values():
            yield daemon.find_retry_s
            if daemon.fate is not Fate.STAYS:
                yield daemon.life.deadline_s
            if not node.stopping:
                yield daemon.hold.retry_s
        if not node.stopping:
            for gpu in node.gpus.values():
                yield gpu.mode.retry_s
                yield gpu.usage.retry_s
            yield self._hard_limits.deadline_s
        for servers in node.servers.values():
            yield servers.deadline_s(now_s)
        yield self._news.deadline_s
        yield self._protocol.retry_s
        yield from self._ending.deadlines_s()

    def _lanes(self) -> list[Lane]:
        of_gpus = (gpu.lane for gpu in self._node.gpus.values())
        return [self._disk, self._protocol.lane, self._hard_limits.lane, *of_gpus, *self._daemons.lanes]

    def _on_inventory(self, inventory: Inventory) -> None:
        self._gpus.observe(inventory)
        self._protocol.observe(inventory.driver_version)
        self._daemons.replan()

    def _on_confirm_indices(self) -> None:
        self._gpus.confirm_indices()
        self._daemons.replan()

    def _on_counted(self, uuid: str, count: Count) -> None:
        node = self._node
        gpu, daemon = node.gpus[uuid], node.daemon_on(uuid)
        if count.complete and count.fresh_s is not None:
            gpu.counted_s = count.fresh_s
        if daemon is None:
            return
        self._daemons.counted(daemon, count)
        if node.stopping:
            self._ending.counted(daemon, uuid, count.fresh_s)
        else:
            self._daemons.drain_if_unused(daemon)

    def _on_cleanup(self, cleanup: Cleanup) -> None:
        self._ending.clean_up(cleanup)
        self._daemons.recall()  # those of an earlier run too, though the driver may show no GPU yet

    def _on_config(self, config: NodeConfig) -> None:
        node = self._node
        node.config, waiting = merge(Process.MPSD, node.config, config)
        node.config_error, node.config_restart_needed = None, ", ".join(waiting)
        if node.config_restart_needed:
            log.warning("config changed in part; the rest takes a restart of mpsd", rest=node.config_restart_needed)
        self._teller.tell(
            EventKind.CONFIG_RELOADED,
            detail=f"waits for a restart: {rest}" if (rest := node.config_restart_needed) else "",
        )
        self._gpus.number()
        self._daemons.replan()

    def _on_config_refused(self, error: Reason) -> None:
        if error != self._node.config_error:
            log.error("config file refused; the old config stays in force", error=error.message)
            self._teller.tell(EventKind.CONFIG_REFUSED, reason=error)
        self._node.config_error = error

    def _on_desired(self, desired: Desired) -> None:
        node = self._node
        if desired == node.desired:
            if self._state.problem:
                self._disk.submit(partial(self._write_desired, desired))  # it may be mended
            return
        node.desired = desired
        node.inherited &= {uuid for a in desired.allocations for uuid in a.gpus}
        self._disk.submit(partial(self._write_desired, desired))
        self._daemons.replan()

    def _write_desired(self, desired: Desired) -> None:
        try:
            self._state.record_desired(desired)
        except GpufracError as error:
            log.warning("the desired state will not survive a restart of mpsd", error=str(error))
        self._post(lambda: None)  # what became of it is shown

    def _on_gpus_asked(self, keys: frozenset[str], pod_uids: frozenset[str]) -> tuple[str, ...]:
        desired = {uuid for a in self._node.desired.allocations if a.key in keys for uuid in a.gpus}
        seen = {
            uuid
            for uuid, gpu in self._node.gpus.items()
            if any(c.allocation_key in keys or c.pod_uid in pod_uids for c in gpu.usage.clients)
        }
        return tuple(uuid for uuid in self._node.gpus if uuid in desired | seen)

    def _on_clients_asked(self, uuid: str, question: Question) -> None:
        gpu = self._node.gpus.get(uuid)
        if gpu is None or uuid not in self._node.owner:
            question.reply.put(untold(uuid, Reason(ClientsCode.GPU_NOT_KNOWN, GPU_NOT_KNOWN)))
        else:
            gpu.usage.ask(question)

    def _on_limits_asked(self, uuid: str, job: Job) -> None:
        gpu = self._node.gpus.get(uuid)
        if gpu is None:
            job.refuse(Reason(LimitReadingCode.NOT_ASKED, GPU_NOT_KNOWN))
        else:
            gpu.limits.ask(job)
