"""Which GPUs a share may lie on together: one GPU, or those of a declared group (pure).

Both processes ask here. Allocations outlive a reload: GPUs that hold some stay grouped as they were granted, and what
the config says of them waits. Which daemon serves them is another question: domains.py.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from mpsd.config.model import GpuRef, NodeConfig
from mpsd.gpu.model import GpuInfo

_SET = "gpus_"
"""Before the name of a set of GPUs without one of its own. No declared name has a `_`."""


class Group(msgspec.Struct, frozen=True):
    """`gpus` in the order of the config. `objection` says why it can't be served now, empty when it can. `shared`:
    each of its GPUs is there for shares of one GPU, too."""

    name: str
    gpus: tuple[str, ...]
    declared: bool = False
    objection: str = ""
    shared: bool = False


def set_name(gpus: Collection[str]) -> str:
    """How GPUs are called that no declared group has together: the UUID of one alone, else a name made of theirs."""
    if len(gpus) == 1:
        return next(iter(gpus))
    text = "\n".join(sorted(gpus)).encode()
    return f"{_SET}{zlib.crc32(text):08x}{zlib.crc32(text[::-1]):08x}"


def is_set_name(name: str) -> bool:
    """Whether a name was made by `set_name` of several GPUs."""
    return name.startswith(_SET)


def declared_name(name: str, gpu: str) -> str:
    """The name of a group or domain that a GPU is in where the config gave it one, else empty."""
    return "" if name == gpu or is_set_name(name) else name


def label(name: str, gpus: Sequence[str], index: Mapping[str, int]) -> str:
    """How texts call a group or domain: by its GPUs, and by its name where the config gave it one.

    Args:
        index: of GPUs by their UUID. Those that are not there are called by that.
    """
    known = ", ".join(str(index[uuid]) for uuid in gpus if uuid in index)
    members = ", ".join([*([f"GPU {known}"] if known else []), *(uuid for uuid in gpus if uuid not in index)])
    declared = declared_name(name, gpus[0])
    return f"group {declared} ({members})" if declared else members


def groups(config: NodeConfig, infos: Sequence[GpuInfo], held: Mapping[str, tuple[str, ...]]) -> tuple[Group, ...]:
    """Every group of the node: declared ones in the config's order, then by index the GPUs that are each on its own:
    those in no declared group, and those of shared ones.

    Args:
        held: the groups that live allocations were granted on: name -> GPUs.
    """
    declared = dict(config.groups)
    shared = shared_groups(config, infos)
    found: dict[str, Group] = {}
    owner: dict[str, str] = {}
    """Of each GPU that is not there for others: its group."""
    for name, gpus in held.items():
        lone = gpus == (name,)
        if all(uuid not in owner for uuid in gpus):
            found[name] = Group(name, gpus, declared=not lone, shared=name in shared)
            if name not in shared:
                owner.update(dict.fromkeys(gpus, name))
    for name, members in declared.items():
        gpus, missing = _resolve(members, infos)
        if name in found:
            if set(found[name].gpus) == set(gpus):
                found[name] = msgspec.structs.replace(found[name], gpus=gpus)
            else:
                found[name] = msgspec.structs.replace(
                    found[name],
                    objection="its GPUs changed in the config: it is regrouped once its allocations are gone",
                )
            continue
        others = sorted({owner[uuid] for uuid in gpus if uuid in owner})
        if name in shared:  # beside what lies on one GPU alone
            others = [other for other in others if found[other].declared]
        objection = ""
        if missing:
            objection = f"its GPU {', '.join(map(str, missing))} is not on this node"
        elif others:
            objection = f"allocations granted on {', '.join(others)} must end first"
        found[name] = Group(name, gpus, declared=True, objection=objection, shared=name in shared)
        if name not in shared:
            for uuid in gpus:
                owner.setdefault(uuid, name)
    for info in sorted(infos, key=lambda info: info.index):
        if info.uuid not in owner:
            found.setdefault(info.uuid, Group(info.uuid, (info.uuid,)))
    order = {name: n for n, name in enumerate(declared)}
    return tuple(sorted(found.values(), key=lambda group: order.get(group.name, len(order))))


def shared_groups(config: NodeConfig, infos: Sequence[GpuInfo]) -> frozenset[str]:
    """The declared groups whose GPUs are there for shares of one GPU, too: declared so, or because a resource that
    names no group would have too few GPUs otherwise."""
    shared = set(config.shared_groups)
    owner: dict[str, str] = {}
    for name, members in config.groups:
        owner.update((uuid, name) for uuid in _resolve(members, infos)[0])
    for resource in config.resources:
        if resource.groups:
            continue
        open_to = [info.uuid for info in infos if config.gpus.admits(info) and resource.gpus.admits(info)]
        if sum(uuid not in owner for uuid in open_to) < resource.gpu_count <= len(open_to):
            shared.update(owner[uuid] for uuid in open_to if uuid in owner)
    return frozenset(shared)


def group_of(groups: Iterable[Group]) -> dict[str, Group]:
    """The group of each GPU: a declared one before the GPU alone, and one that holds allocations before one that waits
    for them to end."""
    owners: dict[str, Group] = {}
    for group in groups:
        for uuid in group.gpus:
            if uuid not in owners or (owners[uuid].objection and not group.objection):
                owners[uuid] = group
    return owners


def _resolve(members: Sequence[GpuRef], infos: Sequence[GpuInfo]) -> tuple[tuple[str, ...], tuple[GpuRef, ...]]:
    """UUIDs of the members, each once, and the members that are not there."""
    found: dict[str, None] = {}
    missing: list[GpuRef] = []
    for ref in members:
        uuid = next((info.uuid for info in infos if info.is_named(ref)), None)
        if uuid is None:
            missing.append(ref)
        else:
            found[uuid] = None
    return tuple(found), tuple(missing)
