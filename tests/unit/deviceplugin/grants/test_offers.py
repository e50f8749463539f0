"""Which GPU's units are on offer, over time."""

from pathlib import Path

from deviceplugin.grants.broker import Broker
from deviceplugin.grants.lists import REST_LONGEST_S, REST_S, Offers
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.ids import device_id
from tests.builders import uuid
from tests.world import World

UNITS = "gpufrac.dev/u"


def test_any_grant_keeps_an_offer_where_it_is_and_its_own_where_that_lies() -> None:
    offers = Offers()
    assert offers.kept("u", "gpu-0", 0) is None
    offers.granted("a", "gpu-0", 10)
    assert offers.kept("u", "gpu-0", 10 + REST_S / 2) == "gpu-0"
    offers.granted("u", "gpu-1", 10.5)
    assert offers.kept("u", "gpu-0", 11) == "gpu-1"
    assert offers.next_s(11) == [10.5 + REST_S, 10.5 + REST_S]
    assert offers.kept("u", "gpu-1", 10.5 + REST_S) is None


def test_grants_without_a_pause_do_not_keep_it_for_ever() -> None:
    offers = Offers()
    now_s = 0.0
    kept = []
    while now_s < 4 * REST_LONGEST_S:
        offers.granted("a", "gpu-0", now_s)
        kept.append(offers.kept("u", "gpu-0", now_s))
        offers.published(now_s)
        now_s += REST_S / 2
    moves = kept.count(None)
    assert 3 <= moves <= 4


def on_offer(broker: Broker) -> str | None:
    published = broker.wait_list(UNITS, -1, 0, lambda: False)
    assert published is not None
    return published.advertisement.offer


def test_an_offer_stays_while_the_pods_of_other_resources_change_what_is_free(short_tmp: Path) -> None:
    world = World(short_tmp)
    world.broker.publish()
    assert on_offer(world.broker) == uuid(0)
    world.grant("a", device_id(uuid(0), 0))
    assert on_offer(world.broker) == uuid(0)
    world.now_s += REST_S
    world.broker.publish()
    assert on_offer(world.broker) == uuid(1)
    world.ledger.close()


def test_an_offer_that_moved_while_a_pod_is_admitted_is_back_before_its_next_container_asks(short_tmp: Path) -> None:
    world = World(short_tmp)
    world.grant("a", device_id(uuid(0), 0))
    world.now_s += REST_S
    world.broker.publish()
    assert on_offer(world.broker) == uuid(1)  # on its way to the kubelet, who gives out units of GPU 0 meanwhile
    init = world.broker.allocate(UNITS, [device_id(uuid(0), n) for n in range(4)])
    assert isinstance(init, Allocation)
    assert on_offer(world.broker) == uuid(0)
    world.ledger.close()
