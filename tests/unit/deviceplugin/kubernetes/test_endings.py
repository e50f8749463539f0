"""Pods that are being deleted leave their GPUs before they are killed."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deviceplugin.kubernetes.endings import MARGIN_S, Endings
from mpsd.common.errors import TransientError
from mpsd.gpu.model import Mode
from tests.builders import config, fixed, resource
from tests.waiting import WAIT_S
from tests.world import World


class Mpsd:
    def __init__(self) -> None:
        self.called = threading.Condition()
        self.calls: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.refuses = False

    def terminate(self, keys: Sequence[str], pod_uids: Sequence[str]) -> None:
        with self.called:
            self.calls.append((tuple(keys), tuple(pod_uids)))
            self.called.notify_all()
        if self.refuses:
            raise TransientError("mpsd does not answer")

    def wait(self, count: int) -> bool:
        with self.called:
            return self.called.wait_for(lambda: len(self.calls) >= count, WAIT_S)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    sliced = resource("t", fixed(8), Mode.TIME_SLICING)
    world = World(tmp_path, config(resource("a", fixed(8)), sliced))
    yield world
    world.ledger.close()


def held(world: World, name: str = "a") -> str:
    allocation = world.grant(name)
    world.run(allocation)
    world.holds((allocation, "uid-1"))
    world.keeper.observe()
    return allocation.key


def test_clients_are_terminated_before_the_grace_ends(world: World) -> None:
    key, mpsd = held(world), Mpsd()
    endings = Endings(world.broker, mpsd.terminate)
    endings.start()
    try:
        endings.deleting("uid-1", MARGIN_S + 60)
        assert mpsd.calls == []
        endings.deleting("uid-1", MARGIN_S / 2)
        assert mpsd.wait(1)
        assert mpsd.calls == [((key,), ("uid-1",))]
    finally:
        endings.close()


def test_pods_without_a_daemon_are_nobodys_business(world: World) -> None:
    held(world, "t")
    mpsd = Mpsd()
    endings = Endings(world.broker, mpsd.terminate)
    endings.deleting("uid-1", 0)
    endings.deleting("uid-of-another", 0)
    endings.start()
    endings.close()
    assert mpsd.calls == []


def test_a_failure_ends_nothing_but_itself(world: World) -> None:
    held(world)
    mpsd = Mpsd()
    mpsd.refuses = True
    endings = Endings(world.broker, mpsd.terminate)
    endings.start()
    try:
        endings.deleting("uid-1", 0)
        assert mpsd.wait(1)
        endings.deleting("uid-1", 0)
        assert mpsd.wait(2)
    finally:
        endings.close()
