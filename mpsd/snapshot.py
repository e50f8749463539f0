"""What mpsd publishes and what it is told: immutable values on the local socket.

`Snapshot` flows from mpsd to the plugin and the CLI; `Desired` flows from the plugin to mpsd, always whole
(level-triggered), so losing one message costs nothing.
"""

from enum import StrEnum

import msgspec

from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo, Mode


class DaemonState(StrEnum):
    """States of one MPS control daemon. Only READY may be relied on: a query answered and every limit was read back."""

    ABSENT = "absent"
    STARTING = "starting"
    CONFIGURING = "configuring"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    KILLING = "killing"
    BACKOFF = "backoff"
    FAILED = "failed"


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One control daemon. `pinned_limit_bytes` is the default limit as read back, None until then."""

    state: DaemonState
    reason: str = ""
    since_unix_s: float = 0.0
    protocol: int = 2
    pid: int | None = None
    pipe_directory: str = ""
    log_directory: str = ""
    pinned_limit_bytes: int | None = None
    restarts: int = 0


class GpuClient(msgspec.Struct, frozen=True, kw_only=True):
    """A process on the GPU. `allocation_key` is from the marker in its environment or an ancestor's; None: not ours."""

    pid: int
    allocation_key: str | None = None
    mps: bool = True
    used_bytes: int | None = None


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as mpsd sees it. `not_shared` says why it is left alone (MIG, excluded), empty when it is ours.

    `mode` is the mode applied now (None: idle); `driver_compute_mode` the one read from the driver.
    """

    info: GpuInfo
    health: GpuHealth
    reason: str = ""
    not_shared: str = ""
    mode: Mode | None = None
    driver_compute_mode: ComputeMode = ComputeMode.UNKNOWN
    daemon: DaemonStatus | None = None
    clients: tuple[GpuClient, ...] = ()

    @property
    def foreign_processes(self) -> tuple[int, ...]:
        """PIDs with a context on this GPU that hold no allocation of ours."""
        return tuple(c.pid for c in self.clients if c.allocation_key is None)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The node as mpsd sees it. `generation` grows by one per change and restarts with `instance`."""

    instance: str
    generation: int
    driver_version: str | None = None
    gpus: tuple[GpuStatus, ...] = ()
    reason: str = ""
    """Why there are no GPUs, or what keeps mpsd from seeing all; empty when fine."""
    config_error: str = ""
    """The error of a config file that was refused on reload; empty when the file is in force."""
    backend: str = "nvml"
    started_unix_s: float = 0.0


class GpuClients(msgspec.Struct, frozen=True, kw_only=True):
    """Who uses one GPU, looked up just now; `error` says why that can't be told: then `clients` means nothing."""

    clients: tuple[GpuClient, ...] = ()
    error: str = ""


class DesiredGpu(msgspec.Struct, frozen=True, kw_only=True):
    """What the plugin wants of one GPU: the mode its allocations are bound to, None when it holds none, and the largest
    limit among them, which the daemon's default must not be below, whatever the config says by now."""

    uuid: str
    mode: Mode | None = None
    limit_bytes: int = 0


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[DesiredGpu, ...] = ()
