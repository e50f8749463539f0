"""Kubernetes manifests -> the pods that their controllers would make, judged as the API server would.

YAML and JSON, several documents in a file, as kubectl reads them. What is no business of a node's device handling
(images, volumes, schedulers, other kinds) is ignored, with a note where a user would be misled; what the API server
refuses is an error with its words, and fields in a place where they can have no effect with those of its strict
validation.
"""

import os
import sys
from collections.abc import Iterable

from deviceplugin.sim.objects import mistaken
from deviceplugin.sim.objects.documents import documents
from deviceplugin.sim.objects.model import MAX_PODS, LoadedPod, ManifestError, Note, RefusedError
from deviceplugin.sim.objects.workloads import objects

__all__ = [
    "MAX_FILE_BYTES",
    "MAX_PODS",
    "LoadedPod",
    "ManifestError",
    "Note",
    "load_all",
    "load_manifests",
    "parse_all",
    "parse_manifests",
    "read_manifests",
]

MAX_FILE_BYTES = 4 * 1024 * 1024
SUFFIXES = (".yaml", ".yml", ".json")
"""Of the files that kubectl reads in a directory."""


def load_manifests(path: str) -> list[LoadedPod | Note]:
    """The pods of a manifest file, or of those of a directory; `-` for standard input.

    Raises:
        ManifestError: it can't be read, is no YAML or JSON, or the API server would refuse some of it; all problems.
    """
    return load_all([path])


def load_all(paths: Iterable[str]) -> list[LoadedPod | Note]:
    """As load_manifests for several files, with the problems of all of them, and names unique over all of them."""
    texts: list[tuple[str, bytes]] = []
    problems: list[str] = []
    for path in paths:
        try:
            texts += read_manifests(path)
        except ManifestError as error:
            problems += error.problems
    try:
        found = parse_all(texts)
    except ManifestError as error:
        raise ManifestError([*problems, *error.problems]) from error
    if problems:
        raise ManifestError(problems)
    return found


def read_manifests(path: str) -> list[tuple[str, bytes]]:
    """What error texts call it, and the bytes, of a manifest, `-` for standard input; or of every file in a directory
    that kubectl would read, none below it. Raises ManifestError."""
    if not os.path.isdir(path):
        return [("<stdin>" if path == "-" else path, _read(path))]
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise ManifestError([f"cannot read manifests in {path}: {error.strerror or error}"]) from error
    if what := mistaken.directory(names):
        raise ManifestError([f"cannot read manifests in {path}: {what}"])
    files = [file for name in names if name.endswith(SUFFIXES) and not os.path.isdir(file := os.path.join(path, name))]
    if not files:
        raise ManifestError([f"cannot read manifests in {path}: it has no {', '.join(SUFFIXES)} file"])
    return [(file, _read(file)) for file in files]


def parse_all(texts: Iterable[tuple[str, bytes]]) -> list[LoadedPod | Note]:
    """Manifests of several sources: (what error texts call it, content)."""
    found: list[LoadedPod | Note] = []
    problems: list[str] = []
    for source, text in texts:
        try:
            found += parse_manifests(text, source)
        except ManifestError as error:
            problems += error.problems
    if not problems:
        problems = _duplicates(found)
    if sum(isinstance(item, LoadedPod) for item in found) > MAX_PODS:
        problems.append(f"cannot admit more than {MAX_PODS} pods at a time: lower the replicas")
    if problems:
        raise ManifestError(problems)
    return found


def _read(path: str) -> bytes:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ManifestError([f"cannot read manifest {path}: {reason}"]) from error
    if len(data) > MAX_FILE_BYTES:
        raise ManifestError([f"cannot read manifest {path}: it is larger than {MAX_FILE_BYTES} bytes"])
    return data


def parse_manifests(data: bytes, source: str) -> list[LoadedPod | Note]:
    """The pods of one file's content; `source` is what error texts call it. Raises ManifestError."""
    found: list[LoadedPod | Note] = []
    problems: list[str] = []
    count = 0
    for document in documents(data, source):
        count += 1
        try:
            found += objects(document)
        except RefusedError as error:
            problems.append(f"{document.place}: {error}{mistaken.hint(document.value, str(error))}")
    if not count:
        raise ManifestError([f"cannot read manifest {source}: no objects in it"])
    if not problems:
        problems = _duplicates(found)
    if problems:
        raise ManifestError(problems)
    return found


def _duplicates(found: Iterable[LoadedPod | Note]) -> list[str]:
    seen: dict[str, str] = {}
    problems = []
    for item in found:
        if isinstance(item, LoadedPod):
            name = item.pod.full_name
            if name in seen:
                problems.append(
                    f'{item.source}: pods "{item.pod.name}" already exists in namespace "{item.pod.namespace}": '
                    f"first in {seen[name]}"
                )
            seen.setdefault(name, item.source)
    return problems
