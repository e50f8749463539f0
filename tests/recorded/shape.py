"""The fields of a JSON value and their types, whatever its values are (pure)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

FIELD = re.compile(r"[a-z][A-Za-z0-9_]*")
NULL = "null"
_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}


def shape(value: Any) -> dict[str, str]:
    """Path -> the types seen there, such as `gpus[].info.index: number`. A key that is no field's name (a UUID, a
    resource, a variable) is `*`."""
    seen: dict[str, set[str]] = {}
    for path, kind in _walk(value, ""):
        seen.setdefault(path, set()).add(kind)
    return {path: "|".join(sorted(kinds)) for path, kinds in sorted(seen.items())}


def missing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What whoever reads the old fields does not find among the new ones, or finds as another type."""
    found = []
    for path, kinds in old.items():
        before = set(kinds.split("|")) - {NULL}
        after = set(new.get(path, "").split("|"))
        if path not in new:
            found.append(f"{path} is gone")
        elif before and after - before - {NULL}:
            found.append(f"{path} was {kinds} and is {new[path]}")
    return found


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if path:
        yield path, NULL if value is None else _TYPES[type(value)]
    if isinstance(value, dict):
        for key, item in value.items():
            name = key if FIELD.fullmatch(key) else "*"
            yield from _walk(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, f"{path}[]")
