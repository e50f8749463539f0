"""What planning is shown: views of the node. No I/O, no clock."""

from collections.abc import Mapping

import msgspec

from cdi.registry import MEMORY_HOOK
from deviceplugin.plan.reasons import EnforcementCode
from mpsd.common.reason import Reason
from mpsd.config.model import MPS_CLIENTS_PER_GPU, Enforcement, Resource
from mpsd.gpu.model import GpuInfo
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
