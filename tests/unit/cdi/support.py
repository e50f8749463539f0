"""Specs and checks that the tests of `cdi` share."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from cdi.model import ContainerEdits, Device, Mount, Spec
from cdi.registry import Registry, SpecFile, build
from cdi.version import minimum_version

VENDOR, CLASS = "gpufrac.dev", "allocation"
KIND = f"{VENDOR}/{CLASS}"
UUIDS = ("GPU-5a3c7e1f-0000-4c11-9d5e-0123456789ab", "GPU-5a3c7e1f-0001-4c11-9d5e-0123456789ab")


@cache
def _validator() -> jsonschema.Draft202012Validator:
    schema = json.loads((Path(__file__).parent / "cdi_schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def check_file(data: bytes) -> dict[str, Any]:
    """Holds the bytes of a spec file against the schema, which shares no code with the encoder."""
    raw: dict[str, Any] = json.loads(data)
    _validator().validate(raw)
    names = [device["name"] for device in raw["devices"]]
    assert len(set(names)) == len(names)
    return raw


def allocation_spec(key: str = "0123456789abcdef0123", limit_bytes: int = 8 << 30) -> Spec:
    """A spec as the plugin writes it: one device, marker and limits in env, the pipe directory as a bind mount."""
    edits = ContainerEdits(
        env=(
            f"GPUFRAC_ALLOCATION={key}",
            f"GPUFRAC_MEMORY_LIMIT_BYTES={limit_bytes}",
            "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps",
            "NVIDIA_VISIBLE_DEVICES=void",
        ),
        mounts=(Mount("/run/gpufrac/gpu0/pipe", "/tmp/nvidia-mps", ("rbind", "rw", "nosuid", "nodev")),),
    )
    return Spec(KIND, (Device(f"s{key}", edits),))


def env_spec(kind: str, *names: str, prefix: str = "D") -> Spec:
    """A spec whose devices each set one variable, to tell them apart."""
    return Spec(kind, tuple(Device(n, ContainerEdits(env=(f"{prefix}={n}",))) for n in names))


def spec_file(spec: Spec, path: str = "/etc/cdi/a.json", priority: int = 0) -> SpecFile:
    """A spec as if read from a file."""
    return SpecFile(path, priority, minimum_version(spec), spec)


def registry_of(*specs: Spec) -> Registry:
    """A registry with one file for each spec, in one directory."""
    return build([spec_file(spec, f"/etc/cdi/{index}.json") for index, spec in enumerate(specs)])
