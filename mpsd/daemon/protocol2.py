"""The control daemon's protocol 2 as text: commands to send, replies to typed values (pure, bounded).

A front end exits 0 also when the daemon refused the command, and a refusal is text on stdout
(nvidia-cuda-mps-control(1)). So a reply is judged by its content only, and what was set is read back.
"""

import re

from mpsd.common.errors import ProtocolError
from mpsd.gpu.model import MIB

GET_SERVERS = "get_server_list"

_LIMIT = re.compile(r"([0-9]{1,12})([GM])")


# GPUs are named by the daemon's ordinals: limits keyed by UUID were once not applied, and are stored apart from those
# keyed by ordinal (legacy MPS v2 interface, r615).


def set_default_limit(ordinal: int, size_bytes: int) -> str:
    """Limits clients of servers to come on one GPU. Whole MiB, rounded down."""
    return f"set_default_device_pinned_mem_limit {ordinal} {size_bytes // MIB}M"


def get_default_limit(ordinal: int) -> str:
    return f"get_default_device_pinned_mem_limit {ordinal}"


def set_server_limit(server: int, ordinal: int, size_bytes: int) -> str:
    """Limits new clients of a running server; may be more than the default."""
    return f"set_device_pinned_mem_limit {server} {ordinal} {size_bytes // MIB}M"


def get_server_limit(server: int, ordinal: int) -> str:
    return f"get_device_pinned_mem_limit {server} {ordinal}"


def start_server(uid: int) -> str:
    """Starts a server for clients of this user, before any of them comes. Its reply is not documented."""
    return f"start_server -uid {uid}"


def get_status(server: int) -> str:
    return f"get_server_status {server}"


def get_clients(server: int) -> str:
    return f"get_client_list {server}"


def terminate_client(server: int, pid: int) -> str:
    """Takes a client's contexts away; its process lives on with an error for good."""
    return f"terminate_client {server} {pid}"


def quit_after(timeout_s: int) -> str:
    """Ends the daemon; servers with clients are ended by force after that time. Without it, it waits for ever."""
    return f"quit -t {timeout_s}"


def parse_pids(reply: str) -> tuple[int, ...]:
    """PIDs, one a line; none is an empty reply. Raises ProtocolError."""
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    if not all(line.isascii() and line.isdigit() and len(line) < 10 for line in lines):
        raise _nonsense("a list of PIDs", reply)
    return tuple(int(line) for line in lines)


def is_fault(reply: str) -> bool:
    """Whether a server's status says that a client brought it down: it takes no new ones until those with the error are
    gone (MPS architecture, r615). Other words for a status are not all documented, and none of them is a fault."""
    return reply.strip().upper() == "FAULT"


def is_starting(reply: str) -> bool:
    """Whether a server's status says that it is not up yet."""
    return reply.strip().upper() == "INITIALIZING"


def is_terminated(reply: str) -> bool:
    """Whether `terminate_client` did it: its reply is a CUresult, 0 for success."""
    return reply.strip() == "0"


def limit_is(reply: str, size_bytes: int) -> bool:
    """Whether a limit read back is the one set, or its documented rounding.

    Driver 595 shows a limit of 1 GiB or more in whole `G`, rounded down (595.91.07, public test recording).

    Raises:
        ProtocolError: the reply is no limit at all.
    """
    match = _LIMIT.fullmatch(reply.strip())
    if match is None:
        raise _nonsense("a memory limit", reply)
    number, size_mib = int(match[1]), size_bytes // MIB
    return number == size_mib if match[2] == "M" else 0 < number == size_mib // 1024


def _nonsense(expected: str, reply: str) -> ProtocolError:
    return ProtocolError(f"cannot read the MPS control daemon's reply {reply.strip()[:200]!r}: expected {expected}")
