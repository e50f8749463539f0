"""The pairs table: what may live together on the same GPUs does, whoever comes first."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from deviceplugin.plan.allocation import Allocation, ContainerAsk, Refusal
from deviceplugin.plan.reasons import OfferCode
from mpsd.config.model import GIB, Domains
from mpsd.gpu.model import Mode
from tests.builders import uuid
from tests.domainnode import DomainNode, annotated, ask

ALL = tuple(uuid(index) for index in range(2))


class Kind(NamedTuple):
    """Of a container. `large`: two of a kind have limits of more than a GPU has together, where it may borrow."""

    gpus: int
    burst: bool
    large: bool

    def ask(self, pod: str, mode: Mode) -> ContainerAsk:
        request_gib, limit_gib = (30, 60) if self.large else (8, 16)
        return ask(pod, range(self.gpus), mode, request_gib, limit_gib if self.burst else None)

    def __str__(self) -> str:
        return f"{self.gpus}{'burst' if self.burst else 'fixed'}"


KINDS = [(gpus, burst) for gpus in (1, 2) for burst in (False, True)]
PAIRS = [
    pytest.param(Kind(*a, large), Kind(*b, large), mode, id=f"{Kind(*a, large)}-{Kind(*b, large)}-{size}-{mode}")
    for a, b in itertools.product(KINDS, KINDS)
    for large, size in ((False, "small"), (True, "large"))
    for mode in Mode
]
Make = Callable[[Domains], DomainNode]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made = []

    def one(domains: Domains) -> DomainNode:
        node = DomainNode(str(tmp_path), annotated(domains), len(ALL))
        made.append(node)
        return node

    yield one
    for node in made:
        node.close()


def granted(node: DomainNode, wanted: ContainerAsk) -> Allocation:
    outcome = node.create(wanted)
    assert isinstance(outcome, Allocation), outcome
    assert (outcome.request_bytes, outcome.limit_bytes) == (wanted.request_bytes, wanted.limit_bytes)
    assert outcome.soft_bytes == wanted.request_bytes, "the driver is to protect what it asks for"
    return outcome


def both_run(node: DomainNode) -> None:
    node.follow()
    assert node.may_start("first")
    assert node.may_start("second")


@pytest.mark.parametrize(("first", "second", "mode"), PAIRS)
def test_both_live_together_while_no_daemon_is_in_use(make: Make, first: Kind, second: Kind, mode: Mode) -> None:
    node = make(Domains.AUTO)
    for name, kind in (("first", first), ("second", second)):
        granted(node, kind.ask(name, mode))
        node.follow()
    both_run(node)
    spans = first.gpus > 1 or second.gpus > 1
    assert sorted(node.mpsd.daemons.values()) == ([ALL] if spans else [(gpu,) for gpu in ALL])
    for name in ("first", "second"):
        node.delete(name)
        node.follow()
    assert node.mpsd.daemons == {gpu: (gpu,) for gpu in ALL}


@pytest.mark.parametrize(("first", "second", "mode"), PAIRS)
def test_where_a_client_keeps_its_daemon_the_second_waits_for_it_at_most(
    make: Make, first: Kind, second: Kind, mode: Mode
) -> None:
    node = make(Domains.AUTO)
    granted(node, first.ask("first", mode))
    node.follow()
    node.begin_client("first")
    outcome = node.create(second.ask("second", mode))
    in_the_way = second.gpus > first.gpus
    overcommitted = (first.burst or second.burst) and (
        sum(kind.ask("", mode).limit_bytes for kind in (first, second)) > 79 * GIB
    )
    if in_the_way and (mode is Mode.SM_SHARING or overcommitted):
        assert isinstance(outcome, Refusal)
        wanted = OfferCode.DAEMONS_IN_USE if mode is Mode.SM_SHARING else OfferCode.NOT_GUARANTEED
        assert outcome.code == wanted
        assert "ns/first/main (since " in outcome.message
        node.end_client("first")
        outcome = granted(node, second.ask("second", mode))
    assert isinstance(outcome, Allocation)
    assert outcome.soft_bytes == outcome.request_bytes
    both_run(node)


@pytest.mark.parametrize(("first", "second", "mode"), PAIRS)
def test_a_client_that_comes_first_after_all_keeps_nobody_else_waiting(
    make: Make, first: Kind, second: Kind, mode: Mode
) -> None:
    """The second is granted before mpsd tells of the first one's client. It must not keep GPUs that it can't use."""
    node = make(Domains.AUTO)
    granted(node, first.ask("first", mode))
    node.follow()
    node.begin_client("first", told=False)
    granted(node, second.ask("second", mode))
    node.follow()
    outcome = node.create(second.ask("second", mode))
    node.follow()
    if isinstance(outcome, Allocation):
        both_run(node)
        return
    assert "ns/first/main (since " in outcome.message
    assert [a.container and a.container.pod for a in node.broker.allocations()] == ["first"]
    granted(node, ask("third", (1,), mode, 8))
    node.follow()
    assert node.may_start("third"), "on the other GPU"
    assert node.may_start("first")
    node.end_client("first")
    granted(node, second.ask("second", mode))
    both_run(node)


@pytest.mark.parametrize(("first", "second", "mode"), PAIRS)
def test_with_one_domain_for_the_node_nobody_waits(make: Make, first: Kind, second: Kind, mode: Mode) -> None:
    node = make(Domains.NODE)
    assert list(node.mpsd.daemons.values()) == [ALL]
    granted(node, first.ask("first", mode))
    node.follow()
    node.begin_client("first")
    granted(node, second.ask("second", mode))
    both_run(node)
    assert list(node.mpsd.daemons.values()) == [ALL]


@pytest.mark.parametrize(("first", "second"), [*itertools.product(KINDS, KINDS)], ids=str)
def test_two_modes_are_never_together_and_the_first_one_is_said(
    make: Make, first: tuple[int, bool], second: tuple[int, bool]
) -> None:
    node = make(Domains.AUTO)
    granted(node, Kind(*first, large=False).ask("first", Mode.TIME_SLICING))
    outcome = node.create(Kind(*second, large=False).ask("second", Mode.SM_SHARING))
    assert isinstance(outcome, Refusal)
    assert outcome.code == OfferCode.MODE_BOUND
    assert "bound to time-slicing" in outcome.message
