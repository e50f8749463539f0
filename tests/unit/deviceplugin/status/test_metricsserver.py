"""The metrics have a door that nobody can hold, at any address, and that says why when it is shut."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from deviceplugin.status import metricsserver
from deviceplugin.status.metricsserver import CONTENT_TYPE, MAX_CONNECTIONS, MetricsServer
from mpsd.common.reason import Reason
from tests.descriptors import descriptors
from tests.waiting import NEVER_S, WAIT_S, until


@contextmanager
def serving(address: str = "127.0.0.1:0", render: Callable[[], str] = lambda: "x 1\n") -> Iterator[MetricsServer]:
    server = MetricsServer(address, render)
    server.start()
    try:
        yield server
    finally:
        server.close()


def port_of(server: MetricsServer) -> int:
    until(lambda: server.port)
    return server.port


def exchange(port: int, request: bytes, host: str = "127.0.0.1") -> bytes:
    """All that comes back until the server closes its side."""
    with socket.create_connection((host, port), timeout=WAIT_S) as connection:
        connection.sendall(request)
        answer = b""
        while more := connection.recv(65536):
            answer += more
    return answer


def get(port: int, path: str = "/metrics", host: str = "127.0.0.1") -> bytes:
    return exchange(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), host)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_scrape_is_answered() -> None:
    with serving() as server:
        head, _, body = get(port_of(server)).partition(b"\r\n\r\n")
        assert body == b"x 1\n"
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert f"Content-Type: {CONTENT_TYPE}".encode() in head
        assert server.problem is None


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(("address", "hosts"), [("[::1]:0", ["::1"]), ("[::]:0", ["::1", "127.0.0.1"])])
def test_an_ipv6_address_is_served(address: str, hosts: list[str]) -> None:
    with serving(address) as server:
        for host in hosts:
            assert get(port_of(server), host=host).endswith(b"x 1\n")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0", "localhost:0"])
def test_other_forms_of_an_address_are_served(address: str) -> None:
    with serving(address) as server:
        until(lambda: server.port)
        assert server.problem is None


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"\x16\x03\x01\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 4000 + b"\r\n", b"431"),
        (b"x" * 20000, b"431"),
    ],
)
def test_what_else_comes_is_refused_in_words(request_: bytes, status: bytes) -> None:
    with serving() as server:
        answer = exchange(port_of(server), request_)
        assert answer.split(b" ")[1] == status
        assert get(port_of(server)).endswith(b"x 1\n")


def test_who_drips_bytes_holds_neither_places_nor_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many times as many connections as there are places, each with half a request: a scrape is served among them."""
    monkeypatch.setattr(metricsserver, "EXCHANGE_S", NEVER_S)
    with serving() as server, ExitStack() as open_ones:
        port, threads = port_of(server), threading.active_count()
        for number in range(10 * MAX_CONNECTIONS):
            dripping = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
            dripping.sendall(b"GET /met")
            if number % MAX_CONNECTIONS == 0:
                assert get(port).endswith(b"x 1\n")
        assert get(port).endswith(b"x 1\n")
        held = sum(target.startswith("socket:") for target in descriptors().values())
        assert held <= 10 * MAX_CONNECTIONS + MAX_CONNECTIONS + 5  # ours at this end, its own at the other
        assert threading.active_count() == threads


@pytest.mark.parametrize("begun", [b"", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"])
def test_an_exchange_has_a_deadline_as_a_whole(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was answered and never leaves."""
    monkeypatch.setattr(metricsserver, "EXCHANGE_S", 0.05)
    with serving() as server, socket.create_connection(("127.0.0.1", port_of(server)), timeout=WAIT_S) as connection:
        connection.sendall(begun)
        while connection.recv(4096):
            pass


def test_the_metrics_are_rendered_no_more_often_than_they_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metricsserver, "FRESH_S", NEVER_S)
    rendered = []

    def render() -> str:
        rendered.append(time.monotonic())
        return "x 1\n"

    with serving(render=render) as server:
        for _ in range(20):
            get(port_of(server))
    assert len(rendered) == 1


def test_a_body_that_can_not_be_rendered_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def render() -> str:
        raise RuntimeError("broken")

    with serving(render=render) as server:
        for _ in range(3):
            assert get(port_of(server)).split(b" ")[1] == b"500"
    assert caplog.text.count("a page can't be rendered") == 1


def test_probes_are_answered_with_a_line_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metricsserver, "FRESH_S", 0.0)
    found: list[Reason] = []
    server = MetricsServer("127.0.0.1:0", lambda: "x 1\n", {"/healthz": lambda: (), "/readyz": lambda: found})
    server.start()
    try:
        port = port_of(server)
        for path in ("/healthz", "/readyz"):
            assert get(port, path).startswith(b"HTTP/1.1 200 OK\r\n")
            assert get(port, path).endswith(b"\r\n\r\nok\n")
        found += [Reason("MpsdAway", "it is\nnot there"), Reason("NotRegistered", "x")]
        head, _, body = get(port, "/readyz").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert body == b"MpsdAway: it is not there\nNotRegistered: x\n"
        assert get(port, "/healthz").startswith(b"HTTP/1.1 200 OK\r\n")
        assert get(port, "/").endswith(b"see /healthz, /metrics, /readyz\n")
    finally:
        server.close()


def test_a_large_body_goes_out_whole_to_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metricsserver, "EXCHANGE_S", NEVER_S)
    body = "x" * (8 << 20)
    with serving(render=lambda: body) as server:
        with socket.create_connection(("127.0.0.1", port_of(server)), timeout=WAIT_S) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert get(port_of(server), "/").split(b" ")[1] == b"404"  # others are served meanwhile
            received = 0
            while more := connection.recv(1 << 16):
                received += len(more)
        assert received > len(body)


def test_a_taken_port_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metricsserver, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(metricsserver, "RETRY_LAST_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with serving(f"127.0.0.1:{port}") as server:
            problem = until(lambda: server.problem)
            assert problem.code == "AddressInUse"
            assert f"127.0.0.1:{port}" in problem.message
            other.close()
            until(lambda: server.problem is None)
            assert get(port).endswith(b"x 1\n")
    assert caplog.text.count("cannot serve metrics") == 1


@pytest.mark.parametrize(
    ("address", "code"), [("192.0.2.1:9478", "AddressNotHere"), ("no-such-host.invalid:9478", "AddressUnknown")]
)
def test_an_address_that_is_not_here_is_named(address: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(-2, "Name or service not known")

    if "invalid" in address:
        monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with serving(address) as server:
        assert until(lambda: server.problem).code == code


def test_without_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metricsserver, "ACCEPT_PAUSE_S", 0.01)
    refusals = [OSError(24, "Too many open files")] * 3

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if refusals:
                raise refusals.pop()
            return super().accept()

    def listen(host: str, port: int) -> list[socket.socket]:
        listener = Listener()
        listener.bind((host, port))
        listener.listen()
        listener.setblocking(False)
        return [listener]

    monkeypatch.setattr(metricsserver, "listen", listen)
    with serving() as server:
        assert get(port_of(server)).endswith(b"x 1\n")
    assert refusals == []
