"""What shares may lie on: the groups of the node, and sets of GPUs for resources that take any so many (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import comb

from msgspec import structs

from deviceplugin.plan.model import GpuView, GroupView
from deviceplugin.plan.reasons import OfferCode
from mpsd.common.reason import Reason
from mpsd.config.model import MAX_GPU_SETS, NodeConfig, Resource
from mpsd.daemon.plan import group_usable_bytes
from mpsd.shares.groups import Group, group_of, groups, set_name
from mpsd.shares.sizes import burst_allowed, is_open, set_aside

REGROUPED = Reason(
    OfferCode.GROUP_CHANGES,
    "the config groups its GPUs otherwise by now: it takes nothing new, and is regrouped once it holds nothing",
)
SET_ASIDE = Reason(
    OfferCode.SET_ASIDE,
    "its GPUs are set aside for annotated pods (`annotations.gpus`); `annotations.share: true` lets resources use "
    "them, too",
)
"""Of a resource or a group."""
NO_GPU = Reason(OfferCode.NO_GPU, "no GPU is known yet")
NO_MEMBER = Reason(OfferCode.GROUP_INCOMPLETE, "none of its GPUs is known")


def group_views(
    config: NodeConfig, gpus: Mapping[str, GpuView], held: Mapping[str, tuple[str, ...]], *, complete: bool
) -> list[GroupView]:
    """Every group: as the config has it, and as live allocations were granted.

    A reload that groups GPUs otherwise waits for these to end: the old group keeps its shares and takes nothing new,
    the new one has none yet.
    """
    infos = [gpu.info for gpu in gpus.values()]
    now = {group.name: group for group in groups(config, infos, held)}
    wanted = {group.name: group for group in groups(config, infos, {})}
    views = []
    for name, group in now.items():
        objection = _objection(group)
        if objection is None and name in held and (name not in wanted or wanted[name].gpus != group.gpus):
            objection = REGROUPED
        objection = objection or _beside_group(group, now.values(), gpus)
        views.append(_group_view(config, group, gpus, objection, is_held=name in held, complete=complete))
    owners = group_of(now.values())
    for name, group in wanted.items():
        if name not in now:
            others = sorted({owners[uuid].name for uuid in group.gpus if uuid in owners})
            waits = Reason(OfferCode.GROUP_CHANGES, f"allocations granted on {', '.join(others)} must end first")
            objection = _objection(group) or waits
            views.append(_group_view(config, group, gpus, objection, is_held=False, complete=complete))
    return views


def set_views(
    resource: Resource, config: NodeConfig, by_name: Mapping[str, GroupView], *, complete: bool
) -> dict[str, GroupView] | Reason:
    """Every set of as many GPUs as a share of the resource needs, or why there is none.

    Args:
        by_name: the groups of the node. A GPU of a set is one that takes shares by itself, too.
        complete: see `node_view`.
    """
    lone = [view for view in by_name.values() if not view.group.declared and view.members]
    admitted = [view for view in lone if is_open(resource, config, view.members[0].info)]
    usable = [view for view in admitted if not view.unlisted and not set_aside(config, [view.members[0].info])]
    count = resource.gpu_count
    if len(usable) < count:
        if not any(view.members for view in by_name.values()):
            return NO_GPU
        unlisted = next((view.unlisted for view in admitted if view.unlisted), None)
        why = unlisted or (SET_ASIDE if len(admitted) >= count else None)
        text = f"a share lies on {count} GPUs, and {len(usable)} of this node {'are' if len(usable) != 1 else 'is'} "
        return why or Reason(OfferCode.NO_GPU_SELECTED, f"{text}open to it")
    if (number := comb(len(usable), count)) > MAX_GPU_SETS:
        return Reason(
            OfferCode.TOO_MANY_DEVICES,
            f"its shares could lie on {number} sets of {count} out of {len(usable)} GPUs, and at most {MAX_GPU_SETS} "
            "are weighed: open fewer GPUs to it (`gpus.include`), or declare groups",
        )
    gpus = {view.members[0].uuid: view.members[0] for view in usable}
    by_index = sorted(usable, key=lambda view: view.members[0].index)
    views = (_set_view(config, chosen, gpus, complete=complete) for chosen in combinations(by_index, count))
    return {view.name: view for view in views}


def held_set_view(
    config: NodeConfig, name: str, uuids: tuple[str, ...], gpus: Mapping[str, GpuView], *, complete: bool
) -> GroupView:
    """A set that live shares lie on, whatever the config says by now."""
    return _group_view(config, Group(name, uuids), gpus, None, is_held=True, complete=complete)


def _set_view(
    config: NodeConfig, chosen: Sequence[GroupView], gpus: Mapping[str, GpuView], *, complete: bool
) -> GroupView:
    uuids = tuple(view.name for view in chosen)
    objection = _first([view.members[0] for view in chosen], [view.blocked for view in chosen])
    return _group_view(config, Group(set_name(uuids), uuids), gpus, objection, is_held=True, complete=complete)


def _group_view(
    config: NodeConfig,
    group: Group,
    gpus: Mapping[str, GpuView],
    objection: Reason | None,
    *,
    is_held: bool,
    complete: bool,
) -> GroupView:
    members = tuple(gpus[uuid] for uuid in group.gpus if uuid in gpus)
    unknown = [uuid for uuid in group.gpus if uuid not in gpus]
    infos = [gpu.info for gpu in members]
    usable = group_usable_bytes(config, infos)
    unlisted = None if is_held else objection
    if not members:
        unlisted = objection or NO_MEMBER
    view = GroupView(
        group=group,
        members=members,
        usable_bytes=usable,
        unlisted=unlisted,
        lost=_first(members, [gpu.lost for gpu in members])
        or (Reason(OfferCode.GPU_NOT_REPORTED, f"GPU {unknown[0]} is gone") if unknown and complete else None),
        blocked=objection or _first(members, [gpu.blocked for gpu in members]),
        waiting=_first(members, [gpu.waiting for gpu in members])
        or (Reason(OfferCode.GROUP_INCOMPLETE, f"GPU {unknown[0]} is not known yet") if unknown else None),
        daemon_waiting=_first(members, [gpu.daemon_waiting for gpu in members]),
        reserved=_first(members, [gpu.reserved for gpu in members]),
    )
    burst = view.speaks_protocol_3 and burst_allowed(config, group, infos, usable)
    return structs.replace(view, burst=burst)


def _beside_group(group: Group, others: Iterable[Group], gpus: Mapping[str, GpuView]) -> Reason | None:
    """Why a GPU of a shared group takes nothing by itself, None where it does."""
    if group.declared or all(gpus[uuid].protocol == 3 for uuid in group.gpus if uuid in gpus):
        return None
    around = next((other for other in others if other.declared and set(group.gpus) < set(other.gpus)), None)
    if around is None:
        return None
    return Reason(
        OfferCode.OTHER_LIMIT,
        f"it is in group {around.name}, and MPS protocol 2 has one limit for all containers on several GPUs: "
        "only shares of the whole group are held to theirs: use a driver with MPS protocol 3 (r615 or newer), or leave "
        "the GPU out of the group",
    )


def _objection(group: Group) -> Reason | None:
    return Reason(OfferCode.GROUP_CHANGES, group.objection) if group.objection else None


def _first(members: Sequence[GpuView], reasons: Sequence[Reason | None]) -> Reason | None:
    """The first reason, naming its GPU unless it is the same for all."""
    if len(set(reasons)) <= 1:
        return reasons[0] if reasons else None
    pairs = zip(members, reasons, strict=True)
    return next(reason.reworded(f"GPU {gpu.index}: {reason}") for gpu, reason in pairs if reason is not None)
