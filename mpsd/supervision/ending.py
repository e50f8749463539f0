"""Carries out the ends of everything, as the table of ends has them: a cleanup on request, and mpsd's own."""

import queue
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mpsd.common.log import get_logger
from mpsd.common.reason import message_of
from mpsd.daemon.state import StateFile
from mpsd.gpu.model import ComputeMode
from mpsd.localapi.snapshot import DaemonState
from mpsd.supervision.daemon import DaemonKeeper
from mpsd.supervision.ends import ENDS, End, Fate, ruling
from mpsd.supervision.node import Node

log = get_logger("mpsd")


@dataclass(frozen=True, slots=True)
class Cleanup:
    """Somebody waits for what could not be undone, not longer than until `deadline_s` (monotonic)."""

    done: "queue.SimpleQueue[list[str]]"
    deadline_s: float


@dataclass(slots=True)
class _Stop:
    """`looked`: GPUs whose use was asked of the driver since it began."""

    begun_s: float
    looked: set[str] = field(default_factory=set)

    @property
    def decide_s(self) -> float:
        return self.begun_s + ENDS[End.STOPPING].look_s

    @property
    def deadline_s(self) -> float:
        most_s = ENDS[End.STOPPING].most_s
        assert most_s is not None
        return self.begun_s + most_s


class Ending:
    """Of the supervisor's loop."""

    def __init__(self, node: Node, state: StateFile) -> None:
        self._node, self._state = node, state
        self._stop: _Stop | None = None
        self._cleanups: list[Cleanup] = []

    def clean_up(self, cleanup: Cleanup) -> None:
        """Every daemon ends, and none is started again before mpsd is."""
        log.info("cleanup: every daemon ends")
        self._node.ends.add(End.CLEANED_UP)
        self._cleanups.append(cleanup)
        for gpu in self._node.gpus.values():
            gpu.mode.try_again()

    def stop(self) -> None:
        """mpsd stops: who uses each GPU is looked at once more, and that decides over its daemon."""
        self._stop = _Stop(time.monotonic())
        self._node.ends.add(End.STOPPING)
        for gpu in self._node.gpus.values():
            gpu.usage.count(None)

    def deadlines_s(self) -> Iterable[float]:
        """When something is due though nothing happens (monotonic)."""
        if self._stop is not None:
            yield self._stop.deadline_s
            if any(daemon.fate is None for daemon in self._node.daemons.values()):
                yield self._stop.decide_s
        for cleanup in self._cleanups:
            yield cleanup.deadline_s

    def pass_deadline(self, now_s: float) -> None:
        if self._stop is not None and now_s >= self._stop.decide_s:
            for daemon in self._node.daemons.values():
                self._decide(daemon)

    def counted(self, daemon: DaemonKeeper, uuid: str, fresh_s: float | None) -> None:
        """Who uses a GPU of the daemon was asked, of the driver at `fresh_s` (monotonic); None: not of the driver."""
        if self._stop is None:
            return
        if fresh_s is not None and fresh_s >= self._stop.begun_s:
            self._stop.looked.add(uuid)
        if self._stop.looked.issuperset(gpu.uuid for gpu in self._node.members(daemon)):
            self._decide(daemon)

    def _decide(self, daemon: DaemonKeeper) -> None:
        """When stopping: leave the daemon to its clients, or end it."""
        if daemon.fate is not None:
            return
        for gpu in self._node.members(daemon):
            gpu.mode.try_again()
        end = ruling(self._node.ends)
        assert end is not None
        daemon.fate = daemon.end(end, busy=self._node.is_busy(daemon))
        if daemon.fate is Fate.STAYS:
            log.info("daemon left running: its GPUs have clients or allocations", daemon=daemon.name)

    def reconcile(self) -> None:
        """Carries through what was decided."""
        for daemon in self._node.daemons.values():
            if daemon.fate is Fate.ENDS and daemon.state is DaemonState.DRAINING:
                daemon.end(End.STOPPING, busy=False)  # it was adopted while we stop

    @property
    def finished(self) -> bool:
        """Whether mpsd may end."""
        if self._stop is None:
            return False
        if time.monotonic() >= self._stop.deadline_s:
            log.error("stopping took too long; what is still under way is left", after_s=ENDS[End.STOPPING].most_s)
            return True
        daemons = self._node.daemons.values()
        if not daemons:
            return time.monotonic() >= self._stop.decide_s or not self._node.gpus
        return all(d.fate is Fate.STAYS or (d.fate is Fate.ENDS and self._node.is_down(d)) for d in daemons)

    def finish_cleanups(self) -> None:
        """Tells who waits for a cleanup what is left, once nothing is or the time is over."""
        if not self._cleanups:
            return
        now_s, daemons = time.monotonic(), self._node.daemons.values()
        down = all(self._node.is_down(daemon) for daemon in daemons)
        found = self._state.saved.compute_modes
        unseen = {uuid: mode for uuid, mode in found.items() if uuid not in self._node.gpus}
        over = [c for c in self._cleanups if now_s >= c.deadline_s or (down and not unseen)]
        if not over:
            return
        self._cleanups = [cleanup for cleanup in self._cleanups if cleanup not in over]
        left = list(self._left(unseen))
        if ENDS[End.CLEANED_UP].clears:
            for daemon in daemons:
                if daemon.is_absent:
                    daemon.remove_directories(homes=True)
        for cleanup in over:
            cleanup.done.put(left)

    def _left(self, unseen: Mapping[str, ComputeMode]) -> Iterable[str]:
        """What is not as it was found, for people. `unseen`: compute modes of GPUs that the driver does not show."""
        for gpu in self._node.gpus.values():
            if not gpu.mode.idle:
                yield f"GPU {gpu.uuid}: {message_of(gpu.mode.trouble)}"
        for daemon in self._node.daemons.values():
            if not daemon.is_absent:
                yield f"the MPS daemon of {daemon.name} is {daemon.state}: {message_of(daemon.life.reason)}"
        for uuid, mode in unseen.items():
            yield f"GPU {uuid}: its compute mode {mode} is to be given back"
