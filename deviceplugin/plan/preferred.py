"""Which of the available shares a container should get (pure, linear in the number of IDs, no NVML).

Packs: GPUs that have one MPS daemon already, fewest idle GPUs touched, then best fit, then lowest index. An answer is a
wish: the kubelet ignores unknown IDs and fills up what is missing, and an error would fail the pod, so there is always
an answer.
"""

from collections.abc import Sequence

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.choice import Reach, fits, rank
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
    now = fits(view, node, accounts)
    reach = Reach(view, node, accounts) if view.on_sets else None

    def key(name: str) -> tuple[object, ...]:
        group = node.sets[name] if reach is not None else node.groups[name]
        way = reach.way(group) if reach is not None else 0
        return (name not in pinned, now[name][0] == 0, *rank(group, accounts, way))

    order = sorted(by_group, key=key)
    if isinstance(view.resource.memory, UnitMemory):
        # All units of a container lie on one GPU: the first that has enough of them; else let the kubelet choose.
        order = [name for name in order if len(by_group[name]) >= rest and pinned <= {name}][:1]
    for name in order:
        for identifier in by_group[name]:
            if len(chosen) == size:
                return chosen
            chosen.append(identifier)
    return chosen if len(chosen) == size or not order else []
