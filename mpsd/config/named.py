"""GPUs that the config names and the node does not have (pure): a typing error, or a GPU that is missing."""

from collections.abc import Iterable, Iterator

from mpsd.config.model import GpuRef, GpuSelection, NodeConfig
from mpsd.gpu.model import GpuInfo


def absent(config: NodeConfig, infos: Iterable[GpuInfo]) -> tuple[str, ...]:
    """A line for each place of the config that includes such GPUs. Groups have their own objection, and leaving out
    what is not there does no harm.

    Args:
        infos: every GPU that is known.
    """
    known: set[GpuRef] = {ref for info in infos for ref in (info.uuid, info.index)}
    found = []
    for place, selection in _selections(config):
        missing = [ref for ref in selection.include or () if ref not in known]
        if missing:
            names = ", ".join(map(str, missing))
            found.append(
                f"config: {place}.include names GPU {names}, and no such GPU is on this node: if it fell out, look for "
                "NVRM and Xid in the kernel's log; if it never was there, take it out of the config"
            )
    return tuple(found)


def _selections(config: NodeConfig) -> Iterator[tuple[str, GpuSelection]]:
    yield "gpus", config.gpus
    for number, resource in enumerate(config.resources):
        yield f"resources[{number}].gpus", resource.gpus
    if config.annotations is not None:
        yield "annotations.gpus", config.annotations.gpus
