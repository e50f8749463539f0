"""Events: what is sent, what is counted, what is left out."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.kubernetes import errors as errors_module
from deviceplugin.kubernetes import events as events_module
from deviceplugin.kubernetes.events import (
    BURST,
    EVERY_S,
    MAX_QUEUED,
    MAX_QUEUED_PER_OBJECT,
    MAX_REFUSALS,
    EventKey,
    EventQueue,
    EventRecorder,
    Pending,
    cleaned,
    event_body,
)
from mpsd.common.pacing import Bucket
from tests.apiserver import Fault, StubApiServer
from tests.unit.deviceplugin.kubernetes.clients import client_of, our_node
from tests.waiting import WAIT_S, soon


def key(name: str = "p", message: str = "m", namespace: str = "ns") -> EventKey:
    return EventKey(namespace, name, f"uid-{name}", "Warning", "Refused", message)


# --- the queue -----------------------------------------------------------------------------------------------------


def drain(queue: EventQueue, now_s: float) -> list[Pending]:
    taken = []
    while pending := queue.take(now_s):
        taken.append(pending)
    return taken


def test_repeats_are_counted_in_one() -> None:
    queue = EventQueue(0.0)
    for at in (10.0, 11.0, 12.0):
        queue.add(key(), at)
    assert drain(queue, 0.0) == [Pending(key(), 3, 10.0, 12.0)]
    assert queue.dropped == 0


def test_an_object_may_burst_and_then_waits_while_others_go_on() -> None:
    queue = EventQueue(0.0)
    for number in range(BURST + 2):
        queue.add(key(message=str(number)), 0.0)
    queue.add(key("quiet"), 0.0)
    assert [p.key.message for p in drain(queue, 0.0)] == ["0", "1", "2", "3", "4"], "five a second in all"
    assert [p.key.name for p in drain(queue, 1.0)] == ["quiet"]
    assert queue.wait_s(1.0) == pytest.approx(EVERY_S - 1.0)
    assert [p.key.message for p in drain(queue, EVERY_S)] == ["5"]
    assert [p.key.message for p in drain(queue, 2 * EVERY_S)] == ["6"]
    assert queue.wait_s(30.0) is None


def test_a_flood_of_one_object_pushes_out_its_own_oldest_only() -> None:
    queue = EventQueue(0.0)
    queue.add(key("victim"), 0.0)
    for number in range(1000):
        queue.add(key("noisy", str(number)), 0.0)
    assert len(queue) == 1 + MAX_QUEUED_PER_OBJECT
    assert queue.dropped == 1000 - MAX_QUEUED_PER_OBJECT
    assert queue.take(0.0) == Pending(key("victim"), 1, 0.0, 0.0)


def test_beyond_the_bound_the_oldest_goes_with_its_count() -> None:
    queue = EventQueue(0.0)
    queue.add(key("p0"), 0.0)
    for number in range(MAX_QUEUED + 1):
        queue.add(key(f"p{number}"), 0.0)
    assert (len(queue), queue.dropped) == (MAX_QUEUED, 2)


def test_what_could_not_be_sent_is_the_next_one_with_what_came_meanwhile() -> None:
    queue = EventQueue(0.0)
    queue.add(key("a"), 1.0)
    queue.add(key("b"), 1.0)
    pending = queue.take(0.0)
    assert pending is not None
    queue.add(key("a"), 5.0)
    queue.put_back(pending)
    assert queue.take(0.0) == Pending(key("a"), 2, 1.0, 5.0)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(0, 30), st.booleans(), st.floats(0, 5)), max_size=300
)


@given(OPERATIONS)
def test_nothing_is_lost_uncounted_and_the_rates_hold(operations: list[tuple[str, int, bool, float]]) -> None:
    now_s, added, taken = 0.0, 0, 0
    sent: dict[str, int] = {}
    queue = EventQueue(now_s)
    for name, message, take, gap in operations:
        now_s += gap
        if take:
            wait_s = queue.wait_s(now_s)
            pending = queue.take(now_s)
            assert (pending is not None) == (wait_s == 0.0)
            if pending is not None:
                taken += pending.count
                sent[pending.key.name] = sent.get(pending.key.name, 0) + 1
                assert sent[pending.key.name] <= BURST + now_s / EVERY_S + 1e-3
                assert sum(sent.values()) <= 5 + 5 * now_s + 1e-3
        else:
            queue.add(key(name, str(message)), now_s)
            added += 1
        assert len(queue) <= MAX_QUEUED
    waiting = sum(pending.count for pending in queue._pending.values())
    assert added == taken + waiting + queue.dropped


# --- the event -----------------------------------------------------------------------------------------------------


@given(st.text(st.characters(), max_size=3000))
def test_messages_are_one_line_of_at_most_1024_printable_characters(text: str) -> None:
    line = cleaned(text)
    assert len(line) <= 1024
    assert line.isprintable()
    line.encode()


def test_hostile_messages() -> None:
    assert cleaned("a\x1b[31mb\r\nc\u202ed\ud800e\x00") == "a [31mb c d e"
    assert len(cleaned("x" * 2000)) == 1024
    assert cleaned("x" * 2000).endswith("...")


@given(st.text("abc-.", min_size=1, max_size=253), st.text(max_size=20))
def test_names_are_stable_their_own_and_fit(name: str, message: str) -> None:
    first = EventKey("ns", f"a{name}"[:253], "u", "Normal", "R", message)
    assert first.event_name == EventKey("ns", first.name, "u", "Normal", "R", message).event_name
    assert first.event_name != EventKey("ns", first.name, "v", "Normal", "R", message).event_name
    assert len(first.event_name) <= 253
    assert events_module._NAME.fullmatch(first.event_name)


def test_the_body_is_an_event_of_core_v1() -> None:
    body = event_body(Pending(key(), 2, 0.0, 61.0), "n1")
    assert body == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "ns", "name": key().event_name},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "uid-p", "namespace": "ns"},
        "type": "Warning",
        "reason": "Refused",
        "message": "m",
        "count": 2,
        "firstTimestamp": "1970-01-01T00:00:00Z",
        "lastTimestamp": "1970-01-01T00:01:01Z",
        "source": {"component": "gpufrac", "host": "n1"},
        "reportingComponent": "gpufrac",
        "reportingInstance": "n1",
    }
    node = event_body(Pending(EventKey("", "n1", "n1", "Normal", "R", "m"), 1, 0.0, 0.0), "n1")
    assert node["metadata"]["namespace"] == "default"
    assert node["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"}


# --- the recorder --------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[StubApiServer]:
    with StubApiServer(["n1"]) as stub:
        yield stub


@pytest.fixture
def recorder(server: StubApiServer, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventRecorder]:
    unhurried(monkeypatch)
    made = EventRecorder(client_of(short_tmp, server), our_node, clock=lambda: 0.0, jitter=lambda: 0.9)
    yield made
    made.close()


def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are the queue's affair, tried above."""
    monkeypatch.setattr(events_module, "OVERALL_BURST", 1000)
    monkeypatch.setattr(events_module, "BURST", 1000)
    monkeypatch.setattr(events_module, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(errors_module, "MAX_RETRY_AFTER_S", 0.05)


def seen(server: StubApiServer) -> list[tuple[str, str, int]]:
    return [(e["involvedObject"]["name"], e["message"], e["count"]) for e in server.events()]


def wait(server: StubApiServer, condition: Callable[[], bool]) -> bool:
    return server.wait(condition, WAIT_S)


def test_events_reach_pod_and_node(recorder: EventRecorder, server: StubApiServer) -> None:
    recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")  # also before the start
    recorder.start()
    recorder.node("Normal", "Started", "hello")
    assert wait(server, lambda: recorder.sent == 2)
    assert seen(server) == [("p", "no room", 1), ("n1", "hello", 1)]
    assert (recorder.error, recorder.dropped) == ("", 0)


def test_repeats_are_counted_in_the_event_that_is_there(recorder: EventRecorder, server: StubApiServer) -> None:
    recorder.start()
    for count in (1, 2, 3):
        recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
        assert wait(server, partial(lambda expected: recorder.sent == expected, count))
        assert seen(server) == [("p", "no room", count)]


def test_after_our_restart_counting_goes_on(
    recorder: EventRecorder, server: StubApiServer, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.start()
    for _ in range(3):
        recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: seen(server)[-1:] == [("p", "no room", 3)])
    again = EventRecorder(client_of(short_tmp, server), our_node)
    again.start()
    again.pod("ns", "p", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: again.sent == 1)
    assert seen(server) == [("p", "no room", 4)]
    assert server.events()[0]["lastTimestamp"] > "2020"
    again.close()


def test_an_event_that_the_server_forgot_is_made_again(recorder: EventRecorder, server: StubApiServer) -> None:
    recorder.start()
    recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: recorder.sent == 1)
    server.forget_events()
    recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: recorder.sent == 2)
    assert seen(server) == [("p", "no room", 1)]


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.DROP, Fault.BUSY, Fault.PAGE, Fault.TRUNCATED])
def test_what_heals_loses_no_event(recorder: EventRecorder, server: StubApiServer, fault: Fault) -> None:
    server.fault(fault, times=2)
    recorder.start()
    recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
    recorder.pod("ns", "q", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: recorder.sent == 2)
    assert sorted(seen(server)) == [("p", "no room", 1), ("q", "no room", 1)]
    assert recorder.error == ""


def test_a_server_that_comes_late_hears_what_was_counted_meanwhile(
    recorder: EventRecorder, server: StubApiServer
) -> None:
    server.stop()
    recorder.start()
    for _ in range(50):
        recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: recorder.error != "")
    server.start()
    assert wait(server, lambda: seen(server) == [("p", "no room", 50)])


def test_missing_rights_are_said_and_lose_the_event(recorder: EventRecorder, server: StubApiServer) -> None:
    server.allowed = ()
    recorder.start()
    recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: recorder.dropped == 1)
    assert wait(server, lambda: 'cannot create resource "events"' in recorder.error)
    assert len(server.requests) == MAX_REFUSALS + 1
    recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: recorder.dropped == 2)
    assert len(server.requests) == MAX_REFUSALS + 2, "that rights are missing is known now"
    server.allowed = None
    recorder.pod("ns", "q", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: recorder.sent == 1)
    assert recorder.error == ""


@pytest.mark.parametrize("right", ["create", "patch"])
def test_a_server_that_has_just_started_and_knows_no_roles_yet_loses_no_event(
    recorder: EventRecorder, server: StubApiServer, right: str
) -> None:
    server.fault(Fault.FORBIDDEN, lambda request: request.right == (right, "events"), times=MAX_REFUSALS)
    recorder.start()
    for count in (1, 2):
        recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
        assert wait(server, partial(lambda expected: recorder.sent == expected, count))
    assert (seen(server), recorder.dropped) == ([("p", "no room", 2)], 0)


def test_a_namespace_that_goes_away_is_nobodys_fault(recorder: EventRecorder, server: StubApiServer) -> None:
    server.terminating.add("ns")
    recorder.start()
    recorder.pod("ns", "p", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: recorder.dropped == 1)
    recorder.pod("other", "q", "u", "Warning", "Refused", "no room")
    assert wait(server, lambda: recorder.sent == 1)
    assert recorder.error == ""


@pytest.mark.parametrize(
    ("namespace", "name"),
    [
        ("", "p"),
        ("ns", ""),
        ("../x", "p"),
        ("ns", "a/../../b"),
        ("NS", "p"),
        ("ns", "p\n"),
        ("n" * 64, "p"),
        ("ns", "é"),
    ],
)
def test_what_is_no_name_gets_into_no_path(
    recorder: EventRecorder, server: StubApiServer, namespace: str, name: str
) -> None:
    recorder.start()
    recorder.pod(namespace, name, "u", "Warning", "Refused", "no room")
    recorder.pod("ns", "p", "u", "Warning", "not a word!", "no room")
    assert wait(server, lambda: recorder.sent == 1)
    assert recorder.dropped == 1
    assert server.events()[0]["reason"] == "Unspecified"


def test_recording_never_waits_for_the_server(recorder: EventRecorder, server: StubApiServer) -> None:
    server.fault(Fault.HANG)
    recorder.start()
    recorder.pod("ns", "p", "u", "Warning", "Refused", "first")
    assert wait(server, lambda: len(server.requests) == 1)
    for number in range(1000):
        recorder.pod("ns", f"p{number}", "u", "Warning", "Refused", "no room")  # the server never answers
    assert recorder.dropped == 1000 - MAX_QUEUED
    with soon():
        recorder.close()


def test_nobody_spins_while_a_rate_holds_events_back(
    server: StubApiServer, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    original = Bucket.wait_s

    def wait_s(self: Bucket, now_s: float) -> float:
        nonlocal looks
        looks += 1
        return original(self, now_s)

    monkeypatch.setattr(Bucket, "wait_s", wait_s)
    recorder = EventRecorder(client_of(short_tmp, server), our_node)
    recorder.start()
    for number in range(BURST + 3):
        recorder.pod("ns", "p", "u", "Warning", "Refused", str(number))
    assert wait(server, lambda: recorder.sent == BURST)
    before = looks
    threading.Event().wait(0.3)
    assert looks - before < 10
    recorder.close()
