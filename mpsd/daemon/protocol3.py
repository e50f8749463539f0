"""The control daemon's protocol 3 as text: its config file, commands to send, replies to typed values (pure).

Tables are asked for as CSV: the default layout cuts wide cells, PIDs among them. Which lines and columns a driver adds
is not all published, so rows are known by what they hold, and other lines are skipped (MPS v3 interface, configuration
file and namespaces, r615; captures on 615 in kai-scheduler gpu-fractioning and ai-dynamo).
"""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpsd.common.errors import ProtocolError
from mpsd.daemon.namespaces import DEFAULT_LIMIT_BYTES, DEFAULT_THREAD_PERCENT, SERVER, Namespace
from mpsd.gpu.model import MIB

FIRST_DRIVER = 615

DEFAULT = Namespace("default", DEFAULT_LIMIT_BYTES, DEFAULT_THREAD_PERCENT)
"""The namespace that every server has."""

LIST_NAMESPACES = ("namespace", "list", f"--server={SERVER}", "--format=csv,noheader")
LIST_SERVERS = ("server", "list", "--format=csv,noheader")
LIST_CLIENTS = ("client", "list", "--all", "--format=csv,noheader")
QUIT = ("-q",)
HELP = ("-p", "3", "-h")

_NOT_RUN, _NOT_LOADED = 126, "error while loading shared libraries"
"""Exit status from which on a shell or a launcher tells that a program did not run, and how ld.so begins."""

_NAME = re.compile(r"[a-z0-9_]{1,64}")
_LIMIT = re.compile(r"([0-9]{1,15})([KMG])(?:i?B)?")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%?")
_UNIT_BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HELP_MODULES = tuple(re.compile(rf"(?<![\w-]){module}(?![\w-])") for module in ("server", "namespace"))


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """A namespace as the daemon shows it, texts as they are."""

    name: str
    status: str
    limit: str
    percent: str


# --- what a node can do ----------------------------------------------------------------------------------------------


def driver_major(version: str) -> int:
    """Major number of a driver version, 0 where it is none."""
    head = version.partition(".")[0]
    return int(head) if head.isascii() and head.isdigit() else 0


def is_offered(help_text: str, returncode: int) -> bool | None:
    """Whether the help of `-p 3` lists the modules that protocol 2 lacks. None: that was no answer of the binary's, as
    it said nothing, was ended, or could not be loaded. Which exit status help has is not documented."""
    if all(module.search(help_text) for module in _HELP_MODULES):
        return True
    ran = 0 <= returncode < _NOT_RUN and _NOT_LOADED not in help_text
    return False if ran and help_text.strip() else None


# --- config file -----------------------------------------------------------------------------------------------------


def config(namespaces: Iterable[Namespace]) -> str:
    """The TOML file of a daemon with one server. It has no key that r615 does not know: any other is an error there.

    The default socket shares no context: whoever connects there has its turns on the GPU, with memory accounted.
    """
    head = f"""[features.memacct]
enabled = true

[features.context-share]
enabled = true
default_socket = "off"

[servers.{SERVER}]
{_limits(DEFAULT)}"""
    return "\n".join((head, *map(table, namespaces)))


def table(namespace: Namespace) -> str:
    """A namespace in the config file."""
    return f"[servers.{SERVER}.namespaces.{namespace.name}]\n{_limits(namespace)}"


def _limits(namespace: Namespace) -> str:
    limit, percent = _limit(namespace), _percent(namespace)
    return f'pinned_memory_limit = "{limit}"\nactive_thread_percentage = "{percent}"\n'


# --- commands --------------------------------------------------------------------------------------------------------


def is_name(name: str) -> bool:
    """Whether MPS takes it as the name of a namespace."""
    return _NAME.fullmatch(name) is not None


def create(name: str) -> tuple[str, ...]:
    return ("namespace", "create", name, f"--server={SERVER}")


def set_limits(namespace: Namespace) -> tuple[str, ...]:
    """Both limits at once; refused while the namespace has a client. One left out would be the whole GPU."""
    return (
        "namespace",
        "set",
        namespace.name,
        f"--server={SERVER}",
        f"--pinned-memory-limit={_limit(namespace)}",
        f"--active-thread-percentage={_percent(namespace)}",
    )


def delete(name: str) -> tuple[str, ...]:
    """Refused while the namespace has a client."""
    return ("namespace", "delete", name, f"--server={SERVER}")


def terminate_client(pid: int) -> tuple[str, ...]:
    """Answered once its GPU work has drained. A second one for the same client fails."""
    return ("client", "terminate", str(pid))


def _limit(namespace: Namespace) -> str:
    return f"{namespace.limit_bytes // MIB}M"


def _percent(namespace: Namespace) -> int:
    return 100 if namespace.thread_percent is None else namespace.thread_percent


# --- replies ---------------------------------------------------------------------------------------------------------


def parse_namespaces(reply: str) -> dict[str, NamespaceRow]:
    """Namespaces of SERVER by name. Columns: name, server, server status, pinned limit, thread percentage, and more."""
    return {
        row[0]: NamespaceRow(row[0], row[2], row[3], row[4])
        for row in _rows(reply)
        if len(row) >= 5 and row[1] == SERVER and is_name(row[0])
    }


def parse_servers(reply: str) -> tuple[int, ...]:
    """PIDs of all servers that run. Columns: name, UID, PID, status, and more."""
    pids = (_pid(row[2]) for row in _rows(reply) if len(row) >= 4)
    return tuple(pid for pid in pids if pid is not None)


def parse_server_names(reply: str) -> frozenset[str]:
    """Names of all servers, whether they run or not. Columns as of `parse_servers`."""
    return frozenset(row[0] for row in _rows(reply) if len(row) >= 4)


def parse_clients(reply: str) -> tuple[int, ...]:
    """PIDs of clients, each once; only the first column is the same in all sources.

    Raises:
        ProtocolError: a row begins with no PID. Overlooked, a client would count as gone.
    """
    pids: dict[int, None] = {}
    for row in _rows(reply):
        pid = _pid(row[0])
        if pid is not None:
            pids[pid] = None
        elif len(row) >= 4 and row[0].lower() != "pid":
            raise ProtocolError(f"cannot read the MPS control daemon's list of clients: {','.join(row)[:200]!r}")
    return tuple(pids)


def is_fault(status: str) -> bool:
    """As protocol 2 calls a server that a client brought down. `Ready` is the only word published for protocol 3."""
    return status.upper() == "FAULT"


def has_limits(row: NamespaceRow, namespace: Namespace) -> bool:
    """Whether both limits read back are the ones set, or their documented rounding: whole `G`, rounded down."""
    return _limit_is(row.limit, namespace.limit_bytes // MIB * MIB) and _percent_is(row.percent, _percent(namespace))


def is_exact(row: NamespaceRow) -> bool:
    """Whether no other limit reads the same. What shows as `8G` may be more."""
    return "G" not in row.limit


def _limit_is(text: str, size_bytes: int) -> bool:
    match = _LIMIT.fullmatch(text)
    if match is None:
        return False  # `unlimited`, as a rule
    number, unit_bytes = int(match[1]), _UNIT_BYTES[match[2]]
    return number > 0 and (
        number * unit_bytes == size_bytes or (match[2] == "G" and number == size_bytes // unit_bytes)
    )


def _percent_is(text: str, percent: int) -> bool:
    match = _PERCENT.fullmatch(text)
    return match is not None and float(match[1]) == percent


def _pid(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _rows(reply: str) -> Iterator[list[str]]:
    """Line by line: a command with a stray quote must not swallow the clients below it."""
    for line in reply.split("\n"):
        text = line.strip()
        try:
            row = next(csv.reader([text]), [])
        except csv.Error:
            row = text.split(",")
        if text:
            yield [cell.strip() for cell in row]
