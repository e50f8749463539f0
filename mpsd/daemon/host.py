"""The effects of a lifecycle, each one blocking call with deadlines of its own; run by worker threads."""

import os
import signal
from dataclasses import dataclass
from typing import Protocol

from mpsd import processes
from mpsd.config.model import MpsConfig
from mpsd.daemon import dirs as directories
from mpsd.daemon import process, protocol2
from mpsd.daemon.adopt import DaemonIdentity, Evidence, Foreign, Ours, ProcessIdentity, judge
from mpsd.daemon.control import ControlClient, FrontEnd
from mpsd.daemon.paths import control_binary, socket_objection
from mpsd.errors import ConfigError, GpufracError, ProtocolError, TransientError
from mpsd.log import get_logger
from mpsd.plan import DaemonSpec
from mpsd.state import StateFile

log = get_logger("daemon")


class ForeignDaemonError(GpufracError):
    """A control daemon that is not ours lives in our pipe directory: only an operator can tell whether it may end."""


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that lives. `adopted`: it did so before we came."""

    identity: DaemonIdentity
    adopted: bool


@dataclass(frozen=True, slots=True)
class MpsClients:
    """Servers of a daemon and the clients of all of them (PIDs as the daemon sees them)."""

    servers: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()


class DaemonHost(Protocol):
    """What the supervisor has done to daemons. All raise GpufracError with the reason."""

    def find(self, spec: DaemonSpec) -> Running | None: ...
    def spawn(self, spec: DaemonSpec) -> Running: ...
    def configure(self, spec: DaemonSpec) -> str: ...
    def probe(self, spec: DaemonSpec) -> None: ...
    def clients(self, spec: DaemonSpec) -> MpsClients: ...
    def quit(self, spec: DaemonSpec, timeout_s: float) -> None: ...
    def terminate(self, identity: DaemonIdentity) -> None: ...
    def kill(self, spec: DaemonSpec, identity: DaemonIdentity | None, servers: tuple[ProcessIdentity, ...]) -> None: ...
    def remove(self, spec: DaemonSpec) -> None: ...


class LocalHost:
    """`DaemonHost` on this node, protocol 2."""

    START_S = 10.0
    KILL_S = 5.0

    def __init__(
        self, mps: MpsConfig, state: StateFile, control: ControlClient | None = None, *, query_s: float = 5.0
    ) -> None:
        self._binary = control_binary(mps)
        self._state = state
        self._control = control or FrontEnd(mps)
        self._query_s = query_s
        self._warned = ""
        self._boot_id = processes.boot_id()

    def find(self, spec: DaemonSpec) -> Running | None:
        """The daemon of an earlier mpsd, None when it is gone.

        Raises:
            ForeignDaemonError: a daemon lives there that we can't prove to be ours.
        """
        recorded = self._state.saved.daemons.get(spec.uuid)
        pids = dict.fromkeys(pid for pid in (recorded and recorded.pid, process.read_pid_file(spec.dirs)) if pid)
        candidates = tuple(found for pid in pids if (found := process.candidate(pid)) is not None)
        verdict = judge(Evidence(self._boot_id, spec.uuid, spec.dirs.pipe, recorded, candidates))
        if isinstance(verdict, Foreign):
            raise ForeignDaemonError(
                f"cannot use {spec.dirs.pipe}: the MPS control daemon with pid {verdict.pid} lives there, and "
                f"{verdict.reason}: end it"
            )
        if isinstance(verdict, Ours):
            self._state.record_daemon(spec.uuid, verdict.identity)
            return Running(verdict.identity, adopted=True)
        return None

    def spawn(self, spec: DaemonSpec) -> Running:
        """The daemon of this spec: the one that lives, or a new one in cleared directories.

        Raises:
            TransientError: it can't be started now.
            ConfigError, ForeignDaemonError: trying again soon won't help.
        """
        if objection := socket_objection(spec.dirs):
            raise ConfigError(f"cannot start the MPS control daemon: {objection}")
        warning = directories.prepare(spec.dirs)
        if warning and warning != self._warned:
            self._warned = warning
            log.warning("MPS pipe directory is closed to host processes", gpu=spec.uuid, reason=warning)
        if running := self.find(spec):
            return running
        self.kill(spec, None, ())  # servers of a daemon that died keep the GPU from the next
        directories.clear_stale(spec.dirs)
        process.start(self._binary, spec.environment, spec.dirs, self.START_S, multiuser=os.geteuid() == 0)
        identity = process.find_started(spec.dirs, self._boot_id)
        self._state.record_daemon(spec.uuid, identity)
        return Running(identity, adopted=False)

    def configure(self, spec: DaemonSpec) -> str:
        """Has the limit in force for clients to come, read back; returns what is short of perfect, or nothing."""
        size_bytes = spec.pinned_limit_bytes
        self._ask(spec, protocol2.set_default_limit(size_bytes))
        self._check_default(spec)
        notes = []
        for server in protocol2.parse_pids(self._ask(spec, protocol2.GET_SERVERS)):
            # Servers keep the default of their start, so one that runs is raised (or lowered) for its new clients.
            try:
                if not self._server_has(spec, server):
                    self._ask(spec, protocol2.set_server_limit(server, size_bytes))
                    if not self._server_has(spec, server):
                        raise TransientError(f"cannot set the memory limit of the running MPS server {server}")
            except ProtocolError as error:
                # What drivers answer here is not documented. The default holds; a limit per container lowers it.
                notes.append(f"the limit of the running MPS server {server} is not proven: {error}")
        return "; ".join(notes)

    def probe(self, spec: DaemonSpec) -> None:
        """A query answered now, with the value expected now. One process each time: it runs for ever on every GPU."""
        self._check_default(spec)

    def clients(self, spec: DaemonSpec) -> MpsClients:
        """Asks the daemon who is connected."""
        servers = protocol2.parse_pids(self._ask(spec, protocol2.GET_SERVERS))
        clients: list[int] = []
        for server in servers:
            clients += protocol2.parse_pids(self._ask(spec, protocol2.get_clients(server)))
        return MpsClients(servers, tuple(dict.fromkeys(clients)))

    def quit(self, spec: DaemonSpec, timeout_s: float) -> None:
        """Asks the daemon to end, clients or not."""
        self._control.ask(spec.dirs, protocol2.quit_after(max(1, int(timeout_s / 2))), timeout_s)

    def terminate(self, identity: DaemonIdentity) -> None:
        """SIGTERM to the daemon's process group."""
        process.signal_group(identity, signal.SIGTERM)

    def kill(self, spec: DaemonSpec, identity: DaemonIdentity | None, servers: tuple[ProcessIdentity, ...]) -> None:
        """Ends the daemon, its group and every server that survives, and waits until they are gone.

        Raises:
            TransientError: naming what lives on.
        """
        if identity is not None:
            process.signal_group(identity, signal.SIGKILL)
        known: tuple[ProcessIdentity | DaemonIdentity, ...] = servers if identity is None else (identity, *servers)
        left = process.kill_and_wait(lambda: (*known, *process.members(spec.uuid, spec.dirs.pipe)), self.KILL_S)
        if left:
            raise TransientError(f"cannot end pid {', '.join(map(str, left))} of the MPS daemon")
        self._state.record_daemon(spec.uuid, None)
        directories.clear_stale(spec.dirs)

    def remove(self, spec: DaemonSpec) -> None:
        """Removes the pipe directory of a daemon that is gone."""
        directories.remove(spec.dirs)

    def _check_default(self, spec: DaemonSpec) -> None:
        reply = self._ask(spec, protocol2.GET_DEFAULT_LIMIT)
        if not protocol2.limit_is(reply, spec.pinned_limit_bytes):
            raise TransientError(
                f"cannot rely on the memory limit: set to {spec.pinned_limit_bytes >> 20}M, "
                f"read back as {reply.strip()[:40]}"
            )

    def _server_has(self, spec: DaemonSpec, server: int) -> bool:
        return protocol2.limit_is(self._ask(spec, protocol2.get_server_limit(server)), spec.pinned_limit_bytes)

    def _ask(self, spec: DaemonSpec, command: str) -> str:
        return self._control.ask(spec.dirs, command, self._query_s)
