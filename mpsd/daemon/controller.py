"""One control interface over both MPS protocols: what is done to a daemon that runs, whatever it speaks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from mpsd.common.errors import TransientError
from mpsd.common.reason import Reason
from mpsd.daemon.plan import DaemonSpec

QUERY_S = 5.0
"""Deadline of one command."""

TERMINATE_CLIENT_S = 30.0
"""Deadline of the command that takes a client's contexts away: it waits for the GPU work under way. Later than that the
server counts as wedged (kai-scheduler gpu-fractioning allows the same)."""


class NotAClientError(TransientError):
    """The daemon answered, and the process is no client of it."""


@dataclass(frozen=True, slots=True)
class Configured:
    """What is in force. `note` says what is short of perfect.

    Protocol 3: `attached` are the wanted namespaces whose limits were read back and whose socket is there, and the
    directories that have a link to the wanted socket; `refused` has the others, with reasons.
    """

    note: Reason | None = None
    attached: frozenset[str] = frozenset()
    refused: Mapping[str, Reason] = field(default_factory=dict)

    def without(self, objections: Mapping[str, Reason]) -> "Configured":
        """The same, but these namespaces are refused."""
        return replace(self, attached=self.attached - objections.keys(), refused={**self.refused, **objections})


@dataclass(frozen=True, slots=True)
class MpsClients:
    """Servers of a daemon and the clients of all of them (PIDs as the daemon sees them)."""

    servers: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()


class Controller(Protocol):
    """Speaks one protocol. Methods raise TransientError, or ProtocolError for replies that make no sense."""

    def start_arguments(self, spec: DaemonSpec, *, multiuser: bool) -> tuple[str, ...]:
        """Arguments of the control binary that start the daemon in the background.

        Args:
            multiuser: clients of any user share a server owned by root.
        """
        ...

    def prepare(self, spec: DaemonSpec) -> None:
        """Writes what the daemon reads at its start."""
        ...

    def configure(self, spec: DaemonSpec) -> Configured:
        """Has the limits in force for clients to come, read back."""
        ...

    def probe(self, spec: DaemonSpec, *, servers: bool) -> Mapping[str, Reason]:
        """Queries answered now, with the values expected now. A limit of 0: none is expected, an answer is enough.

        Args:
            servers: whether the state of each server is asked, too.

        Returns:
            Why single namespaces can't be relied on, by name: whoever is in one may have spoilt it, and that must not
            touch the others. What is wrong with the daemon as a whole is raised.
        """
        ...

    def hold_server(self, spec: DaemonSpec) -> None:
        """Has a server that is up, clients or not: while one is, an EXCLUSIVE_PROCESS GPU is closed to who skips MPS.

        Raises:
            TransientError: there is none yet.
        """
        ...

    def clients(self, spec: DaemonSpec) -> MpsClients:
        """Who is connected."""
        ...

    def terminate_client(self, spec: DaemonSpec, pid: int) -> None:
        """Takes a client's contexts away, so that killing it afterwards harms nobody else.

        Raises:
            NotAClientError: the daemon knows all of its clients, and it is none of them.
        """
        ...

    def quit(self, spec: DaemonSpec, timeout_s: float) -> None:
        """Asks the daemon to end, clients or not."""
        ...


def check_client(spec: DaemonSpec, pid: int, clients: Collection[int]) -> None:
    """Raises NotAClientError where a process is none of these clients, TransientError where that can't be told."""
    if pid not in clients:
        if 0 in clients:
            raise TransientError(
                f"cannot terminate pid {pid}: the MPS daemon of {spec.name} knows clients by PID 0 only"
            )
        raise NotAClientError(f"cannot terminate pid {pid}: it is no client of the MPS daemon of {spec.name}")
