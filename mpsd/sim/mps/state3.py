"""Servers and namespaces of protocol 3, and the values that their commands take. Pure."""

from __future__ import annotations

from mpsd.sim.mps.views import ClientView, Limit, Refused, ServerView
from mpsd.sim.pinnedlimits import parse_size

DEFAULT = "default"
"""The namespace that every server has; its limits are the server's."""

_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")


class Namespace:
    """A named set of limits inside a server. None: not limited."""

    __slots__ = ("limit", "name", "percent", "priority")

    def __init__(self, name: str) -> None:
        self.name = name
        self.limit: Limit | None = None
        self.percent = 100.0
        self.priority = 0


class Server3:
    """A named server. `process` is None while none runs for it."""

    def __init__(self, name: str, uid: int) -> None:
        self.name = name
        self.uid = uid
        self.allowed_devices = ""
        self.namespaces = {DEFAULT: Namespace(DEFAULT)}
        self.process: ServerView | None = None

    def clients(self, namespace: str | None = None) -> list[ClientView]:
        """Its clients, or those of one namespace."""
        clients = self.process.clients.values() if self.process is not None else ()
        return [client for client in clients if namespace in (None, client.namespace)]


def check_name(kind: str, name: str) -> None:
    """Raises Refused, as do the functions below."""
    if not 0 < len(name) <= 64 or not _NAME_LETTERS.issuperset(name):
        raise Refused(f"Invalid {kind} name '{name}': 1 to 64 of a-z, 0-9 and _")


def read_number(what: str, text: str) -> int:
    """A whole number."""
    if not (text.isascii() and text.isdigit()):
        raise Refused(f"Invalid {what} '{text}'")
    return int(text)


def read_size(text: str) -> int:
    """Bytes of a pinned memory limit."""
    size_bytes = parse_size(text)
    if not size_bytes:
        raise Refused(f"Invalid pinned memory limit '{text}'")
    return size_bytes


def read_percentage(text: str) -> float:
    """An active thread percentage."""
    number = text.replace(".", "", 1)
    if not (number.isascii() and number.isdigit() and 1 <= float(text) <= 100):
        raise Refused(f"Invalid active thread percentage '{text}': 1 to 100")
    return float(text)


def read_truth(what: str, text: str) -> bool:
    """`true` or `false`."""
    if text not in ("true", "false"):
        raise Refused(f"Invalid {what} '{text}': true or false")
    return text == "true"


def read_field(text: str, fields: tuple[str, ...]) -> str:
    """A field by either spelling: documents write dashes, a shipped agent underscores."""
    field = text.replace("_", "-")
    if field not in fields:
        raise Refused(f"Unknown field '{text}'. Fields: {' '.join(fields)}")
    return field
