"""Config + what mpsd reports -> the planner's view of the node (pure)."""

from collections.abc import Iterable, Mapping

from msgspec import structs

from deviceplugin import ids
from deviceplugin.plan import enforcement
from deviceplugin.plan.model import Device, DeviceList, GpuView, NodeView, ResourceView
from mpsd.config.model import MAX_ADVERTISED_DEVICES, NodeConfig, Resource, UnitMemory
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.shares import ShareSize, share_size, slots, usable_bytes
from mpsd.snapshot import DaemonState, GpuStatus


def gpu_view(
    status: GpuStatus, config: NodeConfig, *, blocked: str = "", waiting: str = "", daemon_waiting: str = ""
) -> GpuView:
    """One GPU. The reasons given are those that need history, the kubelet or the CDI directories."""
    lost = status.reason or "the GPU is lost" if status.health is GpuHealth.LOST else ""
    if status.health not in (GpuHealth.OK, GpuHealth.LOST):
        waiting = status.reason or f"the GPU is {status.health}"
    return GpuView(
        uuid=status.info.uuid,
        index=status.info.index,
        usable_bytes=usable_bytes(status.info, config.memory_reserve_bytes),
        total_bytes=status.info.memory_total_bytes,
        numa_node=status.info.numa_node,
        lost=lost,
        blocked=status.not_shared or blocked,
        waiting=waiting,
        daemon_waiting=daemon_waiting,
    )


def daemon_trouble(status: GpuStatus) -> str:
    """Why the GPU's MPS daemon can't take a client now, empty when it can."""
    daemon = status.daemon
    if daemon is None:
        return "its MPS daemon has not been started"
    if daemon.state is DaemonState.READY:
        return ""
    return f"its MPS daemon is {daemon.state}" + (f": {daemon.reason}" if daemon.reason else "")


def node_view(config: NodeConfig, gpus: Iterable[GpuView], previous: NodeView | None = None) -> NodeView:
    """The whole node. `previous` lets unchanged resources keep their (long) ID tables."""
    by_uuid = {gpu.uuid: gpu for gpu in sorted(gpus, key=lambda gpu: gpu.index)}
    resources = {}
    for resource in config.resources:
        view = resource_view(resource, config, by_uuid)
        old = previous.resources.get(resource.name) if previous else None
        resources[resource.name] = old if old is not None and _same(old, view) else _with_ids(view, by_uuid)
    return NodeView(gpus=by_uuid, resources=resources, client_limit=config.mps.client_limit)


def resource_view(resource: Resource, config: NodeConfig, gpus: Mapping[str, GpuView]) -> ResourceView:
    """Sizes and objections of one resource, without its ID tables."""
    objection = enforcement.objection(resource, config.cdi.delivery)
    if not objection and resource.groups:
        objection = "groups of GPUs are not supported by this version"
    sizes: dict[str, ShareSize] = {}
    unfit: dict[str, str] = {}
    for gpu in gpus.values():
        if not (config.gpus.admits(gpu.uuid, gpu.index) and resource.gpus.admits(gpu.uuid, gpu.index)):
            continue
        size = share_size(resource, gpu.usable_bytes)
        if isinstance(size, ShareSize):
            sizes[gpu.uuid] = size
        else:
            unfit[gpu.uuid] = size
    if not objection and not sizes:
        no_gpu = "no GPU of this node is open to it" if gpus else "no GPU is known yet"
        objection = next(iter(unfit.values()), no_gpu)
    slots = {uuid: slot_count(resource, gpus[uuid].usable_bytes, config.mps.client_limit) for uuid in sizes}
    total = sum(slots.values())
    too_long = ""
    if objection:
        slots = {}
    elif total > MAX_ADVERTISED_DEVICES:
        slots = {}
        too_long = (
            f"it would list {total} devices, more than the {MAX_ADVERTISED_DEVICES} a kubelet safely takes: "
            "use a larger unit or fewer GPUs"
        )
    return ResourceView(
        resource=resource,
        enforcement=enforcement.level(resource.mode, config.cdi.delivery),
        objection=objection,
        too_long=too_long,
        sizes=sizes,
        unfit=unfit,
        slots=slots,
    )


def _same(old: ResourceView, new: ResourceView) -> bool:
    bare = structs.replace(old, device_ids={}, devices={}, gpu_of={})
    return bare == new


def _with_ids(view: ResourceView, gpus: Mapping[str, GpuView]) -> ResourceView:
    """Adds the tables of fixed IDs."""
    device_ids = {uuid: tuple(ids.device_id(uuid, n) for n in range(count)) for uuid, count in view.slots.items()}
    gpu_of = {identifier: uuid for uuid, all_ids in device_ids.items() for identifier in all_ids}
    devices = {}
    for uuid, all_ids in device_ids.items():
        numa = numa_node(view.resource, gpus[uuid])
        healthy, unhealthy = (tuple(Device(i, health, numa) for i in all_ids) for health in (True, False))
        devices[uuid] = DeviceList(healthy, unhealthy)
    return structs.replace(view, device_ids=device_ids, devices=devices, gpu_of=gpu_of)


def numa_node(resource: Resource, gpu: GpuView) -> int | None:
    """The NUMA node told for a resource's devices. None for units: with topology hints a kubelet may skip the preferred
    allocation, and units would come from several GPUs (verified on kubelet 1.36.2)."""
    return None if isinstance(resource.memory, UnitMemory) else gpu.numa_node


def slot_count(resource: Resource, usable: int, client_limit: int) -> int:
    """How many shares of the resource one GPU lists: what fits, and under MPS no more than it takes clients."""
    count = slots(resource, usable)
    if resource.mode is Mode.SM_SHARING and not isinstance(resource.memory, UnitMemory):
        return min(count, client_limit)
    return count
