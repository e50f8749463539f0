"""Config + GPUs + live allocations -> the daemon of each group: how it should run, or why none does (pure)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason
from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.config.model import NodeConfig, UnitMemory
from mpsd.config.numbering import CONFIRM, is_excluded, is_stranger
from mpsd.daemon.namespaces import MAX_NAME, SERVER, Namespace, share_name, units_name
from mpsd.daemon.paths import DaemonDirs, base_environment, daemon_dirs
from mpsd.gpu.model import GpuInfo, Mode
from mpsd.localapi.reasons import SharingCode
from mpsd.localapi.snapshot import DesiredAllocation
from mpsd.shares.capability import client_limit, several_users
from mpsd.shares.groups import Group, groups
from mpsd.shares.sizes import ShareSize, is_allowed, largest_limit_bytes, share_size, slot_count, usable_bytes

DAEMON_MARKER = "GPUFRAC_DAEMON"
"""In the environment of a control daemon we started: its group's name. Servers inherit it."""
SHARED_MEMORY_MARKER = "GPUFRAC_SHARED_MEMORY"
"""The same, `1` where the daemon was given a /dev/shm of its own."""


@dataclass(frozen=True, slots=True)
class DaemonSpec:
    """One control daemon as it should run. `gpus`: UUIDs by the daemon's ordinals.

    `pinned_limit_bytes` is its default memory limit per client and GPU (protocol 2). Where no sm-sharing resource may
    use the group it is all usable memory: a client that finds the daemon all the same must not eat the reserve.
    `namespaces` are all that its one server should have, and `main_socket` is whether somebody is to reach its main
    socket (protocol 3). `several_users`: its GPUs let one server take clients of any user.
    """

    name: str
    gpus: tuple[str, ...]
    protocol: int
    pinned_limit_bytes: int
    dirs: DaemonDirs
    environment: tuple[tuple[str, str], ...]
    namespaces: tuple[Namespace, ...] = ()
    shared_memory: bool = False
    main_socket: bool = False
    several_users: bool = True


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group. `not_shared` says why its GPUs take nothing new, None when they do; the spec stands in any case."""

    group: Group
    spec: DaemonSpec
    not_shared: Reason | None = None


def plan(
    config: NodeConfig,
    infos: Sequence[GpuInfo],
    allocations: Sequence[DesiredAllocation],
    protocol: Callable[[str], int],
) -> tuple[GroupPlan, ...]:
    """The plan of every group whose GPUs are known, in the groups' order.

    Args:
        allocations: the live ones. Their limits hold whatever the config says by now.
        protocol: the one that a group's daemon speaks, or will.
    """
    held: dict[str, tuple[str, ...]] = {}
    by_group: dict[str, list[DesiredAllocation]] = {}
    for allocation in allocations:
        if not allocation.group:
            continue  # it needs no daemon
        held[allocation.group] = allocation.gpus
        by_group.setdefault(allocation.group, []).append(allocation)
    by_uuid = {info.uuid: info for info in infos}
    plans = []
    for group in groups(config, infos, held):
        members = [by_uuid[uuid] for uuid in group.gpus if uuid in by_uuid]
        if members:
            spec = daemon_spec(config, group, members, by_group.get(group.name, ()), protocol(group.name))
            plans.append(GroupPlan(group, spec, _not_shared(config, group, members, spec)))
    return tuple(plans)


def daemon_spec(
    config: NodeConfig,
    group: Group,
    members: Sequence[GpuInfo],
    allocations: Iterable[DesiredAllocation],
    protocol: int,
) -> DaemonSpec:
    """The daemon of a group, whether or not it is to run now."""
    usable = group_usable_bytes(config, members)
    allocations = tuple(allocations)
    served = [allocation for allocation in allocations if allocation.mode is Mode.SM_SHARING]
    dirs = daemon_dirs(config.mps, group.name)
    environment = (
        *base_environment(config.mps),
        ("CUDA_MPS_PIPE_DIRECTORY", dirs.pipe),
        ("CUDA_MPS_LOG_DIRECTORY", dirs.log),
        ("CUDA_MPS_PROTOCOL_VERSION", str(protocol)),
        # By UUID, so that the daemon's ordinals start at 0 whatever the host's indices are.
        ("CUDA_VISIBLE_DEVICES", ",".join(group.gpus)),
        (DAEMON_MARKER, group.name),
        *(((SHARED_MEMORY_MARKER, "1"),) if config.mps.shared_memory else ()),
    )
    limit = largest_limit_bytes(config.resources, config, group, members, usable)
    granted = max((allocation.limit_bytes for allocation in served), default=0)
    # A container's own limit can't exceed the daemon's default, so that is never below what was granted. One on several
    # GPUs has no limit of its own under protocol 2: there a reload must not loosen what holds those that run.
    only_default = protocol == 2 and len(group.gpus) > 1
    pinned = granted if only_default and granted else max(usable if limit is None else limit, granted)
    namespaces = _namespaces(config, group, members, usable, served) if protocol == 3 else ()
    main_socket = protocol == 3 and any(allocation.default_socket for allocation in allocations)
    shared_memory = config.mps.shared_memory
    return DaemonSpec(
        group.name,
        group.gpus,
        protocol,
        pinned,
        dirs,
        environment,
        namespaces,
        shared_memory,
        main_socket,
        several_users(members),
    )


def namespace_of(allocation: DesiredAllocation) -> Namespace:
    """The namespace of one allocation."""
    name = units_name(allocation.key) if allocation.slot is None else share_name(allocation.resource, allocation.slot)
    return Namespace(name, allocation.limit_bytes, allocation.thread_percent)


def group_usable_bytes(config: NodeConfig, members: Iterable[GpuInfo]) -> int:
    """Usable memory that every GPU of a group has: its shares have the same size on each."""
    return min((usable_bytes(info, config.memory_reserve_bytes) for info in members), default=0)


def _namespaces(
    config: NodeConfig, group: Group, members: Sequence[GpuInfo], usable: int, served: Iterable[DesiredAllocation]
) -> tuple[Namespace, ...]:
    """One for each fixed share that may lie here, and what the live allocations have: theirs counts."""
    wanted: dict[str, Namespace] = {}
    for resource in config.resources:
        if resource.mode is not Mode.SM_SHARING or not is_allowed(resource, config, group, members):
            continue
        size = share_size(resource, usable)
        if isinstance(resource.memory, UnitMemory) or not isinstance(size, ShareSize):
            continue
        for slot in range(slot_count(resource, usable, client_limit(members, config.mps.client_limit))):
            name = share_name(resource.name, slot)
            wanted[name] = Namespace(name, size.limit_bytes, resource.thread_percent)
    for allocation in served:
        namespace = namespace_of(allocation)
        wanted[namespace.name] = namespace
    return tuple(wanted[name] for name in sorted(wanted))


def _not_shared(config: NodeConfig, group: Group, members: Sequence[GpuInfo], spec: DaemonSpec) -> Reason | None:
    if group.objection:
        return Reason(SharingCode.GROUP_NOT_AS_CONFIGURED, f"group {group.name}: {group.objection}")
    for info in members:
        if reason := _gpu_not_shared(config, info):
            where = f"GPU {info.index} of group {group.name}: " if group.declared else ""
            return Reason(reason.code, f"{where}{reason}")
    longest = len(f"{spec.dirs.pipe}/{SERVER}/{'x' * MAX_NAME}/control")
    if spec.protocol == 3 and longest > MAX_SOCKET_PATH_BYTES:
        return Reason(
            SharingCode.SOCKET_PATH_TOO_LONG,
            f"the paths of its MPS sockets would have {longest} bytes, and {MAX_SOCKET_PATH_BYTES} is the most a "
            "socket can have: set a shorter mps.runRoot",
        )
    return None


def _gpu_not_shared(config: NodeConfig, info: GpuInfo) -> Reason | None:
    if info.mig_enabled:
        return Reason(SharingCode.MIG, "MIG is enabled on it")
    if is_stranger(config, info):
        return Reason(
            SharingCode.NEW_NUMBER,
            f"it is new, and the config means another GPU by its index {info.index}: name GPUs by UUID there, or "
            f"confirm the new numbers: {CONFIRM}",
        )
    if is_excluded(config, info):
        return Reason(SharingCode.EXCLUDED, "it is excluded by the config")
    if usable_bytes(info, config.memory_reserve_bytes) == 0:
        return Reason(
            SharingCode.NO_MEMORY,
            f"nothing of its {format_bytes(info.memory_total_bytes)} is left after "
            f"{format_bytes(info.memory_reserved_bytes)} reserved by the driver and "
            f"{format_bytes(config.memory_reserve_bytes)} by the config",
        )
    return None
