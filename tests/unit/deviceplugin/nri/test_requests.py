"""What is told when, and what is answered without the front end."""

import pytest

from deviceplugin.nri.requests import MAX_BYTES, MAX_ENTRIES, Entry, Kind, RequestQueue
from mpsd.common.errors import ProtocolError


def entry(kind: Kind = Kind.RUN_POD, *, link: int = 1, stream: int = 1, budget_s: float = 1.0, size: int = 0) -> Entry:
    return Entry(kind=kind, link=link, stream=stream, budget_s=budget_s, size_bytes=size)


def test_one_thing_is_told_at_a_time_and_in_order() -> None:
    queue = RequestQueue()
    first, second = entry(), entry(Kind.CREATE_CONTAINER, stream=3)
    assert queue.begin(0.0) is None
    assert queue.add(first, 0.0)
    assert queue.add(second, 0.1)
    assert queue.begin(0.2) is first
    assert queue.begin(0.2) is None
    assert queue.finish(0.3)
    assert queue.begin(0.3) is second
    assert queue.finish(0.4)
    assert (queue.late, queue.slowest_s) == (0, {"run pod": 0.3, "create container": pytest.approx(0.3)})


def test_what_is_overdue_is_answered_once() -> None:
    queue = RequestQueue()
    running, waiting = entry(), entry(Kind.STOP_POD, stream=3)
    queue.add(running, 0.0)
    queue.begin(0.0)
    queue.add(waiting, 0.5)
    assert queue.due_s() == 1.0
    assert queue.overdue(0.99) == []
    assert queue.overdue(1.0) == [running]
    assert queue.due_s() == 1.5
    assert queue.overdue(1.6) == [waiting]
    assert queue.due_s() == float("inf")
    assert not queue.finish(2.0), "its answer would be the second one"
    assert queue.begin(2.0) is waiting, "an event is told all the same"
    assert not queue.finish(2.0)
    assert queue.late == 2


@pytest.mark.parametrize("kind", [Kind.CREATE_CONTAINER, Kind.START_CONTAINER])
def test_what_was_refused_before_its_turn_is_not_told_any_more(kind: Kind) -> None:
    queue = RequestQueue()
    queue.add(entry(), 0.0)
    queue.begin(0.0)
    refused = entry(kind, stream=3, size=10)
    queue.add(refused, 0.1)
    assert refused in queue.overdue(1.2)
    queue.finish(1.3)
    assert queue.begin(1.3) is None


def test_a_stuck_worker_lets_nothing_wait() -> None:
    queue = RequestQueue()
    queue.add(entry(), 0.0)
    queue.begin(0.0)
    assert queue.stuck_s(0.9) == 0
    assert queue.stuck_s(1.5) == 0.5
    event = entry(Kind.REMOVE_POD, stream=3)
    assert not queue.add(event, 1.5)
    assert not queue.add(entry(Kind.CREATE_CONTAINER, stream=5), 1.5)
    queue.finish(2.0)
    assert queue.stuck_s(2.0) == 0
    assert queue.begin(2.0) is event
    assert queue.begin(2.0) is None
    queue.finish(2.0)
    assert queue.begin(2.0) is None, "a creation that was refused is over"
    assert queue.add(entry(stream=7), 2.0)


def test_a_worker_that_began_late_is_not_stuck_yet() -> None:
    queue = RequestQueue()
    queue.add(entry(), 0.0)
    queue.begin(0.9)
    assert queue.add(entry(stream=3), 1.1)


def test_what_came_over_a_link_that_ended_is_void() -> None:
    queue = RequestQueue()
    queue.add(entry(Kind.CONNECTED, stream=0), 0.0)
    running = entry(stream=1)
    queue.add(running, 0.0)
    queue.add(entry(stream=3), 0.0)
    queue.begin(0.0)
    queue.finish(0.0)
    assert queue.begin(0.0) is running
    queue.drop(1, "gone", 1.0)
    queue.add(entry(Kind.CONNECTED, link=2, stream=0), 0.0)
    assert queue.due_s() == float("inf")
    assert not queue.finish(0.5), "nobody is there for its answer"
    told = [queue.begin(0.5)]
    queue.finish(0.5)
    told.append(queue.begin(0.5))
    assert [(e.kind, e.link, e.reason) for e in told if e] == [
        (Kind.DISCONNECTED, 1, "gone"),
        (Kind.CONNECTED, 2, ""),
    ]


def test_a_link_that_nobody_heard_of_ends_unheard_too() -> None:
    queue = RequestQueue()
    queue.add(entry(), 0.0)
    queue.begin(0.0)
    for link in range(2, 50):
        queue.add(entry(Kind.CONNECTED, link=link, stream=0), 0.0)
        queue.add(entry(Kind.SYNCHRONIZE, link=link, size=1000), 0.0)
        queue.drop(link, "gone", 1.0)
    queue.finish(0.0)
    assert queue.begin(0.0) is None


def test_what_waits_is_bounded() -> None:
    queue = RequestQueue()
    for number in range(MAX_ENTRIES):
        queue.add(entry(stream=2 * number + 1), 0.0)
    with pytest.raises(ProtocolError, match="cannot remember more than"):
        queue.add(entry(stream=99999), 0.0)
    queue.drop(1, "fell behind", 1.0)
    queue.add(entry(link=2, size=MAX_BYTES), 0.0)
    with pytest.raises(ProtocolError, match="cannot remember more than"):
        queue.add(entry(link=2, size=1), 0.0)
    queue.begin(0.0)
    assert queue.add(entry(link=2, size=1), 0.0)
