"""One instance of a process per node: locked files that name their holder.

There is one in every directory that two instances must not share, not only where a config has them look for each other.
"""

import os
import time
from contextlib import ExitStack, suppress

from mpsd.common.errors import GpufracError
from mpsd.common.lockfile import open_lock, try_lock
from mpsd.common.log import get_logger
from mpsd.common.stopsignal import Stop

POLL_S = 0.1


class ProcessLockError(GpufracError):
    """Another instance holds a lock."""


class ProcessLock:
    """Context manager holding all `paths`, taken in their order; the kernel frees them however the process ends.

    Args:
        paths: lock files; their directories exist.
        wait_s: how long to wait for a holder that is on its way out (a rolling upgrade).
        stop: ends the wait early.

    Raises:
        ProcessLockError: on entry, naming the holder.
        LockFileError: on entry: there can be no lock at a path.
    """

    def __init__(self, name: str, paths: tuple[str, ...], *, wait_s: float, stop: Stop) -> None:
        self._name = name
        self._paths = paths
        self._wait_s = wait_s
        self._stop = stop
        self._held = ExitStack()

    def __enter__(self) -> "ProcessLock":
        deadline_s = time.monotonic() + self._wait_s
        seen: list[os.stat_result] = []
        with ExitStack() as held:
            for path in self._paths:
                self._take(path, held, seen, deadline_s)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _take(self, path: str, held: ExitStack, seen: list[os.stat_result], deadline_s: float) -> None:
        """Locks the file that is at the path by then: who held the one before may have removed it (a cleanup)."""
        while True:
            fd = open_lock(path)
            held.callback(os.close, fd)
            found = os.fstat(fd)
            if any(os.path.samestat(found, other) for other in seen):
                return  # two of the directories are one
            self._wait(fd, path, deadline_s)
            if _is_at(path, found):
                break
        seen.append(found)
        with suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def _wait(self, fd: int, path: str, deadline_s: float) -> None:
        told = False
        while not try_lock(fd):
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            if not told:
                get_logger(self._name).warning(
                    "another instance runs on this node; waiting for it to end", pid=holder, lock=path
                )
                told = True
            if self._stop.wait(POLL_S) or time.monotonic() >= deadline_s:
                raise ProcessLockError(
                    f"cannot start: another gpufrac {self._name} (pid {holder}) runs on this node, uses "
                    f"{os.path.dirname(path)} and holds {path}: stop it first"
                )


def _is_at(path: str, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), file)
    except FileNotFoundError:
        return False
