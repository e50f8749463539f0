"""The watch of the kubelet's directory goes on, whatever happens to inotify, to the directory, or in who is told."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import watchdog.observers

from deviceplugin.kubelet import watch
from deviceplugin.kubelet.watch import DirectoryWatch
from mpsd.common import threads
from tests.waiting import WAIT_S


class Hints:
    def __init__(self) -> None:
        self.came = threading.Condition()
        self.count = 0
        self.errors: list[BaseException] = []

    def hint(self) -> None:
        with self.came:
            self.count += 1
            self.came.notify_all()
        if self.errors:
            raise self.errors.pop()

    def more(self, than: int = 1) -> None:
        """Waits for so many more."""
        with self.came:
            due = self.count + than
            assert self.came.wait_for(lambda: self.count >= due, WAIT_S)


@contextmanager
def watching(directory: Path) -> Iterator[Hints]:
    hints = Hints()
    watched = DirectoryWatch(str(directory), hints.hint)
    watched.start()
    try:
        yield hints
    finally:
        watched.close()


def test_it_looks_where_inotify_instances_are_used_up(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> object:
        raise OSError(24, "inotify instance limit reached")

    monkeypatch.setattr(watchdog.observers, "Observer", refuse)
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    with watching(short_tmp) as hints:
        hints.more(5)
    assert caplog.text.count("inotify can't watch") == 1


@pytest.mark.parametrize("error", [OSError("x"), RuntimeError("y"), SystemExit(1)])
def test_it_outlives_what_is_raised_by_who_is_told(
    error: BaseException, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    monkeypatch.setattr(threads, "PAUSE_FIRST_S", 0.001)
    with watching(short_tmp) as hints:
        hints.errors.append(error)
        hints.more(5)
        assert hints.errors == []


@pytest.mark.parametrize("moved", [False, True], ids=["removed", "moved"])
def test_it_goes_on_in_a_directory_that_was_missing_and_in_one_that_was_replaced(
    moved: bool, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.05)
    monkeypatch.setattr(watch, "RETRY_S", 0.0)
    directory = short_tmp / "device-plugins"

    def touch(name: str) -> None:
        (directory / name).touch()

    with watching(directory) as hints:
        hints.more(0)
        for again in range(3):
            directory.mkdir()
            touch("kubelet.sock")  # may come before the new directory is watched: then the look finds it
            hints.more()
            if moved:
                os.rename(directory, short_tmp / f"old{again}")
            else:
                shutil.rmtree(directory)


def test_it_ends_when_it_is_closed_before_it_began(short_tmp: Path) -> None:
    DirectoryWatch(str(short_tmp), lambda: None).close()
