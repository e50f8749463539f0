"""Spec files that anyone wrote, read as a container runtime's library does (pure).

The CDI library 1.1.0 parses JSON and YAML alike through one YAML reader: field names match in any case, numbers and
booleans become text where text is expected, null is absent, and an unknown field, a key given twice, an unknown version
or a version below what the fields need makes it ignore the whole file (verified). So a `.json` file that is no JSON is
read as YAML here, too: one with a byte order mark, a comment or another style defines devices all the same.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from cdi.errors import MalformedSpecError, shorten
from cdi.model import Spec
from cdi.validate import library_faults
from cdi.version import KNOWN_VERSIONS, is_older, minimum_version, parse_version

_TEXT_FIELDS = frozenset(
    {"cdiVersion", "kind", "name", "path", "hostPath", "containerPath", "type", "permissions", "hookName", "closID"}
    | {"l3CacheSchema", "memBwSchema", "hostInterfaceName"}
)
_TEXT_LIST_FIELDS = frozenset({"env", "args", "options", "schemata"})
_OTHER_FIELDS = frozenset(
    {"annotations", "devices", "containerEdits", "deviceNodes", "mounts", "hooks", "additionalGids", "intelRdt"}
    | {"netDevices", "major", "minor", "fileMode", "uid", "gid", "timeout", "enableMonitoring"}
)
_SPELLING = {field.lower(): field for field in _TEXT_FIELDS | _TEXT_LIST_FIELDS | _OTHER_FIELDS}
_MAX_VALUES = 200_000
"""Values in one file. YAML aliases let a small file stand for more than any memory holds."""


def decode_json(data: bytes) -> tuple[str, Spec]:
    """Version and spec of a `.json` file. Raises MalformedSpecError."""
    return _decode(data, _parse_json)


def decode_yaml(data: bytes) -> tuple[str, Spec]:
    """Version and spec of a `.yaml` file. Raises MalformedSpecError."""
    return _decode(data, _parse_yaml)


def _decode(data: bytes, parse: Callable[[bytes], object]) -> tuple[str, Spec]:
    try:
        fields = _Normaliser().value(parse(data))
    except RecursionError:
        raise MalformedSpecError(["nested too deeply"]) from None
    except ValueError as exc:
        raise MalformedSpecError([str(exc)]) from exc
    if not isinstance(fields, dict):
        raise MalformedSpecError(["no spec in it: expected a mapping with cdiVersion, kind and devices"])
    text = fields.pop("cdiVersion", "")
    version = parse_version(text) if isinstance(text, str) else None
    if version is None:
        known = f"{KNOWN_VERSIONS[0]} to {KNOWN_VERSIONS[-1]}"
        raise MalformedSpecError([f"cdiVersion: {shorten(str(text))}: expected a released version, {known}"])
    try:
        spec = msgspec.convert(fields, Spec)
    except msgspec.ValidationError as exc:
        raise MalformedSpecError([str(exc)]) from exc
    faults = list(library_faults(spec))
    if is_older(version, needed := minimum_version(spec)):
        faults.append(f"cdiVersion: {version}: its fields need at least {needed}")
    if faults:
        raise MalformedSpecError(faults)
    return version, spec


class _Normaliser:
    """Gives field names their usual spelling, makes text where text is expected, drops nulls."""

    def __init__(self) -> None:
        self._left = _MAX_VALUES

    def value(self, raw: object) -> object:
        self._left -= 1
        if self._left < 0:
            raise MalformedSpecError([f"more than {_MAX_VALUES} values"])
        if isinstance(raw, list):
            return [self.value(item) for item in raw]
        if not isinstance(raw, dict):
            return raw
        fields: dict[str, object] = {}
        for key, value in raw.items():
            name = _SPELLING.get(_text(key).lower(), _text(key))
            if name in fields:
                raise MalformedSpecError([f"key {shorten(name)} appears more than once"])
            if value is not None:
                fields[name] = self._field(name, value)
        return fields

    def _field(self, name: str, value: object) -> object:
        if name in _TEXT_FIELDS:
            return _text_of_scalar(value)
        if name in _TEXT_LIST_FIELDS and isinstance(value, list):
            self._left -= len(value)
            return [_text_of_scalar(item) for item in value]
        if name == "annotations" and isinstance(value, dict):
            return {_text(key): "" if item is None else _text_of_scalar(item) for key, item in value.items()}
        return self.value(value)


def _text_of_scalar(value: object) -> object:
    return _text(value) if isinstance(value, int | float) else value


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_json(data: bytes) -> object:
    import json  # the writing side never needs it

    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except ValueError as exc:
        fault = f"not JSON: {exc}"
    try:
        return _parse_yaml(data)
    except MalformedSpecError as exc:
        raise MalformedSpecError([fault]) from exc


def _parse_yaml(data: bytes) -> object:
    from cdi import yamlfile  # PyYAML costs memory and start-up time that most nodes never need

    return yamlfile.parse(data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise MalformedSpecError([f"key {shorten(twice)} appears more than once"])
    return fields


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON number")
