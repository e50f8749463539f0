"""Watches all GPUs and publishes an `Inventory` whenever it changed. The only caller of a `GpuBackend`'s reading side.

Driver calls may hang, so each GPU has a worker thread of its own and so has the list of GPUs. One loop thread owns all
state; workers, the XID thread and callers only put messages into its inbox.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from mpsd.common.errors import GpufracError, TransientError
from mpsd.common.log import get_logger
from mpsd.common.pacing import Backoff
from mpsd.common.pulse import Pulse
from mpsd.common.reason import Reason, joined
from mpsd.common.threads import GuardedThread, Mishaps
from mpsd.gpu import health, recovery, xid
from mpsd.gpu.backend import GpuBackend, GpuError, GpuLostError, GpuNotSupportedError, XidEvent
from mpsd.gpu.calls import Worker, XidWatch
from mpsd.gpu.health import Policy, Reading, Track
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuProcess, Inventory
from mpsd.gpu.news import log_changes, news
from mpsd.gpu.reasons import NOT_LISTED, NOT_PROBED, GpuCode, InventoryCode

log = get_logger("gpu")

PERIOD_S: Final = 5.0
DEADLINE_S: Final = 5.0
"""A call that takes longer is taken to hang. Healthy drivers answer in milliseconds, busy ones within a second."""
BACKOFF_S: Final = (1.0, 30.0)
"""First and longest pause between attempts to open the driver. It is opened afresh, too, while a GPU is missing:
NVML finds GPUs when it is initialised (NVML API reference, nvmlInit_v2)."""
_NO_GPU: Final = Reason(InventoryCode.NO_GPU, "cannot find a GPU: the driver lists none")
_VANISHED_LISTINGS: Final = 2
"""So many lists in a row without a GPU, and no answer of it since the first, make it lost."""
_JOIN_S: Final = 2.0
_ROUND_S: Final = 120.0
"""More than a round and its pause last: every wait in them has a deadline, the longest pause is that of BACKOFF_S."""


@dataclass(frozen=True, slots=True)
class _Done:
    worker: Worker
    outcome: Any


@dataclass(frozen=True, slots=True)
class _Listing:
    """`fresh`: the driver was opened for it."""

    driver_version: str
    uuids: tuple[str, ...]
    unnamed: int
    fresh: bool


class _Kick:
    pass


class _Close:
    pass


_Message = _Done | XidEvent | _Kick | _Close
_Inbox = queue.SimpleQueue[_Message]


class Prober:
    """Publishes to `on_change`, from its own thread, first as soon as anything is known, then on change only.

    A probe of one GPU reads its facts, compute mode and processes; all GPUs are probed every `period_s`. A GPU whose
    call takes longer than `deadline_s` is UNRESPONSIVE until that call returns and a new probe is good. One that was
    lost, or sick after a critical XID, comes back by the rules of `policy` (see health.py) and stays in the inventory
    with its last known facts. While the driver as a whole can't be used, all GPUs are UNRESPONSIVE with its error: that
    is no proof of loss. An exception of `on_change` is logged and the news counts as delivered. `on_xid` is told of
    each XID, `on_error` each time why the driver can't be used; from the prober's thread, like `on_change`.
    """

    def __init__(
        self,
        backend: GpuBackend,
        on_change: Callable[[Inventory], None],
        *,
        on_error: Callable[[GpufracError], None] = lambda _: None,
        on_xid: Callable[[str, xid.Xid], None] = lambda uuid, row: None,
        period_s: float = PERIOD_S,
        deadline_s: float = DEADLINE_S,
        policy: Policy = Policy(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self._on_change, self._on_error, self._on_xid = backend, on_change, on_error, on_xid
        self._period_s, self._deadline_s, self._policy, self._clock = period_s, deadline_s, policy, clock
        self._inbox: _Inbox = queue.SimpleQueue()
        self._published: Inventory | None = None
        self._stopping = threading.Event()
        self._opened = threading.Event()
        # What follows belongs to the loop thread.
        self._driver_version: str | None = None
        self._listed: tuple[str, ...] = ()
        self._reason: Reason | None = None
        self._unnamed = 0
        self._unlisted: dict[str, int] = {}  # lists in a row without this GPU, since it last answered
        self._tracks: dict[str, Track] = {}
        self._errors: dict[str, Reason] = {}  # of GPUs that never gave a reading
        self._workers: dict[str, Worker] = {}
        self._lister: Worker | None = None
        self._backoff = Backoff(*BACKOFF_S)
        self._open_at_s = 0.0
        self._kicked = False
        self.pulse = Pulse("gpu-prober", _ROUND_S)
        """Whether its loop goes round; calls of the driver that hang don't stop it."""
        self._loop = GuardedThread(self._run, self.pulse.name)
        self._xids = XidWatch(backend, self._opened, self._stopping, BACKOFF_S, self._inbox.put, self.kick)

    @property
    def inventory(self) -> Inventory:
        """The last published one; empty with a reason before the first."""
        return self._published or Inventory(reason=NOT_PROBED)

    def start(self) -> None:
        self._loop.start()
        self._xids.start()

    def kick(self) -> None:
        """Asks for a probe of all GPUs now; returns at once."""
        self._inbox.put(_Kick())

    def close(self) -> None:
        """Ends the threads and closes the backend. A hung call keeps its thread (a daemon) and the backend open."""
        self._stopping.set()
        self._opened.set()
        self._inbox.put(_Close())
        give_up_s = time.monotonic() + _JOIN_S
        if self._loop.is_alive():
            self._loop.join(max(0.0, give_up_s - time.monotonic()))
        workers = [w for w in (self._lister, *self._workers.values()) if w is not None]
        for worker in workers:
            worker.stop()
        threads: tuple[XidWatch | Worker, ...] = (self._xids, *workers)
        ended = [thread.join(max(0.0, give_up_s - time.monotonic())) for thread in threads]
        if all(ended):
            self._backend.close()

    def _done(self, worker: Worker, outcome: Any) -> None:
        self._inbox.put(_Done(worker, outcome))

    # The loop

    def _run(self) -> None:
        mishaps = Mishaps("gpu-prober", "probing failed, trying again", log)
        while not self._stopping.is_set():
            self.pulse.beat()
            try:
                self._round()
                self._pump(self._clock() + self._pause_s(), until=lambda: self._kicked)
                self._kicked = False
                mishaps.none()
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error, pause_s=self._period_s)
                self._stopping.wait(self._period_s)

    def _pause_s(self) -> float:
        if self._lister is not None and self._lister.busy():
            return self._period_s
        until_open_s = max(0.0, self._open_at_s - self._clock())
        if not self._opened.is_set():
            return until_open_s
        return min(self._period_s, until_open_s) if self._any_missing() and self._may_open() else self._period_s

    def _round(self) -> None:
        self._list()
        # A GPU that has just left the list is asked once more: the driver's error says why.
        asked = [u for u, t in self._tracks.items() if u in self._listed or t.trouble is not GpuHealth.LOST]
        deadline_s = self._clock() + self._deadline_s
        probes = [self._probe(uuid) for uuid in asked if self._opened.is_set()]
        self._pump(deadline_s, until=lambda: all(w is None or not w.busy() for w in probes))
        if not self._stopping.is_set():
            self._note_absence()
            self._publish()

    def _pump(self, deadline_s: float, until: Callable[[], bool]) -> None:
        """Handles messages until the condition holds, the deadline is over, or close() was called."""
        while not until() and not self._stopping.is_set():
            left_s = deadline_s - self._clock()
            try:
                message = self._inbox.get(block=left_s > 0, timeout=max(left_s, 0.0))
            except queue.Empty:
                if left_s <= 0:
                    return
                continue
            self._handle(message)

    def _handle(self, message: _Message) -> None:
        match message:
            case _Done(worker, outcome):
                late = self._clock() - (worker.since_s or 0.0) >= self._deadline_s
                worker.since_s = None
                self._kicked = self._kicked or late
                if worker is self._lister:
                    self._take_list(outcome)
                elif not late:  # what a hung call says of a GPU is old; it is asked again now
                    self._take_probe(next(u for u, w in self._workers.items() if w is worker), outcome)
            case XidEvent(uuid, number):
                self._take_xid(uuid, number)
            case _Kick():
                self._kicked = True
                if not self._opened.is_set():
                    self._open_at_s = 0.0
            case _Close():
                pass

    # The list of GPUs

    def _list(self) -> None:
        if self._lister is None:
            self._lister = Worker("gpu-list", self._done)
        lister, now_s = self._lister, self._clock()
        due = now_s >= self._open_at_s
        if not lister.busy() and (self._opened.is_set() or due):
            may_open = self._may_open()
            afresh = due and may_open and self._any_missing()
            lister.submit(lambda: self._call_list(lister, afresh=afresh, may_open=may_open), now_s)
            self._pump(now_s + self._deadline_s, until=lambda: not lister.busy())
        if lister.busy():
            text = f"cannot list the GPUs: {self._hang_text(lister)}"
            self._reason = Reason(InventoryCode.DRIVER_HANGS, text)

    def _may_open(self) -> bool:
        """A driver must not be closed under a running call."""
        return not any(w.busy() for w in self._workers.values())

    def _any_missing(self) -> bool:
        """Whether a fresh look could find more: no GPU at all, or one that was lost and has not answered since."""
        lost = (t for t in self._tracks.values() if t.trouble is GpuHealth.LOST and t.good_probes == 0)
        return not self._listed or next(lost, None) is not None

    def _call_list(self, worker: Worker, *, afresh: bool, may_open: bool) -> _Listing:
        """In the lister's thread. A driver that can't list is opened afresh at once, where it may be."""
        if self._opened.is_set() and not afresh:
            try:
                return self._call_uuids(worker, fresh=False)
            except GpuError:
                if not may_open:
                    raise
        if self._opened.is_set():
            self._opened.clear()
            self._backend.close()
        worker.call = "open"
        self._backend.open()
        listing = self._call_uuids(worker, fresh=True)
        self._opened.set()
        return listing

    def _call_uuids(self, worker: Worker, *, fresh: bool) -> _Listing:
        worker.call = "driver_version"
        version = self._backend.driver_version()
        worker.call = "uuids"
        uuids = tuple(self._backend.uuids())
        return _Listing(version, uuids, self._backend.unnamed(), fresh)

    def _take_list(self, outcome: _Listing | GpufracError) -> None:
        if isinstance(outcome, GpufracError):
            self._reason = Reason(InventoryCode.DRIVER_FAILED, str(outcome))
            self._on_error(outcome)
            if not self._opened.is_set() or self._may_open():
                self._opened.clear()  # else the other GPUs may still answer
                self._back_off()
            return
        self._driver_version, self._listed = outcome.driver_version, outcome.uuids
        self._unnamed = outcome.unnamed
        self._reason = None if self._listed else _NO_GPU
        for uuid in self._listed:
            self._tracks.setdefault(uuid, Track())
        for uuid in [u for u in self._tracks if u not in self._listed]:
            if self._tracks[uuid].reading is None:
                del self._tracks[uuid]
                self._errors.pop(uuid, None)
        self._unlisted = {u: self._unlisted.get(u, 0) + 1 for u in self._tracks if u not in self._listed}
        if not self._any_missing():
            self._backoff.reset()
            self._open_at_s = 0.0
        elif outcome.fresh:
            self._back_off()

    def _back_off(self) -> None:
        self._open_at_s = self._clock() + self._backoff.pause_s()

    # One GPU

    def _probe(self, uuid: str) -> Worker | None:
        """Starts a probe and returns its worker, None when an earlier one still hangs."""
        worker = self._workers.get(uuid)
        if worker is None:
            try:
                worker = self._workers[uuid] = Worker(f"gpu-{uuid[-8:]}", self._done)
            except TransientError as error:  # no more threads: the others are probed all the same
                self._errors[uuid] = Reason(GpuCode.PROBE_FAILED, str(error))
                return None
        if worker.busy():
            return None
        worker.submit(lambda: self._call_probe(worker, uuid), self._clock())
        return worker

    def _call_probe(self, worker: Worker, uuid: str) -> Reading:
        worker.call, read_s = "info", time.monotonic()
        info = self._backend.info(uuid)
        worker.call, mode = "compute_mode", ComputeMode.UNKNOWN
        with suppress(GpuNotSupportedError):
            mode = self._backend.compute_mode(uuid)
        worker.call, processes, told = "processes", tuple[GpuProcess, ...](), False
        with suppress(GpuNotSupportedError):
            processes = tuple(sorted(self._backend.processes(uuid), key=lambda p: p.pid))
            told = True
        worker.call, action = "recovery_action", recovery.NONE
        try:
            action = self._backend.recovery_action(uuid)
        except GpuLostError:
            raise
        except GpuError as error:  # many drivers lack it, and it says nothing of the GPU that it can't be read
            log.debug("cannot read the recovery action", gpu=uuid, error=str(error))
        return Reading(info, mode, processes, read_s, processes_told=told, recovery=recovery.asked(action))

    def _take_probe(self, uuid: str, outcome: Any) -> None:
        track, now_s = self._tracks.get(uuid, Track()), self._clock()
        self._errors.pop(uuid, None)
        if isinstance(outcome, GpuLostError):
            track = health.lost(track, Reason(GpuCode.LOST, str(outcome)))
        elif isinstance(outcome, GpufracError):
            track = health.failed(track, Reason(GpuCode.PROBE_FAILED, str(outcome)), self._policy)
        else:
            self._unlisted.pop(uuid, None)  # a reading outranks the list
            track = health.answered(track, outcome, now_s, self._policy)
        if track.reading is None:
            self._errors[uuid] = Reason(GpuCode.PROBE_FAILED, str(outcome))
        self._tracks[uuid] = track

    def _take_xid(self, uuid: str, number: int) -> None:
        row = xid.verdict(number)
        track = self._tracks.get(uuid)
        log.warning("XID event", gpu=uuid, xid=number, name=row.name, verdict=row.verdict.value)
        self._on_xid(uuid, row)
        if number == xid.RECOVERY_ACTION_CHANGED:
            self._kicked = True  # the next probe reads to what
        if track is None or row.verdict is xid.Verdict.IGNORE:
            return
        action = f"; NVIDIA's advice: {row.action}" if row.action else ""
        reason = Reason(GpuCode.XID, f"{row.text} was reported{action}")
        self._tracks[uuid] = health.xid_seen(track, reason, self._clock())
        if self._published is not None:  # the first one waits for all GPUs
            self._publish()
        self._kicked = True  # it may be lost by now

    def _hang_text(self, worker: Worker) -> str:
        hung_s = self._clock() - (worker.since_s or 0.0)
        return health.hang_text(worker.call, hung_s, self._deadline_s)

    def _note_absence(self) -> None:
        """What did not answer in this round: GPUs that left the list, hanging calls, the driver as a whole."""
        for uuid, track in self._tracks.items():
            worker = self._workers.get(uuid)
            if self._unlisted.get(uuid, 0) >= _VANISHED_LISTINGS:
                self._tracks[uuid] = health.lost(track, NOT_LISTED)
            elif worker is not None and worker.busy():
                hangs = Reason(GpuCode.HANGS, self._hang_text(worker))
                self._tracks[uuid] = health.silenced(track, hangs)
                if track.reading is None:
                    self._errors[uuid] = hangs
            elif not self._opened.is_set() and self._reason is not None:
                self._tracks[uuid] = health.silenced(track, self._reason)

    # Publishing

    def _publish(self) -> None:
        states = [s for t in self._tracks.values() if (s := t.state) is not None]
        unread = [
            Reason(InventoryCode.GPU_UNREAD, f"GPU {uuid}: {self._errors.get(uuid, 'it is not probed yet')}")
            for uuid, track in sorted(self._tracks.items())
            if track.reading is None
        ]
        inventory = Inventory(
            driver_version=self._driver_version,
            gpus=tuple(sorted(states, key=lambda s: (s.info.index, s.info.uuid))),
            reason=joined([self._reason, *unread]),
            # Those that were read once are lost by name.
            never_seen=max(0, self._unnamed - len(self._unlisted)),
        )
        if self._published is not None and news(inventory) == news(self._published):
            return
        previous, self._published = self._published, inventory
        log_changes(previous, inventory)
        try:
            self._on_change(inventory)
        except Exception:
            log.exception("a receiver of the inventory failed")
