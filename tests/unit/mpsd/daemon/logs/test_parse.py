import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.daemon.logs import parse
from mpsd.daemon.logs.parse import (
    ClientConnected,
    ClientLimit,
    ClientUnaccounted,
    Evictions,
    FaultBegun,
    FaultClients,
    FaultEnded,
    Interpreter,
    LogEvent,
    LogLine,
    ServerExited,
    ServerFatal,
    ServerReady,
    ServerStarted,
    Severity,
    StartFailed,
    Trouble,
    interpret,
    is_routine,
    parse_line,
    severity,
)

AT = "2026-02-06 09:34:17.770"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"[{AT} Control    72] NEW UI", LogLine("Control", 72, "NEW UI")),
        (f"[{AT} Control 11801] NEW UI\r", LogLine("Control", 11801, "NEW UI")),
        (f"[{AT} Legacy Server   425] Failed to start : x", LogLine("Legacy Server", 425, "Failed to start : x")),
        (f"[{AT} Other   337] Startup", LogLine("Other", 337, "Startup")),
        (f"[{AT} Server 13929] a [b] c", LogLine("Server", 13929, "a [b] c")),
        (f"[{AT} Control     1] ", LogLine("Control", 1, "")),
        ("   4096M", LogLine("", 0, "4096M")),
        ("", LogLine("", 0, "")),
        (f"[{AT} Control    72", LogLine("", 0, f"[{AT} Control    72")),
        (f"[{AT} Control 99999999999] x", LogLine("", 0, f"[{AT} Control 99999999999] x")),
        (f"trol 5] [{AT} Control 72] NEW UI", LogLine("", 0, f"trol 5] [{AT} Control 72] NEW UI")),
    ],
)
def test_lines(text: str, line: LogLine) -> None:
    assert parse_line(text) == line


@pytest.mark.parametrize(
    ("component", "message", "event"),
    [
        # control.log
        ("Control", "Starting new server 11803 for user 1000", ServerStarted(11803, 1000)),
        ("Control", "NEW SERVER 11803: Ready", ServerReady(11803)),
        ("Control", "Server 13929 exited with status 0", ServerExited(13929, 0)),
        ("Control", "Server 92 exited with status 1", ServerExited(92, 1)),
        ("Control", "Server 92 exited with status -9", ServerExited(92, -9)),
        ("Control", "Server encountered a fatal exception. Shutting down", ServerFatal(7)),
        ("Control", "NEW CLIENT 19276 from user 500: Server already exists", ClientConnected(19276, 500)),
        (
            "Control",
            "NEW CLIENT 0 from user 0: Server is not ready, push client to pending list",
            ClientConnected(0, 0),
        ),
        ("Control", "[memacct] failed to register client pid 0 target=unknown", ClientUnaccounted(0)),
        ("Control", "[memacct] device GPU-1a-2b: requests 3, evictions 2, no-victim 1", Evictions("GPU-1a-2b", 2)),
        ("Control", "[memacct] dev 0 requests=3 evictions=2", Evictions("", 2)),
        # server.log: 2013, 2021, 580
        ("Server", "New client 14781 connected", ClientConnected(14781)),
        ("Server", "MPS server failed to start", StartFailed("MPS server failed to start", generic=True)),
        (
            "Server",
            "MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU.",
            StartFailed("MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU."),
        ),
        ("Other", "Client {PID: 4267, Context ID: 0} connected", ClientConnected(4267)),
        ("Legacy Server", "Failed to start : invalid argument", StartFailed("invalid argument")),
        ("Other", "no CUDA-capable device is detected", StartFailed("no CUDA-capable device is detected")),
        ("", "no CUDA-capable device is detected", StartFailed("no CUDA-capable device is detected")),
        ("Other", "Client {PID: 4267, Context ID: 0} refused: too many clients", ClientLimit()),
        ("Other", "Maximum number of clients reached", ClientLimit()),
        ("Other", "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", ClientLimit()),
        # unknown, but no good news
        ("Control", "Unable to read new connection type information", None),
        ("Audit", "cgroup limit Error 5", None),
        ("", "terminate called after throwing an exception", None),
    ],
)
def test_events(component: str, message: str, event: LogEvent | None) -> None:
    assert interpret(LogLine(component, 7, message)) == (event or Trouble(message))


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("Control", "Accepting connection..."),
        ("Control", "NEW UI"),
        ("Control", "Cmd:set_default_device_pinned_mem_limit 0 4096M"),
        ("Control", "Cmd:fatal error"),
        ("Control", "UI closed"),
        ("Control", "10.0"),
        ("Control", "4096M"),
        ("Control", "User did not send valid credentials"),
        ("Control", ""),
    ],
)
def test_what_every_query_leaves_is_routine(component: str, message: str) -> None:
    line = LogLine(component, 7, message)
    assert is_routine(line)
    assert interpret(line) is None


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("Control", "Starting control daemon using socket /run/gpufrac/mps/GPU-1/control"),
        ("Control", "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=/run/x"),
        ("Control", "To connect CUDA applications to this daemon, set CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps"),
        ("Control", "CUDA MPS Control binary version: 13000"),
        ("Control", "Adding server 'shared' [multiuser enabled]"),
        ("Other", "Startup"),
        ("Other", "Start"),
        ("Other", "Creating server context on device 0 (Tesla T4)"),
        ("Other", "Volta MPS: Creating server context on device 0"),
        ("Other", "CUDA MPS Server for Linux/Unix. Binary version: 13000"),
        ("Other", "Device pinned memory limit for device 0 set to 0x140000000 bytes"),
        ("Other", "Server has started"),
        ("Other", "MPS Server is started"),
        ("Other", "Received new client request for {PID: 4267, Context ID: 0}"),
        ("Other", "Volta MPS Server: Received new client request"),
        ("Other", "Receive command failed, assuming client exit"),
        ("Other", "Client process disconnected"),
        ("Server", "Client 14777 disconnected"),
        ("Other", "Client {11641, 1} exit"),
        ("Other", "Volta MPS: status of client {11661, 1} is ACTIVE"),
        ("", "11641"),
        # Only the start of a message makes an event, only one with a head: the rest may be anybody's text.
        ("Control", "hello Server 5 exited with status 1"),
        ("", "Server 5 exited with status 1"),
    ],
)
def test_news_that_needs_nobody(component: str, message: str) -> None:
    line = LogLine(component, 7, message)
    assert not is_routine(line)
    assert interpret(line) is None


@pytest.mark.parametrize(
    ("event", "loud"),
    [
        (ServerExited(1, 0), Severity.INFO),
        (ServerExited(1, 1), Severity.ERROR),
        (ClientConnected(5, 0), None),
        (ClientConnected(0, 0), Severity.WARNING),
        (FaultBegun(1), Severity.ERROR),
        (FaultEnded(1), Severity.INFO),
    ],
)
def test_severities(event: LogEvent, loud: Severity | None) -> None:
    assert severity(event) is loud


def test_every_other_event_has_a_severity() -> None:
    kinds = [kind for kind in vars(parse).values() if isinstance(kind, type) and issubclass(kind, LogEvent)]
    by_value = (LogEvent, ServerExited, ClientConnected)
    assert [kind for kind in kinds if kind not in by_value and severity(kind(*kind.__struct_fields__)) is None] == []


def test_a_server_that_sees_no_gpu_says_so() -> None:
    assert StartFailed("no CUDA-capable device is detected").no_device
    assert not StartFailed("invalid argument").no_device


BLOCK = (
    "Volta MPS: status of client {11661, 1} is ACTIVE",
    "Volta MPS: Server is handling a fatal GPU error.",
    "Volta MPS: status of client {11641, 1} is INACTIVE",
    "Volta MPS: The following devices",
    "0",
    "1",
    "Volta MPS: The following clients have a sticky error set:",
    "11641",
    "Volta MPS: status of client {11661, 1} is INACTIVE",
    "11661",
    "Client {11641, 1} exit",
    "Volta MPS: Destroy server context on device 0",
    "Volta MPS: Creating server context on device 0",
    "Volta MPS: Creating server context on device 1",
)
CLIENTS = FaultClients(9, (11641, 11661), (0, 1))


def fed(interpreter: Interpreter, messages: tuple[str, ...]) -> list[LogEvent]:
    return [event for message in messages for event, _ in interpreter.feed(LogLine("Other", 9, message))]


def test_a_fault_is_told_once_with_its_clients() -> None:
    interpreter = Interpreter()
    assert fed(interpreter, BLOCK) == [FaultBegun(9), CLIENTS, FaultEnded(9)]
    assert interpreter.settle() == []
    assert fed(interpreter, BLOCK) == [FaultBegun(9), CLIENTS, FaultEnded(9)]


@pytest.mark.parametrize("cut", range(len(BLOCK)))
def test_a_block_may_pause_at_any_line(cut: int) -> None:
    interpreter = Interpreter()
    events = fed(interpreter, BLOCK[:cut])
    events += [event for event, _ in interpreter.settle()]
    assert interpreter.settle() == []
    events += fed(interpreter, BLOCK[cut:])
    clients = [event for event in events if isinstance(event, FaultClients)]
    assert [e for e in events if e not in clients] == [FaultBegun(9), FaultEnded(9)]
    assert clients[-1] == CLIENTS
    assert all(event.pids == CLIENTS.pids[: len(event.pids)] for event in clients)


@pytest.mark.parametrize("cut", range(len(BLOCK)))
def test_a_block_may_begin_at_any_line(cut: int) -> None:
    events = fed(Interpreter(), BLOCK[cut:])
    named = BLOCK.index("Volta MPS: The following clients have a sticky error set:")
    if cut > named:
        assert events == []
    else:
        assert events[0] == FaultBegun(9)
        assert [event.pids for event in events if isinstance(event, FaultClients)] == [CLIENTS.pids]
        assert events[-1] == FaultEnded(9)


def test_a_second_fault_before_the_first_is_over_names_its_own_clients() -> None:
    again = ("Volta MPS: Server is handling a fatal GPU error.", BLOCK[6], "5", "Client {5, 1} exit")
    assert fed(Interpreter(), (*BLOCK[:10], *again)) == [FaultBegun(9), CLIENTS, FaultClients(9, (5,))]


def test_other_news_inside_a_block_is_not_lost() -> None:
    interpreter = Interpreter()
    events = fed(interpreter, (*BLOCK[:8], "Failed to start : x", "77"))
    assert events == [FaultBegun(9), FaultClients(9, (11641,), (0, 1)), StartFailed("x")]
    assert interpreter.settle() == []  # 77 belongs to nothing


def test_a_new_server_ends_the_fault_of_a_dead_one() -> None:
    interpreter = Interpreter()
    fed(interpreter, BLOCK[:2])
    line = LogLine("Other", 10, "Creating server context on device 0 (Tesla T4)")
    assert [event for event, _ in interpreter.feed(line)] == [FaultEnded(9)]


def test_a_file_of_numbers_fills_no_memory() -> None:
    interpreter = Interpreter()
    fed(interpreter, (*BLOCK[:7], *(str(n) for n in range(2000))))
    ((event, _),) = interpreter.settle()
    assert isinstance(event, FaultClients)
    assert len(event.pids) == 256


@given(st.lists(st.one_of(st.text(), st.sampled_from([f"[{AT} Other 9] {message}" for message in BLOCK]))))
def test_any_text_is_read_without_an_error(lines: list[str]) -> None:
    interpreter = Interpreter()
    begun = 0
    for text in lines:
        for event, _ in interpreter.feed(parse_line(text)):
            begun += isinstance(event, FaultBegun) - isinstance(event, FaultEnded)
            assert begun in (0, 1)
