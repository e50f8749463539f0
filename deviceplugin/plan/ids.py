"""Advertised device IDs: `<group>::<slot>`, the group being a GPU's UUID or the name of a declared group or of a set
(pure).

IDs are at most 63 characters (the limit the kubelet's API comment states) and stay the same over restarts, reboots and
reloads, so that a kubelet finds its allocations again.
"""

from mpsd.common.errors import ProtocolError

MAX_LENGTH = 63
SEPARATOR = "::"


def device_id(group: str, slot: int) -> str:
    """The ID of one slot of a resource on a group."""
    return f"{group}{SEPARATOR}{slot}"


def group_of(identifier: str) -> str:
    """The group that an ID names. Raises ProtocolError when it is not one of ours."""
    group, separator, slot = identifier.rpartition(SEPARATOR)
    if not separator or not group or not (slot.isascii() and slot.isdigit()) or len(identifier) > MAX_LENGTH:
        raise ProtocolError(f"cannot read device ID {identifier[:80]!r}: expected <GPU UUID or group>::<number>")
    return group


def groups_of(device_ids: tuple[str, ...]) -> tuple[str, ...]:
    """The groups that IDs name, each once, in the order they first appear. Raises ProtocolError for a foreign ID."""
    return tuple(dict.fromkeys(group_of(identifier) for identifier in device_ids))


def slot_of(identifier: str) -> int:
    """The slot number of an ID of ours."""
    return int(identifier.rpartition(SEPARATOR)[2])
