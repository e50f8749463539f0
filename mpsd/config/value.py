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

from mpsd.common.quantity import MAX_VALUE, OutOfRangeError, QuantityError, format_bytes, parse_quantity, quoted
from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.config.problems import ConfigProblem
from mpsd.gpu.model import MIB

_MAX_ITEMS = 256
_MAX_SIZE_BYTES = MAX_VALUE // MIB * MIB

_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")
)
_BOOLEANS = {
    **dict.fromkeys(("yes", "on", "y", "true", "1"), "true"),
    **dict.fromkeys(("no", "off", "n", "false", "0"), "false"),
}
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_HOME = {  # keys that are often written one level too high
    **dict.fromkeys(("request", "limit", "fraction", "limitFraction", "reserve"), "memory"),
    **dict.fromkeys(("mode", "threadPercent"), "compute"),
    **dict.fromkeys(("include", "exclude", "count", "groups"), "gpus"),
    **dict.fromkeys(("protocol", "runRoot", "logRoot", "driverRoot", "clientLimit", "sharedMemory"), "mps"),
    **dict.fromkeys(
        ("share", "domains", "trust", "reservationNamespace", "prefix", "shortfall", "whenAway", "criSocket"),
        "annotations",
    ),
    **dict.fromkeys(("access", "nodeName"), "kubernetes"),
}

NATURAL = re.compile(r"0|[1-9][0-9]{0,8}")
_DECIMAL = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,3})?")
_ODD_NUMBER = re.compile(r"0[0-9xXoO].*|[0-9]+[._e%].*")
_PERCENT = re.compile(r"([0-9]{1,2})%?")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_Enum = TypeVar("_Enum", bound=StrEnum)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Value:
    """A YAML node with its path, and its key where it has one. A reader gives None after it has noted what is wrong."""

    __slots__ = ("key", "meant", "node", "path", "problems")

    def __init__(
        self, node: yaml.Node, path: str, problems: list[ConfigProblem], key: yaml.ScalarNode | None = None
    ) -> None:
        self.node = node
        self.path = path
        self.problems = problems
        self.key = key
        self.meant: set[str] = set()
        """Keys that a wrong one was probably meant to be."""

    def note(self, rule: str, *, show: bool = True) -> None:
        """Notes a problem with this value; without `show` it is one with the key, or the whole."""
        value = None
        if show and isinstance(self.node, yaml.ScalarNode) and not self.is_null():
            value = quoted(self.node.value)
        # What is below a key begins a line later, and is not where to look.
        at = self.node if self.key is None or value is not None else self.key
        self.problems.append(ConfigProblem(path=self.path, rule=rule, value=value, line=at.start_mark.line + 1))

    def missing(self, key: str, rule: str) -> None:
        """Notes a key that this mapping lacks, but for one that it has under a wrong name."""
        if key not in self.meant:
            Value(self.node, self._child(key), self.problems, self.key).note(f"is required: {rule}", show=False)

    def _child(self, key: str) -> str:
        name = key if _PLAIN_KEY.fullmatch(key) else quoted(key)
        return f"{self.path}.{name}" if self.path else name

    def is_plain(self) -> bool:
        """Whether it is a scalar without quotes and tags of its own."""
        return isinstance(self.node, yaml.ScalarNode) and not self.node.style and self.node.tag in _PLAIN_TAGS

    def is_null(self) -> bool:
        """Whether it is YAML's null, in any spelling."""
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
            entry = Value(key, self._child(key.value), self.problems, key)
            if key.value == "<<" and not key.style:
                entry.note("merge keys are not supported: write the values out", show=False)
            elif key.value in entries:
                first = (entries[key.value].key or key).start_mark.line + 1
                entry.note(f"is given twice, first in line {first}", show=False)
            else:
                entries[key.value] = Value(node, entry.path, self.problems, key)
        return entries

    def mapping(self, allowed: Collection[str], like: str = "") -> dict[str, "Value"] | None:
        """A mapping with these keys, none of them required."""
        entries = self.entries(like)
        if entries is None:
            return None
        for key in [key for key in entries if key not in allowed]:
            hint, meant = _suggestion(key, allowed)
            self.meant.add(meant)
            entries.pop(key).note(f"unknown key{hint}", show=False)
        return entries

    def items(self, what: str, *, at_most: int = _MAX_ITEMS, like: str = "") -> list["Value"] | None:
        """A list."""
        if not isinstance(self.node, yaml.SequenceNode) or self.node.tag != "tag:yaml.org,2002:seq":
            self.note(f"must be a list of {what}{like and f', such as {like}'}")
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
        """Text that matches, None and the rule noted where it does not."""
        text = self.text(rule)
        if text is not None and not pattern.fullmatch(text):
            self.note(rule)
            return None
        return text

    def one_of(self, words: Sequence[str]) -> str | None:
        """One of these words, None and a problem noted for others."""
        rule = f"must be {either(words)}"
        text = self.text(f"{rule}{self._kind()}")
        if text is not None and text not in words:
            self.note(f"{rule}{did_you_mean(_nearest(text, words) if len(words) > 1 else '')}")
            return None
        return text

    def _kind(self) -> str:
        """What a value is instead of a scalar."""
        kinds = ((yaml.MappingNode, "a mapping"), (yaml.SequenceNode, "a list"))
        return next((f", not {what}" for kind, what in kinds if isinstance(self.node, kind)), "")

    def _unquoted(self) -> str:
        """What makes another value of what is written."""
        if not isinstance(self.node, yaml.ScalarNode) or self.is_plain():
            return ""
        return ", without quotes" if self.node.style else ", without a tag"

    def choice(self, kind: type[_Enum]) -> _Enum | None:
        """A member of an enum by its value, None and a problem noted for others."""
        text = self.one_of([member.value for member in kind])
        return None if text is None else kind(text)

    def boolean(self) -> bool | None:
        """Only `true` and `false`: YAML 1.1 also reads `yes`, `on` and `y`."""
        if not self.is_plain() or self.node.value not in ("true", "false"):
            meant = _BOOLEANS.get(str(self.node.value).lower(), "") if self.is_plain() else ""
            self.note(f"must be true or false{self._unquoted()}{did_you_mean(meant, bare=True)}")
            return None
        return bool(self.node.value == "true")

    def integer(self, least: int, most: int) -> int | None:
        """Decimal digits only: YAML 1.1 reads `012` as 10 and `1_0` as 10."""
        if self.is_plain() and NATURAL.fullmatch(self.node.value) and least <= int(self.node.value) <= most:
            return int(self.node.value)
        odd = self.is_plain() and _ODD_NUMBER.fullmatch(self.node.value) is not None
        digits = ", in decimal digits" if odd else ""
        self.note(f"must be a whole number from {least} to {most}{digits}{self._unquoted()}{self._kind()}")
        return None

    def fraction(self) -> float | None:
        """A number in (0, 1)."""
        if self.is_plain() and _DECIMAL.fullmatch(self.node.value) and 0 < float(self.node.value) < 1:
            return float(self.node.value)
        percent = _PERCENT.fullmatch(str(self.node.value)) if isinstance(self.node, yaml.ScalarNode) else None
        meant = f"{int(percent[1]) / 100:g}" if percent and 1 < int(percent[1]) < 100 else ""
        rule = "must be a number greater than 0 and less than 1, such as 0.5"
        self.note(f"{rule}{self._unquoted()}{self._kind()}{did_you_mean(meant, bare=True)}")
        return None

    def size(self, least: int, *, round_up: bool = True, or_zero: bool = False) -> int | None:
        """A quantity of bytes, rounded to whole MiB."""
        text = self.text("must be a size such as 8Gi or 512Mi")
        if text is None:
            return None
        try:
            size = parse_quantity(text)
        except OutOfRangeError:
            self.note(f"must be less than 8Ei{did_you_mean(_of_gigabytes(text))}")
            return None
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
            self.note(f"must be less than 8Ei{did_you_mean(_of_gigabytes(text))}")
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
            self.note(f"{rule}: `~` and variables are not expanded" if text.startswith(("~", "$")) else rule)
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
        most = MAX_SOCKET_PATH_BYTES - len(socket_below or "")
        if socket_below is not None and len(text.encode()) > most:
            below = f"the path of a socket below it would pass {MAX_SOCKET_PATH_BYTES} bytes"
            self.note(f"must be at most {most} bytes long: {below if socket_below else 'it is the path of a socket'}")
            return None
        return text


Readers = Mapping[str, tuple[str, Callable[[Value], object]]]


def section(value: Value | None, default: _Struct, readers: Readers, like: str) -> _Struct:
    """`default` with what the mapping sets.

    Args:
        readers: key -> field of the struct and how to read it.
        like: an example of the mapping.
    """
    if value is None:
        return default
    entries = value.mapping(tuple(readers), like) or {}
    fields = {readers[key][0]: readers[key][1](entry) for key, entry in entries.items()}
    return msgspec.structs.replace(default, **{name: field for name, field in fields.items() if field is not None})


def either(words: Sequence[str]) -> str:
    """Words as a text has alternatives: `a, b or c`."""
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def did_you_mean(meant: str, *, bare: bool = False) -> str:
    """Empty for nothing. `bare`: quotes around it would be wrong."""
    return "" if not meant else f"; did you mean {meant}?" if bare else f'; did you mean "{meant}"?'


def _suggestion(key: str, allowed: Collection[str]) -> tuple[str, str]:
    """What to say of an unknown key, and the key that was meant, with the one it belongs under before it."""
    if (home := _HOME.get(key)) in allowed:
        return f": it belongs under {home}", f"{home}.{key}"
    if key == "replicas":
        return ": no count is set here: how many shares a GPU has follows from their memory", ""
    if key.isdigit():
        return ": if it is behind a comma, a decimal point is meant", ""
    nearest = _nearest(key, allowed)
    return did_you_mean(nearest) or f"; known here: {', '.join(allowed)}", nearest


def _nearest(text: str, words: Collection[str]) -> str:
    """The word that a text was probably meant to be, empty where none is near."""
    flat = re.sub("[-_ ]", "", text).lower()
    for word in words:
        if re.sub("[-_ ]", "", word).lower() == flat:
            return word
    begun = [word for word in words if len(flat) >= 3 and word.lower().startswith(flat)]
    if len(begun) == 1:
        return begun[0]
    import difflib

    return next(iter(difflib.get_close_matches(text[:64], words, n=1)), "")


def _of_gigabytes(text: str) -> str:
    """A size that no GPU has, with the suffix that was probably meant."""
    match = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]+)?)[TPE](i?)", text)
    return f"{match[1]}G{match[2]}" if match else ""
