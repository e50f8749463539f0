"""The node configuration as values. All defaults and units stand here and nowhere else; the rules are where the
file is read: load.py and what it imports."""

from enum import StrEnum
from typing import Final

import msgspec

from mpsd.common.socketpath import RUN_ROOT, mpsd_socket, plugin_socket
from mpsd.gpu.model import MIB, GpuInfo, Mode

API_VERSION: Final = "gpufrac.dev/v1"
KIND: Final = "NodeConfig"

GIB = 1024 * MIB
STATE_ROOT: Final = "/var/lib/gpufrac"

MAX_ADVERTISED_DEVICES = 20_000
"""Longest list one resource may advertise. A kubelet drops lists over 4 MiB (about 68,000 entries of 44 characters)."""

MAX_GPUS_OF_SHARE = 64
MAX_GPU_SETS = 1_000
"""Most sets of GPUs that one resource may choose among: each look at the node weighs them all."""

MIN_UNIT_BYTES = 64 * MIB
MPS_CLIENTS_PER_GPU = 48
"""Contexts one Volta or newer GPU offers under MPS (legacy documentation; newer drivers allow up to 60)."""


class Enforcement(StrEnum):
    """How a memory limit holds. HARD: driver and cgroup. COOPERATIVE: MPS, per process. NONE: not at all."""

    HARD = "hard"
    COOPERATIVE = "cooperative"
    NONE = "none"

    @property
    def rank(self) -> int:
        """2 for HARD down to 0 for NONE: a level satisfies a minimum when its rank is at least as high."""
        return {"hard": 2, "cooperative": 1, "none": 0}[self.value]


class GpuDevices(StrEnum):
    """Where a container's GPU device nodes come from."""

    AUTO = "auto"
    CDI = "cdi"
    ENVVAR = "envvar"


class Delivery(StrEnum):
    """How edits reach a container. BOTH: also in the Allocate response, for runtimes without CDI; pods can override."""

    CDI = "cdi"
    BOTH = "both"


class WedgePolicy(StrEnum):
    """What happens to a daemon that stopped answering or whose server is lost. REPORT: nothing but words.
    REPLACE_WHEN_IDLE: it is replaced once no client is left on its GPUs. REPLACE: at once, whoever runs."""

    REPORT = "report"
    REPLACE_WHEN_IDLE = "replace-when-idle"
    REPLACE = "replace"


class NamespaceMount(StrEnum):
    """What a container mounts of an MPS v3 namespace. DAEMON: the directory the daemon made. LINKED: one of ours that
    stays over daemon restarts, in which the namespace's socket is linked again."""

    DAEMON = "daemon"
    LINKED = "linked"


class Domains(StrEnum):
    """Which GPUs annotated containers share an MPS daemon on. AUTO: as few together as they need; NODE: all."""

    AUTO = "auto"
    NODE = "node"


class LeakPolicy(StrEnum):
    """What happens to memory reserved on a cgroup's ancestors for containers that are gone. REPORT: words only.
    REPAIR: it is given back through the driver."""

    REPORT = "report"
    REPAIR = "repair"


class TrustPolicy(StrEnum):
    """Whose device lists in annotations are believed. KAI_RESERVATION: the GPU is held by a KAI reservation pod that is
    told apart by its namespace. NAMESPACES: pods of the namespaces named in the config. ANY: everybody's."""

    KAI_RESERVATION = "kai-reservation"
    NAMESPACES = "namespaces"
    ANY = "any"


class AwayPolicy(StrEnum):
    """What happens to annotated containers that were started while we were away and run unenforced. REPORT: words
    only. STOP: they are stopped, so that the kubelet makes them again."""

    REPORT = "report"
    STOP = "stop"


class FixedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """`memory: {request, limit}` in bytes, whole MiB."""

    request_bytes: int
    limit_bytes: int


class FractionMemory(msgspec.Struct, frozen=True, kw_only=True):
    """`memory: {fraction, limitFraction}` of each GPU's usable memory, 0 < fraction <= limit_fraction < 1."""

    fraction: float
    limit_fraction: float


class UnitMemory(msgspec.Struct, frozen=True, kw_only=True):
    """`unit: 1Gi`: a container asks for N units, all on one GPU. Bytes, whole MiB, at least MIN_UNIT_BYTES."""

    unit_bytes: int


Memory = FixedMemory | FractionMemory | UnitMemory

GpuRef = int | str
"""A GPU named in the config: index or UUID. What it names is known on the node only."""


class GpuSelection(msgspec.Struct, frozen=True, kw_only=True):
    """`include: all` is None."""

    include: tuple[GpuRef, ...] | None = None
    exclude: tuple[GpuRef, ...] = ()

    def admits(self, info: GpuInfo) -> bool:
        """Whether a GPU is included and not excluded."""
        included = self.include is None or any(info.is_named(ref) for ref in self.include)
        return included and not any(info.is_named(ref) for ref in self.exclude)


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One extended resource. `enforcement` is its minimum, already defaulted from `enforcement.minimum`. A share lies
    on one GPU, on any `gpu_count` GPUs together, or on one of `groups`."""

    name: str
    memory: Memory
    mode: Mode
    enforcement: Enforcement
    thread_percent: int | None = None
    gpus: GpuSelection = GpuSelection()
    gpu_count: int = 1
    groups: tuple[str, ...] = ()


class MpsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section `mps`; see docs/config.md."""

    protocol: str = "auto"
    """auto | 2 | 3"""
    binary: str = "nvidia-cuda-mps-control"
    driver_root: str = "/"
    run_root: str = RUN_ROOT
    log_root: str = "/var/log/gpufrac"
    shared_memory: bool = False
    client_limit: int = MPS_CLIENTS_PER_GPU
    on_wedge: WedgePolicy = WedgePolicy.REPLACE_WHEN_IDLE
    prohibit_while_down: bool = False
    """Whether a GPU bound to sm-sharing is PROHIBITED from the loss of its daemon until it is ready again."""
    namespace_mount: NamespaceMount = NamespaceMount.LINKED
    writable_mount: bool = False
    """Whether containers may write to what they mount of their daemon. A socket needs no write access to be used."""
    log_max_bytes: int = 16 * MIB
    """Size of one log file of a daemon before it is cut."""


class CdiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section `cdi`; see docs/config.md."""

    directory: str = "/var/run/cdi"
    gpu_devices: GpuDevices = GpuDevices.AUTO
    delivery: Delivery = Delivery.CDI


class SimulatedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of `backend: simulated`."""

    memory_bytes: int = 80 * GIB


class SimulatedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section `simulated`."""

    gpus: tuple[SimulatedGpu, ...] = (SimulatedGpu(),)
    driver: str = "580.95.05"


class ShortfallPolicy(StrEnum):
    """What an annotated container gets whose scheduler counted memory that driver and reserve keep back. REDUCE: its
    part of what is usable, or what is left of it. REFUSE: nothing."""

    REDUCE = "reduce"
    REFUSE = "refuse"


class AnnotationsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Pods described by annotations. `gpus` are set aside for them; with `share`, resources may use these GPUs, too.
    `namespaces` is empty but for NAMESPACES. `prefix` stands before the container's name in every key."""

    gpus: GpuSelection
    share: bool = False
    domains: Domains = Domains.AUTO
    trust: TrustPolicy = TrustPolicy.KAI_RESERVATION
    namespaces: tuple[str, ...] = ()
    reservation_namespace: str = "kai-resource-reservation"
    prefix: str = "nvidia.com/container."
    enforcement: Enforcement
    """Its minimum, already defaulted from `enforcement.minimum`."""
    shortfall: ShortfallPolicy = ShortfallPolicy.REDUCE
    when_away: AwayPolicy = AwayPolicy.REPORT
    cri_socket: str = "/run/containerd/containerd.sock"
    """Where the runtime stops containers, for STOP."""


class NriConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the runtime is, and how we introduce ourselves to it. `index` is two digits: our place among plugins."""

    socket: str = "/var/run/nri/nri.sock"
    name: str = "gpufrac"
    index: str = "50"


class KubernetesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`access` is `off`, `in-cluster` or the path of a kubeconfig. `node_name` is empty where it is found out."""

    access: str = "off"
    node_name: str = ""


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. Paths are host paths. `resources` is empty only where there are `annotations`."""

    resources: tuple[Resource, ...]
    gpus: GpuSelection = GpuSelection()
    groups: tuple[tuple[str, tuple[GpuRef, ...]], ...] = ()
    shared_groups: tuple[str, ...] = ()
    """Those whose GPUs are there for shares of one GPU, too."""
    memory_reserve_bytes: int = 1 * GIB
    enforcement_minimum: Enforcement = Enforcement.COOPERATIVE
    enable_dmem: bool = False
    """Whether mpsd may switch the dmem controller on, down to the cgroups of pods."""
    leaks: LeakPolicy = LeakPolicy.REPORT
    mps: MpsConfig = MpsConfig()
    cdi: CdiConfig = CdiConfig()
    kubelet_root: str = "/var/lib/kubelet"
    """The kubelet's --root-dir: `pod-resources/` and `pods/` are below it."""
    kubelet_device_plugins: str = "/var/lib/kubelet/device-plugins"
    """A constant of the kubelet, whatever its --root-dir (pkg/apis/deviceplugin/v1beta1, DevicePluginPath)."""
    state_root: str = STATE_ROOT
    backend: str = "nvml"
    """nvml | simulated"""
    simulated: SimulatedConfig = SimulatedConfig()
    annotations: AnnotationsConfig | None = None
    """None: pods described by annotations are left alone."""
    nri: NriConfig = NriConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    metrics_address: str = "127.0.0.1:9478"
    """host:port; empty turns metrics off"""

    @property
    def mpsd_socket(self) -> str:
        return mpsd_socket(self.mps.run_root)

    @property
    def plugin_socket(self) -> str:
        return plugin_socket(self.mps.run_root)

    @property
    def mpsd_locks(self) -> tuple[str, ...]:
        """A file in each directory that no two mpsd may use, whatever their configs are."""
        return tuple(f"{root}/mpsd.lock" for root in (self.mps.run_root, self.state_root, self.mps.log_root))

    @property
    def mpsd_state_files(self) -> tuple[str, str]:
        """What mpsd remembers, and the copy of it that counts for this boot where the first one is lost."""
        return f"{self.state_root}/mpsd.json", f"{self.mps.run_root}/mpsd.json"

    @property
    def simulation_directory(self) -> str:
        """Where the simulated backend keeps what a driver would: faults, compute modes, memory in use."""
        return f"{self.mps.run_root}/sim"


SOCKET_NAME_MAX_BYTES = len("gpufrac-") + 20 + len("-01234567.sock")


def socket_name(resource_name: str) -> str:
    """Base name of the resource's device plugin socket, such as `gpufrac-gpu-8gi-97d0c5a1.sock`: at most
    SOCKET_NAME_MAX_BYTES long, stable, a plain file name whatever the resource is called, and its own by a digest."""
    import hashlib  # loads OpenSSL, 4 MiB that mpsd has no use for

    base = resource_name.rpartition("/")[2]
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in base)
    digest = hashlib.sha256(resource_name.encode()).hexdigest()[:8]
    return f"gpufrac-{readable[:20]}-{digest}.sock"
