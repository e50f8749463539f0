"""What KAI's admission webhook makes of a pod that asks for a fraction of GPUs (KAI 0.18, NvFractions; pure)."""

from collections.abc import Mapping
from dataclasses import replace

from deviceplugin.annotated.contract import DEVICES, LIMIT, MODE, REQUEST
from deviceplugin.sim.objects.annotations import (
    CONTAINER,
    COUNT,
    FRACTION,
    FRACTION_LIMIT,
    MEMORY,
    MEMORY_LIMIT,
    PREFIX,
    SUFFIXES,
    is_fractional,
    split_key,
    target,
)
from deviceplugin.sim.objects.pods import PodSpec
from deviceplugin.sim.scheduling.values import (
    FLOAT,
    PORTION_PREFIX,
    PORTION_SUFFIX,
    RESERVED_RESOURCE,
    SM_SHARING,
    TIME_SLICING,
    go_float,
    is_positive,
    quantity_bytes,
)
from mpsd.common.errors import ConfigError
from mpsd.gpu.model import MIB

_BINDER = "system:serviceaccount:kai-scheduler:binder"


class DeniedError(ConfigError):
    """KAI's admission webhook refuses a pod. The text is its own."""


def admitted(pod: PodSpec, prefix: str = PREFIX) -> PodSpec:
    """A fractional pod of KAI's as its admission lets it in: with the keys of its container that follow from
    `gpu-memory` and the limits of a whole pod.

    Raises DeniedError.
    """
    for key in pod.annotations:
        if key.startswith(prefix) and not _known(key, prefix):
            raise DeniedError(f"invalid NvFractions annotation key: {key}")
    pod = _mutated(pod, prefix)
    for key in pod.annotations:
        if key.startswith(prefix) and key.endswith(DEVICES):
            raise DeniedError(f"{key}: {DEVICES} annotations may only be modified by {_BINDER}")
    _validate(pod, prefix)
    return pod


def _known(key: str, prefix: str) -> bool:
    parts = split_key(key, prefix)
    return parts is not None and parts[1] in SUFFIXES


def _mutated(pod: PodSpec, prefix: str) -> PodSpec:
    container, keys = target(pod), pod.annotations
    added: dict[str, str] = {}
    for source, key, value in (
        (MEMORY, f"{prefix}{container}{REQUEST}", f"{keys.get(MEMORY)}Mi"),
        (MEMORY_LIMIT, f"{prefix}{container}{LIMIT}", keys.get(MEMORY_LIMIT, "")),
        (FRACTION_LIMIT, f"{PORTION_PREFIX}{container}{PORTION_SUFFIX}", keys.get(FRACTION_LIMIT, "")),
    ):
        if source in keys and (source != MEMORY or is_positive(keys[MEMORY])):
            if keys.get(key, value) != value:  # as text: 4Gi is at odds with 4096Mi
                raise DeniedError(f"{source} annotation conflicts with {key} annotation")
            added[key] = value
    return replace(pod, annotations={**keys, **added})


def _validate(pod: PodSpec, prefix: str) -> None:
    """KAI's rules, in its order."""
    keys = pod.annotations
    fraction = go_float(keys.get(FRACTION))
    _validate_shorthands(keys, fraction)
    for key, value in keys.items():
        if key.startswith(PORTION_PREFIX) and key.endswith(PORTION_SUFFIX):
            container = key.removeprefix(PORTION_PREFIX).removesuffix(PORTION_SUFFIX)
            if container != target(pod):
                raise DeniedError(f"{key} annotation does not match the gpu-fraction target container {target(pod)}")
            _validate_portion(key, value, keys, fraction)
    if COUNT in keys and not is_positive(keys[COUNT]):
        raise DeniedError("fraction count annotation value must be a positive integer greater than 0")
    sizes = _sizes(keys, prefix)
    if FRACTION in keys and (fraction is None or not 0 < fraction < 1):
        raise DeniedError("gpu-fraction annotation value must be a positive number smaller than 1.0")
    if MEMORY in keys and not is_positive(keys[MEMORY]):
        raise DeniedError("gpu-memory annotation value must be a positive integer greater than 0")
    if COUNT in keys and not is_fractional(pod, prefix):
        raise DeniedError(
            "cannot request multiple fractional devices without specifying fraction details (portion or memory)"
        )
    _validate_containers(pod, sizes, prefix)
    _validate_combinations(pod, sizes, prefix)


def _validate_shorthands(keys: Mapping[str, str], fraction: float | None) -> None:
    if FRACTION_LIMIT in keys:
        _validate_portion(FRACTION_LIMIT, keys[FRACTION_LIMIT], keys, fraction)
    if MEMORY_LIMIT in keys:
        if MEMORY not in keys:
            raise DeniedError(f"{MEMORY_LIMIT} annotation can only be used together with {MEMORY} annotation")
        limit = quantity_bytes(keys[MEMORY_LIMIT])
        if limit is None or FLOAT.fullmatch(keys[MEMORY_LIMIT]):
            raise DeniedError(
                f"{MEMORY_LIMIT} annotation value must be a positive Kubernetes memory quantity with a unit"
            )
        if is_positive(keys[MEMORY]) and limit < int(keys[MEMORY]) * MIB:
            raise DeniedError(
                f"{MEMORY_LIMIT} annotation value must not be smaller than gpu-memory annotation value "
                f"({keys[MEMORY]} MiB)"
            )


def _validate_portion(key: str, value: str, keys: Mapping[str, str], fraction: float | None) -> None:
    if FRACTION not in keys:
        raise DeniedError(f"{key} annotation can only be used together with {FRACTION} annotation")
    limit = go_float(value)
    if len(value.partition(".")[2]) > 5:
        raise DeniedError(f"{key} annotation value must have at most 5 digits after the decimal point")
    if limit is None or not 0 < limit < 1:
        raise DeniedError(f"{key} annotation value must be a positive number smaller than 1.0. Got {value}")
    if fraction is not None and limit <= fraction:
        raise DeniedError(f"{key} annotation value must be greater than gpu-fraction annotation value")


def _sizes(keys: Mapping[str, str], prefix: str) -> dict[str, dict[str, float]]:
    """Bytes by container and suffix."""
    sizes: dict[str, dict[str, float]] = {}
    for key, value in keys.items():
        parts = split_key(key, prefix)
        if parts is None:
            continue
        container, suffix = parts
        of_container = sizes.setdefault(container, {})
        if suffix in (REQUEST, LIMIT):
            size = quantity_bytes(value)
            if size is None:
                raise DeniedError(f"{key} annotation value must be a valid Kubernetes memory quantity greater than 0")
            of_container[suffix] = size
    return sizes


def _validate_containers(pod: PodSpec, sizes: Mapping[str, Mapping[str, float]], prefix: str) -> None:
    present = {container.name for container in pod.containers}
    named = [container for container in sizes if any(f"{prefix}{container}{s}" in pod.annotations for s in SUFFIXES)]
    for container in [*named, *([target(pod)] if is_fractional(pod, prefix) and not named else [])]:
        if container not in present:
            raise DeniedError(
                f"container {container} not found in pod spec, but a fractional annotation referencing it was found"
            )
    for container, size in sizes.items():
        if size.get(REQUEST, 0) > size.get(LIMIT, float("inf")):
            raise DeniedError(f"invalid fraction request for container {container}: request is greater than limit")
    if len(named) > 1:
        raise DeniedError("currently, kai doesn't support multiple containers with fractional GPU requests")
    wanted = pod.annotations.get(CONTAINER)
    if named and wanted is not None and wanted != named[0]:
        raise DeniedError(f"{CONTAINER} annotation value {wanted} does not match container name {named[0]}")


def _validate_combinations(pod: PodSpec, sizes: Mapping[str, Mapping[str, float]], prefix: str) -> None:
    keys = pod.annotations
    if any(RESERVED_RESOURCE in container.resources for container in pod.containers):
        raise DeniedError("cannot have both GPU fraction request and whole GPU resource request/limit")
    limited = any(LIMIT in size for size in sizes.values())
    for key, shorthand in ((FRACTION, None), (MEMORY, MEMORY_LIMIT)):
        if limited and key in keys and shorthand not in keys:
            raise DeniedError(f"cannot combine {prefix} limit annotation with {key}")
    if FRACTION in keys and MEMORY in keys:
        raise DeniedError("cannot request both gpu-fraction and GPU memory request")
    for container, size in sizes.items():
        if MEMORY in keys and REQUEST in size and size[REQUEST] != int(keys[MEMORY]) * MIB:
            raise DeniedError(
                f"NvFractions memory request ({keys[f'{prefix}{container}{REQUEST}']}) does not match gpu-memory "
                f"annotation value ({keys[MEMORY]} MiB)"
            )
        mode = keys.get(f"{prefix}{container}{MODE}", TIME_SLICING)
        if mode not in (TIME_SLICING, SM_SHARING):
            raise DeniedError(f"invalid NvFractions compute mode: {mode}")
