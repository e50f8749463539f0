"""Tells when control daemons exit: they are not our children, so the kernel tells by a pidfd of each."""

import contextlib
import os
import select
import threading
from collections.abc import Callable
from functools import partial

from mpsd.common.log import get_logger
from mpsd.common.threads import GuardedThread
from mpsd.daemon import children
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.process import is_alive

log = get_logger("daemon")


class ExitWatcher:
    """Tells when processes that are not our children exit: one thread, one pidfd each."""

    def __init__(self, on_exit: Callable[[DaemonIdentity], None]) -> None:
        self._on_exit = on_exit
        self._poll = select.poll()
        self._lock = threading.Lock()
        self._watched: dict[int, DaemonIdentity] = {}
        self._wake: tuple[int, int] | None = None
        self._closing = False

    def start(self) -> None:
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(read, select.POLLIN)
        self._wake = (read, write)
        self._thread = GuardedThread(partial(self._run, read), "exit-watcher")
        self._thread.start()

    def watch(self, identity: DaemonIdentity) -> None:
        """Calls `on_exit` once, from the watcher's thread or this one, when the process is gone; at once if it is."""
        try:
            descriptor = os.pidfd_open(identity.pid)
        except OSError as error:
            if not isinstance(error, ProcessLookupError):
                log.warning("cannot watch the MPS control daemon", pid=identity.pid, error=str(error))
                return
            self._on_exit(identity)
            return
        if not is_alive(identity):  # the PID was used again, or it is a zombie
            os.close(descriptor)
            self._on_exit(identity)
            return
        with self._lock:
            if self._wake is None:
                os.close(descriptor)
                return
            self._watched[descriptor] = identity
            self._poll.register(descriptor, select.POLLIN)
            os.write(self._wake[1], b".")  # a poll under way does not see what is registered meanwhile

    def close(self) -> None:
        """Ends the thread; watched processes live on. May be called again, or without start()."""
        with self._lock:
            wake, self._wake = self._wake, None
            if wake is None:
                return
            self._closing = True
            os.write(wake[1], b".")
        self._thread.join()
        for descriptor in (*self._watched, *wake):
            os.close(descriptor)
        self._watched.clear()

    def _run(self, wake: int) -> None:
        while not self._closing:
            for descriptor, _ in self._poll.poll():
                if descriptor == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(descriptor, 4096)
                    continue
                with self._lock:
                    self._poll.unregister(descriptor)
                    identity = self._watched.pop(descriptor)
                os.close(descriptor)
                children.reap()
                self._on_exit(identity)
