"""Which of the available shares a container should get (pure, linear in the number of IDs, no NVML).

Packs: fewest idle GPUs touched, then best fit, then lowest index. An answer is a wish: the kubelet ignores unknown IDs
and fills up what is missing, and an error would fail the pod, so there is always an answer.
"""

from collections.abc import Sequence

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import free_fit
from deviceplugin.plan.model import NodeView, ResourceView
from mpsd.config.model import UnitMemory


def preferred(
    view: ResourceView,
    node: NodeView,
    accounts: Accounts,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> list[str]:
    """The IDs to take: `must_include` first, then the rest of `size`. Empty means no preference."""
    chosen = list(must_include)
    if size <= len(chosen):
        return chosen[: max(size, 0)]
    by_gpu: dict[str, list[str]] = {}
    gpu_of = view.gpu_of.get
    taken = set(chosen)
    for identifier in available:
        uuid = gpu_of(identifier)
        if uuid is not None and identifier not in taken:
            bucket = by_gpu.get(uuid)
            if bucket is None:
                by_gpu[uuid] = [identifier]
            else:
                bucket.append(identifier)
    rest = size - len(chosen)
    pinned = {gpu_of(identifier) for identifier in chosen}
    order = sorted(by_gpu, key=lambda uuid: (uuid not in pinned, *_rank(view, node, accounts, uuid)))
    if isinstance(view.resource.memory, UnitMemory):
        # All units of a container lie on one GPU: the first that has enough of them; else let the kubelet choose.
        order = [uuid for uuid in order if len(by_gpu[uuid]) >= rest and pinned <= {uuid}][:1]
    for uuid in order:
        for identifier in by_gpu[uuid]:
            if len(chosen) == size:
                return chosen
            chosen.append(identifier)
    return chosen if len(chosen) == size or not order else []


def _rank(view: ResourceView, node: NodeView, accounts: Accounts, uuid: str) -> tuple[bool, bool, int, int]:
    """Smaller is better: fits at all, already in use, least memory left, index."""
    gpu = node.gpus[uuid]
    fit, _ = free_fit(view, gpu, node, accounts)
    free_bytes = gpu.usable_bytes - accounts.granted_bytes(uuid)
    return (fit == 0, not accounts.on_gpu(uuid), free_bytes, gpu.index)
