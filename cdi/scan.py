"""Reads the spec files of a node as a container runtime's library does; see registry.py for its rules."""

import os
from collections.abc import Sequence

from cdi.atomic import read_regular
from cdi.decode import decode_json, decode_yaml
from cdi.errors import MalformedSpecError
from cdi.registry import DEFAULT_DIRECTORIES, BrokenFile, Registry, SpecFile, build


def scan(directories: Sequence[str] = DEFAULT_DIRECTORIES) -> Registry:
    """Reads the spec files of a node, lowest priority first. Never raises: what can't be read is in `broken`."""
    found: list[SpecFile | BrokenFile] = []
    for priority, directory in enumerate(directories):
        found += _scan_directory(os.path.normpath(directory), priority)
    return build(found, directories)


def spec_paths(directory: str) -> list[str] | BrokenFile:
    """The files of a directory that runtimes read, sorted; none where it is not there."""
    if os.path.islink(directory):
        # The library does not follow the starting point of its walk (verified with podman 4.3.1).
        return BrokenFile(directory, ("is a symbolic link: runtimes do not look into it; use the real path",))
    try:
        with os.scandir(directory) as entries:
            return sorted(
                entry.path
                for entry in entries
                if entry.name.endswith((".json", ".yaml")) and not entry.is_dir(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []
    except OSError as exc:
        return BrokenFile(directory, (f"cannot list it: {exc.strerror}",))


def _scan_directory(directory: str, priority: int) -> list[SpecFile | BrokenFile]:
    paths = spec_paths(directory)
    if isinstance(paths, BrokenFile):
        return [paths]
    return [file for path in paths if (file := read_spec(path, priority)) is not None]


def read_spec(path: str, priority: int) -> SpecFile | BrokenFile | None:
    """One file as runtimes take it; None where it is gone by now."""
    try:
        data, _ = read_regular(path)
        version, spec = (decode_json if path.endswith(".json") else decode_yaml)(data)
    except FileNotFoundError:
        if os.path.islink(path):
            return BrokenFile(path, ("a link to nothing",))
        return None  # withdrawn between listing and reading
    except OSError as exc:
        return BrokenFile(path, (f"cannot read it: {exc.strerror}",))
    except MalformedSpecError as exc:
        return BrokenFile(path, exc.faults)
    return SpecFile(path, priority, version, spec)
