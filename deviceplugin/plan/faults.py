"""Who is hit when a process of a container makes a fatal fault on a GPU (pure).

In sm-sharing the contexts of all clients are one server's. A fault ends the clients on its GPU, and on every GPU that
clients of several connect with it; other GPUs of the same MPS daemon go on (NVIDIA's documentation of MPS). In
time-slicing each process has contexts of its own, and nobody else is hit.

That an MPS daemon or server ends is another matter: it ends the sm-sharing containers on all GPUs of its domain, and
takes from time-slicing ones only that borrowed memory is taken back.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from deviceplugin.plan.allocation import Allocation
from mpsd.gpu.model import Mode
from mpsd.shares.domains import connected


class FaultDomain(msgspec.Struct, frozen=True, rename="camel"):
    """Of one allocation. `id`: see `fault_id`. `gpus`: UUIDs of those on which a fault hits it, its own among them, in
    order. `containers`: how many are hit together, itself included; one container may have several allocations."""

    id: str
    gpus: tuple[str, ...]
    containers: int


def fault_id(allocation: Allocation) -> str:
    """The same for the whole life of an allocation, whatever comes and goes beside it.

    In sm-sharing the UUIDs of its GPUs by comma, in order: whoever has one of them in its own is hit together with it,
    always, and others only while containers on several GPUs connect them. In time-slicing the allocation's key, which
    nobody else has.
    """
    return ",".join(sorted(allocation.gpus)) if allocation.mode is Mode.SM_SHARING else allocation.key


def fault_domains(allocations: Iterable[Allocation]) -> dict[str, FaultDomain]:
    """The fault domain of each live allocation, by its key."""
    allocations = tuple(allocations)
    sharing = [allocation for allocation in allocations if allocation.mode is Mode.SM_SHARING]
    part_of = {gpu: part for part in connected(a.gpus for a in sharing) for gpu in part}
    containers = Counter(part_of[allocation.gpus[0]] for allocation in sharing)
    found = {}
    for allocation in allocations:
        gpus, count = frozenset(allocation.gpus), 1
        if allocation.mode is Mode.SM_SHARING:
            gpus = part_of[allocation.gpus[0]]
            count = containers[gpus]
        found[allocation.key] = FaultDomain(fault_id(allocation), tuple(sorted(gpus)), count)
    return found
