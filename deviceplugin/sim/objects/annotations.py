"""What a pod's annotations say of its containers' GPUs: the keys of the contract and a scheduler's inputs (pure).

Text only: what a value means is for the plugin under test to find out. Keys as in KAI Scheduler 0.18 (NvFractions);
what is wrong with one is for the plugin's own contract to say.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deviceplugin.annotated.contract import DEVICES, LIMIT, MODE, PORTION, REQUEST, findings
from deviceplugin.sim.objects.pods import PodSpec, Role

SCHEDULER = "kai-scheduler"
"""schedulerName of KAI's pods: its admission and its scheduler look at no others."""
PREFIX = "nvidia.com/container."
SUFFIXES = (REQUEST, LIMIT, MODE, DEVICES)
"""What KAI knows below the prefix; any other key there it refuses. PORTION is written by forks of KAI."""

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


def target(pod: PodSpec) -> str:
    """The container that gets the fraction that keys of the whole pod ask for."""
    named = pod.annotations.get(CONTAINER)
    return named if named is not None else next((c.name for c in pod.containers if c.role is Role.APP), "")


def wanting(pod: PodSpec, prefix: str = PREFIX) -> set[str]:
    """Containers whose author wants them limited, also by a key that is not read; the pod's target where it names no
    container of the pod."""
    present = {container.name for container in pod.containers}
    keys = (*pod.annotations, *(finding.nearest for finding in findings(pod.annotations, prefix, present)))
    parts = [split_key(key, prefix) for key in keys]
    named = {part[0] for part in parts if part is not None and part[1] in (REQUEST, LIMIT)}
    if not named and is_fractional(pod, prefix):
        named = {target(pod)}
    return {name if name in present else target(pod) for name in named}


def is_placed(pod: PodSpec, prefix: str = PREFIX) -> bool:
    """Whether somebody has chosen its GPUs."""
    return any(key.startswith(prefix) and key.endswith(DEVICES) for key in pod.annotations)


def awaits_scheduler(pod: PodSpec, prefix: str = PREFIX) -> bool:
    """Whether nothing but a scheduler's inputs say what it asks for, and the scheduler is the one that reads them."""
    inputs = pod.scheduler == SCHEDULER and not pod.node and any(key in pod.annotations for key in INPUTS)
    return inputs and not any(key.startswith(prefix) for key in pod.annotations)


def notes(
    pod: PodSpec, prefix: str = PREFIX, *, served: bool = True, reached: bool = True, scheduled: bool = False
) -> list[str]:
    """What the author of a pod may not expect of its annotations, on a node as it is.

    Args:
        served: the node's config has `annotations`.
        reached: the node has NRI.
        scheduled: a scheduler has seen the pod.
    """
    present = [container.name for container in pod.containers]
    fractional = [name for name in present if asked_of(pod.annotations, name, prefix).fractional]
    found = []
    if fractional and not served:
        found.append("nothing acts on its annotations: this node's config has no `annotations`")
    elif fractional and not reached:
        found.append("nothing acts on its annotations: this node has no NRI")
    inputs = [key for key in INPUTS if key in pod.annotations]
    if inputs and not fractional and not scheduled:
        found.append(
            f"{', '.join(inputs)}: for a scheduler, which writes the keys of a container from it: nothing takes effect "
            f"as it is; {_STAND_IN}"
        )
    found += [
        f"container {name}: annotation {prefix}{name}{DEVICES} is missing, which a scheduler writes; {_STAND_IN}"
        for name in fractional
        if not scheduled and not (asked_of(pod.annotations, name, prefix).devices or "").strip()
    ]
    found += map(str, findings(pod.annotations, prefix, present))
    if not found and not any(c.resources for c in pod.containers) and not is_fractional(pod, prefix):
        found.append("asks for no extended resource and no fraction of a GPU: the plugin has no part in it")
    return found


_STAND_IN = f"with --schedule a stand-in for KAI writes what is missing, for pods with schedulerName: {SCHEDULER}"
