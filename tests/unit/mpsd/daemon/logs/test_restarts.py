import pytest

from mpsd.common.reason import message_of
from mpsd.daemon.logs.flood import FloodGate
from mpsd.daemon.logs.parse import LogEvent, ServerExited, ServerReady, ServerStarted, StartFailed
from mpsd.daemon.logs.restarts import RestartLoop

Feed = list[tuple[float, LogEvent]]


def failures(*times_s: float, status: int = 1) -> Feed:
    return [(at_s, ServerExited(100 + n, status)) for n, at_s in enumerate(times_s)]


@pytest.mark.parametrize(
    ("fed", "now_s", "looping"),
    [
        ([], 0, False),
        (failures(0, 1, 2, 3), 3, False),
        (failures(0, 1, 2, 3, 4), 4, True),
        (failures(0, 1, 2, 3, 4, status=0), 4, False),
        (failures(0, 10, 20, 30, 40), 40, False),  # slower than the window
        (failures(0, 40, 41, 42, 43, 44), 44, True),
        # a server that becomes ready and dies again is no cure
        ([(0, ServerReady(1)), *failures(1, 2, 3, 4, 5)], 5, True),
        ([*failures(0, 1, 2, 3, 4), (5, ServerReady(1))], 20, True),
        # one that lasts is, whether it still lives or not
        ([*failures(0, 1, 2, 3, 4), (5, ServerReady(1))], 35, False),
        ([*failures(0, 1, 2, 3), (4, ServerReady(1)), (34, ServerExited(1, 1))], 34, False),
        # one that lasted before the trouble, or whose end we missed, is not
        ([(0, ServerReady(1)), *failures(100, 101, 102, 103, 104)], 104, True),
        ([*failures(0, 1, 2, 3, 4), (5, ServerReady(1)), (6, ServerExited(1, 0))], 40, True),
        # nobody tries any more
        (failures(0, 1, 2, 3, 4), 303, True),
        (failures(0, 1, 2, 3, 4), 304, False),
    ],
)
def test_when_it_is_a_loop(fed: Feed, now_s: float, looping: bool) -> None:
    loop = RestartLoop()
    for at_s, event in fed:
        loop.feed(event, at_s)
    assert (loop.reason(now_s) is not None) is looping


def test_the_reason_counts_and_names_the_last_status_and_the_cause() -> None:
    loop = RestartLoop()
    for n in range(7):
        loop.feed(ServerStarted(n, 0), n)
        loop.feed(StartFailed("invalid argument"), n)
        loop.feed(StartFailed("MPS server failed to start", generic=True), n)
        loop.feed(ServerExited(n, 3), n)
    assert message_of(loop.reason(6)) == (
        "MPS servers end as soon as they are started: 7 times in 6 s, the last with status 3 (invalid argument)"
    )


def test_a_new_daemon_starts_from_nothing() -> None:
    loop = RestartLoop()
    for at_s, event in failures(0, 1, 2, 3, 4):
        loop.feed(event, at_s)
    loop.clear()
    assert message_of(loop.reason(4)) == ""
    loop.feed(ServerExited(9, 1), 5)
    assert message_of(loop.reason(5)) == ""


def test_a_flood_is_cut_and_counted_each_minute() -> None:
    gate = FloodGate(lines=3)
    assert [gate.admit(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert gate.take_suppressed(59.0) == 0
    assert gate.take_suppressed(60.0) == 2
    assert gate.admit(61.0)
    assert gate.take_suppressed(121.0) == 0


def test_a_lasting_condition_is_said_once_an_hour() -> None:
    gate = FloodGate(lines=3)
    assert [gate.admit(at_s, "no PIDs") for at_s in (0.0, 1.0, 3599.0, 3600.0)] == [True, False, False, True]
    assert gate.admit(1.0, "another")
    assert gate.take_suppressed(4000.0) == 0


def test_a_lasting_condition_is_not_lost_in_a_flood() -> None:
    gate = FloodGate(lines=1)
    assert [gate.admit(0.0), gate.admit(0.0), gate.admit(0.0, "no PIDs")] == [True, False, True]
