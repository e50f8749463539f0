"""The one way to GPUs: what the prober needs of NVML, small enough to simulate and to fake."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mpsd.common.errors import GpufracError
from mpsd.gpu.model import ComputeMode, GpuInfo, GpuProcess


class GpuError(GpufracError):
    """A GPU call failed. `code` is the NVML return code, or None where there is none."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class GpuLostError(GpuError):
    """The GPU fell off the bus (NVML 15 GPU_IS_LOST, 16 RESET_REQUIRED, 28 GPU_NOT_FOUND) or vanished."""


class GpuNotSupportedError(GpuError):
    """This driver or GPU does not offer the call (NVML 3 NOT_SUPPORTED, 13 FUNCTION_NOT_FOUND)."""


class NoLimitError(GpuError):
    """There is no limit to read, or none can be set there (NVML 6 NOT_FOUND): no limit on the cgroup or near it, or a
    cgroup without dmem files."""


class MemoryLimits(NamedTuple):
    """Limits of a cgroup on one GPU. `hard_bytes` None: no ceiling. `used_bytes`: charged to it and below it."""

    soft_bytes: int
    hard_bytes: int | None
    used_bytes: int = 0


class XidEvent(NamedTuple):
    """A critical XID, as the driver reports it."""

    uuid: str
    xid: int


class GpuBackend(Protocol):
    """Blocking calls, safe from several threads; any may hang, so callers bring their own deadline."""

    @property
    def cgroup_root(self) -> str:
        """Where the cgroups are whose limits it knows: the top of the cgroup v2 hierarchy."""

    def open(self) -> None:
        """Initialise. Raises GpuError with the reason (library missing, driver not loaded ...). May be called again."""

    def close(self) -> None:
        """Release the library; never raises."""

    def driver_version(self) -> str:
        """E.g. `580.95.05`. Raises GpuError."""

    def uuids(self) -> Sequence[str]:
        """UUIDs by NVML index; an unreadable GPU is left out. Raises GpuError when the count itself can't be read."""

    def unnamed(self) -> int:
        """How many GPUs the last `uuids` left out."""

    def info(self, uuid: str) -> GpuInfo:
        """Facts of one GPU; what is NOT_SUPPORTED takes its default. Raises GpuError, GpuLostError."""

    def compute_mode(self, uuid: str) -> ComputeMode:
        """The driver's compute mode. Raises GpuError."""

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        """Needs root. Raises GpuError."""

    def processes(self, uuid: str) -> Sequence[GpuProcess]:
        """Processes with a compute context, MPS clients included. Raises GpuError."""

    def recovery_action(self, uuid: str) -> int:
        """What the driver asks for to make the GPU well, see `recovery`. Raises GpuNotSupportedError, GpuError."""

    def memory_limits(self, uuid: str, cgroup: str) -> MemoryLimits:
        """Limits in force for a cgroup, by its whole directory. Raises NoLimitError, GpuNotSupportedError, GpuError."""

    def set_memory_limits(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        """Sets both; soft 0 and hard None clear them. Needs root. Raises the same."""

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        """Blocks for the next critical XID, None after the time. GpuNotSupportedError where no events are offered."""
