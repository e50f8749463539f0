"""Protocol 2: the daemon's default limit, set for each of its GPUs, is what clients get."""

import os
from collections.abc import Mapping

from mpsd.common.errors import ProtocolError, TransientError
from mpsd.common.reason import Reason, joined
from mpsd.daemon import protocol2
from mpsd.daemon.control import ControlClient
from mpsd.daemon.controller import QUERY_S, TERMINATE_CLIENT_S, Configured, MpsClients, check_client
from mpsd.daemon.plan import DaemonSpec
from mpsd.localapi.reasons import DaemonCode


class Controller2:
    """`Controller` of protocol 2."""

    def __init__(self, control: ControlClient, query_s: float = QUERY_S) -> None:
        self._control = control
        self._query_s = query_s

    def start_arguments(self, spec: DaemonSpec, *, multiuser: bool) -> tuple[str, ...]:
        """See Controller."""
        return ("-d", "-multiuser-server") if multiuser else ("-d",)

    def prepare(self, spec: DaemonSpec) -> None:
        """Nothing: this protocol has no config file."""

    def configure(self, spec: DaemonSpec) -> Configured:
        """See Controller. Nothing is `attached` by name: all clients have the same limit."""
        ordinals = range(len(spec.gpus))
        for ordinal in ordinals:
            self._ask(spec, protocol2.set_default_limit(ordinal, spec.pinned_limit_bytes))
            self._check_default(spec, ordinal)
        # Servers keep the defaults of their start, so one that runs is raised (or lowered) for its new clients.
        notes: list[Reason] = []
        for server in self._servers(spec):
            try:
                for ordinal in ordinals:
                    self._limit_server(spec, server, ordinal)
            except ProtocolError as error:
                # What drivers answer here is not documented. The default holds; a limit per container lowers it.
                text = f"the limit of the running MPS server {server} is not proven: {error}"
                notes.append(Reason(DaemonCode.LIMIT_NOT_PROVEN, text))
        return Configured(joined(notes))

    def probe(self, spec: DaemonSpec, *, servers: bool) -> Mapping[str, Reason]:
        """See Controller. One process for each GPU; with `servers` one for their list and one for each of them."""
        for ordinal in range(len(spec.gpus)) if spec.pinned_limit_bytes else ():
            self._check_default(spec, ordinal)
        for server in self._servers(spec) if servers or not spec.pinned_limit_bytes else ():
            if protocol2.is_fault(self._ask(spec, protocol2.get_status(server))):
                raise TransientError(
                    f"cannot rely on MPS server {server}: a client's fault keeps new ones out until all that have the "
                    "error are gone: end them"
                )
        return {}

    def hold_server(self, spec: DaemonSpec) -> None:
        """See Controller. Where any user's clients share one server it is root's, as we are then (MPS architecture)."""
        servers, said = self._servers(spec), ""
        if not servers:
            said = self._ask(spec, protocol2.start_server(os.geteuid())).strip()[:200]
            servers = self._servers(spec)
        if not servers:
            reply = f" (it said {said})" if said else ""
            raise TransientError(
                f"the MPS daemon has no server after it was told to start one{reply}: its log says why; a process that "
                "skipped MPS and has the GPU keeps servers out"
            )
        if all(protocol2.is_starting(self._ask(spec, protocol2.get_status(server))) for server in servers):
            raise TransientError(f"the MPS server {servers[0]} is still starting")

    def clients(self, spec: DaemonSpec) -> MpsClients:
        """See Controller."""
        servers = self._servers(spec)
        clients = (pid for server in servers for pid in self._clients(spec, server))
        return MpsClients(servers, tuple(dict.fromkeys(clients)))

    def terminate_client(self, spec: DaemonSpec, pid: int) -> None:
        """See Controller."""
        clients = {client: server for server in self._servers(spec) for client in self._clients(spec, server)}
        check_client(spec, pid, clients)
        server = clients[pid]
        reply = self._control.ask(spec.dirs, protocol2.terminate_client(server, pid), TERMINATE_CLIENT_S)
        if not protocol2.is_terminated(reply):
            said = reply.strip()[:200] or "nothing"
            raise TransientError(f"cannot terminate MPS client {pid}: server {server} said {said}")

    def quit(self, spec: DaemonSpec, timeout_s: float) -> None:
        """See Controller."""
        self._control.ask(spec.dirs, protocol2.quit_after(max(1, int(timeout_s / 2))), timeout_s)

    def _check_default(self, spec: DaemonSpec, ordinal: int) -> None:
        reply = self._ask(spec, protocol2.get_default_limit(ordinal))
        # A daemon that was set nothing shows nothing.
        if not reply.strip() or not protocol2.limit_is(reply, spec.pinned_limit_bytes):
            limit = f"limit {spec.pinned_limit_bytes >> 20}M" + (f" of GPU {ordinal}" if len(spec.gpus) > 1 else "")
            raise TransientError(f"cannot cap memory: {limit} was set but reads back as {reply.strip()[:40] or 'none'}")

    def _limit_server(self, spec: DaemonSpec, server: int, ordinal: int) -> None:
        # Set also where it reads as wanted: what is read may be rounded.
        self._ask(spec, protocol2.set_server_limit(server, ordinal, spec.pinned_limit_bytes))
        reply = self._ask(spec, protocol2.get_server_limit(server, ordinal))
        if not protocol2.limit_is(reply, spec.pinned_limit_bytes):
            raise TransientError(f"cannot set the memory limit of the running MPS server {server}")

    def _servers(self, spec: DaemonSpec) -> tuple[int, ...]:
        return protocol2.parse_pids(self._ask(spec, protocol2.GET_SERVERS))

    def _clients(self, spec: DaemonSpec, server: int) -> tuple[int, ...]:
        return protocol2.parse_pids(self._ask(spec, protocol2.get_clients(server)))

    def _ask(self, spec: DaemonSpec, command: str) -> str:
        return self._control.ask(spec.dirs, command, self._query_s)
