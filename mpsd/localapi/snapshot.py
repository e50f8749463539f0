"""What mpsd publishes and what it is told: immutable values on the local socket.

`Snapshot` flows from mpsd to the plugin and the CLI; `Desired` flows from the plugin to mpsd, always whole
(level-triggered), so losing one message costs nothing.

A reason is two fields here, its message (`reason`, `not_shared`, `error` ...) and beside it its code (`reason_code`
...), both empty where all is well; an older mpsd sends no code. Whoever reads one takes the property with the `Reason`.
"""

from enum import StrEnum

import msgspec

from mpsd.common.ranges import Count, LimitBytes, Line, MpsProtocol, Name, NameOrNone, Percent
from mpsd.common.reason import Reason, reason_of, reasons_of
from mpsd.config.model import NodeConfig
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo, Mode
from mpsd.localapi.reasons import HardLimitCode


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
    """One control daemon, the same for each GPU of its domain.

    `pinned_limit_bytes` is the default limit as read back, None until then; under protocol 3 it is no client's of ours.
    `attached`: under protocol 3, the allocations whose namespace was read back. `unheld`: under protocol 2, why its
    bound GPUs are not closed to whoever skips MPS; empty: they are. `wedged`: it is to be replaced by `mps.onWedge`.
    `last_log` has the daemon's last log lines while it is in trouble.
    """

    state: DaemonState
    name: NameOrNone = ""
    """UUID of its only GPU, or the domain's name."""
    reason: str = ""
    reason_code: str = ""
    since_unix_s: float = 0.0
    protocol: MpsProtocol = 2
    pid: int | None = None
    pipe_directory: str = ""
    log_directory: str = ""
    pinned_limit_bytes: int | None = None
    attached: tuple["Attached", ...] = ()
    unheld: str = ""
    unheld_code: str = ""
    shared_memory: str | None = None
    """The directory that it was given as its /dev/shm and that its clients mount there; empty: it has the node's. None:
    an older mpsd, which does not tell."""
    restarts: int = 0
    wedged: bool = False
    last_log: tuple[str, ...] = ()

    @property
    def why(self) -> Reason | None:
        """Why it is in its state, by `DaemonCode`."""
        return reason_of(self.reason, self.reason_code)

    @property
    def why_unheld(self) -> Reason | None:
        """By `ServerHoldCode`."""
        return reason_of(self.unheld, self.unheld_code)


class Attached(msgspec.Struct, frozen=True):
    """An allocation with a namespace of its own (protocol 3), limits read back. `pipe_directory` is what its container
    mounts; `objection` says why it can't start now, empty when it can."""

    key: str
    pipe_directory: str
    limit_bytes: int
    objection: str = ""
    objection_code: str = ""

    @property
    def why(self) -> Reason | None:
        """Why it can't start now, by `NamespaceCode`."""
        return reason_of(self.objection, self.objection_code)


class GpuClient(msgspec.Struct, frozen=True, kw_only=True):
    """A process on the GPU. `allocation_key` is from the marker in its environment or an ancestor's; None: not ours.
    `command` is its name as the kernel has it, `pod_uid` the pod it belongs to, empty for a process of the host."""

    pid: int
    allocation_key: str | None = None
    mps: bool = True
    used_bytes: int | None = None
    command: str = ""
    pod_uid: str = ""


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as mpsd sees it. `not_shared` says why it is left alone (MIG, excluded), empty when it is ours. `group`
    is the domain that serves it, the GPUs of one MPS daemon: its own UUID, the name of a declared group, or a name made
    for several GPUs.

    `excluded`: the config leaves it out, so that nobody need look after it.

    `mode` is the mode applied now (None: idle); `driver_compute_mode` the one read from the driver.
    """

    info: GpuInfo
    health: GpuHealth
    reason: str = ""
    reason_code: str = ""
    not_shared: str = ""
    not_shared_code: str = ""
    excluded: bool = False
    group: NameOrNone = ""
    mode: Mode | None = None
    driver_compute_mode: ComputeMode = ComputeMode.UNKNOWN
    daemon: DaemonStatus | None = None
    clients: tuple[GpuClient, ...] = ()
    evictions: int = 0
    """Clients that MPS evicted from it since its daemon was started, for others within their guaranteed memory."""
    mode_changes: int = 0
    """How often somebody else changed its compute mode since mpsd started, while it was bound."""

    @property
    def why(self) -> Reason | None:
        """What is wrong with it, by `GpuCode`."""
        return reason_of(self.reason, self.reason_code)

    @property
    def why_not_shared(self) -> Reason | None:
        """Why it is left alone, by `SharingCode`."""
        return reason_of(self.not_shared, self.not_shared_code)

    @property
    def foreign_processes(self) -> tuple[int, ...]:
        """PIDs with a context on this GPU that hold no allocation of ours."""
        return tuple(c.pid for c in self.clients if c.allocation_key is None)


class HardLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this node can hold containers to memory limits by their cgroups (driver r615 or newer).

    `backend`: `dmem` (the kernel's controller) or `misc` (inside the driver), empty where not known. `missing`: each
    thing that is not there, with what to do; empty: limits can be set and hold. `setters` beside the driver (such as
    the toolkit's hook) are the plugin's to find.
    """

    backend: str = ""
    missing: tuple[str, ...] = ("it is not probed yet",)
    missing_codes: tuple[str, ...] = ()

    @property
    def probed(self) -> bool:
        """Whether it was looked at yet."""
        return self != _NOT_PROBED

    @property
    def why_not(self) -> tuple[Reason, ...]:
        """What is missing, by `HardLimitCode`."""
        codes = self.missing_codes if self.probed else (HardLimitCode.NOT_PROBED,)
        return reasons_of(self.missing, codes)


_NOT_PROBED = HardLimits()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The node as mpsd sees it. `generation` grows by one per change and restarts with `instance`."""

    instance: str
    generation: int
    driver_version: str | None = None
    gpus: tuple[GpuStatus, ...] = ()
    reason: str = ""
    """Why there are no GPUs, or what keeps mpsd from seeing all; empty when fine."""
    reason_code: str = ""
    config_error: str = ""
    """The error of a config file that was refused on reload; empty when the file is in force."""
    config_error_code: str = ""
    config_restart_needed: str = ""
    """Sections of the config that changed and take effect when mpsd is restarted."""
    backend: str = "nvml"
    started_unix_s: float = 0.0
    hard_limits: HardLimits = HardLimits()
    cgroup_root: str = "/sys/fs/cgroup"
    """Where container cgroups are, as seen by whoever reads limits."""
    warnings: tuple[str, ...] = ()
    """What is short of perfect on this host, such as daemons that end with mpsd; each says what to do."""
    warning_codes: tuple[str, ...] = ()
    events: dict[str, int] = {}
    """Kind -> how many events mpsd told since it started."""
    events_lost: int = 0
    """How many of them could not be written."""

    @property
    def why(self) -> Reason | None:
        """Why GPUs are missing, by `InventoryCode`."""
        return reason_of(self.reason, self.reason_code)

    @property
    def why_config_refused(self) -> Reason | None:
        """By `ConfigCode`."""
        return reason_of(self.config_error, self.config_error_code)

    @property
    def shortfalls(self) -> tuple[Reason, ...]:
        """The warnings, by `WarningCode` and others."""
        return reasons_of(self.warnings, self.warning_codes)


class GpuClients(msgspec.Struct, frozen=True, kw_only=True):
    """Who uses one GPU, looked up just now; `error` says why that can't be told: then `clients` means nothing."""

    clients: tuple[GpuClient, ...] = ()
    error: str = ""
    error_code: str = ""

    @property
    def why(self) -> Reason | None:
        """Why it can't be told, by `ClientsCode`."""
        return reason_of(self.error, self.error_code)


class LimitQuery(msgspec.Struct, frozen=True):
    """The limits of a container's cgroup (its whole directory) on one GPU."""

    gpu: str
    cgroup: str


class LimitReading(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force there; `error` says why that can't be told: then the rest means nothing."""

    soft_bytes: int = 0
    hard_bytes: int | None = None
    used_bytes: int = 0
    error: str = ""
    error_code: str = ""

    @property
    def why(self) -> Reason | None:
        """Why it can't be told, by `LimitReadingCode`."""
        return reason_of(self.error, self.error_code)


class Outcome(StrEnum):
    """Of a client that was to be ended. TERMINATED: its contexts are gone, the process lives. KILLED: the process is
    gone. LEFT: it uses the GPU on."""

    TERMINATED = "terminated"
    KILLED = "killed"
    LEFT = "left"


class Termination(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one client. `error` says why not more."""

    pid: int
    gpu: str
    allocation_key: str
    command: str
    outcome: Outcome
    error: str = ""
    error_code: str = ""

    @property
    def why(self) -> Reason | None:
        """Why not more, by `TerminationCode`."""
        return reason_of(self.error, self.error_code)


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Where the config of mpsd says that things of this node are."""

    cdi_directory: str
    state_root: str
    run_root: str
    log_root: str
    device_plugins: str
    """The kubelet's directory of plugins and of its checkpoint."""
    pods: str
    """The kubelet's directory of pods."""

    @classmethod
    def of(cls, config: NodeConfig) -> "Places":
        """Those of a config."""
        return cls(
            cdi_directory=config.cdi.directory,
            state_root=config.state_root,
            run_root=config.mps.run_root,
            log_root=config.mps.log_root,
            device_plugins=config.kubelet_device_plugins,
            pods=f"{config.kubelet_root}/pods",
        )


class CleanedUp(msgspec.Struct, frozen=True, kw_only=True):
    """What a cleanup of mpsd could not undo, empty when nothing is left; and where what is not its own may be."""

    left: tuple[str, ...]
    places: Places


class DesiredAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """A live allocation as mpsd needs it. `limit_bytes` is per GPU. `group` is the name of its own GPUs together, empty
    where no daemon serves all of them. `slot` is the slot of its share, None for units and annotated containers: under
    protocol 3 a fixed share has its namespace in the daemon's config, the others get one of their own."""

    key: Name
    resource: Line
    group: NameOrNone
    gpus: tuple[Name, ...]
    mode: Mode
    limit_bytes: LimitBytes
    thread_percent: Percent | None = None
    slot: Count | None = None
    default_socket: bool = False
    """Whether it is to reach the daemon's main socket: a time-slicing share that may be above its request."""


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """Every live allocation: what is not named is gone."""

    allocations: tuple[DesiredAllocation, ...] = ()
