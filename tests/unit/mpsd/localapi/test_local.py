"""Server and client of the local API over a real socket."""

import os
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpsd.common.errors import ConfigError, GpufracError, NotReachableError, ProtocolError, TransientError
from mpsd.localapi import seats, wire
from mpsd.localapi import server as server_module
from mpsd.localapi.call import call
from mpsd.localapi.client import MpsdClient
from mpsd.localapi.methods import Call, Method, reading
from mpsd.localapi.server import LocalServer
from mpsd.localapi.snapshot import Desired, GpuClient, GpuClients, Snapshot
from tests.desired import allocation
from tests.waiting import NEVER_S, WAIT_S, until


class Owner:
    """What mpsd will be: methods over a snapshot and a condition."""

    def __init__(self) -> None:
        self.snapshot = Snapshot(instance="i", generation=1)
        self.desired: Desired | None = None
        self.found: dict[str, GpuClients] = {}
        self.asked: dict[str, Any] = {}
        self.stopped = False
        self.watching = 0
        self.waiting = threading.Event()
        self.changed = threading.Condition()

    def publish(self, snapshot: Snapshot) -> None:
        with self.changed:
            self.snapshot = snapshot
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def until_watched(self, count: int) -> None:
        """Waits until `watch` has been asked so often."""
        until(lambda: self.watching == count)

    def methods(self) -> dict[str, Method]:
        calls: dict[str, Call] = {
            "snapshot": lambda _: self.snapshot,
            "watch": self._watch,
            "apply": self._apply,
            "clients": self._clients,
            "status": lambda _: {"pid": os.getpid()},
            "echo": lambda params: params,
            "fail": self._fail,
            "crash": lambda params: params["missing"],
            "huge": lambda _: "x" * (wire.MAX_ANSWER_BYTES + 1),
            "odd": lambda _: object(),
            "surrogate": lambda _: "\udcff",
        }
        return reading(calls)

    def _watch(self, params: dict[str, Any]) -> Snapshot:
        known = (params["instance"], params["generation"])
        self.waiting.set()
        with self.changed:
            self.watching += 1
            self.changed.wait_for(
                lambda: self.stopped or (self.snapshot.instance, self.snapshot.generation) != known,
                params["timeout_s"],
            )
            return self.snapshot

    def _apply(self, params: dict[str, Any]) -> None:
        self.desired = msgspec.convert(params["desired"], Desired)

    def _clients(self, params: dict[str, Any]) -> dict[str, GpuClients]:
        self.asked = params
        return self.found

    def _fail(self, params: dict[str, Any]) -> None:
        raise ConfigError("cannot do that: not configured")


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def path(short_tmp: Path) -> str:
    return str(short_tmp / "mpsd.sock")


@pytest.fixture
def running(owner: Owner, path: str) -> Iterator[LocalServer]:
    server = LocalServer(path, owner.methods())
    server.start()
    yield server
    owner.stop()
    server.close()


def raw(path: str, data: bytes, *, half_close: bool = True) -> list[bytes]:
    """Sends bytes, gives the answer lines until the server closes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(path)
        try:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has closed already
        received = b""
        try:
            while chunk := connection.recv(1 << 16):
                received += chunk
        except ConnectionResetError:
            pass
        return received.splitlines()


def code_of(line: bytes) -> str:
    return str(msgspec.json.decode(line)["error"]["code"])


@pytest.mark.usefixtures("running")
def test_calls(path: str, owner: Owner) -> None:
    client = MpsdClient(path)
    assert client.snapshot() == owner.snapshot
    assert client.status() == {"pid": os.getpid()}
    desired = Desired(allocations=(allocation("GPU-a"), allocation("GPU-b", slot=None)))
    client.apply(desired)
    assert owner.desired == desired
    assert call(path, "echo", {"a": [1, "zwei\n"]}, dict[str, list[Any]]) == {"a": [1, "zwei\n"]}


@pytest.mark.usefixtures("running")
def test_clients_come_per_gpu_and_mpsd_is_given_less_time_than_the_call(path: str, owner: Owner) -> None:
    owner.found = {
        "GPU-a": GpuClients(clients=(GpuClient(pid=7, allocation_key="k", used_bytes=1),)),
        "GPU-b": GpuClients(error="cannot list them"),
    }
    assert MpsdClient(path).clients(["GPU-a", "GPU-b"], WAIT_S) == owner.found
    assert owner.asked["uuids"] == ["GPU-a", "GPU-b"]
    assert 0 < owner.asked["timeout_s"] < WAIT_S


@pytest.mark.usefixtures("running")
def test_watch_returns_on_change_and_at_once_when_behind(path: str, owner: Owner) -> None:
    client = MpsdClient(path)
    assert client.watch("", 0, 20.0) == owner.snapshot
    seen: list[Snapshot] = []
    thread = threading.Thread(target=lambda: seen.append(client.watch("i", 1, 20.0)))
    owner.waiting.clear()
    thread.start()
    assert owner.waiting.wait(WAIT_S)
    owner.publish(Snapshot(instance="i", generation=2))
    thread.join(WAIT_S)
    assert [s.generation for s in seen] == [2]


@pytest.mark.usefixtures("running")
def test_watch_gives_the_same_after_the_time(path: str, owner: Owner) -> None:
    assert MpsdClient(path).watch("i", 1, 0.01) == owner.snapshot


def test_close_wakes_a_watcher_that_its_owner_woke(path: str, owner: Owner, running: LocalServer) -> None:
    seen: list[Snapshot] = []
    thread = threading.Thread(target=lambda: seen.append(MpsdClient(path).watch("i", 1, 20.0)))
    thread.start()
    assert owner.waiting.wait(WAIT_S)
    owner.stop()
    running.close()
    thread.join(WAIT_S)
    assert len(seen) == 1
    assert not os.path.exists(path)


def test_close_ends_idle_connections(path: str, running: LocalServer) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(path)
        connection.sendall(wire.encode_request("status", {}))
        assert connection.recv(1 << 16)
        running.close()
        assert connection.recv(1) == b""
    running.close()


@pytest.mark.usefixtures("running")
def test_errors_keep_class_and_text(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot do that: not configured"):
        call(path, "fail", None, object)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("crash", "KeyError"),
        ("odd", "cannot finish odd"),
        ("surrogate", "cannot finish surrogate"),
        ("huge", "cannot send an answer of"),
        ("nonsense", "cannot call 'nonsense': known methods are apply"),
    ],
)
def test_faults_of_methods_leave_the_server_alive(path: str, method: str, words: str) -> None:
    with pytest.raises(GpufracError, match=words):
        call(path, method, None, object)
    assert call(path, "status", None, dict[str, int])


@pytest.mark.usefixtures("running")
def test_result_of_another_type_is_a_protocol_error(path: str) -> None:
    with pytest.raises(ProtocolError, match="cannot read the answer"):
        call(path, "status", None, Snapshot)


@pytest.mark.usefixtures("running")
def test_several_requests_on_one_connection_are_answered_in_order(path: str) -> None:
    lines = raw(path, b"".join(wire.encode_request("echo", {"n": n}) for n in range(50)))
    assert [msgspec.json.decode(line)["result"]["n"] for line in lines] == list(range(50))


@pytest.mark.usefixtures("running")
def test_garbage_is_answered_and_forgotten(path: str) -> None:
    good = wire.encode_request("status", {})
    lines = raw(path, b"garbage\n\xff\xfe\n\n" + b'{"v":2,"method":"status"}\n' + good + b'{"v":1,"meth')
    assert [code_of(line) for line in lines[:4]] == ["bad_request"] * 3 + ["unknown_version"]
    assert "result" in msgspec.json.decode(lines[4])
    assert len(lines) == 5  # half a line is nothing


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_oversized_lines_are_refused(path: str, newline: bytes) -> None:
    lines = raw(path, b"x" * wire.MAX_REQUEST_BYTES + newline, half_close=False)
    assert [code_of(line) for line in lines] == ["too_large"]
    assert call(path, "status", None, dict[str, int])


@pytest.mark.usefixtures("running")
def test_deep_nesting_is_refused(path: str) -> None:
    lines = raw(path, b'{"v":1,"method":"echo","params":{"a":' + b"[" * 500_000 + b"\n")
    assert [code_of(line) for line in lines] == ["bad_request"]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.lists(st.binary(max_size=60) | st.just(wire.encode_request("echo", {})), max_size=6))
def test_any_input_leaves_the_server_alive(data: list[bytes], running: LocalServer, path: str) -> None:
    for line in raw(path, b"".join(data)):
        assert msgspec.json.decode(line).keys() <= {"result", "error"}
    assert call(path, "status", None, dict[str, int])


def test_silent_connections_end(path: str, owner: Owner) -> None:
    server = LocalServer(path, owner.methods(), idle_s=0.05)
    server.start()
    try:
        assert raw(path, b'{"v":1,', half_close=False) == []
    finally:
        server.close()


@contextmanager
def connections(path: str, request: bytes) -> Iterator[list[socket.socket]]:
    """As many as there are places, each of which sent this."""
    with ExitStack() as held:
        made = []
        for _ in range(seats.MAX_CONNECTIONS):
            connection = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.settimeout(WAIT_S)
            connection.connect(path)
            connection.sendall(request)
            made.append(connection)
        yield made


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "request_", [b"", b'{"v":1,', wire.encode_request("status", {})], ids=["silent", "half", "idle"]
)
def test_who_holds_connections_in_silence_keeps_nobody_out(
    request_: bytes, ours: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "is_ours", lambda pid: ours)
    with connections(path, request_) as held:
        for connection in held if request_.endswith(b"\n") else ():
            assert connection.recv(1 << 16)
        for _ in range(3):
            assert call(path, "status", None, dict[str, int])
        left, _, _ = select.select(held, [], [], WAIT_S)
        assert code_of(left[0].recv(1 << 16)) == wire.BUSY
        assert left[0].recv(1) == b""


def test_who_takes_no_answers_holds_up_nobody(path: str) -> None:
    """Not for the time it takes to tell each of them to leave, either."""
    server = LocalServer(path, reading({"much": lambda _: "x" * (4 << 20), "little": lambda _: {"is": 1}}))
    server.start()
    try:
        with connections(path, wire.encode_request("much", {})) as held:
            for connection in held:
                assert select.select([connection], [], [], WAIT_S)[0]
            for _ in range(3):
                assert call(path, "little", None, dict[str, int])
    finally:
        server.close()


def test_while_methods_run_on_all_places_some_are_kept_for_our_own(
    path: str, owner: Owner, running: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded all the same, for them too."""
    monkeypatch.setattr(server_module, "is_ours", lambda pid: False)
    request = wire.encode_request("watch", {"instance": "i", "generation": 1, "timeout_s": NEVER_S})
    with connections(path, request):
        owner.until_watched(seats.MAX_CONNECTIONS)
        with pytest.raises(TransientError, match="cannot serve more than 64 connections"):
            call(path, "status", None, dict[str, int])
        monkeypatch.setattr(server_module, "is_ours", lambda pid: True)
        assert call(path, "status", None, dict[str, int])
        with ExitStack() as more:
            for count in range(1, seats.KEPT + 1):
                connection = more.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connection.connect(path)
                connection.sendall(request)
                owner.until_watched(seats.MAX_CONNECTIONS + count)
            with pytest.raises(TransientError, match="cannot serve more than 64 connections"):
                call(path, "status", None, dict[str, int])
        owner.stop()


@pytest.mark.usefixtures("running")
def test_who_finds_no_thread_is_told_so(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limit:
        limit.setattr("mpsd.common.threads.threading.Thread.start", refuse)
        with pytest.raises(TransientError, match="can't start new thread: raise the limit"):
            call(path, "status", None, dict[str, int])
    assert call(path, "status", None, dict[str, int])


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["python", "/usr/bin/gpufrac", "status"], True),
        (["python", "-m", "deviceplugin.cli.main", "plugin"], True),
        (["python", "/usr/bin/other", "status"], False),
        (["grep", "-r", "-e", "x", "gpufrac"], False),
    ],
)
def test_a_process_is_ours_by_its_command_line(words: list[str], ours: bool, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes("\0".join([*words, ""]).encode())
    assert server_module.is_ours(7, str(tmp_path)) == ours
    assert not server_module.is_ours(8, str(tmp_path))
    assert server_module.is_ours(os.getpid(), str(tmp_path))


@pytest.mark.usefixtures("running")
def test_other_users_are_denied(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_peer", lambda _: (1, os.geteuid() + 12345))
    with pytest.raises(GpufracError, match=r"cannot serve UID .*: only root may call"):
        call(path, "status", None, dict[str, int])
    (line,) = raw(path, b"", half_close=False)
    assert code_of(line) == "denied"


def test_who_a_peer_is_the_kernel_says() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert server_module._peer(one) == (os.getpid(), os.geteuid())


@pytest.mark.usefixtures("running")
def test_socket_is_private(path: str) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_mode_is_set_before_anyone_can_connect(path: str, owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    chmod = os.chmod

    def check(target: str, mode: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            refused.append(connection.connect_ex(target))
        chmod(target, mode)

    monkeypatch.setattr(os, "chmod", check)
    server = LocalServer(path, owner.methods())
    server.start()
    server.close()
    assert refused == [111]


def test_stale_socket_is_replaced(path: str, owner: Owner) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    server = LocalServer(path, owner.methods())
    server.start()
    assert MpsdClient(path).snapshot() == owner.snapshot
    server.close()


def test_a_socket_that_somebody_removed_is_made_again(path: str, owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOOK_S", 0.05)
    server = LocalServer(path, owner.methods())
    server.start()
    directory = Path(path).parent
    try:
        for _ in range(2):
            os.unlink(path)
            made_again(path)
        moved = directory.rename(directory.with_name(f"{directory.name}-away"))
        threading.Event().wait(0.2)  # several looks that find no directory
        moved.rename(directory)
        os.unlink(path)
        made_again(path)
    finally:
        server.close()
    assert not os.path.lexists(path)


def made_again(path: str) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while True:
        try:
            assert call(path, "echo", {"a": 1}, dict) == {"a": 1}
            break
        except NotReachableError:
            assert time.monotonic() < give_up_s
            threading.Event().wait(0.01)
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600


@pytest.mark.usefixtures("running")
def test_living_socket_is_not_replaced(path: str, owner: Owner) -> None:
    with pytest.raises(GpufracError, match="another process already serves it"):
        LocalServer(path, owner.methods()).start()
    assert MpsdClient(path).snapshot() == owner.snapshot


def test_socket_with_a_full_queue_is_living(path: str, owner: Owner) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(path)
        busy.listen(0)
        waiting.connect(path)
        with pytest.raises(GpufracError, match="another process already serves it"):
            LocalServer(path, owner.methods()).start()
        with pytest.raises(NotReachableError):
            call(path, "status", None, object, timeout_s=0.1)
    assert os.path.exists(path)


def test_a_file_in_the_way_is_kept(path: str, owner: Owner) -> None:
    Path(path).write_text("precious")
    with pytest.raises(GpufracError, match="no socket is in the way"):
        LocalServer(path, owner.methods()).start()
    assert Path(path).read_text() == "precious"


def test_a_dangling_link_is_kept(path: str, owner: Owner) -> None:
    os.symlink("/nonexistent/target", path)
    with pytest.raises(GpufracError, match="in the way"):
        LocalServer(path, owner.methods()).start()
    assert os.path.islink(path)


def test_close_leaves_the_socket_of_a_successor(path: str, running: LocalServer, owner: Owner) -> None:
    os.unlink(path)
    successor = LocalServer(path, owner.methods())
    successor.start()
    running.close()
    assert MpsdClient(path).snapshot() == owner.snapshot
    successor.close()


@pytest.mark.parametrize("length", [107, 108])
def test_path_length(short_tmp: Path, length: int, owner: Owner) -> None:
    path = f"{short_tmp}/{'é' * 10}"
    path += "x" * (length - len(os.fsencode(path)))
    server = LocalServer(path, owner.methods())
    if length > 107:
        with pytest.raises(ConfigError, match=r"at most 107 bytes, this one has 108; choose a shorter mps\.runRoot"):
            server.start()
    else:
        server.start()
        assert call(path, "status", None, dict[str, int])
    server.close()


def test_missing_directory(short_tmp: Path, owner: Owner) -> None:
    with pytest.raises(GpufracError, match=r"cannot listen on .*: No such file or directory"):
        LocalServer(str(short_tmp / "missing" / "mpsd.sock"), owner.methods()).start()


def test_only_one_of_two_that_start_at_once_serves(path: str) -> None:
    code = (
        "import sys\n"
        "from mpsd.localapi.server import LocalServer\n"
        "from mpsd.common.errors import GpufracError\n"
        "sys.stdin.readline()\n"
        "server = LocalServer(sys.argv[1], {})\n"
        "try: server.start(); print('serving', flush=True); sys.stdin.readline(); server.close()\n"
        "except GpufracError: print('refused', flush=True); sys.stdin.readline()\n"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for _ in range(3)
    ]
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write("\n")
    outcomes = [starter.stdout.readline().strip() for starter in starters if starter.stdout is not None]
    for starter in starters:
        starter.communicate("\n")
    assert sorted(outcomes) == ["refused", "refused", "serving"]


@pytest.mark.parametrize(("name", "process"), [("mpsd.sock", "gpufrac mpsd"), ("plugin.sock", "gpufrac plugin")])
def test_unreachable_names_the_process_and_how_to_start_it(short_tmp: Path, name: str, process: str) -> None:
    path = str(short_tmp / name)
    with pytest.raises(
        NotReachableError,
        match=f"cannot reach `{process}` on .*not running; start it.*another: name that with --run-root",
    ):
        call(path, "status", None, object)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    with pytest.raises(NotReachableError, match=r"not running.*log$"):
        call(path, "status", None, object)


def test_a_server_that_hangs_goes_away_or_talks_nonsense(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(4)
        with pytest.raises(NotReachableError, match=r"no answer within 0\.05 s"):
            call(path, "status", None, object, timeout_s=0.05)
        listener.accept()[0].close()

        def answer(data: bytes) -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(data)

        for data, expected in ((b"", NotReachableError), (b'{"resu', NotReachableError), (b"huh\n", ProtocolError)):
            thread = threading.Thread(target=answer, args=(data,))
            thread.start()
            with pytest.raises(expected):
                call(path, "status", None, object, timeout_s=WAIT_S)
            thread.join(WAIT_S)


def test_imports_stay_light() -> None:
    code = "import sys, mpsd.localapi.client, mpsd.localapi.server, mpsd.common.processes; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "socketserver", "pynvml", "grpc", "yaml", "click", "http"} & set(loaded)
