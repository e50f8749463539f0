"""Events on pods: every container that waits for its share is explained, and each that uses more than its limit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.kubernetes.model import NoEvents
from deviceplugin.status.podevents import AGAIN_S, OVER_LIMIT, PATIENCE_S, WAITING, PodNews
from mpsd.config.model import GIB
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuClient
from tests.builders import reported, snapshot
from tests.world import World


class Told(NoEvents):
    def __init__(self) -> None:
        self.events: list[tuple[str, str, str, str, str, str]] = []

    def pod(self, namespace: str, name: str, uid: str, kind: str, reason: str, message: str) -> None:
        self.events.append((namespace, name, uid, kind, reason, message))


class Node:
    def __init__(self, directory: Path) -> None:
        self.world, self.told = World(directory), Told()
        self.news = PodNews(self.told, lambda: self.world.now_s)
        self.got = self.world.grant()

    def named(self) -> None:
        self.world.run(self.got)
        self.world.holds((self.got, "uid-1"))
        self.world.keeper.observe()

    def look(self, pass_s: float = 0.0) -> list[str]:
        """The messages of another look, that long after the last one."""
        self.world.now_s += pass_s
        self.told.events.clear()
        self.news.observe(self.world.picture().allocations)
        assert {event[:4] for event in self.told.events} <= {("ns", "pod", "uid-1", "Warning")}
        return [f"{reason}: {message}" for *_, reason, message in self.told.events]

    def mpsd_goes(self) -> None:
        self.world.broker.observe_snapshot(None)
        self.world.keeper.attach()

    def uses(self, gib: int) -> None:
        gpus = reported(self.world.broker.node.config, self.world.infos, self.world.broker.desired())
        client = GpuClient(pid=7, allocation_key=self.got.key, used_bytes=gib * GIB, pod_uid="uid-1")
        self.world.broker.observe_snapshot(snapshot(structs.replace(gpus[0], clients=(client,)), *gpus[1:]))


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    made = Node(short_tmp)
    yield made
    made.world.ledger.close()


def test_a_share_that_waits_is_explained_on_its_pod(node: Node) -> None:
    node.named()
    assert node.look() == []
    node.mpsd_goes()
    assert node.look() == []  # it may be over in a moment
    (said,) = node.look(PATIENCE_S)
    assert said.startswith(f"{WAITING}: c: its container can't (re)start now")
    assert "mpsd does not answer" in said
    assert "unresolvable CDI devices" in said
    assert node.look(5) == []
    assert len(node.look(AGAIN_S)) == 1
    node.world.tell(DaemonStatus(state=DaemonState.BACKOFF, reason="it died"))
    node.world.keeper.attach()
    (said,) = node.look(1)
    assert "waiting for the MPS daemon of GPU 0" in said
    node.world.tell()
    node.world.keeper.attach()
    assert node.look(AGAIN_S) == []
    node.mpsd_goes()
    assert node.look() == []
    assert len(node.look(PATIENCE_S)) == 1


def test_a_share_whose_pod_is_not_known_yet_is_explained_once_it_is(node: Node) -> None:
    node.mpsd_goes()
    assert node.look() + node.look(PATIENCE_S) == []
    node.named()
    assert node.look() == []
    assert len(node.look(PATIENCE_S)) == 1


def test_use_beyond_the_limit_is_told_once_each_time_however_it_changes(node: Node) -> None:
    node.named()
    node.uses(16)
    assert [said.partition(",")[0] for said in node.look()] == [
        f"{OVER_LIMIT}: c: its process (pid 7) has 16Gi on GPU 0"
    ]
    node.uses(17)
    assert node.look(5) == []
    assert len(node.look(AGAIN_S)) == 1
    node.uses(8)
    assert node.look() == []
    node.uses(9)
    assert len(node.look()) == 1
