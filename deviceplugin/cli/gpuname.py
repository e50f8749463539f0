"""How an operator names a GPU: by index, UUID, a unique prefix of it, or the group it is in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from deviceplugin.cli.output import some
from mpsd.common.errors import ConfigError, GpufracError
from mpsd.common.socketpath import plugin_socket
from mpsd.shares.groups import declared_name

if TYPE_CHECKING:
    from deviceplugin.status.model import PluginStatus
    from mpsd.localapi.snapshot import Snapshot

GONE = -1
COMPLETE_S = 0.5
"""A shell waits for the answer."""


@dataclass(frozen=True, order=True, slots=True)
class GpuName:
    """`group` is the declared group that the GPU is in, empty for a GPU alone. `index` is GONE for a GPU that is no
    longer on the node."""

    index: int
    uuid: str
    group: str

    def __str__(self) -> str:
        return f"GPU {self.index}" if self.index != GONE else "a GPU that is gone"


def names_of_plugin(status: "PluginStatus") -> tuple[GpuName, ...]:
    """All GPUs the plugin knows."""
    return tuple(GpuName(gpu.index, gpu.uuid, gpu.group) for gpu in status.gpus)


def gone_names(status: "PluginStatus") -> tuple[GpuName, ...]:
    """The GPUs that are drained, but no longer on the node."""
    return tuple(GpuName(GONE, uuid, "") for uuid in status.gone_drained)


def names_of_mpsd(snapshot: "Snapshot") -> tuple[GpuName, ...]:
    """All GPUs mpsd knows."""
    return tuple(
        GpuName(gpu.info.index, gpu.info.uuid, declared_name(gpu.group, gpu.info.uuid)) for gpu in snapshot.gpus
    )


def choose(texts: Iterable[str], known: Sequence[GpuName]) -> tuple[GpuName, ...]:
    """The GPUs that were named, each once, by index.

    Raises:
        ConfigError: a text names no GPU, or could be several; it lists the known ones.
    """
    return tuple(sorted({gpu for text in texts for gpu in _choose(text, known)}))


def _choose(text: str, known: Sequence[GpuName]) -> Sequence[GpuName]:
    for found in (
        [gpu for gpu in known if text == gpu.uuid],
        [gpu for gpu in known if gpu.index != GONE and text == str(gpu.index)],
        [gpu for gpu in known if text == gpu.group != ""],
    ):
        if found:
            return found
    begins = [gpu for gpu in known if text and gpu.uuid.startswith(text)]
    if len(begins) == 1:
        return begins
    if begins:
        raise ConfigError(f"cannot tell which GPU {text[:80]!r} is: it may be {some(map(_known, begins))}")
    raise ConfigError(f"cannot find GPU {text[:80]!r}: known are {some(map(_known, known)) or 'none'}")


def _known(gpu: GpuName) -> str:
    if gpu.index == GONE:
        return f"{gpu.uuid} (gone)"
    return f"{gpu.index} ({gpu.uuid}{f', group {gpu.group}' if gpu.group else ''})"


def complete_gpu(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: indices, groups and UUIDs, as long as the plugin answers at once."""
    status = _status(context)
    if status is None:
        return []
    known = names_of_plugin(status)
    texts = [*(str(gpu.index) for gpu in known), *(gpu.group for gpu in known), *(gpu.uuid for gpu in known)]
    return [text for text in dict.fromkeys(texts) if text and text.startswith(incomplete)]


def complete_pod(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: `namespace/pod/container` of every live allocation."""
    status = _status(context)
    texts = [f"{a.namespace}/{a.pod}/{a.container}" for a in status.allocations if a.pod] if status else []
    return [text for text in dict.fromkeys(texts) if text.startswith(incomplete)]


def _status(context: click.Context) -> "PluginStatus | None":
    from deviceplugin.cli.options import run_root_of
    from deviceplugin.status.model import PluginStatus
    from mpsd.localapi.call import call

    try:
        root = run_root_of(context.params.get("config_path"), context.params.get("run_root"))
        return call(plugin_socket(root), "status", {}, PluginStatus, COMPLETE_S)
    except GpufracError:
        return None
