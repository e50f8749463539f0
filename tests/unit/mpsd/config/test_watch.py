"""Live reload: every way a config file changes, and every way it must not be believed yet."""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import watchdog.observers

from mpsd.common.pathhints import chain_of
from mpsd.config import watch
from mpsd.config.load import parse_config
from mpsd.config.model import NodeConfig
from mpsd.config.watch import ConfigWatcher
from tests.waiting import WAIT_S

NEVER_S = 3600.0
"""Poll interval of tests that must be woken by inotify."""


def text(request: str = "8Gi") -> str:
    return f"""\
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:
  - name: gpufrac.dev/gpu
    memory: {{request: {request}}}
    compute: {{mode: sm-sharing}}
"""


def config(request: str = "8Gi") -> NodeConfig:
    return parse_config(text(request), "f")


class Calls:
    """What the watcher said, in order: configs and error texts."""

    def __init__(self) -> None:
        self.queue: queue.Queue[NodeConfig | str] = queue.Queue()

    def next(self) -> NodeConfig | str:
        return self.queue.get(timeout=WAIT_S)

    def next_config(self) -> NodeConfig:
        """Skips errors: a test that writes in place may be caught half-way on a busy machine."""
        while isinstance(call := self.next(), str):
            pass
        return call

    def next_error(self) -> str:
        call = self.next()
        assert isinstance(call, str)
        return call

    def none(self) -> bool:
        return self.queue.empty()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@contextmanager
def watching(
    path: Path, calls: Calls, *, current: NodeConfig | None = None, poll_s: float = NEVER_S
) -> Iterator[ConfigWatcher]:
    watcher = ConfigWatcher(
        path,
        calls.queue.put,
        calls.queue.put,
        current=current,
        poll_s=poll_s,
        fallback_poll_s=0.02,
        settle_s=0.01,
    )
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.close()


def replace(path: Path, content: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(content)
    new.replace(path)


@pytest.fixture
def path(short_tmp: Path) -> Path:
    path = short_tmp / "config.yaml"
    path.write_text(text())
    return path


def test_the_first_content_is_a_change_without_a_config_in_force(path: Path, calls: Calls) -> None:
    with watching(path, calls):
        assert calls.next() == config()
    assert calls.none()


def test_a_change_between_load_and_start_is_found(path: Path, calls: Calls) -> None:
    with watching(path, calls, current=config("1Gi")):
        assert calls.next() == config()


def test_changes_in_place_and_by_rename(path: Path, calls: Calls) -> None:
    with watching(path, calls):
        assert calls.next_config() == config()
        path.write_text(text("16Gi"))
        assert calls.next_config() == config("16Gi")
        replace(path, text("24Gi"))
        assert calls.next_config() == config("24Gi")
        path.unlink()
        path.write_text(text("32Gi"))
        assert calls.next_config() == config("32Gi")


def test_what_means_the_same_is_no_change(path: Path, calls: Calls) -> None:
    with watching(path, calls, current=config()):
        path.touch()
        replace(path, text())
        replace(path, f"# a comment\n{text('8192Mi')}")
        replace(path, text("16Gi"))
        assert calls.next() == config("16Gi")
    assert calls.none()


def test_a_bad_file_is_reported_once_and_keeps_the_config(path: Path, calls: Calls) -> None:
    with watching(path, calls, current=config()):
        replace(path, text("8GiB"))
        assert calls.next_error().startswith(f'{path}:5: resources[0].memory.request: "8GiB": must be')
        path.touch()
        replace(path, text("8GiB"))
        replace(path, text("-1"))
        assert '"-1": must be at least 1Mi' in calls.next_error()
        replace(path, text())
        assert calls.next() == config()  # the same as ever: it says that the error is over
        replace(path, text("16Gi"))
        assert calls.next() == config("16Gi")
    assert calls.none()


def test_a_bad_file_at_the_start(path: Path, calls: Calls) -> None:
    path.write_text("kind: [\n")
    with watching(path, calls, current=config()):
        assert "is not valid YAML" in calls.next_error()
        replace(path, text())
        assert calls.next() == config()


def test_a_missing_file_is_reported_and_found_again(path: Path, calls: Calls) -> None:
    with watching(path, calls, current=config()):
        path.unlink()
        assert calls.next() == f"{path}: cannot be read: No such file or directory"
        path.write_text(text("16Gi"))
        assert calls.next_config() == config("16Gi")


def test_directories_that_come_and_go(short_tmp: Path, calls: Calls) -> None:
    path = short_tmp / "etc" / "gpufrac" / "config.yaml"
    with watching(path, calls, poll_s=0.1):
        assert "No such file" in calls.next_error()
        path.parent.mkdir(parents=True)
        path.write_text(text())
        assert calls.next_config() == config()
        path.unlink()
        path.parent.rmdir()
        while "No such file" not in calls.next_error():
            pass
        path.parent.mkdir()
        path.write_text(text("16Gi"))
        assert calls.next_config() == config("16Gi")


def test_the_link_swap_of_a_config_map(short_tmp: Path, calls: Calls) -> None:
    """The kubelet writes a new directory, then renames a new `..data` link over the old one."""

    def publish(version: str, content: str) -> None:
        (short_tmp / version).mkdir()
        (short_tmp / version / "config.yaml").write_text(content)
        (short_tmp / "..data_tmp").symlink_to(version)
        (short_tmp / "..data_tmp").replace(short_tmp / "..data")

    path = short_tmp / "config.yaml"
    publish("..1", text())
    path.symlink_to("..data/config.yaml")
    with watching(path, calls):
        assert calls.next() == config()
        publish("..2", text("16Gi"))
        assert calls.next() == config("16Gi")
        (short_tmp / "..1" / "config.yaml").unlink()
        (short_tmp / "..1").rmdir()
        publish("..3", text("oops"))
        assert '"oops": must be' in calls.next_error()
        publish("..4", text("24Gi"))
        assert calls.next() == config("24Gi")
    assert calls.none()


def test_a_link_to_a_file_elsewhere(short_tmp: Path, calls: Calls) -> None:
    (short_tmp / "real").mkdir()
    target = short_tmp / "real" / "gpufrac.yaml"
    target.write_text(text())
    (short_tmp / "via").symlink_to(short_tmp / "real")
    path = short_tmp / "config.yaml"
    path.symlink_to("via/gpufrac.yaml")
    with watching(path, calls):
        assert calls.next() == config()
        replace(target, text("16Gi"))
        assert calls.next() == config("16Gi")
        other = short_tmp / "other"
        other.mkdir()
        (other / "gpufrac.yaml").write_text(text("24Gi"))
        (short_tmp / "via.new").symlink_to(other)
        (short_tmp / "via.new").replace(short_tmp / "via")
        assert calls.next() == config("24Gi")


class Reads:
    """Stands in for the file: each read takes the next content, the last one for ever."""

    def __init__(self, *contents: bytes | str) -> None:
        self.contents = list(contents)
        self.exhausted = threading.Event()

    def __call__(self, _path: str) -> bytes | str:
        if len(self.contents) > 1:
            return self.contents.pop(0)
        self.exhausted.set()
        return self.contents[0]


def test_a_half_written_file_is_neither_applied_nor_reported(
    path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = text("16Gi").encode()
    half_valid = (text() + "memory: {reserve: 1Gi}\n").encode()
    reads = Reads(b"", whole[:40], half_valid, "f: cannot be read: No such file or directory", whole)
    monkeypatch.setattr(watch, "_content", reads)
    with watching(path, calls, current=config()):
        assert calls.next() == config("16Gi")
    assert calls.none()
    assert reads.exhausted.is_set()


def test_a_short_absence_is_no_change(path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    same = text().encode()
    reads = Reads(same, same, "f: cannot be read: No such file or directory", same)
    monkeypatch.setattr(watch, "_content", reads)
    with watching(path, calls, current=config(), poll_s=0.01):
        assert reads.exhausted.wait(WAIT_S)
    assert calls.none()


def test_closing_does_not_wait_for_a_file_that_never_settles(
    path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Event()

    def content(_path: str) -> bytes:
        reading.set()
        return os.urandom(8)

    monkeypatch.setattr(watch, "_content", content)
    with watching(path, calls):
        assert reading.wait(WAIT_S)
    assert calls.none()


def test_close_in_any_state(path: Path, calls: Calls) -> None:
    watcher = ConfigWatcher(path, calls.queue.put, calls.queue.put)
    watcher.close()
    watcher.close()
    with watching(path, calls) as watcher:
        watcher.close()


def test_close_from_a_callback(path: Path) -> None:
    closed = threading.Event()

    def close(_config: NodeConfig) -> None:
        watcher.close()
        closed.set()

    watcher = ConfigWatcher(path, close, pytest.fail, settle_s=0.01)
    watcher.start()
    assert closed.wait(WAIT_S)
    watcher.close()


def test_a_failing_callback_does_not_end_the_watch(path: Path, calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    def fail_once(changed: NodeConfig) -> None:
        calls.queue.put(changed)
        if changed == config():
            raise RuntimeError("no")

    watcher = ConfigWatcher(path, fail_once, calls.queue.put, poll_s=NEVER_S, settle_s=0.01)
    watcher.start()
    try:
        assert calls.next() == config()
        replace(path, text("16Gi"))
        assert calls.next() == config("16Gi")
    finally:
        watcher.close()
    assert f"cannot pass on a change of {path}" in caplog.text


# -- without inotify


def limit_reached() -> OSError:
    return OSError(24, "inotify instance limit reached")


def test_polling_where_inotify_is_used_up(
    path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = queue.Queue[None]()

    def observer() -> None:
        attempts.put(None)
        raise limit_reached()

    monkeypatch.setattr(watchdog.observers, "Observer", observer)
    with caplog.at_level(logging.INFO, logger="watch"), watching(path, calls, poll_s=0.05):
        assert calls.next() == config()
        replace(path, text("16Gi"))
        assert calls.next() == config("16Gi")
        for _ in range(3):  # it is tried again
            attempts.get(timeout=WAIT_S)
    said = [record.gpufrac_fields for record in caplog.records if "inotify" in record.message]  # type: ignore[attr-defined]
    assert [(fields["error"], fields["instead"]) for fields in said] == [
        ("[Errno 24] inotify instance limit reached: raise fs.inotify.max_user_instances", "reading it every 0.02 s")
    ]


def test_inotify_is_used_once_it_can_be_had(
    path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Callable[[], object] = watchdog.observers.Observer
    failures = [limit_reached(), RuntimeError("can't start new thread")]
    watched = threading.Event()

    def observer() -> object:
        if failures:
            raise failures.pop()
        watched.set()
        return real()

    monkeypatch.setattr(watchdog.observers, "Observer", observer)
    with caplog.at_level(logging.INFO, logger="watch"), watching(path, calls, poll_s=0.05):
        assert watched.wait(WAIT_S)
        replace(path, text("16Gi"))
        while calls.next() != config("16Gi"):
            pass
    assert "inotify watches again" in caplog.text


@pytest.mark.parametrize("step", ["schedule", "start"])
def test_an_observer_that_fails_half_way_leaves_nothing(
    step: str, path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[], object] = watchdog.observers.Observer

    def observer() -> object:
        made = real()

        def fail(*_arguments: object, **_keywords: object) -> None:
            raise OSError(28, "inotify watch limit reached")

        monkeypatch.setattr(made, step, fail)
        return made

    monkeypatch.setattr(watchdog.observers, "Observer", observer)
    with watching(path, calls):
        assert calls.next() == config()


# -- what is watched


def test_the_chain_of_a_config_map(short_tmp: Path) -> None:
    (short_tmp / "..1").mkdir()
    (short_tmp / "..1" / "c").write_text("")
    (short_tmp / "..data").symlink_to("..1")
    (short_tmp / "c").symlink_to("..data/c")
    chain = chain_of(str(short_tmp / "c"))
    assert {path for path, _, _ in chain.directories} == {str(short_tmp), f"{short_tmp}/..1"}
    assert chain.entries == {f"{short_tmp}/c", f"{short_tmp}/..data", f"{short_tmp}/..1/c"}


def test_the_chain_ends_where_something_is_missing(short_tmp: Path) -> None:
    chain = chain_of(str(short_tmp / "a" / "b" / "c"))
    assert {path for path, _, _ in chain.directories} == {str(short_tmp)}
    assert chain.entries == {f"{short_tmp}/a"}


def test_the_chain_of_links_in_a_circle_ends(short_tmp: Path) -> None:
    (short_tmp / "a").symlink_to("../" + short_tmp.name + "/b")
    (short_tmp / "b").symlink_to("./a")
    chain = chain_of(str(short_tmp / "a"))
    assert chain.entries == {f"{short_tmp}/a", f"{short_tmp}/b"}
