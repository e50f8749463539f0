"""`resources` of the config file."""

from collections.abc import Collection, Mapping

from mpsd.common.quantity import format_bytes, parse_quantity
from mpsd.config.model import (
    MAX_GPUS_OF_SHARE,
    MIN_UNIT_BYTES,
    Enforcement,
    FixedMemory,
    FractionMemory,
    GpuSelection,
    Memory,
    Resource,
    UnitMemory,
)
from mpsd.config.names import resource_name_rule
from mpsd.config.selection import read_selection
from mpsd.config.value import Value
from mpsd.gpu.model import MIB, Mode

_LIKE = "[{name: gpufrac.dev/gpu-8gi, memory: {request: 8Gi}, compute: {mode: sm-sharing}}]"
_SIZES = tuple(f"memory.{key}" for key in ("request", "limit", "fraction", "limitFraction"))


def read_resources(
    value: Value, minimum: Enforcement, groups: Collection[str], *, none_allowed: bool
) -> tuple[Resource, ...]:
    """The section `resources`; problems are noted at its values."""
    items = value.items("resources", like=_LIKE)
    if items is not None and not items and not none_allowed:
        value.note("must hold at least one resource")
    names: dict[str, str] = {}
    resources = [_resource(item, minimum, groups, names) for item in items or ()]
    return tuple(resource for resource in resources if resource is not None)


def _resource(value: Value, minimum: Enforcement, groups: Collection[str], names: dict[str, str]) -> Resource | None:
    """`names`: resource name -> path of the resource that has it; grows."""
    entries = value.mapping(("name", "memory", "unit", "compute", "enforcement", "gpus"), like=_LIKE[1:-1])
    if entries is None:
        return None
    name = _name(value, entries, names)
    memory = _memory(value, entries)
    mode, thread_percent = _compute(value, entries)
    enforcement = entries["enforcement"].choice(Enforcement) if "enforcement" in entries else minimum
    selection, gpu_count, own_groups = _resource_gpus(entries.get("gpus"), groups)
    if isinstance(memory, UnitMemory) and (own_groups or gpu_count > 1):
        what = "groups are" if own_groups else "count is"
        entries["gpus"].note(f"{what} for resources with memory: all units of a container are on one GPU")
    if name is None or memory is None or mode is None or enforcement is None:
        return None
    return Resource(
        name=name,
        memory=memory,
        mode=mode,
        enforcement=enforcement,
        thread_percent=thread_percent,
        gpus=selection,
        gpu_count=gpu_count,
        groups=own_groups,
    )


def _name(value: Value, entries: Mapping[str, Value], names: dict[str, str]) -> str | None:
    entry = entries.get("name")
    if entry is None:
        value.missing("name", "such as gpufrac.dev/gpu-8gi")
        return None
    name = entry.text("must be a resource name such as gpufrac.dev/gpu-8gi")
    if name is None:
        return None
    if rule := resource_name_rule(name):
        entry.note(rule)
    elif name in names:
        entry.note(f"is already the name of {names[name]}")
    names.setdefault(name, value.path)
    return name


def _memory(value: Value, entries: Mapping[str, Value]) -> Memory | None:
    if "memory" in entries and "unit" in entries:
        entries["unit"].note("must not be given beside memory: one of the two sizes a resource")
        return None
    if "unit" in entries:
        unit_bytes = entries["unit"].size(MIN_UNIT_BYTES)
        return None if unit_bytes is None else UnitMemory(unit_bytes=unit_bytes)
    if "memory" not in entries:
        if not value.meant & {"unit", *_SIZES}:
            value.missing("memory", "such as {request: 8Gi} (or unit: 1Gi)")
        return None
    memory = entries["memory"]
    sizes = memory.mapping(("request", "limit", "fraction", "limitFraction"), like="{request: 8Gi}")
    if sizes is None:
        return None
    fixed, fractional = sizes.keys() & {"request", "limit"}, sizes.keys() & {"fraction", "limitFraction"}
    if fixed and fractional:
        memory.note("must hold request and limit, or fraction and limitFraction, not both")
        return None
    if fractional:
        return _fraction_memory(memory, sizes)
    return _fixed_memory(memory, sizes)


def _fixed_memory(memory: Value, sizes: Mapping[str, Value]) -> FixedMemory | None:
    limit = sizes["limit"].size(MIB, round_up=False) if "limit" in sizes else None
    if "request" not in sizes:
        memory.missing("request", "such as 8Gi")
        return None
    request = sizes["request"].size(MIB)
    if request is None:
        return None
    if limit is not None and limit < request:
        rounded = "" if parse_quantity(sizes["limit"].node.value) == limit else ", after rounding down to whole MiB"
        sizes["limit"].note(f"must be at least the request ({format_bytes(request)}){rounded}")
    return FixedMemory(request_bytes=request, limit_bytes=request if limit is None else limit)


def _fraction_memory(memory: Value, sizes: Mapping[str, Value]) -> FractionMemory | None:
    limit = sizes["limitFraction"].fraction() if "limitFraction" in sizes else None
    if "fraction" not in sizes:
        memory.missing("fraction", "such as 0.5")
        return None
    fraction = sizes["fraction"].fraction()
    if fraction is None:
        return None
    if limit is not None and limit <= fraction:
        sizes["limitFraction"].note(f"must be greater than the fraction ({fraction!r}), or left out")
    return FractionMemory(fraction=fraction, limit_fraction=fraction if limit is None else limit)


def _compute(value: Value, entries: Mapping[str, Value]) -> tuple[Mode | None, int | None]:
    rule = "sm-sharing or time-slicing"
    if "compute" not in entries:
        value.missing("compute.mode", rule)
        return None, None
    compute = entries["compute"]
    keys = compute.mapping(("mode", "threadPercent"), like="{mode: sm-sharing}")
    if keys is None:
        return None, None
    if "mode" not in keys:
        compute.missing("mode", rule)
    mode = keys["mode"].choice(Mode) if "mode" in keys else None
    percent = keys["threadPercent"].integer(1, 100) if "threadPercent" in keys else None
    if percent is not None and mode is Mode.TIME_SLICING:
        keys["threadPercent"].note("is only possible with mode sm-sharing")
    return mode, percent


def _resource_gpus(value: Value | None, known: Collection[str]) -> tuple[GpuSelection, int, tuple[str, ...]]:
    """The selection, how many GPUs a share lies on where it names no group, and the groups."""
    entries = value.mapping(("include", "exclude", "count", "groups"), like="{include: [0, 1]}") if value else None
    if value is None or entries is None:
        return GpuSelection(), 1, ()
    selection = read_selection(entries)
    if "groups" not in entries:
        return selection, _gpu_count(entries, selection), ()
    if len(entries) > 1:
        value.note("groups must not be combined with include, exclude or count")
    items = entries["groups"].items("group names")
    if items is not None and not items:
        entries["groups"].note("must name at least one group")
    names: list[str] = []
    for item in items or ():
        name = item.text("must be the name of a group in gpus.groups")
        if name is None:
            continue
        if name not in known:
            declare = "" if known else "; declare it, as in gpus: {groups: {pair0: [0, 1]}}"
            item.note(f"is no group: gpus.groups declares {', '.join(known) or 'none'}{declare}")
        elif name in names:
            item.note("is named twice in this list")
        names.append(name)
    return selection, 1, tuple(names)


def _gpu_count(entries: Mapping[str, Value], selection: GpuSelection) -> int:
    if "count" not in entries:
        return 1
    count = entries["count"].integer(2, MAX_GPUS_OF_SHARE)
    if count is None:
        return 1
    if selection.include is not None and count > len(selection.include):
        entries["count"].note(f"must not be more than the GPUs that include names ({len(selection.include)})")
    return count
