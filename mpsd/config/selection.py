"""`gpus` of the config file, and which GPUs a part of it names."""

import re
from collections.abc import Collection, Mapping

import yaml

from mpsd.config.model import GpuRef, GpuSelection
from mpsd.config.names import LABEL
from mpsd.config.value import NATURAL, Value, did_you_mean

UUID_LENGTH = len("GPU-00000000-0000-0000-0000-000000000000")
_MAX_GROUP_NAME = UUID_LENGTH  # it stands where a UUID does: in device IDs and socket paths

_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ALL = re.compile("all")
_SPAN = re.compile(r"([0-9]+)(?:-|\.\.)([0-9]+)")
_LIKE = "{include: [0, 1]}"

Groups = tuple[tuple[str, tuple[GpuRef, ...]], ...]


def _gpu_ref(value: Value) -> GpuRef | None:
    """An index or a UUID; whether there is such a GPU, only the node knows."""
    rule = "must be a GPU index such as 0, or a UUID such as GPU-5fd4d87b-3c5e-4b1f-9f6e-0c1d2e3f4a5b"
    text = value.text(rule)
    if text is None:
        return None
    if text.startswith("MIG-"):
        value.note(f"{rule}: MIG devices are not shared")
    elif _UUID.fullmatch(text):
        return text
    elif NATURAL.fullmatch(text):
        if value.is_plain():
            return int(text)
        value.note("must be a GPU index without quotes")
    elif span := _SPAN.fullmatch(text):
        value.note(f"{rule}: write every index, such as [{span[1]}, ..., {span[2]}]")
    else:
        uuid = f"GPU-{text.lower().removeprefix('gpu-')}"
        value.note(f"{rule}{did_you_mean(uuid if _UUID.fullmatch(uuid) else '', bare=True)}")
    return None


def _gpu_refs(value: Value, *, at_least: int) -> tuple[GpuRef, ...] | None:
    items = value.items("GPUs", like="[0, 1]")
    if items is None:
        return None
    if len(items) < at_least:
        value.note("must name at least one GPU")
    refs: list[GpuRef] = []
    for item in items:
        ref = _gpu_ref(item)
        if ref is not None and ref in refs:
            item.note("is named twice in this list")
        elif ref is not None:
            refs.append(ref)
    return tuple(refs)


def read_selection(entries: Mapping[str, Value]) -> GpuSelection:
    """`include` and `exclude` of a mapping; problems are noted at its values."""
    include: tuple[GpuRef, ...] | None = None
    exclude: tuple[GpuRef, ...] = ()
    if value := entries.get("include"):
        if isinstance(value.node, yaml.ScalarNode):
            value.matching(_ALL, "must be all or a list of GPUs, such as [0, 1]")
        else:
            include = _gpu_refs(value, at_least=1)
    if value := entries.get("exclude"):
        exclude = _gpu_refs(value, at_least=0) or ()
        if include and set(include) <= set(exclude):
            value.note("takes away every GPU that include names")
    return GpuSelection(include=include, exclude=exclude)


def read_gpus(value: Value | None) -> tuple[GpuSelection, Groups, tuple[str, ...]]:
    """The section `gpus`: the selection, the groups, and the names of those whose members are shared."""
    entries = value.mapping(("include", "exclude", "groups"), like=_LIKE) if value else None
    if entries is None:
        return GpuSelection(), (), ()
    selection = read_selection(entries)
    if "groups" not in entries:
        return selection, (), ()
    return selection, *_groups(entries["groups"], selection.exclude)


def _groups(value: Value, excluded: Collection[GpuRef]) -> tuple[Groups, tuple[str, ...]]:
    group_of: dict[GpuRef, str] = {}
    groups, shared = [], []
    for name, entry in (value.entries("{pair0: [0, 1]}") or {}).items():
        if not LABEL.fullmatch(name):
            entry.note("the name must be lower-case letters, digits and inner dashes", show=False)
        elif len(name) > _MAX_GROUP_NAME:
            entry.note(f"the name must be at most {_MAX_GROUP_NAME} characters long", show=False)
        members, members_shared = _members(entry)
        for ref in members:
            if ref in group_of:
                entry.note(f"GPU {ref} is already in group {group_of[ref]}", show=False)
            elif ref in excluded:
                entry.note(f"GPU {ref} is excluded by gpus.exclude", show=False)
            group_of.setdefault(ref, name)
        groups.append((name, members))
        if members_shared:
            shared.append(name)
    return tuple(groups), tuple(shared)


def _members(entry: Value) -> tuple[tuple[GpuRef, ...], bool]:
    """The GPUs of a group, as a list or with `members`, and whether they are shared."""
    if not isinstance(entry.node, yaml.MappingNode):
        return _gpu_refs(entry, at_least=1) or (), False
    entries = entry.mapping(("gpus", "members"), like="{gpus: [0, 1], members: shared}") or {}
    if "gpus" not in entries:
        entry.missing("gpus", "the GPUs of the group, such as [0, 1]")
    members = _gpu_refs(entries["gpus"], at_least=1) if "gpus" in entries else ()
    shared = entries["members"].one_of(("own", "shared")) if "members" in entries else "own"
    return members or (), shared == "shared"
