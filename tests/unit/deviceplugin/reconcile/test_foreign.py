"""GPUs that other plugins' pods hold by the checkpoint's word alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.grants.holders.model import Holder, Observation
from deviceplugin.plan.ids import device_id
from deviceplugin.plan.model import Allocation, Refusal
from deviceplugin.reconcile.foreign import InitHolders
from tests.builders import uuid
from tests.world import World

WHOLE = "nvidia.com/gpu"
SHARES = (WHOLE, (uuid(0),))
INIT = Observation({}, {SHARES: Holder("", "", "warm-up", "uid-1")})
GPUS = {uuid(0), uuid(1)}


def test_a_plain_init_container_holds_its_gpu() -> None:
    holders = InitHolders()
    reason = "the pod of UID uid-1 holds it through nvidia.com/gpu in its init container warm-up"
    held = holders.look(INIT, ["gpufrac.dev/a"], GPUS)
    assert {gpu: found.message for gpu, found in held.items()} == {uuid(0): reason}
    assert holders.entries
    assert holders.look(INIT, [WHOLE], GPUS) == {}, "ours are shares"
    assert holders.look(INIT, [], {uuid(1)}) == {}, "what a scheduler has reserved is no stranger's"


def test_a_checkpoint_that_cannot_be_read_takes_nothing_back() -> None:
    holders = InitHolders()
    holders.look(INIT, [], GPUS)
    assert uuid(0) in holders.look(Observation({}, None), [], GPUS)
    assert holders.look(Observation({}, {}), [], GPUS) == {}


def test_of_a_container_that_was_listed_once_a_stale_entry_says_nothing() -> None:
    holders = InitHolders()
    both = Observation({SHARES: Holder("ns", "job", "main")}, {SHARES: Holder("ns", "job", "main", "uid-1")})
    assert holders.look(both, [], GPUS) == {}, "PodResources says so itself"
    assert holders.look(Observation({}, both.checkpointed), [], GPUS) == {}
    assert holders.entries == frozenset()


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    yield made
    made.ledger.close()


def test_nothing_of_ours_comes_to_a_gpu_that_another_plugins_init_container_holds(world: World) -> None:
    entry: dict[str, object] = {"PodUID": "uid-1", "ContainerName": "warm-up", "ResourceName": WHOLE}
    world.write_checkpoint([entry | {"DeviceIDs": {"-1": [uuid(0)]}}])
    (world.root / "pods" / "uid-1").mkdir()
    world.keeper.observe()
    outcome = world.broker.allocate("gpufrac.dev/a", [device_id(uuid(0), 0)])
    assert isinstance(outcome, Refusal)
    assert "in its init container warm-up" in outcome.message
    assert isinstance(world.broker.allocate("gpufrac.dev/a", [device_id(uuid(1), 0)]), Allocation)
    world.broker.publish()
    before = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    world.keeper.collect()
    after = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    assert before is not None
    assert after is not None
    assert after.generation > before.generation, "the kubelet rewrites its checkpoint: the entry may be stale"
    (world.root / "pods" / "uid-1").rmdir()
    world.keeper.observe()
    assert isinstance(world.broker.allocate("gpufrac.dev/a", [device_id(uuid(0), 0)]), Allocation)
