"""One consistent picture of the node, for who shows it or checks it (values)."""

from collections.abc import Mapping

import msgspec

from deviceplugin.grants.drains import Drain
from deviceplugin.grants.holders.holders import Holders
from deviceplugin.grants.holders.model import Holder
from deviceplugin.grants.lists import Published
from deviceplugin.grants.nodestate import NodeState
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.model import NodeView
from mpsd.gpu.model import Mode


class Held(msgspec.Struct, frozen=True):
    """What is held on one GPU: the sums of requests and of limits, the mode (None: idle), and by how many."""

    granted_bytes: int
    limit_bytes: int
    mode: Mode | None
    allocations: int


class Inspection(msgspec.Struct, frozen=True):
    """What is known, listed, granted and held.

    `lists_are_new`: all that is known is in the lists. `allocations`: all live ones, oldest first. `holders`: who holds
    one now, by its key; `pods`: the pods that were seen to, by UID, the newest last; `vacated`: keys of those that
    nobody holds any more; `checkpoint_only`: of those that the kubelet's checkpoint alone shows. `held` and `drained`
    are by GPU.
    """

    node: NodeState
    view: NodeView
    lists: Mapping[str, Published]
    lists_are_new: bool
    allocations: tuple[Allocation, ...]
    holders: Mapping[str, Holder | None]
    pods: Mapping[str, Mapping[str, Holder]]
    vacated: frozenset[str]
    checkpoint_only: frozenset[str]
    held: Mapping[str, Held]
    drained: Mapping[str, Drain]


def inspect(
    node: NodeState,
    view: NodeView,
    lists: Mapping[str, Published],
    accounts: Accounts,
    holders: Holders,
    drained: Mapping[str, Drain],
    *,
    lists_are_new: bool,
) -> Inspection:
    """The picture of these, which their owner keeps still meanwhile."""
    return Inspection(
        node=node,
        view=view,
        lists=dict(lists),
        lists_are_new=lists_are_new,
        allocations=tuple(accounts),
        holders={a.key: holders.holder(a) for a in accounts},
        pods={a.key: dict(holders.pods(a)) for a in accounts},
        vacated=frozenset(a.key for a in accounts if accounts.is_vacated(a.key)),
        checkpoint_only=frozenset(holders.shares.checkpoint_only()),
        held={uuid: _held(accounts, uuid) for uuid in view.gpus},
        drained=drained,
    )


def _held(accounts: Accounts, gpu: str) -> Held:
    return Held(accounts.granted_bytes(gpu), accounts.limit_bytes(gpu), accounts.mode(gpu), len(accounts.on_gpu(gpu)))
