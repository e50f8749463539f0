import contextlib
import errno
import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from mpsd.daemon.logs.follow import ROUND_BYTES
from mpsd.daemon.logs.parse import LogEvent, ServerExited, ServerReady, ServerStarted, Severity, Skipped
from mpsd.daemon.logs.tail import FULL_LOOK_EVERY, LAST_LINES, MAX_SERVERS, LogTails
from tests.waiting import WAIT_S

MAX_BYTES = 64 << 10
GPU = "GPU-1"


class Node:
    """One daemon's log directory, its tail without a thread, and what came of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[LogEvent] = []
        self.said: list[tuple[Severity, str]] = []
        self.now_s = 0.0
        self.tails = LogTails(self._on_event, self._on_line, max_bytes=MAX_BYTES, clock=lambda: self.now_s)
        directory.mkdir()

    def _on_event(self, name: str, event: LogEvent) -> None:
        assert name == GPU
        self.events.append(event)

    def _on_line(self, name: str, severity: Severity, text: str) -> None:
        assert name == GPU
        self.said.append((severity, text))

    def add(self, protocol: Literal[2, 3] = 2, *, from_start: bool = False) -> None:
        self.tails.add(GPU, str(self.directory), protocol, from_start=from_start)

    def path(self, name: str) -> Path:
        return self.directory / name

    def write(self, text: str | bytes, name: str = "control.log") -> None:
        with open(self.path(name), "ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    def look(self) -> list[LogEvent]:
        """The events since the last look. So many steps that one is a full look on a file system with slow clocks."""
        for _ in range(FULL_LOOK_EVERY + 2):
            self.tails.step()
        events, self.events = self.events, []
        return events

    def texts(self) -> list[str]:
        return [text for _, text in self.said]


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    node = Node(short_tmp / "log")
    yield node
    node.tails.close()


def ready(pid: int, *, end: str = "\n") -> str:
    return f"[2026-02-06 09:34:17.770 Control    72] NEW SERVER {pid}: Ready{end}"


def readies(*pids: int) -> str:
    return "".join(map(ready, pids))


def pids(events: list[LogEvent]) -> list[int]:
    assert all(isinstance(event, ServerReady) for event in events), events
    return [event.pid for event in events if isinstance(event, ServerReady)]


def usage_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


# --- finding the files -----------------------------------------------------------------------------------------------


def test_adoption_passes_over_the_past_and_sees_what_comes(node: Node) -> None:
    node.write(readies(1, 2))
    node.add()
    node.write(readies(3))
    assert pids(node.look()) == [3]


def test_adoption_in_the_middle_of_a_line_waits_for_the_next(node: Node) -> None:
    node.write(readies(1) + "[2026-02-06 09:34:17.770 Contr")
    node.add()
    node.write("ol 72] NEW SERVER 2: Ready\n" + ready(3))
    assert pids(node.look()) == [3]


def test_a_fresh_daemon_is_read_from_its_first_line(node: Node) -> None:
    node.add()
    assert node.look() == []
    node.write(readies(1, 2))
    node.write(readies(3), "server.log")
    assert pids(node.look()) == [1, 2, 3]


def test_from_start_reads_what_is_there(node: Node) -> None:
    node.write(readies(1))
    node.add(from_start=True)
    assert pids(node.look()) == [1]


def test_the_directory_may_come_later_and_come_anew(node: Node) -> None:
    node.directory.rmdir()
    node.add()
    assert node.look() == []
    for pid in (1, 2):
        node.directory.mkdir()
        node.write(readies(pid))
        assert pids(node.look()) == [pid]
        node.path("control.log").unlink()
        node.directory.rmdir()
        assert node.look() == []


def test_protocol_3_has_a_log_per_server(node: Node) -> None:
    node.path("shared").mkdir()
    node.write(readies(1), "shared/server.log")
    node.add(3)
    node.path("uid_1000").mkdir()
    node.path("Not-A-Server").mkdir()
    node.write(readies(2), "control.log")
    node.write(readies(3), "shared/server.log")
    node.write(readies(4), "uid_1000/server.log")
    node.write(readies(5), "Not-A-Server/server.log")
    node.write(readies(6), "server.log")
    assert pids(node.look()) == [2, 3, 4]
    for name in ("shared", "uid_1000"):
        node.path(f"{name}/server.log").unlink()
        node.path(name).rmdir()
    assert node.look() == []
    node.path("shared").mkdir()
    node.write(readies(7), "shared/server.log")
    assert pids(node.look()) == [7]


def test_ever_more_servers_take_no_more_descriptors(node: Node) -> None:
    node.add(3)
    for n in range(MAX_SERVERS + 20):
        node.path(f"s{n:03}").mkdir()
        node.write(readies(n), f"s{n:03}/server.log")
    assert len(pids(node.look())) == MAX_SERVERS


def test_another_directory_or_protocol_replaces_the_tail(node: Node) -> None:
    node.add(2)
    node.add(2)
    node.path("shared").mkdir()
    node.add(3)
    node.write(readies(1), "server.log")
    node.write(readies(2), "shared/server.log")
    assert pids(node.look()) == [2]


# --- what writers do to them -----------------------------------------------------------------------------------------


def test_a_line_counts_when_it_is_whole(node: Node) -> None:
    node.add()
    node.write(ready(1) + "[2026-02-06 09:34:17.770 Control 72] Server 9 exited with status 1")
    assert node.look() == [ServerReady(1)]
    assert node.tails.last_lines(GPU)[-1].endswith("Server 9 exited with status 1")
    node.write("39\n")
    assert node.look() == [ServerExited(9, 139)]


def test_renamed_file_is_read_on_until_the_name_is_taken_again(node: Node) -> None:
    node.add()
    node.write(readies(1))
    assert pids(node.look()) == [1]
    node.path("control.log").rename(node.path("old"))
    node.look()
    node.write(readies(2), "old")
    node.tails.step()
    assert pids(node.events) == [2]
    node.events.clear()
    node.write(ready(3) + ready(4, end=""), "old")
    node.write(readies(5))
    assert pids(node.look()) == [3, 4, 5]
    node.write(readies(6), "old")
    assert node.look() == []


def test_a_deleted_file_comes_anew(node: Node) -> None:
    node.add()
    node.write(readies(1))
    assert pids(node.look()) == [1]
    node.path("control.log").unlink()
    assert node.look() == []
    node.write(readies(2))
    assert pids(node.look()) == [2]


@pytest.mark.parametrize("mode", ["ab", "r+b"])
def test_truncated_by_others_under_either_kind_of_writer(node: Node, mode: str) -> None:
    node.add()
    node.write(readies(1, 2))
    with open(node.path("control.log"), mode, buffering=0) as writer:
        writer.seek(0, os.SEEK_END)
        assert pids(node.look()) == [1, 2]
        os.truncate(node.path("control.log"), 0)
        assert node.look() == []
        writer.write(readies(3).encode())
        assert pids(node.look()) == [3]


def test_truncated_and_refilled_between_two_looks(node: Node) -> None:
    node.add()
    node.write(readies(1, 2, 3))
    assert pids(node.look()) == [1, 2, 3]
    os.truncate(node.path("control.log"), 0)
    node.write(readies(4))
    assert pids(node.look()) == [4]


def test_junk_and_endless_lines_do_no_harm(node: Node) -> None:
    node.add()
    node.write(bytes(range(256)) * 40 + b"\n" + b"x" * (ROUND_BYTES - 100_000) + b"\n" + ready(1).encode())
    assert pids(node.look()) == [1]
    assert all(len(line) <= 500 and line.isprintable() for line in node.tails.last_lines(GPU))


def test_of_a_burst_the_end_is_read_and_the_rest_counted(node: Node) -> None:
    node.add()
    size = 100 << 20
    with open(node.path("control.log"), "wb") as file:
        file.writelines(b"x\n" * (512 << 10) for _ in range(100))
    node.write(readies(1))
    assert node.look() == [Skipped(size + len(ready(1)) - ROUND_BYTES), ServerReady(1)]
    assert usage_bytes(node.path("control.log")) == 0
    assert node.path("control.log.1").stat().st_size <= MAX_BYTES // 4
    assert "bytes of the log skipped" in node.texts()[0]


# --- bounded on disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_disk_usage_is_bounded_and_no_line_is_lost(node: Node, mode: str) -> None:
    """`wb` keeps its own offset: after a cut it writes behind a hole."""
    node.add()
    path, kept = node.path("control.log"), node.path("control.log.1")
    written = 0
    with open(path, mode, buffering=0) as writer:
        for _ in range(20):
            block = range(written, written + 300)
            writer.write(readies(*block).encode())
            written += 300
            assert pids(node.look()) == list(block)
            assert usage_bytes(path) <= MAX_BYTES + 4096
            assert not kept.exists() or kept.stat().st_size <= MAX_BYTES // 4
        writer.write(readies(written).encode())
        assert pids(node.look()) == [written]
        assert (path.stat().st_size > MAX_BYTES * 4) is (mode == "wb")
    lines = kept.read_text().splitlines(keepends=True)
    assert lines
    assert "".join(lines) == readies(*(int(line.split()[-2].rstrip(":")) for line in lines))
    assert sum("was cut" in text for text in node.texts()) == 1  # said once an hour


def test_a_line_half_written_at_the_cut_stays_one_line(node: Node) -> None:
    node.add()
    node.write(readies(*range(2000)) + ready(7, end=""))
    assert len(node.look()) == 2000
    assert node.path("control.log").stat().st_size == 0
    node.write("\n")
    assert pids(node.look()) == [7]


def test_a_full_disk_costs_the_copy_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "sendfile", full)
    node.add()
    node.write(readies(*range(2000)))
    assert len(node.look()) == 2000
    assert node.path("control.log").stat().st_size == 0
    assert not node.path("control.log.1").exists()


def test_a_renamed_log_is_bounded_and_keeps_the_name_it_was_given(node: Node) -> None:
    node.add()
    node.write(readies(1))
    node.look()
    node.path("control.log").rename(node.path("control.log.1"))
    node.write(readies(*range(2000)), "control.log.1")
    assert len(node.look()) == 2000
    assert node.path("control.log.1").stat().st_size == 0


def test_a_log_that_may_not_be_written_is_read_and_complained_about_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    node.add()
    node.write(readies(*range(2000)))
    assert len(node.look()) == 2000
    assert sum("can't be cut" in text for text in node.texts()) == 1
    assert node.path("control.log").stat().st_size > MAX_BYTES


def test_a_sick_disk_is_said_once_and_read_again_when_well(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.add()
    node.write(readies(1))
    assert pids(node.look()) == [1]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        node.write(readies(2))
        assert node.look() == []
    assert sum("Input/output error" in text for text in node.texts()) == 1
    assert pids(node.look()) == [2]


# --- what others put in their place ----------------------------------------------------------------------------------


def linked(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard_linked(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def directory(path: Path, _: Path) -> None:
    path.mkdir()


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [linked, hard_linked, directory, pipe])
@pytest.mark.parametrize("from_start", [False, True])
def test_only_a_regular_file_of_one_name_is_opened(
    node: Node, short_tmp: Path, plant: Callable[[Path, Path], None], from_start: bool
) -> None:
    victim = short_tmp / "victim"
    content = readies(*range(2000))
    victim.write_text(content)
    plant(node.path("control.log"), victim)
    node.add(from_start=from_start)
    assert node.look() == []
    assert victim.read_text() == content
    assert sum("no regular file" in text for text in node.texts()) == 1
    with contextlib.suppress(OSError):
        node.path("control.log").unlink()
    with contextlib.suppress(OSError):
        node.path("control.log").rmdir()
    node.write(readies(1))
    assert pids(node.look()) == [1]


def test_directories_are_not_followed_through_links(node: Node, short_tmp: Path) -> None:
    elsewhere = short_tmp / "elsewhere"
    elsewhere.mkdir()
    node.add(3)
    node.path("shared").symlink_to(elsewhere)
    (elsewhere / "server.log").write_text(readies(1))
    assert node.look() == []
    node.path("shared").unlink()
    node.directory.rmdir()
    node.directory.symlink_to(elsewhere)
    (elsewhere / "control.log").write_text(readies(2))
    assert node.look() == []
    assert sum("it is a link" in text for text in node.texts()) == 1


def test_the_kept_end_never_goes_through_a_link(node: Node, short_tmp: Path) -> None:
    victim = short_tmp / "victim"
    victim.write_text("mine")
    node.path("control.log.1").symlink_to(victim)
    node.add()
    node.write(readies(*range(2000)))
    assert len(node.look()) == 2000
    assert victim.read_text() == "mine"
    assert not node.path("control.log.1").is_symlink()


# --- what is passed on -----------------------------------------------------------------------------------------------


def control(message: str) -> str:
    return f"[2026-02-06 09:34:17.770 Control    72] {message}\n"


QUERY = control("Accepting connection...") + control("NEW UI") + control("Cmd:get_server_list") + control("UI closed")


def test_queries_are_silent_and_state_changes_said_once(node: Node) -> None:
    node.add()
    for _ in range(3):
        node.write(QUERY)
        node.look()
    node.write(control("Starting new server 9 for user 0") + control("NEW CLIENT 5 from user 0: Server already exists"))
    node.look()
    node.look()
    assert node.said == [(Severity.INFO, "Starting new server 9 for user 0")]


def test_last_lines_leave_out_queries_and_are_few(node: Node) -> None:
    assert node.tails.last_lines(GPU) == ()
    node.add()
    node.write("".join(ready(n) + QUERY for n in range(LAST_LINES + 5)))
    node.look()
    assert node.tails.last_lines(GPU) == tuple(ready(n, end="") for n in range(5, LAST_LINES + 5))
    node.tails.remove(GPU)
    assert node.tails.last_lines(GPU) == ()


def test_a_flood_is_cut_and_counted(node: Node) -> None:
    node.add()
    node.write(readies(*range(200)))
    assert len(node.look()) == 200
    assert len(node.said) == 50
    node.now_s = 60.0
    node.look()
    assert node.said[50:] == [(Severity.WARNING, "150 more lines suppressed")]


def test_clients_without_a_pid_are_warned_of_once_and_told_each_time(node: Node) -> None:
    node.add()
    for _ in range(3):
        node.write(control("NEW CLIENT 0 from user 0: Server already exists"))
        assert len(node.look()) == 1
    assert node.said == [(Severity.WARNING, "NEW CLIENT 0 from user 0: Server already exists")]


def test_clients_of_a_fault_are_told_though_the_log_ends_there(node: Node) -> None:
    node.add()
    fault = "Server is handling a fatal GPU error.", "The following clients have a sticky error set:"
    lines = [f"[2026-02-06 09:34:17.770 Other 337] Volta MPS: {text}\n" for text in fault]
    node.write("".join(lines) + "[2026-02-06 09:34:17.770 Other 337] 11641\n", "server.log")
    node.look()
    assert node.said[1:] == [(Severity.ERROR, "clients with a sticky error: 11641")]


def test_nothing_comes_after_removal(node: Node) -> None:
    node.add()
    node.write(readies(1))
    node.tails.remove(GPU)
    node.tails.remove(GPU)
    assert node.look() == []
    node.add()
    node.write(readies(2))
    assert pids(node.look()) == [2]


def test_a_callback_may_remove_its_daemon(short_tmp: Path) -> None:
    heard: list[LogEvent] = []

    def on_event(name: str, event: LogEvent) -> None:
        heard.append(event)
        tails.remove(name)

    tails = LogTails(on_event, lambda *_: None)
    tails.add(GPU, str(short_tmp), 2)
    (short_tmp / "control.log").write_text(readies(1, 2))
    tails.step()
    assert heard == [ServerReady(1)]
    tails.close()


def test_a_callback_that_fails_costs_no_other_event(short_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[LogEvent] = []

    def on_event(_: str, event: LogEvent) -> None:
        heard.append(event)
        raise ValueError("mine")

    tails = LogTails(on_event, lambda *_: None)
    tails.add(GPU, str(short_tmp), 2)
    (short_tmp / "control.log").write_text(readies(1, 2))
    tails.step()
    assert heard == [ServerReady(1), ServerReady(2)]
    assert "cannot pass on" in caplog.text
    tails.close()
    tails.close()


def test_the_thread_tells_and_a_callback_may_close_it(short_tmp: Path) -> None:
    heard: queue.SimpleQueue[tuple[str, LogEvent]] = queue.SimpleQueue()

    def on_event(name: str, event: LogEvent) -> None:
        if isinstance(event, ServerExited):
            tails.close()
        heard.put((name, event))

    tails = LogTails(on_event, lambda *_: None, poll_s=0.005)
    tails.start()
    for n in range(8):
        (short_tmp / f"GPU-{n}").mkdir()
        tails.add(f"GPU-{n}", str(short_tmp / f"GPU-{n}"), 2)
    for n in range(8):
        (short_tmp / f"GPU-{n}" / "control.log").write_text(control(f"Starting new server {n} for user 0"))
    assert {heard.get(timeout=WAIT_S) for _ in range(8)} == {(f"GPU-{n}", ServerStarted(n, 0)) for n in range(8)}
    with open(short_tmp / "GPU-3" / "control.log", "a", encoding="ascii") as file:
        file.write(control("Server 3 exited with status 1"))
    assert heard.get(timeout=WAIT_S) == ("GPU-3", ServerExited(3, 1))
    tails.close()
    tails.add("late", str(short_tmp), 2)
    assert tails.last_lines("late") == ()
