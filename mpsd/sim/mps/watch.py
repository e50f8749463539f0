"""Being woken by changed files and ended children without looking for them: signals through a pipe into poll."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterable
from types import FrameType


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the wakeup descriptor to be written."""


def watch_simulation(directories: Iterable[str], signals: Iterable[signal.Signals] = ()) -> int:
    """A descriptor that gets a byte, the signal's number, for each of `signals` and SIGIO for a change in a directory.

    Where the kernel has no dnotify, changes are not seen until something else happens.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGIO, *signals):
        signal.signal(number, _ignore)
    events = fcntl.DN_CREATE | fcntl.DN_DELETE | fcntl.DN_MODIFY | fcntl.DN_RENAME | fcntl.DN_MULTISHOT
    for directory in directories:
        with contextlib.suppress(OSError):
            fcntl.fcntl(os.open(directory, os.O_RDONLY | os.O_DIRECTORY), fcntl.F_NOTIFY, events)
    return reader
