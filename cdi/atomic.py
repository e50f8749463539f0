"""Files that are either the old or the new one, whole and on disk, whenever power or a process is lost.

A write goes to a temporary file in the same directory, `.<name>.<pid>.<token>-<n>.tmp`: a name that readers of CDI
specs skip (they take any file that ends in .json or .yaml, dot-files included). It is renamed inside the directory
(containerd does not notice a file moved or linked in from elsewhere; verified on 2.1.9). The file is flushed before the
rename and the directory after it. Raises OSError with the full path; a failed write leaves no temporary file.
"""

import errno
import itertools
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from cdi.errors import InvalidNameError

MAX_NAME_BYTES = 200
"""Leaves room for the temporary name within the 255 bytes of a file name."""
MAX_FILE_BYTES = 8 * 1024 * 1024
"""More than any spec or record; a larger file is refused rather than read into memory."""

_TEMP = re.compile(r"\.(?P<name>.+)\.(?P<pid>[0-9]+)\.(?P<token>[0-9a-f]{8})-[0-9]+\.tmp")
_TOKEN = os.urandom(4).hex()
_counter = itertools.count()
_IN_FLIGHT_S = 60.0
"""A temporary file this young may belong to a write in progress, if a process with its pid lives."""


def replace_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Writes `path` durably, replacing what is there. The directory must exist. Raises OSError, InvalidNameError."""
    directory, name = os.path.split(path)
    check_file_name(name)
    with _full_path(path), _open_directory(directory or ".") as fd:
        _replace(fd, name, data, mode)
        os.fsync(fd)


def remove_file(path: str) -> bool:
    """Removes `path` durably. False when it was not there. Raises OSError, InvalidNameError."""
    directory, name = os.path.split(path)
    check_file_name(name)
    try:
        with _full_path(path), _open_directory(directory or ".") as fd:
            os.unlink(name, dir_fd=fd)
            os.fsync(fd)
    except FileNotFoundError:
        return False
    return True


def make_directory(path: str, mode: int) -> bool:
    """Makes a directory with this mode, and what is missing above it with 0755, whatever the umask. False when it was
    there: its mode is left alone. Raises OSError."""
    path = path.rstrip("/") or "/"
    if os.path.isdir(path):
        return False
    if parent := os.path.dirname(path):
        make_directory(parent, 0o755)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return False
    os.chmod(path, mode)
    return True


def collect_temp_files(directory: str, prefix: str = "") -> list[str]:
    """Removes temporary files that a killed process left, for file names that start with `prefix`; gives their names.

    Files of writes in progress stay: this process's own, and young ones whose writer lives. Raises OSError; a missing
    directory holds none.
    """
    try:
        with _full_path(directory), _open_directory(directory) as fd:
            return _collect(fd, prefix)
    except FileNotFoundError:
        return []


def check_file_name(name: str) -> str:
    """The name itself. Raises InvalidNameError for no plain file name, one too long, or one of a temporary file."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InvalidNameError("file name", name, "expected a plain file name")
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise InvalidNameError("file name", name, f"more than {MAX_NAME_BYTES} bytes")
    if _TEMP.fullmatch(name):
        raise InvalidNameError("file name", name, "this form is kept for temporary files")
    return name


class DurableDirectory:
    """A directory of small files that are written whole, held open for speed.

    Safe for threads: operations run one at a time. The directory is made when missing, and found again when someone
    replaced it or mounted over it. Operations raise OSError, and InvalidNameError as `check_file_name`.

    Args:
        path: the directory.
        mode: of the directory, where it is made here.
        file_mode: of the files, whatever the umask.
    """

    def __init__(self, path: str, *, mode: int = 0o755, file_mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode
        self._file_mode = file_mode
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._unflushed = False
        with self._opened():
            pass

    def put(self, name: str, data: bytes, *, sync: bool = True) -> None:
        """Writes a file. With `sync` false its content is on disk, but its name only after the next `sync()`."""
        with self._opened(check_file_name(name)) as fd:
            _replace(fd, name, data, self._file_mode)
            self._unflushed = True
            if sync:
                self._flush(fd)

    def remove(self, name: str, *, sync: bool = True) -> bool:
        """Removes a file. False when it was not there."""
        with self._opened(check_file_name(name)) as fd:
            try:
                os.unlink(name, dir_fd=fd)
                self._unflushed = removed = True
            except FileNotFoundError:
                removed = False
            if sync:
                self._flush(fd)
            return removed

    def rename(self, name: str, new: str) -> None:
        """Gives an entry another name in the directory; what had that one is gone. Of a link, the link itself."""
        with self._opened(check_file_name(new)) as fd:
            os.rename(name, new, src_dir_fd=fd, dst_dir_fd=fd)
            os.fsync(fd)

    def sync(self) -> None:
        """Puts names written or removed since the last flush on disk; nothing to do when there are none."""
        with self._opened() as fd:
            self._flush(fd)

    def read(self, name: str) -> bytes | None:
        """The content of a file, None when it is not there. Links and whatever is no regular file are refused."""
        with self._opened(check_file_name(name)) as fd:
            try:
                return read_regular(name, dir_fd=fd, follow_links=False)[0]
            except FileNotFoundError:
                return None

    def holds(self, name: str, data: bytes) -> bool:
        """Whether a file is there with just this content and our mode: writing it again would change nothing."""
        with self._opened(check_file_name(name)) as fd:
            try:
                return read_regular(name, dir_fd=fd, follow_links=False) == (data, self._file_mode)
            except OSError:
                return False

    def names(self) -> list[str]:
        """Names of all entries, sorted, temporary files left out."""
        with self._opened() as fd:
            return sorted(name for name in os.listdir(fd) if not _TEMP.fullmatch(name))

    def collect_temp_files(self, prefix: str = "") -> list[str]:
        """As the function of this name."""
        with self._opened() as fd:
            return _collect(fd, prefix)

    def close(self) -> None:
        """Gives the descriptor back. A later operation opens the directory again."""
        with self._lock:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _opened(self, name: str = "") -> Iterator[int]:
        with self._lock, _full_path(os.path.join(self.path, name) if name else self.path):
            yield self._current()

    def _flush(self, fd: int) -> None:
        # A failed flush stays owed: the next one pays for it, also when its own change was none.
        if self._unflushed:
            os.fsync(fd)
            self._unflushed = False

    def _current(self) -> int:
        """The descriptor of the directory that `path` names now: an older one would write where no reader looks."""
        if self._fd is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                    return self._fd
            self._drop()
        fresh = make_directory(self.path, self._mode)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if fresh:
            _sync_directory(os.path.dirname(self.path.rstrip("/")) or ".")
        return self._fd

    def _drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_regular(
    path: str, *, dir_fd: int | None = None, follow_links: bool = True, max_bytes: int = MAX_FILE_BYTES
) -> tuple[bytes, int]:
    """Content and permission bits of a regular file. Never blocks on a pipe or device. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        chunks: list[bytes] = []
        size = status.st_size if status.st_size > max_bytes else 0
        while size <= max_bytes and (chunk := os.read(fd, max(status.st_size + 1 - size, 65536))):
            size += len(chunk)
            chunks.append(chunk)
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", path)
        return b"".join(chunks), stat.S_IMODE(status.st_mode)
    finally:
        os.close(fd)


def _replace(directory_fd: int, name: str, data: bytes, mode: int) -> None:
    """All but the flush of the directory."""
    temp = f".{name}.{os.getpid()}.{_TOKEN}-{next(_counter)}.tmp"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temp, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temp, dir_fd=directory_fd)
        raise


def _collect(directory_fd: int, prefix: str) -> list[str]:
    collected = []
    for name in sorted(os.listdir(directory_fd)):
        match = _TEMP.fullmatch(name)
        if match is None or not match["name"].startswith(prefix) or match["token"] == _TOKEN:
            continue
        with suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            young = time.time() - status.st_mtime < _IN_FLIGHT_S
            # Our own pid is an earlier process's here: in a container every start has the same one.
            if young and int(match["pid"]) != os.getpid() and os.path.exists(f"/proc/{match['pid']}"):
                continue
            os.unlink(name, dir_fd=directory_fd)
            collected.append(name)
    return collected


@contextmanager
def _open_directory(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _sync_directory(path: str) -> None:
    with _open_directory(path) as fd:
        os.fsync(fd)


@contextmanager
def _full_path(path: str) -> Iterator[None]:
    """Calls relative to a descriptor name a file without its directory, or nothing: people need the whole path."""
    try:
        yield
    except OSError as exc:
        exc.filename = path
        del exc.filename2  # None would be printed
        raise
