"""What a cluster's own scheduler makes of a pod's devices on one node: does it fit, why not, what to write (pure).

The rules are those of its NodeResourcesFit plugin: a node has room for a pod when, of every extended resource, what the
pods there ask for and what this one asks for do not pass what is allocatable. Other plugins of it (selectors, taints,
affinity) know the user's cluster and are left out.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deviceplugin.sim.objects.pods import PodSpec, Role
from mpsd.common.quantity import format_bytes
from mpsd.config.model import FixedMemory, FractionMemory, Resource, UnitMemory
from mpsd.gpu.model import MIB

UNSCHEDULABLE = "Unschedulable"
WHOLE_GPU = "nvidia.com/gpu"
"""The resource of NVIDIA's device plugin: whole GPUs, or what it was told to call so."""

_MEMORY_UNITS = {
    "aliyun.com/gpu-mem": 1024 * MIB,
    "nvidia.com/gpumem": MIB,
    "volcano.sh/vgpu-memory": MIB,
}
"""Resources of other GPU-sharing plugins that say how much memory is wanted, and what one of them is by default."""
_SHOWN_CHOICES = 4


@dataclass(frozen=True, slots=True)
class Offer:
    """What node status shows of one resource, and what the pods on the node ask for. `reason`: why not more."""

    allocatable: int = 0
    capacity: int = 0
    requested: int = 0
    reason: str = ""

    @property
    def free(self) -> int:
        return max(0, self.allocatable - self.requested)


@dataclass(frozen=True, slots=True)
class Lack:
    """A resource of which a pod asks for more than there is. `offered`: some device plugin of the node has the name.
    `meant`: the resource of this node whose name was probably meant, empty where none was."""

    resource: str
    asked: int
    offer: Offer
    offered: bool
    meant: str = ""


def requests(pod: PodSpec) -> dict[str, int]:
    """What a pod asks for as a whole: its containers and sidecars together, or one init container with the sidecars
    before it, whichever is more."""
    sidecars: Counter[str] = Counter()
    apps: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for container in pod.containers:
        wants = Counter(dict(container.resources))
        if container.role is Role.INIT:
            most |= sidecars + wants
        else:
            (sidecars if container.role is Role.SIDECAR else apps).update(wants)
    return dict(most | (sidecars + apps))


def requested(pods: Iterable[PodSpec]) -> dict[str, int]:
    """What these pods ask for together."""
    total: Counter[str] = Counter()
    for pod in pods:
        total.update(requests(pod))
    return dict(total)


def dealt(pod: PodSpec, resource: str, devices: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Devices by container, of as many as `requests` says: what an init container had comes free again."""
    left = list(devices)
    given = {}
    for container in pod.containers:
        if count := container.resources.get(resource, 0):
            given[container.name] = tuple(left[:count])
            if container.role is not Role.INIT:
                del left[:count]
    return given


def lacks(pod: PodSpec, offers: Mapping[str, Offer], ours: Sequence[Resource]) -> tuple[Lack, ...]:
    """What keeps a pod from this node; empty where it fits.

    Args:
        offers: by resource: of all device plugins of the node.
        ours: resources of the plugin under test.
    """
    found = []
    for name, count in requests(pod).items():
        offer = offers.get(name)
        if offer is None:
            found.append(Lack(name, count, Offer(), offered=False, meant=_meant(name, [r.name for r in ours])))
        elif count > offer.free:
            found.append(Lack(name, count, offer, offered=True))
    return tuple(found)


def message(pod: PodSpec, lacking: Sequence[Lack], ours: Sequence[Resource]) -> str:
    """Why a pod stays Pending, in the scheduler's words, and what its author can do. Its resource claims are among the
    reasons: no device plugin serves them."""
    reasons = [f"1 Insufficient {lack.resource}" for lack in lacking]
    if pod.claims:
        reasons.append("1 cannot allocate all claims")
    text = [f"0/1 nodes are available: {', '.join(reasons)}."]
    text += [_short(lack) for lack in lacking if lack.offered]
    strange = [lack for lack in lacking if not lack.offered]
    if strange:
        text.append(f"No device plugin of this node offers {_listed([lack.resource for lack in strange], 'or')}.")
        text += [f"For {lack.resource}, did you mean {lack.meant}?" for lack in strange if lack.meant]
        text += _instead(pod, [lack.resource for lack in strange if not lack.meant], ours)
    if pod.claims:
        text.append(
            f"Resource claims ({', '.join(pod.claims)}) are served by DRA drivers, and this node has none: gpufrac is "
            f"a device plugin; write a limit instead: {_choices(ours)}."
        )
    return " ".join(text)


def _short(lack: Lack) -> str:
    offer = lack.offer
    held = f", {offer.requested} held by pods" if offer.requested else ""
    why = f": {offer.reason}" if offer.reason else ""
    return (
        f"Asked for {lack.asked} {lack.resource}, free {offer.free} "
        f"({offer.allocatable} of {offer.capacity} allocatable{held}){why}."
    )


def _instead(pod: PodSpec, strange: Sequence[str], ours: Sequence[Resource]) -> list[str]:
    gpu = [name for name in strange if _is_gpu(name, ours)]
    text = []
    if gpu:
        sized = [
            f"{choice} in container {container.name}"
            for container in pod.containers
            for name in gpu
            if name in _MEMORY_UNITS and container.resources.get(name)
            if (choice := _of_size(container.resources[name] * _MEMORY_UNITS[name], ours))
        ]
        text.append(f"For a part of a GPU write instead {_listed(sized, 'and') or _choices(ours)}.")
        if WHOLE_GPU in gpu:
            text.append("Whole GPUs are for NVIDIA's device plugin to offer: --schedule simulates it, too.")
    if others := [name for name in strange if name not in gpu]:
        text.append(
            f"{_listed(others, 'and')} {'is' if len(others) == 1 else 'are'} for another device plugin to offer, and "
            "this node has none: to try the rest of the pod here, leave it out."
        )
    return text


def _is_gpu(name: str, ours: Sequence[Resource]) -> bool:
    """Whether a name is about GPUs, or looks like one of ours."""
    domain = name.partition("/")[0]
    return re.search(r"gpu|nvidia", name, re.IGNORECASE) is not None or any(
        r.name.startswith(f"{domain}/") for r in ours
    )


def _choices(ours: Sequence[Resource]) -> str:
    """The limits that this node knows, to write into a container."""
    shown = [_choice(resource) for resource in ours[:_SHOWN_CHOICES]]
    if len(ours) > _SHOWN_CHOICES:
        shown.append(f"one of {len(ours) - _SHOWN_CHOICES} more")
    return _listed(shown, "or") or "what a config offers"


def _choice(resource: Resource) -> str:
    match resource.memory:
        case FixedMemory(request_bytes=request):
            return f"{resource.name}: 1 ({format_bytes(request)})"
        case FractionMemory(fraction=fraction):
            return f"{resource.name}: 1 ({fraction:g} of a GPU's usable memory)"
        case UnitMemory(unit_bytes=unit):
            return f"{resource.name}: N (N x {format_bytes(unit)} of one GPU)"


def _of_size(size_bytes: int, ours: Sequence[Resource]) -> str:
    """What gives so much memory: units, or else the smallest share that is large enough. Empty where nothing does."""
    fixed = []
    for resource in ours:
        match resource.memory:
            case UnitMemory(unit_bytes=unit):
                return f"{resource.name}: {-(-size_bytes // unit)} (for {format_bytes(size_bytes)})"
            case FixedMemory(request_bytes=request) if request >= size_bytes:
                fixed.append((request, resource.name))
    smallest = min(fixed, default=None)
    return "" if smallest is None else f"{smallest[1]}: 1 ({format_bytes(smallest[0])})"


def _meant(name: str, known: Sequence[str]) -> str:
    """The known name that a misspelt one is nearest to; a name of another vendor is none."""
    flat = _flat(name)
    for candidate in known:
        if _flat(candidate) == flat or _flat(candidate.partition("/")[2]) == _flat(name.partition("/")[2]):
            return candidate
    domain, _, base = name.partition("/")
    same = {k.partition("/")[2]: k for k in known if k.startswith(f"{domain}/")}
    if same:
        return same.get(next(iter(difflib.get_close_matches(base, same, n=1, cutoff=0.75)), ""), "")
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.85)), "")


def _flat(name: str) -> str:
    return re.sub(r"[^a-z0-9/]", "", name.lower())


def _listed(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
