"""Use beyond a limit that holds no container as a whole is known and said."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.reconcile.markers import VerdictCode
from deviceplugin.status import metrics
from deviceplugin.status.model import AllocationStatus
from mpsd.common.reason import Reason
from mpsd.config.model import GIB, Enforcement
from mpsd.localapi.snapshot import GpuClient
from tests.builders import reported, snapshot, told, uuid
from tests.world import World


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    yield made
    made.ledger.close()


def use(world: World, *clients: GpuClient, gpu: int = 0) -> list[AllocationStatus]:
    """The allocations once mpsd has shown these processes."""
    gpus = reported(world.broker.node.config, world.infos, world.broker.desired())
    gpus[gpu] = structs.replace(gpus[gpu], clients=clients)
    world.broker.observe_snapshot(snapshot(*gpus))
    return list(world.picture().allocations)


def client(key: str | None, gib: float | None, pid: int = 7, pod_uid: str = "") -> GpuClient:
    used_bytes = None if gib is None else int(gib * GIB)
    return GpuClient(pid=pid, allocation_key=key, used_bytes=used_bytes, pod_uid=pod_uid)


@pytest.mark.parametrize(
    ("used_gib", "said"),
    [
        ((8,), ""),
        ((4, 4), ""),
        ((None, None), ""),
        ((16,), "its process (pid 7) has 16Gi on GPU 0, beyond its limit of 8Gi: "),
        ((8 + 2**-30,), "its process (pid 7) has 8193Mi on GPU 0"),
        ((6, 6), "its processes (pid 7, 8) have 12Gi on GPU 0 together, beyond its limit of 8Gi: "),
        ((6, 6, None), "its processes (pid 7, 8, 9) have at least 12Gi"),
    ],
)
def test_use_beyond_a_cooperative_limit_is_said(world: World, used_gib: tuple[float | None, ...], said: str) -> None:
    got = world.grant()
    world.run(got)
    world.keeper.observe()
    (shown,) = use(world, *(client(got.key, gib, 7 + n) for n, gib in enumerate(used_gib)))
    assert shown.over_limit.startswith(said)
    assert bool(shown.over_limit) is bool(said)
    picture = world.picture()
    assert (f"ns/pod/c: {shown.over_limit}" in told(None, picture)) is bool(said)
    assert f"gpufrac_allocations_over_limit {int(bool(said))}" in metrics.render(picture)
    known = None not in used_gib
    assert shown.used_bytes == (sum(int((gib or 0) * GIB) for gib in used_gib) if known else None)


def test_a_process_that_dropped_its_marker_counts_where_its_pod_has_one_allocation(world: World) -> None:
    got = world.grant()
    world.run(got)
    world.holds((got, "uid-1"))
    world.keeper.observe()
    (shown,) = use(world, client(None, 16, pod_uid="uid-1"))
    assert "has 16Gi" in shown.over_limit
    second = world.grant("a", f"{uuid(0)}::1")
    world.run(second, container="d")
    world.holds((got, "uid-1"), (second, "uid-1"))
    world.keeper.observe()
    assert [a.over_limit for a in use(world, client(None, 16, pod_uid="uid-1"))] == ["", ""]


def test_a_process_of_another_pod_that_claims_the_allocation_is_not_its_use(world: World) -> None:
    got = world.grant()
    world.run(got)
    world.holds((got, "uid-1"))
    world.keeper.observe()
    assert [a.over_limit for a in use(world, client(got.key, 16, pod_uid="other"))] == [""]


def test_what_an_mpsd_that_is_gone_knew_of_use_is_not_said(world: World) -> None:
    got = world.grant()
    use(world, client(got.key, 16))
    world.broker.observe_snapshot(None)
    (shown,) = world.picture().allocations
    assert (shown.over_limit, shown.used_bytes) == ("", None)


def test_a_limit_that_nothing_enforces_is_said_to_be_so(world: World) -> None:
    got = world.grant()
    world.unenforced = {got.key: Reason(VerdictCode.NO_MARKER, "its marker is missing")}
    (shown,) = use(world, client(got.key, 16))
    assert shown.enforcement is Enforcement.NONE
    assert "nothing holds it to that" in shown.over_limit
