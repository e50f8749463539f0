"""A CDI spec as the bytes of its file (pure)."""

from typing import Any

import msgspec

from cdi.errors import InvalidSpecError
from cdi.model import Spec
from cdi.validate import writer_faults
from cdi.version import minimum_version


def encode_spec(spec: Spec) -> bytes:
    """Canonical JSON of a spec, newline at the end: equal specs give equal bytes, so files can be compared as bytes.

    Keys and devices are sorted; lists whose order has a meaning (env, mounts, hooks, ...) stay as they are. Raises
    InvalidSpecError with every rule the spec breaks.
    """
    if faults := writer_faults(spec):
        raise InvalidSpecError(spec.kind, faults)
    raw: dict[str, Any] = msgspec.to_builtins(spec)
    raw["cdiVersion"] = minimum_version(spec)
    raw["devices"] = sorted(raw["devices"], key=_device_name)
    if not raw.get("containerEdits"):
        raw.pop("containerEdits", None)
    return msgspec.json.encode(raw, order="sorted") + b"\n"


def _device_name(device: dict[str, Any]) -> str:
    name: str = device["name"]
    return name
