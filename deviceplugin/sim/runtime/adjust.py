"""An NRI plugin's adjustment in a container's OCI spec, as containerd 2.1.9 was seen to do it (pure).

The order is: annotations, environment, CDI devices, mounts. So the environment of a CDI device of the adjustment comes
after the adjustment's own, and wins; a mount of the adjustment wins over one of its CDI devices. Three traps are kept:

- The removal of a variable without a new value does nothing; that of a mount works.
- A variable that is there once is replaced in place; of one that is there twice the first entry is replaced, and the
  value of the last one wins all the same.
- The same name twice in one answer is an error.
"""

import copy
from collections.abc import Iterable, Sequence

from cdi.inject import OciSpec, apply
from cdi.registry import Registry
from deviceplugin.nri.model import Adjustment, Mount


class ConflictError(Exception):
    """An adjustment is at odds with itself."""


def adjusted(spec: OciSpec, adjustment: Adjustment, registry: Registry) -> OciSpec:
    """A new OCI spec with the adjustment in it; the one given stays as it is.

    Raises:
        ConflictError: the adjustment sets one variable, mount or device twice.
        CdiError: one of its devices can't be injected.
    """
    _check(adjustment)
    new = copy.deepcopy(spec)
    if adjustment.annotations:
        new["annotations"] = {**(new.get("annotations") or {}), **dict(adjustment.annotations)}
    process = new.setdefault("process", {})
    process["env"] = adjusted_env(process.get("env") or (), adjustment.env)
    if adjustment.cdi_devices:
        new = apply(registry, adjustment.cdi_devices, new)
    gone = {*adjustment.removed_mounts, *(mount.destination for mount in adjustment.mounts)}
    if gone:
        kept = [mount for mount in new.get("mounts") or () if mount["destination"] not in gone]
        added = [_oci_mount(mount) for mount in adjustment.mounts]
        # Shallow ones first, so that none hides another.
        new["mounts"] = sorted([*kept, *added], key=lambda mount: str(mount["destination"]).rstrip("/").count("/"))
    return new


def adjusted_env(old: Iterable[str], wanted: Sequence[tuple[str, str]]) -> list[str]:
    """Environment entries with these variables set."""
    if not wanted:
        return list(old)
    pending = dict(wanted)
    entries: dict[str, str] = {}  # in the place of the first entry of a name, with the value of the last
    for entry in old:
        name, separator, value = entry.partition("=")
        if separator:
            entries[name] = pending.pop(name, value)
    return [f"{name}={value}" for name, value in (entries | pending).items()]


def _check(adjustment: Adjustment) -> None:
    for what, names in (
        ("env", [name for name, _ in adjustment.env]),
        ("mount", [mount.destination for mount in adjustment.mounts]),
        ("CDI device", adjustment.cdi_devices),
    ):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConflictError(f"one plugin tried to set {what} {twice[0]} twice")


def _oci_mount(mount: Mount) -> dict[str, object]:
    return {
        "destination": mount.destination,
        "source": mount.source,
        "type": mount.type,
        "options": list(mount.options),
    }
