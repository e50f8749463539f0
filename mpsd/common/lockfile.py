"""Lock files: of root's alone, for a lock on what others may open is theirs to take.

A link is never followed and nothing that is not our own plain file is touched: who can plant a file in the directory
must not have us write elsewhere.
"""

import errno
import fcntl
import os
import stat

from mpsd.common.errors import GpufracError

MODE = 0o600
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class LockFileError(GpufracError):
    """There can be no lock file at a path, and why."""


def open_lock(path: str) -> int:
    """A descriptor of the file at `path`, made where missing, mode 0600. Raises LockFileError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags, MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise LockFileError(_in_the_way(path, _kind(os.lstat(path).st_mode))) from error
        raise LockFileError(f"cannot lock {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise LockFileError(_in_the_way(path, _kind(status.st_mode)))
        if status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise LockFileError(_in_the_way(path, "a file of another user, or with a second name"))
        if stat.S_IMODE(status.st_mode) != MODE:
            os.fchmod(fd, MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def try_lock(fd: int) -> bool:
    """Whether the lock is ours now; the kernel frees it when the descriptor is closed, however that happens."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_the_way(path: str, what: str) -> str:
    return f"cannot lock {path}: {what} is in the way, where a plain file of ours should be: remove it"


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")
