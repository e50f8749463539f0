"""The planner's values: what it is shown (views) and what it answers (allocations, refusals). No I/O, no clock."""

import hashlib
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from mpsd.config.model import Delivery, Enforcement, Resource
from mpsd.gpu.model import Mode
from mpsd.shares import ShareSize


class GpuView(msgspec.Struct, frozen=True):
    """One GPU as the planner sees it. Empty reasons mean: no objection.

    `lost`: every share of it is Unhealthy, held ones too. `blocked`: nothing new in any mode and Allocate refuses.
    `waiting`: free shares are Unhealthy, but an Allocate that comes all the same is granted and waits for its CDI file.
    `daemon_waiting`: the same, for sm-sharing only.
    """

    uuid: str
    index: int
    usable_bytes: int
    total_bytes: int
    numa_node: int | None = None
    lost: str = ""
    blocked: str = ""
    waiting: str = ""
    daemon_waiting: str = ""

    @property
    def label(self) -> str:
        """How texts name the GPU: index for people, UUID for tools."""
        return f"GPU {self.index} ({self.uuid})"


class Device(msgspec.Struct, frozen=True, gc=False):
    """One entry of a list: as the kubelet's Device message."""

    id: str
    healthy: bool
    numa_node: int | None = None


class DeviceList(msgspec.Struct, frozen=True):
    """All devices of a resource on one GPU in slot order, twice: so a list of thousands is put together, not built."""

    healthy: tuple[Device, ...]
    unhealthy: tuple[Device, ...]


class ResourceView(msgspec.Struct, frozen=True):
    """One resource on this node: its share on each GPU, and the level at which a limit of it is enforced.

    `objection` and `too_long` say why it advertises nothing new at all (enforcement below its minimum, dropped from
    the config ...; its list would be too long); `unfit` says why one GPU is left out; `slots` counts the shares of each
    GPU. `device_ids` holds the fixed IDs per GPU, in slot order, `devices` the same as list entries, and `gpu_of` the
    way back.
    """

    resource: Resource
    enforcement: Enforcement
    objection: str = ""
    too_long: str = ""
    sizes: Mapping[str, ShareSize] = msgspec.field(default_factory=dict)
    unfit: Mapping[str, str] = msgspec.field(default_factory=dict)
    slots: Mapping[str, int] = msgspec.field(default_factory=dict)
    device_ids: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    devices: Mapping[str, DeviceList] = msgspec.field(default_factory=dict)
    gpu_of: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.resource.name

    @property
    def closed(self) -> str:
        """Why it advertises nothing new, empty when it does."""
        return self.objection or self.too_long


class NodeView(msgspec.Struct, frozen=True):
    """Everything planning looks at beside the accounts. GPUs and resources keep their configured order.

    `complete`: mpsd has reported all GPUs since we started, so one that is not here is gone.
    """

    gpus: Mapping[str, GpuView]
    resources: Mapping[str, ResourceView]
    client_limit: int
    complete: bool = False


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What one container holds; the ledger's record. Bytes are per GPU and for the whole allocation.

    `share_bytes` is the request of one share. `gpu_kind` is the CDI kind that carries the GPU's device nodes, empty
    when the runtime makes them from NVIDIA_VISIBLE_DEVICES. `adopted`: found at the kubelet without a record of ours.
    """

    key: str
    resource: str
    device_ids: tuple[str, ...]
    generation: int
    gpus: tuple[str, ...]
    request_bytes: int
    limit_bytes: int
    share_bytes: int
    memory_total_bytes: int
    mode: Mode
    enforcement: Enforcement
    thread_percent: int | None = None
    gpu_kind: str = ""
    delivery: Delivery = Delivery.CDI
    created_unix_s: float = 0.0
    adopted: bool = False


class RefusalCode(StrEnum):
    """INVALID: the request can never be granted. NO_ROOM and MODE_CONFLICT: not now."""

    INVALID = "invalid"
    NO_ROOM = "no-room"
    MODE_CONFLICT = "mode-conflict"


class Refusal(msgspec.Struct, frozen=True):
    """A valid "no": the text tells the pod's owner what was asked, what is free and what to do."""

    code: RefusalCode
    text: str


def allocation_key(resource: str, device_ids: tuple[str, ...], generation: int) -> str:
    """First 20 hex digits of sha256 over resource, sorted device IDs and generation, one per line."""
    text = "\n".join((resource, *sorted(device_ids), str(generation)))
    return hashlib.sha256(text.encode()).hexdigest()[:20]
