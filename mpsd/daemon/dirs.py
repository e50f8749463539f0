"""Makes and clears the directories of a control daemon."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Collection

from mpsd.daemon.namespaces import SERVER
from mpsd.daemon.paths import DaemonDirs, link_directory, namespace_socket
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


def is_served(dirs: DaemonDirs) -> bool:
    """Whether somebody listens on the control socket; where that can't be told somebody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(dirs.control_socket)
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED)
        return True


def clear_stale(dirs: DaemonDirs) -> None:
    """Removes what a dead daemon left in its pipe directory; the directories of its namespaces stay, as containers have
    them mounted. Only for when no daemon lives there."""
    server = os.path.join(dirs.pipe, SERVER)
    namespaces = [os.path.join(server, name) for name in _names(server)]
    for path in (dirs.pid_file, *(f"{directory}/control" for directory in (dirs.pipe, server, *namespaces))):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)


def remove(dirs: DaemonDirs) -> None:
    """Removes the pipe directory of a daemon that is gone, and what is beside it; log files stay."""
    with contextlib.suppress(OSError):
        os.unlink(dirs.config_file)
    _remove_tree(dirs.links)
    _remove_tree(dirs.pipe)


def link_socket(dirs: DaemonDirs, namespace: str) -> None:
    """Links the socket of a namespace into our stable directory, where containers have it mounted.

    Raises:
        TransientError: it can't be linked.
    """
    source, directory = namespace_socket(dirs, namespace), link_directory(dirs, namespace)
    target = f"{directory}/control"
    try:
        for path in (dirs.links, directory):
            _make(path)
        if os.path.exists(target) and os.path.samefile(source, target):
            return
        # Two names of one file are not renamed onto each other, so what an earlier try left must go first.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{target}.new")
        os.link(source, f"{target}.new")
        os.rename(f"{target}.new", target)
    except OSError as error:
        raise TransientError(f"cannot link {source} to {target}: {error.strerror}") from error


def prune_links(dirs: DaemonDirs, keep: Collection[str]) -> None:
    """Removes our directories of namespaces that are no more."""
    for name in _names(dirs.links):
        if name not in keep:
            _remove_tree(os.path.join(dirs.links, name))


def _remove_tree(path: str) -> None:
    """What can't be removed stays: a directory mounted over, or a daemon's after all."""
    with contextlib.suppress(OSError):
        for directory, directories, files in os.walk(path, topdown=False):
            for name in files:
                os.unlink(os.path.join(directory, name))
            for name in directories:
                os.rmdir(os.path.join(directory, name))
        os.rmdir(path)


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


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
