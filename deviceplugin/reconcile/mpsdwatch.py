"""Hears of the node from mpsd: each snapshot goes to the broker, and what the next start needs is kept."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from deviceplugin.grants import lastknown
from deviceplugin.grants.broker import Broker
from deviceplugin.plan.model import newer
from deviceplugin.reconcile.gpudevices import DeviceChooser
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.threads import GuardedThread
from mpsd.localapi.snapshot import Snapshot

log = get_logger("plugin")

WATCH_TIMEOUT_S = 5.0
"""An mpsd that hangs is noticed after this and what a client waits on top: until then its last word counts."""
RECONNECT_S = 0.2


class Mpsd(Protocol):
    """Raises GpufracError."""

    def watch(self, instance: str, generation: int, timeout_s: float) -> Snapshot: ...


class MpsdWatch:
    """One thread.

    Args:
        known_path: the file of what the next start needs; `known` is what it says now.
        on_snapshot: called with every new snapshot, and with None when mpsd does not answer.
        on_return: called when a (new) mpsd answers.
    """

    def __init__(
        self,
        mpsd: Mpsd,
        broker: Broker,
        devices: DeviceChooser,
        known_path: str,
        known: lastknown.LastKnown,
        *,
        on_snapshot: Callable[[Snapshot | None], None],
        on_return: Callable[[], None],
    ) -> None:
        self._mpsd, self._broker, self._devices = mpsd, broker, devices
        self._known_path, self._known = known_path, known
        self._on_snapshot, self._on_return = on_snapshot, on_return
        self._stop = threading.Event()
        self._instance, self._generation, self._answering = "", -1, True
        self._thread = GuardedThread(self._run, "mpsd-watch")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Begins to end: the thread ends with its call, or with the process."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            begun_s = time.monotonic()
            try:
                snapshot = self._mpsd.watch(self._instance, max(0, self._generation), WATCH_TIMEOUT_S)
                if (snapshot.instance, snapshot.generation) != (self._instance, self._generation):
                    self._take(snapshot)
                elif time.monotonic() - begun_s < RECONNECT_S:  # an mpsd that is stopping answers at once
                    self._stop.wait(RECONNECT_S)
            except Exception as error:
                if self._answering and not isinstance(error, GpufracError):
                    log.exception("the watch of mpsd failed and goes on")
                self._lose(str(error))
                self._stop.wait(RECONNECT_S)

    def _take(self, snapshot: Snapshot) -> None:
        returned = snapshot.instance != self._instance
        self._instance, self._generation = snapshot.instance, snapshot.generation
        if not self._answering:
            log.info("mpsd answers")
        self._answering = True
        node = self._broker.node
        new = {gpu.info.uuid for gpu in snapshot.gpus} - {gpu.info.uuid for gpu in node.gpus}
        if new or newer(node.hard.limits, snapshot.hard_limits) != node.hard.limits:
            self._devices.choose(snapshot)  # before a share of a new GPU, or at a new level, can be granted
        self._broker.observe_snapshot(snapshot)
        self._on_snapshot(snapshot)
        if returned:
            self._on_return()
        self._remember(snapshot)

    def _lose(self, error: str) -> None:
        if self._answering:
            log.warning("mpsd does not answer; no container starts until it does", error=error)
        self._answering = False
        self._broker.observe_snapshot(None)
        self._on_snapshot(None)
        self._instance, self._generation = "", -1

    def _remember(self, snapshot: Snapshot) -> None:
        """Keeps what the next start needs."""
        if not snapshot.gpus:
            return
        choice = self._devices.choice
        known = lastknown.LastKnown(
            gpus=lastknown.without_moments(snapshot.gpus),
            gpu_kind=choice.kind,
            hooked=choice.hooked,
            hard_limits=self._broker.node.hard.limits,
            boot_id=self._known.boot_id,
        )
        if known != self._known:
            self._known = known
            lastknown.store(self._known_path, known)
