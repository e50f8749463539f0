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
    by_group: dict[str, list[str]] = {}
    group_of = view.group_of.get
    taken = set(chosen)
    for identifier in available:
        name = group_of(identifier)
        if name is not None and identifier not in taken:
            bucket = by_group.get(name)
            if bucket is None:
                by_group[name] = [identifier]
            else:
                bucket.append(identifier)
    rest = size - len(chosen)
    pinned = {group_of(identifier) for identifier in chosen}
    order = sorted(by_group, key=lambda name: (name not in pinned, *_rank(view, node, accounts, name)))
    if isinstance(view.resource.memory, UnitMemory):
        # All units of a container lie on one GPU: the first that has enough of them; else let the kubelet choose.
        order = [name for name in order if len(by_group[name]) >= rest and pinned <= {name}][:1]
    for name in order:
        for identifier in by_group[name]:
            if len(chosen) == size:
                return chosen
            chosen.append(identifier)
    return chosen if len(chosen) == size or not order else []


def _rank(view: ResourceView, node: NodeView, accounts: Accounts, name: str) -> tuple[bool, int, int, int]:
    """Smaller is better: fits at all, idle GPUs touched, least memory left, index."""
    group = node.groups[name]
    fit, _ = free_fit(view, group, accounts)
    idle = sum(1 for gpu in group.members if not accounts.on_gpu(gpu.uuid))
    free_bytes = min(gpu.usable_bytes - accounts.granted_bytes(gpu.uuid) for gpu in group.members)
    return (fit == 0, idle, free_bytes, min(gpu.index for gpu in group.members))
