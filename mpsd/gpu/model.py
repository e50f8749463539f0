"""What we know of a GPU: frozen values, shared by both processes and sent over the local socket."""

from enum import StrEnum

import msgspec

from mpsd.common.ranges import Bytes, Count, Name
from mpsd.common.reason import Reason

MIB = 1024 * 1024


class Mode(StrEnum):
    """How the containers on one GPU share its compute. A GPU holds one mode at a time."""

    SM_SHARING = "sm-sharing"
    TIME_SLICING = "time-slicing"


class ComputeMode(StrEnum):
    """The driver's compute mode of a GPU (nvmlComputeMode_t, names as nvidia-smi prints them)."""

    DEFAULT = "DEFAULT"
    EXCLUSIVE_PROCESS = "EXCLUSIVE_PROCESS"
    PROHIBITED = "PROHIBITED"
    UNKNOWN = "UNKNOWN"


class GpuHealth(StrEnum):
    """OK: usable. SICK: it answers, but a critical XID was seen. UNRESPONSIVE: calls hang. LOST: gone from the bus."""

    OK = "ok"
    SICK = "sick"
    UNRESPONSIVE = "unresponsive"
    LOST = "lost"


class GpuInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one GPU that do not change while the driver is loaded. Memory in bytes. `index` is the driver's."""

    uuid: Name
    index: Count
    name: str
    memory_total_bytes: Bytes
    memory_reserved_bytes: Bytes = 0
    compute_capability: tuple[int, int] = (0, 0)
    numa_node: int | None = None
    pci_bus_id: str = ""
    mig_enabled: bool = False
    config_index: Count | msgspec.UnsetType | None = msgspec.UNSET
    """The index that means it in the config: None where its own means another GPU there; not set: its own."""

    def is_named(self, ref: int | str) -> bool:
        """Whether an index or UUID in the config means this GPU."""
        index = self.index if self.config_index is msgspec.UNSET else self.config_index
        return ref in (self.uuid, index)


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a compute context on a GPU, as the driver reports it. `used_bytes` is None where it can't say."""

    pid: int
    used_bytes: int | None = None


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """One probe of one GPU: its facts, its health with a reason (None when OK), compute mode and processes.

    `processes_told`: whether the driver lists processes; where it does not, none in the list proves nothing.
    `read_s` is when the driver was asked for all this (monotonic), None when not known. It is no news by itself.
    """

    info: GpuInfo
    health: GpuHealth = GpuHealth.OK
    reason: Reason | None = None
    compute_mode: ComputeMode = ComputeMode.UNKNOWN
    processes: tuple[GpuProcess, ...] = ()
    processes_told: bool = True
    read_s: float | None = None


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of the node, ordered by index, and the driver. `reason` says why there are none or some are missing.
    `never_seen`: how many the driver counts that nobody could read since mpsd started, and that have no name so."""

    driver_version: str | None = None
    gpus: tuple[GpuState, ...] = ()
    reason: Reason | None = None
    never_seen: int = 0
