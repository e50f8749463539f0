"""What is listed, and which of it is Healthy."""

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import Advertisement, advertise
from deviceplugin.plan.ids import device_id
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.plan.room import free_fit
from mpsd.common.reason import Reason
from mpsd.config.model import CdiConfig, Delivery, Enforcement, GpuSelection
from mpsd.gpu.model import Mode
from tests.builders import allocation, config, fixed, fraction, info, node, resource, units, uuid


def healthy(advertisement: Advertisement) -> list[str]:
    return [device.id for device in advertisement.devices if device.healthy]


def test_every_slot_of_every_gpu_is_listed_and_healthy_on_an_idle_node() -> None:
    cfg = config(resource("a", fixed(8)))
    view = node(cfg, info(0), info(1))
    got = advertise(view.resources["gpufrac.dev/a"], view, Accounts())
    assert [device.id for device in got.devices] == [device_id(uuid(g), n) for g in (0, 1) for n in range(9)]
    assert got.healthy == 18  # 79 GiB usable of 80: nine times 8
    assert got.reason is None


def test_numa_node_is_told_for_memory_resources_only() -> None:
    cfg = config(resource("a", fixed(8)), resource("u", units()))
    view = node(cfg, info(1))
    assert {d.numa_nodes for d in advertise(view.resources["gpufrac.dev/a"], view, Accounts()).devices} == {(1,)}
    assert {d.numa_nodes for d in advertise(view.resources["gpufrac.dev/u"], view, Accounts()).devices} == {()}


def test_a_gpu_that_a_resource_does_not_select_has_no_room_for_it() -> None:
    view = node(config(resource("a", fixed(8), gpus=GpuSelection(include=(uuid(1),)))), info(0), info(1))
    free, reason = free_fit(view.resources["gpufrac.dev/a"], view.groups[uuid(0)], Accounts())
    assert (free, str(reason)) == (0, "it is not open to this resource")


def test_a_fraction_fills_the_gpu_exactly() -> None:
    cfg = config(resource("half", fraction(0.5)))
    view = node(cfg, info(0, memory_gib=24))
    assert advertise(view.resources["gpufrac.dev/half"], view, Accounts()).healthy == 2


def test_memory_taken_by_another_resource_makes_free_shares_unhealthy_but_not_held_ones() -> None:
    cfg = config(resource("a", fixed(8)), resource("b", fixed(30)))
    view = node(cfg, info(0))
    accounts = Accounts()
    accounts.add(allocation("a", device_id(uuid(0), 3)))
    accounts.add(allocation("b", device_id(uuid(0), 0), gib=30))
    accounts.add(allocation("b", device_id(uuid(0), 1), gib=30))
    got = advertise(view.resources["gpufrac.dev/a"], view, accounts)
    # 79 - 8 - 60 = 11 GiB are left: one more of 8, beside the held one.
    assert healthy(got) == [device_id(uuid(0), 0), device_id(uuid(0), 3)]
    other = advertise(view.resources["gpufrac.dev/b"], view, accounts)
    assert healthy(other) == [device_id(uuid(0), 0), device_id(uuid(0), 1)]
    assert "memory is taken" in str(other.reason)


def test_the_other_mode_is_unhealthy_on_a_bound_gpu_and_says_why() -> None:
    cfg = config(resource("a", fixed(8)), resource("t", fixed(8), Mode.TIME_SLICING))
    view = node(cfg, info(0), info(1))
    accounts = Accounts()
    accounts.add(allocation("a", device_id(uuid(0), 0)))
    got = advertise(view.resources["gpufrac.dev/t"], view, accounts)
    assert {i.split("::")[0] for i in healthy(got)} == {uuid(1)}
    assert str(dict(got.group_reasons)[uuid(0)]) == "it is bound to sm-sharing by 1 allocation"


def test_the_mps_client_cap_counts_allocations_over_all_resources() -> None:
    cfg = config(resource("a", fixed(1)), resource("b", fixed(1)))
    view = node(cfg, info(0))
    accounts = Accounts()
    for n in range(47):
        accounts.add(allocation("a", device_id(uuid(0), n), gib=1, generation=n))
    assert advertise(view.resources["gpufrac.dev/b"], view, accounts).healthy == 1
    accounts.add(allocation("b", device_id(uuid(0), 0), gib=1))
    got = advertise(view.resources["gpufrac.dev/b"], view, accounts)
    assert healthy(got) == [device_id(uuid(0), 0)]
    assert "48 MPS clients" in str(got.reason)


def test_a_lost_gpu_makes_held_shares_unhealthy_too_and_a_waiting_daemon_does_not() -> None:
    cfg = config(resource("a", fixed(8)))
    accounts = Accounts()
    accounts.add(allocation("a", device_id(uuid(0), 0)))
    waiting = node(cfg, info(0), daemon_waiting=Reason(OfferCode.DAEMON_NOT_READY, "its MPS daemon is backoff"))
    got = advertise(waiting.resources["gpufrac.dev/a"], waiting, accounts)
    assert healthy(got) == [device_id(uuid(0), 0)]
    assert str(got.reason) == "its MPS daemon is backoff"
    from deviceplugin.plan.view import gpu_view, node_view
    from mpsd.gpu.model import GpuHealth
    from tests.builders import status

    lost = node_view(cfg, [gpu_view(status(info(0), health=GpuHealth.LOST, reason="off the bus"), cfg)])
    assert healthy(advertise(lost.resources["gpufrac.dev/a"], lost, accounts)) == []
    assert len(advertise(lost.resources["gpufrac.dev/a"], lost, accounts).devices) == 9


def test_units_of_one_gpu_are_on_offer_and_the_offer_moves_when_it_may() -> None:
    cfg = config(resource("u", units()))
    view = node(cfg, info(0), info(1))
    accounts = Accounts()
    first = advertise(view.resources["gpufrac.dev/u"], view, accounts)
    assert first.healthy == 79
    assert first.offer == uuid(0)
    accounts.add(allocation("u", *(device_id(uuid(0), n) for n in range(8)), gib=1))
    resting = advertise(view.resources["gpufrac.dev/u"], view, accounts, offer=uuid(0))
    assert resting.offer == uuid(0)
    assert resting.healthy == 79
    moved = advertise(view.resources["gpufrac.dev/u"], view, accounts)
    assert moved.offer == uuid(1)
    assert moved.healthy == 79 + 8


def test_a_vacated_share_is_healthy_for_the_next_pod_unless_it_lies_off_the_offer() -> None:
    cfg = config(resource("a", fixed(40)), resource("u", units()))
    view = node(cfg, info(0), info(1))
    accounts = Accounts()
    mine = allocation("a", device_id(uuid(0), 0), gib=40)
    accounts.add(mine)
    accounts.set_vacated({mine.key})
    assert device_id(uuid(0), 0) in healthy(advertise(view.resources["gpufrac.dev/a"], view, accounts))
    some_units = allocation("u", device_id(uuid(0), 0), gib=1)
    accounts.add(some_units)
    accounts.set_vacated({mine.key, some_units.key})
    got = advertise(view.resources["gpufrac.dev/u"], view, accounts)
    assert got.offer == uuid(1)
    assert device_id(uuid(0), 0) not in healthy(got)


def test_shares_of_a_shrunken_gpu_stay_listed_while_held() -> None:
    cfg = config(resource("a", fixed(8)))
    view = node(cfg, info(0, memory_gib=12))
    accounts = Accounts()
    for n in (0, 5):
        accounts.add(allocation("a", device_id(uuid(0), n), generation=n))
    got = advertise(view.resources["gpufrac.dev/a"], view, accounts)
    assert healthy(got) == [device_id(uuid(0), 0), device_id(uuid(0), 5)]
    assert "over-committed" in str(got.reason)


def test_what_cannot_be_enforced_advertises_nothing_and_names_the_ways_out() -> None:
    strict = {"enforcement": Enforcement.COOPERATIVE}
    cfg = config(
        resource("t", fixed(8), Mode.TIME_SLICING, **strict),
        resource("burst", fixed(8, 16)),
        resource("hard", fixed(8), enforcement=Enforcement.HARD),
        resource("big", fixed(100)),
    )
    view = node(cfg, info(0))
    reasons = {name: advertise(r, view, Accounts()).reason for name, r in view.resources.items()}
    assert all(advertise(r, view, Accounts()).devices == () for r in view.resources.values())
    assert "sm-sharing" in str(reasons["gpufrac.dev/t"])
    assert "enforcement: none" in str(reasons["gpufrac.dev/t"])
    assert "r615" in str(reasons["gpufrac.dev/burst"])
    assert "cooperative ones" in str(reasons["gpufrac.dev/hard"])
    assert "79Gi" in str(reasons["gpufrac.dev/big"])


def test_delivery_both_counts_as_none() -> None:
    cfg = config(resource("a", fixed(8)), cdi=CdiConfig(delivery=Delivery.BOTH))
    view = node(cfg, info(0))
    assert "can override" in str(advertise(view.resources["gpufrac.dev/a"], view, Accounts()).reason)


def test_a_list_too_long_for_a_kubelet_advertises_nothing() -> None:
    from mpsd.config.model import UnitMemory
    from mpsd.gpu.model import MIB

    cfg = config(resource("u", UnitMemory(unit_bytes=64 * MIB)))
    view = node(cfg, *(info(g, memory_gib=288) for g in range(8)))
    got = advertise(view.resources["gpufrac.dev/u"], view, Accounts())
    assert got.devices == ()
    assert "larger unit" in str(got.reason)
