"""Keeps which GPU each index in the config means, over restarts and reboots, too."""

from collections.abc import Sequence
from functools import partial

from mpsd.common.errors import GpufracError
from mpsd.common.lanes import Lane
from mpsd.common.log import get_logger
from mpsd.config.model import NodeConfig
from mpsd.config.numbering import Numbering, named_indices, numbered, settle
from mpsd.daemon.state import StateFile
from mpsd.gpu.model import GpuInfo

log = get_logger("mpsd")


class Indices:
    """Of the supervisor's loop.

    Args:
        lane: writes to disk.
    """

    def __init__(self, state: StateFile, lane: Lane) -> None:
        self._state, self._lane = state, lane
        self.numbering: Numbering = state.saved.numbering

    def settle(self, config: NodeConfig, listed: Sequence[GpuInfo]) -> None:
        """Takes in how the driver numbers GPUs now."""
        self._take(settle(self.numbering, listed, hold=bool(named_indices(config))))

    def confirm(self, listed: Sequence[GpuInfo]) -> None:
        """From now on indices mean what the driver says, whatever they meant."""
        log.info("the numbers of GPUs are confirmed", numbers=", ".join(f"{i.index}: {i.uuid}" for i in listed))
        self._take(settle({}, listed, hold=False))

    def of(self, info: GpuInfo) -> GpuInfo:
        """A GPU as the config knows it."""
        return numbered(info, self.numbering)

    def _take(self, numbering: Numbering) -> None:
        self.numbering = numbering
        if numbering != self._state.saved.numbering:  # also one that could not be written before
            self._lane.submit(partial(self._write, numbering))

    def _write(self, numbering: Numbering) -> None:
        try:
            self._state.record_numbering(numbering)
        except GpufracError as error:
            log.warning("which GPU an index means will not survive a restart of mpsd", error=str(error))
