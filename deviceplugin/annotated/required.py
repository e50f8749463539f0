"""Does the container runtime wait for us? Without that, what it makes while we are away runs without limits.

NRI's default validator (NRI 0.10) refuses containers while a plugin that it is told to require is not registered. It
does not cover a plugin that is registered and answers late. Over NRI nobody tells how it is configured, so the
runtime's own files are read, as far as they can be.
"""

import glob
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cdi.atomic import read_regular
from deviceplugin.nri.model import Runtime
from deviceplugin.nri.runtimes import at_least


class _Validator(NamedTuple):
    """Where a runtime has its settings: files (later ones win), the table, and its two keys."""

    since: tuple[int, int]
    files: tuple[str, ...]
    table: tuple[str, ...]
    enable: str
    required: str

    def example(self, name: str) -> str:
        """What to write."""
        table = ".".join(part if part.replace("_", "").isalnum() else f'"{part}"' for part in self.table)
        return f'[{table}] {self.enable} = true, {self.required} = ["{name}"]'


_VALIDATORS = {
    "containerd": _Validator(
        (2, 2),
        ("/etc/containerd/config.toml", "/etc/containerd/conf.d/*.toml"),
        ("plugins", "io.containerd.nri.v1.nri", "default_validator"),
        "enable",
        "required_plugins",
    ),
    "cri-o": _Validator(
        (1, 34),
        ("/etc/crio/crio.conf", "/etc/crio/crio.conf.d/*"),
        ("crio", "nri", "default_validator"),
        "nri_enable_default_validator",
        "nri_validator_required_plugins",
    ),
}


def unguarded(runtime: Runtime, name: str, configs: Sequence[Mapping[str, Any]]) -> str:
    """Why containers could be made without us, empty when the runtime requires the plugin of that name (pure).

    Args:
        configs: the runtime's files, as far as they could be read.
    """
    validator = _VALIDATORS.get(runtime.name.lower())
    if validator is None:
        return f"whether {runtime.name} can require NRI plugins is not known"
    if not at_least(runtime, validator.since):
        since = ".".join(map(str, validator.since))
        return f"{runtime.name} {runtime.version} can't require NRI plugins: use {since} or newer"
    if not configs:
        return (
            f"whether {runtime.name} requires it can't be told, as {validator.files[0]} can't be read; it should have "
            + validator.example(name)
        )
    enabled, required = False, False
    for config in configs:
        table: Any = config
        for part in validator.table:
            table = table.get(part) if isinstance(table, Mapping) else None
        if isinstance(table, Mapping):
            enabled = bool(table.get(validator.enable, enabled))
            required = name in table.get(validator.required, [name] if required else [])
    return "" if enabled and required else f"{runtime.name} does not require it: set {validator.example(name)}"


def runtime_configs(runtime: Runtime, root: str = "") -> list[dict[str, Any]]:
    """The files of a runtime that can be read and are TOML, in their order."""
    validator = _VALIDATORS.get(runtime.name.lower())
    found = []
    for pattern in validator.files if validator is not None else ():
        for path in sorted(glob.glob(root + pattern)):
            try:
                found.append(tomllib.loads(read_regular(path)[0].decode()))
            except (OSError, ValueError):
                continue
    return found
