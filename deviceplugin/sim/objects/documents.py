"""The bytes of a manifest -> the objects in it, as kubectl reads them: YAML or JSON, several documents in a file."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from deviceplugin.sim.objects import mistaken
from deviceplugin.sim.objects.model import ManifestError
from mpsd.common.quantity import quoted

_MAX_DEPTH, _MAX_VALUES = 64, 200_000
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Document:
    """One object of a file. `place`: `FILE:LINE (document N)`."""

    value: object
    source: str
    place: str


def documents(data: bytes, source: str) -> Iterator[Document]:
    text = _decoded(data, source)
    if text.lstrip().startswith("{"):
        values = _json_values(text)
        if values is not None:
            for number, (line, value) in enumerate(values, 1):
                yield _document(value, source, number, line)
            return
    _check_shape(text, source)
    loader = _Loader(text)
    number = 0
    try:
        while loader.check_node():
            number += 1
            node = loader.get_node()
            value = loader.construct_document(node)
            if value is not None:
                yield _document(value, source, number, node.start_mark.line + 1)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise _unreadable(error, text, source, max(1, number)) from error
    finally:
        loader.dispose()


def _unreadable(error: Exception, text: str, source: str, number: int) -> ManifestError:
    """`FILE:LINE (document N): cannot read manifest: ...`"""
    mark = (error.problem_mark or error.context_mark) if isinstance(error, yaml.MarkedYAMLError) else None
    what = error.problem or error.context if isinstance(error, yaml.MarkedYAMLError) else str(error)
    where = source if mark is None else f"{source}:{mark.line + 1}"
    reason = " ".join(str(what or "nested too deeply").split())
    reason = mistaken.template(text, mark.line + 1 if mark is not None else None) or f"not valid YAML: {reason}"
    return ManifestError([f"{where} (document {number}): cannot read manifest: {reason}"])


def _document(value: object, source: str, number: int, line: int) -> Document:
    return Document(value, f"{source} (document {number})", f"{source}:{line} (document {number})")


def _decoded(data: bytes, source: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ManifestError([f"cannot read manifest {source}: it must be UTF-8, this looks like UTF-16"])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ManifestError([f"{source}:{line}: cannot read manifest: it must be UTF-8"]) from error


class _TwiceError(ValueError):
    pass


def _json_values(text: str) -> list[tuple[int, object]] | None:
    """The JSON values of a file one after the other, None where it is no JSON (flow style YAML looks like it)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise _TwiceError
        return fields

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    decoder = json.JSONDecoder(object_pairs_hook=unique, parse_constant=refuse)
    values: list[tuple[int, object]] = []
    position = 0
    try:
        while (match := re.compile(r"\s*").match(text, position)) is not None and match.end() < len(text):
            value, position = decoder.raw_decode(text, match.end())
            values.append((text.count("\n", 0, match.end()) + 1, value))
    except (ValueError, RecursionError):
        return None  # the YAML reader knows the line
    return values


class _Loader(_LOADER):  # type: ignore[misc]
    """Reads as kubectl does: dates stay text, a key may not come twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    text = f"key {quoted(key.value)} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
                seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: loader.construct_scalar(node))


def _check_shape(text: str, source: str) -> None:
    """Reads the whole stream, and bounds it before a tree is built: the composer recurses."""
    depth = count = number = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            number += isinstance(event, yaml.DocumentStartEvent)
            count += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
            if count > _MAX_VALUES:
                raise ValueError(f"more than {_MAX_VALUES} values")
    except (yaml.YAMLError, ValueError) as error:
        raise _unreadable(error, text, source, max(1, number)) from error
