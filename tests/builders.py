"""Values for tests: small node views with sensible defaults."""

from deviceplugin.plan.model import Allocation, NodeView, allocation_key
from deviceplugin.plan.view import gpu_view, node_view
from mpsd.config.model import GIB, Enforcement, FixedMemory, FractionMemory, Memory, NodeConfig, Resource, UnitMemory
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo, Mode
from mpsd.snapshot import DaemonState, DaemonStatus, GpuStatus, Snapshot


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


def info(index: int = 0, memory_gib: int = 80, **changes: object) -> GpuInfo:
    fields: dict[str, object] = {
        "uuid": uuid(index),
        "index": index,
        "name": "Test GPU",
        "memory_total_bytes": memory_gib * GIB,
        "memory_reserved_bytes": 0,
        "numa_node": index % 2,
    }
    return GpuInfo(**(fields | changes))  # type: ignore[arg-type]


def fixed(gib: int, limit_gib: int | None = None) -> FixedMemory:
    return FixedMemory(request_bytes=gib * GIB, limit_bytes=(limit_gib or gib) * GIB)


def fraction(part: float) -> FractionMemory:
    return FractionMemory(fraction=part, limit_fraction=part)


def units(gib: int = 1) -> UnitMemory:
    return UnitMemory(unit_bytes=gib * GIB)


def resource(name: str, memory: Memory, mode: Mode = Mode.SM_SHARING, **changes: object) -> Resource:
    level = Enforcement.COOPERATIVE if mode is Mode.SM_SHARING else Enforcement.NONE
    fields: dict[str, object] = {"name": f"gpufrac.dev/{name}", "memory": memory, "mode": mode, "enforcement": level}
    return Resource(**(fields | changes))  # type: ignore[arg-type]


def config(*resources: Resource, **changes: object) -> NodeConfig:
    return NodeConfig(resources=resources, **changes)  # type: ignore[arg-type]


def ready(limit_gib: int = 79) -> DaemonStatus:
    return DaemonStatus(state=DaemonState.READY, pid=1, pipe_directory="/run/mps", pinned_limit_bytes=limit_gib * GIB)


def status(gpu: GpuInfo, **changes: object) -> GpuStatus:
    fields: dict[str, object] = {
        "info": gpu,
        "health": GpuHealth.OK,
        "daemon": ready(),
        "driver_compute_mode": ComputeMode.DEFAULT,
    }
    return GpuStatus(**(fields | changes))  # type: ignore[arg-type]


def snapshot(*gpus: GpuStatus, generation: int = 1) -> Snapshot:
    return Snapshot(instance="test", generation=generation, driver_version="580.95.05", gpus=gpus)


def node(cfg: NodeConfig, *gpus: GpuInfo, **changes: str) -> NodeView:
    return node_view(cfg, [gpu_view(status(gpu), cfg, **changes) for gpu in gpus])


def allocation(
    name: str, *device_ids: str, gib: int = 8, generation: int = 1, mode: Mode = Mode.SM_SHARING
) -> Allocation:
    from deviceplugin.plan.accounts import gpus_of

    ids = tuple(sorted(device_ids))
    resource_name = f"gpufrac.dev/{name}"
    return Allocation(
        key=allocation_key(resource_name, ids, generation),
        resource=resource_name,
        device_ids=ids,
        generation=generation,
        gpus=gpus_of(ids),
        request_bytes=gib * GIB * len(ids),
        limit_bytes=gib * GIB * len(ids),
        share_bytes=gib * GIB,
        memory_total_bytes=80 * GIB,
        mode=mode,
        enforcement=Enforcement.COOPERATIVE,
    )
