"""Makes and clears the directories of a control daemon."""

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Iterator

from cdi.atomic import make_directory
from mpsd.common.errors import TransientError
from mpsd.daemon.namespaces import SERVER
from mpsd.daemon.paths import MAIN, DaemonDirs, Link, link_source, namespace_socket

MODE = 0o755
"""Clients of any user must pass: a directory without x anywhere above the socket hides it from non-root containers."""

_LEFT = ("control", "control_lock", "control_privileged", "log")
"""What a daemon is known to make in its pipe directory, beside its pid file and the directories of its servers."""


def prepare(dirs: DaemonDirs) -> str:
    """Makes the pipe and log directory and everything missing up to them, mode 0755.

    The pipe directory is never replaced: containers have it mounted.

    Returns:
        Why host processes of other users can't reach it all the same, empty when they can.

    Raises:
        TransientError: a directory can't be made.
    """
    try:
        make_directory(dirs.run_root, MODE)
        for directory in (dirs.run_root, *_below(dirs.run_root, dirs.pipe)):
            _make(directory)
        make_directory(dirs.log, MODE)
    except OSError as error:
        raise TransientError(f"cannot make the directory {error.filename}: {error.strerror}") from error
    closed = [path for path in _parents(dirs.run_root) if not os.stat(path).st_mode & stat.S_IXOTH]
    return f"other users can't pass {closed[0]}: chmod o+x it" if closed else ""


def is_socket(path: str) -> bool:
    """Whether a socket is there; a link to one is none."""
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def is_served(dirs: DaemonDirs) -> bool:
    """Whether somebody listens on the control socket; where that can't be told somebody does. A link is no socket:
    whoever may write the directory would point it at somebody who listens for ever."""
    return listener(dirs) is not None


def listener(dirs: DaemonDirs) -> int | None:
    """PID of who listens on the control socket: who called listen(2), by the kernel's word. None: nobody does. 0: it
    can't be told, or is of another PID namespace."""
    if os.path.lexists(dirs.control_socket) and not is_socket(dirs.control_socket):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(dirs.control_socket)
        except OSError as error:
            return None if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED) else 0
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])


def read_file(path: str, max_bytes: int, *, end: bool = False) -> bytes:
    """So much of the beginning, or the `end`, of a file that somebody else may have put there.

    Raises:
        OSError: it can't be read, or is no regular file: a pipe would hang who opens it, a link lead anywhere.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return os.pread(fd, max_bytes, max(0, status.st_size - max_bytes) if end else 0)
    finally:
        os.close(fd)


def clear_stale(dirs: DaemonDirs) -> None:
    """Removes what a dead daemon left in its pipe directory, or anybody put in the place of that; the directories of
    its namespaces stay, as containers have them mounted. Only for when no daemon lives there.

    Raises:
        TransientError: something can't be removed.
    """
    if not os.path.lexists(dirs.pipe):
        return
    try:
        with _opened(dirs.pipe) as pipe:
            for name in (os.path.basename(dirs.pid_file), *_LEFT):
                _discard(pipe, name)
            if not _is_directory(pipe, SERVER):
                _discard(pipe, SERVER)  # a daemon would follow a link
                return
            with _opened(SERVER, pipe) as server:
                _discard(server, "control")
                for name in os.listdir(server):
                    if _is_directory(server, name):
                        with _opened(name, server) as namespace:
                            _discard(namespace, "control")
                    else:
                        _discard(server, name)
    except OSError as error:
        raise TransientError(f"cannot clear {dirs.pipe}: {error.strerror}: look what is in it") from error


def clear_socket(dirs: DaemonDirs, namespace: str) -> None:
    """Removes what lies where the socket of a namespace should be, and is none.

    Raises:
        TransientError: it can't be removed.
    """
    path = namespace_socket(dirs, namespace)
    try:
        if not is_socket(path):
            with _opened(dirs.pipe) as pipe, _opened(SERVER, pipe) as server, _opened(namespace, server) as directory:
                _discard(directory, "control")
    except FileNotFoundError:
        return
    except OSError as error:
        raise TransientError(f"cannot remove {path}: {error.strerror}") from error


def remove(dirs: DaemonDirs, homes: Iterable[str] = ()) -> None:
    """Removes the pipe directory of a daemon that is gone, what is beside it, and directories of its `homes`; log files
    stay."""
    with contextlib.suppress(OSError):
        os.unlink(dirs.config_file)
    with contextlib.suppress(OSError), _opened(os.path.dirname(dirs.pipe)) as parent:
        for path in (*homes, dirs.links, dirs.pipe):
            _remove_tree(parent, os.path.basename(path))


def link_socket(dirs: DaemonDirs, link: Link) -> None:
    """Links a socket of the daemon into our stable directory, where containers have it mounted.

    Raises:
        TransientError: it can't be linked.
    """
    source, directory = link_source(dirs, link.namespace), link.directory
    try:
        for path in (link.home, directory):
            _make(path)
        with _socket_directory(dirs, link.namespace) as theirs, _opened(directory) as ours:
            _link_control(theirs, ours)
    except OSError as error:
        raise TransientError(f"cannot link {source} to {directory}/control: {error.strerror}") from error


def is_linked(dirs: DaemonDirs, link: Link) -> bool:
    """Whether a socket of the daemon is in our stable directory."""
    try:
        ours = os.lstat(f"{link.directory}/control")
        return os.path.samestat(ours, os.lstat(link_source(dirs, link.namespace)))
    except OSError:
        return False


@contextlib.contextmanager
def _socket_directory(dirs: DaemonDirs, namespace: str) -> Iterator[int]:
    """Where the daemon has the socket of a namespace, or of MAIN. Raises OSError."""
    with _opened(dirs.pipe) as pipe:
        if namespace == MAIN:
            yield pipe
            return
        with _opened(SERVER, pipe) as server, _opened(namespace, server) as directory:
            yield directory


def _link_control(theirs: int, ours: int) -> None:
    found = os.stat("control", dir_fd=theirs, follow_symlinks=False)
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(found, os.stat("control", dir_fd=ours, follow_symlinks=False)):
            return
    # Two names of one file are not renamed onto each other, so what an earlier try left must go first.
    _discard(ours, "control.new")
    os.link("control", "control.new", src_dir_fd=theirs, dst_dir_fd=ours, follow_symlinks=False)
    if _is_directory(ours, "control"):
        _discard(ours, "control")
    os.rename("control.new", "control", src_dir_fd=ours, dst_dir_fd=ours)


def remove_link(link: Link) -> None:
    """Removes one of our directories, where it is."""
    with contextlib.suppress(OSError), _opened(link.home) as links:
        _remove_tree(links, link.name)


def prune_links(home: str, keep: Collection[str]) -> None:
    """Removes our directories of namespaces that are no more."""
    with contextlib.suppress(OSError), _opened(home) as links:
        for name in os.listdir(links):
            if name not in keep:
                _remove_tree(links, name)


# Tenants may write pipe directories (protocol 2) and those of their namespaces, and change them while we look. So
# whatever lies there is reached by descriptors of real directories only, one step at a time.


@contextlib.contextmanager
def _opened(name: str, parent: int | None = None) -> Iterator[int]:
    """A directory, never what a link points to. Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_directory(parent: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _discard(parent: int, name: str) -> None:
    """Takes a name away, whatever it stands for. A directory is set aside first: what is in it may not be removable,
    and the name has to be free. Raises OSError."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        aside = f".{os.urandom(8).hex()}"
        os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
        _remove_tree(parent, aside)


def _remove_tree(parent: int, name: str) -> None:
    """What can't be removed stays: a directory mounted over, or a daemon's after all."""
    with contextlib.suppress(OSError):
        with _opened(name, parent) as top:
            _empty(top)
        os.rmdir(name, dir_fd=parent)


def _empty(top: int) -> None:
    """What is in a directory is moved up before that goes, so that no depth takes more descriptors or stack."""
    names = os.listdir(top)
    while names:
        name = names.pop()
        try:
            os.unlink(name, dir_fd=top)
        except IsADirectoryError:
            with _opened(name, top) as directory:
                for below in os.listdir(directory):
                    names.append(f".{os.urandom(8).hex()}")
                    os.rename(below, names[-1], src_dir_fd=directory, dst_dir_fd=top)
            os.rmdir(name, dir_fd=top)


def _make(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, MODE)
    found = os.stat(path).st_mode
    if not stat.S_ISDIR(found):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    mode = stat.S_IMODE(found)
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
