"""A config of NVIDIA's device plugin -> what it says of sharing, and what else it sets (pure).

The format is its `version: v1` (k8s-device-plugin, api/config/v1, as of 2026-08): `flags`, `resources`, `sharing` with
`timeSlicing` or `mps`, `imex`. It comes alone, as one of several named texts in a ConfigMap's `data`, or in the value
`config.map` of its Helm chart. What that plugin itself passes over in silence is told here.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import yaml

from mpsd.common.quantity import quoted
from mpsd.config.document import checked_text, compose
from mpsd.config.problems import ConfigErrors, ConfigProblem, file_error
from mpsd.config.value import Value
from mpsd.gpu.model import Mode

VERSION: Final = "v1"
WHAT: Final = "config of NVIDIA's device plugin"
MAX_REPLICAS: Final = 20_000

_TOP = ("version", "flags", "resources", "sharing", "imex", "health")
_SHARING = ("timeSlicing", "mps")
_STRATEGY = ("renameByDefault", "failRequestsGreaterThanOne", "resources")
_RESOURCE = ("name", "rename", "replicas", "devices")
_DOMAIN = "nvidia.com/"
_SHARED = ".shared"
_MIG = re.compile(r"nvidia\.com/mig-.+")
_MIG_DEVICE = re.compile(r"MIG-.+|[0-9]+:[0-9]+")
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class SharedResource(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `resources`: each GPU is offered `replicas` times, by the name that pods ask for. `devices` is None
    for all GPUs; `count`: only so many, whichever; `mig_devices`: those of the list that are MIG devices."""

    name: str
    replicas: int
    devices: tuple[int | str, ...] | None = None
    count: int | None = None
    mig_devices: tuple[str, ...] = ()
    renamed: bool = False

    @property
    def is_mig(self) -> bool:
        """Whether it is of MIG devices alone."""
        return bool(_MIG.fullmatch(self.name)) or (self.devices == () and bool(self.mig_devices))


class NvidiaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`several_allowed`: a container may ask for more than one. `flags`: what is set beside sharing, by its path, as
    written. `unknown`: keys that the format does not have."""

    mode: Mode
    resources: tuple[SharedResource, ...]
    several_allowed: bool
    flags: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()


def read(content: bytes, source: str, name: str | None = None) -> NvidiaConfig:
    """The config.

    Args:
        source: what error texts call it.
        name: of the config to take, where there are several.

    Raises:
        ConfigErrors: with every problem found.
    """
    root = compose(checked_text(content, source), source, WHAT)
    named = _named(root, source)
    if named is None:
        if name is not None:
            raise file_error(source, f"holds one config without a name: leave out --name {quoted(name)}")
        return _parsed(root, source)
    chosen = _choose(named, source, name)
    inside = f"{source} ({chosen})"
    return _parsed(compose(checked_text(named[chosen], inside), inside, WHAT), inside)


def _named(root: yaml.Node, source: str) -> dict[str, str] | None:
    """The texts of a ConfigMap or of Helm values by their names, None for a config by itself."""
    problems: list[ConfigProblem] = []
    entries = _entries(Value(root, "", problems))
    kind = entries.get("kind")
    if kind is not None and "apiVersion" in entries:
        text = kind.text("must be ConfigMap")
        if text != "ConfigMap":
            raise file_error(source, f"is a {text}: it must be a {WHAT}, or a ConfigMap that holds some")
        holder = entries.get("data")
    else:
        holder = _entries(entries.get("config")).get("map")
        if holder is None:
            return None
    texts = {
        name: text for name, value in _entries(holder).items() if (text := value.text("must be a text")) is not None
    }
    if problems:
        raise ConfigErrors(source, problems)
    if not texts:
        raise file_error(source, f"holds no {WHAT}")
    return texts


def _choose(named: Mapping[str, str], source: str, name: str | None) -> str:
    known = ", ".join(quoted(one) for one in sorted(named))
    if name is None and len(named) == 1:
        return next(iter(named))
    if name is None:
        raise file_error(
            source,
            f"holds several configs: {known}: say which with --name; a node's label nvidia.com/device-plugin.config "
            "has the name of its own",
        )
    if name not in named:
        raise file_error(source, f"holds no config {quoted(name)}: there is {known}")
    return name


def _entries(value: Value | None) -> dict[str, Value]:
    """Those of a mapping; none where it is no mapping."""
    return value.entries() or {} if value is not None and isinstance(value.node, yaml.MappingNode) else {}


def _parsed(root: yaml.Node, source: str) -> NvidiaConfig:
    problems: list[ConfigProblem] = []
    config = _Reader(problems).config(Value(root, "", problems))
    if problems or config is None:
        raise ConfigErrors(source, problems)
    return config


class _Reader:
    """Collects what is unknown while it reads."""

    def __init__(self, problems: list[ConfigProblem]) -> None:
        self._problems, self._unknown = problems, list[str]()

    def config(self, root: Value) -> NvidiaConfig | None:
        entries = root.entries(like="{version: v1, sharing: {timeSlicing: {resources: [...]}}}")
        if entries is None:
            return None
        if "apiVersion" in entries and not entries.keys() & {"sharing", "flags"}:
            root.note(f"must be a {WHAT}, which has a version and no apiVersion", show=False)
            return None
        if "version" in entries:
            entries["version"].one_of((VERSION,))
        known = self._known(entries, _TOP, "")
        sharing = known.get("sharing")
        if sharing is None or sharing.is_null():
            text = (
                "has no `sharing`: NVIDIA's plugin offers whole GPUs with it, and there is nothing to carry over; "
                "`gpufrac config init` writes a config for this node"
            )
            self._problems.append(ConfigProblem(path="", rule=text))
            return None
        strategies = {
            key: value
            for key, value in self._known(
                sharing.entries("{timeSlicing: {resources: [...]}}") or {}, _SHARING, "sharing"
            ).items()
            if not value.is_null()
        }
        if len(strategies) > 1:
            sharing.note("must have timeSlicing or mps, not both: NVIDIA's plugin has one for a node", show=False)
            return None
        if not strategies:
            sharing.note(f"must have timeSlicing or mps{_but(sharing)}", show=False)
            return None
        ((key, strategy),) = strategies.items()
        read = self._strategy(strategy, mps=key == "mps")
        if read is None:
            return None
        resources, several_allowed = read
        return NvidiaConfig(
            mode=Mode.SM_SHARING if key == "mps" else Mode.TIME_SLICING,
            resources=resources,
            several_allowed=several_allowed,
            flags=tuple(
                _scalars({name: known[name] for name in ("flags", "resources", "imex", "health") if name in known})
            ),
            unknown=tuple(self._unknown),
        )

    def _known(self, entries: Mapping[str, Value], names: tuple[str, ...], path: str) -> dict[str, Value]:
        self._unknown += [f"{path}.{key}".lstrip(".") for key in entries if key not in names]
        return {key: value for key, value in entries.items() if key in names}

    def _strategy(self, value: Value, *, mps: bool) -> tuple[tuple[SharedResource, ...], bool] | None:
        entries = value.entries("{resources: [{name: nvidia.com/gpu, replicas: 4}]}")
        if entries is None:
            return None
        entries = self._known(entries, _STRATEGY, value.path)
        rename = entries["renameByDefault"].boolean() if "renameByDefault" in entries else False
        # Under MPS it is on unless it is switched off.
        only_one = entries["failRequestsGreaterThanOne"].boolean() if "failRequestsGreaterThanOne" in entries else mps
        if "resources" not in entries:
            value.missing("resources", "such as [{name: nvidia.com/gpu, replicas: 4}]")
            return None
        items = entries["resources"].items("resources", like="[{name: nvidia.com/gpu, replicas: 4}]")
        if items is None:
            return None
        if not items:
            entries["resources"].note("must hold at least one resource")
        found = [self._resource(item, rename_by_default=bool(rename)) for item in items]
        return tuple(resource for resource in found if resource is not None), not only_one

    def _resource(self, value: Value, *, rename_by_default: bool) -> SharedResource | None:
        entries = value.entries("{name: nvidia.com/gpu, replicas: 4}")
        if entries is None:
            return None
        entries = self._known(entries, _RESOURCE, value.path)
        name = rename = replicas = None
        if "name" in entries:
            name = entries["name"].text("must be the name of a resource such as nvidia.com/gpu")
        else:
            value.missing("name", "such as nvidia.com/gpu")
        if "replicas" in entries:
            replicas = entries["replicas"].integer(1, MAX_REPLICAS)
        else:
            value.missing("replicas", "how often each GPU is offered, such as 4")
        if "rename" in entries and not entries["rename"].is_null():
            rename = entries["rename"].text("must be the name that pods ask for")
        devices, count, mig_devices = _devices(entries.get("devices"))
        if not name or replicas is None:
            return None
        asked = _qualified(rename) if rename else _qualified(name) + (_SHARED if rename_by_default else "")
        if _MIG.fullmatch(_qualified(name)):  # whatever it is renamed to
            asked = _qualified(name)
        return SharedResource(
            name=asked,
            replicas=replicas,
            devices=devices,
            count=count,
            mig_devices=mig_devices,
            renamed=bool(rename),
        )


def _but(value: Value) -> str:
    """What a mapping has instead."""
    has = ", ".join(quoted(key) for key in _entries(value))
    return f", and has {has}" if has else ""


def _qualified(name: str) -> str:
    """That plugin puts its own domain before a name that has none."""
    return name if "/" in name else f"{_DOMAIN}{name}"


def _devices(value: Value | None) -> tuple[tuple[int | str, ...] | None, int | None, tuple[str, ...]]:
    """`all`, a number of GPUs, or a list of indices and UUIDs, of GPUs or MIG devices."""
    if value is None or value.is_null():
        return None, None, ()
    rule = "must be all, a number of GPUs, or a list of indices and UUIDs"
    if isinstance(value.node, yaml.ScalarNode):
        if value.node.value == "all":
            return None, None, ()
        if value.is_plain() and _INDEX.fullmatch(value.node.value) and value.node.value != "0":
            return None, int(value.node.value), ()
        value.note(rule)
        return None, None, ()
    devices: list[int | str] = []
    mig: list[str] = []
    for item in value.items("GPUs", like='[0, 1] or ["GPU-..."]') or ():
        text = item.text("must be the index or the UUID of a GPU")
        if text is None:
            continue
        if _MIG_DEVICE.fullmatch(text):
            mig.append(text)
        elif _INDEX.fullmatch(text):
            devices.append(int(text))
        elif _UUID.fullmatch(text):
            devices.append(f"GPU-{text[4:].lower()}")
        else:
            item.note("must be the index or the UUID of a GPU")
    return tuple(dict.fromkeys(devices)), None, tuple(mig)


def _scalars(entries: Mapping[str, Value], above: str = "") -> Iterator[tuple[str, str]]:
    """All that is set below some keys, by its path; lists as they are written."""
    for key, value in entries.items():
        path = f"{above}.{key}" if above else key
        if isinstance(value.node, yaml.MappingNode):
            yield from _scalars(value.entries() or {}, path)
        elif isinstance(value.node, yaml.SequenceNode):
            texts = [node.value for node in value.node.value if isinstance(node, yaml.ScalarNode)]
            yield path, ", ".join(texts) if len(texts) == len(value.node.value) else "a list"
        elif not value.is_null():
            yield path, str(value.node.value)
