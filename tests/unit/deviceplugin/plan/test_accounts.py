"""Sums of what is held: each share once, on each of its GPUs."""

import pytest

from deviceplugin.plan.accounts import Accounts
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
