"""Hints come again after whatever kept them away: no instances, a library whose threads end, a directory made anew."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import watchdog.observers
from watchdog.observers.inotify import InotifyEmitter

from mpsd.common.pathhints import PathHints
from tests.waiting import WAIT_S


class Watched:
    """Arms every few milliseconds, as a loop that looks does, and remembers hints."""

    def __init__(self, path: Path, *, retry_s: float = 0.01) -> None:
        self.hinted = threading.Event()
        self.hints = PathHints(str(path), self.hinted.set, retry_s=retry_s, instead="looking every 1 s", siblings=True)

    def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.005)

    def until_hinted_by(self, act: Callable[[], object]) -> None:
        self.until(self.hints.arm)
        self.hinted.clear()
        act()
        assert self.hinted.wait(WAIT_S)


@contextmanager
def watching(path: Path, *, retry_s: float = 0.01) -> Iterator[Watched]:
    watched = Watched(path, retry_s=retry_s)
    try:
        yield watched
    finally:
        watched.hints.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why inotify can't watch, each time that was said."""
    return [record.gpufrac_fields["error"] for record in caplog.records if "can't watch" in record.message]  # type: ignore[attr-defined]


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Classes of the threads that ended on an exception."""
    ended: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(type(args.thread).__name__))
    return ended


def test_an_emitter_that_throws_is_watched_anew(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    real, failures = InotifyEmitter.queue_events, [RuntimeError("thrown in the library")]

    def throw_once(self: InotifyEmitter, timeout: float, **more: bool) -> None:
        if failures:
            raise failures.pop()
        real(self, timeout, **more)

    monkeypatch.setattr(InotifyEmitter, "queue_events", throw_once)
    with watching(short_tmp / "kubelet.sock") as watched:
        watched.hints.arm()
        watched.until(lambda: deaths)
        watched.until(lambda: not watched.hints.arm() or said(caplog))
        watched.until_hinted_by((short_tmp / "kubelet.sock").touch)
    assert deaths == ["InotifyEmitter"]
    assert said(caplog) == ["the thread InotifyEmitter of the watch ended"]


def test_a_shared_reader_of_the_library_that_throws_is_replaced(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[str]
) -> None:
    inotify_c = pytest.importorskip("watchdog.observers.inotify_c")
    shared = getattr(inotify_c, "InotifyFD", None)
    if shared is None:
        pytest.skip("this watchdog has a reader for each emitter")
    real, failures = shared.handle_event, [RuntimeError("thrown in the library")]

    def throw_once(self: object, event: object) -> None:
        if failures:
            raise failures.pop()
        real(self, event)

    monkeypatch.setattr(shared, "handle_event", throw_once)
    with watching(short_tmp / "kubelet.sock") as watched:
        watched.until(watched.hints.arm)
        (short_tmp / "first").touch()
        watched.until(lambda: deaths)
        watched.until(lambda: not watched.hints.arm())
        watched.until_hinted_by((short_tmp / "kubelet.sock").touch)
    assert deaths == ["InotifyFD"]


@pytest.mark.parametrize(
    "error", [OSError(24, "inotify instance limit reached"), RuntimeError("no thread"), KeyError()]
)
def test_inotify_that_can_t_be_had_is_said_once_and_tried_again(
    error: Exception, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> object:
        raise error

    with watching(short_tmp / "kubelet.sock", retry_s=0.0) as watched:
        with monkeypatch.context() as patch:
            patch.setattr(watchdog.observers, "Observer", refuse)
            for _ in range(5):
                assert not watched.hints.arm()
        assert caplog.text.count("inotify can't watch") == 1
        watched.until_hinted_by((short_tmp / "kubelet.sock").touch)


def test_a_directory_that_comes_later_or_is_made_anew_is_watched(short_tmp: Path) -> None:
    directory = short_tmp / "kubelet" / "device-plugins"
    with watching(directory / "kubelet.sock") as watched:
        watched.until_hinted_by(lambda: directory.mkdir(parents=True))
        watched.until_hinted_by((directory / "kubelet.sock").touch)
        watched.until_hinted_by(lambda: shutil.rmtree(directory))
        watched.until_hinted_by(directory.mkdir)
        watched.until_hinted_by((directory / "kubelet.sock").touch)
        directory.rename(short_tmp / "kubelet" / "old")  # inotify does not tell: the next look finds it
        watched.until_hinted_by(directory.mkdir)
        watched.until_hinted_by((directory / "kubelet.sock").touch)


def test_the_library_s_own_words_are_not_in_our_log(short_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        with watching(short_tmp / "kubelet.sock") as watched:
            watched.hints.arm()
            (short_tmp / "x").touch()
    assert not [record for record in caplog.records if record.name.startswith("watchdog")]
