"""Follows one log file that another process writes, and keeps it small on disk.

The file is compared with what was read of it each time, so it may be missing, come later, be truncated, be replaced or
be renamed. Whoever may write to the directory may also put a link or a device under its name: only regular files with
one name are opened, and links are not followed.
"""

import contextlib
import errno
import os
import stat
from dataclasses import dataclass

from mpsd.daemon.logs.parse import Skipped

LINE_BYTES = 4096
"""The rest of a longer line is dropped."""
ROUND_BYTES = 256 << 10
"""The most read of a file in one look; what is more of it is skipped."""
KEEP_BYTES = 1 << 20
"""The most kept in `<file>.1` when a file is cut, and never more than a quarter of what it may have."""

_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Note:
    """Something about the file itself. `lasting` names a condition that stays as it is, see `FloodGate`."""

    text: str
    lasting: str = ""


Item = str | Skipped | Note
"""A line without its end, or what came in its place."""


class LineSplitter:
    """Cuts a stream of bytes into lines (pure). Holds at most `LINE_BYTES` of a line without an end."""

    def __init__(self) -> None:
        self._half = b""
        self._dropping = False

    @property
    def half(self) -> str:
        """The line begun but not ended."""
        return _text(self._half)

    def feed(self, data: bytes) -> list[str]:
        """The lines that end in these bytes. NUL bytes go: they are holes, where a file was cut under its writer."""
        *ended, half = data.replace(b"\0", b"").split(b"\n")
        lines = []
        for part in ended:
            if self._dropping:
                self._dropping = False
            else:
                lines.append(_text((self._half + part[:LINE_BYTES])[:LINE_BYTES]))
            self._half = b""
        if not self._dropping:
            self._half += half[: LINE_BYTES + 1]
            if len(self._half) > LINE_BYTES:
                lines.append(_text(self._half[:LINE_BYTES]))
                self._half, self._dropping = b"", True
        return lines

    def end(self) -> list[str]:
        """The stream ended: the half line is all there will be of it."""
        lines = [self.half] if self._half else []
        self._half, self._dropping = b"", False
        return lines

    def skip(self) -> None:
        """Bytes are left out: the next line begins after the next line end."""
        self._half, self._dropping = b"", True


def _text(line: bytes) -> str:
    """Printable whatever the bytes are."""
    text = line.decode(errors="replace").rstrip()
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


class LogFile:
    """One file, by its name in a directory that the caller opens. Not for more than one thread at a time.

    Args:
        name: without a slash.
        max_bytes: disk space it may take before it is cut. It may pass that by what is written between two looks, and
            `<name>.1` takes up to a quarter of it besides.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self._splitter = LineSplitter()
        self._fd = -1
        self._identity = (0, 0)
        self._writable = False
        self._position = 0

    @property
    def half_line(self) -> str:
        """What stands at the end without a line end."""
        return self._splitter.half

    def mark(self) -> tuple[int, int] | None:
        """Size and time of the file that is read: the same while nobody writes it."""
        if self._fd < 0:
            return None
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def begin(self, directory: int) -> None:
        """Passes over what the file holds by now."""
        with contextlib.suppress(OSError):
            if self._open(directory, []):
                self._position = os.fstat(self._fd).st_size
                if self._position and os.pread(self._fd, 1, self._position - 1) != b"\n":
                    self._splitter.skip()

    def look(self, directory: int | None) -> list[Item]:
        """What is new since the last look, bounded, in order. Cuts a file that takes too much of the disk.

        Args:
            directory: descriptor; None where the directory is missing, then only an open file is read on.
        """
        items: list[Item] = []
        try:
            self._look(directory, items)
        except OSError as error:
            items.append(Note(f"cannot read {self._name}: {error.strerror}", f"unreadable {self._name}"))
        return items

    def _look(self, directory: int | None, items: list[Item]) -> None:
        found = None if directory is None else _status_at(directory, self._name)
        if self._fd >= 0:
            self._read(items)
        if directory is not None and found is not None and _identity(found) != self._identity:
            if not _is_regular(found):
                items.append(Note(f"{self._name} is not read: it is no regular file of one name", "irregular"))
            elif self._open(directory, items):
                self._read(items)
        named = found is not None and _identity(found) == self._identity
        if self._fd >= 0:
            self._bound(directory if named else None, items)

    def close(self) -> None:
        """Lets the file go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._identity = -1, (0, 0)

    def _open(self, directory: int, items: list[Item]) -> bool:
        """Goes over to the file that bears the name now, if it may be read."""
        fd, writable = _open_file(directory, self._name)
        if fd < 0:
            return False
        status = os.fstat(fd)
        if not _is_regular(status):
            os.close(fd)
            return False
        items += self._splitter.end()
        self.close()
        self._fd, self._writable, self._position = fd, writable, 0
        self._identity = _identity(status)
        return True

    def _read(self, items: list[Item]) -> None:
        size = os.fstat(self._fd).st_size
        if size < self._position:  # truncated by somebody else
            items += self._splitter.end()
            self._position = 0
        self._position = _data_from(self._fd, self._position, size)
        if size - self._position > ROUND_BYTES:
            items.append(Skipped(size - self._position - ROUND_BYTES))
            self._splitter.skip()
            self._position = size - ROUND_BYTES
        while self._position < size:
            data = os.pread(self._fd, min(_CHUNK_BYTES, size - self._position), self._position)
            if not data:
                break
            self._position += len(data)
            items += self._splitter.feed(data)

    def _bound(self, directory: int | None, items: list[Item]) -> None:
        status = os.fstat(self._fd)
        # Not the size alone: what a writer without O_APPEND writes after a cut has a hole before it. Nor the blocks
        # alone: file systems allocate ahead.
        if min(status.st_size, status.st_blocks * 512) <= self._max_bytes:
            return
        if not self._writable:
            text = f"{self._name} takes more than {self._max_bytes} bytes and can't be cut: no permission to write it"
            items.append(Note(text, f"read-only {self._name}"))
            return
        if directory is not None:
            self._keep_end(directory, status)
        self._read(items)  # as late as can be: what comes between this and the cut is lost
        os.ftruncate(self._fd, 0)
        self._position = 0
        items.append(Note(f"{self._name} was cut: it took more than {self._max_bytes} bytes", f"cut {self._name}"))

    def _keep_end(self, directory: int, status: os.stat_result) -> None:
        """Puts the last lines into `<name>.1`: made anew, so never what a link points to. Not on a full disk."""
        name, size = f"{self._name}.1", status.st_size
        start = max(0, size - min(KEEP_BYTES, self._max_bytes // 4))
        if start:
            start = _data_from(self._fd, start, size)
            start += os.pread(self._fd, LINE_BYTES, start).find(b"\n") + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            fd = os.open(name, flags, stat.S_IMODE(status.st_mode) & 0o666, dir_fd=directory)
        except OSError:
            return
        try:
            while start < size and (copied := os.sendfile(fd, self._fd, start, size - start)):
                start += copied
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
        finally:
            os.close(fd)


def _is_regular(status: os.stat_result) -> bool:
    """Also not a second name of a file elsewhere: it would be cut there."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _status_at(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None


def _open_file(directory: int, name: str) -> tuple[int, bool]:
    """A descriptor (-1: can't be opened) and whether it can be written. Never blocks on a pipe."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    for mode in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            return os.open(name, mode | flags, dir_fd=directory), mode == os.O_RDWR
    return -1, False


def _data_from(fd: int, position: int, size: int) -> int:
    """Where the next data are, past a hole; `size` where there are none."""
    if position >= size:
        return position
    try:
        return min(size, os.lseek(fd, position, os.SEEK_DATA))
    except OSError as error:
        return size if error.errno == errno.ENXIO else position
