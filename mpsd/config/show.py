"""A config in the spelling of its file, with every default filled in (pure)."""

from collections.abc import Iterator
from typing import Any

from mpsd.common.quantity import format_bytes
from mpsd.config.model import (
    API_VERSION,
    KIND,
    AnnotationsConfig,
    FixedMemory,
    FractionMemory,
    GpuSelection,
    NodeConfig,
    Resource,
    TrustPolicy,
    UnitMemory,
)


def effective(config: NodeConfig) -> dict[str, Any]:
    """Plain dicts, lists and scalars: dumped as YAML or JSON and loaded again, they give an equal NodeConfig.

    `simulated` is left out with another backend, where a file must not have it; `annotations` where there are none.
    """
    shown: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "resources": [_resource(resource) for resource in config.resources],
        "gpus": {**_selection(config.gpus), "groups": _groups(config)},
        "memory": {"reserve": format_bytes(config.memory_reserve_bytes)},
        "enforcement": {
            "minimum": config.enforcement_minimum.value,
            "enableDmem": config.enable_dmem,
            "leaks": config.leaks.value,
        },
        "mps": {
            "protocol": config.mps.protocol,
            "binary": config.mps.binary,
            "driverRoot": config.mps.driver_root,
            "runRoot": config.mps.run_root,
            "logRoot": config.mps.log_root,
            "sharedMemory": config.mps.shared_memory,
            "clientLimit": config.mps.client_limit,
            "onWedge": config.mps.on_wedge.value,
            "prohibitWhileDown": config.mps.prohibit_while_down,
            "writableMount": config.mps.writable_mount,
            "namespaceMount": config.mps.namespace_mount.value,
            "logMaxSize": format_bytes(config.mps.log_max_bytes),
        },
        "cdi": {
            "directory": config.cdi.directory,
            "gpuDevices": config.cdi.gpu_devices.value,
            "delivery": config.cdi.delivery.value,
        },
        "kubelet": {"root": config.kubelet_root, "devicePlugins": config.kubelet_device_plugins},
        "stateRoot": config.state_root,
        "backend": config.backend,
    }
    if config.backend == "simulated":
        gpus = [{"memory": format_bytes(gpu.memory_bytes)} for gpu in config.simulated.gpus]
        shown["simulated"] = {"gpus": gpus, "driver": config.simulated.driver}
    if config.annotations is not None:
        shown["annotations"] = _annotations(config.annotations)
    shown["nri"] = {"socket": config.nri.socket, "name": config.nri.name, "index": config.nri.index}
    shown["kubernetes"] = {"access": config.kubernetes.access, "nodeName": config.kubernetes.node_name}
    shown["metrics"] = {"address": config.metrics_address}
    return shown


def differing(old: NodeConfig, new: NodeConfig) -> tuple[str, ...]:
    """The keys of the file that make `new` another config than `old`, in its order, with dots: `mps.runRoot` (pure)."""
    return tuple(_differing("", effective(old), effective(new)))


def _differing(above: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differing(f"{above}{key}.", before, after)
        elif before != after:
            yield f"{above}{key}"


def _groups(config: NodeConfig) -> dict[str, Any]:
    shared = {"members": "shared"}
    return {
        name: {"gpus": list(members), **shared} if name in config.shared_groups else list(members)
        for name, members in config.groups
    }


def _annotations(annotations: AnnotationsConfig) -> dict[str, Any]:
    named = annotations.trust is TrustPolicy.NAMESPACES
    return {
        "gpus": _selection(annotations.gpus),
        "share": annotations.share,
        "domains": annotations.domains.value,
        "trust": {"namespaces": list(annotations.namespaces)} if named else annotations.trust.value,
        "reservationNamespace": annotations.reservation_namespace,
        "prefix": annotations.prefix,
        "enforcement": annotations.enforcement.value,
        "shortfall": annotations.shortfall.value,
        "whenAway": annotations.when_away.value,
        "criSocket": annotations.cri_socket,
    }


def _resource(resource: Resource) -> dict[str, Any]:
    compute: dict[str, Any] = {"mode": resource.mode.value}
    if resource.thread_percent is not None:
        compute["threadPercent"] = resource.thread_percent
    gpus: dict[str, Any] = {"groups": list(resource.groups)} if resource.groups else _selection(resource.gpus)
    if resource.gpu_count > 1:
        gpus["count"] = resource.gpu_count
    return {
        "name": resource.name,
        **_memory(resource.memory),
        "compute": compute,
        "enforcement": resource.enforcement.value,
        "gpus": gpus,
    }


def _memory(memory: FixedMemory | FractionMemory | UnitMemory) -> dict[str, Any]:
    match memory:
        case FixedMemory(request_bytes=request, limit_bytes=limit):
            return {"memory": {"request": format_bytes(request), "limit": format_bytes(limit)}}
        case FractionMemory(fraction=fraction, limit_fraction=limit) if limit == fraction:
            return {"memory": {"fraction": fraction}}
        case FractionMemory(fraction=fraction, limit_fraction=limit):
            return {"memory": {"fraction": fraction, "limitFraction": limit}}
        case UnitMemory(unit_bytes=unit):
            return {"unit": format_bytes(unit)}


def _selection(selection: GpuSelection) -> dict[str, Any]:
    include = "all" if selection.include is None else list(selection.include)
    return {"include": include, "exclude": list(selection.exclude)}
