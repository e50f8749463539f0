"""A stand-in for KAI Scheduler's fractions of GPUs, on one node: what its scheduler and binder do (pure).

As of KAI 0.18 with NvFractions, and no more of it than decides what a pod's annotations say in the end: no queues, no
preemption, no taints. Nothing is remembered: what is taken follows from the pods that are there, as with the real one.

- The memory requests on one GPU sum up to at most its size, which is the node's label rounded down to 100 MiB.
- The pods on one GPU have one compute mode. It is that of the GPU's group, which lives as long as its reservation pod.
- Limits are never booked, and nothing is left for the driver: so a node may have to refuse what was placed.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from deviceplugin.annotated.contract import DEVICES, LIMIT, MODE, REQUEST
from deviceplugin.sim.objects.annotations import COUNT, FRACTION, PREFIX, asked_of, target
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec
from deviceplugin.sim.scheduling.values import (
    PORTION_PREFIX,
    PORTION_SUFFIX,
    RESERVED_RESOURCE,
    TIME_SLICING,
    go_float,
    is_positive,
    quantity_bytes,
)
from mpsd.gpu.model import MIB

RESERVATION_NAMESPACE, RESERVATION_CONTAINER = "kai-resource-reservation", "resource-reservation"
RESERVED_GPU = "run.ai/reserve_for_gpu_index"
"""Annotation of a reservation pod, with the UUID of its GPU whatever its name says."""
GROUP_LABEL = "runai-gpu-group"
CDI_KIND = "k8s.device-plugin.nvidia.com/gpu"

_SIZE_STEP_MIB = 100
_NO_FIT = "no nodes with enough resources were found: 1 node(s) didn't have enough resources: {}."


@dataclass(frozen=True, slots=True)
class Group:
    """A GPU that is shared out in fractions. `id` is KAI's own and not the GPU's UUID."""

    id: str
    gpu: str
    mode: str
    booked_mib: int = 0
    pods: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """The node as the scheduler sees it.

    Args:
        gpu_mib: the label nvidia.com/gpu.memory: every GPU is taken to have this much.
        idle: GPUs that nobody holds, in the order in which the device plugin gives them.
    """

    name: str
    gpu_mib: int
    idle: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()

    @property
    def size_mib(self) -> int:
        """What may be booked on a GPU."""
        return self.gpu_mib // _SIZE_STEP_MIB * _SIZE_STEP_MIB


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod goes: on these groups, in this order. `new` are those that need a reservation pod first."""

    groups: tuple[Group, ...]
    new: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class Unschedulable:
    """Why a pod stays Pending. `message` opens with KAI's words, `detail` says more."""

    message: str
    detail: str = ""
    reason: str = "Unschedulable"


@dataclass(frozen=True, slots=True)
class _Ask:
    """What an admitted pod asks for, on each of so many GPUs. One of `portion` and `memory_mib` is given."""

    container: str
    count: int
    mode: str
    portion: float | None = None
    memory_mib: int | None = None

    def mib(self, size_mib: int) -> int:
        if self.memory_mib is not None:
            return self.memory_mib
        return int((self.portion or 0.0) * size_mib)


# -- placement


def place(pod: PodSpec, node: Node, new_group: Callable[[str], str], prefix: str = PREFIX) -> Placement | Unschedulable:
    """Chooses the GPUs of an admitted pod: those already shared and fullest first, then idle ones.

    Args:
        new_group: gives the ID of a group on an idle GPU.
    """
    ask = _ask(pod, node, prefix)
    size_mib, needed_mib = node.size_mib, ask.mib(node.size_mib)
    if needed_mib > size_mib:
        return Unschedulable(
            _NO_FIT.format("GPU memory"),
            f"Each gpu on the node has a gpu memory capacity of {size_mib} Mib. {needed_mib} Mib of gpu memory has "
            "been requested.",
        )
    fitting = [g for g in node.groups if g.mode == ask.mode and g.booked_mib + needed_mib <= size_mib]
    fitting.sort(key=lambda group: (-group.booked_mib, group.gpu))
    chosen = fitting[: ask.count]
    new = tuple(Group(new_group(gpu), gpu, ask.mode) for gpu in node.idle[: ask.count - len(chosen)])
    if len(chosen) + len(new) < ask.count:
        return Unschedulable(_NO_FIT.format("GPUs"), _why_not(ask, needed_mib, node))
    return Placement((*chosen, *new), new)


def _why_not(ask: _Ask, needed_mib: int, node: Node) -> str:
    several = f"{ask.count} GPUs with " if ask.count > 1 else ""
    reasons = [
        f"GPU {group.gpu} has {node.size_mib - group.booked_mib} of {node.size_mib} MiB free"
        if group.mode == ask.mode
        else f"GPU {group.gpu} is shared by {group.mode}"
        for group in node.groups
    ]
    idle = {0: "no GPU is idle", 1: "1 GPU is idle"}.get(len(node.idle), f"{len(node.idle)} GPUs are idle")
    return f"requested: {several}{needed_mib} MiB, {ask.mode}. {'; '.join([*reasons, idle])}."


def _ask(pod: PodSpec, node: Node, prefix: str) -> _Ask:
    """What an admitted pod asks for. A request key counts before `gpu-fraction`, but for the one that the binder made
    from it."""
    keys = pod.annotations
    named = [c.name for c in pod.containers if asked_of(keys, c.name, prefix).fractional]
    container = named[0] if named else target(pod)
    asked = asked_of(keys, container, prefix)
    count = int(keys[COUNT]) if is_positive(keys.get(COUNT, "")) else 1
    mode = asked.mode or TIME_SLICING
    portion = go_float(keys.get(FRACTION))
    if portion is not None and asked.request in (None, f"{_portion_mib(portion, node)}Mi"):
        return _Ask(container, count, mode, portion=portion)
    text = asked.request if asked.request is not None else asked.limit
    return _Ask(container, count, mode, memory_mib=(quantity_bytes(text or "") or 0) // MIB)


def _portion_mib(portion: float, node: Node) -> int:
    return int(node.gpu_mib * float(f"{portion:.2f}"))  # it travels with two decimals


# -- binding


def bound(
    pod: PodSpec, placement: Placement, node: Node, prefix: str = PREFIX, *, cdi: bool = True
) -> PodSpec | Unschedulable:
    """An admitted pod with everything that the binder writes.

    Args:
        cdi: devices are named as CDI devices.
    """
    ask, keys = _ask(pod, node, prefix), pod.annotations
    key = f"{prefix}{ask.container}"
    written = {"received-resource-type": "Fraction"}
    if f"{key}{REQUEST}" not in keys and ask.portion is not None:
        request_mib = _portion_mib(ask.portion, node)
        if request_mib == 0:
            return Unschedulable("calculated gpu memory request is zero", reason="BindingError")
        written[f"{key}{REQUEST}"] = f"{request_mib}Mi"
    portion_limit = go_float(keys.get(f"{PORTION_PREFIX}{ask.container}{PORTION_SUFFIX}"))
    if f"{key}{LIMIT}" not in keys and portion_limit is not None:
        written[f"{key}{LIMIT}"] = f"{int(node.gpu_mib * portion_limit)}Mi"
    written[f"{key}{DEVICES}"] = ",".join(f"{CDI_KIND}={g.gpu}" if cdi else g.gpu for g in placement.groups)
    groups = [group.id for group in placement.groups]
    labels = {GROUP_LABEL: groups[0]} if len(groups) == 1 else {f"{GROUP_LABEL}/{group}": group for group in groups}
    return replace(pod, annotations={**keys, **written}, labels={**pod.labels, **labels})


def reservation(group: Group, node_name: str, prefix: str = PREFIX) -> PodSpec:
    """The pod that keeps a group's GPU, as it is before it has found out which that is."""
    digest = hashlib.sha256(f"{node_name}/{group.id}".encode()).hexdigest()[:16]
    return PodSpec(
        name=f"gpu-reservation-{digest}",
        namespace=RESERVATION_NAMESPACE,
        containers=(ContainerSpec(RESERVATION_CONTAINER, {RESERVED_RESOURCE: 1}),),
        labels={GROUP_LABEL: group.id, "app": RESERVATION_NAMESPACE},
        annotations={
            "karpenter.sh/do-not-disrupt": "true",
            f"{prefix}{RESERVATION_CONTAINER}{MODE}": group.mode,
        },
    )


def reserving(pod: PodSpec, gpu: str) -> PodSpec:
    """A reservation pod once it has found out its GPU."""
    return replace(pod, annotations={**pod.annotations, RESERVED_GPU: gpu})


# -- what there is


def is_reservation(pod: PodSpec) -> bool:
    """Whether a pod keeps a GPU for fractions."""
    return pod.namespace == RESERVATION_NAMESPACE and GROUP_LABEL in pod.labels


def groups_of(pods: Iterable[PodSpec], node: Node, prefix: str = PREFIX) -> tuple[Group, ...]:
    """The groups on a node, from all its pods."""
    listed = list(pods)
    found = {
        pod.labels[GROUP_LABEL]: Group(
            pod.labels[GROUP_LABEL],
            pod.annotations.get(RESERVED_GPU, ""),
            pod.annotations.get(f"{prefix}{RESERVATION_CONTAINER}{MODE}") or TIME_SLICING,
        )
        for pod in listed
        if is_reservation(pod)
    }
    for pod in listed:
        if is_reservation(pod):
            continue
        for group in group_ids(pod):
            if (known := found.get(group)) is not None:
                booked_mib = known.booked_mib + _ask(pod, node, prefix).mib(node.size_mib)
                found[group] = replace(known, booked_mib=booked_mib, pods=known.pods + 1)
    return tuple(found.values())


def group_ids(pod: PodSpec) -> list[str]:
    """The groups that a pod is on."""
    return [v for k, v in pod.labels.items() if k == GROUP_LABEL or k.startswith(f"{GROUP_LABEL}/")]


def vacated(pods: Sequence[PodSpec]) -> list[PodSpec]:
    """Reservation pods that keep a GPU for nobody."""
    used = {group for pod in pods if not is_reservation(pod) for group in group_ids(pod)}
    return [pod for pod in pods if is_reservation(pod) and pod.labels[GROUP_LABEL] not in used]
