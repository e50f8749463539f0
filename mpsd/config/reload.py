"""The one table of what a changed config file does: which field takes effect where, and when (pure).

Both processes take a new file in by `merge`, and docs/config.md shows the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from msgspec import structs

from mpsd.config.model import NodeConfig
from mpsd.config.show import differing


class Process(StrEnum):
    """Who reads the file."""

    MPSD = "mpsd"
    PLUGIN = "plugin"


class When(Enum):
    """When a changed field takes effect in a process."""

    AT_ONCE = "at once"
    NEXT_DAEMON = "with the next daemon there"
    RESTART = "when it is restarted"
    RESTART_THEN_DAEMON = "when it is restarted, for daemons started from then on"
    UNREAD = "-"

    @property
    def waits(self) -> bool:
        """Whether a running process keeps what it has, and says so."""
        return self in (When.RESTART, When.RESTART_THEN_DAEMON)


@dataclass(frozen=True, slots=True)
class Row:
    """One field: its key in the file and its path in NodeConfig, with dots."""

    key: str
    field: str
    mpsd: When
    plugin: When

    def when(self, process: Process) -> When:
        """When the field takes effect in that process."""
        return self.mpsd if process is Process.MPSD else self.plugin


_NOW, _RESTART, _DAEMON, _UNREAD = When.AT_ONCE, When.RESTART, When.RESTART_THEN_DAEMON, When.UNREAD

TABLE = (
    Row("resources", "resources", _NOW, _NOW),
    Row("gpus", "gpus", _NOW, _NOW),
    Row("gpus.groups", "groups", When.NEXT_DAEMON, _NOW),
    Row("gpus.groups", "shared_groups", When.NEXT_DAEMON, _NOW),
    Row("memory.reserve", "memory_reserve_bytes", _NOW, _NOW),
    Row("enforcement.minimum", "enforcement_minimum", _NOW, _NOW),
    Row("enforcement.enableDmem", "enable_dmem", _NOW, _UNREAD),
    Row("enforcement.leaks", "leaks", _NOW, _UNREAD),
    Row("mps.protocol", "mps.protocol", _DAEMON, _NOW),
    Row("mps.binary", "mps.binary", _DAEMON, _UNREAD),
    Row("mps.driverRoot", "mps.driver_root", _DAEMON, _UNREAD),
    Row("mps.runRoot", "mps.run_root", _RESTART, _RESTART),
    Row("mps.logRoot", "mps.log_root", _RESTART, _RESTART),
    Row("mps.sharedMemory", "mps.shared_memory", _DAEMON, _RESTART),
    Row("mps.clientLimit", "mps.client_limit", _RESTART, _NOW),
    Row("mps.onWedge", "mps.on_wedge", _RESTART, _UNREAD),
    Row("mps.prohibitWhileDown", "mps.prohibit_while_down", _RESTART, _UNREAD),
    Row("mps.writableMount", "mps.writable_mount", _RESTART, _RESTART),
    Row("mps.namespaceMount", "mps.namespace_mount", _RESTART, _RESTART),
    Row("mps.logMaxSize", "mps.log_max_bytes", _RESTART, _UNREAD),
    Row("cdi.directory", "cdi.directory", _UNREAD, _RESTART),
    Row("cdi.gpuDevices", "cdi.gpu_devices", _UNREAD, _NOW),
    Row("cdi.delivery", "cdi.delivery", _UNREAD, _NOW),
    Row("kubelet.root", "kubelet_root", _UNREAD, _RESTART),
    Row("kubelet.devicePlugins", "kubelet_device_plugins", _UNREAD, _RESTART),
    Row("stateRoot", "state_root", _RESTART, _RESTART),
    Row("backend", "backend", _RESTART, _RESTART),
    Row("simulated", "simulated", _RESTART, _RESTART),
    Row("annotations", "annotations", _NOW, _RESTART),
    Row("nri", "nri", _UNREAD, _RESTART),
    Row("kubernetes", "kubernetes", _UNREAD, _RESTART),
    Row("metrics.address", "metrics_address", _UNREAD, _RESTART),
)


def merge(process: Process, old: NodeConfig, new: NodeConfig) -> tuple[NodeConfig, tuple[str, ...]]:
    """The config that a running process puts in force, and the keys of the new file that wait for its restart."""
    merged: Any = new
    for row in TABLE:
        if row.when(process).waits:
            merged = _keep(row.field.split("."), old, merged)
    return merged, differing(merged, new)


def _keep(path: list[str], old: Any, new: Any) -> Any:
    """`new` with the field at this path as it is in `old`."""
    name, *below = path
    before = getattr(old, name)
    return structs.replace(new, **{name: _keep(below, before, getattr(new, name)) if below else before})


def render() -> Iterator[str]:
    """The lines of the table, as Markdown. Keys that take effect alike share a line."""
    yield "| key | in mpsd | in the plugin |"
    yield "|---|---|---|"
    keys: dict[tuple[When, When], list[str]] = {}
    for row in TABLE:
        keys.setdefault((row.mpsd, row.plugin), []).append(row.key)
    for (mpsd, plugin), alike in keys.items():
        yield f"| {', '.join(f'`{key}`' for key in alike)} | {mpsd.value} | {plugin.value} |"
