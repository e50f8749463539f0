"""Whose processes are on the GPUs, and what a named pod holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.plan.allocation import Allocation
from deviceplugin.status.clients import clients, targets
from mpsd.common.errors import ConfigError, GpufracError
from mpsd.localapi.snapshot import GpuClient
from tests.builders import reported, snapshot, uuid
from tests.world import World


class Pods:
    """ns/web (two containers), other/web, ns/db, and one allocation that the kubelet has not shown yet."""

    def __init__(self, directory: Path) -> None:
        self.world = World(directory)
        self.made: dict[str, Allocation] = {}
        wheres = [("ns", "web", "app"), ("ns", "web", "side"), ("other", "web", "app"), ("ns", "db", "app")]
        for n, where in enumerate(wheres):
            got = self.world.grant("a", f"{uuid(n % 2)}::{n}")
            self.world.kubelet.containers[where] = {got.resource: got.device_ids}
            self.made["/".join(where)] = got
        self.world.keeper.observe()
        self.made["?"] = self.world.grant("a", f"{uuid(0)}::8")

    def keys(self, *names: str) -> set[str]:
        return {self.made[name].key for name in names}


@pytest.fixture
def pods(short_tmp: Path) -> Iterator[Pods]:
    made = Pods(short_tmp)
    yield made
    made.world.ledger.close()


@pytest.mark.parametrize(
    ("pod", "container", "held"),
    [
        ("ns/web", None, ("ns/web/app", "ns/web/side")),
        ("ns/web", "side", ("ns/web/side",)),
        ("other/web", "app", ("other/web/app",)),
        ("db", None, ("ns/db/app",)),
        ("db", "app", ("ns/db/app",)),
    ],
)
def test_a_pods_allocations_are_found(pods: Pods, pod: str, container: str | None, held: tuple[str, ...]) -> None:
    found = targets(pods.world.picture().allocations, pod, container)
    assert {target.key for target in found} == pods.keys(*held)
    assert {f"{t.namespace}/{t.pod}/{t.container}" for t in found} == set(held)
    assert all(target.gpus and target.resource == "gpufrac.dev/a" for target in found)


@pytest.mark.parametrize(
    ("pod", "container", "kind", "said"),
    [
        ("web", None, ConfigError, "say one of ns/web, other/web"),
        ("gone", None, GpufracError, "ns/db, ns/web, other/web"),
        ("other/db", None, GpufracError, "ns/db"),
        ("ns/web", "none", GpufracError, "containers that hold one are app, side"),
        ("", None, GpufracError, "cannot find"),
        ("ns/", None, GpufracError, "cannot find"),
        ("x" * 10_000, "y", GpufracError, "cannot find"),
    ],
)
def test_what_is_not_found_or_not_plain_is_said(
    pods: Pods, pod: str, container: str | None, kind: type[GpufracError], said: str
) -> None:
    with pytest.raises(kind) as caught:
        targets(pods.world.picture().allocations, pod, container)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_processes_are_named_by_their_allocation(pods: Pods) -> None:
    world = pods.world
    key = pods.made["ns/web/app"].key
    first, second = reported(world.broker.node.config, world.infos, world.broker.desired())
    found = (
        GpuClient(pid=9, allocation_key=None, mps=False, command="Xorg"),
        GpuClient(pid=7, allocation_key=key, used_bytes=5, command="python3"),
        GpuClient(pid=8, allocation_key="f" * 20),
    )
    world.broker.observe_snapshot(snapshot(structs.replace(first, clients=found), second))
    gpus = clients(world.broker.node.gpus, world.picture().allocations)
    assert [(gpu.uuid, gpu.index, len(gpu.clients)) for gpu in gpus] == [(uuid(0), 0, 3), (uuid(1), 1, 0)]
    one, released, foreign = gpus[0].clients
    assert (one.pid, one.command, one.used_bytes, one.mps) == (7, "python3", 5, True)
    assert (one.resource, one.namespace, one.pod, one.container) == ("gpufrac.dev/a", "ns", "web", "app")
    assert (released.pid, released.allocation_key, released.pod) == (8, "f" * 20, "")
    assert (foreign.pid, foreign.allocation_key, foreign.mps) == (9, None, False)
