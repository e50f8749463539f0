"""The files of events: JSON lines in two files of bounded size for each process, the older one named `.1`.

One process appends, whole lines and never more than fit; it does not flush them to disk, as an event is no promise.
Readers take the files as they find them: a line that is torn, as by a kill or a full disk, is passed over.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cdi.atomic import make_directory
from mpsd.events.model import Event, Held, line_of, parse_line

PROCESSES: Final = ("mpsd", "plugin")
MAX_BYTES = 2 << 20
"""Of one file: some 6,000 events."""
_CHUNK_BYTES = 64 << 10
_LINE_BYTES = 1 << 20
"""The rest of a longer line is passed over; what is held of a thousand allocations has less."""


def directory_of(state_root: str) -> str:
    """Where the files of both processes are."""
    return os.path.join(state_root, "events")


def paths_of(state_root: str, process: str) -> tuple[str, str]:
    """The older file of a process and the one that it appends to."""
    path = os.path.join(directory_of(state_root), f"{process}.jsonl")
    return f"{path}.1", path


class EventFile:
    """What one process appends to. Of one thread.

    Args:
        held: what a new file begins with.
    """

    def __init__(self, state_root: str, process: str, held: Callable[[], Held], *, max_bytes: int = MAX_BYTES) -> None:
        self._directory = directory_of(state_root)
        self._older, self._path = paths_of(state_root, process)
        self._held, self._max_bytes = held, max_bytes
        self._fd = -1
        self._size = 0
        self._torn = False
        """Whether the file ends within a line."""

    def append(self, events: Sequence[Event]) -> int:
        """Appends them in one write. How many were written whole: fewer where the disk is full. Raises OSError where
        none was."""
        lines = [line_of(event) for event in events]
        self._open()
        if self._size + sum(map(len, lines)) > self._max_bytes:
            self._begin_anew()
        return self._write(lines)

    def close(self) -> None:
        """Lets the file go; it is opened again when needed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """The file that has the name now: somebody may have taken it away."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd)):
                    return
            self.close()
        make_directory(self._directory, 0o700)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", self._path)
        self._fd, self._size = fd, status.st_size
        self._torn = self._size > 0 and os.pread(fd, 1, self._size - 1) != b"\n"
        if not self._size:
            self._write([line_of(self._held())])

    def _begin_anew(self) -> None:
        os.rename(self._path, self._older)
        self.close()
        self._open()

    def _write(self, lines: Sequence[bytes]) -> int:
        before = b"\n" if self._torn else b""
        data = before + b"".join(lines)
        written = os.write(self._fd, data)
        self._size += written
        self._torn = data[:written][-1:] != b"\n"
        return data[len(before) : written].count(b"\n")


class Reader:
    """Reads one file on as it grows, whole lines only. Of one thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._half = b""
        self._dropping = False

    def lines(self) -> Iterator[Event | Held]:
        """What is new, then on to the file that has the name by now. Raises OSError; a missing file has nothing."""
        if self._fd >= 0:
            yield from self._rest()
            if self._is_named():
                return
            yield from self._rest()  # what came before it lost its name
        self.close()
        with contextlib.suppress(FileNotFoundError):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(self.path, flags)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                self.close()
                raise OSError(errno.EINVAL, "not a regular file", self.path)
        if self._fd >= 0:
            yield from self._rest()

    def close(self) -> None:
        """Lets the file go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._half, self._dropping = -1, b"", False

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._fd))
        except FileNotFoundError:
            return True  # it is being renamed: nothing else is there yet

    def _rest(self) -> Iterator[Event | Held]:
        while data := os.read(self._fd, _CHUNK_BYTES):
            *ended, half = data.split(b"\n")
            for part in ended:
                line, self._half = self._half + part, b""
                if not self._dropping and (value := parse_line(line)) is not None:
                    yield value
                self._dropping = False
            self._half += half
            if len(self._half) > _LINE_BYTES:
                self._half, self._dropping = b"", True


def read(state_root: str, process: str) -> Iterator[Event | Held]:
    """All lines of both files of a process, oldest first. Raises OSError."""
    for path in paths_of(state_root, process):
        reader = Reader(path)
        try:
            yield from reader.lines()
        finally:
            reader.close()
