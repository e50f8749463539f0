"""Which GPUs one daemon owns together (pure). A GPU in no declared group is its own group, named by its UUID.

Both processes ask here. Allocations outlive a reload: GPUs that hold some stay grouped as they were granted, and what
the config says of them waits.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mpsd.config.model import GpuRef, NodeConfig
from mpsd.gpu.model import GpuInfo


class Group(msgspec.Struct, frozen=True):
    """`gpus` in the daemon's order: its ordinals. `objection` says why it can't be served now, empty when it can."""

    name: str
    gpus: tuple[str, ...]
    declared: bool = False
    objection: str = ""


def groups(config: NodeConfig, infos: Sequence[GpuInfo], held: Mapping[str, tuple[str, ...]]) -> tuple[Group, ...]:
    """Every group of the node: declared ones in the config's order, then lone GPUs by index.

    Args:
        held: the groups that live allocations were granted on: name -> GPUs.
    """
    found: dict[str, Group] = {}
    owner: dict[str, str] = {}
    declared = dict(config.groups)
    for name, gpus in held.items():
        if all(uuid not in owner for uuid in gpus):
            found[name] = Group(name, gpus, declared=gpus != (name,))
            owner.update(dict.fromkeys(gpus, name))
    for name, members in declared.items():
        gpus, missing = _resolve(members, infos)
        if name in found:
            if found[name].gpus != gpus:
                found[name] = msgspec.structs.replace(
                    found[name],
                    objection="its GPUs changed in the config: it is regrouped once its allocations are gone",
                )
            continue
        others = sorted({owner[uuid] for uuid in gpus if uuid in owner})
        objection = ""
        if missing:
            objection = f"its GPU {', '.join(map(str, missing))} is not on this node"
        elif others:
            objection = f"allocations granted on {', '.join(others)} must end first"
        found[name] = Group(name, gpus, declared=True, objection=objection)
        for uuid in gpus:
            owner.setdefault(uuid, name)
    for info in sorted(infos, key=lambda info: info.index):
        if info.uuid not in owner:
            found[info.uuid] = Group(info.uuid, (info.uuid,))
    order = {name: n for n, name in enumerate(declared)}
    return tuple(sorted(found.values(), key=lambda group: order.get(group.name, len(order))))


def group_of(groups: Iterable[Group]) -> dict[str, Group]:
    """The group that serves each GPU. One that holds allocations comes before one that waits for them to end."""
    owners: dict[str, Group] = {}
    for group in groups:
        for uuid in group.gpus:
            if uuid not in owners or owners[uuid].objection:
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
