"""Hints that something changed in the kubelet's device plugin directory: inotify where it can be had, a slow look
anyway."""

import os
import threading
from collections.abc import Callable

from mpsd.common.pathhints import PathHints
from mpsd.common.threads import GuardedThread

POLL_S = 1.0
RETRY_S = 5.0
BURST_S = 0.01
"""Hints come in bursts; a new kubelet waits for nobody."""


class DirectoryWatch:
    """Calls `on_hint()`, from its own thread, when something changes in the device plugin directory, and every POLL_S.

    The poll covers what inotify misses: its instance limit, or a directory replaced by a new mount.
    """

    def __init__(self, directory: str, on_hint: Callable[[], None]) -> None:
        self._on_hint = on_hint
        self._stop, self._wake = threading.Event(), threading.Event()
        self._hints = PathHints(
            os.path.join(os.path.abspath(directory), "kubelet.sock"),
            self._wake.set,
            retry_s=RETRY_S,
            instead=f"looking every {POLL_S:g} s",
            siblings=True,
        )
        self._thread = GuardedThread(self._run, "kubelet-watch")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._hints.arm()
                self._wake.clear()  # before the look: a change from here on wakes us again
                if self._stop.is_set():
                    break
                self._on_hint()
                if self._wake.wait(POLL_S):
                    self._stop.wait(BURST_S)
        finally:
            self._hints.close()
