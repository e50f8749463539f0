"""Values for tests: small node views with sensible defaults."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from deviceplugin.plan import ids
from deviceplugin.plan.allocation import Allocation, allocation_key
from deviceplugin.plan.model import HardAbility, NodeView
from deviceplugin.plan.view import gpu_view, node_view
from deviceplugin.status.attention import attention
from deviceplugin.status.model import PluginStatus
from mpsd.common.reason import Reason
from mpsd.config.model import GIB, Enforcement, FixedMemory, FractionMemory, Memory, NodeConfig, Resource, UnitMemory
from mpsd.daemon.plan import namespace_of, needs_daemon, plan
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo, Mode
from mpsd.localapi.snapshot import Attached, DaemonState, DaemonStatus, Desired, GpuStatus, HardLimits, Snapshot
from mpsd.shares.domains import domain_of

PLAIN_KIND, HOOKED_KIND = "nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu"
CAN = HardLimits(backend="dmem", missing=())
CANNOT = HardLimits(missing=("driver 580.95.05 has no memory limits: install 615 or newer",))
HARD = HardAbility(CAN, HOOKED_KIND, frozenset({HOOKED_KIND}))
NOT_HARD = HardAbility(CANNOT)


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


def info(index: int = 0, memory_gib: int = 80, **changes: object) -> GpuInfo:
    fields: dict[str, object] = {
        "uuid": uuid(index),
        "index": index,
        "name": "Test GPU",
        "memory_total_bytes": memory_gib * GIB,
        "memory_reserved_bytes": 0,
        "compute_capability": (9, 0),
        "numa_node": index % 2,
    }
    return GpuInfo(**(fields | changes))  # type: ignore[arg-type]


def fixed(gib: int, limit_gib: int | None = None) -> FixedMemory:
    return FixedMemory(request_bytes=gib * GIB, limit_bytes=(limit_gib or gib) * GIB)


def fraction(part: float, limit: float | None = None) -> FractionMemory:
    return FractionMemory(fraction=part, limit_fraction=limit or part)


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
        "group": gpu.uuid,
        "daemon": ready(),
        "driver_compute_mode": ComputeMode.DEFAULT,
    }
    made = GpuStatus(**(fields | changes))  # type: ignore[arg-type]
    if made.daemon is None or made.daemon.name:
        return made
    return structs.replace(made, daemon=structs.replace(made.daemon, name=made.group))


def reported(
    cfg: NodeConfig, infos: Sequence[GpuInfo], desired: Desired, given: DaemonStatus | None = None
) -> list[GpuStatus]:
    """What an mpsd reports that has done all that is desired.

    `given` is each group's daemon, its name aside; None: ready, with the default limit that mpsd would set.
    """
    found = plan(cfg, infos, desired.allocations, lambda _: given.protocol if given else 2)
    owners = domain_of(p.domain for p in found)
    plans = {p.domain.name: p.spec for p in found}
    modes = {gpu: a.mode for a in desired.allocations for gpu in a.gpus}
    gpus = []
    for gpu in infos:
        group = owners[gpu.uuid].name
        daemon = given or structs.replace(ready(), pinned_limit_bytes=plans[group].pinned_limit_bytes)
        own = [a for a in desired.allocations if needs_daemon(a) and set(a.gpus) <= set(owners[gpu.uuid].gpus)]
        attached = tuple(
            Attached(a.key, f"/run/ns/{'_main' if a.default_socket else namespace_of(a, a.group).name}", a.limit_bytes)
            for a in own
        )
        made = structs.replace(daemon, name=group, attached=attached if daemon.protocol == 3 else ())
        gpus.append(status(gpu, group=group, daemon=made, mode=modes.get(gpu.uuid)))
    return gpus


def snapshot(*gpus: GpuStatus, generation: int = 1, hard_limits: HardLimits = CANNOT) -> Snapshot:
    return Snapshot(
        instance="test", generation=generation, driver_version="580.95.05", gpus=gpus, hard_limits=hard_limits
    )


def node(
    cfg: NodeConfig,
    *gpus: GpuInfo,
    held: Mapping[str, tuple[str, ...]] | None = None,
    held_sets: Mapping[str, tuple[str, ...]] | None = None,
    protocol: int = 2,
    hard: HardAbility = NOT_HARD,
    **reasons: Reason,
) -> NodeView:
    """A node's view; reasons are every GPU's."""
    views = [gpu_view(status(gpu), cfg, protocol=protocol, **reasons) for gpu in gpus]
    return node_view(cfg, views, held, held_sets=held_sets, hard=hard, complete=True)


def allocation(
    name: str,
    *device_ids: str,
    gib: int = 8,
    generation: int = 1,
    mode: Mode = Mode.SM_SHARING,
    gpus: tuple[str, ...] = (),
) -> Allocation:
    """`gpus` are those of a declared group."""
    shares = tuple(sorted(device_ids))
    resource_name = f"gpufrac.dev/{name}"
    (group,) = ids.groups_of(shares)
    return Allocation(
        key=allocation_key(resource_name, shares, generation),
        resource=resource_name,
        device_ids=shares,
        generation=generation,
        group=group,
        gpus=gpus or (group,),
        request_bytes=gib * GIB * len(shares),
        limit_bytes=gib * GIB * len(shares),
        share_bytes=gib * GIB,
        memory_total_bytes=80 * GIB,
        mode=mode,
        enforcement=Enforcement.COOPERATIVE,
    )


def told(snapshot: Snapshot | None, plugin: PluginStatus | None, errors: Iterable[Reason | None] = ()) -> list[str]:
    """What needs attention, as `gpufrac status` prints it."""
    return [line.message for line in attention(snapshot, plugin, errors)]
