"""Which GPUs one daemon owns: as small as what is granted allows."""

import itertools
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from mpsd.config.model import AnnotationsConfig, Domains, Enforcement, GpuSelection, NodeConfig
from mpsd.gpu.model import GpuInfo
from mpsd.shares.domains import Domain, domain_of, domains, node_span
from mpsd.shares.groups import Group, is_set_name, set_name

GIB = 1 << 30
ALL = tuple(f"G{n}" for n in range(6))
LONE = tuple(Group(gpu, (gpu,)) for gpu in ALL)

Span = tuple[str, ...]
SOME = st.lists(st.sampled_from(ALL), min_size=1, max_size=3, unique=True).map(tuple)
SPANS = st.lists(SOME, max_size=4)
GROUPS = st.lists(st.integers(0, 2), min_size=len(ALL), max_size=len(ALL))
"""In which of two declared groups each GPU is, 0 for none."""


def node(membership: Sequence[int], *, shared: bool) -> tuple[Group, ...]:
    """Groups as `groups` gives them."""
    declared = []
    for number in (1, 2):
        members = tuple(gpu for gpu, group in zip(ALL, membership, strict=True) if group == number)
        if members:
            declared.append(Group(f"g{number}", members, declared=True, shared=shared))
    inside = {gpu for group in declared for gpu in group.gpus}
    return (*declared, *(group for group in LONE if shared or group.name not in inside))


def kept_of(spans: Sequence[Span]) -> dict[str, Span]:
    """Daemons that are in use: no GPU is of two."""
    found: dict[str, Span] = {}
    for gpus in spans:
        if len(gpus) > 1 and all(set(gpus).isdisjoint(others) for others in found.values()):
            found[set_name(gpus)] = gpus
    return found


def joined(parts: Sequence[Sequence[str]]) -> set[frozenset[str]]:
    """GPUs that these hold together, found another way: until nothing changes any more."""
    found = {frozenset(part) for part in parts}
    while overlap := next(((a, b) for a, b in itertools.combinations(found, 2) if a & b), None):
        found -= set(overlap)
        found.add(overlap[0] | overlap[1])
    return found


@given(membership=GROUPS, shared=st.booleans(), spans=SPANS, used=SPANS)
def test_each_gpu_is_of_one_domain_which_is_as_large_as_it_must_be(
    membership: Sequence[int], shared: bool, spans: list[Span], used: list[Span]
) -> None:
    groups, kept = node(membership, shared=shared), kept_of(used)
    found = domains(groups, spans, kept)
    assert sorted(gpu for domain in found for gpu in domain.gpus) == sorted(ALL)
    parts = [*(group.gpus for group in groups), *spans, *kept.values()]
    assert {frozenset(domain.gpus) for domain in found} == joined(parts)
    assert len({domain.name for domain in found}) == len(found)
    for group in groups:
        assert [domain for domain in found if group in domain.groups] == [
            domain for domain in found if set(group.gpus) <= set(domain.gpus)
        ]


@given(membership=GROUPS, shared=st.booleans(), spans=SPANS, used=SPANS, data=st.data())
def test_the_order_in_which_they_are_told_means_nothing(
    membership: Sequence[int], shared: bool, spans: list[Span], used: list[Span], data: st.DataObject
) -> None:
    groups, kept = node(membership, shared=shared), kept_of(used)
    found = domains(groups, spans, kept)
    other_spans = [tuple(data.draw(st.permutations(span))) for span in data.draw(st.permutations(spans))]
    other_kept = dict(data.draw(st.permutations([*kept.items()])))
    assert domains(groups, other_spans, other_kept) == found


@given(membership=GROUPS, spans=SPANS, more=SOME)
def test_names_last_while_the_gpus_are_the_same(membership: Sequence[int], spans: list[Span], more: Span) -> None:
    groups = node(membership, shared=True)

    def names(found: Sequence[Domain]) -> Mapping[frozenset[str], str]:
        return {frozenset(domain.gpus): domain.name for domain in found}

    before, after = names(domains(groups, spans)), names(domains(groups, [*spans, more]))
    assert all(after[gpus] == before[gpus] for gpus in before.keys() & after.keys())
    for gpus, name in after.items():
        if len(gpus) == 1 and not any(group.declared and set(group.gpus) == gpus for group in groups):
            assert name in gpus
        assert is_set_name(name) or {name} == gpus or any(group.name == name for group in groups)


def test_a_daemon_in_use_keeps_its_name_and_its_order() -> None:
    kept = {"old": ("G2", "G0")}
    by_gpu = domain_of(domains(LONE, (), kept))
    assert (by_gpu["G0"].name, by_gpu["G0"].gpus) == ("old", ("G2", "G0"))
    assert by_gpu["G1"] == Domain("G1", ("G1",), (LONE[1],))
    grown = domain_of(domains(LONE, [("G0", "G1")], kept))["G0"]
    assert (grown.name, grown.gpus) == (set_name(("G0", "G1", "G2")), ("G0", "G1", "G2"))


def test_a_declared_group_is_a_domain_by_its_name_until_more_is_needed() -> None:
    pair = Group("pair", ("G1", "G0"), declared=True, shared=True)
    groups = (pair, *LONE)
    first = domains(groups)[0]
    assert (first.name, first.gpus, first.has_name) == ("pair", ("G1", "G0"), True)
    assert {group.name for group in first.groups} == {"pair", "G0", "G1"}
    grown = domains(groups, [("G0", "G5")])[0]
    assert (is_set_name(grown.name), grown.has_name) == (True, False)
    assert pair in grown.groups


def test_a_group_that_waits_joins_nothing() -> None:
    waits = Group("pair", ("G0", "G1"), declared=True, objection="allocations must end first")
    found = domains((waits, *LONE[:2]))
    assert [(domain.name, domain.objection != "") for domain in found] == [
        ("pair", True),
        ("G0", False),
        ("G1", False),
    ]
    assert {gpu: domain.name for gpu, domain in domain_of(found).items()} == {"G0": "G0", "G1": "G1"}


def test_the_node_together_is_what_annotated_pods_may_use() -> None:
    infos = [GpuInfo(uuid=f"G{n}", index=n, name="", memory_total_bytes=80 * GIB, mig_enabled=n == 2) for n in range(4)]

    def span(domain: Domains, **selection: object) -> tuple[str, ...]:
        annotations = AnnotationsConfig(
            gpus=GpuSelection(**selection),  # type: ignore[arg-type]
            domains=domain,
            enforcement=Enforcement.NONE,
        )
        return node_span(NodeConfig(resources=(), annotations=annotations), infos)

    assert span(Domains.AUTO) == ()
    assert span(Domains.NODE) == ("G0", "G1", "G3")
    assert span(Domains.NODE, exclude=(1,)) == ("G0", "G3")
    assert node_span(NodeConfig(resources=()), infos) == ()
