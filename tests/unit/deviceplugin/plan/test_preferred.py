"""Packing: fewest idle GPUs, best fit, units of one GPU together."""

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.ids import device_id, group_of
from deviceplugin.plan.model import NodeView
from deviceplugin.plan.preferred import preferred
from tests.builders import allocation, config, fixed, info, node, resource, units, uuid

CONFIG = config(resource("a", fixed(8)), resource("u", units()))


def view(*memory_gib: int) -> NodeView:
    return node(CONFIG, *(info(g, memory_gib=m) for g, m in enumerate(memory_gib)))


def available(node_view: NodeView, name: str) -> list[str]:
    return [identifier for all_ids in node_view.resources[name].device_ids.values() for identifier in all_ids]


def ask(node_view: NodeView, name: str, accounts: Accounts, size: int, must: tuple[str, ...] = ()) -> list[str]:
    name = f"gpufrac.dev/{name}"
    return preferred(node_view.resources[name], node_view, accounts, available(node_view, name), must, size)


def test_a_gpu_in_use_is_filled_before_an_idle_one_is_touched() -> None:
    accounts = Accounts()
    accounts.add(allocation("a", device_id(uuid(1), 0)))
    assert group_of(ask(view(80, 80), "a", accounts, 1)[0]) == uuid(1)


def test_the_tightest_gpu_that_fits_is_taken() -> None:
    accounts = Accounts()
    accounts.add(allocation("a", device_id(uuid(0), 0)))
    accounts.add(allocation("u", *(device_id(uuid(1), n) for n in range(60)), gib=1))
    assert group_of(ask(view(80, 80, 80), "a", accounts, 1)[0]) == uuid(1)


def test_a_gpu_that_is_full_is_not_wished_for() -> None:
    accounts = Accounts()
    accounts.add(allocation("u", *(device_id(uuid(0), n) for n in range(75)), gib=1))
    assert group_of(ask(view(80, 80), "a", accounts, 1)[0]) == uuid(1)


def test_units_lie_on_one_gpu_and_join_those_that_must_be_included() -> None:
    node_view = view(80, 80)
    must = (device_id(uuid(1), 0), device_id(uuid(1), 1))
    got = ask(node_view, "u", Accounts(), 20, must)
    assert len(set(got)) == 20
    assert {group_of(identifier) for identifier in got} == {uuid(1)}
    assert got[:2] == list(must)


def test_no_gpu_with_enough_units_means_no_preference() -> None:
    assert ask(view(80, 80), "u", Accounts(), 100) == []


def test_fixed_shares_are_taken_from_the_next_gpu_where_one_has_too_few() -> None:
    got = ask(view(20, 20), "a", Accounts(), 3)
    assert [group_of(identifier) for identifier in got] == [uuid(0), uuid(0), uuid(1)]


def test_must_include_alone_is_enough() -> None:
    assert ask(view(80), "u", Accounts(), 1, (device_id(uuid(0), 5),)) == [device_id(uuid(0), 5)]


def test_unknown_ids_and_odd_sizes_do_no_harm() -> None:
    node_view = view(80)
    resource_view = node_view.resources["gpufrac.dev/a"]
    assert preferred(resource_view, node_view, Accounts(), ["x", "GPU-none::0"], [], 1) == []
    assert preferred(resource_view, node_view, Accounts(), [], [], 0) == []
    assert preferred(resource_view, node_view, Accounts(), [], [], -5) == []
