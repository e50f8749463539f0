"""Config + GPUs + live allocations -> the daemon of each domain: how it should run, or why none does (pure)."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason
from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.config.model import NodeConfig, UnitMemory
from mpsd.config.numbering import CONFIRM, is_excluded, is_stranger
from mpsd.daemon.namespaces import MAX_NAME, SERVER, Namespace, share_name, units_name
from mpsd.daemon.paths import MAIN, DaemonDirs, Link, base_environment, daemon_dirs, namespace_directory
from mpsd.gpu.model import GpuInfo, Mode
from mpsd.localapi.reasons import SharingCode
from mpsd.localapi.snapshot import DesiredAllocation
from mpsd.shares.capability import client_limit, several_users
from mpsd.shares.domains import Domain, domains, node_span
from mpsd.shares.groups import Group, groups, is_set_name, set_name
from mpsd.shares.sizes import ShareSize, is_allowed, largest_limit_bytes, share_size, slot_count, usable_bytes

DAEMON_MARKER = "GPUFRAC_DAEMON"
"""In the environment of a control daemon we started: its name. Servers inherit it."""
SHARED_MEMORY_MARKER = "GPUFRAC_SHARED_MEMORY"
"""The same, `1` where the daemon was given a /dev/shm of its own."""


@dataclass(frozen=True, slots=True)
class DaemonSpec:
    """One control daemon as it should run. `gpus`: UUIDs by the daemon's ordinals.

    `pinned_limit_bytes` is its default memory limit per client and GPU (protocol 2). Where no sm-sharing resource may
    use its GPUs it is all usable memory: a client that finds the daemon all the same must not eat the reserve.
    `namespaces` are all that its one server should have, and `links` where containers mount which of its sockets
    (protocol 3); `homes` are the directories for these, of which nothing else is left. `several_users`: its GPUs let
    one server take clients of any user.
    """

    name: str
    gpus: tuple[str, ...]
    protocol: int
    pinned_limit_bytes: int
    dirs: DaemonDirs
    environment: tuple[tuple[str, str], ...]
    namespaces: tuple[Namespace, ...] = ()
    links: tuple[Link, ...] = ()
    homes: tuple[str, ...] = ()
    shared_memory: bool = False
    several_users: bool = True


@dataclass(frozen=True, slots=True)
class DomainPlan:
    """One domain. `not_shared` says why its GPUs take nothing new, None when they do; the spec stands in any case."""

    domain: Domain
    spec: DaemonSpec
    not_shared: Reason | None = None


def plan(
    config: NodeConfig,
    infos: Sequence[GpuInfo],
    allocations: Sequence[DesiredAllocation],
    protocol: Callable[[str], int],
    kept: Mapping[str, Sequence[str]] | None = None,
    lost: Collection[str] = (),
) -> tuple[DomainPlan, ...]:
    """The plan of every domain whose GPUs are known, in the domains' order.

    Args:
        allocations: the live ones. Their limits hold whatever the config says by now.
        protocol: the one that a domain's daemon speaks, or will, by its name.
        kept: see `domains`.
        lost: GPUs that are gone: a daemon that is started with one of them may see none of the others, so nobody has
            others joined with them.
    """
    reaching = [allocation for allocation in allocations if allocation.group]
    held = {a.group: a.gpus for a in reaching if not is_set_name(a.group)}
    spans = [a.gpus for a in reaching if needs_daemon(a) and not any(gpu in lost for gpu in a.gpus)]
    everywhere = node_span(config, [info for info in infos if info.uuid not in lost])
    if everywhere and protocol(set_name(everywhere)) == 3:
        spans.append(everywhere)
    by_uuid = {info.uuid: info for info in infos}
    plans = []
    for domain in domains(groups(config, infos, held), spans, kept):
        members = [by_uuid[uuid] for uuid in domain.gpus if uuid in by_uuid]
        if members:
            inside = [allocation for allocation in reaching if set(allocation.gpus) <= set(domain.gpus)]
            spec = daemon_spec(config, domain, by_uuid, inside, protocol(domain.name))
            plans.append(DomainPlan(domain, spec, _not_shared(config, domain, members, spec)))
    return tuple(plans)


def needs_daemon(allocation: DesiredAllocation) -> bool:
    """Whether containers of an allocation are clients of MPS."""
    return bool(allocation.group) and (allocation.mode is Mode.SM_SHARING or allocation.default_socket)


def daemon_spec(
    config: NodeConfig,
    domain: Domain,
    infos: Mapping[str, GpuInfo],
    allocations: Iterable[DesiredAllocation],
    protocol: int,
) -> DaemonSpec:
    """The daemon of a domain, whether or not it is to run now. `infos`: every GPU of the node by UUID."""
    members = _known(domain.gpus, infos)
    allocations = tuple(allocations)
    served = [allocation for allocation in allocations if allocation.mode is Mode.SM_SHARING]
    dirs = daemon_dirs(config.mps, domain.name)
    environment = (
        *base_environment(config.mps),
        ("CUDA_MPS_PIPE_DIRECTORY", dirs.pipe),
        ("CUDA_MPS_LOG_DIRECTORY", dirs.log),
        ("CUDA_MPS_PROTOCOL_VERSION", str(protocol)),
        # By UUID, so that the daemon's ordinals start at 0 whatever the host's indices are.
        ("CUDA_VISIBLE_DEVICES", ",".join(domain.gpus)),
        (DAEMON_MARKER, domain.name),
        *(((SHARED_MEMORY_MARKER, "1"),) if config.mps.shared_memory else ()),
    )
    namespaces = _namespaces(config, domain, infos, served) if protocol == 3 else ()
    homes = dict.fromkeys((domain.name, *(group.name for group in domain.groups), *domain.gpus))
    return DaemonSpec(
        domain.name,
        domain.gpus,
        protocol,
        _default_limit_bytes(config, domain, infos, served, protocol),
        dirs,
        environment,
        namespaces,
        tuple(_links(dirs, domain, namespaces, allocations)) if protocol == 3 else (),
        tuple(dirs.links_of(home) for home in homes),
        config.mps.shared_memory,
        several_users(members),
    )


def namespace_of(allocation: DesiredAllocation, daemon: str) -> Namespace:
    """The namespace of one allocation on the daemon of that name. Shares of several GPUs have the same names there, so
    those of another group than the daemon's have their keys."""
    fixed = allocation.slot is not None and allocation.group == daemon
    name = share_name(allocation.resource, allocation.slot or 0) if fixed else units_name(allocation.key)
    return Namespace(name, allocation.limit_bytes, allocation.thread_percent)


def link_of(allocation: DesiredAllocation, dirs: DaemonDirs, daemon: str) -> Link | None:
    """Where a container of it mounts its socket of the daemon of that name: for as long as it lives the same place,
    whichever daemon serves it. None: it mounts what the daemon itself makes (`mps.namespaceMount`)."""
    lone = is_set_name(allocation.group)  # of a set of GPUs nothing would be left when it is gone
    home = dirs.links_of(min(allocation.gpus) if lone else allocation.group)
    if allocation.default_socket:
        return Link(home, MAIN, MAIN)
    if not dirs.linked:
        return None
    return Link(home, namespace_of(allocation, allocation.group).name, namespace_of(allocation, daemon).name)


def mount_of(allocation: DesiredAllocation, dirs: DaemonDirs, daemon: str) -> str:
    """The directory of the host that a container of it mounts, by names alone (protocol 3)."""
    link = link_of(allocation, dirs, daemon)
    return namespace_directory(dirs, namespace_of(allocation, daemon).name) if link is None else link.directory


def can_move(allocation: DesiredAllocation, daemon: DaemonSpec) -> bool:
    """Whether another daemon can take the place of its own while its container is there, and has no client: its
    container has mounted nothing that is that daemon's."""
    stable = daemon.protocol == 3 and not daemon.shared_memory and link_of(allocation, daemon.dirs, "") is not None
    return stable or not needs_daemon(allocation)


def _links(
    dirs: DaemonDirs,
    domain: Domain,
    namespaces: Iterable[Namespace],
    allocations: Iterable[DesiredAllocation],
) -> Iterable[Link]:
    of_allocations = [link_of(allocation, dirs, domain.name) for allocation in allocations if needs_daemon(allocation)]
    found = {link.directory: link for link in of_allocations if link is not None}
    linked = {link.namespace for link in found.values()}
    if dirs.linked:
        spare = (namespace.name for namespace in namespaces if namespace.name not in linked)
        found.update((link.directory, link) for link in (Link(dirs.links, name, name) for name in spare))
    return found.values()


def _default_limit_bytes(
    config: NodeConfig,
    domain: Domain,
    infos: Mapping[str, GpuInfo],
    served: Iterable[DesiredAllocation],
    protocol: int,
) -> int:
    """What a client may have at most of a GPU when nothing else is said."""
    # A container's own limit can't exceed the daemon's default, so that is never below what was granted. One on several
    # GPUs has no limit of its own under protocol 2: there a reload must not loosen what holds those that run.
    granted = max((allocation.limit_bytes for allocation in served), default=0)
    if protocol == 2 and len(domain.gpus) > 1 and granted:
        return granted
    limits = [
        largest_limit_bytes(config.resources, config, group, members, group_usable_bytes(config, members))
        for group in domain.groups
        if (members := _known(group.gpus, infos))
    ]
    largest = max((limit for limit in limits if limit is not None), default=None)
    usable = group_usable_bytes(config, _known(domain.gpus, infos))
    return max(usable if largest is None else largest, granted)


def _known(gpus: Iterable[str], infos: Mapping[str, GpuInfo]) -> list[GpuInfo]:
    return [infos[uuid] for uuid in gpus if uuid in infos]


def group_usable_bytes(config: NodeConfig, members: Iterable[GpuInfo]) -> int:
    """Usable memory that every GPU of a group has: its shares have the same size on each."""
    return min((usable_bytes(info, config.memory_reserve_bytes) for info in members), default=0)


def _namespaces(
    config: NodeConfig, domain: Domain, infos: Mapping[str, GpuInfo], served: Iterable[DesiredAllocation]
) -> tuple[Namespace, ...]:
    """What the live allocations have: theirs counts. And one for each fixed share that may lie on the very GPUs of the
    daemon, so that it need not be made first."""
    wanted: dict[str, Namespace] = {}
    group = next((group for group in domain.groups if group.name == domain.name), None)
    if group is not None and (members := _known(group.gpus, infos)):
        wanted.update((namespace.name, namespace) for namespace in _of_shares(config, group, members))
    for allocation in served:
        namespace = namespace_of(allocation, domain.name)
        wanted[namespace.name] = namespace
    return tuple(wanted[name] for name in sorted(wanted))


def _of_shares(config: NodeConfig, group: Group, members: Sequence[GpuInfo]) -> Iterable[Namespace]:
    usable = group_usable_bytes(config, members)
    for resource in config.resources:
        if resource.mode is not Mode.SM_SHARING or not is_allowed(resource, config, group, members):
            continue
        size = share_size(resource, usable)
        if isinstance(resource.memory, UnitMemory) or not isinstance(size, ShareSize):
            continue
        for slot in range(slot_count(resource, usable, client_limit(members, config.mps.client_limit))):
            yield Namespace(share_name(resource.name, slot), size.limit_bytes, resource.thread_percent)


def _not_shared(config: NodeConfig, domain: Domain, members: Sequence[GpuInfo], spec: DaemonSpec) -> Reason | None:
    if domain.objection:
        return Reason(SharingCode.GROUP_NOT_AS_CONFIGURED, f"group {domain.name}: {domain.objection}")
    for info in members:
        if reason := _gpu_not_shared(config, info):
            where = f"GPU {info.index}: " if len(domain.gpus) > 1 else ""
            if domain.has_name:
                where = f"GPU {info.index} of group {domain.name}: "
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
