"""One value of the config file: a YAML node that knows its path and its line.

Scalars keep the text they were written as. So a size is exact, `yes`, `012`, `0x10` and `1_000` are never turned into
something else, and every problem knows its line.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec
import yaml

from mpsd.config.problems import ConfigProblem
from mpsd.gpu.model import MIB
from mpsd.quantity import MAX_VALUE, QuantityError, format_bytes, parse_quantity, quoted

_MAX_ITEMS = 256
_MAX_SOCKET_PATH_BYTES = 107  # sun_path without its NUL
_MAX_SIZE_BYTES = MAX_VALUE // MIB * MIB

_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")
)
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_HOME = {  # keys that are often written one level too high
    **dict.fromkeys(("request", "limit", "fraction", "limitFraction", "reserve"), "memory"),
    **dict.fromkeys(("mode", "threadPercent"), "compute"),
    **dict.fromkeys(("include", "exclude", "groups"), "gpus"),
    **dict.fromkeys(("protocol", "runRoot", "logRoot", "driverRoot", "clientLimit", "sharedMemory"), "mps"),
    **dict.fromkeys(
        ("share", "trust", "reservationNamespace", "prefix", "shortfall", "whenAway", "criSocket"), "annotations"
    ),
    **dict.fromkeys(("access", "nodeName"), "kubernetes"),
}

NATURAL = re.compile(r"0|[1-9][0-9]{0,8}")
_DECIMAL = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,3})?")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_Enum = TypeVar("_Enum", bound=StrEnum)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Value:
    """A YAML node with its path. A reader gives None after it has noted what is wrong."""

    __slots__ = ("node", "path", "problems")

    def __init__(self, node: yaml.Node, path: str, problems: list[ConfigProblem]) -> None:
        self.node = node
        self.path = path
        self.problems = problems

    def note(self, rule: str, *, show: bool = True) -> None:
        """Notes a problem with this value."""
        value = None
        if show and isinstance(self.node, yaml.ScalarNode) and not self.is_null():
            value = quoted(self.node.value)
        line = self.node.start_mark.line + 1
        self.problems.append(ConfigProblem(path=self.path, rule=rule, value=value, line=line))

    def missing(self, key: str, rule: str) -> None:
        """Notes a key that this mapping lacks."""
        Value(self.node, self._child(key), self.problems).note(f"is required: {rule}", show=False)

    def _child(self, key: str) -> str:
        name = key if _PLAIN_KEY.fullmatch(key) else quoted(key)
        return f"{self.path}.{name}" if self.path else name

    def is_plain(self) -> bool:
        """Whether it is a scalar without quotes and tags of its own."""
        return isinstance(self.node, yaml.ScalarNode) and not self.node.style and self.node.tag in _PLAIN_TAGS

    def is_null(self) -> bool:
        return self.is_plain() and self.node.value in _NULLS

    # collections

    def entries(self, like: str = "") -> dict[str, "Value"] | None:
        """A mapping with any keys."""
        if not isinstance(self.node, yaml.MappingNode) or self.node.tag != "tag:yaml.org,2002:map":
            if self.is_null():
                self.note("must not be empty: delete the key to get its default" if self.path else "must not be empty")
            else:
                self.note(f"must be a mapping{like and f', such as {like}'}")
            return None
        entries: dict[str, Value] = {}
        for key, node in self.node.value:
            if not isinstance(key, yaml.ScalarNode):
                Value(key, self.path, self.problems).note("a key must be plain text")
                continue
            entry = Value(key, self._child(key.value), self.problems)
            if key.value == "<<" and not key.style:
                entry.note("merge keys are not supported: write the values out", show=False)
            elif key.value in entries:
                first = entries[key.value].node.start_mark.line + 1
                entry.note(f"is given twice, first in line {first}", show=False)
            else:
                entries[key.value] = Value(node, entry.path, self.problems)
        return entries

    def mapping(self, allowed: Collection[str], like: str = "") -> dict[str, "Value"] | None:
        """A mapping with these keys, none of them required."""
        entries = self.entries(like)
        if entries is None:
            return None
        for key in [key for key in entries if key not in allowed]:
            entries.pop(key).note(f"unknown key{_suggestion(key, allowed)}", show=False)
        return entries

    def items(self, what: str, *, at_most: int = _MAX_ITEMS) -> list["Value"] | None:
        """A list."""
        if not isinstance(self.node, yaml.SequenceNode) or self.node.tag != "tag:yaml.org,2002:seq":
            self.note(f"must be a list of {what}")
            return None
        if len(self.node.value) > at_most:
            self.note(f"must not hold more than {at_most} {what}")
            return None
        return [Value(node, f"{self.path}[{i}]", self.problems) for i, node in enumerate(self.node.value)]

    # scalars

    def text(self, rule: str) -> str | None:
        """A scalar as it is written."""
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag not in _PLAIN_TAGS or self.is_null():
            self.note(rule)
            return None
        return str(self.node.value)

    def matching(self, pattern: re.Pattern[str], rule: str) -> str | None:
        text = self.text(rule)
        if text is not None and not pattern.fullmatch(text):
            self.note(rule)
            return None
        return text

    def one_of(self, words: Sequence[str]) -> str | None:
        rule = f"must be {either(words)}"
        text = self.text(rule)
        if text is not None and text not in words:
            self.note(rule)
            return None
        return text

    def choice(self, kind: type[_Enum]) -> _Enum | None:
        text = self.one_of([member.value for member in kind])
        return None if text is None else kind(text)

    def boolean(self) -> bool | None:
        """Only `true` and `false`: YAML 1.1 also reads `yes`, `on` and `y`."""
        if not self.is_plain() or self.node.value not in ("true", "false"):
            self.note("must be true or false, without quotes")
            return None
        return bool(self.node.value == "true")

    def integer(self, least: int, most: int) -> int | None:
        """Decimal digits only: YAML 1.1 reads `012` as 10 and `1_0` as 10."""
        if self.is_plain() and NATURAL.fullmatch(self.node.value) and least <= int(self.node.value) <= most:
            return int(self.node.value)
        self.note(f"must be a whole number from {least} to {most}, without quotes")
        return None

    def fraction(self) -> float | None:
        """A number in (0, 1)."""
        if self.is_plain() and _DECIMAL.fullmatch(self.node.value) and 0 < float(self.node.value) < 1:
            return float(self.node.value)
        self.note("must be a number greater than 0 and less than 1, such as 0.5, without quotes")
        return None

    def size(self, least: int, *, round_up: bool = True, or_zero: bool = False) -> int | None:
        """A quantity of bytes, rounded to whole MiB."""
        text = self.text("must be a size such as 8Gi or 512Mi")
        if text is None:
            return None
        try:
            size = parse_quantity(text)
        except QuantityError as error:
            self.note(error.reason)
            return None
        if size < least and not (or_zero and size == 0):
            zero = "0, or " if or_zero else ""
            unit = " (a number without a suffix counts bytes)" if text[-1:].isdigit() and size > 0 else ""
            self.note(f"must be {zero}at least {format_bytes(least)}{unit}")
            return None
        whole = int(-(-size // MIB) if round_up else size // MIB) * MIB
        if whole > _MAX_SIZE_BYTES:
            self.note(f"must be at most {_MAX_SIZE_BYTES} bytes")
            return None
        return whole

    def path_text(self, *, root_allowed: bool = False, socket_below: str | None = None) -> str | None:
        """An absolute path in normal form. `socket_below`: the longest socket path that must fit below it, empty where
        it is one itself."""
        rule = "must be an absolute path"
        text = self.text(rule)
        if text is None:
            return None
        if not text.startswith("/"):
            self.note(rule)
            return None
        if not text.isprintable():
            self.note("must not contain control characters")
            return None
        normal = "/" + os.path.normpath(text).lstrip("/")
        if text != normal:
            self.note(f"must be a path without `.`, `..`, `//` and a slash at the end: write {normal}")
            return None
        if text == "/" and not root_allowed:
            self.note("must be a directory below /")
            return None
        most = _MAX_SOCKET_PATH_BYTES - len(socket_below or "")
        if socket_below is not None and len(text.encode()) > most:
            below = f"the path of a socket below it would pass {_MAX_SOCKET_PATH_BYTES} bytes"
            self.note(f"must be at most {most} bytes long: {below if socket_below else 'it is the path of a socket'}")
            return None
        return text


Readers = Mapping[str, tuple[str, Callable[[Value], object]]]


def section(value: Value | None, default: _Struct, readers: Readers) -> _Struct:
    """`default` with what the mapping sets. `readers`: key -> field of the struct and how to read it."""
    if value is None:
        return default
    entries = value.mapping(tuple(readers)) or {}
    fields = {readers[key][0]: readers[key][1](entry) for key, entry in entries.items()}
    return msgspec.structs.replace(default, **{name: field for name, field in fields.items() if field is not None})


def either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _suggestion(key: str, allowed: Collection[str]) -> str:
    if _HOME.get(key) in allowed:
        return f": it belongs under {_HOME[key]}"
    flat = key.replace("_", "").replace("-", "").lower()
    nearest = [name for name in allowed if name.lower() == flat]
    if not nearest:
        import difflib

        nearest = difflib.get_close_matches(key[:64], allowed, n=1)
    return f'; did you mean "{nearest[0]}"?' if nearest else f"; known here: {', '.join(allowed)}"
