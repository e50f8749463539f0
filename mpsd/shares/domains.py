"""Which GPUs one MPS daemon owns (pure). A GPU that nobody uses together with others has one of its own.

A client talks to one daemon, so the GPUs of a container that needs one are of one domain. It is as large as the live
allocations need it, and no larger: whoever shares a daemon shares its end. One that is in use stays as it is.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mpsd.config.model import Domains, NodeConfig
from mpsd.config.numbering import is_stranger
from mpsd.gpu.model import GpuInfo
from mpsd.shares.groups import Group, set_name
from mpsd.shares.sizes import for_annotated, usable_bytes


class Domain(msgspec.Struct, frozen=True):
    """`gpus` in the daemon's order: its ordinals. `groups`: what shares may lie on within it. `objection` says why it
    can't be served now, empty when it can."""

    name: str
    gpus: tuple[str, ...]
    groups: tuple[Group, ...] = ()
    objection: str = ""

    @property
    def has_name(self) -> bool:
        """Whether it is a declared group and nothing else."""
        return any(group.declared and group.name == self.name for group in self.groups)


def domains(
    groups: Sequence[Group], spans: Iterable[Sequence[str]] = (), kept: Mapping[str, Sequence[str]] | None = None
) -> tuple[Domain, ...]:
    """Every domain of the node, in the order of its groups.

    Args:
        groups: all of the node. One with an objection is no reason to join GPUs, and has none of its own but those that
            nobody else has.
        spans: GPUs that somebody needs together.
        kept: daemons in use that own several GPUs: name -> their GPUs, in their order.
    """
    kept = kept or {}
    served = [group for group in groups if not group.objection]
    found = []
    for part in connected((*(group.gpus for group in served), *spans, *kept.values())):
        held = tuple(group for group in groups if group.objection and set(group.gpus) == part)  # as they were granted
        inside = tuple(group for group in served if part.issuperset(group.gpus))
        name, order = _named(part, (*inside, *held), kept)
        objection = next((group.objection for group in held if group.name == name), "")
        found.append(Domain(name, order, inside or held, objection))
    names = {domain.name for domain in found}
    waiting = (group for group in groups if group.objection and group.name not in names)
    found += [Domain(group.name, group.gpus, (group,), group.objection) for group in waiting]
    place = {group.name: n for n, group in reversed(list(enumerate(groups)))}
    return tuple(
        sorted(found, key=lambda domain: min((place[group.name] for group in domain.groups), default=len(place)))
    )


def connected(spans: Iterable[Sequence[str]]) -> list[frozenset[str]]:
    """The GPUs of all spans, those together that spans connect."""
    parts: dict[str, frozenset[str]] = {}
    for gpus in spans:
        joined = frozenset(gpus).union(*(parts[gpu] for gpu in gpus if gpu in parts))
        parts.update(dict.fromkeys(joined, joined))
    return list(dict.fromkeys(parts.values()))


def _named(
    gpus: frozenset[str], inside: Sequence[Group], kept: Mapping[str, Sequence[str]]
) -> tuple[str, tuple[str, ...]]:
    """The name of a domain, and its GPUs in order. Names last as long as daemons do."""
    for name, order in kept.items():
        if set(order) == gpus:
            return name, tuple(order)
    for group in inside:
        if set(group.gpus) == gpus:
            return group.name, group.gpus
    return set_name(gpus), tuple(sorted(gpus))


def domain_of(domains: Iterable[Domain]) -> dict[str, Domain]:
    """The domain of each GPU. One that is served comes before one that waits."""
    owners: dict[str, Domain] = {}
    for domain in domains:
        for uuid in domain.gpus:
            if uuid not in owners or (owners[uuid].objection and not domain.objection):
                owners[uuid] = domain
    return owners


def node_span(config: NodeConfig, infos: Sequence[GpuInfo]) -> tuple[str, ...]:
    """The GPUs that `annotations.domains: node` joins from the start: all that annotated pods may use."""
    if config.annotations is None or config.annotations.domains is not Domains.NODE:
        return ()
    return tuple(
        info.uuid
        for info in infos
        if for_annotated(config, [info])
        and not info.mig_enabled
        and not is_stranger(config, info)
        and usable_bytes(info, config.memory_reserve_bytes)
    )
