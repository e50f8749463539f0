"""What the control daemon and its servers write to control.log and server.log, line by line, as events (pure).

Wordings: NVIDIA MPS documentation, appendix Logging (2013 on), and logs of drivers 465 to 580 in public issues of
NVIDIA/k8s-device-plugin. Most of what protocol 3 logs is unpublished, so a line we don't know that bears a word of
trouble is passed on as `Trouble`, and a log is a hint to look, never the only proof.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

NO_DEVICE = "no CUDA-capable device is detected"


class Severity(Enum):
    """How loud a line is in our own log."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogLine(msgspec.Struct, frozen=True):
    """`[time component pid] message`. A line without that head is all message: `component` empty, `pid` 0."""

    component: str
    pid: int
    message: str


class LogEvent(msgspec.Struct, frozen=True):
    """Base of what a log tells."""


class ServerStarted(LogEvent, frozen=True):
    pid: int
    uid: int


class ServerReady(LogEvent, frozen=True):
    pid: int


class ServerExited(LogEvent, frozen=True):
    pid: int
    status: int


class ServerFatal(LogEvent, frozen=True):
    """A server gave up; its exit follows. `writer` is the PID in the line's head: the daemon's or the server's."""

    writer: int


class StartFailed(LogEvent, frozen=True):
    """A server could not start. `generic`: the line says no more than that."""

    text: str
    generic: bool = False

    @property
    def no_device(self) -> bool:
        """The server saw no GPU: it is gone, or `allowed_devices` names one that isn't there."""
        return NO_DEVICE in self.text


class ClientConnected(LogEvent, frozen=True):
    """A client came; told by control.log (with its user) and again by server.log (`uid` None).

    PID 0: the daemon runs outside the host's PID namespace and can name no client.
    """

    pid: int
    uid: int | None = None


class ClientLimit(LogEvent, frozen=True):
    """A client was refused because there are too many."""


class ClientUnaccounted(LogEvent, frozen=True):
    """memacct could not register a client: no memory limit holds for it. PID 0 as in `ClientConnected`."""

    pid: int


class Evictions(LogEvent, frozen=True):
    """How many clients memacct has evicted on a device so far, for others within their guaranteed memory. `device` is
    empty where the line names none by its UUID."""

    device: str
    count: int


class FaultBegun(LogEvent, frozen=True):
    """A fatal GPU error: the server takes no new clients until all affected ones have left."""

    server: int


class FaultClients(LogEvent, frozen=True):
    """The clients that must leave. May come again with more of them; each one is the whole list so far."""

    server: int
    pids: tuple[int, ...]
    devices: tuple[int, ...] = ()
    """Ordinals as the daemon sees them."""


class FaultEnded(LogEvent, frozen=True):
    """The server made its contexts anew, or another server did."""

    server: int


class Skipped(LogEvent, frozen=True):
    """More was written at once than is read: what these bytes said is not known."""

    size_bytes: int


class Trouble(LogEvent, frozen=True):
    """An unknown line that sounds like trouble."""

    text: str


_SEVERITIES: dict[type[LogEvent], Severity] = {
    ServerStarted: Severity.INFO,
    ServerReady: Severity.INFO,
    ServerFatal: Severity.ERROR,
    StartFailed: Severity.ERROR,
    ClientLimit: Severity.WARNING,
    ClientUnaccounted: Severity.WARNING,
    Evictions: Severity.WARNING,
    FaultBegun: Severity.ERROR,
    FaultClients: Severity.ERROR,
    FaultEnded: Severity.INFO,
    Skipped: Severity.WARNING,
    Trouble: Severity.WARNING,
}


def severity(event: LogEvent) -> Severity | None:
    """How loud the event is; None when our log need not have it."""
    if isinstance(event, ServerExited):
        return Severity.ERROR if event.status else Severity.INFO
    if isinstance(event, ClientConnected):
        return Severity.WARNING if event.pid == 0 else None
    return _SEVERITIES.get(type(event))


_HEAD = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ([A-Za-z][A-Za-z ]{0,30}?)\s+(\d{1,10})\] ?(.*)", re.ASCII | re.DOTALL
)


def parse_line(text: str) -> LogLine:
    """Takes one line apart; any text is a line."""
    match = _HEAD.fullmatch(text.rstrip())
    return LogLine("", 0, text.strip()) if match is None else LogLine(match[1], int(match[2]), match[3])


_ROUTINE = re.compile(
    r"NEW UI|UI closed|Cmd:|Accepting connection|User did not send valid credentials|[\d.]*[GM]?$", re.ASCII
)


def is_routine(line: LogLine) -> bool:
    """What every command to the daemon leaves in control.log, our own queries first of all, and blank lines."""
    return not line.message or (line.component == "Control" and _ROUTINE.match(line.message) is not None)


_Build = Callable[[LogLine, re.Match[str]], LogEvent]
_PID = r"(\d{1,10})"


def _wording(pattern: str, build: _Build) -> tuple[re.Pattern[str], _Build]:
    return re.compile(pattern, re.ASCII), build


def _device(message: str) -> str:
    match = re.search(r"GPU-[0-9A-Za-z-]{1,60}", message, re.ASCII)
    return match[0] if match else ""


# Matched at the start of a message: text that others choose (names, commands) can stand in the middle of one.
_WORDINGS = (
    _wording(rf"Starting new server {_PID} for user {_PID}", lambda _, m: ServerStarted(int(m[1]), int(m[2]))),
    _wording(rf"NEW SERVER {_PID}: Ready", lambda _, m: ServerReady(int(m[1]))),
    _wording(rf"Server {_PID} exited with status (-?\d{{1,10}})", lambda _, m: ServerExited(int(m[1]), int(m[2]))),
    _wording(r"Server encountered a fatal exception", lambda line, _: ServerFatal(line.pid)),
    _wording(rf"NEW CLIENT {_PID} from user {_PID}", lambda _, m: ClientConnected(int(m[1]), int(m[2]))),
    _wording(rf"New client {_PID} connected", lambda _, m: ClientConnected(int(m[1]))),
    _wording(rf"Client \{{PID: {_PID}\b.*\}} connected", lambda _, m: ClientConnected(int(m[1]))),
    _wording(r"Failed to start ?: ?(.+)", lambda _, m: StartFailed(m[1])),
    _wording(r"MPS server failed to start", lambda line, _: StartFailed(line.message, generic=True)),
    _wording(r"MPS is only supported on ", lambda line, _: StartFailed(line.message)),
    _wording(rf"\[memacct\] failed to register client pid {_PID}", lambda _, m: ClientUnaccounted(int(m[1]))),
    # That counters of each device are logged is documented (memory partitioning, r615), their wording is not.
    _wording(
        r"\[memacct\].*\bevictions?\b\W{1,3}(\d{1,10})", lambda line, m: Evictions(_device(line.message), int(m[1]))
    ),
)
_HARMLESS = re.compile(r"Receive command failed, assuming client exit")
# The server's own words at the client limit are not published.
_CLIENT_LIMIT = ("too many clients", "number of clients", "max clients", "client limit", "mps_max_c")
_TROUBLE = ("fail", "error", "fatal", "exception", "cannot", "can't", "unable", "denied", "refused", "invalid", "abort")


def interpret(line: LogLine) -> LogEvent | None:
    """What one line says on its own; None for everything that needs nobody's attention."""
    if is_routine(line) or _HARMLESS.match(line.message):
        return None
    if line.component:
        for pattern, build in _WORDINGS:
            if match := pattern.match(line.message):
                return build(line, match)
    if NO_DEVICE in line.message:
        return StartFailed(line.message)
    lower = line.message.lower()
    if any(words in lower for words in _CLIENT_LIMIT):
        return ClientLimit()
    return Trouble(line.message) if any(word in lower for word in _TROUBLE) else None


_VOLTA = r"(?:Volta MPS: )?"
_FATAL = re.compile(_VOLTA + r"Server is handling a fatal GPU error")
_DEVICES = re.compile(_VOLTA + r"The following devices")
_CLIENTS = re.compile(_VOLTA + r"The following clients have a sticky error")
_STATUS = re.compile(_VOLTA + r"status of client")
_CONTEXT = re.compile(_VOLTA + r"Creating server context on device")
_ID = re.compile(rf"\{{?{_PID}(?:, ?\d+\}})?", re.ASCII)
_MAX_IDS = 256
"""Far above what one GPU serves; a file of numbers must not fill the memory."""

Told = tuple[LogEvent, str]
"""An event and the words for it in our log."""


@dataclass(slots=True, eq=False)
class _Fault:
    server: int
    devices: list[int] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    section: list[int] | None = None
    """Where numbers go."""
    told: int = 0
    """How many of the clients are passed on."""


class Interpreter:
    """The lines of one file in order, as events: also those that take several lines to say.

    A fault is told in a block: that it began, the devices, the clients. Lines of other threads may stand in between,
    and the file may end anywhere for now, or have begun in the middle.
    """

    def __init__(self) -> None:
        self._fault: _Fault | None = None

    def feed(self, line: LogLine) -> list[Told]:
        """The events that this line completes."""
        message = line.message
        if _FATAL.match(message) and line.component:  # without a head anybody may have written it
            return [*self.settle(), *self._begin(line, fresh=True)]
        if _DEVICES.match(message):
            told = [*self.settle(), *self._begin(line)]
            self._read_ids(devices=True)
            return told
        if _CLIENTS.match(message):
            told = self._begin(line)
            self._read_ids(devices=False)
            return told
        fault = self._fault
        told = []
        if fault is not None:
            if _STATUS.match(message):
                return []
            if fault.section is not None and (match := _ID.fullmatch(message)):
                _add(fault.section, int(match[1]))
                return []
            told, fault.section = self.settle(), None
            if _CONTEXT.match(message):
                self._fault = None
                return [*told, (FaultEnded(fault.server), message)]
        event = interpret(line)
        return told if event is None else [*told, (event, message)]

    def settle(self) -> list[Told]:
        """Nothing more to read for now: tells the clients named so far."""
        fault = self._fault
        if fault is None or fault.told == len(fault.clients):
            return []
        fault.told = len(fault.clients)
        event = FaultClients(fault.server, tuple(fault.clients), tuple(fault.devices))
        return [(event, f"clients with a sticky error: {', '.join(map(str, fault.clients))}")]

    def _begin(self, line: LogLine, *, fresh: bool = False) -> list[Told]:
        """A fault is on, whichever line of its block is the first we see. `fresh`: it names its clients anew."""
        begun = self._fault is None
        if fresh or self._fault is None:
            self._fault = _Fault(line.pid)
        return [(FaultBegun(line.pid), line.message)] if begun else []

    def _read_ids(self, *, devices: bool) -> None:
        if self._fault is not None:
            self._fault.section = self._fault.devices if devices else self._fault.clients


def _add(ids: list[int], number: int) -> None:
    if number not in ids and len(ids) < _MAX_IDS:
        ids.append(number)
