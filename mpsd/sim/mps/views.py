"""What a control daemon knows of its servers and clients, whatever its protocol."""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it, without the module typing: the front-end imports this
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INITIALIZING, ACTIVE, FAULT = "INITIALIZING", "ACTIVE", "FAULT"


class Refused(Exception):  # noqa: N818 - a reply, not a failure of ours
    """A command was rejected; its text is the reply."""


class ClientView:
    """A client as the daemon knows it. `namespace` is a name of protocol 3."""

    __slots__ = ("device", "namespace", "pid", "uid")

    def __init__(self, pid: int, uid: int, namespace: str = "") -> None:
        self.pid = pid
        self.uid = uid
        self.device = ""
        self.namespace = namespace


class ServerView:
    """A server process as the daemon knows it. `clients` by the id that the daemon gave them."""

    __slots__ = ("clients", "draining", "error", "pid", "state", "uid")

    def __init__(self, pid: int, uid: int) -> None:
        self.pid = pid
        self.uid = uid
        self.state = INITIALIZING
        self.clients: dict[int, ClientView] = {}
        self.draining = False
        self.error = 0
        """CUresult that its start failed with, 0 where it did not say"""


class Limit:
    """A pinned limit with the text it was set by."""

    __slots__ = ("size_bytes", "text")

    def __init__(self, size_bytes: int, text: str) -> None:
        self.size_bytes = size_bytes
        self.text = text


class DeviceView:
    """A GPU that the daemon may use; its ordinal is its place among them."""

    __slots__ = ("name", "pci_bus_id", "uuid")

    def __init__(self, uuid: str, name: str, pci_bus_id: str) -> None:
        self.uuid = uuid
        self.name = name
        self.pci_bus_id = pci_bus_id


class Settings:
    """What a daemon's commands depend on, besides what was commanded before.

    `switch` gives the unknowns; `floor_g` how limits print; `command_of` the command line of a PID; `show_pid` and
    `apply_limit` are where faults come in: the PID shown for one, the limit stored (None: none) for one that is set.
    """

    def __init__(
        self,
        devices: Sequence[DeviceView],
        switch: Callable[[str], str],
        floor_g: bool = False,
        command_of: Callable[[int], str] = str,
        show_pid: Callable[[int], int] = int,
        apply_limit: Callable[[Limit], Limit | None] = lambda limit: limit,
    ) -> None:
        self.devices = devices
        self.switch = switch
        self.floor_g = floor_g
        self.command_of = command_of
        self.show_pid = show_pid
        self.apply_limit = apply_limit

    @property
    def uuids(self) -> list[str]:
        """The devices' UUIDs by ordinal."""
        return [device.uuid for device in self.devices]
