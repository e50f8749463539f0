"""Makes and clears the directories of a control daemon."""

import contextlib
import os
import stat

from mpsd.daemon.paths import DaemonDirs
from mpsd.errors import TransientError

MODE = 0o755
"""Clients of any user must pass: a directory without x anywhere above the socket hides it from non-root containers."""


def prepare(dirs: DaemonDirs) -> str:
    """Makes the pipe and log directory and everything missing up to them, mode 0755.

    The pipe directory is never replaced: containers have it mounted.

    Returns:
        Why host processes of other users can't reach it all the same, empty when they can.

    Raises:
        TransientError: a directory can't be made.
    """
    try:
        os.makedirs(dirs.run_root, mode=MODE, exist_ok=True)
        for directory in (dirs.run_root, *_below(dirs.run_root, dirs.pipe)):
            _make(directory)
        os.makedirs(dirs.log, mode=MODE, exist_ok=True)
    except OSError as error:
        raise TransientError(f"cannot make the directory {error.filename}: {error.strerror}") from error
    closed = [path for path in _parents(dirs.run_root) if not os.stat(path).st_mode & stat.S_IXOTH]
    return f"other users can't pass {closed[0]}: chmod o+x it" if closed else ""


def clear_stale(dirs: DaemonDirs) -> None:
    """Removes what a dead daemon left in its pipe directory. Only for when no daemon lives there."""
    for path in (dirs.control_socket, dirs.pid_file):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def remove(dirs: DaemonDirs) -> None:
    """Removes the pipe directory of a daemon that is gone; log files stay."""
    clear_stale(dirs)
    with contextlib.suppress(OSError):
        for name in os.listdir(dirs.pipe):
            os.unlink(os.path.join(dirs.pipe, name))
        os.rmdir(dirs.pipe)


def _make(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, MODE)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode | MODE != mode:  # an umask, or an earlier hand
        os.chmod(path, mode | MODE)


def _below(root: str, path: str) -> list[str]:
    """The directories from below `root` down to `path`."""
    parts = os.path.relpath(path, root).split(os.sep)
    return [os.path.join(root, *parts[: count + 1]) for count in range(len(parts))]


def _parents(path: str) -> list[str]:
    parents = []
    while (parent := os.path.dirname(path)) != path:
        parents.append(parent)
        path = parent
    return parents
