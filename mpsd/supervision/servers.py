"""What a daemon's logs say of its servers: lost to their clients, or dying one after the other (pure)."""

from collections.abc import Mapping
from typing import Literal, Protocol

from mpsd.common.reason import Reason
from mpsd.daemon.logs.parse import (
    ClientConnected,
    Evictions,
    FaultBegun,
    FaultClients,
    FaultEnded,
    LogEvent,
    ServerExited,
)
from mpsd.daemon.logs.restarts import RestartLoop
from mpsd.localapi.reasons import DaemonCode
from mpsd.localapi.snapshot import GpuClient

RECHECK_S = 5.0
"""How often a trouble that ends by time alone is looked at."""
FAULT_SILENCE_S = 60.0
"""A fault whose end was not logged is left to the queries after this time: the logs may have been cut."""

NO_HOST_PIDS = (
    "its clients show PID 0: the MPS daemon is not in the host's PID namespace, so who uses the GPU and who may be "
    "terminated can't be told: run mpsd with hostPID"
)


class DaemonLogs(Protocol):
    """The log files of daemons, by the daemon's name."""

    def add(self, name: str, log_directory: str, protocol: Literal[2, 3]) -> None: ...
    def remove(self, name: str) -> None: ...
    def last_lines(self, name: str) -> tuple[str, ...]: ...


class ServerWatch:
    """Of one daemon. Times are monotonic."""

    def __init__(self) -> None:
        self._loop = RestartLoop()
        self._faulted: dict[int, tuple[float, tuple[int, ...]]] = {}
        """Servers in FAULT: since when, and the clients that the log names."""
        self._evicted: dict[str, int] = {}
        self.nameless_clients = False
        """Whether a client came whose PID the daemon could not tell."""

    def note(self, event: LogEvent, now_s: float) -> None:
        """Takes one event of its logs."""
        self._loop.feed(event, now_s)
        match event:
            case FaultBegun(server):
                self._faulted[server] = (now_s, ())
            case FaultClients(server, pids):
                self._faulted[server] = (now_s, pids)
            case FaultEnded(server):
                self._faulted.clear()
            case ServerExited(pid):
                self._faulted.pop(pid, None)
            case Evictions(device, count):
                self._evicted[device] = count
            case ClientConnected(0):
                self.nameless_clients = True

    def evictions(self, uuid: str) -> int:
        """Clients evicted from a GPU since its daemon was started; those of no named GPU count for each."""
        return self._evicted.get(uuid, 0) + self._evicted.get("", 0)

    def trouble(self, now_s: float, clients: Mapping[int, GpuClient]) -> Reason | None:
        """Why no client can rely on its servers now; None when one can.

        Args:
            clients: those known by PID, for the names of who faulted.
        """
        for server, (since_s, pids) in list(self._faulted.items()):
            if now_s - since_s >= FAULT_SILENCE_S:
                del self._faulted[server]
                continue
            names = ", ".join(_name(pid, clients.get(pid)) for pid in pids[:5])
            who = f": client {names} faulted" if names else ""
            text = f"MPS server {server} is in FAULT until the clients it served have left{who}"
            return Reason(DaemonCode.SERVER_FAULT, text)
        return self._loop.reason(now_s)

    def deadline_s(self, now_s: float) -> float | None:
        """When to ask for `trouble` again though nothing was logged; None: no need."""
        return now_s + RECHECK_S if self._faulted or self._loop.reason(now_s) is not None else None


def _name(pid: int, client: GpuClient | None) -> str:
    if client is None:
        return f"pid {pid}"
    key = f", allocation {client.allocation_key}" if client.allocation_key else ""
    return f"pid {pid} ({client.command or 'unknown'}{key})"
