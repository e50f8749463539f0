"""The config file -> NodeConfig: strict, every problem at once, each with its line, path, value and rule.

It works on YAML's node tree, not on decoded values: scalars keep the text they were written as. So a size is exact,
`yes`, `012`, `0x10` and `1_000` are never turned into something else, and every problem knows its line.
What only the node can tell (no such GPU index, a share too large for every GPU) is no problem here.
"""

import os
import re
import socket
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec
import yaml

from mpsd.config.model import (
    MIN_UNIT_BYTES,
    SOCKET_NAME_MAX_BYTES,
    AnnotationsConfig,
    AwayPolicy,
    CdiConfig,
    Delivery,
    Enforcement,
    FixedMemory,
    FractionMemory,
    GpuDevices,
    GpuRef,
    GpuSelection,
    KubernetesConfig,
    LeakPolicy,
    Memory,
    MpsConfig,
    NamespaceMount,
    NodeConfig,
    NriConfig,
    Resource,
    ShortfallPolicy,
    SimulatedConfig,
    SimulatedGpu,
    TrustPolicy,
    UnitMemory,
    WedgePolicy,
)
from mpsd.errors import ConfigError
from mpsd.gpu.model import MIB, Mode
from mpsd.quantity import MAX_VALUE, QuantityError, format_bytes, parse_quantity, quoted

API_VERSION: Final = "gpufrac.dev/v1"
KIND: Final = "NodeConfig"

MAX_FILE_BYTES: Final = 1 << 20
MAX_SHOWN_PROBLEMS: Final = 100
MAX_CLIENT_LIMIT: Final = 60
MAX_SIMULATED_GPUS: Final = 64

_MAX_DEPTH = 16
_MAX_NODES = 20_000
_MAX_ITEMS = 256
_MAX_SOCKET_PATH_BYTES = 107  # sun_path without its NUL
_UUID_LENGTH = len("GPU-00000000-0000-0000-0000-000000000000")
_MAX_GROUP_NAME = _UUID_LENGTH  # it stands where a UUID does: in device IDs and socket paths
_MAX_SIZE_BYTES = MAX_VALUE // MIB * MIB
_MAX_LABEL = 63
_MAX_DOMAIN = 253
_MAX_PREFIX_NAME = (
    63 - len("a") - len(".gpu-compute.portion")
)  # room for the shortest container name and longest suffix
_TOOLKIT_NRI_INDEX = "10"

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
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

_NATURAL = re.compile(r"0|[1-9][0-9]{0,8}")
_DECIMAL = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,3})?")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ALL = re.compile("all")
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_PREFIX_NAME = re.compile(r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*)?")
_TWO_DIGITS = re.compile(r"[0-9]{2}")
_RESOURCE_BASE = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DRIVER_VERSION = re.compile(r"[1-9][0-9]{2,3}(?:\.[0-9]{1,4}){1,2}")
_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_Enum = TypeVar("_Enum", bound=StrEnum)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Groups = tuple[tuple[str, tuple[GpuRef, ...]], ...]


class ConfigProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One mistake. `path` is empty for the file as a whole, `value` and `line` are None where there is none."""

    path: str
    rule: str
    value: str | None = None
    line: int | None = None

    def text(self, source: str) -> str:
        """`FILE:LINE: resources[1].memory.limit: "4Gi": must be at least the request (8Gi)`"""
        where = source if self.line is None else f"{source}:{self.line}"
        parts = [where, self.path, "" if self.value is None else self.value, self.rule]
        return ": ".join(part for part in parts if part)


class ConfigErrors(ConfigError):  # noqa: N818 (several errors at once)
    """Everything wrong with one config file, in the order of its lines. Its text is one line per problem."""

    def __init__(self, source: str, problems: Sequence[ConfigProblem]) -> None:
        self.source = source
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line or 0))
        lines = [problem.text(source) for problem in self.problems[:MAX_SHOWN_PROBLEMS]]
        if (more := len(self.problems) - MAX_SHOWN_PROBLEMS) > 0:
            lines.append(f"{source}: and {more} more problems")
        super().__init__("\n".join(lines))


def load_config(path: str | os.PathLike[str]) -> NodeConfig:
    """Reads and checks a config file.

    Raises:
        ConfigErrors: the file can't be read or breaks a rule.
    """
    source = os.fspath(path)
    return parse_config(read_config(source), source)


def read_config(path: str) -> bytes:
    """The bytes of a regular file of at most MAX_FILE_BYTES; never blocks on a pipe.

    Raises:
        ConfigErrors: it can't be read, and why.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            kind = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(kind):
                raise _file_error(path, "cannot be read: it is a directory, name the file in it")
            if not stat.S_ISREG(kind):
                raise _file_error(path, "cannot be read: it is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _file_error(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise _file_error(path, f"cannot be read: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise _file_error(path, f"cannot be read: it is larger than {format_bytes(MAX_FILE_BYTES)}")
    return data


def parse_config(content: str | bytes, source: str) -> NodeConfig:
    """Checks the content of a config file; `source` is what error texts call it.

    Raises:
        ConfigErrors: with every problem found.
    """
    problems: list[ConfigProblem] = []
    root = _compose(_checked_text(content, source), source)
    config = _node_config(_Value(root, "", problems))
    if problems or config is None:
        raise ConfigErrors(source, problems)
    return config


# -- text -> node tree


def _file_error(source: str, rule: str, line: int | None = None) -> ConfigErrors:
    return ConfigErrors(source, [ConfigProblem(path="", rule=rule, line=line)])


def _checked_text(content: str | bytes, source: str) -> str:
    if isinstance(content, bytes):
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise _file_error(source, "must be UTF-8: this looks like UTF-16")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise _file_error(source, "must be UTF-8", content.count(b"\n", 0, error.start) + 1) from error
    else:
        text = content
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _file_error(source, "must be UTF-8", text.count("\n", 0, error.start) + 1) from error
    if len(text) > MAX_FILE_BYTES:
        raise _file_error(source, f"must not be larger than {format_bytes(MAX_FILE_BYTES)}")
    if text.startswith("\ufeff"):
        raise _file_error(source, "must not start with a byte order mark: save it as plain UTF-8", 1)
    if (position := text.find("\0")) >= 0:
        raise _file_error(source, "must not contain NUL characters", text.count("\n", 0, position) + 1)
    return text


def _compose(text: str, source: str) -> yaml.Node:
    """The one document of the text. Bounded before the tree is built: its composer recurses."""
    try:
        _check_shape(text, source)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, source) from error
    except yaml.YAMLError as error:
        raise _file_error(source, f"is not valid YAML: {' '.join(str(error).split())}") from error
    if root is None:
        raise _file_error(source, f"is empty: it must hold a {KIND}")
    return root


def _check_shape(text: str, source: str) -> None:
    depth = nodes = documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else None
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _file_error(source, "must hold one YAML document, a second one starts here", line)
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            if nodes > _MAX_NODES:
                raise _file_error(source, f"must not hold more than {_MAX_NODES} YAML values", line)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise _file_error(source, f"must not be nested deeper than {_MAX_DEPTH} levels", line)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _syntax_error(error: yaml.MarkedYAMLError, text: str, source: str) -> ConfigErrors:
    mark = error.problem_mark or error.context_mark
    problem = " ".join(str(error.problem or error.context).split())
    if mark is None:
        return _file_error(source, f"is not valid YAML: {problem}")
    lines = text.splitlines() or [""]
    number = min(mark.line, len(lines) - 1)
    if "\t" in lines[number][: len(lines[number]) - len(lines[number].lstrip())]:
        return _file_error(source, "is not valid YAML: indented with a tab, use spaces", number + 1)
    return _file_error(source, f"is not valid YAML: {problem}", number + 1)


# -- one value of the tree


class _Value:
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
        _Value(self.node, self._child(key), self.problems).note(f"is required: {rule}", show=False)

    def _child(self, key: str) -> str:
        name = key if _PLAIN_KEY.fullmatch(key) else quoted(key)
        return f"{self.path}.{name}" if self.path else name

    def is_plain(self) -> bool:
        """Whether it is a scalar without quotes and tags of its own."""
        return isinstance(self.node, yaml.ScalarNode) and not self.node.style and self.node.tag in _PLAIN_TAGS

    def is_null(self) -> bool:
        return self.is_plain() and self.node.value in _NULLS

    # collections

    def entries(self, like: str = "") -> dict[str, "_Value"] | None:
        """A mapping with any keys."""
        if not isinstance(self.node, yaml.MappingNode) or self.node.tag != "tag:yaml.org,2002:map":
            if self.is_null():
                self.note("must not be empty: delete the key to get its default" if self.path else "must not be empty")
            else:
                self.note(f"must be a mapping{like and f', such as {like}'}")
            return None
        entries: dict[str, _Value] = {}
        for key, node in self.node.value:
            if not isinstance(key, yaml.ScalarNode):
                _Value(key, self.path, self.problems).note("a key must be plain text")
                continue
            entry = _Value(key, self._child(key.value), self.problems)
            if key.value == "<<" and not key.style:
                entry.note("merge keys are not supported: write the values out", show=False)
            elif key.value in entries:
                first = entries[key.value].node.start_mark.line + 1
                entry.note(f"is given twice, first in line {first}", show=False)
            else:
                entries[key.value] = _Value(node, entry.path, self.problems)
        return entries

    def mapping(self, allowed: Collection[str], like: str = "") -> dict[str, "_Value"] | None:
        """A mapping with these keys, none of them required."""
        entries = self.entries(like)
        if entries is None:
            return None
        for key in [key for key in entries if key not in allowed]:
            entries.pop(key).note(f"unknown key{_suggestion(key, allowed)}", show=False)
        return entries

    def items(self, what: str, *, at_most: int = _MAX_ITEMS) -> list["_Value"] | None:
        """A list."""
        if not isinstance(self.node, yaml.SequenceNode) or self.node.tag != "tag:yaml.org,2002:seq":
            self.note(f"must be a list of {what}")
            return None
        if len(self.node.value) > at_most:
            self.note(f"must not hold more than {at_most} {what}")
            return None
        return [_Value(node, f"{self.path}[{i}]", self.problems) for i, node in enumerate(self.node.value)]

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
        rule = f"must be {_either(words)}"
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
        if self.is_plain() and _NATURAL.fullmatch(self.node.value) and least <= int(self.node.value) <= most:
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


def _either(words: Sequence[str]) -> str:
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


# -- sections


_Readers = Mapping[str, tuple[str, Callable[[_Value], object]]]


def _section(value: _Value | None, default: _Struct, readers: _Readers) -> _Struct:
    """`default` with what the mapping sets. `readers`: key -> field of the struct and how to read it."""
    if value is None:
        return default
    entries = value.mapping(tuple(readers)) or {}
    fields = {readers[key][0]: readers[key][1](entry) for key, entry in entries.items()}
    return msgspec.structs.replace(default, **{name: field for name, field in fields.items() if field is not None})


def _mps(value: _Value | None) -> MpsConfig:
    # A control daemon that can't bind its socket exits without a word, so the longest must fit.
    control = f"/mps/{'x' * _UUID_LENGTH}/pipe/control"
    mps = _section(
        value,
        MpsConfig(),
        {
            "protocol": ("protocol", lambda v: v.one_of(("auto", "2", "3"))),
            "binary": ("binary", _binary),
            "driverRoot": ("driver_root", lambda v: v.path_text(root_allowed=True)),
            "runRoot": ("run_root", lambda v: v.path_text(socket_below=control)),
            "logRoot": ("log_root", _Value.path_text),
            "sharedMemory": ("shared_memory", _Value.boolean),
            "clientLimit": ("client_limit", lambda v: v.integer(1, MAX_CLIENT_LIMIT)),
            "onWedge": ("on_wedge", lambda v: v.choice(WedgePolicy)),
            "prohibitWhileDown": ("prohibit_while_down", _Value.boolean),
            "writableMount": ("writable_mount", _Value.boolean),
            "namespaceMount": ("namespace_mount", lambda v: v.choice(NamespaceMount)),
            "logMaxSize": ("log_max_bytes", lambda v: v.size(MIB, round_up=False)),
        },
    )
    pipes = f"{mps.run_root}/mps/"
    if value is not None and (f"{mps.log_root}/mps/".startswith(pipes) or pipes.startswith(f"{mps.log_root}/mps/")):
        value.note(
            "logRoot must not hold the pipe directories of runRoot, nor lie in them: tenants see these", show=False
        )
    return mps


def _binary(value: _Value) -> str | None:
    if isinstance(value.node, yaml.ScalarNode) and value.node.value.startswith("/"):
        return value.path_text()
    return value.matching(_PROGRAM, "must be the name of a program or an absolute path")


def _cdi(value: _Value | None) -> CdiConfig:
    return _section(
        value,
        CdiConfig(),
        {
            "directory": ("directory", _Value.path_text),
            "gpuDevices": ("gpu_devices", lambda v: v.choice(GpuDevices)),
            "delivery": ("delivery", lambda v: v.choice(Delivery)),
        },
    )


def _simulated(value: _Value | None) -> SimulatedConfig:
    rule = 'must be a driver version such as "580.95.05"'
    return _section(
        value,
        SimulatedConfig(),
        {
            "gpus": ("gpus", _simulated_gpus),
            "driver": ("driver", lambda v: v.matching(_DRIVER_VERSION, rule)),
        },
    )


def _simulated_gpus(value: _Value) -> tuple[SimulatedGpu, ...] | None:
    items = value.items("GPUs", at_most=MAX_SIMULATED_GPUS)
    if items is None:
        return None
    if not items:
        value.note("must hold at least one GPU, such as {memory: 80Gi}")
    readers: _Readers = {"memory": ("memory_bytes", lambda v: v.size(MIB, round_up=False))}
    return tuple(_section(item, SimulatedGpu(), readers) for item in items)


def _metrics_address(value: _Value) -> str | None:
    rule = 'must be host:port such as 127.0.0.1:9478 or [::1]:9478, or "" for no metrics'
    text = value.text(rule)
    if text is None or text == "":
        return text
    host, _, port = text.rpartition(":")
    if _is_host(host) and _NATURAL.fullmatch(port) and 0 <= int(port) <= 65535:
        return text
    value.note(rule)
    return None


def _is_host(host: str) -> bool:
    family = socket.AF_INET6 if host[:1] == "[" else socket.AF_INET
    if family is socket.AF_INET and host.strip("0123456789."):
        return bool(_HOST.fullmatch(host))
    try:
        socket.inet_pton(family, host[1:-1] if host[-1:] == "]" else host)
    except (OSError, ValueError):
        return False
    return True


# -- other front ends, and where they find what they need


def _annotations(value: _Value, minimum: Enforcement, shared: GpuSelection) -> AnnotationsConfig | None:
    readers: _Readers = {
        "share": ("share", _Value.boolean),
        "reservationNamespace": ("reservation_namespace", lambda v: _label(v, "a namespace")),
        "prefix": ("prefix", _annotation_prefix),
        "enforcement": ("enforcement", lambda v: v.choice(Enforcement)),
        "shortfall": ("shortfall", lambda v: v.choice(ShortfallPolicy)),
        "whenAway": ("when_away", lambda v: v.choice(AwayPolicy)),
        "criSocket": ("cri_socket", lambda v: v.path_text(socket_below="")),
    }
    entries = value.mapping(("gpus", "trust", *readers), like="{gpus: {include: [2, 3]}}")
    if entries is None:
        return None
    fields = {readers[key][0]: readers[key][1](entry) for key, entry in entries.items() if key in readers}
    trust, namespaces = _trust(entries["trust"]) if "trust" in entries else (TrustPolicy.KAI_RESERVATION, ())
    default = AnnotationsConfig(
        gpus=_set_aside(value, entries.get("gpus"), shared),
        trust=trust,
        namespaces=namespaces,
        enforcement=minimum,
    )
    return msgspec.structs.replace(default, **{name: field for name, field in fields.items() if field is not None})


def _set_aside(annotations: _Value, value: _Value | None, shared: GpuSelection) -> GpuSelection:
    """There is no default: whole GPUs would silently change hands. `shared`: `gpus`, which must admit them."""
    rule = "all, or a list of the GPUs that annotated pods may use"
    if value is None:
        annotations.missing("gpus.include", rule)
        return GpuSelection()
    entries = value.mapping(("include", "exclude"), like="{include: [2, 3]}")
    if entries is None:
        return GpuSelection()
    if "include" not in entries:
        value.missing("include", rule)
    selection = _selection(entries)
    for ref in selection.include or ():
        if ref in shared.exclude:
            entries["include"].note(f"GPU {ref} is excluded by gpus.exclude")
        # Where one list has indices and the other UUIDs, only the node knows.
        elif shared.include is not None and ref not in shared.include and _same_kind(ref, shared.include):
            entries["include"].note(f"GPU {ref} is not in gpus.include, so it is not shared at all")
    return selection


def _same_kind(ref: GpuRef, refs: Sequence[GpuRef]) -> bool:
    return all(isinstance(other, int) == isinstance(ref, int) for other in refs)


def _trust(value: _Value) -> tuple[TrustPolicy, tuple[str, ...]]:
    rule = f"must be {TrustPolicy.KAI_RESERVATION}, {TrustPolicy.ANY} or {{namespaces: [...]}}"
    if isinstance(value.node, yaml.ScalarNode):
        text = value.text(rule)
        if text in (TrustPolicy.KAI_RESERVATION, TrustPolicy.ANY):
            return TrustPolicy(text), ()
        if text is not None:
            value.note(rule)
        return TrustPolicy.KAI_RESERVATION, ()
    if not isinstance(value.node, yaml.MappingNode):
        value.note(rule)
        return TrustPolicy.KAI_RESERVATION, ()
    entries = value.mapping(("namespaces",))
    if entries is not None and "namespaces" in entries:
        return TrustPolicy.NAMESPACES, _namespaces(entries["namespaces"])
    value.missing("namespaces", "a list of at least one namespace")
    return TrustPolicy.NAMESPACES, ()


def _namespaces(value: _Value) -> tuple[str, ...]:
    items = value.items("namespaces")
    if items is not None and not items:
        value.note("must name at least one namespace")
    names: list[str] = []
    for item in items or ():
        name = _label(item, "a namespace")
        if name is not None and name in names:
            item.note("is named twice in this list")
        elif name is not None:
            names.append(name)
    return tuple(names)


def _label(value: _Value, what: str) -> str | None:
    """A DNS label (RFC 1123), as the API server wants namespaces to be."""
    rule = f"must be {what}: at most {_MAX_LABEL} lower-case letters, digits and inner dashes"
    text = value.matching(_LABEL, rule)
    if text is not None and len(text) > _MAX_LABEL:
        value.note(rule)
        return None
    return text


def _is_domain(text: str) -> bool:
    """Whether it is a DNS subdomain (RFC 1123), as the API server wants names of nodes to be."""
    return len(text) <= _MAX_DOMAIN and all(_LABEL.fullmatch(label) for label in text.split("."))


def _annotation_prefix(value: _Value) -> str | None:
    """With a container's name and a suffix it must be able to be the key of an annotation."""
    text = value.text('must be the start of an annotation\'s key such as nvidia.com/container., or ""')
    if text is None or text == "":
        return text
    domain, slash, name = text.partition("/")
    if not slash:
        value.note("must be <domain>/<start of the name>, such as nvidia.com/container.")
    elif not _is_domain(domain):
        value.note(f"the domain must be at most {_MAX_DOMAIN} lower-case letters, digits, dashes and dots")
    elif not _PREFIX_NAME.fullmatch(name):
        value.note("the part behind the slash must be letters, digits, `-`, `_` and `.`, and not begin with a sign")
    elif len(name) > _MAX_PREFIX_NAME:
        rest = "a container's name and a key such as .gpu-compute.portion must fit behind it into 63"
        value.note(f"the part behind the slash must be at most {_MAX_PREFIX_NAME} characters long: {rest}")
    elif name and not name.endswith("."):
        value.note(f"must end with a dot, as the container's name comes right behind it; did you mean {text}.?")
    else:
        return text
    return None


def _nri_index(value: _Value) -> str | None:
    rule = "must be two digits such as 50"
    text = value.matching(_TWO_DIGITS, rule)
    if text == _TOOLKIT_NRI_INDEX:
        value.note(f"{rule}, and not 10: the container toolkit's own plugin has that, and equals come in no order")
        return None
    return text


def _kubernetes_access(value: _Value) -> str | None:
    if isinstance(value.node, yaml.ScalarNode) and value.node.value.startswith("/"):
        return value.path_text()
    rule = "must be off, in-cluster or the absolute path of a kubeconfig"
    text = value.text(rule)
    if text is None or text in ("off", "in-cluster"):
        return text
    value.note(rule)
    return None


def _node_name(value: _Value) -> str | None:
    rule = f'must be the name of a node: at most {_MAX_DOMAIN} lower-case letters, digits, dashes and dots, or ""'
    text = value.text(rule)
    if text is None or text == "" or _is_domain(text):
        return text
    value.note(rule)
    return None


# -- GPUs


def _gpu_ref(value: _Value) -> GpuRef | None:
    """An index or a UUID; whether there is such a GPU, only the node knows."""
    rule = "must be a GPU index such as 0, or a UUID such as GPU-5fd4d87b-3c5e-4b1f-9f6e-0c1d2e3f4a5b"
    text = value.text(rule)
    if text is None:
        return None
    if text.startswith("MIG-"):
        value.note(f"{rule}: MIG devices are not shared")
    elif _UUID.fullmatch(text):
        return text
    elif _NATURAL.fullmatch(text):
        if value.is_plain():
            return int(text)
        value.note("must be a GPU index without quotes")
    else:
        value.note(rule)
    return None


def _gpu_refs(value: _Value, *, at_least: int) -> tuple[GpuRef, ...] | None:
    items = value.items("GPUs")
    if items is None:
        return None
    if len(items) < at_least:
        value.note("must name at least one GPU")
    refs: list[GpuRef] = []
    for item in items:
        ref = _gpu_ref(item)
        if ref is not None and ref in refs:
            item.note("is named twice in this list")
        elif ref is not None:
            refs.append(ref)
    return tuple(refs)


def _selection(entries: Mapping[str, _Value]) -> GpuSelection:
    include: tuple[GpuRef, ...] | None = None
    exclude: tuple[GpuRef, ...] = ()
    if value := entries.get("include"):
        if isinstance(value.node, yaml.ScalarNode):
            value.matching(_ALL, "must be all or a list of GPUs")
        else:
            include = _gpu_refs(value, at_least=1)
    if value := entries.get("exclude"):
        exclude = _gpu_refs(value, at_least=0) or ()
        if include and set(include) <= set(exclude):
            value.note("takes away every GPU that include names")
    return GpuSelection(include=include, exclude=exclude)


def _gpus(value: _Value | None) -> tuple[GpuSelection, _Groups]:
    entries = value.mapping(("include", "exclude", "groups")) if value else None
    if entries is None:
        return GpuSelection(), ()
    selection = _selection(entries)
    return selection, _groups(entries["groups"], selection.exclude) if "groups" in entries else ()


def _groups(value: _Value, excluded: Collection[GpuRef]) -> _Groups:
    group_of: dict[GpuRef, str] = {}
    groups = []
    for name, entry in (value.entries("{pair0: [0, 1]}") or {}).items():
        if not _LABEL.fullmatch(name):
            entry.note("the name must be lower-case letters, digits and inner dashes", show=False)
        elif len(name) > _MAX_GROUP_NAME:
            entry.note(f"the name must be at most {_MAX_GROUP_NAME} characters long", show=False)
        members = _gpu_refs(entry, at_least=1) or ()
        for ref in members:
            if ref in group_of:
                entry.note(f"GPU {ref} is already in group {group_of[ref]}", show=False)
            elif ref in excluded:
                entry.note(f"GPU {ref} is excluded by gpus.exclude", show=False)
            group_of.setdefault(ref, name)
        groups.append((name, members))
    return tuple(groups)


# -- resources


def _resources(
    value: _Value, minimum: Enforcement, groups: Collection[str], *, none_allowed: bool
) -> tuple[Resource, ...]:
    items = value.items("resources")
    if items is not None and not items and not none_allowed:
        value.note("must hold at least one resource")
    names: dict[str, str] = {}
    resources = [_resource(item, minimum, groups, names) for item in items or ()]
    return tuple(resource for resource in resources if resource is not None)


def _resource(value: _Value, minimum: Enforcement, groups: Collection[str], names: dict[str, str]) -> Resource | None:
    """`names`: resource name -> path of the resource that has it; grows."""
    entries = value.mapping(("name", "memory", "unit", "compute", "enforcement", "gpus"))
    if entries is None:
        return None
    name = _name(value, entries, names)
    memory = _memory(value, entries)
    mode, thread_percent = _compute(value, entries)
    enforcement = entries["enforcement"].choice(Enforcement) if "enforcement" in entries else minimum
    selection, own_groups = _resource_gpus(entries.get("gpus"), groups)
    if own_groups and isinstance(memory, UnitMemory):
        entries["gpus"].note("groups are for resources with memory: all units of a container are on one GPU")
    if name is None or memory is None or mode is None or enforcement is None:
        return None
    return Resource(
        name=name,
        memory=memory,
        mode=mode,
        enforcement=enforcement,
        thread_percent=thread_percent,
        gpus=selection,
        groups=own_groups,
    )


def _name(value: _Value, entries: Mapping[str, _Value], names: dict[str, str]) -> str | None:
    entry = entries.get("name")
    if entry is None:
        value.missing("name", "such as gpufrac.dev/gpu-8gi")
        return None
    name = entry.text("must be a resource name such as gpufrac.dev/gpu-8gi")
    if name is None:
        return None
    if rule := _name_rule(name):
        entry.note(rule)
    elif name in names:
        entry.note(f"is already the name of {names[name]}")
    names.setdefault(name, value.path)
    return name


def _name_rule(name: str) -> str:
    """The rule that an extended resource name breaks, empty when it is fine.

    The API server and the kubelet (1.36.2, tried) take what, behind `requests.`, is a label key outside kubernetes.io.
    """
    prefix, slash, base = name.partition("/")
    if not slash or "/" in base:
        return "must be <domain>/<name> with exactly one slash"
    if "kubernetes.io/" in name:
        return "must not lie in kubernetes.io"
    if name.startswith("requests."):
        return "must not start with requests."
    if len(prefix) > 253 - len("requests."):
        return "the domain must be at most 244 characters long"
    if not all(_LABEL.fullmatch(label) for label in prefix.split(".")):
        return "the domain must be lower-case letters, digits, dashes and dots, such as gpufrac.dev"
    if len(base) > 63:
        return "the part behind the slash must be at most 63 characters long"
    if not _RESOURCE_BASE.fullmatch(base):
        return "the part behind the slash must be letters, digits and inner `-`, `_`, `.`"
    return ""


def _memory(value: _Value, entries: Mapping[str, _Value]) -> Memory | None:
    if "memory" in entries and "unit" in entries:
        entries["unit"].note("must not be given beside memory: one of the two sizes a resource")
        return None
    if "unit" in entries:
        unit_bytes = entries["unit"].size(MIN_UNIT_BYTES)
        return None if unit_bytes is None else UnitMemory(unit_bytes=unit_bytes)
    if "memory" not in entries:
        value.missing("memory", "such as {request: 8Gi} (or unit: 1Gi)")
        return None
    memory = entries["memory"]
    sizes = memory.mapping(("request", "limit", "fraction", "limitFraction"), like="{request: 8Gi}")
    if sizes is None:
        return None
    fixed, fractional = sizes.keys() & {"request", "limit"}, sizes.keys() & {"fraction", "limitFraction"}
    if fixed and fractional:
        memory.note("must hold request and limit, or fraction and limitFraction, not both")
        return None
    if fractional:
        return _fraction_memory(memory, sizes)
    return _fixed_memory(memory, sizes)


def _fixed_memory(memory: _Value, sizes: Mapping[str, _Value]) -> FixedMemory | None:
    limit = sizes["limit"].size(MIB, round_up=False) if "limit" in sizes else None
    if "request" not in sizes:
        memory.missing("request", "such as 8Gi")
        return None
    request = sizes["request"].size(MIB)
    if request is None:
        return None
    if limit is not None and limit < request:
        rounded = "" if parse_quantity(sizes["limit"].node.value) == limit else ", after rounding down to whole MiB"
        sizes["limit"].note(f"must be at least the request ({format_bytes(request)}){rounded}")
    return FixedMemory(request_bytes=request, limit_bytes=request if limit is None else limit)


def _fraction_memory(memory: _Value, sizes: Mapping[str, _Value]) -> FractionMemory | None:
    limit = sizes["limitFraction"].fraction() if "limitFraction" in sizes else None
    if "fraction" not in sizes:
        memory.missing("fraction", "such as 0.5")
        return None
    fraction = sizes["fraction"].fraction()
    if fraction is None:
        return None
    if limit is not None and limit <= fraction:
        sizes["limitFraction"].note(f"must be greater than the fraction ({fraction!r}), or left out")
    return FractionMemory(fraction=fraction, limit_fraction=fraction if limit is None else limit)


def _compute(value: _Value, entries: Mapping[str, _Value]) -> tuple[Mode | None, int | None]:
    rule = "sm-sharing or time-slicing"
    if "compute" not in entries:
        value.missing("compute.mode", rule)
        return None, None
    compute = entries["compute"]
    keys = compute.mapping(("mode", "threadPercent"), like="{mode: sm-sharing}")
    if keys is None:
        return None, None
    if "mode" not in keys:
        compute.missing("mode", rule)
    mode = keys["mode"].choice(Mode) if "mode" in keys else None
    percent = keys["threadPercent"].integer(1, 100) if "threadPercent" in keys else None
    if percent is not None and mode is Mode.TIME_SLICING:
        keys["threadPercent"].note("is only possible with mode sm-sharing")
    return mode, percent


def _resource_gpus(value: _Value | None, known: Collection[str]) -> tuple[GpuSelection, tuple[str, ...]]:
    entries = value.mapping(("include", "exclude", "groups")) if value else None
    if value is None or entries is None:
        return GpuSelection(), ()
    selection = _selection(entries)
    if "groups" not in entries:
        return selection, ()
    if len(entries) > 1:
        value.note("groups must not be combined with include or exclude")
    items = entries["groups"].items("group names")
    if items is not None and not items:
        entries["groups"].note("must name at least one group")
    names: list[str] = []
    for item in items or ():
        name = item.text("must be the name of a group in gpus.groups")
        if name is None:
            continue
        if name not in known:
            item.note(f"is no group: gpus.groups declares {', '.join(known) or 'none'}")
        elif name in names:
            item.note("is named twice in this list")
        names.append(name)
    return selection, tuple(names)


# -- the whole


_TOP = (
    "apiVersion",
    "kind",
    "resources",
    "gpus",
    "memory",
    "enforcement",
    "mps",
    "cdi",
    "kubelet",
    "stateRoot",
    "backend",
    "simulated",
    "annotations",
    "nri",
    "kubernetes",
    "metrics",
)


def _node_config(root: _Value) -> NodeConfig | None:
    entries = root.mapping(_TOP)
    if entries is None:
        return None
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if key in entries:
            entries[key].one_of((expected,))
        else:
            root.missing(key, expected)
    selection, groups = _gpus(entries.get("gpus"))
    config = _plain_sections(entries, NodeConfig(resources=(), gpus=selection, groups=groups))
    annotated = "annotations" in entries
    if annotated:
        annotations = _annotations(entries["annotations"], config.enforcement_minimum, selection)
        config = msgspec.structs.replace(config, annotations=annotations)
    if "resources" in entries:
        names = [name for name, _ in groups]
        resources = _resources(entries["resources"], config.enforcement_minimum, names, none_allowed=annotated)
        config = msgspec.structs.replace(config, resources=resources)
    elif not annotated:
        root.missing("resources", "a list with at least one resource")
    if "simulated" in entries and config.backend != "simulated":
        entries["simulated"].note("is only possible with backend: simulated")
    return config


def _plain_sections(entries: Mapping[str, _Value], default: NodeConfig) -> NodeConfig:
    config = msgspec.structs.replace(
        default,
        mps=_mps(entries.get("mps")),
        cdi=_cdi(entries.get("cdi")),
        simulated=_simulated(entries.get("simulated")),
        nri=_section(
            entries.get("nri"),
            NriConfig(),
            {
                "socket": ("socket", lambda v: v.path_text(socket_below="")),
                "name": ("name", lambda v: _label(v, "the name of an NRI plugin")),
                "index": ("index", _nri_index),
            },
        ),
        kubernetes=_section(
            entries.get("kubernetes"),
            KubernetesConfig(),
            {"access": ("access", _kubernetes_access), "nodeName": ("node_name", _node_name)},
        ),
    )
    plugin_socket = f"/device-plugins/{'x' * SOCKET_NAME_MAX_BYTES}"
    sections: dict[str, _Readers] = {
        "memory": {"reserve": ("memory_reserve_bytes", lambda v: v.size(MIB, or_zero=True))},
        "enforcement": {
            "minimum": ("enforcement_minimum", lambda v: v.choice(Enforcement)),
            "enableDmem": ("enable_dmem", _Value.boolean),
            "leaks": ("leaks", lambda v: v.choice(LeakPolicy)),
        },
        "kubelet": {"root": ("kubelet_root", lambda v: v.path_text(socket_below=plugin_socket))},
        "metrics": {"address": ("metrics_address", _metrics_address)},
    }
    for key, readers in sections.items():
        config = _section(entries.get(key), config, readers)
    changes = {
        "state_root": entries["stateRoot"].path_text() if "stateRoot" in entries else None,
        "backend": entries["backend"].one_of(("nvml", "simulated")) if "backend" in entries else None,
    }
    return msgspec.structs.replace(config, **{name: value for name, value in changes.items() if value is not None})
