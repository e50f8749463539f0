"""Sums of what is held: each share once, on each of its GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import Allocation, ContainerRef
from deviceplugin.plan.ids import device_id
from mpsd.config.model import GIB
from tests.builders import allocation, uuid

FIRST, SECOND = device_id(uuid(0), 0), device_id(uuid(0), 1)


def test_shares_that_two_containers_of_a_pod_have_count_once_until_both_are_gone() -> None:
    accounts = Accounts()
    init, main = allocation("u", FIRST, gib=1), allocation("u", FIRST, SECOND, gib=1, generation=2)
    accounts.add(init)
    accounts.add(main)
    assert (accounts.granted_bytes(uuid(0)), len(accounts)) == (2 * GIB, 2)
    accounts.remove(main.key)
    assert accounts.granted_bytes(uuid(0)) == GIB
    assert accounts.is_held(init.resource, FIRST)
    assert not accounts.is_held(init.resource, SECOND)
    accounts.remove(init.key)
    assert (accounts.granted_bytes(uuid(0)), len(accounts), accounts.mode(uuid(0))) == (0, 0, None)


def test_a_share_of_a_group_counts_on_each_of_its_gpus() -> None:
    accounts = Accounts()
    accounts.add(allocation("p", "pair::0", gpus=(uuid(0), uuid(1))))
    assert [accounts.granted_bytes(uuid(n)) for n in (0, 1, 2)] == [8 * GIB, 8 * GIB, 0]


def test_who_is_not_there_may_be_removed_and_nobody_is_added_twice() -> None:
    accounts = Accounts()
    held = allocation("a", FIRST)
    accounts.remove(held.key)
    accounts.add(held)
    with pytest.raises(ValueError, match=held.key):
        accounts.add(held)


def turn(name: str, gib: int, generation: int, *after: str, gpus: tuple[int, ...] = (0,)) -> Allocation:
    """What a container of one annotated pod holds; its key is its name."""
    return structs.replace(
        allocation("a", FIRST, gib=gib),
        key=name,
        device_ids=(f"uid/{name}",),
        resource="annotations",
        generation=generation,
        gpus=tuple(map(uuid, gpus)),
        after=after,
        container=ContainerRef(namespace="ns", pod="p", pod_uid="uid", container=name),
    )


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_a_pod_counts_what_its_containers_could_hold_at_one_moment(coming: list[int], going: list[int]) -> None:
    """Init containers of 30 and 50 GiB, then three others together; in whatever order records are read and go."""
    last = ("j",)
    held = [
        turn("i", 30, 1, gpus=(0, 1)),
        turn("j", 50, 2, "i"),
        turn("a", 10, 3, *last),
        turn("b", 25, 4, *last),
        turn("c", 10, 5, *last),
    ]
    accounts = Accounts()
    for index in coming:
        accounts.add(held[index])
    assert [accounts.granted_bytes(uuid(gpu)) for gpu in (0, 1)] == [50 * GIB, 30 * GIB]
    assert accounts.limit_bytes(uuid(0)) == accounts.booked_bytes(uuid(0)) == 50 * GIB
    assert accounts.clients(uuid(0)) == 3
    assert accounts.without({"i", "j"}).granted_bytes(uuid(0)) == 45 * GIB
    accounts.replace(structs.replace(held[1], limit_bytes=60 * GIB))
    assert accounts.limit_bytes(uuid(0)) == 60 * GIB
    for index in going:
        accounts.remove(held[index].key)
    assert [accounts.granted_bytes(uuid(gpu)) for gpu in (0, 1)] == [0, 0]
    assert not accounts.of_pod("uid")


def test_who_took_a_turn_is_known() -> None:
    accounts = Accounts()
    first, second = turn("i", 30, 1), turn("a", 10, 2, "i")
    accounts.add(first)
    accounts.add(second)
    assert accounts.takers(first) == [second]
    assert accounts.takers(second) == []
    assert second.container is not None
    assert accounts.of_container(second.container) == second


def test_daemons_stay_as_they_are_while_it_is_planned_who_takes_a_turn() -> None:
    accounts = Accounts()
    accounts.add(turn("i", 30, 1, gpus=(0, 1)))
    assert accounts.without({"i"}).spans() == accounts.spans() == [(uuid(0), uuid(1))]
    assert accounts.without({"i"}, undone={"i"}).spans() == []
