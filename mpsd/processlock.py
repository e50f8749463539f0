"""One instance of a process per node: an flock'ed file that names its holder."""

import errno
import fcntl
import os
import time

from mpsd.errors import GpufracError
from mpsd.log import get_logger
from mpsd.stopsignal import Stop

POLL_S = 0.1


class ProcessLockError(GpufracError):
    """Another instance holds the lock."""


class ProcessLock:
    """Context manager holding `<directory>/<name>.lock`; the kernel frees it however the process ends.

    Args:
        wait_s: how long to wait for a holder that is on its way out (a rolling upgrade).
        stop: ends the wait early.

    Raises:
        ProcessLockError: on entry, naming the holder.
    """

    def __init__(self, directory: str, name: str, *, wait_s: float, stop: Stop) -> None:
        self._path = os.path.join(directory, f"{name}.lock")
        self._name = name
        self._wait_s = wait_s
        self._stop = stop
        self._fd = -1

    def __enter__(self) -> "ProcessLock":
        os.makedirs(os.path.dirname(self._path), mode=0o755, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline_s = time.monotonic() + self._wait_s
        told = False
        while not self._try():
            holder = self._holder()
            if not told:
                get_logger(self._name).warning(
                    "another instance runs on this node; waiting for it to end", pid=holder, lock=self._path
                )
                told = True
            if self._stop.wait(POLL_S) or time.monotonic() >= deadline_s:
                os.close(self._fd)
                raise ProcessLockError(
                    f"cannot start: another gpufrac {self._name} (pid {holder}) runs on this node and holds "
                    f"{self._path}: "
                    "stop it first"
                )
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                return False
            raise
        return True

    def _holder(self) -> str:
        return os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
