"""A config of NVIDIA's device plugin as one of ours, with what differs and what could not be carried over (pure)."""

import json
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from deviceplugin.draft.nvidia import NvidiaConfig, SharedResource
from deviceplugin.draft.text import aside, comment
from mpsd.common.errors import ConfigError
from mpsd.common.quantity import quoted
from mpsd.common.text import one_line
from mpsd.config.model import MPS_CLIENTS_PER_GPU
from mpsd.config.names import resource_name_rule
from mpsd.config.sections import MAX_CLIENT_LIMIT
from mpsd.gpu.model import Mode

DOMAIN: Final = "gpufrac.dev"
_PLACES: Final = 6
_DIGITS: Final = 10**_PLACES


class Converted(NamedTuple):
    """`text`: the whole file. `differs`: what is other than it was; `left_out`: what has no counterpart. One sentence
    each."""

    text: str
    differs: tuple[str, ...]
    left_out: tuple[str, ...]


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """One of our resources."""

    name: str
    of: SharedResource


def convert(config: NvidiaConfig, source: str, version: str) -> Converted:
    """The config, as far as it can be carried over.

    Raises:
        ConfigError: nothing of it can, or a name that pods can't ask for.
    """
    shares, left_out = _shares(config)
    if not shares:
        reasons = "; ".join(left_out)
        raise ConfigError(f"cannot carry over anything of {source}: {reasons}")
    settings = list(_settings(config, shares))
    differs = tuple(_differs(config, shares))
    left_out += [*_left_out_flags(config), *(f"`{key}`: the format has no such key" for key in config.unknown)]
    lines = list(_lines(config, shares, settings, differs, left_out, source, version))
    return Converted("\n".join(lines) + "\n", differs, tuple(left_out))


def _shares(config: NvidiaConfig) -> tuple[list[_Share], list[str]]:
    shares: list[_Share] = []
    left_out = []
    for resource in config.resources:
        if resource.is_mig:
            left_out.append(
                f"`{resource.name}`: GPUs with MIG on are not shared: NVIDIA's plugin can go on offering their devices"
            )
        elif resource.devices == ():
            left_out.append(f"`{resource.name}`: its list of devices is empty")
        elif resource.replicas == 1:
            left_out.append(
                f"`{resource.name}`: with `replicas: 1` a GPU is not shared: let NVIDIA's plugin offer whole GPUs"
            )
        else:
            name = _free_name(resource, {share.name for share in shares})
            if rule := resource_name_rule(name):
                raise ConfigError(f"cannot carry over the name {quoted(resource.name)}: {rule}")
            shares.append(_Share(name=name, of=resource))
            if resource.mig_devices:
                mig = ", ".join(resource.mig_devices)
                left_out.append(f"`{resource.name}`: of its devices {mig}, which are MIG devices and not shared")
    return shares, left_out


def _free_name(resource: SharedResource, taken: set[str]) -> str:
    """Our name for it. That plugin may have one name for several sizes, on different GPUs."""
    domain, _, base = resource.name.rpartition("/")
    name = f"{DOMAIN if domain == 'nvidia.com' else domain}/{base}"
    candidates = (name, f"{name}-1of{resource.replicas}")
    return next(
        (one for one in candidates if one not in taken),
        f"{name}-1of{resource.replicas}-{len(taken) + 1}",
    )


def fraction(replicas: int) -> str:
    """One of so many equal parts, rounded down: all of them fit."""
    return f"{_DIGITS // replicas / _DIGITS:.{_PLACES}f}".rstrip("0")


def _differs(config: NvidiaConfig, shares: Sequence[_Share]) -> Iterator[str]:
    names = ", ".join(f"`{share.name}` instead of `{share.of.name}`" for share in shares)
    yield f"pods ask for {names}; a name under nvidia.com would collide with NVIDIA's plugin"
    yield (
        "two plugins must not offer one GPU: stop NVIDIA's plugin on these nodes, or leave it other GPUs, before "
        "gpufrac starts there"
    )
    if config.mode is Mode.SM_SHARING:
        yield (
            "memory: NVIDIA's plugin limits each client to its part of all memory of the GPU; here a share is "
            "guaranteed that part of what driver and `memory.reserve` leave, and limited to it"
        )
    else:
        yield (
            "memory: with NVIDIA's time-slicing nobody is limited; here each share counts as its part of a GPU, and is "
            "limited to it on nodes that hold hard limits (driver r615 or newer). On older ones nothing holds it, as "
            "before; `mode: sm-sharing` without `enforcement: none` has limits there, too"
        )
    if config.several_allowed:
        yield (
            "a container gets exactly one share, and more is refused: who asked for several asks for a larger one, or "
            "for units of a resource with `unit: 1Gi`"
        )
    if any(share.of.renamed for share in shares):
        yield "`rename`: NVIDIA's plugin passes over it with a warning; here it is the name"
    if any(share.of.devices is not None for share in shares):
        yield "`devices`: NVIDIA's plugin passes over the list with a warning; here the resource is on these GPUs only"
    for share in shares:
        if share.of.count is not None:
            yield (
                f"`devices: {share.of.count}` of `{share.of.name}`: it is on all GPUs, as with NVIDIA's plugin, which "
                "passes over it; name GPUs with `gpus: {include: [...]}`"
            )
    most = max(share.of.replicas for share in shares)
    if config.mode is Mode.SM_SHARING and most > MAX_CLIENT_LIMIT:
        yield (
            f"`replicas: {most}`: MPS takes {MAX_CLIENT_LIMIT} clients on a GPU at most, so no more shares are listed "
            "there"
        )


def _settings(config: NvidiaConfig, shares: Sequence[_Share]) -> Iterator[tuple[str, str]]:
    """Lines of the file beside resources, each with its reason."""
    mps = []
    why = []
    most = max(share.of.replicas for share in shares)
    root = _driver_root(config)
    if root not in ("/", None):
        mps.append(f"driverRoot: {json.dumps(root)}")
        why.append("flags.nvidiaDriverRoot")
    if config.mode is Mode.SM_SHARING and most > MPS_CLIENTS_PER_GPU:
        mps.append(f"clientLimit: {min(most, MAX_CLIENT_LIMIT)}")
        why.append("for so many replicas")
    if mps:
        yield f"mps: {{{', '.join(mps)}}}", "; ".join(why)


def _driver_root(config: NvidiaConfig) -> str | None:
    """In normal form; None for one that is no absolute path."""
    root = dict(config.flags).get("flags.nvidiaDriverRoot") or "/"
    normal = posixpath.normpath(root)
    return f"/{normal.lstrip('/')}" if root.startswith("/") and root.isprintable() else None


def _unless(*values: str) -> Callable[[str], bool]:
    return lambda value: value.lower() not in values


_OFF = _unless("false", "")
_FLAGS: Final[dict[str, tuple[Callable[[str], bool], str]]] = {
    "flags.migStrategy": (_unless("none", ""), "GPUs with MIG on are left alone"),
    "flags.mpsRoot": (_unless(""), "the directories of MPS are set by `mps.runRoot` and `mps.logRoot`"),
    "flags.gdsEnabled": (_OFF, "containers get no GPUDirect Storage devices from gpufrac"),
    "flags.mofedEnabled": (_OFF, "containers get no Mellanox OFED devices from gpufrac"),
    "flags.gdrcopyEnabled": (_OFF, "containers get no GDRCopy device from gpufrac"),
    "flags.plugin.passDeviceSpecs": (_OFF, "device nodes come by CDI, or from the nvidia runtime (`cdi.gpuDevices`)"),
    "flags.plugin.deviceListStrategy": (
        _unless("envvar", "cdi-cri", "cdi-annotations", ""),
        "how devices reach a container is found out, or set by `cdi.gpuDevices`",
    ),
    "flags.plugin.deviceIDStrategy": (_unless("uuid", ""), "GPUs are always named by UUID there"),
    "flags.plugin.sharedDevicesAllocationPolicy": (
        _unless("packed", ""),
        "shares are always packed: GPUs that are in use already come first",
    ),
    "imex.channelIDs": (_unless(""), "containers get no IMEX channels from gpufrac"),
}
"""What is said of a flag where it is not at its default."""
_SILENT: Final = (
    "flags.failOnInitError",
    "flags.nvidiaDriverRoot",
    "flags.nvidiaDevRoot",
    "flags.deviceDiscoveryStrategy",
    "flags.useNodeFeatureAPI",
    "flags.plugin.cdiAnnotationPrefix",
    "flags.plugin.nvidiaCTKPath",
    "flags.plugin.containerDriverRoot",
    "imex.required",
)
"""What gpufrac does not need to be told, or has taken."""
_SECTIONS: Final = {
    "flags.gfd": "labels of nodes are GPU Feature Discovery's, which goes on beside gpufrac",
    "resources": "NVIDIA's plugin passes over it; the names of ours are in `resources`",
    "health": "what an XID means for a GPU is fixed in gpufrac",
}


def _left_out_flags(config: NvidiaConfig) -> Iterator[str]:
    sections: dict[str, None] = {}
    for path, value in config.flags:
        section = next((one for one in _SECTIONS if path == one or path.startswith(f"{one}.")), None)
        if section is not None:
            sections[section] = None
        elif path in _FLAGS:
            is_set, why = _FLAGS[path]
            if is_set(value):
                yield f"`{path}: {one_line(value)}`: {why}"
        elif path not in _SILENT:
            yield f"`{path}`: gpufrac has no such setting"
    if _driver_root(config) is None:
        yield "`flags.nvidiaDriverRoot`: it is no absolute path; see `mps.driverRoot`"
    for section in sections:
        yield f"`{section}`: {_SECTIONS[section]}"


def _lines(
    config: NvidiaConfig,
    shares: Sequence[_Share],
    settings: Sequence[tuple[str, str]],
    differs: Sequence[str],
    left_out: Sequence[str],
    source: str,
    version: str,
) -> Iterator[str]:
    yield from comment(
        f"gpufrac config, by `gpufrac config import nvidia` ({version}) from {source}. All keys: docs/config.md"
    )
    for title, sentences in (("What differs:", differs), ("Not carried over:", left_out)):
        if sentences:
            yield "#"
            yield from comment(title)
            for sentence in sentences:
                yield from comment(f"- {sentence}", indent=" ")
    yield "#"
    yield "apiVersion: gpufrac.dev/v1"
    yield "kind: NodeConfig"
    yield "resources:"
    for share in shares:
        yield from _resource(share, config.mode)
    for line, why in settings:
        yield aside(line, why)


def _resource(share: _Share, mode: Mode) -> Iterator[str]:
    replicas = share.of.replicas
    yield aside(f"  - name: {share.name}", f"{share.of.name}, replicas: {replicas}")
    yield aside(f"    memory: {{fraction: {fraction(replicas)}}}", f"1 of {replicas} equal parts of each GPU")
    if mode is Mode.SM_SHARING:
        percent = max(1, 100 // replicas)
        yield aside(f"    compute: {{mode: {mode}, threadPercent: {percent}}}", "as NVIDIA's plugin caps each client")
    else:
        yield f"    compute: {{mode: {mode}}}"
        yield aside("    enforcement: none", "accepts nodes where nothing holds the limit; where it can, it does")
    if share.of.devices is not None:
        yield f"    gpus: {{include: [{', '.join(map(str, share.of.devices))}]}}"
