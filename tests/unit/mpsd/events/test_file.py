"""The files of events, and who writes them: bounded, whole lines, nothing twice, and never anybody's time."""

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.events import recorder
from mpsd.events.bound import BURST, EVERY_S
from mpsd.events.file import EventFile, Reader, paths_of, read
from mpsd.events.kinds import EventKind
from mpsd.events.model import Event, Held, Subject, event, line_of
from mpsd.events.recorder import Recorder
from tests.waiting import NEVER_S, WAIT_S, soon, until

K = EventKind
SHARE = Subject(key="k", resource="r")
FULL = Reason("AllTaken", "all shares are taken")


def numbered(number: int) -> Event:
    return event("Refused", SHARE, FULL, unix_s=1.0, process="plugin", instance="i", number=number)


def numbers(root: Path) -> list[int]:
    return [one.number for one in events(root)]


def events(root: Path, process: str = "plugin") -> list[Event]:
    return [line for line in read(str(root), process) if isinstance(line, Event)]


def kinds(root: Path) -> list[str]:
    return [one.kind for one in events(root)]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventFile]:
    made = EventFile(str(tmp_path), "plugin", lambda: Held((numbered(0),)), max_bytes=2000)
    yield made
    made.close()


def test_the_files_are_root_s_alone(log: EventFile, tmp_path: Path) -> None:
    log.append([numbered(1)])
    _, path = paths_of(str(tmp_path), "plugin")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "events").st_mode) == 0o700


def test_two_files_of_bounded_size_hold_the_latest_and_what_was_held(log: EventFile, tmp_path: Path) -> None:
    for number in range(1, 100):
        log.append([numbered(number)])
    sizes = [os.stat(path).st_size for path in paths_of(str(tmp_path), "plugin")]
    assert all(1000 < size <= 2000 for size in sizes)
    found = numbers(tmp_path)
    assert found == list(range(found[0], 100))
    assert sum(isinstance(line, Held) for line in read(str(tmp_path), "plugin")) == 2


def test_a_torn_line_costs_nothing_but_itself(log: EventFile, tmp_path: Path) -> None:
    log.append([numbered(1)])
    _, path = paths_of(str(tmp_path), "plugin")
    with open(path, "ab") as torn:
        torn.write(b'{"unixS":1.0,"ki')
    again = EventFile(str(tmp_path), "plugin", lambda: Held(()))
    assert again.append([numbered(2), numbered(3)]) == 2
    again.close()
    assert numbers(tmp_path) == [1, 2, 3]


def test_what_a_full_disk_took_is_whole_and_the_rest_is_not_there(
    log: EventFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append([numbered(1)])
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) * 2 // 3]))
    assert log.append([numbered(2), numbered(3)]) == 1
    monkeypatch.undo()
    assert log.append([numbered(4)]) == 1
    assert numbers(tmp_path) == [1, 2, 4]


def test_a_file_that_was_taken_away_is_begun_anew(log: EventFile, tmp_path: Path) -> None:
    log.append([numbered(1)])
    os.unlink(paths_of(str(tmp_path), "plugin")[1])
    log.append([numbered(2)])
    assert numbers(tmp_path) == [2]


@pytest.mark.parametrize("thing", ["pipe", "link", "directory"])
def test_what_is_no_file_in_its_place_is_neither_written_nor_read(log: EventFile, tmp_path: Path, thing: str) -> None:
    (tmp_path / "events").mkdir()
    path = Path(paths_of(str(tmp_path), "plugin")[1])
    if thing == "pipe":
        os.mkfifo(path)
    elif thing == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(OSError, match=r"."):
        log.append([numbered(1)])
    with pytest.raises(OSError, match=r"."):
        events(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_reader_follows_the_file_over_its_end(log: EventFile, tmp_path: Path) -> None:
    reader = Reader(paths_of(str(tmp_path), "plugin")[1])
    assert list(reader.lines()) == []
    seen: list[int] = []
    for number in range(1, 60):
        log.append([numbered(number)])
        if number % 3 == 0:
            seen += [line.number for line in reader.lines() if isinstance(line, Event)]
    assert seen[-1] == 57 + 2 - 59 % 3
    assert seen == list(range(1, seen[-1] + 1))
    reader.close()


def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * (3 << 20) + b"\n" + line_of(numbered(7)) + b'{"half')
    reader = Reader(str(path))
    assert list(reader.lines()) == [numbered(7)]
    reader.close()


# --- the recorder ----------------------------------------------------------------------------------------------------


class Process:
    """A recorder without its thread, and a clock."""

    opened: ClassVar["list[Process]"] = []

    def __init__(self, root: Path, **given: int) -> None:
        self.opened.append(self)
        self.now_s = 1000.0
        self.counted = 0
        self.recorder = Recorder(
            str(root),
            "plugin",
            say=get_logger("test"),
            on_counted=self._counted,
            wall=lambda: self.now_s,
            monotonic=lambda: self.now_s,
            **given,
        )
        self.tell, self.settle = self.recorder.tell, self.recorder.settle

    def work(self, *, last: bool = False) -> None:
        self.recorder.work(last=last)

    def _counted(self) -> None:
        self.counted += 1


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while Process.opened:
        Process.opened.pop().recorder.close()


def test_a_restart_tells_nothing_again_that_still_holds(tmp_path: Path) -> None:
    def what_holds(process: Process) -> None:
        process.tell(K.STARTED, pid=1)
        process.settle(K.RELEASED, {"k"})
        process.tell(K.GRANTED, SHARE)
        process.tell(K.PERMISSION_WITHDRAWN, SHARE, Reason("GpuLost", "at another time in other words"))
        process.work()

    for _ in range(3):
        what_holds(Process(tmp_path))
    assert kinds(tmp_path) == ["Started", "Granted", "PermissionWithdrawn", "Started", "Started"]
    silent = [one.reason_code for one in events(tmp_path) if one.kind == "Started"]
    assert silent == ["", "EndedInSilence", "EndedInSilence"], "none of them said that it stopped"


def test_nor_after_files_were_begun_anew_many_times(tmp_path: Path) -> None:
    first = Process(tmp_path, max_bytes=3000)
    first.tell(K.GRANTED, SHARE)
    first.tell(K.POD_KNOWN, Subject(key="k", namespace="ns", pod="p", container="c"))
    for number in range(100):
        first.tell(K.REFUSED, Subject(resource=f"r{number}"), FULL)
        first.work()
    assert "Granted" not in kinds(tmp_path), "it is not in the files any more"
    second = Process(tmp_path, max_bytes=3000)
    second.tell(K.GRANTED, SHARE)
    second.tell(K.RELEASED, SHARE)
    second.work()
    last = events(tmp_path)[-1]
    assert (last.kind, last.pod) == ("Released", "p")
    assert "Granted" not in kinds(tmp_path)


def test_what_went_while_nobody_looked_is_told_by_the_next(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.tell(K.GRANTED, SHARE)
    first.tell(K.POD_KNOWN, Subject(key="k", namespace="ns", pod="p", container="c"))
    first.work()
    second = Process(tmp_path)
    second.settle(K.RELEASED, {"other"})
    second.settle(K.RELEASED, {"other"})
    second.work()
    released = events(tmp_path)[2:]
    assert [(one.kind, one.key, one.pod) for one in released] == [("Released", "k", "p")]


def test_a_process_that_stops_in_order_says_so(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.tell(K.STARTED, pid=1)
    first.tell(K.STOPPED, pid=1)
    first.work(last=True)
    second = Process(tmp_path)
    second.tell(K.STARTED, pid=2)
    second.work()
    assert [(one.kind, one.reason) for one in events(tmp_path)] == [("Started", ""), ("Stopped", ""), ("Started", "")]


def test_a_flood_is_told_together_and_every_one_is_counted(tmp_path: Path) -> None:
    process = Process(tmp_path)
    for _ in range(1000):
        process.tell(K.REFUSED, Subject(resource="r"), FULL)
    process.work()
    process.now_s += EVERY_S
    process.work()
    told = events(tmp_path)
    assert [one.count for one in told] == [1] * BURST + [1000 - BURST]
    assert process.recorder.counts["Refused"] == 1000
    assert process.counted == 1, "nobody is told of what is only written"


def test_what_waits_to_be_told_together_is_told_at_the_end(tmp_path: Path) -> None:
    process = Process(tmp_path)
    for _ in range(BURST + 2):
        process.tell(K.REFUSED, Subject(resource="r"), FULL)
    process.work(last=True)
    assert events(tmp_path)[-1].count == 2


def test_a_full_disk_costs_events_which_are_counted_and_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(tmp_path)
    process.tell(K.GRANTED, SHARE)
    process.work()

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        process.tell(K.REFUSED, SHARE, FULL)
        process.work()
    assert process.recorder.lost == 3
    monkeypatch.undo()
    process.tell(K.RELEASED, SHARE)
    process.work()
    process.work()
    assert [(one.kind, one.count) for one in events(tmp_path)] == [
        ("Granted", 1),
        ("EventsDropped", 3),
        ("Released", 1),
    ]
    assert (process.recorder.counts["Refused"], process.recorder.counts["EventsDropped"]) == (3, 3)
    assert sum("events can't be written" in record.message for record in caplog.records) == 1
    assert sum("refused" in record.message for record in caplog.records) == 3, "the log has them"


def test_a_queue_that_nobody_empties_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_WAITING", 10)
    process = Process(tmp_path)
    for number in range(30):
        process.tell(K.REFUSED, Subject(resource=f"r{number}"), FULL)
    process.settle(K.RELEASED, ())
    assert process.recorder.lost == 20
    process.work()
    assert kinds(tmp_path) == ["EventsDropped", *["Refused"] * 10]


def test_each_event_is_a_line_of_the_log_with_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    process = Process(tmp_path)
    process.tell(K.PERMISSION_GIVEN, Subject(key="k", namespace="ns", pod="p", gpus=("GPU-1",)), detail="8Gi")
    process.tell(K.PERMISSION_WITHDRAWN, SHARE, Reason("GpuLost", "it is lost"))
    process.work()
    given, withdrawn = caplog.records[-2:]
    assert (given.levelno, given.message) == (logging.INFO, "permission given")
    assert given.__dict__["gpufrac_fields"] == {"key": "k", "pod": "ns/p", "gpu": "GPU-1", "detail": "8Gi"}
    assert (withdrawn.levelno, withdrawn.message) == (logging.WARNING, "permission withdrawn")


def test_unreadable_files_are_no_reason_not_to_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events").write_text("a file")
    process = Process(tmp_path)
    process.tell(K.GRANTED, SHARE)
    process.work()
    assert (process.recorder.lost, process.recorder.counts["Granted"]) == (1, 1)
    assert "events can't be written" in caplog.text


def run(root: Path, use: Callable[[Recorder], object]) -> None:
    made = Recorder(str(root), "plugin")
    made.start()
    use(made)
    made.close()


def test_the_thread_writes_what_is_told_and_the_rest_when_it_ends(tmp_path: Path) -> None:
    def use(made: Recorder) -> None:
        made.tell(K.GRANTED, SHARE)
        until(lambda: kinds(tmp_path) == ["Granted"] or None)
        made.tell(K.STOPPED)

    run(tmp_path, use)
    assert kinds(tmp_path) == ["Granted", "Stopped"]


def test_what_is_told_before_the_thread_begins_waits_for_it(tmp_path: Path) -> None:
    made = Recorder(str(tmp_path), "plugin")
    made.tell(K.GRANTED, SHARE)
    made.close()
    assert not (tmp_path / "events").exists()
    run(tmp_path, lambda made: made.tell(K.GRANTED, SHARE))
    assert kinds(tmp_path) == ["Granted"]


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung, let_go = threading.Event(), threading.Event()

    def hang(this: EventFile, events: list[Event]) -> int:
        hung.set()
        let_go.wait(NEVER_S)
        return len(events)

    monkeypatch.setattr(EventFile, "append", hang)
    monkeypatch.setattr(recorder, "CLOSE_S", 0.01)
    made = Recorder(str(tmp_path), "plugin")
    made.start()
    made.tell(K.GRANTED, SHARE)
    assert hung.wait(WAIT_S)
    with soon():
        for _ in range(100):
            made.tell(K.REFUSED, SHARE, FULL)
        made.close()
    let_go.set()
