"""Keeps one GPU in the compute mode its binding needs: set, watched, retried, given back."""

import time
from collections.abc import Callable
from functools import partial

from mpsd.common.errors import GpufracError
from mpsd.common.lanes import Lane, Post
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.daemon.state import StateFile
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import ComputeMode, GpuState
from mpsd.gpu.reasons import GpuCode
from mpsd.localapi.reasons import WarningCode
from mpsd.supervision.computemode import Hold, fits, hold_mode

log = get_logger("mpsd")

RETRY_S = 5.0
CONTEST_S = 3600.0
"""How long it is told that somebody else changed the compute mode."""


class ModeKeeper:
    """Of one GPU. Every method is for the supervisor's thread; the driver is called in the lane.

    Args:
        on_set: told the compute mode read back after each change.
    """

    def __init__(
        self,
        uuid: str,
        lane: Lane,
        backend: GpuBackend,
        state: StateFile,
        post: Post,
        on_set: Callable[[ComputeMode], None],
    ) -> None:
        self._uuid, self._lane, self._backend, self._state = uuid, lane, backend, state
        self._post, self._on_set = post, on_set
        recorded = uuid in state.saved.compute_modes
        self._settled: object = ... if recorded else None
        """The last target reached, `...` while none is."""
        self._busy = False
        self._retry_s = 0.0
        self._held_s = self._contest_s = 0.0
        self._contests, self._contest = 0, ""
        self.applied: Hold | None = None
        self.trouble: Reason | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing of ours is on the GPU's compute mode."""
        return self._settled is None and not self._busy

    @property
    def retry_s(self) -> float | None:
        """When to try again (monotonic), None when nothing waits for that."""
        return self._retry_s or None

    @property
    def given_up(self) -> bool:
        """Whether the last try failed and none is under way."""
        return self.trouble is not None and not self._busy

    def try_again(self) -> None:
        """Forgets the pause after a failure."""
        self._retry_s, self.trouble = 0.0, None

    def observe(self, state: GpuState, before: ComputeMode) -> ComputeMode:
        """A probe's reading: the compute mode to believe. One begun before our last change may be older than it."""
        stale = state.read_s is not None and state.read_s < self._held_s
        if not fits(self.applied, state.compute_mode):
            if not stale and not self._busy and self._settled is not ...:
                self._note_contest(state.compute_mode)
            self._settled = ...  # changed behind our back, or seen before our change; either way look again
        return before if stale else state.compute_mode

    def _note_contest(self, seen: ComputeMode) -> None:
        assert self.applied is not None
        self._contests += 1
        self._contest_s = time.monotonic()
        self._contest = f"{seen}, and it needs {self.applied.compute_mode}"
        log.warning("somebody else changed the compute mode", gpu=self._uuid, compute_mode=seen.value)

    @property
    def changes(self) -> int:
        """How often somebody else changed the compute mode since mpsd started."""
        return self._contests

    def contested(self, index: int) -> Reason | None:
        """That somebody else sets the GPU's compute mode, for a while after it was seen; None for nobody."""
        if not self._contests or time.monotonic() - self._contest_s > CONTEST_S:
            return None
        times = f"{self._contests} times" if self._contests > 1 else "once"
        return Reason(
            WarningCode.COMPUTE_MODE_CONTESTED,
            f"GPU {index}: somebody else set its compute mode while it was bound ({times}; the last time to "
            f"{self._contest}), and it is set back: find what runs nvidia-smi -c or another MPS agent on this node",
        )

    def needs_check(self, target: Hold | None) -> bool:
        """Whether an idle GPU is about to be bound: then somebody else may be on it."""
        return target is not None and self._settled is None

    def refuse(self, reason: Reason) -> None:
        """The GPU can't be bound now."""
        self._note(reason)

    def reconcile(self, target: Hold | None) -> None:
        """Has the GPU held as the target says, or given back for None."""
        if self._busy:
            return
        if self._settled == target:
            self.trouble = None
            return
        if time.monotonic() < self._retry_s:
            return
        self._busy, self._retry_s = True, 0.0
        if self.applied != target:
            self.applied = None
        self._lane.submit(partial(self._hold, target))

    def _hold(self, target: Hold | None) -> None:
        try:
            compute_mode = hold_mode(self._uuid, target, self._backend, self._state)
        except Exception as error:
            if not isinstance(error, GpufracError):
                log.exception("setting the compute mode failed in an unforeseen way", gpu=self._uuid)
            self._post(partial(self._on_failed, Reason(GpuCode.COMPUTE_MODE_NOT_SET, str(error))))
        else:
            self._post(partial(self._on_held, target, compute_mode, time.monotonic()))

    def _on_failed(self, reason: Reason) -> None:
        self._busy = False
        self._note(reason)
        self._settled, self.applied = ..., None
        self._retry_s = time.monotonic() + RETRY_S

    def _on_held(self, target: Hold | None, compute_mode: ComputeMode, held_s: float) -> None:
        self._busy = False
        self._note(None)
        self._settled = self.applied = target
        self._held_s = held_s
        bound = f"bound to {target.mode}" if target is not None else "idle"
        log.info(f"GPU {bound}", gpu=self._uuid, compute_mode=compute_mode.value)
        self._on_set(compute_mode)

    def _note(self, trouble: Reason | None) -> None:
        if trouble is not None and trouble != self.trouble:
            log.error("GPU not bound", gpu=self._uuid, reason=trouble.message)
        self.trouble = trouble
