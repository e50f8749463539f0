"""The node's condition and label."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from deviceplugin.kubernetes import node as node_module
from deviceplugin.kubernetes.errors import ForbiddenError
from deviceplugin.kubernetes.model import NodeReadiness
from deviceplugin.kubernetes.node import (
    CLOSE_S,
    CONDITION,
    DRIVER_LABEL,
    Condition,
    NodeReporter,
    _explained,
    condition_patch,
    timestamp,
)
from mpsd.common import pacing as pacing_module
from mpsd.common.pacing import QUICK_REFUSALS
from tests.apiserver import Fault, Request, StubApiServer
from tests.unit.deviceplugin.kubernetes.clients import client_of, our_node
from tests.waiting import NEVER_S, WAIT_S, soon

READY = NodeReadiness("True", "AllDaemonsReady", "limits are enforced", "615")
NOT = NodeReadiness("False", "DriverTooOld", "driver 580 has no limits", "580")


class World:
    """A reporter, what it is told, and the server it reports to."""

    def __init__(self, directory: Path, server: StubApiServer) -> None:
        self.server = server
        self.readiness: NodeReadiness | Exception = READY
        self.now = 1_700_000_000.0
        self._directory = directory
        self.reporter = self.make()

    def make(self, **settings: Any) -> NodeReporter:
        client = client_of(self._directory, self.server, timeout_s=settings.pop("timeout_s", NEVER_S))
        return NodeReporter(
            client, our_node, self.ask, **{"clock": lambda: self.now, "jitter": lambda: 0.9, **settings}
        )

    def ask(self) -> NodeReadiness:
        if isinstance(self.readiness, Exception):
            raise self.readiness
        return self.readiness

    def condition(self) -> dict[str, Any]:
        return self.server.condition("n1", CONDITION) or {}

    def label(self) -> object:
        return self.server.node("n1")["metadata"]["labels"].get(DRIVER_LABEL)

    def wait(self, condition: Callable[[], bool]) -> bool:
        return self.server.wait(condition, WAIT_S)

    def say(self, readiness: NodeReadiness | Exception) -> None:
        self.readiness = readiness
        self.reporter.wake()


@pytest.fixture
def server() -> Iterator[StubApiServer]:
    with StubApiServer(["n1"]) as stub:
        yield stub


@pytest.fixture
def world(server: StubApiServer, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(node_module, "GAP_S", 0.02)
    made = World(short_tmp, server)
    yield made
    made.reporter.close()


def status_writes(request: Request) -> bool:
    return request.path.endswith("/status") and "status" in request.body


# --- the patch -----------------------------------------------------------------------------------------------------


def test_a_condition_as_kubernetes_wants_it() -> None:
    patch = condition_patch(READY, None, timestamp(0.9))
    assert patch == {
        "status": {
            "conditions": [
                {
                    "type": "gpu-fractioning.nvidia.com/Ready",
                    "status": "True",
                    "reason": "AllDaemonsReady",
                    "message": "limits are enforced",
                    "lastHeartbeatTime": "1970-01-01T00:00:00Z",
                    "lastTransitionTime": "1970-01-01T00:00:00Z",
                }
            ]
        }
    }


@given(st.sampled_from(["True", "False", "Unknown", ""]), st.sampled_from([READY, NOT]), st.none() | st.just("then"))
def test_the_time_of_transition_stays_while_the_status_does(
    status: str, wanted: NodeReadiness, since: str | None
) -> None:
    before = Condition(CONDITION, status, since)
    written = condition_patch(wanted, before, "now")["status"]["conditions"][0]
    assert written["lastTransitionTime"] == (since if status == wanted.status and since else "now")
    assert written["lastHeartbeatTime"] == "now"


@given(st.text(), st.text(max_size=2000))
def test_any_words_make_a_condition(reason: str, message: str) -> None:
    written = condition_patch(NodeReadiness("False", reason, message), None, "now")["status"]["conditions"][0]
    assert written["reason"].isascii()
    assert written["reason"].isalnum()
    assert len(written["message"]) <= 1024
    assert written["message"].isprintable()


# --- the reporter --------------------------------------------------------------------------------------------------


def test_condition_and_label_are_there_at_once_beside_those_of_others(world: World) -> None:
    world.reporter.start()
    assert world.wait(lambda: world.label() == "615")
    assert world.condition()["status"] == "True"
    assert world.server.condition("n1", "Ready") is not None
    assert world.server.node("n1")["metadata"]["labels"]["kubernetes.io/hostname"] == "n1"
    assert world.reporter.error == ""
    assert world.reporter.last_heartbeat_at == world.now


def test_a_change_is_written_at_once_and_keeps_its_time(world: World) -> None:
    world.reporter.start()
    assert world.wait(lambda: world.label() == "615")
    first = world.condition()
    world.now += 1
    world.say(structs.replace(READY, message="limits are enforced, and then some"))
    assert world.wait(lambda: world.condition()["message"].endswith("some"))
    assert world.condition()["lastTransitionTime"] == first["lastTransitionTime"]
    assert world.condition()["lastHeartbeatTime"] > first["lastHeartbeatTime"]
    world.now += 1
    world.say(NOT)
    assert world.wait(lambda: world.label() == "580")
    assert world.condition()["status"] == "False"
    assert world.condition()["lastTransitionTime"] == timestamp(world.now)


def test_waking_without_a_change_writes_nothing(world: World) -> None:
    asked = threading.Event()
    world.reporter.start()
    assert world.wait(lambda: world.label() == "615")
    count = len(world.server.requests)
    world.ask = lambda: (asked.set(), READY)[1]  # type: ignore[method-assign, func-returns-value]
    world.reporter._readiness = world.ask
    for _ in range(3):
        asked.clear()
        world.reporter.wake()
        assert asked.wait(WAIT_S)
    assert len(world.server.requests) == count


def test_what_flaps_does_not_wear_the_server_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "CHANGES", 3)
    monkeypatch.setattr(node_module, "CHANGE_EVERY_S", 0.5)
    monkeypatch.setattr(node_module, "GAP_S", 0.0)
    begun_s = time.monotonic()
    world.reporter = world.make()
    world.reporter.start()
    for number in range(50):
        said = f"{number} containers wait"
        world.say(NodeReadiness("False", "NotReady", said))
        threading.Event().wait(0.01)
    assert world.wait(lambda: world.condition().get("message") == "49 containers wait"), "the last word is said"
    writes = [request for request in world.server.requests if status_writes(request)]
    assert len(writes) <= 3 + (time.monotonic() - begun_s) / 0.5


def test_heartbeats_bring_back_what_somebody_removed_whatever_the_clock_does(world: World) -> None:
    world.reporter = world.make(heartbeat_s=0.05)
    world.reporter.start()
    assert world.wait(lambda: world.label() == "615")
    world.now -= 1e6  # the clock was put back
    assert world.wait(lambda: world.condition()["lastHeartbeatTime"] == timestamp(world.now))
    world.server.remove_node("n1")
    world.server.add_node("n1")
    assert world.wait(lambda: world.label() == "615" and world.condition().get("status") == "True")


def test_after_a_restart_the_time_of_transition_is_that_of_the_last_change(world: World) -> None:
    world.reporter.start()
    assert world.wait(lambda: world.label() == "615")
    first = world.condition()
    world.reporter._client.close()  # a crash: no last word
    again = world.make()
    world.now += 100
    again.start()
    assert world.wait(lambda: world.condition()["lastHeartbeatTime"] != first["lastHeartbeatTime"])
    assert world.condition()["lastTransitionTime"] == first["lastTransitionTime"]
    again.close()


def test_a_version_that_is_not_known_leaves_the_label_as_it_is(world: World) -> None:
    world.reporter.start()
    assert world.wait(lambda: world.label() == "615")
    for version in ("", "615.12", "x"):
        said = f"version {version!r}"
        world.say(NodeReadiness("False", "MpsdDoesNotAnswer", said, version))
        assert world.wait(partial(lambda said: world.condition()["message"] == said, said))
    assert world.label() == "615"
    assert [r.path for r in world.server.requests if r.method == "PATCH" and not status_writes(r)] == [
        "/api/v1/nodes/n1/status"
    ]


def test_closing_says_that_we_have_stopped(world: World) -> None:
    world.reporter.start()
    assert world.wait(lambda: world.label() == "615")
    world.now += 5
    world.reporter.close()
    said = world.condition()
    assert (said["status"], said["reason"]) == ("Unknown", "AgentStopped")
    assert said["lastTransitionTime"] == timestamp(world.now)
    assert world.label() == "615"
    world.reporter.close()


def test_what_ends_a_write_never_ends_the_last_word(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.reporter.start()
    assert world.wait(lambda: world.label() == "615")
    abort = world.reporter._client.abort

    def late() -> None:
        threading.Event().wait(0.2)
        abort()

    monkeypatch.setattr(world.reporter._client, "abort", late)
    world.reporter.close()
    assert world.condition()["reason"] == "AgentStopped"


def test_closing_before_the_start_is_fine(world: World) -> None:
    world.reporter.close()
    assert world.condition() == {}


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.DRIP, Fault.ERROR, Fault.DROP, Fault.ENDLESS])
def test_closing_takes_two_seconds_at_most_whatever_the_server_does(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    assert CLOSE_S <= 2.0
    monkeypatch.setattr(node_module, "CLOSE_S", 0.3)
    world.server.fault(fault)
    world.reporter.start()
    assert world.wait(lambda: len(world.server.requests) > 0)
    with soon():
        world.reporter.close()
        world.reporter._thread.join()


def test_a_write_that_hangs_is_given_up_for_the_last_word(world: World) -> None:
    world.server.fault(Fault.HANG, status_writes, times=1)
    world.reporter.start()
    assert world.wait(lambda: any(status_writes(request) for request in world.server.requests))
    with soon():
        world.reporter.close()
    assert world.condition()["reason"] == "AgentStopped"


def test_a_server_that_comes_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "RETRY_FIRST_S", 0.02)
    world.server.stop()
    world.reporter = world.make()
    world.reporter.start()
    assert world.wait(lambda: "Connection refused" in world.reporter.error)
    world.server.start()
    assert world.wait(lambda: world.label() == "615")
    assert world.wait(lambda: world.reporter.error == "")


def test_missing_rights_are_said_and_tried_slowly(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing_module, "QUICK_REFUSALS", 0)
    world.server.allowed = [("get", "nodes")]
    asked_s = time.monotonic()
    world.reporter.start()
    assert world.wait(lambda: world.reporter.error != "")
    assert "403" in world.reporter.error
    assert 'cannot patch resource "nodes/status"' in world.reporter.error
    assert world.reporter.error.endswith("grant it as deploy/rbac.yaml does")
    assert world.reporter._due_s - asked_s > 20.0
    world.server.allowed = None
    world.say(NOT)
    assert world.wait(lambda: world.condition().get("status") == "False")


def test_a_server_that_has_just_started_and_knows_no_roles_yet_costs_a_moment(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETRY_FIRST_S", 0.02)
    world.reporter.start()
    assert world.wait(lambda: world.label() == "615")
    first = world.condition()
    world.reporter._client.close()  # a crash: no last word
    world.server.fault(Fault.FORBIDDEN, times=2 * QUICK_REFUSALS)  # the look and the write, each time
    again = world.make()
    world.now += 100
    again.start()
    assert world.wait(lambda: world.condition()["lastHeartbeatTime"] != first["lastHeartbeatTime"])
    assert world.condition()["lastTransitionTime"] == first["lastTransitionTime"]
    again.close()


def test_without_the_right_to_read_nodes_there_are_still_condition_and_label(world: World) -> None:
    world.server.allowed = [("patch", "nodes/status")]
    world.reporter.start()
    assert world.wait(lambda: world.condition().get("status") == "True" and world.label() == "615")
    assert world.reporter.error == ""


def test_a_label_that_is_refused_leaves_the_condition(world: World) -> None:
    world.server.fault(Fault.FORBIDDEN, lambda request: "metadata" in (request.body or {}))
    world.reporter.start()
    assert world.wait(lambda: world.reporter.error != "")
    assert (world.condition().get("status"), world.label()) == ("True", None)


def test_the_credentials_of_another_node_are_said() -> None:
    said = 'cannot PATCH /api/v1/nodes/n2/status: 403 nodes "n2" is forbidden: node "n1" is not allowed to modify node'
    assert "; set kubernetes.nodeName" in _explained(ForbiddenError(f'{said} "n2"'))


def test_a_node_of_another_name_is_said(world: World) -> None:
    world.server.remove_node("n1")
    world.reporter.start()
    assert world.wait(lambda: world.reporter.error != "")
    assert 'nodes "n1" not found; set kubernetes.nodeName' in world.reporter.error


def test_readiness_that_can_not_be_told_is_unknown(world: World) -> None:
    world.readiness = RuntimeError("broken")
    world.reporter.start()
    assert world.wait(lambda: world.condition().get("reason") == "AgentFailed")
    assert world.condition()["status"] == "Unknown"
    world.say(READY)
    assert world.wait(lambda: world.condition()["status"] == "True")
