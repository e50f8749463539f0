"""Every file of a node that defines devices of one kind, found again and again at little cost.

A second definition of a device makes it unusable, or takes its place (see registry.py), so whoever owns a kind has to
know them all. A file is read once, and anew when it is another one or was changed.
"""

import os
from collections.abc import Iterator, Sequence

import msgspec

from cdi.registry import BrokenFile, SpecFile
from cdi.scan import read_spec, spec_paths


class Definition(msgspec.Struct, frozen=True):
    """A file that defines devices of the kind. `priority` is the place of its directory; the highest wins."""

    path: str
    priority: int
    devices: tuple[str, ...]


class Definitions:
    """Of one kind, in these directories, lowest priority first. Not for several threads at a time."""

    def __init__(self, kind: str, directories: Sequence[str]) -> None:
        self._kind, self._directories = kind, directories
        self._known: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {}
        """Path -> what it was when it was read, and its devices; None: a file of another kind, or of no use."""
        self.unread: tuple[str, ...] = ()
        """Directories that could not be listed at the last look, and why."""

    def find(self) -> tuple[Definition, ...]:
        """All there are now. Files that a runtime ignores are none."""
        known, self._known = self._known, {}
        unread = []
        found = []
        for priority, directory in enumerate(self._directories):
            paths = spec_paths(directory)
            if isinstance(paths, BrokenFile):
                unread.append(f"{paths.path}: {'; '.join(paths.faults)}")
                continue
            for path, devices in self._devices(paths, priority, known):
                found.append(Definition(path, priority, devices))
        self.unread = tuple(unread)
        return tuple(found)

    def _devices(
        self, paths: Sequence[str], priority: int, known: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]]
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        for path in paths:
            try:
                status = os.stat(path)
            except OSError:
                continue  # gone, or a link to nothing
            identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
            before = known.get(path)
            if before is None or before[0] != identity:
                file = read_spec(path, priority)
                ours = isinstance(file, SpecFile) and file.spec.kind == self._kind
                before = identity, tuple(d.name for d in file.spec.devices) if ours else None  # type: ignore[union-attr]
            self._known[path] = before
            if before[1] is not None:
                yield path, before[1]
