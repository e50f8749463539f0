"""A stub API server on loopback: nodes, pods and events, over real HTTP, with faults on demand.

It knows what gpufrac asks of a real one: get and patch of nodes, list and watch of a node's pods, create and patch of
events. What it refuses, it refuses as a real one does (status codes, Status objects, ERROR events of a watch).
"""

import copy
import json
import os
import select
import socket
import socketserver
import ssl
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Object = dict[str, Any]

MAX_HISTORY = 1000
MAX_REQUESTS = 10_000
MAX_REQUEST_BYTES = 3 << 20
WAIT_S = 10.0
_PATCHES = ("application/strategic-merge-patch+json", "application/merge-patch+json")
_DRIP_S = 0.05


class Fault(StrEnum):
    """HANG: nothing is answered. DROP: the connection is reset. ERROR: 500. BUSY: 429 with Retry-After. FORBIDDEN: 403.
    GARBAGE: 200 with a body that is no JSON. PAGE: 502 with a page of HTML. HTTP: what is no HTTP at all. ENDLESS: a
    body that is one line without an end. TRUNCATED: half a body. DRIP: a byte now and then. REDIRECT: 302. EXPIRED:
    410."""

    HANG = "hang"
    DROP = "drop"
    ERROR = "error"
    BUSY = "busy"
    FORBIDDEN = "forbidden"
    GARBAGE = "garbage"
    PAGE = "page"
    HTTP = "http"
    ENDLESS = "endless"
    TRUNCATED = "truncated"
    DRIP = "drip"
    REDIRECT = "redirect"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came; `x-connection` among its headers is the client's port. `right`: verb and resource, as
    RBAC names them."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    headers: Mapping[str, str]

    @property
    def right(self) -> tuple[str, str]:
        names = self.path.split("/")[3:]  # after /api/v1
        if names[:1] == ["namespaces"] and len(names) > 2:
            names = names[2:]
        resource = "/".join(filter(None, (names[0], *names[2:])))
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "PUT": "update"}.get(self.method, "get")
        if verb == "get" and len(names) == 1:
            verb = "watch" if self.query.get("watch") in ("1", "true") else "list"
        return verb, resource


@dataclass(slots=True)
class _Planned:
    fault: Fault
    matches: Callable[[Request], bool]
    left: int | None


class StubApiServer:
    """Serves until closed.

    Args:
        nodes: names of the nodes there are.
        context: of a server that speaks TLS; None for plain HTTP.
        tokens: the bearer tokens that are known; None where nobody has to show one.
        allowed: rights (verb, resource) that callers have; None for all.
    """

    def __init__(
        self,
        nodes: Sequence[str] = (),
        *,
        context: ssl.SSLContext | None = None,
        tokens: Collection[str] | None = None,
        allowed: Collection[tuple[str, str]] | None = None,
        bookmark_s: float = 60.0,
    ) -> None:
        self.tokens = None if tokens is None else set(tokens)
        self.allowed = allowed
        self.terminating: set[str] = set()
        """Namespaces that go away and take nothing new."""
        self._context, self._bookmark_s = context, bookmark_s
        self._changed = threading.Condition()
        self._version = 100
        self._nodes: dict[str, Object] = {}
        self._pods: dict[tuple[str, str], Object] = {}
        self._events: dict[tuple[str, str], Object] = {}
        self._history: deque[tuple[int, str, Object]] = deque(maxlen=MAX_HISTORY)
        self._oldest = 0
        self._faults: list[_Planned] = []
        self._requests: deque[Request] = deque(maxlen=MAX_REQUESTS)
        self._watches = 0
        self._cut: tuple[int, bool] = (0, False)
        self._bookmarks = 0
        self._server: _Server | None = None
        self._port = 0
        self._thread: threading.Thread | None = None
        for name in nodes:
            self.add_node(name)

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listens; after a `stop` on the same port again, with all objects."""
        assert self._server is None
        self._server = _Server(("127.0.0.1", self._port), self, self._context)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="apiserver"
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends every connection; from then on nobody is there."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.stopping.set()
        with self._changed:
            self._changed.notify_all()
        server.shutdown()
        self._thread.join()
        server.close_connections()
        server.server_close()

    def close(self) -> None:
        self.stop()

    def __enter__(self) -> "StubApiServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"{'https' if self._context else 'http'}://127.0.0.1:{self._port}"

    def kubeconfig(self, **user: str) -> str:
        """The text of a kubeconfig for plain HTTP; `user` is its user's entry."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "stub",
                "clusters": [{"name": "stub", "cluster": {"server": self.url}}],
                "users": [{"name": "stub", "user": user}],
                "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub"}}],
            }
        )

    # --- objects -------------------------------------------------------------------------------------------------

    def add_node(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        with self._changed:
            self._version += 1
            self._nodes[name] = {
                "kind": "Node",
                "apiVersion": "v1",
                "metadata": {
                    "name": name,
                    "uid": str(uuid.uuid4()),
                    "resourceVersion": str(self._version),
                    "labels": {"kubernetes.io/hostname": name, **(labels or {})},
                },
                "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]},
            }
            self._changed.notify_all()

    def remove_node(self, name: str) -> None:
        with self._changed:
            del self._nodes[name]

    def node(self, name: str) -> Object:
        with self._changed:
            return copy.deepcopy(self._nodes[name])

    def condition(self, node: str, kind: str) -> Object | None:
        """A node's condition by type."""
        found = (c for c in self.node(node)["status"]["conditions"] if c["type"] == kind)
        return next(found, None)

    def add_pod(
        self,
        namespace: str,
        name: str,
        *,
        node: str,
        uid: str = "",
        containers: Sequence[str] = ("main",),
        init_containers: Sequence[str] = (),
        restart_policy: str = "Always",
        annotations: Mapping[str, str] | None = None,
    ) -> str:
        """A pod that is bound to a node; its UID."""
        uid = uid or str(uuid.uuid4())
        pod = {
            "metadata": {"namespace": namespace, "name": name, "uid": uid, "annotations": dict(annotations or {})},
            "spec": {
                "nodeName": node,
                "restartPolicy": restart_policy,
                "containers": [{"name": container, "image": "none"} for container in containers],
                "initContainers": [{"name": container, "image": "none"} for container in init_containers],
            },
            "status": {"phase": "Running"},
        }
        with self._changed:
            self._pods[namespace, name] = pod
            self._record("ADDED", pod)
        return uid

    def touch_pod(self, namespace: str, name: str, annotations: Mapping[str, str]) -> None:
        """Changes what nobody should mind."""
        with self._changed:
            pod = self._pods[namespace, name] = copy.deepcopy(self._pods[namespace, name])
            pod["metadata"]["annotations"].update(annotations)
            self._record("MODIFIED", pod)

    def delete_pod(self, namespace: str, name: str, grace_s: int = 30) -> None:
        """What `kubectl delete` does: the pod is marked, and goes when the kubelet has ended it."""
        with self._changed:
            pod = self._pods[namespace, name] = copy.deepcopy(self._pods[namespace, name])
            pod["metadata"]["deletionTimestamp"] = _timestamp(time.time() + grace_s)
            pod["metadata"]["deletionGracePeriodSeconds"] = grace_s
            self._record("MODIFIED", pod)

    def remove_pod(self, namespace: str, name: str) -> None:
        """The pod is gone."""
        with self._changed:
            pod = copy.deepcopy(self._pods.pop((namespace, name)))
            self._record("DELETED", pod)

    def pods(self) -> list[Object]:
        with self._changed:
            return copy.deepcopy(list(self._pods.values()))

    def events(self) -> list[Object]:
        """In the order of their making."""
        with self._changed:
            return copy.deepcopy(list(self._events.values()))

    def forget_events(self) -> None:
        """As when they are older than the server keeps them."""
        with self._changed:
            self._events.clear()

    def _record(self, kind: str, pod: Object) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, pod))
        if len(self._history) == MAX_HISTORY:
            self._oldest = self._history[0][0] - 1
        self._changed.notify_all()

    # --- faults --------------------------------------------------------------------------------------------------

    def fault(
        self, fault: Fault, matches: Callable[[Request], bool] = lambda _: True, *, times: int | None = None
    ) -> None:
        """Answers so from now on: the next `times` matching requests, or all until `heal`."""
        with self._changed:
            self._faults.append(_Planned(fault, matches, times))

    def heal(self) -> None:
        """No more faults; what hangs is cut off."""
        with self._changed:
            self._faults.clear()
            self._changed.notify_all()

    def expire(self) -> None:
        """Forgets what happened: watches that go on from before are told to begin anew."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._history.clear()
            self._changed.notify_all()

    def put_back(self, versions: int) -> None:
        """Its store is as it was before the last so many changes, but for the objects, which are a test's affair. Who
        knows more is refused a list, and hears nothing in a watch until there is more again."""
        with self._changed:
            self._version -= versions
            self._oldest = min(self._oldest, self._version)
            self._history = deque((h for h in self._history if h[0] <= self._version), maxlen=MAX_HISTORY)
            self._changed.notify_all()

    def bookmark(self) -> None:
        """Sends every watch a bookmark."""
        with self._changed:
            self._version += 1
            self._bookmarks += 1
            self._changed.notify_all()

    def end_watches(self, *, reset: bool = False) -> None:
        """Ends every watch, as after its time, or by a reset in the middle of a line."""
        with self._changed:
            self._cut = (self._cut[0] + 1, reset)
            self._changed.notify_all()

    # --- what was asked ------------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        with self._changed:
            return list(self._requests)

    @property
    def watches(self) -> int:
        """How many run now."""
        with self._changed:
            return self._watches

    def wait(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
        """Waits until something is so, looking with every change here."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            with self._changed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, 0.02))
        return True

    # --- answers -------------------------------------------------------------------------------------------------

    def _take(self, request: Request) -> Fault | None:
        with self._changed:
            self._requests.append(request)
            for planned in self._faults:
                if planned.left != 0 and planned.matches(request):
                    planned.left = None if planned.left is None else planned.left - 1
                    return planned.fault
            return None

    def _hangs(self, stopping: threading.Event) -> bool:
        with self._changed:
            return bool(self._faults) and not stopping.is_set()

    def _answer(self, request: Request) -> tuple[int, Object]:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.tokens is not None and token not in self.tokens:
            return _status(401, "Unauthorized", "Unauthorized")
        verb, resource = request.right
        if self.allowed is not None and (verb, resource) not in self.allowed:
            return _status(403, "Forbidden", _no_right(request))
        if request.method == "PATCH" and request.headers.get("content-type") not in _PATCHES:
            return _status(415, "UnsupportedMediaType", "415: Unsupported Media Type")
        names = [unquote(name) for name in request.path.split("/")[3:]]
        with self._changed:
            try:
                match request.method, names:
                    case "GET", ["nodes", name]:
                        return 200, copy.deepcopy(self._nodes[name])
                    case "PATCH", ["nodes", name, *rest] if rest in ([], ["status"]):
                        return self._patch_node(name, request.body, status=bool(rest))
                    case "GET", ["pods"]:
                        return self._list(request.query)
                    case "POST", ["namespaces", namespace, "events"]:
                        return self._create_event(namespace, request.body)
                    case "PATCH", ["namespaces", namespace, "events", name]:
                        return self._patch(self._events[namespace, name], request.body)
            except KeyError:
                name = names[-1] if names[-1] != "status" else names[-2]
                return _status(404, "NotFound", f'{resource.partition("/")[0]} "{name}" not found')
            finally:
                self._changed.notify_all()
        return _status(404, "NotFound", "the server could not find the requested resource")

    def _patch_node(self, name: str, patch: Object, *, status: bool) -> tuple[int, Object]:
        # Metadata can be changed through either of them; of the rest each takes its own.
        ignored = "spec" if status else "status"
        return self._patch(self._nodes[name], {key: value for key, value in patch.items() if key != ignored})

    def _patch(self, found: Object, patch: Object) -> tuple[int, Object]:
        merge(found, patch)
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        return 200, copy.deepcopy(found)

    def _create_event(self, namespace: str, event: Object) -> tuple[int, Object]:
        name, involved = event["metadata"]["name"], event["involvedObject"]
        if namespace in self.terminating:
            text = f'events "{name}" is forbidden: unable to create new content in namespace {namespace} because it is'
            return _status(403, "Forbidden", f"{text} being terminated")
        if namespace != event["metadata"].get("namespace", namespace):
            text = "the namespace of the provided object does not match the namespace sent on the request"
            return _status(400, "BadRequest", text)
        if (namespace, name) in self._events:
            return _status(409, "AlreadyExists", f'events "{name}" already exists')
        if namespace != (theirs := involved.get("namespace", "")) and (theirs or namespace != "default"):
            text = f'involvedObject.namespace: Invalid value: "{theirs}": does not match event.namespace'
            return _status(422, "Invalid", f'Event "{name}" is invalid: {text}')
        self._version += 1
        event["metadata"] |= {"namespace": namespace, "resourceVersion": str(self._version), "uid": str(uuid.uuid4())}
        self._events[namespace, name] = event
        return 201, copy.deepcopy(event)

    def _list(self, query: Mapping[str, str]) -> tuple[int, Object]:
        selects = _selector(query)
        if selects is None:
            field = query["fieldSelector"].partition("=")[0]
            return _status(400, "BadRequest", f"field label not supported: {field}")
        watch, match = "watch" in query, "resourceVersionMatch" in query
        if match and (watch or "resourceVersion" not in query):
            why = "for watch" if watch else "unless resourceVersion is provided"
            text = f"resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden {why}"
            return _status(422, "Invalid", f'ListOptions.meta.k8s.io "" is invalid: {text}')
        asked = int(query.get("resourceVersion") or 0)
        if asked > self._version and not watch:
            return _status(504, "Timeout", f"Timeout: Too large resource version: {asked}, current: {self._version}")
        items = [copy.deepcopy(pod) for pod in self._pods.values() if selects(pod)]
        metadata = {"resourceVersion": str(self._version)}
        return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}

    def _watch(self, query: Mapping[str, str], stopping: threading.Event, gone: Callable[[], bool]) -> Iterator[bytes]:
        """Lines of a watch; the last one is half a line where the connection is to be reset."""
        selects = _selector(query)
        assert selects is not None
        with self._changed:
            self._watches += 1
            cut, bookmarks = self._cut[0], self._bookmarks
            self._changed.notify_all()
        try:
            yield from self._changes(query, selects, cut, bookmarks, stopping, gone)
        finally:
            with self._changed:
                self._watches -= 1
                self._changed.notify_all()

    def _changes(
        self,
        query: Mapping[str, str],
        selects: Callable[[Object], bool],
        cut: int,
        bookmarks: int,
        stopping: threading.Event,
        gone: Callable[[], bool],
    ) -> Iterator[bytes]:
        since = int(query.get("resourceVersion") or 0)
        end_s = time.monotonic() + float(query.get("timeoutSeconds", 1800))
        bookmark_s = time.monotonic() + self._bookmark_s
        while True:
            with self._changed:
                if since < self._oldest:
                    status = _status(410, "Expired", f"too old resource version: {since} ({self._version})")[1]
                    yield _line("ERROR", status)
                    return
                news = [(kind, pod) for version, kind, pod in self._history if version > since and selects(pod)]
                since = max(since, self._version)
                if self._cut[0] != cut:
                    if self._cut[1]:
                        yield b'{"type":"MODIFIED","object":{"metadata":'
                    return
                now_s = time.monotonic()
                due = since == self._version and (self._bookmarks != bookmarks or now_s >= bookmark_s)
                if not news and not due:
                    if stopping.is_set() or now_s >= end_s or gone():
                        return
                    self._changed.wait(min(0.2, end_s - now_s))
                    continue
                bookmarks = self._bookmarks
            for kind, pod in news:
                yield _line(kind, {"kind": "Pod", "apiVersion": "v1", **pod})
            if due:
                bookmark_s = time.monotonic() + self._bookmark_s
                if query.get("allowWatchBookmarks") == "true":
                    yield _line("BOOKMARK", _bookmark(since))


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread per connection, all of them joined at the end."""

    daemon_threads = False
    block_on_close = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], stub: StubApiServer, context: ssl.SSLContext | None) -> None:
        self.stub, self.context = stub, context
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        try:
            if self.stopping.is_set():
                return
            secured = request
            if self.context is not None:
                request.settimeout(WAIT_S)
                secured = self.context.wrap_socket(request.dup(), server_side=True)
            try:
                _Handler(secured, client_address, self)
            finally:
                if secured is not request:
                    secured.close()
        except OSError:
            pass  # the client left, or did not like our certificate
        finally:
            with self._lock:
                self._connections.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not self.stopping.is_set():
            super().handle_error(request, client_address)

    def close_connections(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class _Reset(Exception):  # noqa: N818 - ends the handler of a connection
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except _Reset:
            self.close_connection = True
            self._reset()
        except OSError:
            self.close_connection = True

    def _reset(self) -> None:
        """Takes the connection away without a goodbye."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())

    def _serve(self) -> None:
        stub, parts = self.server.stub, urlsplit(self.path)
        size_bytes = int(self.headers.get("Content-Length") or 0)
        if size_bytes > MAX_REQUEST_BYTES:
            self._send(*_status(413, "RequestEntityTooLarge", "Request entity too large"))
            return
        data = self.rfile.read(size_bytes)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        headers = {key.lower(): value for key, value in self.headers.items()}
        headers["x-connection"] = str(self.client_address[1])
        try:
            body = json.loads(data) if data else None
        except ValueError:
            self._send(*_status(400, "BadRequest", "the object provided is unrecognized: json parse error"))
            return
        request = Request(self.command, parts.path, query, body, headers)
        if fault := stub._take(request):
            self._fail(fault, request)
            return
        status, answer = stub._answer(request)
        if status == 200 and request.right[0] == "watch":
            self._stream(query)
        else:
            self._send(status, answer, {"Retry-After": "1"} if status == 504 else None)

    def _send(self, status: int, answer: Object, headers: Mapping[str, str] | None = None) -> None:
        self._send_bytes(status, json.dumps(answer).encode(), "application/json", headers)

    def _send_bytes(self, status: int, data: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def _begin_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _stream(self, query: Mapping[str, str]) -> None:
        self._begin_chunks()
        for line in self.server.stub._watch(query, self.server.stopping, self._gone):
            self._chunk(line)
            if not line.endswith(b"\n"):
                raise _Reset
        self._chunk(b"")

    def _gone(self) -> bool:
        """Whether the client has closed the connection."""
        return bool(select.select([self.connection], [], [], 0)[0])

    def _fail(self, fault: Fault, request: Request) -> None:
        if fault is Fault.FORBIDDEN:
            self._send(*_status(403, "Forbidden", _no_right(request)))
        elif fault in _ANSWERS:
            status, data, kind, headers = _ANSWERS[fault]
            self._send_bytes(status, data, kind, headers)
        elif fault is Fault.HANG:
            stub = self.server.stub
            stub.wait(lambda: self._gone() or not stub._hangs(self.server.stopping), 600.0)
            raise _Reset
        elif fault is Fault.ENDLESS:
            self._begin_chunks()
            while not self.server.stopping.is_set():
                self._chunk(b"x" * (1 << 16))
        elif fault is Fault.DRIP:
            self.send_response(200)
            self.end_headers()
            while not self.server.stopping.wait(_DRIP_S):
                self.wfile.write(b" ")
        else:
            if fault is not Fault.DROP:
                self.wfile.write(_BEGINNINGS[fault])
            raise _Reset


for _method in ("GET", "POST", "PATCH", "PUT", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler._serve)


def merge(target: Object, patch: Mapping[str, Any]) -> None:
    """A strategic merge patch, as far as nodes and events have need of it: objects are merged, null removes, the list
    `conditions` is merged by `type` (`$patch: delete` removes one), other lists are replaced."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        elif key == "conditions":
            _merge_conditions(target.setdefault(key, []), value)
        else:
            target[key] = copy.deepcopy(value)


def _merge_conditions(conditions: list[Object], patch: Sequence[Object]) -> None:
    for change in patch:
        found = next((c for c in conditions if c["type"] == change["type"]), None)
        if change.get("$patch") == "delete":
            if found is not None:
                conditions.remove(found)
        elif found is None:
            conditions.append(dict(change))
        else:
            merge(found, change)


def _selector(query: Mapping[str, str]) -> Callable[[Object], bool] | None:
    key, _, value = query.get("fieldSelector", "").partition("=")
    if not key:
        return lambda _: True
    if key != "spec.nodeName":
        return None
    return lambda pod: bool(pod["spec"]["nodeName"] == value)


def _no_right(request: Request) -> str:
    verb, resource = request.right
    kind, *rest = request.path.split("/")[3:]
    where = "at the cluster scope"
    if kind == "namespaces" and len(rest) > 1:
        where = f'in the namespace "{rest[0]}"'
        kind, rest = rest[1], rest[2:]
    what = f'{kind} "{unquote(rest[0])}"' if rest else kind
    who = "system:serviceaccount:gpufrac:gpufrac"
    return f'{what} is forbidden: User "{who}" cannot {verb} resource "{resource}" in API group "" {where}'


def _bookmark(version: int) -> Object:
    """A pod with nothing in it, as a server in Go makes one."""
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": str(version), "creationTimestamp": None},
        "spec": {"containers": None},
        "status": {},
    }


def _status(code: int, reason: str, message: str) -> tuple[int, Object]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _line(kind: str, thing: Object) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


def _timestamp(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


def _answer(code: int, reason: str, message: str, **headers: str) -> tuple[int, bytes, str, Mapping[str, str]]:
    status, answer = _status(code, reason, message)
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return status, json.dumps(answer).encode(), "application/json", named


_ANSWERS: dict[Fault, tuple[int, bytes, str, Mapping[str, str]]] = {
    Fault.ERROR: _answer(500, "InternalError", "Internal error occurred: etcdserver: no leader"),
    Fault.BUSY: _answer(429, "TooManyRequests", "too many requests", Retry_After="1"),
    Fault.EXPIRED: _answer(410, "Expired", "the resource version is too old"),
    Fault.GARBAGE: (200, b'{"kind": "Node", "metadata": [}\xff\x00', "application/json", {}),
    Fault.PAGE: (502, b"<html><body><h1>502 Bad Gateway</h1></body></html>", "text/html", {}),
    Fault.REDIRECT: (302, b"", "text/plain", {"Location": "http://127.0.0.1:1/"}),
}
_BEGINNINGS = {
    Fault.HTTP: b"220 mail.example.org ESMTP\r\n",
    Fault.TRUNCATED: b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"kind": "Node", "metadata": {"name": "',
}
