"""A commented config for a node, from what is known of it (pure): sizes that fit its GPUs, a mode and why."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from deviceplugin.draft.facts import NodeFacts
from deviceplugin.draft.text import aside, comment
from mpsd.common.quantity import format_bytes
from mpsd.config.model import (
    GIB,
    MIN_UNIT_BYTES,
    MPS_CLIENTS_PER_GPU,
    Enforcement,
    FixedMemory,
    FractionMemory,
    Memory,
    NodeConfig,
    Resource,
    UnitMemory,
)
from mpsd.daemon import protocol3
from mpsd.gpu.model import MIB, GpuInfo, Mode
from mpsd.limits.judge import MIN_DRIVER
from mpsd.shares import capability
from mpsd.shares.sizes import has_burst, share_size, slot_count, usable_bytes

RESERVE_BYTES: Final = NodeConfig(resources=()).memory_reserve_bytes
SHARES: Final = 4
"""A share of fixed size is the largest power of two of which so many fit on the smallest GPU."""

OPTIONS: Final = (
    ("gpus: {include: all}", "or UUIDs, as `gpufrac gpus` shows them: only these are shared"),
    ('metrics: {address: "127.0.0.1:9478"}', "the plugin's metrics and probes; an address that others reach, or none"),
    ("kubernetes: {access: in-cluster}", "the node's condition and events of pods; off without"),
    ("annotations: {gpus: {include: all}, share: true}", "pods that a scheduler such as KAI describes by annotations"),
)
"""Keys that many want to change, and what for. Each may be put in force as it stands."""


class Advice(NamedTuple):
    """`enforcement`: what must be accepted for it, None for the default."""

    mode: Mode
    why: str
    enforcement: Enforcement | None = None


def advice(facts: NodeFacts) -> Advice:
    """The compute mode for all GPUs of the node."""
    shared = shareable(facts)
    hit = "one process's fatal GPU fault ends all containers on its GPU"
    if not shared:
        return Advice(
            Mode.SM_SHARING, f"it has memory limits with every driver. Containers compute at the same time; {hit}"
        )
    old = [gpu for gpu in shared if capability.objection([gpu])]
    if is_hard(facts):
        if len(old) == len(shared):
            return Advice(Mode.TIME_SLICING, f"limits are hard in it, and {capability.objection(old)}")
        return Advice(
            Mode.SM_SHARING,
            "memory limits are hard in both modes here, and in this one containers compute at the same time; but "
            f"{hit}. Where tenants must not be hit together, write time-slicing: contexts take turns, each with its "
            "own faults",
        )
    if len(old) == len(shared):
        return Advice(
            Mode.TIME_SLICING,
            f"no memory limit can be held here: {capability.objection(old)}. So these shares are a promise only",
            Enforcement.NONE,
        )
    return Advice(
        Mode.SM_SHARING,
        "only MPS can hold memory limits here, and in time-slicing there would be none. Containers compute at the same "
        f"time; {hit}",
    )


def shareable(facts: NodeFacts) -> tuple[GpuInfo, ...]:
    """The GPUs that can be shared at all."""
    return tuple(gpu for gpu in facts.gpus if not gpu.mig_enabled)


def is_hard(facts: NodeFacts) -> bool:
    """Whether limits on cgroups can be set and hold, as far as driver and kernel tell."""
    return facts.hard_limits.probed and not facts.hard_limits.missing


def resources(facts: NodeFacts) -> list[Resource]:
    """What to offer: a fixed size, one that may borrow where limits are hard, a half, and any size in units."""
    advised = advice(facts)
    usable = [size for gpu in shareable(facts) if (size := usable_bytes(gpu, RESERVE_BYTES)) >= MIN_UNIT_BYTES]
    memories: dict[str, Memory] = {}
    if usable:
        size = _power_of_two(max(MIN_UNIT_BYTES, min(usable) // SHARES))
        memories[f"gpu-{_in_name(size)}"] = FixedMemory(request_bytes=size, limit_bytes=size)
        if is_hard(facts) and 2 * size <= min(usable):
            memories[f"gpu-{_in_name(size)}-burst"] = FixedMemory(request_bytes=size, limit_bytes=2 * size)
    else:
        memories["gpu-quarter"] = FractionMemory(fraction=0.25, limit_fraction=0.25)
    memories["gpu-half"] = FractionMemory(fraction=0.5, limit_fraction=0.5)
    small = bool(usable) and min(usable) < 4 * GIB
    unit = MIN_UNIT_BYTES if small else GIB
    memories["memory-64mi" if small else "memory-gib"] = UnitMemory(unit_bytes=unit)
    level = advised.enforcement or Enforcement.COOPERATIVE
    return [
        Resource(name=f"gpufrac.dev/{name}", memory=memory, mode=advised.mode, enforcement=level)
        for name, memory in memories.items()
    ]


def draft(facts: NodeFacts, version: str) -> str:
    """The whole file."""
    return "\n".join(_lines(facts, version)) + "\n"


def _lines(facts: NodeFacts, version: str) -> Iterator[str]:
    advised = advice(facts)
    node = "a node like the one described" if facts.told else "this node"
    yield from comment(f"gpufrac config for {node}, by `gpufrac config init` ({version}). All keys: docs/config.md")
    yield from comment("Check it: gpufrac config check FILE. Try it: gpufrac sim run --config FILE pod.yaml")
    yield "#"
    yield from _found(facts)
    yield "#"
    yield from comment(f"Mode advised: {advised.mode}: {advised.why}.")
    yield "apiVersion: gpufrac.dev/v1"
    yield "kind: NodeConfig"
    yield "resources:"
    for resource in resources(facts):
        yield from _resource(resource, facts)
    yield aside("memory: {reserve: 1Gi}", "of each GPU, kept from shares beside what the driver keeps")
    minimum = advised.enforcement or Enforcement.COOPERATIVE
    what = {
        Enforcement.COOPERATIVE: "hard: offer nothing where limits can't be hard",
        Enforcement.NONE: "accept that nothing holds these limits",
    }
    yield aside(f"enforcement: {{minimum: {minimum}}}", what[minimum])
    if facts.driver_root is None and facts.gpus:
        yield from comment(
            "nvidia-cuda-mps-control was not found: name it by mps.binary, or the root of the driver's files by "
            "mps.driverRoot, if it is not where mpsd looks for programs."
        )
    elif facts.driver_root not in (None, "/"):
        yield aside(f"mps: {{driverRoot: {facts.driver_root}}}", "the driver's files are there")
    yield "#"
    yield from comment("More keys. Take away a # to put one in force.")
    for key, meaning in OPTIONS:
        yield f"#{aside(key, meaning)}"


def _found(facts: NodeFacts) -> Iterator[str]:
    if facts.driver_version is not None:
        yield from comment(f"Driver {facts.driver_version}" if facts.told else f"Found: driver {facts.driver_version}")
    for gpu in facts.gpus:
        yield from comment(_gpu(gpu, facts), indent="  ")
    for trouble in facts.troubles:
        yield from comment(f"Not found out: {trouble}")
    if not shareable(facts):
        nothing = "all GPUs have MIG on" if facts.gpus else "no GPU was seen"
        yield from comment(f"As {nothing}, the sizes below are such that they fit any GPU.")
    if facts.driver_version is not None:
        yield "#"
        yield from _ability(facts)


def _gpu(gpu: GpuInfo, facts: NodeFacts) -> str:
    name = f"GPU {gpu.index}: {'' if facts.told else f'{gpu.name}, {gpu.uuid}, '}{_about(gpu.memory_total_bytes)}"
    if gpu.mig_enabled:
        return f"{name}: MIG is on, so it is left alone"
    limits = capability.objection([gpu])
    less = f"; {limits}" if limits else ""
    return f"{name}, of which {_about(usable_bytes(gpu, RESERVE_BYTES))} can be shared{less}"


def _ability(facts: NodeFacts) -> Iterator[str]:
    new = protocol3.driver_major(facts.driver_version or "") >= protocol3.FIRST_DRIVER
    yield from comment(
        "MPS: protocol 3, with limits of its own for each container, where the control binary has it; else 2"
        if new
        else f"MPS: protocol 2; protocol 3, with limits of its own for each container, comes with driver r{MIN_DRIVER}"
    )
    if is_hard(facts):
        yield from comment(
            "Memory limits: hard, for all that a container does, where the container toolkit sets them too: see "
            "`hard limits` in `gpufrac status`"
        )
        return
    held = "none" if advice(facts).enforcement is Enforcement.NONE else "cooperative: each CUDA process keeps to it"
    yield from comment(f"Memory limits: {held}. Hard limits:")
    for missing in facts.hard_limits.missing if facts.hard_limits.probed else ("it was not found out",):
        yield from comment(f"no: {missing}", indent="  ")


def _resource(resource: Resource, facts: NodeFacts) -> Iterator[str]:
    name = aside(f"  - name: {resource.name}", _meaning(resource, facts))
    yield name
    match resource.memory:
        case FixedMemory(request_bytes=request, limit_bytes=limit):
            more = f", limit: {format_bytes(limit)}" if limit > request else ""
            yield f"    memory: {{request: {format_bytes(request)}{more}}}"
        case FractionMemory(fraction=fraction):
            yield f"    memory: {{fraction: {fraction:g}}}"
        case UnitMemory(unit_bytes=unit):
            yield f"    unit: {format_bytes(unit)}"
    yield f"    compute: {{mode: {resource.mode}}}"


def _meaning(resource: Resource, facts: NodeFacts) -> str:
    match resource.memory:
        case FixedMemory(request_bytes=request, limit_bytes=limit) if has_burst(resource.memory):
            return f"{format_bytes(request)} guaranteed, up to {format_bytes(limit)} while that is free"
        case FixedMemory(request_bytes=request):
            return f"{format_bytes(request)}, guaranteed and capped: {_counts(resource, facts)}"
        case FractionMemory(fraction=fraction):
            part = {0.25: "a quarter", 0.5: "half"}[fraction]
            return f"{part} of what can be shared{_sizes(resource, facts)}"
        case UnitMemory(unit_bytes=unit):
            return f"any size: N of these are N times {format_bytes(unit)}, all on one GPU"


def _counts(resource: Resource, facts: NodeFacts) -> str:
    """How many lie side by side, by GPU."""
    found: dict[int, list[int]] = {}
    for gpu in shareable(facts):
        usable = usable_bytes(gpu, RESERVE_BYTES)
        count = slot_count(resource, usable, capability.client_limit([gpu], MPS_CLIENTS_PER_GPU))
        found.setdefault(count, []).append(gpu.index)
    return _by_gpu({str(count or "none"): indices for count, indices in found.items()})


def _sizes(resource: Resource, facts: NodeFacts) -> str:
    found: dict[str, list[int]] = {}
    for gpu in shareable(facts):
        size = share_size(resource, usable_bytes(gpu, RESERVE_BYTES))
        found.setdefault("none" if isinstance(size, str) else _about(size.request_bytes), []).append(gpu.index)
    return f": {_by_gpu(found)}" if found else ""


def _by_gpu(values: dict[str, list[int]]) -> str:
    if len(values) == 1:
        return f"{next(iter(values))} on each GPU"
    return ", ".join(f"{value} on GPU {' '.join(map(str, indices))}" for value, indices in values.items())


def _power_of_two(size_bytes: int) -> int:
    """The largest one that is not larger."""
    return 1 << (size_bytes.bit_length() - 1)


def _in_name(size_bytes: int) -> str:
    return format_bytes(size_bytes).lower()


def _about(size_bytes: int) -> str:
    """For people: two places."""
    if size_bytes < GIB:
        return f"{size_bytes // MIB}Mi"
    return f"{size_bytes / GIB:.2f}".rstrip("0").rstrip(".") + "Gi"
