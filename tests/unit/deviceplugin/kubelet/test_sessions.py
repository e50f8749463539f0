"""Registration at a stub kubelet: again for every new one, never for a socket that only looks different."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.kubelet import session as session_module
from deviceplugin.kubelet.places import KubeletPlaces
from deviceplugin.kubelet.reasons import KubeletCode
from deviceplugin.kubelet.session import Session, SessionState
from deviceplugin.kubelet.sessions import Sessions
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from mpsd.common import threads
from mpsd.common.errors import TransientError
from mpsd.common.socketfile import SocketFile
from tests.builders import config, fixed, resource
from tests.waiting import until
from tests.world import World

RESTARTS = 12
CHANGES = 40


class Node:
    """A kubelet whose --root-dir is not where its device plugins are, and a plugin's sessions."""

    def __init__(self, root: Path) -> None:
        self.world = World(root, config(resource("a", fixed(8)), resource("b", fixed(16))))
        places = KubeletPlaces(str(root / "data"), str(root / "plugins"))
        self.kubelet = StubKubelet(places.root, (), device_plugins=places.device_plugins)
        self.kubelet.start()
        self.world.keeper.attach()
        self.sessions = Sessions(places, self.world.broker, lambda *, release=True: None)

    @property
    def all(self) -> list[Session]:
        return list(self.sessions.by_resource().values())

    def until_registered(self, since: list[int]) -> None:
        """Each resource anew, and the kubelet has its list."""
        until(lambda: all(now > then for now, then in zip(self.registrations(), since, strict=True)))
        until(lambda: all(self.kubelet.resources[session.resource].allocatable for session in self.all))

    def registrations(self) -> list[int]:
        return [session.registrations for session in self.all]

    def close(self) -> None:
        self.sessions.close()
        self.kubelet.close()
        self.world.ledger.close()


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    made = Node(short_tmp)
    yield made
    made.close()


def test_every_restart_of_the_kubelet_is_noticed(node: Node) -> None:
    node.sessions.sync()
    until(lambda: all(node.registrations()))
    for _ in range(RESTARTS):
        before = node.registrations()
        node.kubelet.stop()
        node.kubelet.start()
        node.sessions.hint()
        node.until_registered(since=before)


def test_mode_and_times_of_the_sockets_register_nothing_anew(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.sessions.sync()
    until(lambda: all(session.streams for session in node.all))
    before = node.registrations()
    looks: list[str] = []
    real = SocketFile.look

    def look(self: SocketFile) -> int | None:
        looks.append(self.path)
        return real(self)

    monkeypatch.setattr(SocketFile, "look", look)
    paths = [node.kubelet.socket, *(session._path for session in node.all)]
    for change in range(CHANGES):
        for path in paths:
            os.chmod(path, 0o600 if change % 2 else 0o660)
            os.utime(path)
        looks.clear()
        node.sessions.hint()
        until(lambda: looks.count(node.kubelet.socket) >= 2 * len(node.all) or looks.count(paths[1]) >= 1)
    assert node.registrations() == before
    assert all(session.state is SessionState.REGISTERED for session in node.all)


def test_a_session_that_got_no_thread_is_begun_by_the_next_look(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept was started: else the resource would never be served again."""

    def refuse(self: threads.GuardedThread) -> None:
        raise TransientError("cannot start the thread")

    with monkeypatch.context() as patch:
        patch.setattr(threads.GuardedThread, "start", refuse)
        with pytest.raises(TransientError):
            node.sessions.sync()
    node.sessions.sync()
    until(lambda: len(node.all) == 2 and all(node.registrations()))


def test_a_pool_that_got_no_threads_is_tried_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = threads.full_pool, [TransientError("cannot start the thread x")] * 2

    def full_pool(workers: int, name: str) -> object:
        if refusals:
            raise refusals.pop()
        return real(workers, name)

    monkeypatch.setattr(session_module, "full_pool", full_pool)
    node.sessions.sync()
    until(lambda: len(node.all) == 2 and all(node.registrations()))
    assert refusals == []


def test_a_kubelet_that_is_not_there_is_explained_by_the_pair_of_settings(node: Node) -> None:
    node.kubelet.stop()
    node.sessions.sync()
    troubles = until(lambda: [session.trouble for session in node.all if session.trouble])
    assert troubles[0].code == KubeletCode.NOT_THERE
    assert "kubelet.devicePlugins" in troubles[0].message
