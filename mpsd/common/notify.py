"""Tells systemd how a process of a `Type=notify` unit is: datagrams to the socket that NOTIFY_SOCKET names.

What is sent, by sd_notify(3): READY=1 once, STATUS= one line when it changes, WATCHDOG=1 while the process lives, and
STOPPING=1 at the end. Under no systemd nothing is sent, and there is no thread.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final, NamedTuple

from mpsd.common.log import get_logger
from mpsd.common.text import one_line
from mpsd.common.threads import GuardedThread

log = get_logger("notify")

PERIOD_S: Final = 10.0
"""Between two looks, where the watchdog wants none before."""
START_S: Final = 1.0
"""The same until READY=1 is out."""
END_S: Final = 3.0
"""For a look that is under way at the end; one that hangs is left behind."""
SEND_S: Final = 1.0
STATUS_BYTES: Final = 512
_SOCKET, _WATCHDOG, _WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
VARIABLES: Final = (_SOCKET, _WATCHDOG, _WATCHDOG_PID)


class Target(NamedTuple):
    """`address` as socket.sendto takes it; `watchdog_s`: how long systemd waits for WATCHDOG=1, None: it does not.
    `variables`: the environment that said so, for a program that takes the place of this one."""

    address: str
    watchdog_s: float | None
    variables: Mapping[str, str]


class Word(NamedTuple):
    """`live`: whether the loops of the process go round now; `line`: how it is, for people."""

    live: bool
    line: str


class Said(NamedTuple):
    """What got out so far."""

    ready: bool = False
    status: str = ""


def target(environ: Mapping[str, str], pid: int) -> Target | None:
    """Where to send to, None for nowhere (pure). A watchdog that is another process's, or no number, is none."""
    name = environ.get(_SOCKET, "")
    if not name.startswith(("/", "@")) or len(name) < 2:
        return None
    address = f"\0{name[1:]}" if name[0] == "@" else name
    microseconds = environ.get(_WATCHDOG, "")
    whose = environ.get(_WATCHDOG_PID, str(pid))
    has_watchdog = microseconds.isascii() and microseconds.isdigit() and int(microseconds) > 0 and whose == str(pid)
    watchdog_s = int(microseconds) / 1e6 if has_watchdog else None
    return Target(address, watchdog_s, {key: environ[key] for key in VARIABLES if key in environ})


def take(environ: MutableMapping[str, str] = os.environ) -> Target | None:
    """The same, taken out of the environment: no child of ours may speak for us."""
    found = target(environ, os.getpid())
    for key in VARIABLES:
        environ.pop(key, None)
    return found


def messages(said: Said, word: Word, *, watchdog: bool) -> tuple[str, ...]:
    """What to send now (pure). The watchdog is petted only while the process lives, and ready is what has lived."""
    lines = []
    if word.live and not said.ready:
        lines.append("READY=1")
    if word.live and watchdog:
        lines.append("WATCHDOG=1")
    if (status := shortened(word.line)) != said.status:
        lines.append(f"STATUS={status}")
    return tuple(lines)


def period_s(watchdog_s: float | None, *, ready: bool) -> float:
    """How long to wait for the next look (pure): the watchdog gets three in its time."""
    longest_s = PERIOD_S if ready else START_S
    return longest_s if watchdog_s is None else min(longest_s, watchdog_s / 3)


def shortened(line: str) -> str:
    """One line that fits."""
    return one_line(line).encode()[:STATUS_BYTES].decode(errors="ignore")


class Notifier:
    """One thread, which looks, says what is new, and waits. Without a target it does nothing.

    Args:
        look: how the process is; may take a moment.
    """

    def __init__(self, to: Target | None, look: Callable[[], Word]) -> None:
        self._to, self._look = to, look
        self._said, self._failed = Said(), False
        self._stop = threading.Event()
        self._thread = GuardedThread(self._run, "notify")

    def start(self) -> None:
        if self._to is not None:
            self._thread.start()

    def close(self) -> None:
        """Says that the process stops."""
        self._stop.set()
        if self._to is None or self._thread.ident is None:
            return
        self._send("STOPPING=1", "STATUS=stops")
        self._thread.join(END_S)

    def _run(self) -> None:
        assert self._to is not None
        watchdog_s = self._to.watchdog_s
        while not self._stop.is_set():
            word = self._look()
            lines = messages(self._said, word, watchdog=watchdog_s is not None)
            if lines and not self._stop.is_set() and self._send(*lines):
                self._said = Said(self._said.ready or word.live, shortened(word.line))
            self._stop.wait(period_s(watchdog_s, ready=self._said.ready))

    def _send(self, *lines: str) -> bool:
        """One datagram, or none where systemd does not read for so long."""
        assert self._to is not None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_S)
                sender.sendto("\n".join(lines).encode(), self._to.address)
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("systemd can't be told how this process is", error=error.strerror or str(error))
            return False
        if self._failed:
            self._failed = False
            log.info("systemd is told again how this process is")
        return True
