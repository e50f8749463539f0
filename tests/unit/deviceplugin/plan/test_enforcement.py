"""The level of each resource: every capability missing one by one, and what is advertised then."""

from typing import NamedTuple

import pytest
from msgspec import structs

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import advertise
from deviceplugin.plan.allocate import plan
from deviceplugin.plan.allocation import Allocation, Refusal
from deviceplugin.plan.enforcement import config_note, not_hard
from deviceplugin.plan.ids import device_id
from deviceplugin.plan.model import HardAbility
from deviceplugin.status.status import burst
from mpsd.config.model import GIB, CdiConfig, Delivery, Enforcement, NodeConfig
from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import HardLimits
from tests.builders import CAN, HARD, HOOKED_KIND, PLAIN_KIND, allocation, config, fixed, info, node, resource, uuid
from tests.reasons import because

CONFIG = config(
    resource("shared", fixed(8)),
    resource("hard", fixed(8), enforcement=Enforcement.HARD),
    resource("burst", fixed(8, 16)),
    resource("free", fixed(8), Mode.TIME_SLICING),
    resource("sliced", fixed(8), Mode.TIME_SLICING, enforcement=Enforcement.COOPERATIVE),
    resource("sliced-burst", fixed(8, 16), Mode.TIME_SLICING, enforcement=Enforcement.COOPERATIVE),
)
ALL = ("shared", "hard", "burst", "free", "sliced", "sliced-burst")
PLAIN = ("shared", "free")


def missing(text: str) -> HardAbility:
    return structs.replace(HARD, limits=HardLimits(missing=(text,)))


class Row(NamedTuple):
    """`offered`: what has Healthy shares; `levels`: of sm-sharing and time-slicing; `said`: in every other's reason."""

    hard: HardAbility
    offered: tuple[str, ...]
    levels: tuple[str, str]
    said: str = ""
    protocol: int = 3
    delivery: Delivery = Delivery.CDI


ROWS = {
    "nothing": Row(HARD, ALL, ("hard", "hard")),
    "driver": Row(missing("driver 580 has none"), PLAIN, ("cooperative", "none"), "driver 580 has none", protocol=2),
    "cgroups": Row(missing("no cgroup v2"), PLAIN, ("cooperative", "none"), "no cgroup v2"),
    "calls": Row(missing("calls refused"), PLAIN, ("cooperative", "none"), "calls refused"),
    "hook": Row(HardAbility(CAN, PLAIN_KIND, frozenset()), PLAIN, ("cooperative", "none"), "no hook `apply-cuda"),
    "cdi": Row(HardAbility(CAN, "", frozenset({HOOKED_KIND})), PLAIN, ("cooperative", "none"), "1.20.1"),
    "protocol-3": Row(HARD, ("shared", "hard", "free", "sliced"), ("hard", "hard"), "protocol 3", protocol=2),
    "delivery-cdi": Row(HARD, ("free",), ("none", "none"), "cdi.delivery: both", delivery=Delivery.BOTH),
    "runtime": Row(
        structs.replace(HARD, cdi_loses=because("cri-o 1.32 lets pods win")),
        ("free",),
        ("none", "none"),
        "lets pods",
    ),
    "mpsds-word": Row(structs.replace(HARD, limits=HardLimits()), PLAIN, ("cooperative", "hard"), "not known yet"),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_without(row: Row) -> None:
    cfg = structs.replace(CONFIG, cdi=CdiConfig(delivery=row.delivery))
    view = node(cfg, info(0), hard=row.hard, protocol=row.protocol)
    got = {name: advertise(view.resources[f"gpufrac.dev/{name}"], view, Accounts()) for name in ALL}
    assert tuple(name for name in ALL if got[name].healthy) == row.offered
    levels = (view.resources[f"gpufrac.dev/{name}"].enforcement for name in ("shared", "sliced"))
    assert tuple(levels) == row.levels
    closed = [name for name in ALL if name not in row.offered]
    assert [name for name in closed if row.said not in str(got[name].reason)] == []
    assert (not_hard(row.delivery, row.hard) is None) is ("hard" in row.offered)
    waits = not row.hard.known
    assert all(bool(got[name].devices) is (waits or name in row.offered) for name in ALL), "a list is not torn down"


def test_the_two_ways_out_are_named() -> None:
    view = node(CONFIG, info(0), hard=missing("driver 580"), protocol=2)
    reasons = {name: view.resources[f"gpufrac.dev/{name}"].objection for name in ALL}
    assert "r615" in str(reasons["sliced"])
    assert "sm-sharing" in str(reasons["sliced"])
    assert "`enforcement: none`" in str(reasons["sliced"])
    assert "set the limit equal to the request" in str(reasons["burst"])
    assert "cooperative ones" in str(reasons["hard"])
    assert "r615" in str(reasons["hard"])
    assert "lower its `enforcement`" in str(reasons["hard"])


@pytest.mark.parametrize(("name", "said"), [("shared", ""), ("burst", "on nodes without hard"), ("free", "")])
def test_a_config_alone_tells_what_needs_hard_limits(name: str, said: str) -> None:
    (asked,) = (r for r in CONFIG.resources if r.name == f"gpufrac.dev/{name}")
    assert config_note(asked, Delivery.CDI).strip().startswith(said)
    assert bool(config_note(asked, Delivery.CDI)) is bool(said)
    assert "delivery: both" in config_note(structs.replace(asked, enforcement=Enforcement.HARD), Delivery.BOTH)


# --- borrowing


def grant(cfg: NodeConfig, name: str, slot: int, accounts: Accounts, hard: HardAbility = HARD) -> Allocation | Refusal:
    view = node(cfg, info(0), hard=hard, protocol=3)
    asked = view.resources[f"gpufrac.dev/{name}"]
    got = plan(asked, view, accounts, [device_id(uuid(0), slot)], generation=len(accounts) + 1)
    if isinstance(got, Allocation):
        accounts.add(got)
    return got


def test_memory_is_guaranteed_to_the_driver_only_where_somebody_may_borrow() -> None:
    accounts = Accounts()
    calm = grant(config(resource("a", fixed(8))), "a", 0, accounts)
    assert isinstance(calm, Allocation)
    assert (calm.enforcement, calm.soft_bytes) == (Enforcement.HARD, 0)
    among = grant(CONFIG, "shared", 1, Accounts())
    assert isinstance(among, Allocation)
    assert among.soft_bytes == among.request_bytes == 8 * GIB
    weak = grant(CONFIG, "shared", 1, Accounts(), missing("driver 580"))
    assert isinstance(weak, Allocation)
    assert (weak.enforcement, weak.soft_bytes) == (Enforcement.COOPERATIVE, 0)


def test_who_may_borrow_counts_with_its_request_and_may_exceed_what_is_left_with_its_limit() -> None:
    accounts = Accounts()
    for slot in range(9):
        got = grant(CONFIG, "burst", slot, accounts)
        assert isinstance(got, Allocation), got
        assert (got.soft_bytes, got.limit_bytes) == (8 * GIB, 16 * GIB)
    assert (accounts.granted_bytes(uuid(0)), accounts.limit_bytes(uuid(0))) == (72 * GIB, 144 * GIB)
    view = node(CONFIG, info(0), hard=HARD, protocol=3)
    assert advertise(view.resources["gpufrac.dev/burst"], view, accounts).healthy == 9, "no more than are held"


def test_who_may_borrow_leaves_alone_what_nobody_takes_back_for_others() -> None:
    """A reload allowed burst on a GPU on which shares live: these have no guarantee."""
    accounts = Accounts()
    for slot in range(8):
        grant(config(resource("a", fixed(8))), "a", slot, accounts)
    refused = grant(CONFIG, "burst", 0, accounts)
    assert isinstance(refused, Refusal)
    assert "with its limit of 16Gi those on GPU 0" in refused.message
    assert "set its limit to at most 15Gi" in refused.message
    view = node(CONFIG, info(0), hard=HARD, protocol=3)
    assert advertise(view.resources["gpufrac.dev/burst"], view, accounts).healthy == 0
    assert isinstance(grant(CONFIG, "shared", 8, accounts), Allocation)
    accounts.remove(next(iter(accounts)).key)
    accounts.remove(next(iter(accounts)).key)
    assert isinstance(grant(CONFIG, "burst", 0, accounts), Allocation), "the limits add up to what there is"


def test_a_new_neighbour_of_a_borrower_is_guaranteed_its_own_whatever_the_config_says_by_now() -> None:
    accounts = Accounts()
    grant(CONFIG, "burst", 0, accounts)
    late = grant(config(resource("a", fixed(8))), "a", 0, accounts)
    assert isinstance(late, Allocation)
    assert late.soft_bytes == 8 * GIB


def test_time_slicing_reaches_the_daemon_only_where_somebody_may_borrow() -> None:
    among = grant(CONFIG, "sliced", 0, Accounts())
    lone = resource("sliced", fixed(8), Mode.TIME_SLICING, enforcement=Enforcement.COOPERATIVE)
    alone = grant(config(lone), "sliced", 0, Accounts())
    assert isinstance(among, Allocation)
    assert isinstance(alone, Allocation)
    assert (among.default_socket, alone.default_socket) == (True, False)


def test_a_group_under_protocol_2_has_no_one_limit_where_limits_are_hard() -> None:
    cfg = config(
        resource("p", fixed(10), groups=("pair0",)),
        resource("q", fixed(20), groups=("pair0",)),
        groups=(("pair0", (0, 1)),),
    )
    for hard, fits in ((HARD, True), (missing("driver 580"), False)):
        view = node(cfg, info(0), info(1), hard=hard)
        assert bool(view.resources["gpufrac.dev/p"].sizes) is fits
    accounts = Accounts()
    accounts.add(
        structs.replace(allocation("q", "pair0::0", gib=20, gpus=(uuid(0), uuid(1))), enforcement=Enforcement.HARD)
    )
    view = node(cfg, info(0), info(1), hard=HARD)
    assert isinstance(plan(view.resources["gpufrac.dev/p"], view, accounts, ["pair0::0"], generation=2), Allocation)


def test_a_hook_that_is_there_is_not_said_to_be_missing_while_limits_cannot_be_set() -> None:
    refused = HardLimits(missing=("the driver's calls are refused: run as root",))
    assert HardAbility(refused, PLAIN_KIND, frozenset({HOOKED_KIND})).missing == refused.why_not
    assert len(HardAbility(refused, PLAIN_KIND, frozenset()).missing) == 2


@pytest.mark.parametrize(
    ("used_gib", "in_force", "said"),
    [(0, True, "may borrow 8Gi"), (10, True, "borrows 2Gi"), (10, False, "it can't be evicted"), (8, False, "")],
)
def test_nobody_is_said_to_be_evictable_without_limits_in_force(used_gib: int, in_force: bool, said: str) -> None:
    allocation = grant(CONFIG, "burst", 0, Accounts())
    assert isinstance(allocation, Allocation)
    got = burst(allocation, used_gib * GIB, in_force=in_force)
    assert said in got if said else got == ""


@pytest.mark.parametrize("capability", [(6, 1), (0, 0)], ids=["old", "not told"])
@pytest.mark.parametrize("hard", [missing("driver 580 has none"), HARD], ids=["MPS alone", "hard"])
def test_gpus_without_limits_of_mps_offer_what_holds_there_and_the_others_all(
    capability: tuple[int, int], hard: HardAbility
) -> None:
    """Mixed node: GPU 0 is below compute capability 7.0, or the driver does not tell."""
    cfg = config(
        resource("shared", fixed(8)),
        resource("loose", fixed(1), enforcement=Enforcement.NONE),
        resource("slow", fixed(8), enforcement=Enforcement.NONE, thread_percent=50),
    )
    view = node(cfg, info(0, compute_capability=capability), info(1), hard=hard)
    shared, loose, slow = (view.resources[f"gpufrac.dev/{name}"] for name in ("shared", "loose", "slow"))
    old, new = uuid(0), uuid(1)
    assert (len(loose.device_ids[old]), len(loose.device_ids[new])) == (16, 48)
    assert "thread percentages only from 7.0 on" in str(slow.unfit[old])
    assert new in slow.slots
    if hard is HARD:
        assert shared.enforcement_on(old) is shared.enforcement_on(new) is Enforcement.HARD
        return
    assert "only from 7.0 on" in str(shared.unfit[old])
    assert "enforcement: none" in str(shared.unfit[old])
    assert shared.enforcement_on(new) is Enforcement.COOPERATIVE
    assert (loose.enforcement_on(old), loose.enforcement_on(new)) == (Enforcement.NONE, Enforcement.COOPERATIVE)
