"""One resource at a stub kubelet: what makes its session begin again, and how it ends."""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.api import deviceplugin_v1beta1_pb2_grpc as rpc
from deviceplugin.kubelet import session as session_module
from deviceplugin.kubelet.places import KubeletPlaces
from deviceplugin.kubelet.refusals import Refusals
from deviceplugin.kubelet.session import Again, Session, SessionState
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from mpsd.events.teller import SILENT
from tests.builders import config, fixed, resource
from tests.waiting import NEVER_S, until
from tests.world import World

RESOURCE = "gpufrac.dev/a"


class Node:
    """A kubelet and one session."""

    def __init__(self, root: Path) -> None:
        self.world = World(root, config(resource("a", fixed(8))))
        self.world.keeper.attach()
        places = KubeletPlaces(str(root / "data"), str(root / "plugins"))
        self.kubelet = StubKubelet(places.root, (), device_plugins=places.device_plugins)
        self.kubelet.start()
        self.path = os.path.join(places.device_plugins, "a.sock")
        recheck = self.world.keeper.recheck
        self.session = Session(RESOURCE, places, "a.sock", self.world.broker, recheck, Refusals(SILENT))

    def start(self) -> None:
        """Until the kubelet listens, which it may begin to before its answer to the registration is here."""
        self.session.start()
        until(lambda: self.session.streams == 1 and self.session.state is SessionState.REGISTERED)

    def close(self) -> None:
        self.session.close()
        self.kubelet.close()
        self.world.ledger.close()


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    made = Node(short_tmp)
    yield made
    made.close()


def test_a_stream_that_is_cancelled_has_the_resource_registered_anew(node: Node) -> None:
    node.start()
    with grpc.insecure_channel(f"unix:{node.path}") as channel:
        stream = rpc.DevicePluginStub(channel).ListAndWatch(pb.Empty())
        assert next(stream).devices
        before = node.session.registrations
        stream.cancel()
    until(lambda: node.session.registrations > before)
    until(lambda: node.session.streams == 1 and node.session.state is SessionState.REGISTERED)
    assert node.session.trouble is None


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the kubelet opens its stream."""
    monkeypatch.setattr(session_module, "STREAM_DUE_S", NEVER_S)


@pytest.mark.usefixtures("patient")
def test_a_session_that_ends_takes_its_socket_along_and_begins_nothing(node: Node) -> None:
    node.start()
    node.session.close()
    assert not os.path.exists(node.path)
    assert (node.session.state, node.session.streams, node.session.registrations) == (SessionState.STOPPED, 0, 1)
    until(lambda: not node.kubelet.resources[RESOURCE].allocatable)


def test_a_session_that_never_started_to_serve_ends_as_well(node: Node) -> None:
    node.kubelet.stop()
    node.session.start()
    until(lambda: node.session.state is SessionState.WAITING)
    node.session.close()
    assert (node.session.state, node.session.registrations) == (SessionState.STOPPED, 0)


@pytest.mark.usefixtures("patient")
def test_a_round_that_fails_is_begun_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = Session._begin_again, [ValueError("unforeseen")]

    def begin_again(self: Session, again: Again, kubelet: int | None) -> int | None:
        if failures:
            raise failures.pop()
        return real(self, again, kubelet)

    monkeypatch.setattr(session_module, "RETRY_LAST_S", 0.01)
    monkeypatch.setattr(Session, "_begin_again", begin_again)
    node.start()
    assert (failures, node.session.registrations) == ([], 1)


@pytest.mark.usefixtures("patient")
def test_only_what_does_not_serve_well_is_served_anew(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration that fails is tried again on the socket that is there."""
    real, refusals = Session._register, [OSError("not now")] * 2
    served: list[int] = []
    start = Session._start_server

    def register(self: Session) -> None:
        if refusals:
            raise refusals.pop()
        real(self)

    def start_server(self: Session) -> None:
        served.append(1)
        start(self)

    monkeypatch.setattr(Session, "_register", register)
    monkeypatch.setattr(Session, "_start_server", start_server)
    node.start()
    assert (refusals, len(served), node.session.registrations) == ([], 1, 1)
