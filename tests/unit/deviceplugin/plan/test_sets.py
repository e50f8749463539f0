"""Shares on any so many GPUs: each set of them is listed, and what is Healthy can be granted side by side."""

from itertools import combinations
from math import comb

import pytest
from msgspec import structs

from deviceplugin.plan import render
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import Advertisement, advertise
from deviceplugin.plan.allocate import plan
from deviceplugin.plan.allocation import Allocation, Refusal
from deviceplugin.plan.ids import MAX_LENGTH, device_id
from deviceplugin.plan.model import NodeView
from deviceplugin.plan.preferred import preferred
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.plan.sound import flaw
from deviceplugin.plan.view import gpu_view, node_view
from mpsd.config.model import (
    GIB,
    MAX_ADVERTISED_DEVICES,
    MAX_GPU_SETS,
    AnnotationsConfig,
    Enforcement,
    GpuSelection,
    NodeConfig,
)
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.localapi.snapshot import GpuClient
from mpsd.shares.groups import set_name
from tests.builders import HARD, allocation, config, fixed, fraction, info, node, resource, status, uuid
from tests.reasons import because

CONFIG = config(
    resource("two", fixed(20), gpu_count=2),
    resource("half", fraction(0.5), Mode.TIME_SLICING, gpu_count=2),
    resource("a", fixed(8)),
)


def pair(*indices: int) -> str:
    return set_name([uuid(n) for n in indices])


def on(name: str, *indices: int, slot: int = 0, gib: int = 20, **changes: object) -> Allocation:
    made = allocation(name, f"{pair(*indices)}::{slot}", gib=gib, gpus=tuple(uuid(n) for n in indices))
    return structs.replace(made, **changes)


def alone(name: str, index: int, slot: int = 0, gib: int = 8, **changes: object) -> Allocation:
    made = allocation(name, f"{uuid(index)}::{slot}", gib=gib, gpus=(uuid(index),))
    return structs.replace(made, **changes)


def holding(*allocations: Allocation) -> Accounts:
    accounts = Accounts()
    for live in allocations:
        accounts.add(live)
    return accounts


def listed(view: NodeView, name: str = "two", accounts: Accounts | None = None) -> Advertisement:
    return advertise(view.resources[f"gpufrac.dev/{name}"], view, accounts or Accounts())


def offered(advertisement: Advertisement, accounts: Accounts | None = None) -> dict[str, int]:
    """How many free shares of each set are Healthy."""
    held = {share for live in accounts or () for share in live.device_ids}
    counts: dict[str, int] = {}
    for device in advertisement.devices:
        if device.healthy and device.id not in held:
            name = device.id.partition("::")[0]
            counts[name] = counts.get(name, 0) + 1
    return counts


def granted(view: NodeView, share: str, accounts: Accounts | None = None, name: str = "two") -> Allocation | Refusal:
    return plan(view.resources[f"gpufrac.dev/{name}"], view, accounts or Accounts(), [share], generation=9)


def busy(index: int, cfg: NodeConfig = CONFIG, protocol: int = 3) -> NodeView:
    """Four GPUs, one of which has an MPS client that holds nothing of ours."""
    views = [gpu_view(status(info(n)), cfg, protocol=protocol) for n in range(4)]
    views[index] = structs.replace(views[index], clients=(GpuClient(pid=7, mps=True, command="train"),))
    return node_view(cfg, views, hard=HARD)


# --- what is listed


def test_every_set_of_so_many_gpus_is_listed_and_one_gpu_resources_have_theirs() -> None:
    view = node(CONFIG, *(info(n) for n in range(4)), protocol=3)
    shown = listed(view)
    names = list(dict.fromkeys(device.id.partition("::")[0] for device in shown.devices))
    assert names == [pair(*two) for two in combinations(range(4), 2)]
    assert len(shown.devices) == 6 * 3, "79 GiB usable"
    assert {device.numa_nodes for device in shown.devices} == {(0,), (0, 1), (1,)}
    assert offered(shown) == {pair(0, 1): 3, pair(2, 3): 3}
    assert len(offered(listed(view, "a"))) == 4
    assert set(view.groups) == {uuid(n) for n in range(4)}, "sets are no groups"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_ids_stay_whatever_indices_gpus_have_and_whoever_holds_what(order: tuple[int, ...]) -> None:
    before = {device.id for device in listed(node(CONFIG, *(info(n) for n in range(4)))).devices}
    moved = [info(index, uuid=uuid(n)) for n, index in enumerate(order)]
    live = on("two", 1, 2)
    view = node(CONFIG, *moved, held={uuid(3): (uuid(3),)}, held_sets={live.group: live.gpus})
    assert {device.id for device in listed(view, accounts=holding(live)).devices} == before


def test_selections_and_groups_decide_which_gpus_there_are() -> None:
    two = resource("two", fixed(20), gpu_count=2, gpus=GpuSelection(exclude=(0,)))
    own = config(two, resource("p", fixed(9), groups=("g",)), groups=(("g", (1, 2)),))
    gpus = [info(n) for n in range(5)]
    assert set(offered(listed(node(own, *gpus, protocol=3)))) == {pair(3, 4)}, "a group's GPUs are its own"
    shared = structs.replace(own, shared_groups=("g",))
    names = {device.id.partition("::")[0] for device in listed(node(shared, *gpus, protocol=3)).devices}
    assert names == {pair(*some) for some in combinations(range(1, 5), 2)}


def test_where_too_few_gpus_are_left_a_group_is_shared_by_itself() -> None:
    cfg = config(resource("two", fixed(20), gpu_count=2), groups=(("g", (1, 2)),))
    assert set(offered(listed(node(cfg, *(info(n) for n in range(3)), protocol=3)))) == {pair(1, 2)}


@pytest.mark.parametrize(
    ("changes", "count", "said"),
    [
        ({}, 1, "a share lies on 2 GPUs, and 1 of this node is open to it"),
        ({}, 0, "no GPU is known yet"),
        ({"annotations": AnnotationsConfig(gpus=GpuSelection(), enforcement=Enforcement.NONE)}, 4, "set aside"),
        ({"gpus": GpuSelection(include=(9,))}, 4, "and 0 of this node are open to it"),
    ],
)
def test_without_enough_gpus_nothing_is_listed_with_the_reason(
    changes: dict[str, object], count: int, said: str
) -> None:
    shown = listed(node(structs.replace(CONFIG, **changes), *(info(n) for n in range(count))))
    assert shown.devices == ()
    assert said in str(shown.reason)


def test_too_many_sets_or_shares_are_none_with_the_reason() -> None:
    many = config(resource("two", fixed(20), gpu_count=8))
    assert comb(16, 8) > MAX_GPU_SETS
    view = node(many, *(info(n) for n in range(16)))
    assert view.sets == {}
    assert "12870 sets of 8 out of 16 GPUs" in str(listed(view).reason)
    small = config(resource("two", fixed(1), Mode.TIME_SLICING, gpu_count=4))
    shown = listed(node(small, *(info(n, 400) for n in range(8))))
    assert shown.devices == ()
    assert shown.reason is not None
    assert shown.reason.code == OfferCode.TOO_MANY_DEVICES
    assert f"more than the {MAX_ADVERTISED_DEVICES}" in shown.reason.message


def test_a_share_is_as_large_on_each_gpu_as_the_least_has_room_for() -> None:
    view = node(CONFIG, info(0, 80), info(1, 50), hard=HARD, protocol=3)
    got = granted(view, f"{pair(0, 1)}::1", name="half")
    assert isinstance(got, Allocation)
    assert (got.group, got.gpus, got.slot) == (pair(0, 1), (uuid(0), uuid(1)), None)
    assert got.request_bytes == got.limit_bytes == 49 * GIB // 2
    assert got.memory_total_bytes == 80 * GIB
    assert flaw(got) == ""
    assert len(device_id(got.group, MAX_ADVERTISED_DEVICES)) <= MAX_LENGTH
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in dict(render.environment(got))
    assert render.desired_allocation(got).slot is None, "its namespace goes by its key: sets share GPUs"


# --- what is Healthy


def test_what_gpus_hold_counts_for_each_set_of_theirs() -> None:
    view = node(CONFIG, *(info(n) for n in range(4)), protocol=3)
    live = holding(on("two", 0, 1), on("two", 0, 1, slot=1), alone("a", 2, gib=70))
    shown = listed(view, accounts=live)
    assert offered(shown, live) == {pair(0, 1): 1}
    assert [device.healthy for device in shown.devices if device.id in (f"{pair(0, 1)}::0", f"{pair(0, 1)}::1")] == [
        True,
        True,
    ]
    assert offered(listed(view, "a", live), live) == {uuid(0): 4, uuid(1): 4, uuid(2): 1, uuid(3): 9}


@pytest.mark.parametrize(
    ("live", "said"),
    [
        (alone("t", 0, mode=Mode.TIME_SLICING), "GPU 0: it is bound to time-slicing"),
        (alone("a", 0, gib=70), "GPU 0: its memory is taken by other shares"),
        (alone("a", 0, gib=90), "GPU 0: over-committed"),
    ],
)
def test_a_gpu_that_takes_nothing_takes_its_sets_with_it(live: Allocation, said: str) -> None:
    view = node(CONFIG, *(info(n) for n in range(3)), protocol=3)
    shown = listed(view, accounts=holding(live))
    assert set(offered(shown)) == {pair(1, 2)}
    assert [said in str(reason) for _, reason in shown.group_reasons] == [True], "said once for all of its sets"
    outcome = granted(view, f"{pair(0, 1)}::0", holding(live))
    assert isinstance(outcome, Refusal)


@pytest.mark.parametrize("reason", ["blocked", "waiting", "daemon_waiting", "reserved"])
def test_a_gpu_that_takes_nothing_new_leaves_held_shares(reason: str) -> None:
    views = [gpu_view(status(info(n)), CONFIG, protocol=3) for n in range(3)]
    views[1] = structs.replace(views[1], **{reason: because("no")})
    view = node_view(CONFIG, views)
    live = holding(on("two", 0, 1, slot=2))
    shown = listed(view, accounts=live)
    assert offered(shown, live) in ({}, {pair(0, 2): 2}), "GPU 2 must be joined, which nobody holds up"
    assert f"{pair(0, 1)}::2" in {device.id for device in shown.devices if device.healthy}
    assert isinstance(granted(view, f"{pair(0, 1)}::0"), Refusal) is (reason in ("blocked", "reserved"))


def test_a_lost_gpu_loses_held_shares_of_its_sets_listed_or_not() -> None:
    live = holding(on("two", 0, 1), on("two", 2, 3, slot=1))
    lost = gpu_view(status(info(1), health=GpuHealth.LOST, reason="off the bus"), CONFIG, protocol=3)
    views = [gpu_view(status(info(0)), CONFIG, protocol=3), lost]
    views += [gpu_view(status(info(n)), CONFIG, protocol=3) for n in (2, 3)]
    for cfg in (CONFIG, config(resource("two", fixed(20), gpu_count=2, gpus=GpuSelection(include=(2, 3))))):
        shown = listed(node_view(cfg, views, held_sets=live.held_sets()), accounts=live)
        health = {device.id: device.healthy for device in shown.devices}
        assert (health[f"{pair(0, 1)}::0"], health[f"{pair(2, 3)}::1"]) == (False, True)


def test_a_set_whose_gpu_is_gone_is_not_listed_and_what_it_holds_is_lost() -> None:
    live = holding(on("two", 0, 1))
    view = node(CONFIG, info(0), info(2), protocol=3, held_sets=live.held_sets())
    health = {device.id: device.healthy for device in listed(view, accounts=live).devices}
    assert health.pop(f"{pair(0, 1)}::0") is False
    assert {share.partition("::")[0] for share in health} == {pair(0, 2)}


# --- one daemon for all of a set


def test_gpus_whose_daemons_are_in_use_are_not_joined_and_the_reason_says_who_is_in_the_way() -> None:
    view = busy(0)
    shown = listed(view)
    assert set(offered(shown)) == {pair(1, 2)}, "GPU 3 is left over"
    ((_, reason),) = shown.group_reasons
    assert reason.code == OfferCode.DAEMONS_IN_USE
    for text in ("process 7 (train) does", "wait for that, or use another node"):
        assert text in reason.message
    got = granted(view, f"{pair(0, 1)}::0")
    assert isinstance(got, Allocation), "it heals by itself, so it is granted and waits for its file"


def test_gpus_of_one_domain_come_first_and_stay_open_while_it_is_busy() -> None:
    views = [gpu_view(status(info(n)), CONFIG, protocol=3) for n in range(4)]
    client = (GpuClient(pid=7, mps=True, allocation_key=on("two", 1, 2).key),)
    views[1] = structs.replace(views[1], clients=client)
    view = node_view(CONFIG, views, hard=HARD)
    live = holding(on("two", 1, 2))
    assert offered(listed(view, accounts=live), live) == {pair(1, 2): 2, pair(0, 3): 3}
    available = [device.id for device in listed(view, accounts=live).devices if device.healthy]
    free = [share for share in available if share != f"{pair(1, 2)}::0"]
    assert preferred(view.resources["gpufrac.dev/two"], view, live, free, [], 1) == [f"{pair(1, 2)}::1"]


def test_in_time_slicing_without_borrowers_no_daemon_is_needed() -> None:
    view = busy(0)
    assert set(offered(listed(view, "half"))) == {pair(0, 1), pair(2, 3)}


BURST = config(
    resource("two", fixed(20, 40), Mode.TIME_SLICING, gpu_count=2),
    resource("plain", fixed(20), Mode.TIME_SLICING, gpu_count=2),
    resource("a", fixed(8), Mode.TIME_SLICING),
)


def test_time_slicing_with_burst_needs_a_daemon_and_others_go_without_while_limits_add_up() -> None:
    view = busy(0, BURST)
    assert set(offered(listed(view))) == {pair(1, 2)}
    assert set(offered(listed(view, "plain"))) >= {pair(1, 2), pair(0, 3)}, "served without a daemon where it must"
    got = granted(view, f"{pair(0, 3)}::0", name="plain")
    assert isinstance(got, Allocation)
    assert (got.needs_daemon, got.soft_bytes, got.takes_back) == (False, 20 * GIB, False)
    reached = granted(view, f"{pair(1, 2)}::0", name="plain")
    assert isinstance(reached, Allocation)
    assert reached.takes_back
    borrower = structs.replace(
        alone("b", 0, gib=20, mode=Mode.TIME_SLICING), limit_bytes=70 * GIB, enforcement=Enforcement.HARD
    )
    accounts = holding(structs.replace(borrower, soft_bytes=20 * GIB))
    assert set(offered(listed(view, "plain", accounts))) == {pair(1, 2)}, "limits on GPU 0 would not add up"


def test_a_guarantee_is_set_on_one_gpu_where_a_share_of_several_may_borrow() -> None:
    view = node(BURST, *(info(n) for n in range(2)), hard=HARD, protocol=3)
    got = granted(view, f"{uuid(0)}::0", name="a")
    assert isinstance(got, Allocation)
    assert got.soft_bytes == 8 * GIB


# --- MPS protocol 2: one limit, and the same GPUs for all of a daemon


def test_under_protocol_2_a_gpu_has_containers_of_one_set_at_a_time() -> None:
    view = node(CONFIG, *(info(n) for n in range(4)))
    live = holding(on("two", 0, 1))
    assert offered(listed(view, accounts=live), live) == {pair(0, 1): 2, pair(2, 3): 3}
    assert set(offered(listed(view, "a", live))) == {uuid(2), uuid(3)}
    for share, name in ((f"{pair(1, 2)}::0", "two"), (f"{uuid(1)}::0", "a")):
        refusal = granted(view, share, live, name)
        assert isinstance(refusal, Refusal)
        assert refusal.code == OfferCode.OTHER_GPUS
        assert "protocol 3" in refusal.message
    one = holding(alone("a", 0))
    assert set(offered(listed(view, accounts=one))) == {pair(1, 2)}, "and the other way round"
    assert isinstance(granted(view, f"{pair(0, 1)}::0", one), Refusal)


@pytest.mark.parametrize(("gib", "protocol", "free"), [(20, 2, 2), (10, 2, 0), (40, 2, 0), (10, 3, 3)])
def test_under_protocol_2_a_set_has_one_limit_at_a_time(gib: int, protocol: int, free: int) -> None:
    view = node(CONFIG, info(0), info(1), protocol=protocol)
    live = holding(on("other", 0, 1, gib=gib))
    assert offered(listed(view, accounts=live)).get(pair(0, 1), 0) == free
    assert isinstance(granted(view, f"{pair(0, 1)}::0", live), Allocation) is (free > 0)


# --- records


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": (uuid(0), uuid(2))},
        {"gpus": (uuid(0),)},
        {"slot": 0},
        {"group": uuid(0)},
        {"device_ids": (f"{pair(0, 1)}::0", f"{pair(0, 1)}::1"), "request_bytes": 40 * GIB, "limit_bytes": 40 * GIB},
    ],
)
def test_a_record_that_contradicts_itself_is_none_of_ours(changes: dict[str, object]) -> None:
    whole = on("two", 0, 1)
    assert flaw(whole) == ""
    changed = structs.replace(whole, **changes)
    again = allocation(
        "two", *changed.device_ids, gib=20, gpus=changed.gpus
    ).key  # the key fits, so that it is not what is wrong
    assert flaw(structs.replace(changed, key=again)) != ""
