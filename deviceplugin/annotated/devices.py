"""The entries of a device list as GPUs of this node (pure)."""

import re
from collections.abc import Sequence

from cdi.registry import GPU_KINDS
from deviceplugin.annotated.contract import DEVICES, Ask
from deviceplugin.annotated.reasons import AnnotationCode, RefusedError
from deviceplugin.plan.allocation import ContainerAsk, ContainerRef
from mpsd.common.quantity import quoted
from mpsd.common.reason import Reason
from mpsd.gpu.model import GpuInfo

KINDS = (*GPU_KINDS, "management.nvidia.com/gpu")
"""CDI kinds whose devices are whole GPUs, named by UUID or index, or `all` of them."""

_SHOWN = 16
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_MIG = re.compile(r"MIG-.*|[0-9]+:[0-9]+", re.DOTALL)
_NOTHING = ("none", "void")


def resolve(entries: Sequence[str], gpus: Sequence[GpuInfo]) -> tuple[str, ...] | str:
    """UUIDs in the order written, each once; or why not. An entry is what NVIDIA_VISIBLE_DEVICES takes (a UUID, an
    index, `all`), bare or behind a CDI kind: `nvidia.com/gpu=0`. No entries are no GPUs."""
    by_name = {str(gpu.index): gpu.uuid for gpu in gpus} | {gpu.uuid: gpu.uuid for gpu in gpus}
    everything = [gpu.uuid for gpu in sorted(gpus, key=lambda gpu: gpu.index)]
    found: dict[str, None] = {}
    for entry in entries:
        kind, equals, name = entry.rpartition("=")
        if equals and kind not in KINDS:
            return f"device {quoted(entry)} is of an unknown CDI kind: known are {', '.join(KINDS)}"
        if name == "all" and everything:
            found.update(dict.fromkeys(everything))
        elif name in by_name:
            found[by_name[name]] = None
        else:
            return f"device {quoted(entry)} {_why(name)}: {_known(gpus)}"
    return tuple(found)


def container_ask(
    ref: ContainerRef, ask: Ask, gpus: Sequence[GpuInfo], *, prefix: str, isolation: Reason | None
) -> ContainerAsk:
    """What a container's annotations ask for on this node.

    Raises:
        GpufracError: it names no GPUs, or others than the node's.
    """
    if not ask.devices:
        raise RefusedError(
            AnnotationCode.NO_GPU_NAMED,
            f"it names no GPU: annotation {prefix}{ref.container}{DEVICES} is missing; it is written by the scheduler "
            "(such as KAI), so look whether the pod's schedulerName is right",
        )
    found = resolve(ask.devices, gpus)
    if isinstance(found, str):
        raise RefusedError(AnnotationCode.UNKNOWN_GPU, found)
    return ContainerAsk(
        container=ref,
        request_bytes=ask.request_bytes,
        limit_bytes=ask.limit_bytes,
        mode=ask.mode,
        gpus=found,
        thread_percent=ask.thread_percent,
        isolation=isolation,
        of_total=ask.of_total,
    )


def _why(name: str) -> str:
    if name in _NOTHING:
        return "is no GPU, and a container with a share of one needs at least one"
    if _MIG.fullmatch(name):
        return "is a MIG device, and only whole GPUs are shared"
    if name == "all" or name.startswith("GPU-") or _INDEX.fullmatch(name):
        return "is not on this node"
    return "is neither a GPU's UUID nor an index nor all"


def _known(gpus: Sequence[GpuInfo]) -> str:
    if not gpus:
        return "it has no GPUs now"
    shown = [f"{gpu.index} = {gpu.uuid}" for gpu in sorted(gpus, key=lambda gpu: gpu.index)[:_SHOWN]]
    more = f" and {len(gpus) - _SHOWN} more" if len(gpus) > _SHOWN else ""
    return f"this node has {', '.join(shown)}{more}"
