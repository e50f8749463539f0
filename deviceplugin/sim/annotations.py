"""What a pod's annotations say of its containers' GPUs: the keys of the contract and a scheduler's inputs (pure).

Text only: what a value means is for the plugin under test to find out. Keys as in KAI Scheduler 0.18 (NvFractions).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deviceplugin.sim.pods import PodSpec

PREFIX = "nvidia.com/container."
REQUEST, LIMIT, MODE, DEVICES = ".gpu-memory.request", ".gpu-memory.limit", ".gpu-compute.mode", ".gpus.devices"
SUFFIXES = (REQUEST, LIMIT, MODE, DEVICES)
"""What KAI knows below the prefix; any other key there it refuses."""
PORTION = ".gpu-compute.portion"
"""Written by forks of KAI."""

FRACTION, MEMORY, COUNT, CONTAINER = (
    "gpu-fraction",
    "gpu-memory",
    "gpu-fraction-num-devices",
    "gpu-fraction-container-name",
)
FRACTION_LIMIT, MEMORY_LIMIT = "gpu-fraction.limit", "gpu-memory.limit"
INPUTS = (FRACTION, MEMORY, COUNT, CONTAINER, FRACTION_LIMIT, MEMORY_LIMIT)
"""Keys of the whole pod: a scheduler reads them, a node does not."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The keys of one container as they stand, None where there is none."""

    request: str | None = None
    limit: str | None = None
    mode: str | None = None
    devices: str | None = None

    @property
    def fractional(self) -> bool:
        """Whether it asks for memory: other keys have no effect without."""
        return self.request is not None or self.limit is not None


def asked_of(annotations: Mapping[str, str], container: str, prefix: str = PREFIX) -> Asked:
    """What the annotations say of one container."""
    request, limit, mode, devices = (annotations.get(f"{prefix}{container}{suffix}") for suffix in SUFFIXES)
    return Asked(request, limit, mode, devices)


def split_key(key: str, prefix: str = PREFIX) -> tuple[str, str] | None:
    """Container and suffix of a key below the prefix; None for any other key, also one that only looks like it."""
    if not key.startswith(prefix):
        return None
    rest = key.removeprefix(prefix)
    for suffix in (*SUFFIXES, PORTION):
        if rest.endswith(suffix) and rest != suffix:
            return rest.removesuffix(suffix), suffix
    return None


def is_fractional(pod: PodSpec, prefix: str = PREFIX) -> bool:
    """Whether a pod asks for a fraction of GPUs, by KAI's rule: a mode alone does not."""
    keys = pod.annotations
    return (
        FRACTION in keys or MEMORY in keys or any(k.startswith(prefix) and k.endswith((REQUEST, LIMIT)) for k in keys)
    )


def is_placed(pod: PodSpec, prefix: str = PREFIX) -> bool:
    """Whether somebody has chosen its GPUs."""
    return any(key.startswith(prefix) and key.endswith(DEVICES) for key in pod.annotations)


def notes(
    pod: PodSpec, prefix: str = PREFIX, *, served: bool = True, reached: bool = True, scheduled: bool = False
) -> list[str]:
    """What the author of a pod may not expect of its annotations, on a node as it is.

    Args:
        served: the node's config has `annotations`.
        reached: the node has NRI.
        scheduled: a scheduler has seen the pod.
    """
    asked = {container.name: asked_of(pod.annotations, container.name, prefix) for container in pod.containers}
    fractional = [name for name, keys in asked.items() if keys.fractional]
    found = []
    if fractional and not served:
        found.append("nothing acts on its annotations: this node's config has no `annotations`")
    elif fractional and not reached:
        found.append("nothing acts on its annotations: this node has no NRI")
    inputs = [key for key in INPUTS if key in pod.annotations]
    if inputs and not fractional and not scheduled:
        found.append(
            f"annotation {', '.join(inputs)} is for a scheduler, which writes the keys of a container from it: nothing "
            "takes effect as it is; with --schedule a stand-in for KAI writes them"
        )
    found += [
        f"container {name}: annotation {prefix}{name}{DEVICES} is missing, which a scheduler writes: with --schedule a "
        "stand-in for KAI does"
        for name in fractional
        if not scheduled and not (asked[name].devices or "").strip()
    ]
    for key in pod.annotations:
        if not key.startswith(prefix):
            continue
        parts = split_key(key, prefix)
        if parts is None:
            found.append(f"annotation {key} has no effect: it is none of {', '.join(f'*{s}' for s in SUFFIXES)}")
        elif parts[0] not in asked:
            found.append(f"annotation {key} has no effect: the pod has no container {parts[0]}")
        elif not asked[parts[0]].fractional:
            found.append(
                f"annotation {key} has no effect: container {parts[0]} has neither a {REQUEST} nor a {LIMIT} key"
            )
    return found
