"""What systemd is told: that a process is ready once, that it lives as long as it does, and when it stops."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsd.common import notify
from mpsd.common.notify import Notifier, Said, Target, Word, messages, period_s, shortened, take, target
from tests.waiting import NEVER_S, WAIT_S, until

LIVE, HUNG = Word(live=True, line="ready"), Word(live=False, line="hangs")


@pytest.mark.parametrize(
    ("environ", "address", "watchdog_s"),
    [
        ({"NOTIFY_SOCKET": "/run/systemd/notify"}, "/run/systemd/notify", None),
        ({"NOTIFY_SOCKET": "@/org/x", "WATCHDOG_USEC": "30000000"}, "\0/org/x", 30.0),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "500000", "WATCHDOG_PID": "7"}, "/n", 0.5),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"}, "/n", None),
        *(({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": odd}, "/n", None) for odd in ("", "0", "-1", "1.5", "x", "\u0663")),
    ],
)
def test_where_to_and_how_often_is_read_from_the_environment(
    environ: dict[str, str], address: str, watchdog_s: float | None
) -> None:
    assert target(environ, 7) == Target(address, watchdog_s, environ)


@pytest.mark.parametrize("name", ["", "@", "/", "relative", "vsock:2:1234"])
def test_without_a_socket_that_can_be_had_nothing_is_sent(name: str) -> None:
    assert target({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1"}, 7) is None


def test_what_is_for_us_is_no_child_s() -> None:
    environ = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid()), "PATH": "/bin"}
    before = {key: value for key, value in environ.items() if key != "PATH"}
    assert take(environ) == Target("/n", 1.0, before)
    assert environ == {"PATH": "/bin"}
    assert take(environ) is None


@pytest.mark.parametrize(
    ("said", "word", "watchdog", "expected"),
    [
        (Said(), LIVE, True, ("READY=1", "WATCHDOG=1", "STATUS=ready")),
        (Said(), LIVE, False, ("READY=1", "STATUS=ready")),
        (Said(), HUNG, True, ("STATUS=hangs",)),
        (Said(ready=True, status="ready"), LIVE, True, ("WATCHDOG=1",)),
        (Said(ready=True, status="ready"), LIVE, False, ()),
        (Said(ready=True, status="ready"), HUNG, True, ("STATUS=hangs",)),
        (Said(ready=True, status="hangs"), HUNG, True, ()),
        (Said(ready=True, status="hangs"), LIVE, True, ("WATCHDOG=1", "STATUS=ready")),
    ],
)
def test_only_what_lives_is_ready_and_pets_the_watchdog(
    said: Said, word: Word, watchdog: bool, expected: tuple[str, ...]
) -> None:
    assert messages(said, word, watchdog=watchdog) == expected


def test_the_watchdog_is_petted_three_times_in_its_time() -> None:
    assert period_s(None, ready=True) == period_s(60.0, ready=True) == 10.0
    assert period_s(3.0, ready=True) == 1.0
    assert period_s(None, ready=False) == 1.0
    assert period_s(0.3, ready=False) == pytest.approx(0.1)


def test_a_status_is_one_line_that_fits() -> None:
    assert shortened("a\nREADY=1\nb\x1b[2J") == "a READY=1 b\\u001b[2J"
    assert len(shortened("\u00e9" * 1000).encode()) == 512


@contextmanager
def systemd(address: str) -> Iterator[socket.socket]:
    """Its side of the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(WAIT_S)
        yield listener


@contextmanager
def notifying(address: str, look: Callable[[], Word], watchdog_s: float | None = None) -> Iterator[Notifier]:
    notifier = Notifier(Target(address, watchdog_s, {}), look)
    notifier.start()
    try:
        yield notifier
    finally:
        notifier.close()


def lines(listener: socket.socket) -> list[str]:
    return listener.recv(4096).decode().split("\n")


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_it_is_ready_then_lives_then_stops(short_tmp: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "PERIOD_S", NEVER_S)
    address = f"{short_tmp}/notify" if kind == "path" else f"\0{short_tmp}/notify"
    with systemd(address) as listener:
        with notifying(address, lambda: LIVE, watchdog_s=0.03):
            assert lines(listener) == ["READY=1", "WATCHDOG=1", "STATUS=ready"]
            assert lines(listener) == ["WATCHDOG=1"]
        said = [lines(listener)]
        while said[-1] == ["WATCHDOG=1"]:
            said.append(lines(listener))
        assert said[-1] == ["STOPPING=1", "STATUS=stops"]


def test_the_watchdog_goes_hungry_while_a_loop_hangs(short_tmp: Path) -> None:
    address, word, looked = f"{short_tmp}/notify", LIVE, threading.Semaphore(0)

    def look() -> Word:
        looked.release()
        return word

    with systemd(address) as listener, notifying(address, look, watchdog_s=0.03):
        assert lines(listener)[0] == "READY=1"
        word = HUNG
        said = lines(listener)
        while said == ["WATCHDOG=1"]:
            said = lines(listener)
        assert said == ["STATUS=hangs"]
        while looked.acquire(blocking=False):
            pass
        for _ in range(3):
            assert looked.acquire(timeout=WAIT_S)
        word = LIVE
        assert lines(listener) == ["WATCHDOG=1", "STATUS=ready"], "nothing was sent meanwhile"


def test_readiness_is_told_as_soon_as_there_is_somebody_to_hear_it(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "START_S", 0.01)
    caplog.set_level(logging.INFO)
    address = f"{short_tmp}/notify"
    with notifying(address, lambda: LIVE):
        until(lambda: "systemd can't be told how this process is" in caplog.text)
        with systemd(address) as listener:
            assert lines(listener) == ["READY=1", "STATUS=ready"]
            until(lambda: "systemd is told again" in caplog.text)  # its thread knows it, too
    assert caplog.text.count("can't be told") == 2, "once for each time that it began"


def test_a_systemd_that_reads_nothing_stops_neither_the_looks_nor_the_end(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "SEND_S", 0.003)
    address, looks = f"{short_tmp}/notify", threading.Semaphore(0)

    def look() -> Word:
        looks.release()
        return LIVE

    with systemd(address), notifying(address, look, watchdog_s=0.003):
        for _ in range(100):  # more than the socket's queue takes
            assert looks.acquire(timeout=WAIT_S)


def test_under_no_systemd_there_is_no_thread() -> None:
    before = threading.active_count()
    notifier = Notifier(None, lambda: LIVE)
    notifier.start()
    assert threading.active_count() == before
    notifier.close()
