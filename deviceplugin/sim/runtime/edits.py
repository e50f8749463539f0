"""What a plugin's answers, the pod spec and CDI devices make of a container (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdi.inject import OciSpec, apply, effective_env
from cdi.registry import Registry
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb


@dataclass(frozen=True, slots=True)
class Edits:
    """What a container gets: its whole env, mounts as (container path, host path, options), device nodes, and the hooks
    that run before its process starts."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    device_nodes: tuple[Mapping[str, Any], ...] = ()
    cdi_devices: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[Mapping[str, Any], ...] = ()


def merged_answer(answers: Iterable[pb.ContainerAllocateResponse]) -> pb.ContainerAllocateResponse:
    """Answers of several resources as one: the first writer of an env, mount, device or annotation wins (verified)."""
    merged = pb.ContainerAllocateResponse()
    seen_mounts: set[str] = set()
    seen_devices: set[str] = set()
    seen_names: set[str] = set()
    for answer in answers:
        for name, value in answer.envs.items():
            if name not in merged.envs:
                merged.envs[name] = value
        for name, value in answer.annotations.items():
            if name not in merged.annotations:
                merged.annotations[name] = value
        for mount in answer.mounts:
            if mount.container_path not in seen_mounts:
                seen_mounts.add(mount.container_path)
                merged.mounts.append(mount)
        for device in answer.devices:
            if device.container_path not in seen_devices:
                seen_devices.add(device.container_path)
                merged.devices.append(device)
        for cdi in answer.cdi_devices:
            if cdi.name not in seen_names:
                seen_names.add(cdi.name)
                merged.cdi_devices.append(cdi)
    return merged


def oci_spec(
    registry: Registry, answer: pb.ContainerAllocateResponse, pod_env: Mapping[str, str], *, cdi_wins: bool = True
) -> tuple[OciSpec, tuple[str, ...]]:
    """What a runtime makes of a plugin's answer, and the CDI devices in it (pure). Environment: Allocate's, then the
    pod spec's, then CDI's; a name may be there several times, and the last one wins.

    Args:
        cdi_wins: False: CDI's goes first, and each name is there once, as with CRI-O before 1.34.

    Raises CdiError when a device can't be resolved or injected.
    """
    own = {**answer.envs, **pod_env}
    spec: OciSpec = {
        "process": {
            "env": [f"{name}={value}" for env in (dict(answer.envs), pod_env) for name, value in env.items()]
            if cdi_wins
            else []
        },
        "mounts": [
            {
                "destination": mount.container_path,
                "source": mount.host_path,
                "type": "bind",
                "options": ["rbind", "rprivate", "ro" if mount.read_only else "rw"],
            }
            for mount in answer.mounts
        ],
        "linux": {"devices": [{"path": device.container_path} for device in answer.devices]},
        "annotations": dict(answer.annotations),
    }
    names = tuple(device.name for device in answer.cdi_devices)
    made = apply(registry, names, spec)
    if not cdi_wins:
        made["process"]["env"] = [f"{name}={value}" for name, value in {**effective_env(made), **own}.items()]
    return made, names


def edits_of(spec: OciSpec, cdi_devices: Iterable[str]) -> Edits:
    """What a container gets by its OCI spec (pure)."""
    return Edits(
        env=effective_env(spec),
        mounts=tuple((m["destination"], m["source"], tuple(m.get("options") or ())) for m in spec["mounts"]),
        device_nodes=tuple(spec["linux"]["devices"]),
        cdi_devices=tuple(cdi_devices),
        annotations=dict(spec["annotations"]),
        hooks=tuple((spec.get("hooks") or {}).get("createRuntime") or ()),
    )
