"""Requests, plans and the sentences of refusals."""

import pytest

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocate import plan
from deviceplugin.plan.allocation import Allocation, ContainerAsk, ContainerRef, Refusal, allocation_key
from deviceplugin.plan.annotated import plan_container
from deviceplugin.plan.ids import device_id
from deviceplugin.plan.reasons import OfferCode
from mpsd.common.reason import Reason
from mpsd.config.model import GIB, AnnotationsConfig, Enforcement, GpuSelection, NodeConfig
from mpsd.gpu.model import Mode
from tests.builders import allocation, config, fixed, info, node, resource, units, uuid
from tests.refusals import Kind, kind_of

CONFIG = config(
    resource("a", fixed(8)),
    resource("big", fixed(40)),
    resource("u", units()),
    resource("t", fixed(8), Mode.TIME_SLICING),
)


def ask(
    name: str, *ids: str, accounts: Accounts | None = None, cfg: NodeConfig = CONFIG, gpus: int = 2
) -> Allocation | Refusal:
    view = node(cfg, *(info(g) for g in range(gpus)))
    return plan(view.resources[f"gpufrac.dev/{name}"], view, accounts or Accounts(), ids, generation=7)


def refused(outcome: Allocation | Refusal, code: Kind) -> str:
    assert isinstance(outcome, Refusal), outcome
    assert kind_of(outcome) is code
    return outcome.message


def test_a_share_becomes_an_allocation() -> None:
    got = ask("a", device_id(uuid(1), 2))
    assert isinstance(got, Allocation)
    assert (got.gpus, got.request_bytes, got.limit_bytes, got.mode) == ((uuid(1),), 8 * GIB, 8 * GIB, Mode.SM_SHARING)
    assert got.key == allocation_key("gpufrac.dev/a", (device_id(uuid(1), 2),), 7)
    assert len(got.key) == 20


def test_the_key_does_not_depend_on_the_order_of_ids_but_on_the_generation() -> None:
    ids = tuple(device_id(uuid(0), n) for n in (3, 1, 2))
    assert allocation_key("r", ids, 1) == allocation_key("r", tuple(reversed(ids)), 1) != allocation_key("r", ids, 2)


def test_units_add_up() -> None:
    got = ask("u", *(device_id(uuid(0), n) for n in range(10)))
    assert isinstance(got, Allocation)
    assert (got.request_bytes, got.share_bytes) == (10 * GIB, GIB)


def test_two_shares_of_a_memory_resource_name_the_resource_to_use() -> None:
    text = refused(ask("a", device_id(uuid(0), 0), device_id(uuid(0), 1)), Kind.INVALID)
    assert "exactly 1" in text
    assert "ask for 16 of gpufrac.dev/u instead" in text


def test_units_on_two_gpus_are_refused() -> None:
    text = refused(ask("u", device_id(uuid(0), 0), device_id(uuid(1), 0)), Kind.INVALID)
    assert "one GPU" in text


@pytest.mark.parametrize(
    ("held", "advice"),
    [(1, "create the pod again"), (77, "at most 2"), (79, "wait for an allocation to end")],
)
def test_advice_for_units_on_two_gpus_can_be_followed(held: int, advice: str) -> None:
    accounts = Accounts()
    for gpu in (0, 1):
        accounts.add(allocation("b", device_id(uuid(gpu), 0), gib=held))
    ids = [device_id(uuid(gpu), n) for n in range(3) for gpu in (0, 1)]
    assert advice in refused(ask("u", *ids, accounts=accounts), Kind.INVALID)


def test_a_share_on_a_gpu_that_its_resource_does_not_select_is_refused_even_if_it_runs() -> None:
    cfg = config(resource("a", fixed(8), gpus=GpuSelection(include=(uuid(1),))))
    view = node(cfg, info(0), info(1))
    wanted = [device_id(uuid(0), 0)]
    for force in (False, True):
        got = plan(view.resources["gpufrac.dev/a"], view, Accounts(), wanted, generation=7, force=force)
        assert "is not open to it: not in its config" in refused(got, Kind.INVALID)


def test_a_resource_that_offers_nothing_grants_nothing_but_what_runs_counts() -> None:
    cfg = config(resource("t", fixed(8), Mode.TIME_SLICING, enforcement=Enforcement.HARD))
    view = node(cfg, info(0))
    resource_view, wanted = view.resources["gpufrac.dev/t"], [device_id(uuid(0), 0)]
    got = plan(resource_view, view, Accounts(), wanted, generation=7)
    assert "install 615 or newer" in refused(got, Kind.INVALID)
    assert isinstance(plan(resource_view, view, Accounts(), wanted, generation=7, force=True), Allocation)


@pytest.mark.parametrize(
    ("cfg", "advice"),
    [
        (config(resource("a", fixed(8)), resource("b", fixed(20))), "ask for 1 of gpufrac.dev/b (20Gi) instead"),
        (config(resource("a", fixed(8)), resource("u", units(60))), "ask for 1 of gpufrac.dev/u instead"),
        (config(resource("a", fixed(8)), resource("u", units(10))), "ask for 2 of gpufrac.dev/u instead"),
        (config(resource("a", fixed(60)), resource("u", units(50))), "ask for 1, or have a larger resource"),
        (config(resource("a", fixed(8)), resource("b", fixed(9))), "ask for 1, or have a larger resource"),
    ],
)
def test_who_asks_for_two_shares_is_told_of_what_holds_both_and_can_be_had(cfg: NodeConfig, advice: str) -> None:
    text = refused(ask("a", device_id(uuid(0), 0), device_id(uuid(0), 1), cfg=cfg), Kind.INVALID)
    assert f"not 2: {advice}" in text


@pytest.mark.parametrize("slot", ["01", "79", "999999", "00"])
def test_a_share_that_was_never_listed_is_refused(slot: str) -> None:
    text = refused(ask("u", f"{uuid(0)}::{slot}"), Kind.INVALID)
    assert "none of its shares" in text


def test_a_share_that_is_held_may_be_asked_for_although_the_config_lists_it_no_longer() -> None:
    accounts = Accounts()
    accounts.add(allocation("u", device_id(uuid(0), 500), gib=1))
    assert isinstance(ask("u", device_id(uuid(0), 500), device_id(uuid(0), 1), accounts=accounts), Allocation)


def test_a_full_gpu_says_what_is_free_and_what_would_fit() -> None:
    accounts = Accounts()
    accounts.add(allocation("big", device_id(uuid(0), 0), gib=40))
    text = refused(ask("big", device_id(uuid(0), 1), accounts=accounts), Kind.NO_ROOM)
    assert "asks for 40Gi on GPU 0" in text
    assert "39Gi of 79Gi usable is free" in text
    assert "gpufrac.dev/a (8Gi)" in text


def test_a_bound_gpu_refuses_the_other_mode() -> None:
    accounts = Accounts()
    accounts.add(allocation("a", device_id(uuid(0), 0)))
    text = refused(ask("t", device_id(uuid(0), 0), accounts=accounts), Kind.MODE_CONFLICT)
    assert "bound to sm-sharing" in text
    assert text.endswith("wait for them to end, or ask for gpufrac.dev/a, which is sm-sharing")
    alone = config(resource("t", fixed(8), Mode.TIME_SLICING))
    text = refused(ask("t", device_id(uuid(0), 0), accounts=accounts, cfg=alone), Kind.MODE_CONFLICT)
    assert text.endswith("wait for them to end, or use another node")


def annotated(mode: Mode, minimum: Enforcement, bound: Mode) -> Allocation | Refusal:
    """What an annotated container is told on driver 580, on a GPU that is bound to a mode."""
    accounts = Accounts()
    accounts.add(allocation("a", device_id(uuid(0), 0), mode=bound))
    cfg = config(annotations=AnnotationsConfig(gpus=GpuSelection(), enforcement=minimum))
    wanted = ContainerAsk(
        container=ContainerRef(namespace="ns", pod="p", pod_uid="uid", container="main"),
        request_bytes=8 * GIB,
        limit_bytes=8 * GIB,
        mode=mode,
        gpus=(uuid(0),),
    )
    return plan_container(wanted, node(cfg, info(0)), accounts, generation=7)


def test_nobody_is_told_to_wait_for_what_waiting_can_not_help() -> None:
    never = annotated(Mode.TIME_SLICING, Enforcement.COOPERATIVE, Mode.SM_SHARING)
    text = refused(never, Kind.INVALID)
    assert "wait" not in text
    assert text.endswith("set gpu-compute.mode to sm-sharing")


@pytest.mark.parametrize(
    ("minimum", "can"), [(Enforcement.NONE, True), (Enforcement.COOPERATIVE, False)], ids=["any", "cooperative"]
)
def test_the_other_mode_is_advised_where_it_would_be_granted(minimum: Enforcement, can: bool) -> None:
    text = refused(annotated(Mode.SM_SHARING, minimum, Mode.TIME_SLICING), Kind.MODE_CONFLICT)
    assert ("set gpu-compute.mode to time-slicing" in text) is can
    assert "wait for them to end" in text


def test_shares_held_already_are_counted_once() -> None:
    accounts = Accounts()
    ids = [device_id(uuid(0), n) for n in range(79)]
    accounts.add(allocation("u", *ids[:70], gib=1))
    assert accounts.granted_bytes(uuid(0)) == 70 * GIB
    assert isinstance(ask("u", *ids, accounts=accounts), Allocation)


@pytest.mark.parametrize(
    "ids",
    [
        (),
        ("nonsense",),
        ("GPU-none::0",),
        (device_id(uuid(0), 0), device_id(uuid(0), 0)),
        ("::",),
        ("x::-1",),
        ("x" * 200 + "::1",),
    ],
)
def test_nonsense_is_refused_as_invalid(ids: tuple[str, ...]) -> None:
    refused(ask("u", *ids), Kind.INVALID)


def test_what_heals_by_itself_never_refuses() -> None:
    view = node(CONFIG, info(0), daemon_waiting=Reason(OfferCode.DAEMON_NOT_READY, "its MPS daemon is starting"))
    got = plan(view.resources["gpufrac.dev/a"], view, Accounts(), [device_id(uuid(0), 0)], generation=1)
    assert isinstance(got, Allocation)


def test_a_foreign_held_gpu_refuses_with_the_holder() -> None:
    held = Reason(OfferCode.HELD_BY_OTHER_PLUGIN, "pod ns/p holds it through nvidia.com/gpu")
    view = node(CONFIG, info(0), blocked=held)
    got = plan(view.resources["gpufrac.dev/a"], view, Accounts(), [device_id(uuid(0), 0)], generation=1)
    assert "nvidia.com/gpu" in refused(got, Kind.NO_ROOM)


def test_a_running_container_is_taken_as_it_is_when_adopted() -> None:
    accounts = Accounts()
    for n in range(9):
        accounts.add(allocation("a", device_id(uuid(0), n), generation=n))
    view = node(CONFIG, info(0))
    ids = [device_id(uuid(0), 1)]
    assert isinstance(plan(view.resources["gpufrac.dev/big"], view, accounts, ids, generation=1), Refusal)
    forced = plan(view.resources["gpufrac.dev/big"], view, accounts, ids, generation=1, force=True)
    assert isinstance(forced, Allocation)
    assert forced.adopted
