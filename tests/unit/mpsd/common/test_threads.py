"""No long-lived thread ends on what its body raises, and all of them are of the one kind that makes sure of it."""

import ast
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mpsd.common import threads
from mpsd.common.errors import TransientError
from mpsd.common.threads import GuardedThread
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[4]


class OopsError(Exception):
    pass


def raising(errors: list[BaseException], then: Callable[[], None]) -> Callable[[], None]:
    """A body that raises each of these, and then is fine."""

    def body() -> None:
        if errors:
            raise errors.pop(0)
        then()

    return body


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PAUSE_FIRST_S", 0.001)
    monkeypatch.setattr(threads, "PAUSE_LAST_S", 0.001)


@pytest.mark.parametrize(
    "error", [OopsError("x"), OSError(24, "no instances"), MemoryError(), SystemExit(3), GeneratorExit()]
)
def test_the_body_is_called_again_whatever_it_raised(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    thread = GuardedThread(raising([error], done.set), "thrower")
    before = threads.failures().get("thrower", 0)
    thread.start()
    assert done.wait(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert threads.failures()["thrower"] == before + 1
    assert caplog.text.count("a thread failed and goes on") == 1


def test_the_same_error_is_said_once_and_another_one_too(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    thread = GuardedThread(
        raising([OopsError("a"), OopsError("a"), OopsError("a"), OopsError("b")], done.set), "repeats"
    )
    before = threads.failures().get("repeats", 0)
    thread.start()
    assert done.wait(WAIT_S)
    thread.join(WAIT_S)
    assert threads.failures()["repeats"] == before + 4
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a", "b"]


def test_who_joins_does_not_wait_for_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PAUSE_FIRST_S", 3600.0)
    called: queue.SimpleQueue[None] = queue.SimpleQueue()

    def body() -> None:
        called.put(None)
        raise OopsError

    thread = GuardedThread(body, "pausing")
    thread.start()
    called.get(timeout=WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    called.get(timeout=WAIT_S)  # it was called once more, to clean up


def test_no_thread_to_be_had_is_a_reason_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    thread = GuardedThread(done.set, "late")

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refuse)
        with pytest.raises(TransientError, match="cannot start the thread late"):
            thread.start()
    thread.start()
    assert done.wait(WAIT_S)
    thread.join(WAIT_S)


def test_what_ends_a_library_s_thread_is_no_raw_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class LibraryThread(threading.Thread):
        def run(self) -> None:
            raise OopsError("in a library")

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    threads.catch_all()
    before = threads.failures().get("LibraryThread", 0)
    thread = LibraryThread()
    with caplog.at_level(logging.ERROR):
        thread.start()
        thread.join(WAIT_S)
    assert threads.failures()["LibraryThread"] == before + 1
    assert "a thread of a library ended" in caplog.text
    assert capfd.readouterr() == ("", "")


def test_every_thread_of_both_processes_is_guarded() -> None:
    """Nobody starts a bare one; the simulation, which plays other processes, may."""
    bare = []
    for room in ("mpsd", "deviceplugin"):
        for path in sorted((ROOT / room).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if "sim" in inside.parts or inside == Path("mpsd/common/threads.py"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                used = (
                    [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
                )
                names = {getattr(one, "attr", getattr(one, "id", "")) for one in used}
                if names & {"Thread", "Timer", "_start_new_thread", "start_new_thread", "ThreadPoolExecutor"}:
                    bare.append(f"{inside}:{getattr(node, 'lineno', 0)}")
    assert bare == []


def test_rounds_that_fail_alike_are_said_once_until_one_goes_well(caplog: pytest.LogCaptureFixture) -> None:
    mishaps = threads.Mishaps("rounds", "a round failed")
    before = threads.failures().get("rounds", 0)

    def round_(error: Exception | None) -> None:
        try:
            if error is not None:
                raise error
            mishaps.none()
        except OopsError as found:
            mishaps.note(found)

    for error in (OopsError("a"), OopsError("a"), OopsError("b"), OopsError("b"), None, OopsError("b")):
        round_(error)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a", "b", "b"]
    assert threads.failures()["rounds"] == before + 5
