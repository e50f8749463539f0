"""Which MPS daemon a container of given GPUs can reach, and who is in the way where there is none (pure).

A client talks to one daemon. So where the GPUs of a container have several, these must make way for one that owns all
of them, which they do while nobody uses them.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.model import GpuView, NodeView
from deviceplugin.plan.reasons import OfferCode
from mpsd.common.reason import Reason
from mpsd.gpu.model import Mode
from mpsd.shares.domains import Domain, domain_of, domains

_NAMED = 3
"""How many of those in the way a text names."""


def domain_by_gpu(node: NodeView, accounts: Accounts) -> dict[str, Domain]:
    """The domain of each GPU, as what is granted has it."""
    groups = [view.group for view in node.groups.values() if view.unlisted is None]
    there = {gpu.uuid for gpu in node.gpus.values() if gpu.lost is None}
    spans = [
        *(span for span in accounts.spans() if there.issuperset(span)),
        *((node.together,) if node.together else ()),
    ]
    return domain_of(domains(groups, spans, node.daemons))


def joining_objection(
    gpus: Sequence[GpuView],
    node: NodeView,
    accounts: Accounts,
    by_gpu: Mapping[str, Domain] | None = None,
    otherwise: str = "name GPUs that nobody uses, or set `annotations.domains: node`",
) -> Reason | None:
    """Why no one daemon can serve these GPUs now, None when one does or can.

    Args:
        by_gpu: of `domain_by_gpu`, where it is at hand.
        otherwise: what to do instead of waiting.
    """
    by_gpu = domain_by_gpu(node, accounts) if by_gpu is None else by_gpu
    concerned = {by_gpu[gpu.uuid].name: by_gpu[gpu.uuid] for gpu in gpus if gpu.uuid in by_gpu}
    named = {gpu.uuid for gpu in gpus}
    for view in node.groups.values():
        own = view.group.declared and not view.group.shared and not view.unlisted
        if own and not named.isdisjoint(view.gpus) and not named.issuperset(view.gpus):
            return _part_of_group(gpus, view.label, view.name)
    if len(concerned) == 1:
        return None
    members = [node.gpus[uuid] for domain in concerned.values() for uuid in domain.gpus if uuid in node.gpus]
    in_the_way = _in_the_way(members, node, accounts)
    if not in_the_way:
        return None
    return Reason(
        OfferCode.DAEMONS_IN_USE,
        f"its {len(gpus)} GPUs ({_indices(gpus)}) have {len(concerned)} MPS daemons, and it needs one for all of them, "
        f"which takes their place as soon as nobody uses them: {_named(in_the_way)}: wait for that, {otherwise}",
    )


def _part_of_group(gpus: Sequence[GpuView], label: str, name: str) -> Reason:
    are = "are" if len(gpus) > 1 else "is"
    return Reason(
        OfferCode.OWN_GROUP,
        f"GPU {_indices(gpus)} {are} only a part of {label}, whose MPS daemon is for all of it: name all of its GPUs, "
        f"or have it declared with `members: shared` (gpus.groups.{name})",
    )


def _in_the_way(members: Iterable[GpuView], node: NodeView, accounts: Accounts) -> list[str]:
    """Who keeps the daemons of these GPUs from being replaced, the oldest allocation first."""
    found: dict[str, Allocation] = {}
    others: dict[str, None] = {}
    for gpu in members:
        live = accounts.on_gpu(gpu.uuid)
        found.update((key, a) for key, a in live.items() if a.needs_daemon and a.group and not _can_move(a, gpu, node))
        for client in gpu.clients:
            allocation = live.get(client.allocation_key or "")
            if allocation is not None and allocation.needs_daemon:
                found[allocation.key] = allocation
            elif client.mps:
                others[f"process {client.pid}{f' ({client.command})' if client.command else ''}"] = None
    return [_label(a) for a in sorted(found.values(), key=lambda a: a.created_unix_s)] + list(others)


def _can_move(allocation: Allocation, gpu: GpuView, node: NodeView) -> bool:
    """Whether its container, while it has no client, gets another daemon by the directory that it has mounted."""
    return gpu.protocol == 3 and node.movable and (node.linked or allocation.mode is Mode.TIME_SLICING)


def _label(allocation: Allocation) -> str:
    owner = str(allocation.container or f"{allocation.resource} (allocation {allocation.key})")
    if not allocation.created_unix_s:
        return owner
    return f"{owner} (since {datetime.fromtimestamp(allocation.created_unix_s, UTC):%Y-%m-%d %H:%M:%SZ})"


def _named(in_the_way: Sequence[str]) -> str:
    more = len(in_the_way) - _NAMED
    text = ", ".join(in_the_way[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{text} {'do' if len(in_the_way) > 1 else 'does'}"


def _indices(gpus: Iterable[GpuView]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)
