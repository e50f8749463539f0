"""Small files of state. What is read back is checked like a config: a regular file of bounded size, UTF-8, of the right
shape, with values that can be. What can't be used is set aside for a person, never overwritten.
"""

import itertools
import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from cdi.atomic import make_directory, read_regular, replace_file
from mpsd.common.errors import GpufracError

T = TypeVar("T")


class RecordError(GpufracError):
    """A file of state can't be used. Its text is the reason alone; where the file went is `kept_as`, empty where it
    could not be moved."""

    def __init__(self, reason: str, kept_as: str = "") -> None:
        super().__init__(reason)
        self.kept_as = kept_as

    @property
    def kept(self) -> str:
        """What became of the file, for people."""
        return f"the file is kept as {self.kept_as}" if self.kept_as else "the file could not be set aside"


def read(path: str, shape: type[T], flaw: Callable[[T], str] = lambda _: "") -> T | None:
    """The value in a file, None where there is none.

    Args:
        flaw: why a value of the right shape can't be all the same, empty when it can.

    Raises:
        RecordError: it can't be used; the file is untouched.
    """
    try:
        data = read_regular(path, follow_links=False)[0]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(str(error.strerror or error)) from error
    return decode(data, shape, flaw)


def take(path: str, shape: type[T], flaw: Callable[[T], str] = lambda _: "") -> T | None:
    """As `read`; a file that can't be used is set aside."""
    try:
        return read(path, shape, flaw)
    except RecordError as error:
        raise RecordError(str(error), set_aside(path)) from error


def decode(data: bytes, shape: type[T], flaw: Callable[[T], str] = lambda _: "") -> T:
    """The value in the bytes of a file (pure). Raises RecordError."""
    try:
        value = msgspec.json.decode(data, type=shape)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise RecordError(str(error)) from error
    if reason := flaw(value):
        raise RecordError(reason)
    return value


def set_aside(path: str) -> str:
    """Moves what is at `path` out of the way, whatever it is, to a name that is free: what was set aside before stays,
    and a directory could not take its place. Where it is now, empty where it can't be moved."""
    names = itertools.chain([f"{path}.unreadable"], (f"{path}.unreadable-{n}" for n in itertools.count(2)))
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        os.replace(path, aside)
    except OSError:
        return ""
    return aside


def write(path: str, value: object) -> None:
    """Replaces a file that is root's alone, durably; its directory is made where it is missing. Raises OSError."""
    make_directory(os.path.dirname(path), 0o700)
    replace_file(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n", 0o600)
