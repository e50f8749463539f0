"""The kubelet's registration socket: when it is a new one. inotify gives hints, a slow stat is the truth."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpsd.log import get_logger
from mpsd.threads import GuardedThread

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver

POLL_S = 1.0
log = get_logger("plugin")

Identity = tuple[int, int, int]


def socket_identity(path: str) -> Identity | None:
    """(device, inode, ctime) of a file, None while it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


class DirectoryWatch:
    """Calls `on_hint()` when something changes in the device plugin directory, and every POLL_S anyway.

    The poll covers what inotify misses: its instance limit, or a directory replaced by a new mount.
    """

    def __init__(self, directory: str, on_hint: Callable[[], None]) -> None:
        self._directory = directory
        self._on_hint = on_hint
        self._stop = threading.Event()
        self._thread = GuardedThread(self._run, "kubelet-watch")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        observer = self._observer()
        try:
            while not self._stop.wait(POLL_S):
                self._on_hint()
        finally:
            if observer is not None:
                with contextlib.suppress(RuntimeError):
                    observer.stop()
                    observer.join()

    def _observer(self) -> "BaseObserver | None":
        from watchdog.events import FileSystemEvent, FileSystemEventHandler
        from watchdog.observers import Observer

        on_hint = self._on_hint

        class Handler(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                if event.event_type in ("created", "moved", "deleted"):
                    on_hint()

        observer = Observer()
        try:
            observer.schedule(Handler(), self._directory)
            observer.start()
        except OSError as error:
            log.warning(
                "cannot watch the kubelet's directory, polling it instead", directory=self._directory, error=str(error)
            )
            return None
        return observer
