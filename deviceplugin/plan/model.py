"""The planner's values: what it is shown (views) and what it answers (allocations, refusals). No I/O, no clock."""

import hashlib
from collections.abc import Mapping

import msgspec

from cdi.registry import MEMORY_HOOK
from deviceplugin.plan.reasons import FINAL, EnforcementCode
from mpsd.common.ranges import Bytes, Count, LimitBytes, Line, Name, NameOrNone, Percent, UnixSeconds
from mpsd.common.reason import Reason
from mpsd.config.model import MPS_CLIENTS_PER_GPU, Delivery, Enforcement, Resource
from mpsd.gpu.model import GpuInfo, Mode
from mpsd.localapi.snapshot import GpuClient, HardLimits
from mpsd.shares.groups import Group, is_set_name
from mpsd.shares.sizes import ShareSize


class GpuView(msgspec.Struct, frozen=True):
    """One GPU as the planner sees it. Its reasons are None where there is no objection.

    `lost`: every share of it is Unhealthy, held ones too. `blocked`: nothing new in any mode and Allocate refuses.
    `waiting`: free shares are Unhealthy, but an Allocate that comes all the same is granted and waits for its CDI file.
    `daemon_waiting`: the same, for sm-sharing only. `protocol` is the MPS protocol its daemon spoke last,
    `client_limit` how many containers its MPS takes.
    `for_annotated`: annotated pods may use it; `reserved`: a scheduler has begun to give it to them, so resources take
    nothing new there. `daemon`: the MPS daemon that runs there, empty for none; `clients`: who uses it.
    """

    info: GpuInfo
    usable_bytes: int
    lost: Reason | None = None
    blocked: Reason | None = None
    waiting: Reason | None = None
    daemon_waiting: Reason | None = None
    protocol: int = 2
    client_limit: int = MPS_CLIENTS_PER_GPU
    for_annotated: bool = False
    reserved: Reason | None = None
    daemon: str = ""
    clients: tuple[GpuClient, ...] = ()

    @property
    def uuid(self) -> str:
        return self.info.uuid

    @property
    def index(self) -> int:
        return self.info.index

    @property
    def label(self) -> str:
        """How texts name the GPU: index for people, UUID for tools."""
        return f"GPU {self.index} ({self.uuid})"


NO_CDI_OF_PLUGINS = Reason(
    EnforcementCode.NO_SETTER,
    "nothing sets its limit: this container runtime takes no CDI devices from NRI plugins: upgrade it to containerd "
    "2.1 or CRI-O 1.34, or newer",
)
NRI_SETTER = "nri"
"""Stands for a CDI kind with the hook."""


class HardAbility(msgspec.Struct, frozen=True):
    """Whether containers can be held to memory limits by their cgroups: what mpsd proved, and who sets the limits
    before a container's process starts.

    `kind` is the CDI kind that new containers get their GPUs from, empty for the nvidia runtime; `hooked` are the kinds
    that carry the toolkit's hook for every GPU, the empty one among them where the nvidia runtime injects it.
    `starts_wait`: the runtime keeps a program from starting when we say so, so that annotated containers, whose limits
    we set ourselves, need no hook; others need the runtime to take our CDI devices (`takes_cdi`). `cdi_loses`: why the
    environment that we give a share may be beaten by its pod's or image's, None where it is not known to be.
    `unset`: the limit of an annotated container is set by nobody.
    """

    limits: HardLimits = HardLimits()
    kind: str = ""
    hooked: frozenset[str] = frozenset()
    starts_wait: bool = True
    takes_cdi: bool = True
    cdi_loses: Reason | None = None
    unset: bool = False

    @property
    def known(self) -> bool:
        """Whether mpsd has looked."""
        return self.limits.probed

    @property
    def settable(self) -> bool:
        """Whether the driver takes memory limits of cgroups here, whoever sets them."""
        return self.known and not self.limits.missing

    @property
    def missing(self) -> tuple[Reason, ...]:
        """Each piece that is not there for a new container, with what to do; empty: its limit can be hard."""
        # While limits can't be set at all another kind may be in use than the one that carries the hook.
        found = self.limits.why_not
        if self.unset:
            found = (*found, NO_CDI_OF_PLUGINS)
        setter = None if found and self.hooked else self.no_setter(self.kind)
        return found if setter is None else (*found, setter)

    def no_setter(self, kind: str) -> Reason | None:
        """Why nobody sets the limits of a container with GPUs of this kind, None when the hook does."""
        if kind not in self.hooked:
            if not kind:
                return Reason(
                    EnforcementCode.NO_SETTER,
                    "nothing is known to set limits: GPU devices come from the nvidia runtime "
                    "(NVIDIA_VISIBLE_DEVICES), which sets them from container toolkit 1.20.1 on, and that is not found "
                    f"here (no `nvidia-ctk` of that version, no CDI spec with the hook `{MEMORY_HOOK}`): upgrade it, "
                    "or have CDI specs with the hook generated and use `cdi.gpuDevices: cdi`",
                )
            return Reason(
                EnforcementCode.NO_SETTER,
                f"nothing sets limits: CDI kind {kind} has no hook `{MEMORY_HOOK}` on every GPU: use a container "
                "toolkit and device plugin that write it",
            )
        return None

    def of_annotated(self) -> "HardAbility":
        """The same for annotated containers: we set their environment, and their limits, or else the hook of their GPUs
        does."""
        own = msgspec.structs.replace(self, cdi_loses=None)
        if self.starts_wait:
            return msgspec.structs.replace(own, kind=NRI_SETTER, hooked=frozenset((NRI_SETTER,)))
        if self.takes_cdi or not self.kind or not self.known:
            return own
        if "" in self.hooked:
            return msgspec.structs.replace(own, kind="")  # their GPUs come by NVIDIA_VISIBLE_DEVICES
        return msgspec.structs.replace(own, unset=True)

    def assuming_proven(self) -> "HardAbility":
        """The same, if mpsd finds nothing missing."""
        return msgspec.structs.replace(self, limits=HardLimits(missing=()))


def newer(known: HardLimits, told: HardLimits) -> HardLimits:
    """What is known of hard limits after mpsd's word. A young mpsd has not looked yet: that is no news."""
    return told if told.probed else known


class GroupView(msgspec.Struct, frozen=True):
    """The GPUs that a share lies on: one GPU, those of a declared group, or a set of GPUs (sets.py). Reasons as in
    GpuView, from its members.

    `usable_bytes` is what every member has. `unlisted` says why it can't have shares at all, such as a member that is
    not on the node. `burst`: shares that may borrow memory could lie on it.
    """

    group: Group
    members: tuple[GpuView, ...]
    usable_bytes: int
    unlisted: Reason | None = None
    lost: Reason | None = None
    blocked: Reason | None = None
    waiting: Reason | None = None
    daemon_waiting: Reason | None = None
    reserved: Reason | None = None
    burst: bool = False

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs in the daemon's order."""
        return self.group.gpus

    @property
    def label(self) -> str:
        """How texts name it."""
        if self.is_set:
            return f"GPU {', '.join(str(gpu.index) for gpu in self.members)}"
        if not self.group.declared and self.members:
            return self.members[0].label
        return f"group {self.name} (GPU {', '.join(str(gpu.index) for gpu in self.members)})"

    @property
    def is_set(self) -> bool:
        """Whether it is of several GPUs that no declared group has together."""
        return is_set_name(self.name)

    @property
    def has_one_limit(self) -> bool:
        """Whether nothing but the daemon's one default limit holds its clients: containers get no limit of their own
        on several GPUs, and before MPS protocol 3 there is nothing else."""
        return len(self.gpus) > 1 and all(gpu.protocol == 2 for gpu in self.members)

    @property
    def speaks_protocol_3(self) -> bool:
        """Whether its daemon has namespaces and memory accounting."""
        return all(gpu.protocol == 3 for gpu in self.members)

    def of_member(self, gpu: GpuView, reason: Reason) -> Reason:
        """A reason that is one member's, naming it where there are others."""
        return reason.reworded(f"GPU {gpu.index}: {reason}") if len(self.members) > 1 else reason


class Device(msgspec.Struct, frozen=True, gc=False):
    """One entry of a list: as the kubelet's Device message."""

    id: str
    healthy: bool
    numa_nodes: tuple[int, ...] = ()


class DeviceList(msgspec.Struct, frozen=True):
    """All devices of a resource on one group in slot order, twice: a list of thousands is put together, not built."""

    healthy: tuple[Device, ...]
    unhealthy: tuple[Device, ...]


class ResourceView(msgspec.Struct, frozen=True):
    """One resource on this node: its share on each group, and the level at which a limit of it is enforced.

    All maps are by the name of a group, or of a set for a resource whose shares lie on sets; a GPU in no declared group
    is one by its UUID. `objection` and `too_long` say why it advertises nothing new at all (enforcement below its
    minimum, dropped from the config ...; its list would be too long), `waiting` why nothing of it is Healthy yet;
    `unfit` says why one group is left out, `unheld` where its limit is not enforced and why; `slots` counts the shares
    of each. `device_ids` holds the fixed IDs in slot order, `devices` the same as list entries, and `group_of` is the
    way back.
    """

    resource: Resource
    enforcement: Enforcement
    objection: Reason | None = None
    waiting: Reason | None = None
    too_long: Reason | None = None
    sizes: Mapping[str, ShareSize] = msgspec.field(default_factory=dict)
    unfit: Mapping[str, Reason] = msgspec.field(default_factory=dict)
    unheld: Mapping[str, Reason] = msgspec.field(default_factory=dict)
    slots: Mapping[str, int] = msgspec.field(default_factory=dict)
    numa_nodes: Mapping[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    device_ids: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    devices: Mapping[str, DeviceList] = msgspec.field(default_factory=dict)
    group_of: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.resource.name

    @property
    def on_sets(self) -> bool:
        """Whether its shares lie on any so many GPUs."""
        return self.resource.gpu_count > 1

    @property
    def closed(self) -> Reason | None:
        """Why it advertises nothing new, None when it does."""
        return self.objection or self.too_long

    def enforcement_on(self, group: str) -> Enforcement:
        """The level at which its limit holds on one group."""
        return Enforcement.NONE if group in self.unheld else self.enforcement


class NodeView(msgspec.Struct, frozen=True):
    """Everything planning looks at beside the accounts. GPUs, groups and resources keep their configured order.

    `sets`: the sets of several GPUs that shares may lie on, or live ones do, beside the groups.

    `daemons`: MPS daemons that run on several GPUs: name -> GPUs. `together`: GPUs that are of one domain from the
    start. `movable`: containers that are there may get another MPS daemon, and with `linked` those with a namespace,
    too (protocol 3).
    """

    gpus: Mapping[str, GpuView]
    groups: Mapping[str, GroupView]
    resources: Mapping[str, ResourceView]
    sets: Mapping[str, GroupView] = msgspec.field(default_factory=dict)
    daemons: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    together: tuple[str, ...] = ()
    movable: bool = True
    linked: bool = True
    annotated: "AnnotatedView | None" = None

    def group(self, name: str) -> GroupView | None:
        """What a device ID names: a group or a set; None for what is not on this node."""
        return self.groups.get(name) or self.sets.get(name)


class AnnotatedView(msgspec.Struct, frozen=True):
    """What annotated containers can have on this node: the least enforcement they accept, and what there is. None in
    its place: nothing. `share`: resources may use their GPUs, too. `reduces`: who asks for a
    part of a GPU gets that part of what is usable, and who misses only what a GPU keeps back gets what is left."""

    minimum: Enforcement
    hard: HardAbility
    share: bool = False
    reduces: bool = False


ANNOTATED = "annotations"
"""Stands for the resource of allocations that annotations describe; no resource can be called so."""


class ContainerRef(msgspec.Struct, frozen=True, kw_only=True):
    """A container of one pod."""

    namespace: Name
    pod: Line
    pod_uid: Name
    container: Name

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}/{self.container}"

    @property
    def id(self) -> str:
        """Stands for the device ID of what it is granted: its own on this node, whatever is restarted."""
        return f"{self.pod_uid}/{self.container}"


class ContainerAsk(msgspec.Struct, frozen=True, kw_only=True):
    """What an annotated container asks for: bytes on each of its GPUs (UUIDs). `isolation` is what keeps it from the
    host, None where nothing does. `of_total`: its bytes are a part of a GPU's total memory, made by its scheduler."""

    container: ContainerRef
    request_bytes: int
    limit_bytes: int
    mode: Mode
    gpus: tuple[str, ...]
    thread_percent: int | None = None
    isolation: Reason | None = None
    of_total: bool = False


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What one container holds; the ledger's record. Bytes are per GPU and for the whole allocation.

    `gpus` are those of `group`. `slot` is the slot of a `memory` resource's only share, None for units and on a set of
    GPUs. `share_bytes` is the request of one share. `memory_total_bytes` is of the largest GPU. `gpu_kind` is the CDI
    kind that carries the GPU's device nodes, empty when the runtime makes them from NVIDIA_VISIBLE_DEVICES. `adopted`:
    found at the kubelet without a record of ours.

    `enforcement` is the level it was granted with, `minimum` the least its resource accepts. `soft_bytes` is what the
    driver protects from eviction: the request, or 0 where the config lets nobody borrow, so that nothing can leak.
    `main_socket`: though it is time-slicing it reaches the MPS daemon, and so is a part of eviction; None, of older
    versions: where it has a guarantee.

    `after` are the keys of other pods' allocations that had some of its shares when it was granted, or of containers of
    its own annotated pod whose turn it takes: when it starts, no process of theirs may live.

    `container` is whose it is, of annotated containers only: shares are the kubelet's to give. `group` is the name of
    its GPUs together (shares.groups), empty where no daemon serves all of them. `asked_request_bytes` and
    `asked_limit_bytes` are what its annotations say, which may be more than it got.
    """

    key: Name
    resource: Line
    device_ids: tuple[Line, ...]
    generation: Count
    group: NameOrNone = ""
    gpus: tuple[Name, ...]
    slot: Count | None = None
    request_bytes: Bytes
    limit_bytes: LimitBytes
    share_bytes: Bytes
    memory_total_bytes: Bytes
    mode: Mode
    enforcement: Enforcement
    minimum: Enforcement = Enforcement.NONE
    soft_bytes: Bytes = 0
    main_socket: bool | None = None
    thread_percent: Percent | None = None
    gpu_kind: Line = ""
    delivery: Delivery = Delivery.CDI
    created_unix_s: UnixSeconds = 0.0
    adopted: bool = False
    after: tuple[Name, ...] = ()
    container: ContainerRef | None = None
    asked_request_bytes: Bytes = 0
    asked_limit_bytes: Bytes = 0

    @property
    def booked_bytes(self) -> int:
        """What a scheduler that wrote its annotations counts for it."""
        return max(self.request_bytes, self.asked_request_bytes)

    @property
    def guaranteed_bytes(self) -> int:
        """What the driver has to protect of it where somebody may borrow: a limit that was lowered needs no more."""
        return min(self.request_bytes, self.limit_bytes)

    @property
    def may_borrow(self) -> bool:
        """Whether its limit is above its request."""
        return self.limit_bytes > self.request_bytes

    @property
    def runs_unenforced(self) -> bool:
        """Whether it was taken in for a container that was known to run without our edits."""
        return self.container is not None and self.adopted and self.enforcement is Enforcement.NONE

    @property
    def default_socket(self) -> bool:
        """Whether it needs the daemon's main socket though it is time-slicing: who borrows there can be evicted, and
        who is short of its request can have others evicted, only through the daemon (MPS memory partitioning)."""
        has_it = self.soft_bytes > 0 if self.main_socket is None else self.main_socket
        return self.mode is Mode.TIME_SLICING and has_it

    @property
    def needs_daemon(self) -> bool:
        return self.mode is Mode.SM_SHARING or self.default_socket

    @property
    def takes_back(self) -> bool:
        """Whether it gets its guaranteed memory back from who borrowed it: its daemon then ends one of these."""
        return self.needs_daemon and self.soft_bytes >= self.guaranteed_bytes


class Refusal(Reason, frozen=True):
    """A valid "no": the message tells the pod's owner what was asked, what is free and what to do.

    `code` is of RefusalCode or EnforcementCode where the request can't be granted at all, else that of what is in the
    way: OfferCode.
    """

    @property
    def is_final(self) -> bool:
        """Whether it can never be granted here, however long one waits."""
        return self.code in FINAL


def allocation_key(resource: str, device_ids: tuple[str, ...], generation: int) -> str:
    """First 20 hex digits of sha256 over resource, sorted device IDs and generation, one per line."""
    text = "\n".join((resource, *sorted(device_ids), str(generation)))
    return hashlib.sha256(text.encode()).hexdigest()[:20]
