"""A simulated node is up once the kubelet has the lists that show what mpsd sees: none of an earlier moment will do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deviceplugin.plan.ids import device_id
from deviceplugin.sim.kubelet.devicemanager import NodeResource
from deviceplugin.sim.node.readiness import lists_pending
from tests.builders import snapshot, uuid
from tests.world import World

SEEN = msgspec.structs.replace(snapshot(), instance="m", generation=7)
STATUS: dict[str, Any] = {
    "mpsdError": "",
    "mpsdInstance": "m",
    "mpsdGeneration": 7,
    "runtime": "containerd 2.1.9",
    "listsAreNew": True,
    "resources": [{"name": "a", "registration": "registered", "registrationError": "", "healthy": 3, "listed": 4}],
}
SHOWN = {"a": NodeResource(capacity=4, allocatable=3)}


@pytest.mark.parametrize("generation", [7, 8])
def test_nothing_is_waited_for_once_all_is_there(generation: int) -> None:
    assert lists_pending(SEEN, STATUS | {"mpsdGeneration": generation}, SHOWN) == ""


@pytest.mark.parametrize(
    ("lag", "reason"),
    [
        ({"mpsdError": "mpsd sees no GPU"}, "mpsd sees no GPU"),
        ({"mpsdGeneration": 6}, "what mpsd sees"),
        ({"mpsdInstance": "older", "mpsdGeneration": 9}, "what mpsd sees"),
        ({"runtime": ""}, "container runtime"),
        ({"listsAreNew": False}, "not listed yet"),
        ({"resources": [STATUS["resources"][0] | {"registration": "starting"}]}, "a is not registered: no reason"),
        ({"resources": [STATUS["resources"][0] | {"name": "b"}]}, "b is not registered"),
        ({"resources": [STATUS["resources"][0] | {"healthy": 4}]}, "has not got the list of a"),
    ],
)
def test_what_lags_behind_is_waited_for(lag: dict[str, Any], reason: str) -> None:
    assert reason in lists_pending(SEEN, STATUS | lag, SHOWN)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.ledger.close()


def test_a_plugin_that_heard_of_gpus_and_has_not_listed_them_yet_is_behind(world: World) -> None:
    """Its lists are empty then, as the kubelet's are: that the two agree says nothing."""
    heard = world.picture()
    assert (heard.mpsd_error, heard.lists_are_new) == ("", False)
    assert [resource.listed for resource in heard.resources] == [0, 0, 0]
    world.keeper.attach()
    listed = world.picture()
    assert listed.lists_are_new
    assert all(resource.listed for resource in listed.resources)
    world.grant()
    assert world.picture().lists_are_new
    world.broker.allocate("gpufrac.dev/b", [device_id(uuid(1), 0)])
    assert not world.picture().lists_are_new
    world.broker.observe_snapshot(SEEN)
    behind = world.picture()
    assert (behind.mpsd_instance, behind.mpsd_generation, behind.lists_are_new) == ("m", 7, False)
