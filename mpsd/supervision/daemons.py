"""Keeps the daemons of the node: which should run, which may, and what their GPUs, logs and processes tell them."""

import dataclasses
import queue
import time
from collections.abc import Callable
from functools import partial

from mpsd.common.errors import ConfigError, GpufracError, TransientError
from mpsd.common.lanes import Lane, Post
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.daemon import lifecycle as life
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.controller import NotAClientError
from mpsd.daemon.host import DaemonHost
from mpsd.daemon.lifecycle import Jitter, Policy
from mpsd.daemon.logs.parse import Evictions, LogEvent, ServerExited
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.plan import DaemonSpec, plan
from mpsd.daemon.state import StateFile
from mpsd.localapi.reasons import DaemonCode
from mpsd.localapi.snapshot import DaemonState
from mpsd.shares.domains import domain_of
from mpsd.shares.groups import is_set_name
from mpsd.supervision.daemon import DaemonKeeper, Outside
from mpsd.supervision.ends import End
from mpsd.supervision.node import Node
from mpsd.supervision.protocol import ProtocolKeeper
from mpsd.supervision.servers import DaemonLogs, ServerWatch
from mpsd.supervision.usage import Count

log = get_logger("mpsd")


class Daemons:
    """Every method is for the supervisor's thread.

    Args:
        logs: their log files; what is new in them comes in by `log_event`.
        watch: has the end of a process reported to `on_exit`.
    """

    def __init__(
        self,
        node: Node,
        protocol: ProtocolKeeper,
        host: DaemonHost,
        state: StateFile,
        logs: DaemonLogs,
        post: Post,
        *,
        watch: Callable[[DaemonIdentity], None],
        policy: Policy,
        rng: Jitter,
    ) -> None:
        self._node, self._protocol, self._state, self._logs, self._watch = node, protocol, state, logs, watch
        self._outside = Outside(
            host=host,
            protocol=lambda: protocol.choice,
            post=post,
            policy=policy,
            rng=rng,
            starting=self._follow_logs,
            started=self._on_started,
            judged=self._judge,
            ended=self._on_ended,
            tried=self._on_tried,
        )
        self._lanes: dict[str, Lane] = {}
        """By name: one that goes and comes again must not overtake itself."""
        self._recalled = False

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._lanes.values())

    # --- which should run ----------------------------------------------------------------------------------------

    def replan(self) -> None:
        """The config, the GPUs, what is allocated or a daemon's protocol changed: what should run now?"""
        if self._protocol.found is None:
            return
        node = self._node
        infos = [state.info for state in node.known()]
        found = plan(
            node.config,
            infos,
            node.desired.allocations,
            self._protocol_spoken,
            node.kept_domains(),
            node.lost(),
        )
        plans = {domain_plan.domain.name: domain_plan for domain_plan in found}
        node.owner = {uuid: domain.name for uuid, domain in domain_of(p.domain for p in found).items()}
        for name, domain_plan in plans.items():
            if name not in node.daemons:
                node.daemons[name] = self._new(domain_plan.spec)
            node.daemons[name].take(domain_plan)
        for name in node.daemons.keys() - plans.keys():
            node.daemons[name].take(None)
        self.recall()
        for daemon in list(node.daemons.values()):
            self._judge(daemon)

    def recall(self) -> None:
        """Daemons of an earlier run that nothing wants now have to end, and until then no other is on their GPUs. Once:
        later ones are our own."""
        if self._recalled:
            return
        self._recalled = True
        node = self._node
        for name, recorded in self._state.saved.daemons.items():
            if name not in node.daemons:
                dirs = daemon_dirs(node.config.mps, name)
                gpus = recorded.gpus or (name,)  # an old record has one for its only GPU
                node.daemons[name] = self._new(DaemonSpec(name, gpus, recorded.protocol, 0, dirs, ()))
            if not node.is_wanted(node.daemons[name]):
                node.daemons[name].find()

    def _new(self, spec: DaemonSpec) -> DaemonKeeper:
        lane = self._lanes.setdefault(spec.name, Lane(f"mps-{spec.name[-8:]}"))
        return DaemonKeeper(spec, self._outside, lane)

    def _protocol_spoken(self, name: str) -> int:
        """What a domain's daemon speaks; the chosen protocol where none runs."""
        daemon = self._node.daemons.get(name)
        if daemon is not None and daemon.identity is not None:
            return daemon.identity.protocol
        return self._protocol.choice.protocol

    def protocol_chosen(self, *, changed: bool) -> None:
        """What daemons are to speak was found out, maybe anew."""
        self.replan()
        if changed and not self._protocol.choice.objection:
            for daemon in list(self._node.daemons.values()):
                daemon.try_again(Reason(DaemonCode.PROTOCOL_KNOWN, "the MPS protocol to speak is known"))

    def reconcile(self) -> None:
        """Starts what should run and may, and ends what should not."""
        for daemon in list(self._node.daemons.values()):
            self._reconcile(daemon)

    def _reconcile(self, daemon: DaemonKeeper) -> None:
        node = self._node
        wanted = node.is_wanted(daemon)
        if wanted and not daemon.life.wanted:
            if not (daemon.is_absent and node.blockers(daemon)) and not daemon.finding:
                daemon.feed(life.Wanted())
        elif not wanted and daemon.life.wanted:
            daemon.end(End.CLEANED_UP if node.cleaned_up else End.UNPLANNED, busy=node.is_busy(daemon))
        elif node.cleaned_up and daemon.state is DaemonState.DRAINING:
            daemon.end(End.CLEANED_UP)
        if daemon.plan is None and daemon.is_absent:
            del node.daemons[daemon.name]
            node.servers.pop(daemon.name, None)
            daemon.lane.submit(partial(self._logs.remove, daemon.name))
            if is_set_name(daemon.name):  # nobody knows it by that name, and there may be many
                daemon.remove_directories(homes=False)

    def hold_servers(self) -> None:
        """Has MPS servers held on the GPUs that are closed to others."""
        for daemon in list(self._node.daemons.values()):
            daemon.hold_server(closed=self._node.is_closed(daemon))

    def replace(self, name: str, reason: str, *, now: bool) -> None:
        """By the name of a daemon or the UUID of a GPU. Raises ConfigError: no such daemon, or it is to end anyway."""
        node = self._node
        daemon = node.daemons.get(name) or node.daemon_of(name)
        if daemon is None:
            known = ", ".join(node.daemons) or "none"
            raise ConfigError(f"cannot replace the MPS daemon of {name}: there is none; known: {known}")
        if not daemon.life.wanted:
            raise ConfigError(f"cannot replace the MPS daemon of {name}: it is {daemon.state} and not to come back")
        log.info("daemon is to be replaced", daemon=daemon.name, reason=reason, now=now)
        asked = Reason(DaemonCode.OPERATOR_ASKED, reason)
        daemon.end(End.REPLACED_NOW if now else End.REPLACED, reason=asked)

    def terminate_client(
        self, uuid: str, pid: int, deadline_s: float, answer: "queue.SimpleQueue[GpufracError | None]"
    ) -> None:
        """Has the daemon on a GPU destroy the contexts of one client; `answer` gets why not, None when it did."""
        daemon = self._node.daemon_on(uuid)
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
                self._outside.host.terminate_client(spec, pid)
                answer.put(None)
            except GpufracError as error:
                answer.put(error)
            except Exception as error:
                log.exception("terminating a client failed in an unforeseen way", pid=pid)
                answer.put(GpufracError(f"cannot terminate MPS client {pid}: {error}"))

        daemon.lane.submit(run)  # among its other commands: one may take long

    def pass_deadlines(self, now_s: float) -> None:
        for daemon in list(self._node.daemons.values()):
            daemon.pass_deadline(now_s)
        for name, servers in self._node.servers.items():
            self._note_servers(name, servers)

    # --- what keepers, logs and processes tell -------------------------------------------------------------------

    def on_exit(self, identity: DaemonIdentity) -> None:
        """A process ended that was watched."""
        for daemon in list(self._node.daemons.values()):
            daemon.on_exit(identity)

    def _follow_logs(self, spec: DaemonSpec) -> None:
        """What the files hold by now was said by a daemon before this one."""
        self._logs.remove(spec.name)
        self._logs.add(spec.name, spec.dirs.log, 3 if spec.protocol == 3 else 2)

    def _on_started(self, daemon: DaemonKeeper) -> None:
        assert daemon.identity is not None
        self._node.servers[daemon.name] = ServerWatch()
        if daemon.identity.protocol != daemon.spec.protocol:
            spec = dataclasses.replace(daemon.spec, protocol=daemon.identity.protocol)
            daemon.lane.submit(partial(self._follow_logs, spec))
        self._watch(daemon.identity)
        self.replan()  # it is spoken to in its own protocol, and on its own GPUs

    def _judge(self, daemon: DaemonKeeper) -> None:
        if (choice := self._protocol.settled) is not None:  # else what is wanted is not known
            daemon.judge(choice.protocol)

    def _on_ended(self, daemon: DaemonKeeper) -> None:
        self.replan()  # the next one speaks what is chosen now

    def _on_tried(self, daemon: DaemonKeeper) -> None:
        """The daemon answered, or failed to: time to see who uses its GPUs, where somebody may or it matters."""
        daemon.hold.check()
        members = self._node.members(daemon)
        for gpu in members:
            if daemon.awaits_drain:
                gpu.usage.count(None)
            elif gpu.state.processes or gpu.usage.clients:
                gpu.usage.count(gpu.state.processes)
        if not members:
            self.drain_if_unused(daemon)  # of GPUs that are not on this node nobody is counted

    def counted(self, daemon: DaemonKeeper, count: Count) -> None:
        """Who uses a GPU that it is on was counted."""
        if count.servers is not None:
            daemon.servers = count.servers
            if not count.servers:
                daemon.hold.check()
        if len(daemon.spec.gpus) > 1:
            self.replan()  # its GPUs may part when nobody uses it

    def drain_if_unused(self, daemon: DaemonKeeper) -> None:
        """Tells a daemon that waits for it that nobody is left."""
        if daemon.awaits_drain and self._node.is_drained(daemon):
            daemon.feed(life.Drained())

    def log_event(self, name: str, event: LogEvent) -> None:
        """Something that a daemon's log says."""
        servers = self._node.servers.get(name)
        if servers is not None:
            servers.note(event, time.monotonic())
            self._note_servers(name, servers)
            if isinstance(event, ServerExited):
                self._node.daemons[name].hold.doubt()
            elif isinstance(event, Evictions):  # the sooner it is looked who is gone, the surer
                for gpu in self._node.members(self._node.daemons[name]):
                    gpu.usage.count(None)

    def _note_servers(self, name: str, servers: ServerWatch) -> None:
        daemon = self._node.daemons[name]
        clients = {client.pid: client for gpu in self._node.members(daemon) for client in gpu.usage.clients}
        daemon.note_servers(servers.trouble(time.monotonic(), clients))
