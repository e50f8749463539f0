"""What planning is asked and answers: allocations, refusals. No I/O, no clock."""

import hashlib

import msgspec

from deviceplugin.plan.reasons import FINAL
from mpsd.common.ranges import Bytes, Count, LimitBytes, Line, Name, NameOrNone, Percent, UnixSeconds
from mpsd.common.reason import Reason
from mpsd.config.model import Delivery, Enforcement
from mpsd.gpu.model import Mode

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
