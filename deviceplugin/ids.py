"""Advertised device IDs: `<GPU UUID>::<slot>` (pure).

IDs are at most 63 characters (the limit the kubelet's API comment states) and stay the same over restarts, reboots and
reloads, so that a kubelet finds its allocations again.
"""

from mpsd.errors import ProtocolError

MAX_LENGTH = 63
SEPARATOR = "::"


def device_id(gpu: str, slot: int) -> str:
    """The ID of one slot of a resource on a GPU."""
    return f"{gpu}{SEPARATOR}{slot}"


def gpu_of(identifier: str) -> str:
    """The GPU part of an ID. Raises ProtocolError when it is not one of ours."""
    gpu, separator, slot = identifier.rpartition(SEPARATOR)
    if not separator or not gpu or not (slot.isascii() and slot.isdigit()) or len(identifier) > MAX_LENGTH:
        raise ProtocolError(f"cannot read device ID {identifier[:80]!r}: expected <GPU UUID>::<number>")
    return gpu


def slot_of(identifier: str) -> int:
    """The slot number of an ID of ours."""
    return int(identifier.rpartition(SEPARATOR)[2])
