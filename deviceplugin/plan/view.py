"""Config + what mpsd reports + live allocations -> the planner's view of the node (pure)."""

from collections.abc import Iterable, Mapping

from msgspec import structs

from deviceplugin.plan import enforcement, ids
from deviceplugin.plan.groups import NO_GPU, SET_ASIDE, group_views, held_set_view, set_views
from deviceplugin.plan.model import (
    AnnotatedView,
    Device,
    DeviceList,
    GpuView,
    GroupView,
    HardAbility,
    NodeView,
    ResourceView,
)
from deviceplugin.plan.reasons import OfferCode
from mpsd.common.reason import Reason
from mpsd.config.model import (
    MAX_ADVERTISED_DEVICES,
    Enforcement,
    NamespaceMount,
    NodeConfig,
    Resource,
    ShortfallPolicy,
    UnitMemory,
)
from mpsd.gpu.model import GpuHealth
from mpsd.localapi.reasons import DaemonCode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuStatus
from mpsd.shares.capability import client_limit
from mpsd.shares.domains import node_span
from mpsd.shares.groups import label
from mpsd.shares.sizes import (
    ShareSize,
    for_annotated,
    is_selected,
    largest_limit_bytes,
    set_aside,
    share_size,
    slot_count,
    usable_bytes,
)

NOT_KNOWN = HardAbility()
FOR_ANNOTATED = Reason(OfferCode.SET_ASIDE, "set aside for annotated pods: resources take nothing here")
"""Of one GPU."""
RESERVED = Reason(
    OfferCode.RESERVED, "a scheduler's reservation pod holds it for annotated pods: resources take nothing new there"
)
NO_GPU_SELECTED = Reason(OfferCode.NO_GPU_SELECTED, "no GPU of this node is open to it")

ITS_DAEMON = "its MPS daemon"
NO_DAEMON = Reason(OfferCode.DAEMON_NOT_READY, f"{ITS_DAEMON} has not been started")


def gpu_view(
    status: GpuStatus,
    config: NodeConfig,
    *,
    blocked: Reason | None = None,
    waiting: Reason | None = None,
    daemon_waiting: Reason | None = None,
    reserved: Reason | None = None,
    protocol: int = 2,
) -> GpuView:
    """One GPU. The reasons given are those that need history, an operator, the kubelet or the CDI directories."""
    lost = None
    if status.health is not GpuHealth.OK:
        why = status.why or Reason(OfferCode.GPU_NOT_WELL, f"the GPU is {status.health}")
        lost, waiting = (why, waiting) if status.health is GpuHealth.LOST else (None, why)
    return GpuView(
        info=status.info,
        usable_bytes=usable_bytes(status.info, config.memory_reserve_bytes),
        lost=lost,
        blocked=status.why_not_shared or blocked,
        waiting=waiting,
        daemon_waiting=daemon_waiting,
        protocol=protocol,
        client_limit=client_limit([status.info], config.mps.client_limit),
        for_annotated=for_annotated(config, [status.info]),
        reserved=reserved,
        daemon=status.daemon.name if status.daemon is not None and status.daemon.pid is not None else "",
        clients=status.clients,
    )


def daemon_trouble(status: GpuStatus) -> Reason | None:
    """Why nothing new should come to the GPU's MPS daemon now, None when it may."""
    daemon = status.daemon
    if daemon is None:
        return NO_DAEMON
    if daemon.state is DaemonState.READY and not daemon.wedged:
        return None
    return Reason(OfferCode.DAEMON_NOT_READY, daemon_text(daemon))


def serves(daemon: DaemonStatus) -> bool:
    """Whether an MPS daemon serves the containers it has. A draining one does."""
    return daemon.state in (DaemonState.READY, DaemonState.DRAINING) and not daemon.wedged


def daemon_state(daemon: DaemonStatus) -> str:
    """Its state in one word; a wedged one is ready in name only."""
    return "wedged" if daemon.wedged else daemon.state


def daemon_reason(daemon: DaemonStatus) -> str:
    """Its reason, without the state where it begins with it: that is shown beside it."""
    state = daemon_state(daemon)
    return daemon.reason.removeprefix(f"{state}, ").removeprefix(f"{state}: ")


def daemon_text(daemon: DaemonStatus) -> str:
    """What is with a GPU's MPS daemon."""
    reason = daemon_reason(daemon)
    if daemon.reason_code == DaemonCode.REPLACED_WHEN_IDLE and not daemon.wedged:
        return f"{ITS_DAEMON} {reason.removeprefix('it ')}"
    if daemon.state is DaemonState.ABSENT and not reason:
        return f"{ITS_DAEMON} does not run"
    return f"{ITS_DAEMON} is {daemon_state(daemon)}" + (f": {reason}" if reason else "")


def domain_text(name: str, gpus: Iterable[GpuStatus]) -> str:
    """How texts call the domain of that name, by those of these GPUs that it serves."""
    infos = sorted((gpu.info for gpu in gpus if gpu.group == name), key=lambda info: info.index)
    return label(name, [info.uuid for info in infos], {info.uuid: info.index for info in infos})


def node_view(
    config: NodeConfig,
    gpus: Iterable[GpuView],
    held: Mapping[str, tuple[str, ...]] | None = None,
    *,
    held_sets: Mapping[str, tuple[str, ...]] | None = None,
    hard: HardAbility = NOT_KNOWN,
    complete: bool = False,
    previous: NodeView | None = None,
) -> NodeView:
    """The whole node.

    Args:
        held: the groups that live allocations were granted on: name -> GPUs.
        held_sets: the same of sets of GPUs.
        complete: mpsd has reported all GPUs since we started, so one that is not here is gone.
        previous: lets unchanged resources keep their (long) ID tables.
    """
    by_uuid = {gpu.uuid: gpu for gpu in sorted(gpus, key=lambda gpu: gpu.index)}
    by_name = {group.name: group for group in group_views(config, by_uuid, held or {}, complete=complete)}
    sets = {
        name: held_set_view(config, name, uuids, by_uuid, complete=complete)
        for name, uuids in (held_sets or {}).items()
    }
    resources = {}
    for resource in config.resources:
        places: Mapping[str, GroupView] | Reason = by_name
        if resource.gpu_count > 1:
            places = set_views(resource, config, by_name, complete=complete)
            sets.update({} if isinstance(places, Reason) else places)
        view = resource_view(resource, config, places, hard)
        old = previous.resources.get(resource.name) if previous else None
        resources[resource.name] = old if old is not None and _same(old, view) else _with_ids(view)
    annotated = None
    if config.annotations is not None:
        annotated = AnnotatedView(
            config.annotations.enforcement,
            hard.of_annotated(),
            share=config.annotations.share,
            reduces=config.annotations.shortfall is ShortfallPolicy.REDUCE,
        )
    together = node_span(config, [gpu.info for gpu in by_uuid.values() if gpu.lost is None])
    running: dict[str, tuple[str, ...]] = {}
    for gpu in by_uuid.values():
        running[gpu.daemon] = (*running.get(gpu.daemon, ()), gpu.uuid)
    return NodeView(
        gpus=by_uuid,
        groups=by_name,
        resources=resources,
        sets=sets,
        daemons={name: members for name, members in running.items() if name and len(members) > 1},
        together=together if all(by_uuid[uuid].protocol == 3 for uuid in together) else (),
        movable=not config.mps.shared_memory,
        linked=config.mps.namespace_mount is NamespaceMount.LINKED,
        annotated=annotated,
    )


def resource_view(
    resource: Resource, config: NodeConfig, places: Mapping[str, GroupView] | Reason, hard: HardAbility
) -> ResourceView:
    """Sizes and objections of one resource, without its ID tables. `places`: what its shares may lie on, or why there
    is nothing."""
    by_name = {} if isinstance(places, Reason) else places
    delivery = config.cdi.delivery
    objection, waiting = enforcement.objection(resource, delivery, hard), None
    if objection is not None and not hard.known:
        hard = hard.assuming_proven()
        objection = enforcement.objection(resource, delivery, hard)
        waiting = enforcement.UNKNOWN
    given = enforcement.level(resource.mode, delivery, hard)
    sizes: dict[str, ShareSize] = {}
    unfit: dict[str, Reason] = {}
    unheld: dict[str, Reason] = {}
    for group in by_name.values():
        if not is_selected(resource, config, group.group, [gpu.info for gpu in group.members]):
            continue
        size, loose = _size_on(resource, config, group, given)
        if isinstance(size, Reason):
            unfit[group.name] = size
            continue
        sizes[group.name] = size
        if loose is not None:
            unheld[group.name] = loose
    if objection is None and isinstance(places, Reason):
        objection = places
    elif objection is None and not sizes:
        if any(group.members for group in by_name.values()):
            others = (reason for reason in unfit.values() if reason != SET_ASIDE)
            objection = next(others, SET_ASIDE if unfit else NO_GPU_SELECTED)
        else:
            objection = NO_GPU
    slots = {
        name: slot_count(resource, by_name[name].usable_bytes, min(gpu.client_limit for gpu in by_name[name].members))
        for name in sizes
    }
    total = sum(slots.values())
    too_long = None
    if objection is not None:
        slots = {}
    elif total > MAX_ADVERTISED_DEVICES:
        slots = {}
        too_long = Reason(
            OfferCode.TOO_MANY_DEVICES,
            f"it would list {total} devices, more than the {MAX_ADVERTISED_DEVICES} a kubelet safely takes: "
            "use a larger unit or fewer GPUs",
        )
    return ResourceView(
        resource=resource,
        enforcement=given,
        objection=objection,
        waiting=waiting,
        too_long=too_long,
        sizes=sizes,
        unfit=unfit,
        unheld=unheld,
        slots=slots,
        numa_nodes={name: numa_nodes(resource, by_name[name]) for name in slots},
    )


def _size_on(
    resource: Resource, config: NodeConfig, group: GroupView, given: Enforcement
) -> tuple[ShareSize | Reason, Reason | None]:
    """How large a share is on a group that its resource selects, or why there can be none; and why its limit would not
    be held there, None when it is."""
    infos = [gpu.info for gpu in group.members]
    if set_aside(config, infos):
        return SET_ASIDE, None
    if group.unlisted is not None:
        return group.unlisted, None
    size = share_size(resource, group.usable_bytes)
    if isinstance(size, str):
        return Reason(OfferCode.TOO_LARGE, size), None
    unfit = enforcement.burst_objection(resource, group) or enforcement.percentage_objection(resource, group)
    if unfit is not None or given is Enforcement.HARD:
        return unfit or size, None
    loose = enforcement.capability_objection(resource, group, given)
    if loose is None and not group.is_set:  # of a set, the daemon's limit follows what is granted
        default = largest_limit_bytes(config.resources, config, group.group, infos, group.usable_bytes)
        loose = enforcement.one_limit_objection(resource, group, size.limit_bytes, default or 0)
    return (loose, None) if loose is not None and resource.enforcement.rank > 0 else (size, loose)


def _same(old: ResourceView, new: ResourceView) -> bool:
    bare = structs.replace(old, device_ids={}, devices={}, group_of={})
    return bare == new


def _with_ids(view: ResourceView) -> ResourceView:
    """Adds the tables of fixed IDs."""
    device_ids = {name: tuple(ids.device_id(name, n) for n in range(count)) for name, count in view.slots.items()}
    devices = {}
    for name, all_ids in device_ids.items():
        numa = view.numa_nodes[name]
        healthy, unhealthy = (tuple(Device(i, health, numa) for i in all_ids) for health in (True, False))
        devices[name] = DeviceList(healthy, unhealthy)
    by_id = {identifier: name for name, all_ids in device_ids.items() for identifier in all_ids}
    return structs.replace(view, device_ids=device_ids, devices=devices, group_of=by_id)


def numa_nodes(resource: Resource, group: GroupView) -> tuple[int, ...]:
    """The NUMA nodes told for a resource's devices. Not for units: with topology hints a kubelet may skip the preferred
    allocation, and units would come from several GPUs (verified on kubelet 1.36.2)."""
    if isinstance(resource.memory, UnitMemory):
        return ()
    return tuple(sorted({gpu.info.numa_node for gpu in group.members if gpu.info.numa_node is not None}))
