"""The client against a stub server over real sockets: what it asks, every fault, and that nothing waits for long."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deviceplugin.kubernetes import client as client_module
from deviceplugin.kubernetes import connection as connection_module
from deviceplugin.kubernetes.access import Access
from deviceplugin.kubernetes.client import ApiClient, Watch, api_path
from deviceplugin.kubernetes.errors import (
    AbortedError,
    AccessError,
    ApiError,
    BusyError,
    ConflictError,
    ForbiddenError,
    GoneError,
    NonsenseError,
    RejectedError,
    ServerError,
    UnauthorizedError,
    UnreachableError,
    error_of,
)
from tests.apiserver import Fault, StubApiServer
from tests.unit.deviceplugin.kubernetes.certificates import Certificate, certificate
from tests.unit.deviceplugin.kubernetes.clients import client_of
from tests.waiting import NEVER_S, WAIT_S, soon

NODE = "/api/v1/nodes/n1"
PODS = "/api/v1/pods"
OURS = {"fieldSelector": "spec.nodeName=n1"}


class Named(msgspec.Struct):
    metadata: dict[str, Any]


@pytest.fixture
def server() -> Iterator[StubApiServer]:
    with StubApiServer(["n1"]) as stub:
        yield stub


@pytest.fixture
def client(server: StubApiServer, short_tmp: Path) -> Iterator[ApiClient]:
    made = client_of(short_tmp, server)
    yield made
    made.close()


def name(client: ApiClient) -> str:
    return str(client.get(NODE, Named).metadata["name"])


# --- requests ------------------------------------------------------------------------------------------------------


def test_objects_are_read_made_and_changed_over_one_connection(client: ApiClient, server: StubApiServer) -> None:
    assert name(client) == "n1"
    changed = client.patch(NODE, {"metadata": {"labels": {"a/b": "c"}}}, Named)
    assert changed.metadata["labels"]["a/b"] == "c"
    event = {"metadata": {"name": "e"}, "involvedObject": {"namespace": "ns"}}
    client.post("/api/v1/namespaces/ns/events", event, Named)
    with pytest.raises(ConflictError, match="already exists"):
        client.post("/api/v1/namespaces/ns/events", event, Named)
    assert [request.headers["content-type"] for request in server.requests[1:]] == [
        client_module.STRATEGIC_MERGE,
        "application/json",
        "application/json",
    ]
    assert len({request.headers["x-connection"] for request in server.requests}) == 1


def test_a_list_gives_its_objects_and_version(client: ApiClient, server: StubApiServer) -> None:
    assert client.list(PODS, OURS, Named)[0] == []
    for number in range(3):
        server.add_pod("ns", f"p{number}", node="n1", annotations={"text": '}]{["\\ "items":[' * 5000})
    server.add_pod("ns", "elsewhere", node="n2")
    pods, version = client.list(PODS, OURS, Named)
    assert [pod.metadata["name"] for pod in pods] == ["p0", "p1", "p2"]
    assert int(version) > 0


def test_names_never_leave_their_segment() -> None:
    assert api_path("api", "v1", "nodes", "../a?b#c d\n") == "/api/v1/nodes/..%2Fa%3Fb%23c%20d%0A"


def test_a_connection_that_the_server_closed_as_idle_is_replaced(client: ApiClient, server: StubApiServer) -> None:
    assert name(client) == "n1"
    server.stop()
    server.start()
    assert name(client) == "n1", "nobody noticed"


FAULTS: dict[Fault, tuple[type[ApiError], str]] = {
    Fault.HANG: (UnreachableError, "no answer in time"),
    Fault.DRIP: (UnreachableError, "no answer in time"),
    Fault.DROP: (UnreachableError, "Connection reset|closed the connection"),
    Fault.TRUNCATED: (UnreachableError, "Connection reset|in the middle of an answer"),
    Fault.ERROR: (ServerError, "500 Internal error occurred: etcdserver: no leader"),
    Fault.PAGE: (ServerError, "502 <html>"),
    Fault.BUSY: (BusyError, "429 too many requests"),
    Fault.FORBIDDEN: (ForbiddenError, "403 (nodes|pods) .*is forbidden: User .* cannot"),
    Fault.EXPIRED: (GoneError, "410"),
    Fault.GARBAGE: (NonsenseError, "cannot understand"),
    Fault.HTTP: (NonsenseError, "speaks no HTTP"),
    Fault.ENDLESS: (NonsenseError, "more than"),
    Fault.REDIRECT: (NonsenseError, "302"),
}


def test_every_fault_has_its_error() -> None:
    assert FAULTS.keys() == set(Fault)


CALLS: dict[str, Callable[[ApiClient], object]] = {
    "get": lambda client: client.get(NODE, Named),
    "patch": lambda client: client.patch(NODE, {}, Named),
    "list": lambda client: client.list(PODS, OURS, Named),
}


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
def test_faults(
    server: StubApiServer, short_tmp: Path, fault: Fault, call: Callable[[ApiClient], object], reused: bool
) -> None:
    client = client_of(short_tmp, server, timeout_s=0.15 if fault in (Fault.HANG, Fault.DRIP) else NEVER_S)
    if reused:
        assert name(client) == "n1"
    server.fault(fault)
    kind, said = FAULTS[fault]
    with soon(), pytest.raises(kind, match=said) as caught:
        call(client)
    assert type(caught.value) is kind
    assert caught.value.retry_after_s == (1.0 if fault is Fault.BUSY else None)
    assert "\n" not in str(caught.value)
    server.heal()
    assert name(client) == "n1", "it goes on as if nothing had been"
    assert client.health.connected
    client.close()


def test_a_server_that_is_not_there_and_comes_later(client: ApiClient, server: StubApiServer) -> None:
    server.stop()
    with pytest.raises(UnreachableError, match=r"cannot reach http://127.0.0.1:[0-9]+: Connection refused"):
        name(client)
    assert client.health.connected is False
    assert "Connection refused" in client.health.error
    server.start()
    assert name(client) == "n1"
    assert (client.health.connected, client.health.error) == (True, "")


def test_a_host_without_an_address(short_tmp: Path) -> None:
    path = short_tmp / "config"
    path.write_text(StubApiServer().kubeconfig().replace("127.0.0.1:0", "nobody.invalid:1"))
    with pytest.raises(UnreachableError, match=r"cannot reach http://nobody\.invalid:1"):
        name(ApiClient(Access(str(path))))


def test_missing_credentials_are_no_crash(short_tmp: Path) -> None:
    client = ApiClient(Access(str(short_tmp / "none")))
    with pytest.raises(AccessError, match="cannot read the kubeconfig"):
        name(client)
    assert client.health.connected is False


def test_every_refusal_has_a_class() -> None:
    for code in range(300, 600):
        error = error_of(code, "text", 1e9)
        assert type(error) is not ApiError
        assert isinstance(error, ServerError) == (code >= 500)
    assert isinstance(error_of(422, ""), RejectedError)
    assert error_of(503, "", 1e9).retry_after_s == 300.0
    assert error_of(503, "", -1.0).retry_after_s == 0.0


@pytest.mark.parametrize(
    ("said", "lacks_right"),
    [
        ('events is forbidden: User "u" cannot create resource "events" in API group "" in the namespace "ns"', True),
        ('nodes "n1" is forbidden: User "u" cannot patch resource "nodes/status" in API group "" at the c...', True),
        ('events "e" is forbidden: exceeded quota: q, requested: count/events=1, used: count/events=1, limi...', False),
        ('nodes "n2" is forbidden: node "n1" is not allowed to modify node "n2"', False),
        ('events "e" is forbidden: unable to create new content in namespace ns because it is being terminated', False),
    ],
)
def test_which_refusals_are_for_want_of_a_right(said: str, lacks_right: bool) -> None:
    refusal = error_of(403, f"cannot POST /api/v1/namespaces/ns/events: 403 {said}")
    assert isinstance(refusal, ForbiddenError)
    assert refusal.lacks_right == lacks_right


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'{"kind":"PodList","metadata":{},"items":[]}',
        b'{"kind":"Status","metadata":{"resourceVersion":"1"}}',
        b'{"metadata":{"resourceVersion":"1"},"items":[]}',
        b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[{"metadata":1}]}',
        b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[{}',
        b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[1]}',
        b'{"kind":"PodList","metadata":{"resourceVersion":1},"items":[]}',
    ],
)
def test_nonsense_never_passes_for_an_empty_list(short_tmp: Path, body: bytes) -> None:
    with Canned(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)) as canned:
        client = canned.client(short_tmp)
        with pytest.raises(NonsenseError):
            client.list(PODS, OURS, Named)
        client.close()


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"HTTP/1.1 999999 OK\r\n\r\n{}",
        b"HTTP/1.1 abc OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n{}",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000 + b"\r\n\r\n{}",
        b"HTTP/1.1 200 " + b"b" * 100_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
        b"HTTP/2.0 200 OK\r\n\r\n{}",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\xff\xfe: \x00\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"\x00" * 200,
        b"\n\n\n\n",
    ],
)
def test_any_answer_is_an_object_or_an_error_of_ours(short_tmp: Path, head: bytes) -> None:
    with Canned(head) as canned:
        client = canned.client(short_tmp)
        for call in CALLS.values():
            with pytest.raises(ApiError) as caught:
                call(client)
            assert isinstance(caught.value, NonsenseError | UnreachableError)
        client.close()


def test_a_body_without_a_length_ends_with_its_connection(short_tmp: Path) -> None:
    with Canned(b'HTTP/1.0 200 OK\r\n\r\n{"metadata":{"name":"x"}}') as canned:
        client = canned.client(short_tmp)
        assert name(client) == "x"
        assert name(client) == "x"
        client.close()


# --- who we are ----------------------------------------------------------------------------------------------------


def test_a_token_that_rotated_is_found_by_a_401_and_nobody_notices(short_tmp: Path) -> None:
    token = short_tmp / "token"
    token.write_text("first")
    with StubApiServer(["n1"], tokens={"first"}) as server:
        client = client_of(short_tmp, server, tokenFile="token")
        assert name(client) == "n1"
        server.tokens = {"second"}
        token.write_text("second")
        assert name(client) == "n1"
        assert [request.headers["authorization"] for request in server.requests] == ["Bearer first", "Bearer second"]
        client.close()


def test_a_token_behind_its_files_times_is_read_again_after_a_401(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = short_tmp / "token"
    token.write_text("first")
    monkeypatch.setattr("deviceplugin.kubernetes.access._identity", lambda _: (0, 0, 0, 0))
    with StubApiServer(["n1"], tokens={"first", "second"}) as server:
        client = client_of(short_tmp, server, tokenFile="token")
        assert name(client) == "n1"
        token.write_text("second")
        assert name(client) == "n1"
        server.tokens = {"second"}
        assert name(client) == "n1"
        assert [request.headers["authorization"][7:] for request in server.requests] == [
            *("first", "first", "first", "second")
        ]
        client.close()


def test_a_token_that_stays_wrong_is_an_error_and_heals(short_tmp: Path) -> None:
    with StubApiServer(["n1"], tokens={"right"}) as server:
        client = client_of(short_tmp, server, token="wrong")
        with pytest.raises(UnauthorizedError, match="401 Unauthorized"):
            name(client)
        assert len(server.requests) == 1, "the same token is not tried twice"
        client_of(short_tmp, server, token="right").close()  # writes the kubeconfig
        assert name(client) == "n1"
        client.close()


# --- TLS -----------------------------------------------------------------------------------------------------------


def server_context(short_tmp: Path, shown: Certificate, clients: Certificate | None = None) -> ssl.SSLContext:
    path = short_tmp / "server.pem"
    path.write_bytes(shown.chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=clients.pem.decode())
    return context


def secure_client(
    directory: Path, server: StubApiServer, user: dict[str, str] | None = None, *, insecure: bool = False
) -> ApiClient:
    config = json.loads(server.kubeconfig(**(user or {})))
    config["clusters"][0]["cluster"] |= (
        {"insecure-skip-tls-verify": True} if insecure else {"certificate-authority": "ca.crt"}
    )
    (directory / "config").write_text(json.dumps(config))
    return ApiClient(Access(str(directory / "config")), timeout_s=NEVER_S)


def test_tls_with_a_client_certificate_and_a_ca_that_is_replaced(short_tmp: Path) -> None:
    ca, clients = certificate("ca"), certificate("clients")
    client_certificate = certificate("gpufrac", issuer=clients)
    (short_tmp / "c.pem").write_bytes(client_certificate.pem)
    (short_tmp / "c.key").write_bytes(client_certificate.key_pem)
    (short_tmp / "ca.crt").write_bytes(certificate("old ca").pem)
    context = server_context(short_tmp, certificate("kubernetes", "127.0.0.1", issuer=ca), clients)
    with StubApiServer(["n1"], context=context) as server:
        client = secure_client(short_tmp, server, {"client-certificate": "c.pem", "client-key": "c.key"})
        with pytest.raises(UnreachableError, match="its certificate is not trusted: unable to get local issuer"):
            name(client)
        (short_tmp / "ca.crt").write_bytes(ca.pem)
        assert name(client) == "n1"
        server.add_pod("ns", "p", node="n1")
        assert len(client.list(PODS, OURS, Named)[0]) == 1
        assert len({request.headers["x-connection"] for request in server.requests}) == 1
        client.close()


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (certificate("kubernetes", "10.0.0.1", "localhost"), "IP address mismatch"),
        (certificate("kubernetes", "127.0.0.1", years="19"), "certificate has expired"),
    ],
)
def test_a_certificate_for_another_host_or_time_is_not_taken(short_tmp: Path, shown: Certificate, said: str) -> None:
    (short_tmp / "ca.crt").write_bytes(shown.pem)
    with StubApiServer(["n1"], context=server_context(short_tmp, shown)) as server:
        client = secure_client(short_tmp, server, {"token": "secret"})
        with pytest.raises(UnreachableError, match=f"its certificate is not trusted: {said}"):
            name(client)
        assert server.requests == []
        insecure = secure_client(short_tmp, server, insecure=True)
        assert name(insecure) == "n1"
        client.close()
        insecure.close()


@pytest.mark.parametrize("hanging", [Fault.HANG, Fault.DRIP])
def test_abort_ends_a_request_over_tls(short_tmp: Path, hanging: Fault) -> None:
    shown = certificate("kubernetes", "127.0.0.1")
    (short_tmp / "ca.crt").write_bytes(shown.pem)
    with StubApiServer(["n1"], context=server_context(short_tmp, shown)) as server:
        client = secure_client(short_tmp, server)
        server.fault(hanging)
        assert_abort_ends(client, lambda: server.wait(lambda: len(server.requests) > 0))


def test_plain_text_at_a_tls_port_and_tls_at_a_plain_one(short_tmp: Path) -> None:
    shown = certificate("kubernetes", "127.0.0.1")
    (short_tmp / "ca.crt").write_bytes(shown.pem)
    with StubApiServer(["n1"]) as plain, StubApiServer(["n1"], context=server_context(short_tmp, shown)) as secure:
        for server, said in ((plain, "https"), (secure, "http")):
            config = json.loads(server.kubeconfig())
            config["clusters"][0]["cluster"] = {"server": f"{said}://127.0.0.1:{server.port}"}
            (short_tmp / "config").write_text(json.dumps(config))
            client = ApiClient(Access(str(short_tmp / "config")), timeout_s=NEVER_S)
            with pytest.raises(UnreachableError):
                name(client)
            client.close()


# --- ending at once ------------------------------------------------------------------------------------------------


def assert_abort_ends(client: ApiClient, ready: Callable[[], object]) -> None:
    errors: list[Exception] = []

    def ask() -> None:
        try:
            name(client)
        except ApiError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    ready()
    with soon():
        client.abort()
        thread.join()
    assert [type(error) for error in errors] == [AbortedError]
    assert client.health.connected is not False, "we gave up, the server is not to blame"
    client.close()
    with pytest.raises(AbortedError):
        name(client)


@pytest.mark.parametrize("hanging", [Fault.HANG, Fault.DRIP])
def test_abort_ends_a_request(client: ApiClient, server: StubApiServer, hanging: Fault) -> None:
    server.fault(hanging)
    assert_abort_ends(client, lambda: server.wait(lambda: len(server.requests) > 0))


def test_a_connection_that_abort_ended_is_not_kept_for_the_next_request(client: ApiClient) -> None:
    response = client._send("GET", NODE, None, "", time.monotonic() + NEVER_S)
    assert list(response.pieces())
    client.abort()
    client.finish(response)
    assert name(client) == "n1"


def test_abort_ends_a_connection_that_is_never_taken(short_tmp: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(4):  # what is beyond the backlog waits
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        (short_tmp / "config").write_text(
            StubApiServer().kubeconfig().replace("127.0.0.1:0", f"127.0.0.1:{listener.getsockname()[1]}")
        )
        client = ApiClient(Access(str(short_tmp / "config")), timeout_s=NEVER_S)
        connecting = threading.Event()
        original = connection_module.Connection._connect_to

        def connect_to(self: connection_module.Connection, *args: Any) -> None:
            connecting.set()
            original(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection_module.Connection, "_connect_to", connect_to)
            assert_abort_ends(client, lambda: connecting.wait(WAIT_S))
        for filler in fillers:
            filler.close()


def test_abort_ends_a_handshake(short_tmp: Path) -> None:
    with Canned(b"") as canned:  # takes connections and says nothing
        canned.silent = True
        (short_tmp / "config").write_text(canned.kubeconfig("https"))
        client = ApiClient(Access(str(short_tmp / "config")), timeout_s=NEVER_S)
        assert_abort_ends(client, lambda: canned.taken.wait(WAIT_S))


# --- watches -------------------------------------------------------------------------------------------------------


class Watching:
    """A watch that runs in a thread."""

    def __init__(self, client: ApiClient, version: str) -> None:
        self.events: list[tuple[str, str]] = []
        self.error: Exception | None = None
        self.watch: Watch = client.watch(PODS, OURS, version)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            for event in self.watch:
                pod = msgspec.json.decode(event.object, type=Named)
                self.events.append((event.type, str(pod.metadata.get("name"))))
        except ApiError as error:
            self.error = error
        finally:
            self.watch.release()

    def ended(self) -> bool:
        self.thread.join(WAIT_S)
        return not self.thread.is_alive()


def test_a_watch_brings_what_changes_and_bookmarks(client: ApiClient, server: StubApiServer) -> None:
    server.add_pod("ns", "before", node="n1")
    _, version = client.list(PODS, OURS, Named)
    watching = Watching(client, version)
    server.add_pod("ns", "p", node="n1")
    server.add_pod("ns", "elsewhere", node="n2")
    server.delete_pod("ns", "p")
    server.remove_pod("ns", "p")
    assert server.wait(lambda: len(watching.events) == 3)
    server.bookmark()
    assert server.wait(lambda: len(watching.events) == 4)
    assert watching.events == [("ADDED", "p"), ("MODIFIED", "p"), ("DELETED", "p"), ("BOOKMARK", "None")]
    assert name(client) == "n1", "other requests go on meanwhile"
    server.end_watches()
    assert watching.ended()
    assert watching.error is None


@pytest.mark.parametrize("how", ["close", "abort", "client"])
def test_a_watch_ends_promptly_when_closed(client: ApiClient, server: StubApiServer, how: str) -> None:
    watching = Watching(client, "1000")
    assert server.wait(lambda: server.watches == 1)
    {"close": watching.watch.close, "abort": client.abort, "client": client.close}[how]()
    assert watching.ended()
    assert watching.error is None


def test_a_version_that_is_too_old_is_gone(client: ApiClient, server: StubApiServer) -> None:
    _, version = client.list(PODS, OURS, Named)
    watching = Watching(client, version)
    assert server.wait(lambda: server.watches == 1)
    server.expire()
    assert watching.ended()
    assert isinstance(watching.error, GoneError)
    again = Watching(client, version)
    assert again.ended()
    assert isinstance(again.error, GoneError)
    server.fault(Fault.EXPIRED)
    with pytest.raises(GoneError):
        client.watch(PODS, OURS, version)


def test_a_reset_in_the_middle_of_a_line(client: ApiClient, server: StubApiServer) -> None:
    _, version = client.list(PODS, OURS, Named)
    watching = Watching(client, version)
    server.add_pod("ns", "p", node="n1")
    assert server.wait(lambda: len(watching.events) == 1)
    server.end_watches(reset=True)
    assert watching.ended()
    assert isinstance(watching.error, UnreachableError)
    assert watching.events == [("ADDED", "p")]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(Fault.ENDLESS, NonsenseError), (Fault.GARBAGE, NonsenseError), (Fault.TRUNCATED, UnreachableError)],
)
def test_nonsense_ends_a_watch(
    client: ApiClient, server: StubApiServer, monkeypatch: pytest.MonkeyPatch, fault: Fault, kind: type[ApiError]
) -> None:
    monkeypatch.setattr(client_module, "MAX_OBJECT_BYTES", 1 << 20)
    server.fault(fault)
    watching = Watching(client, "1")
    assert watching.ended()
    # What comes without a newline counts for nothing at the end of a stream.
    assert isinstance(watching.error, kind) or (fault is Fault.GARBAGE and watching.error is None)
    assert watching.events == []


@pytest.mark.parametrize("fault", [None, Fault.DRIP])
def test_a_watch_that_the_server_does_not_end_is_given_up(
    server: StubApiServer, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault | None
) -> None:
    monkeypatch.setattr(client_module, "WATCH_ENDS_S", 0.3)
    if fault is not None:
        server.fault(fault)
    client = client_of(short_tmp, server)
    watching = Watching(client, "1000")
    assert watching.ended()
    assert isinstance(watching.error, UnreachableError)
    client.close()


# --- a server of our own -------------------------------------------------------------------------------------------


class Canned:
    """Takes any request and answers the same bytes, then closes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.silent = False
        self.taken = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def client(self, directory: Path) -> ApiClient:
        (directory / "config").write_text(self.kubeconfig("http"))
        return ApiClient(Access(str(directory / "config")), timeout_s=NEVER_S)

    def kubeconfig(self, scheme: str) -> str:
        address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        return StubApiServer().kubeconfig().replace("http://127.0.0.1:0", f"{scheme}://{address}")

    def __enter__(self) -> "Canned":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.taken.set()
                connection.settimeout(WAIT_S)
                try:
                    if self.silent:
                        while connection.recv(1 << 16):
                            pass
                    else:
                        connection.recv(1 << 16)
                        connection.sendall(self._answer)
                except OSError:
                    continue
