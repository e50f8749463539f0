"""What is listed: a list counts as new when its devices changed, or when it is to be sent once more."""

from deviceplugin.grants.lists import REST_S, Lists
from deviceplugin.plan.accounts import Accounts
from tests.builders import allocation, config, fixed, info, node, resource, units, uuid

NAME = "gpufrac.dev/a"
VIEW = node(config(resource("a", fixed(8)), resource("u", units())), info(0), info(1))


def test_a_list_has_a_new_generation_when_its_devices_changed() -> None:
    lists, accounts = Lists(), Accounts()
    assert lists.of(NAME).generation == 0
    assert lists.publish(VIEW, accounts, 0.0)
    assert lists.of(NAME).generation == 1
    assert not lists.publish(VIEW, accounts, 0.0)
    assert lists.of(NAME).generation == 1


def test_a_resource_that_is_gone_lists_nothing() -> None:
    lists, accounts = Lists(), Accounts()
    lists.publish(VIEW, accounts, 0.0)
    without = node(config(resource("u", units())), info(0), info(1))
    assert lists.publish(without, accounts, 0.0)
    assert lists.of(NAME).advertisement.devices == ()
    assert not lists.publish(without, accounts, 0.0)


def test_resent_lists_are_the_same_ones() -> None:
    lists = Lists()
    lists.publish(VIEW, Accounts(), 0.0)
    before = dict(lists.by_resource)
    lists.resend()
    assert {name: now.advertisement for name, now in lists.by_resource.items()} == {
        name: old.advertisement for name, old in before.items()
    }
    assert all(now.generation == before[name].generation + 1 for name, now in lists.by_resource.items())


def test_an_offer_that_moved_away_has_to_come_back_for_the_pods_next_container() -> None:
    lists = Lists()
    lists.publish(VIEW, Accounts(), 0.0)
    offered = lists.of("gpufrac.dev/u").advertisement.offer
    other = uuid(1) if offered == uuid(0) else uuid(0)
    assert not lists.granted(allocation("u", f"{offered}::0", gib=1), 1.0)
    assert lists.granted(allocation("u", f"{other}::0", gib=1), 1.0)
    lists.publish(VIEW, Accounts(), 1.0)
    assert lists.of("gpufrac.dev/u").advertisement.offer == other
    assert 1.0 + REST_S in lists.changes_s(1.0)
