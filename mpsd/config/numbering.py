"""Which GPU an index in the config means (pure).

The driver numbers the GPUs that are there: when one falls out or is replaced, the index of another may be its own now.
So an index that the config names keeps the GPU it meant, by UUID, until somebody confirms the driver's numbers (ADR
0015). Where the config names no index, nothing is held.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import UNSET, structs

from mpsd.config.model import GpuRef, GpuSelection, NodeConfig
from mpsd.gpu.model import GpuInfo

CONFIRM = "gpufrac mpsd confirm-indices"

Numbering = Mapping[str, int]
"""UUID -> index."""


def references(config: NodeConfig) -> Iterator[tuple[str, GpuRef]]:
    """Each GPU that the config names, and where."""
    selections = [("gpus", config.gpus), *((f"{r.name} gpus", r.gpus) for r in config.resources)]
    if config.annotations is not None:
        selections.append(("annotations.gpus", config.annotations.gpus))
    for where, selection in selections:
        yield from _of(where, selection)
    for name, members in config.groups:
        yield from ((f"gpus.groups.{name}", ref) for ref in members)


def named_indices(config: NodeConfig) -> frozenset[int]:
    """Every index that the config names a GPU by."""
    return frozenset(ref for _, ref in references(config) if isinstance(ref, int))


def settle(known: Numbering, listed: Sequence[GpuInfo], *, hold: bool) -> dict[str, int]:
    """What indices mean now.

    Args:
        known: what they meant before.
        listed: the GPUs as the driver numbers them; of two with one number the first has it: one that is lost keeps
            what it had.
        hold: whether a known meaning stands against the driver's.
    """
    by_index: dict[int, str] = {}
    for info in listed:
        by_index.setdefault(info.index, info.uuid)
    now = {uuid: index for index, uuid in by_index.items()}
    first, second = (known, now) if hold else (now, known)
    taken = set(first.values())
    return {**first, **{uuid: index for uuid, index in second.items() if uuid not in first and index not in taken}}


def numbered(info: GpuInfo, numbering: Numbering) -> GpuInfo:
    """A GPU with the index that means it in the config: none where its own means another."""
    return structs.replace(info, config_index=numbering.get(info.uuid))


def is_stranger(config: NodeConfig, info: GpuInfo) -> bool:
    """Whether it is new, and has a number by which the config means another GPU."""
    return info.config_index is None and info.index in named_indices(config)


def is_excluded(config: NodeConfig, info: GpuInfo) -> bool:
    """Whether the config keeps it out on purpose."""
    return not is_stranger(config, info) and not config.gpus.admits(info)


def moved(infos: Iterable[GpuInfo]) -> list[str]:
    """The GPUs that the driver numbers otherwise than the config means, in words."""
    return [
        f"{info.uuid} is {info.index} now and {'new' if info.config_index is None else f'was {info.config_index}'}"
        for info in infos
        if info.config_index not in (info.index, UNSET)
    ]


def warnings(config: NodeConfig, numbering: Numbering, infos: Sequence[GpuInfo]) -> tuple[list[str], list[str]]:
    """What an operator must know of the names in the config, of numbered GPUs that are all there are: that indices mean
    others than the driver's, and which names mean no GPU of the node."""
    anew, missing = [], []
    named = named_indices(config)
    if named and (changes := moved(i for i in infos if {i.index, i.config_index} & named)):
        anew.append(
            "the driver numbers GPUs anew, and the config's indices mean the GPUs of before: name them by UUID, or run "
            f"`{CONFIRM}`: {'; '.join(changes)}"
        )
    places: dict[GpuRef, dict[str, None]] = {}
    for where, ref in references(config):
        if not any(info.is_named(ref) for info in infos):
            places.setdefault(ref, {})[where] = None
    by_index = {index: uuid for uuid, index in numbering.items()}
    for ref, where_named in places.items():
        uuid = by_index.get(ref) if isinstance(ref, int) else None
        missing.append(
            f"the config names GPU {ref}{f' ({uuid})' if uuid else ''}, which is not on this node: "
            f"{', '.join(where_named)}"
        )
    return anew, missing


def _of(where: str, selection: GpuSelection) -> Iterator[tuple[str, GpuRef]]:
    yield from ((f"{where}.include", ref) for ref in selection.include or ())
    yield from ((f"{where}.exclude", ref) for ref in selection.exclude)
