import threading

import pytest

from mpsd.common.lanes import Lane
from tests.waiting import WAIT_S


def test_jobs_of_a_lane_run_in_order_and_lanes_do_not_wait_for_each_other() -> None:
    gate, done = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        order.append("first")
        gate.wait(WAIT_S)

    slow, quick = Lane("slow"), Lane("quick")
    slow.submit(first)
    slow.submit(lambda: order.append("second"))
    quick.submit(done.set)
    assert done.wait(WAIT_S)
    assert not slow.join(0.0)
    gate.set()
    assert slow.join(WAIT_S)
    assert order == ["first", "second"]


def test_a_job_that_fails_does_not_end_its_lane() -> None:
    lane, done = Lane("lane"), threading.Event()
    lane.submit(lambda: print(1 / 0))
    lane.submit(done.set)
    assert done.wait(WAIT_S)
    assert lane.join(WAIT_S)
    assert lane.join(0.0)


def test_a_lane_that_got_no_thread_gets_one_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lane, done = Lane("lane"), threading.Event()
    order: list[int] = []

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refuse)
        lane.submit(lambda: order.append(1))
        lane.submit(lambda: order.append(2))
        assert lane.revive()
        assert not order
    assert caplog.text.count("work waits for a thread") == 1
    lane.submit(done.set)
    assert done.wait(WAIT_S)
    assert order == [1, 2]
    assert not lane.revive()


def test_waiting_work_of_a_lane_starts_without_new_work(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, done = Lane("lane"), threading.Event()

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refuse)
        lane.submit(done.set)
    assert not lane.revive()
    assert done.wait(WAIT_S)
