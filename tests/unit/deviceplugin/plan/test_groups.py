"""Groups of GPUs: one share lies on every member, and a member serves nothing else."""

import pytest
from msgspec import structs

from deviceplugin.plan import render
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import Advertisement, advertise
from deviceplugin.plan.allocate import plan
from deviceplugin.plan.allocation import Allocation, Refusal
from deviceplugin.plan.groups import REGROUPED
from deviceplugin.plan.ids import MAX_LENGTH, device_id
from deviceplugin.plan.model import GpuView, NodeView
from deviceplugin.plan.preferred import preferred
from deviceplugin.plan.view import gpu_view, node_view
from mpsd.config.model import GIB, MAX_ADVERTISED_DEVICES, Enforcement, NodeConfig
from mpsd.gpu.model import GpuHealth, Mode
from tests.builders import allocation, config, fixed, fraction, info, node, resource, status, uuid
from tests.reasons import because
from tests.refusals import Kind, kind_of

GROUPS = (("pair0", (0, 1)),)
PAIR = (uuid(0), uuid(1))
CONFIG = config(
    resource("pair", fixed(20), groups=("pair0",)),
    resource("half", fraction(0.5), Mode.TIME_SLICING, groups=("pair0",)),
    resource("a", fixed(8)),
    groups=GROUPS,
)


def listed(view: NodeView, name: str, accounts: Accounts | None = None) -> Advertisement:
    return advertise(view.resources[f"gpufrac.dev/{name}"], view, accounts or Accounts())


def healthy(advertisement: Advertisement) -> list[str]:
    return [device.id for device in advertisement.devices if device.healthy]


def holding(*allocations: Allocation) -> Accounts:
    accounts = Accounts()
    for live in allocations:
        accounts.add(live)
    return accounts


def views(second: GpuView | None = None) -> list[GpuView]:
    three = [gpu_view(status(info(n)), CONFIG) for n in range(3)]
    return three if second is None else [three[0], second, three[2]]


def test_a_share_is_as_large_on_each_member_and_members_serve_nothing_else() -> None:
    view = node(CONFIG, info(0, 80), info(1, 50), info(2, 80))
    pair = listed(view, "pair")
    assert [device.id for device in pair.devices] == ["pair0::0", "pair0::1"], "the smaller GPU has 49 GiB usable"
    assert {device.numa_nodes for device in pair.devices} == {(0, 1)}
    assert len(healthy(listed(view, "half"))) == 2
    assert {device.id.split("::")[0] for device in listed(view, "a").devices} == {uuid(2)}
    got = plan(view.resources["gpufrac.dev/half"], view, Accounts(), ["pair0::1"], generation=1)
    assert isinstance(got, Allocation)
    assert (got.group, got.gpus, got.request_bytes, got.slot) == ("pair0", PAIR, 49 * GIB // 2, 1)
    assert got.memory_total_bytes == 80 * GIB, "its fraction of the larger GPU is within the limit on both"


def test_numa_nodes_are_told_once_each() -> None:
    cfg = config(resource("trio", fixed(20), groups=("trio",)), groups=(("trio", (0, 2, 3)),))
    view = node(cfg, *(info(n) for n in range(4)))
    assert {device.numa_nodes for device in listed(view, "trio").devices} == {(0, 1)}


def test_ids_of_the_longest_group_name_keep_to_the_length() -> None:
    assert len(device_id("x" * len(uuid(0)), MAX_ADVERTISED_DEVICES - 1)) <= MAX_LENGTH


@pytest.mark.parametrize(
    ("live", "name", "left", "said"),
    [
        (allocation("pair", "pair0::0", gib=20, gpus=PAIR), "pair", 2, ""),
        (allocation("pair", "pair0::0", gib=20, gpus=PAIR), "half", 0, "bound to sm-sharing"),
        (allocation("old", f"{uuid(1)}::0", gib=50), "pair", 1, ""),
        (allocation("old", f"{uuid(1)}::0", gib=70), "pair", 0, "GPU 1: its memory is taken by other shares: 9216 MiB"),
        (allocation("old", f"{uuid(1)}::0", gib=90), "pair", 0, "GPU 1: over-committed"),
        (allocation("old", f"{uuid(1)}::0", mode=Mode.TIME_SLICING), "pair", 0, "GPU 1: it is bound to time-slicing"),
    ],
)
def test_what_any_member_holds_counts_for_the_group(live: Allocation, name: str, left: int, said: str) -> None:
    """Also what an earlier grouping left on one of them."""
    view = node(CONFIG, info(0), info(1))
    got = listed(view, name, holding(live))
    assert len(healthy(got)) - sum(share in live.device_ids for share in healthy(got)) == left
    assert said in str(got.reason)
    wanted = ["pair0::1"]
    outcome = plan(view.resources[f"gpufrac.dev/{name}"], view, holding(live), wanted, generation=9)
    assert isinstance(outcome, Allocation) is (left > 0), outcome


def test_the_client_cap_counts_on_each_member() -> None:
    cfg = structs.replace(CONFIG, mps=structs.replace(CONFIG.mps, client_limit=2))
    view = node(cfg, info(0), info(1))
    accounts = holding(*(allocation("old", f"{uuid(1)}::{n}", gib=1, generation=n) for n in range(2)))
    got = listed(view, "pair", accounts)
    assert healthy(got) == []
    assert "GPU 1: its 2 MPS clients are taken" in str(got.reason)


@pytest.mark.parametrize("reason", ["blocked", "waiting", "daemon_waiting"])
def test_a_member_that_takes_nothing_new_stops_the_group_and_held_shares_stay(reason: str) -> None:
    second = structs.replace(gpu_view(status(info(1)), CONFIG), **{reason: because("no")})
    view = node_view(CONFIG, views(second))
    got = listed(view, "pair", holding(allocation("pair", "pair0::1", gib=20, gpus=PAIR)))
    assert healthy(got) == ["pair0::1"]
    assert str(got.reason) == "GPU 1: no"
    assert listed(view, "a").healthy == 9, "a GPU beside the group"
    outcome = plan(view.resources["gpufrac.dev/pair"], view, Accounts(), ["pair0::0"], generation=1)
    assert isinstance(outcome, Refusal) is (reason == "blocked")


def test_a_lost_member_loses_held_shares_of_the_group() -> None:
    second = gpu_view(status(info(1), health=GpuHealth.LOST, reason="off the bus"), CONFIG)
    got = listed(node_view(CONFIG, views(second)), "pair", holding(allocation("pair", "pair0::1", gib=20, gpus=PAIR)))
    assert healthy(got) == []
    assert len(got.devices) == 3
    assert str(got.reason) == "GPU 1: off the bus"


def test_a_group_without_a_member_advertises_nothing_and_says_which_is_missing() -> None:
    view = node(CONFIG, info(0), info(2))
    got = listed(view, "pair")
    assert got.devices == ()
    assert "its GPU 1 is not on this node" in str(got.reason)
    assert {device.id.split("::")[0] for device in listed(view, "a").devices} == {uuid(2)}


def test_the_group_that_touches_fewest_idle_gpus_is_preferred() -> None:
    cfg = config(resource("pair", fixed(20), groups=("p", "q")), groups=(("p", (0, 1)), ("q", (2, 3))))
    view = node(cfg, info(0, 40), info(1, 40), info(2, 80), info(3, 80))
    accounts = holding(allocation("pair", "q::0", gib=20, gpus=(uuid(2), uuid(3))))
    available = [f"{name}::{n}" for name in "pq" for n in range(3)]
    assert preferred(view.resources["gpufrac.dev/pair"], view, accounts, available, [], 1) == ["q::0"]


# --- a reload that groups GPUs otherwise

LONE = config(resource("a", fixed(8)))
OTHER = structs.replace(CONFIG, groups=(("pair0", (1, 2)),))


@pytest.mark.parametrize(
    ("cfg", "live", "said"),
    [
        (CONFIG, allocation("a", f"{uuid(0)}::0"), f"allocations granted on {uuid(0)} must end first"),
        (LONE, allocation("pair", "pair0::0", gpus=PAIR), "allocations granted on pair0 must end first"),
        (OTHER, allocation("pair", "pair0::0", gib=20, gpus=PAIR), "its GPUs changed in the config"),
    ],
    ids=["grouped", "ungrouped", "regrouped"],
)
def test_a_new_grouping_waits_for_live_allocations(cfg: NodeConfig, live: Allocation, said: str) -> None:
    gpus = [info(n) for n in range(4)]
    view = node(cfg, *gpus, held={live.group: live.gpus})
    names = [name.rpartition("/")[2] for name in view.resources]
    offers = [listed(view, name, holding(live)) for name in names]
    free = {share for offer in offers for share in healthy(offer)} - set(live.device_ids)
    assert not {gpu for share in free for gpu in view.groups[share.partition("::")[0]].gpus} & set(live.gpus)
    assert free, "other GPUs go on"
    reasons = [reason for offer in offers for _, reason in offer.group_reasons]
    assert any(said in reason.message for reason in reasons), reasons
    held = [share for offer in offers for share in healthy(offer) if share in live.device_ids]
    assert held == (list(live.device_ids) if live.resource in view.resources else [])
    after = node(cfg, *gpus)
    assert all(healthy(listed(after, name)) for name in names)


def test_an_old_group_takes_nothing_new() -> None:
    view = node(CONFIG, info(0), info(1), info(2), held={uuid(0): (uuid(0),)})
    got = plan(view.resources["gpufrac.dev/a"], view, Accounts(), [f"{uuid(0)}::1"], generation=1)
    assert isinstance(got, Refusal)
    assert kind_of(got) is Kind.NO_ROOM
    assert REGROUPED.message in got.message


# --- one limit for a whole group (MPS protocol 2)

TWO = (("pair0", (0, 1)), ("solo", (2,)))


def two_limits(level: Enforcement, small: int = 10) -> NodeConfig:
    return config(
        resource("small", fixed(small), groups=("pair0", "solo"), enforcement=level),
        resource("large", fixed(20), groups=("pair0", "solo")),
        groups=TWO,
    )


@pytest.mark.parametrize(
    ("level", "small", "protocol", "offered", "held_to"),
    [
        (Enforcement.COOPERATIVE, 10, 2, False, None),
        (Enforcement.NONE, 10, 2, True, Enforcement.NONE),
        (Enforcement.COOPERATIVE, 20, 2, True, Enforcement.COOPERATIVE),
        (Enforcement.COOPERATIVE, 10, 3, True, Enforcement.COOPERATIVE),
    ],
)
def test_a_limit_that_the_group_does_not_hold_is_not_advertised_as_if_it_did(
    level: Enforcement, small: int, protocol: int, offered: bool, held_to: Enforcement | None
) -> None:
    view = node(two_limits(level, small), info(0), info(1), info(2), protocol=protocol)
    by_group = {share.split("::")[0] for share in healthy(listed(view, "small"))}
    assert by_group == ({"pair0", "solo"} if offered else {"solo"}), "on one GPU the environment lowers it"
    if not offered:
        reason = dict(listed(view, "small").group_reasons)["pair0"]
        for way_out in ("same limit", "a group of its own", "protocol 3", "enforcement: none"):
            assert way_out in str(reason)
    else:
        got = plan(view.resources["gpufrac.dev/small"], view, Accounts(), ["pair0::0"], generation=1)
        assert isinstance(got, Allocation)
        assert got.enforcement is held_to
    assert len(healthy(listed(view, "large"))) == 6, "the largest limit is the group's"


@pytest.mark.parametrize(("gib", "protocol", "free"), [(20, 2, 2), (10, 2, 0), (40, 2, 0), (10, 3, 3)])
def test_after_a_reload_a_new_limit_waits_for_live_ones_of_another(gib: int, protocol: int, free: int) -> None:
    view = node(CONFIG, info(0), info(1), protocol=protocol)
    live = allocation("pair", "pair0::3", gib=gib, gpus=PAIR)
    got = listed(view, "pair", holding(live))
    assert len(healthy(got)) - 1 == free
    assert ("wait for them to end" in str(got.reason)) is (free == 0)
    outcome = plan(view.resources["gpufrac.dev/pair"], view, holding(live), ["pair0::0"], generation=2)
    assert isinstance(outcome, Allocation) is (free > 0)


# --- what a container gets


@pytest.mark.parametrize("kind", ["", "nvidia.com/gpu"])
def test_a_container_gets_all_members_in_the_daemons_order_and_no_limit_by_ordinal(kind: str) -> None:
    live = allocation("pair", "pair0::0", gib=20, gpus=(uuid(1), uuid(0)))
    live = structs.replace(live, gpu_kind=kind, thread_percent=50)
    env = dict(render.environment(live))
    assert env["NVIDIA_VISIBLE_DEVICES"] == ("void" if kind else f"{uuid(1)},{uuid(0)}")
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in env
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    devices = render.answer(live, "/run/x").cdi_devices[:-1]
    assert devices == ((f"{kind}={uuid(1)}", f"{kind}={uuid(0)}") if kind else ())
