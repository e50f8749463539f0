"""Who uses a GPU: the driver's processes and the daemon's clients, joined and told apart by our marker."""

from dataclasses import dataclass

import msgspec

from mpsd.common import processes
from mpsd.common.reason import Reason
from mpsd.daemon import process
from mpsd.daemon.adopt import DaemonIdentity, ProcessIdentity
from mpsd.daemon.controller import MpsClients
from mpsd.daemon.host import DaemonHost
from mpsd.daemon.plan import DAEMON_MARKER, DaemonSpec
from mpsd.gpu.backend import GpuBackend, GpuLostError, GpuNotSupportedError
from mpsd.gpu.model import GpuProcess
from mpsd.localapi.reasons import ClientsCode
from mpsd.localapi.snapshot import GpuClient


@dataclass(frozen=True, slots=True)
class Census:
    """A question: who uses this GPU?

    `processes` are what the driver showed, None to ask it now. `ask_daemon`: whether the daemon is fit to be asked;
    where it is not, `mps_pids` are its clients as known before. `simulated`: pods are, too.
    """

    uuid: str
    spec: DaemonSpec
    identity: DaemonIdentity | None
    processes: tuple[GpuProcess, ...] | None
    ask_daemon: bool
    mps_pids: frozenset[int] = frozenset()
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer. `servers` is None when the daemon was not asked. `unknown` says why there may be MPS clients beside
    these, None when there are none."""

    clients: tuple[GpuClient, ...]
    servers: tuple[ProcessIdentity, ...] | None
    unknown: Reason | None = None


def take_census(census: Census, backend: GpuBackend, host: DaemonHost) -> Counted:
    """Clients by PID, without the daemon and its servers, without processes that are gone.

    Raises:
        GpufracError: the driver or the daemon does not say.
    """
    told, listed = _ask_driver(census.uuid, backend) if census.processes is None else (True, census.processes)
    mps = host.clients(census.spec) if census.ask_daemon else MpsClients()
    mps_pids = frozenset(mps.clients) if census.ask_daemon else census.mps_pids
    unknown = None
    if 0 in mps_pids:
        text = "its MPS daemon knows clients by PID 0 only: run mpsd in the host's PID namespace"
        unknown = Reason(ClientsCode.NO_HOST_PIDS, text)
    elif not told and not census.ask_daemon:
        text = "the driver does not list processes, and the MPS daemon can't be asked"
        unknown = Reason(ClientsCode.NOT_LISTED, text)
    used_bytes = {process.pid: process.used_bytes for process in listed}
    own = {*mps.servers, census.identity.pid if census.identity else 0}
    clients = []
    for pid in sorted({*used_bytes, *mps_pids} - own):
        if pid <= 0 or process.identify(pid) is None or _is_server(pid, census):
            continue
        clients.append(
            GpuClient(
                pid=pid,
                allocation_key=processes.marker(pid),
                mps=pid in mps_pids,
                used_bytes=used_bytes.get(pid),
                command=processes.name(pid),
                pod_uid=processes.pod_uid_of(pid, simulated=census.simulated) or "",
            )
        )
    servers = tuple(known for pid in mps.servers if (known := process.identify(pid)) is not None)
    return Counted(tuple(clients), servers if census.ask_daemon else None, unknown)


def with_usage(clients: tuple[GpuClient, ...], listed: tuple[GpuProcess, ...]) -> tuple[GpuClient, ...]:
    """The same clients with the memory the driver shows now (pure)."""
    used_bytes = {process.pid: process.used_bytes for process in listed}
    return tuple(msgspec.structs.replace(client, used_bytes=used_bytes.get(client.pid)) for client in clients)


def _ask_driver(uuid: str, backend: GpuBackend) -> tuple[bool, tuple[GpuProcess, ...]]:
    """Whether the driver tells, and what. No process has a context on a GPU that is gone."""
    try:
        return True, tuple(backend.processes(uuid))
    except GpuLostError:
        return True, ()
    except GpuNotSupportedError:
        return False, ()


def _is_server(pid: int, census: Census) -> bool:
    """A server the daemon did not list yet: it is in the daemon's process group, or has its environment."""
    if census.identity is not None and process.in_group(pid, census.identity):
        return True
    found = process.candidate(pid)
    environment = found.environment if found is not None else None
    marked = environment is not None and environment.get(DAEMON_MARKER) == census.spec.name
    return marked and not processes.in_a_pod_of_others(pid, simulated=census.simulated)
