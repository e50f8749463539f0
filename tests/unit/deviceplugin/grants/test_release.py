"""When an allocation whose pod is gone is released: at once where its end is proven, and though its GPU is away."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.grants.holders.shares import ABSENT_S
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.ids import device_id
from mpsd.common.processes import PodProcess
from mpsd.gpu.model import GpuHealth
from mpsd.localapi.snapshot import GpuClient
from tests.builders import config, fixed, info, resource, snapshot, status, uuid
from tests.world import World

PAIR = config(resource("a", fixed(8)), resource("p", fixed(8), groups=("pair",)), groups=(("pair", (0, 1)),))


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    yield made
    made.ledger.close()


def running(world: World, name: str = "a", *ids: str) -> Allocation:
    got = world.grant(name, *ids)
    world.run(got)
    world.holds((got, "uid-1"))
    world.keeper.observe()
    return got


def ended(world: World) -> None:
    """As a kubelet leaves it: the directory goes after the containers."""
    world.kubelet.containers.clear()
    world.mpsd.on_gpu.clear()
    world.processes.clear()
    (world.root / "pods" / "uid-1").rmdir()


def look(world: World) -> None:
    world.keeper.observe()
    world.keeper.collect()


def test_a_pod_whose_directory_is_gone_has_given_its_room_back(world: World) -> None:
    running(world)
    ended(world)
    look(world)
    assert world.broker.allocations() == []
    assert world.specs.files == {}


def test_a_directory_that_is_there_still_keeps_the_grace(world: World) -> None:
    running(world)
    world.kubelet.containers.clear()
    world.write_checkpoint([])
    look(world)
    assert world.broker.allocations()


def test_a_process_holds_it_though_the_directory_is_gone(world: World) -> None:
    got = running(world)
    ended(world)
    world.mpsd.on_gpu[uuid(0)] = (GpuClient(pid=42, allocation_key=got.key, pod_uid="uid-1"),)
    look(world)
    assert "pid 42" in str(world.keeper.report.release_blocked[got.key])
    world.mpsd.on_gpu.clear()
    look(world)
    assert world.broker.allocations() == []


def test_directories_that_cannot_be_looked_at_are_not_gone(world: World) -> None:
    running(world)
    world.kubelet.containers.clear()
    (world.root / "pods").rename(world.root / "elsewhere")
    look(world)
    world.pass_time(ABSENT_S + 10)
    assert world.broker.allocations()


def test_the_end_of_a_pod_that_holds_something_is_worth_a_look_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(world.keeper, "look", lambda: looks.append(1))
    got = running(world)
    world.keeper.hint_pods()
    assert looks == []
    ended(world)
    world.mpsd.on_gpu[uuid(0)] = (GpuClient(pid=42, allocation_key=got.key, pod_uid="uid-1"),)
    world.keeper.hint_pods()
    assert looks == [1]
    look(world)
    world.keeper.hint_pods()
    assert looks == [1], "it was seen, and is held by a process"


def lose(world: World, *gone: int, reported: bool = True) -> None:
    gpus = [
        status(info(n), health=GpuHealth.LOST, reason="off the bus") if n in gone else status(info(n))
        for n in range(2)
        if reported or n not in gone
    ]
    world.broker.observe_snapshot(snapshot(*gpus))
    world.mpsd.hung = {uuid(n): "mpsd does not know the GPU" for n in gone}


@pytest.mark.parametrize("reported", [True, False])
def test_a_gpu_that_is_away_keeps_no_record_of_a_deleted_pod(world: World, reported: bool) -> None:
    running(world)
    lose(world, 0, reported=reported)
    ended(world)
    look(world)
    assert world.broker.allocations() == []


@pytest.mark.parametrize("known", [True, False])
def test_a_process_that_lives_on_beside_a_lost_gpu_holds_what_it_had(world: World, known: bool) -> None:
    got = running(world)
    lose(world, 0)
    ended(world)
    world.processes = {"uid-1" if known else "uid-9": [PodProcess(7, "c", None if known else got.key, "python")]}
    look(world)
    assert "pid 7" in str(world.keeper.report.release_blocked[got.key])
    world.processes = {}
    look(world)
    assert world.broker.allocations() == []


def test_one_that_somebody_else_releases_meanwhile_is_no_failure(world: World) -> None:
    """An Allocate that waits for room releases, too, and the look at processes is slow."""
    got = running(world)
    lose(world, 0)
    ended(world)
    world.processes = {"uid-9": [PodProcess(7, "c", None, "python")]}
    find_releasable = world.broker.releasable

    def released_meanwhile(*, pressed: bool = False) -> list[Allocation]:
        going = find_releasable(pressed=pressed)
        if got.key in {a.key for a in world.broker.allocations()}:
            world.broker.release(got.key)
        return going

    world.broker.releasable = released_meanwhile  # type: ignore[method-assign]
    look(world)
    assert world.broker.allocations() == []
    assert world.keeper.report.release_blocked == {}


def test_a_gpu_that_only_does_not_answer_is_not_away(world: World) -> None:
    got = running(world)
    world.mpsd.hung[uuid(0)] = "driver call hangs"
    world.broker.observe_snapshot(structs.replace(snapshot(status(info(1))), reason="GPU 0 has not been read"))
    ended(world)
    look(world)
    assert "driver call hangs" in str(world.keeper.report.release_blocked[got.key])


def test_a_group_with_a_lost_gpu_gives_its_healthy_member_back(short_tmp: Path) -> None:
    world = World(short_tmp, PAIR)
    got = running(world, "p", device_id("pair", 0))
    lose(world, 0)
    ended(world)
    world.mpsd.on_gpu[uuid(1)] = (GpuClient(pid=42, allocation_key=got.key, pod_uid="uid-1"),)
    look(world)
    assert "pid 42" in str(world.keeper.report.release_blocked[got.key]), "the healthy one tells"
    world.mpsd.on_gpu.clear()
    look(world)
    assert world.broker.is_idle(uuid(1))
    world.ledger.close()
