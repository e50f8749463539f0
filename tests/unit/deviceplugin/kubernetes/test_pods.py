"""The pods of this node."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from deviceplugin.kubernetes import client as client_module
from deviceplugin.kubernetes import errors as errors_module
from deviceplugin.kubernetes import pods as pods_module
from deviceplugin.kubernetes.model import PodRef
from deviceplugin.kubernetes.pods import ApiPod, Deleting, PodTable, PodWatch, _Metadata, _Spec
from mpsd.common import pacing as pacing_module
from mpsd.common.pacing import QUICK_REFUSALS, Backoff, Failure
from tests.apiserver import Fault, Request, StubApiServer
from tests.unit.deviceplugin.kubernetes.clients import client_of, our_node
from tests.waiting import NEVER_S, WAIT_S


def pod(uid: str, *, deleted: str | None = None, grace: int | None = None) -> ApiPod:
    return ApiPod(_Metadata("ns", f"p-{uid}", uid, "1", deleted, grace), _Spec())


def ref(uid: str) -> PodRef:
    return PodRef("ns", f"p-{uid}", uid)


# --- the table -----------------------------------------------------------------------------------------------------


def test_a_pod_begins_to_be_deleted_once() -> None:
    table = PodTable()
    assert table.show(pod("a")) is None
    assert table.show(pod("a", deleted="then", grace=40)) == Deleting(ref("a"), 40.0)
    assert table.show(pod("a", deleted="then", grace=0)) is None
    assert table.gone(pod("a", deleted="then")) is None
    assert table.show(pod("a", deleted="then", grace=5)) is None, "a server that lags shows it anew"
    assert table.replace([]) == []


def test_a_pod_that_is_gone_without_grace_counts_too() -> None:
    table = PodTable()
    table.show(pod("a"))
    assert table.gone(pod("a")) == Deleting(ref("a"), 0.0)
    assert table.get("a") is None


def test_a_list_tells_of_those_that_are_deleted_and_of_those_that_are_gone() -> None:
    table = PodTable()
    assert table.replace([pod("a"), pod("b"), pod("c", deleted="then")]) == [Deleting(ref("c"), 30.0)]
    assert table.replace([pod("a"), pod("d", deleted="then", grace=-1)]) == [
        Deleting(ref("d"), 0.0),
        Deleting(ref("b"), 0.0),
    ]
    assert len(table) == 2


def test_pods_beyond_a_bound_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods_module, "MAX_TOLD", 3)
    table = PodTable(limit=2)
    for uid in "abcde":
        table.show(pod(uid))
        table.show(pod(uid, deleted="then"))
    assert (len(table), len(table._told)) == (2, 3)
    assert table.ignored == 6
    table.show(ApiPod(_Metadata(uid="a"), _Spec("Never")))
    kept = table.get("a")
    assert kept is not None
    assert kept.restart_policy == "Never", "one that is known may change"


# --- the watch -----------------------------------------------------------------------------------------------------


class World:
    def __init__(self, directory: Path, server: StubApiServer) -> None:
        self.server = server
        self.told: list[tuple[str, float]] = []
        self.watch = PodWatch(client_of(directory, server), our_node, self.tell, jitter=lambda: 0.9)

    def tell(self, pod: PodRef, grace_s: float) -> None:
        self.told.append((pod.name, grace_s))

    def wait(self, condition: Callable[[], bool]) -> bool:
        return self.server.wait(condition, WAIT_S)

    def start(self) -> None:
        self.watch.start()
        assert self.wait(lambda: self.server.watches == 1)

    def again(self) -> bool:
        """Whether a watch runs, and all is known."""
        return self.wait(lambda: self.server.watches == 1 and self.watch.error == "")

    def verbs(self) -> list[str]:
        return [request.right[0] for request in self.server.requests]


@pytest.fixture
def server() -> Iterator[StubApiServer]:
    with StubApiServer(["n1"]) as stub:
        yield stub


@pytest.fixture
def world(server: StubApiServer, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(pods_module, "WATCH_AGAIN_S", 0.02)
    monkeypatch.setattr(pods_module, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(errors_module, "MAX_RETRY_AFTER_S", 0.05)
    made = World(short_tmp, server)
    yield made
    made.watch.close()


def watches(request: Request) -> bool:
    return request.right[0] == "watch"


def lists(request: Request) -> bool:
    return request.right[0] == "list"


def test_what_is_kept_of_a_pod(world: World) -> None:
    known = world.server.add_pod("ns", "a", node="n1")
    elsewhere = world.server.add_pod("ns", "b", node="n2")
    assert world.watch.restart_policy(known) is None
    world.start()
    later = world.server.add_pod("ns", "c", node="n1", restart_policy="Never")
    assert world.wait(lambda: len(world.watch) == 2)
    assert (world.watch.restart_policy(known), world.watch.restart_policy(later)) == ("Always", "Never")
    assert world.watch.restart_policy(elsewhere) is None
    query = world.server.requests[0].query
    assert (query["fieldSelector"], query["resourceVersion"]) == ("spec.nodeName=n1", "0")


def test_deletions_are_told_once_also_of_before_the_start(world: World) -> None:
    world.server.add_pod("ns", "early", node="n1")
    world.server.delete_pod("ns", "early", 60)
    world.start()
    assert world.wait(lambda: world.told == [("early", 60.0)])
    world.server.add_pod("ns", "p", node="n1")
    world.server.touch_pod("ns", "p", {"a": "b"})
    world.server.delete_pod("ns", "p", 20)
    world.server.touch_pod("ns", "p", {"a": "c"})
    world.server.remove_pod("ns", "p")
    world.server.remove_pod("ns", "early")
    assert world.wait(lambda: len(world.watch) == 0 and len(world.told) == 2), "it is told by a thread of its own"
    assert world.told == [("early", 60.0), ("p", 20.0)]


def test_a_slow_or_broken_callback_delays_no_news(world: World) -> None:
    go = threading.Event()

    def tell(pod: PodRef, grace_s: float) -> None:
        go.wait(WAIT_S)
        world.tell(pod, grace_s)
        raise RuntimeError("broken")

    world.watch._calls._on_deleting = tell
    world.start()
    for name in "ab":
        world.server.add_pod("ns", name, node="n1")
        world.server.delete_pod("ns", name)
    world.server.add_pod("ns", "c", node="n1")
    assert world.wait(lambda: len(world.watch) == 3)
    assert world.told == []
    go.set()
    assert world.wait(lambda: world.told == [("a", 30.0), ("b", 30.0)])


def test_a_watch_that_ended_goes_on_where_it_was(world: World) -> None:
    world.server.add_pod("ns", "a", node="n1")
    world.start()
    world.server.bookmark()
    for count in (2, 3):
        world.server.end_watches()
        assert world.wait(partial(lambda expected: world.verbs().count("watch") == expected, count))
        assert world.again()
    world.server.delete_pod("ns", "a")
    assert world.wait(lambda: world.told == [("a", 30.0)])
    assert world.verbs().count("list") == 1


def test_a_watch_that_broke_begins_with_a_list_no_older_than_what_is_known(world: World) -> None:
    world.server.add_pod("ns", "a", node="n1")
    world.start()
    world.server.end_watches(reset=True)
    assert world.wait(lambda: world.verbs().count("watch") == 2)
    assert world.verbs() == ["list", "watch", "list", "watch"]
    second = [request for request in world.server.requests if lists(request)][1]
    assert int(second.query["resourceVersion"]) > 0
    assert second.query["resourceVersionMatch"] == "NotOlderThan"


def test_what_happened_between_two_watches_is_not_missed(world: World) -> None:
    world.server.add_pod("ns", "a", node="n1")
    world.server.add_pod("ns", "b", node="n1")
    world.start()
    world.server.stop()
    world.server.delete_pod("ns", "a", 7)
    world.server.remove_pod("ns", "b")
    world.server.add_pod("ns", "c", node="n1")
    world.server.start()
    assert world.wait(lambda: world.told == [("a", 7.0), ("b", 0.0)])
    assert world.wait(lambda: len(world.watch) == 2)


def test_a_version_too_old_leads_to_a_list_no_older_than_what_is_known(world: World) -> None:
    world.server.add_pod("ns", "a", node="n1")
    world.server.add_pod("ns", "b", node="n1")
    world.start()
    world.server.stop()
    world.server.remove_pod("ns", "b")
    world.server.expire()
    world.server.start()
    assert world.wait(lambda: world.told == [("b", 0.0)])
    second = [request for request in world.server.requests if lists(request)][1]
    assert int(second.query["resourceVersion"]) > 0
    assert second.query["resourceVersionMatch"] == "NotOlderThan"
    world.server.expire()
    assert world.wait(lambda: world.verbs().count("list") == 3)
    assert world.again()
    assert len(world.watch) == 1


def test_a_server_put_back_in_time_is_asked_for_what_its_store_has(world: World) -> None:
    world.server.add_pod("ns", "a", node="n1")
    world.start()
    world.server.add_pod("ns", "b", node="n1")
    assert world.wait(lambda: len(world.watch) == 2)
    world.server.stop()
    assert world.wait(lambda: "Connection refused" in world.watch.error)
    world.server.remove_pod("ns", "b")  # it was never there
    world.server.put_back(2)
    world.server.start()
    assert world.wait(lambda: world.told == [("b", 0.0)])
    assert world.again()
    last = [request for request in world.server.requests if lists(request)][-1]
    assert "resourceVersion" not in last.query
    world.server.delete_pod("ns", "a", 7)
    assert world.wait(lambda: world.told[1:] == [("a", 7.0)])


def test_a_server_that_has_just_started_and_knows_no_roles_yet_costs_a_moment(world: World) -> None:
    world.server.add_pod("ns", "a", node="n1")
    world.start()
    world.server.stop()
    world.server.delete_pod("ns", "a", 7)
    world.server.fault(Fault.FORBIDDEN, times=QUICK_REFUSALS)
    world.server.start()
    assert world.wait(lambda: world.told == [("a", 7.0)])
    assert world.again()


def test_a_version_too_old_after_a_long_outage_is_no_reason_to_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods_module, "WATCH_GOOD_S", 0.0)
    world.server.add_pod("ns", "a", node="n1")
    world.start()
    for kind in Failure:
        for _ in range(20):
            world.watch._backoff.pause_s(kind=kind)
    world.server.delete_pod("ns", "a", 7)
    world.server.expire()
    assert world.wait(lambda: world.verbs().count("list") == 2)
    assert world.wait(lambda: world.told == [("a", 7.0)])


def test_a_server_that_is_busy_at_first_after_a_long_outage_costs_a_moment(world: World) -> None:
    world.server.add_pod("ns", "a", node="n1")
    world.start()
    for _ in range(20):
        world.watch._backoff.pause_s(kind=Failure.AWAY)
    world.server.fault(Fault.BUSY, lists, times=1)
    world.server.delete_pod("ns", "a", 7)
    world.server.expire()
    assert world.wait(lambda: world.told == [("a", 7.0)])
    assert world.again()


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("stage", [lists, watches])
def test_every_fault_heals(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Fault, stage: Callable[[Request], bool]
) -> None:
    monkeypatch.setattr(client_module, "MAX_OBJECT_BYTES", 1 << 20)
    monkeypatch.setattr(client_module, "WATCH_ENDS_S", 0.3)
    world.watch._backoff = Backoff(0.02, 0.1, lambda: 0.0)
    world.watch._client._timeout_s = 0.3
    world.server.fault(fault, stage, times=2)
    world.server.add_pod("ns", "a", node="n1")
    world.watch.start()
    assert world.wait(lambda: len([request for request in world.server.requests if stage(request)]) >= 3)
    monkeypatch.setattr(client_module, "WATCH_ENDS_S", 10.0)
    world.server.delete_pod("ns", "a")
    assert world.wait(lambda: world.told == [("a", 30.0)])
    assert world.again()


def test_missing_rights_are_said_and_tried_slowly(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing_module, "QUICK_REFUSALS", 0)
    world.server.allowed = [("list", "pods")]
    world.watch.start()
    assert world.wait(lambda: 'cannot watch resource "pods"' in world.watch.error)
    assert world.watch.error.endswith("grant it as deploy/rbac.yaml does")
    assert world.watch.synced
    asked = len(world.server.requests)
    threading.Event().wait(0.3)
    assert len(world.server.requests) == asked


def test_a_server_that_ends_each_watch_at_once_is_not_asked_in_a_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods_module, "WATCH_AGAIN_S", NEVER_S)
    world.start()
    world.server.end_watches()
    assert world.wait(lambda: world.server.watches == 0)
    threading.Event().wait(0.3)
    assert world.verbs().count("watch") == 1


def test_a_large_list_is_never_held_as_a_whole(world: World) -> None:
    for number in range(20):
        world.server.add_pod("ns", f"p{number}", node="n1", annotations={"a": "x" * 250_000})
    world.start()
    assert len(world.watch) == 20


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.DRIP, Fault.ENDLESS])
@pytest.mark.parametrize("stage", [lists, watches])
def test_closing_is_prompt_whatever_the_server_does(
    world: World, fault: Fault, stage: Callable[[Request], bool]
) -> None:
    world.server.fault(fault, stage)
    world.watch.start()
    assert world.wait(lambda: any(stage(request) for request in world.server.requests))
    world.watch.close()
    assert not world.watch._thread.is_alive()


def test_closing_before_the_start_is_fine(world: World) -> None:
    world.watch.close()
