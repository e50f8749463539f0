"""A small JSON client of the Kubernetes API. Retries are the callers' affair; everything here ends at a deadline.

Each user has a client of its own: at most one request at a time keeps its connection, and `abort` ends all of them.
Any request may reach the server twice, where it closed a connection that looked idle: bodies say what shall be,
never what shall be added.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from deviceplugin.kubernetes.access import Access
from deviceplugin.kubernetes.errors import (
    AbortedError,
    AccessError,
    ApiError,
    NonsenseError,
    UnauthorizedError,
    UnreachableError,
    error_of,
    shown,
)
from deviceplugin.kubernetes.jsonstream import Items, Lines
from mpsd.common.log import get_logger

if TYPE_CHECKING:
    from deviceplugin.kubernetes.connection import Connection, Response

TIMEOUT_S = 10.0
"""Of one request, from connecting to the last byte."""
WATCH_S = 270.0
"""How long a watch is asked to last. Short enough for a load balancer that cuts connections after five minutes."""
WATCH_ENDS_S = WATCH_S + 20.0
"""When a watch that the server did not end is given up."""
MAX_BODY_BYTES = 8 << 20
MAX_OBJECT_BYTES = 16 << 20
"""etcd takes 1.5 MiB per object; escaped as JSON it may be six times as long."""

STRATEGIC_MERGE = "application/strategic-merge-patch+json"

log = get_logger("kubernetes")

T = TypeVar("T")
Query = Mapping[str, str]


class Health:
    """Whether the server answers at all, as the last request of any client found it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.connected: bool | None = None
        """None: nothing was asked yet."""
        self.error = ""

    def answered(self) -> None:
        """A request was answered, whatever the answer."""
        with self._lock:
            before, self.connected, self.error = self.connected, True, ""
        if before is False:
            log.info("the API server answers")

    def failed(self, error: ApiError) -> None:
        """A request was not answered; said once until one is."""
        with self._lock:
            before, self.connected, self.error = self.connected, False, str(error)
        if before is not False:
            log.warning("the API server can't be asked; nothing else depends on it", error=error)


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch, its object not read yet."""

    type: str
    object: msgspec.Raw = msgspec.Raw()


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """Metadata of a list: where a watch goes on from."""

    resource_version: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    kind: str = ""
    metadata: ListMeta = ListMeta()


class _Status(msgspec.Struct, frozen=True):
    message: str = ""
    reason: str = ""
    code: int = 0


class ApiClient:
    """Requests with the credentials of now. Safe from several threads; meant for one.

    Args:
        health: shared with the other clients of this process.
    """

    def __init__(
        self,
        access: Access,
        health: Health | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access, self._timeout_s, self._monotonic = access, timeout_s, monotonic
        self.health = health or Health()
        self._lock = threading.Lock()
        self._idle: Connection | None = None
        self._busy: set[Connection] = set()
        self._closed = False

    def get(self, path: str, result: type[T], *, timeout_s: float | None = None) -> T:
        """One object. Raises ApiError, as all of these do."""
        return self._object("GET", path, None, "", result, timeout_s)

    def post(self, path: str, body: object, result: type[T], *, timeout_s: float | None = None) -> T:
        """Makes an object; the object as it is then. Raises ApiError."""
        return self._object("POST", path, msgspec.json.encode(body), "application/json", result, timeout_s)

    def patch(self, path: str, body: object, result: type[T], *, timeout_s: float | None = None) -> T:
        """Changes what `body` names; the object as it is then."""
        return self._object("PATCH", path, msgspec.json.encode(body), STRATEGIC_MERGE, result, timeout_s)

    def list(self, path: str, query: Query, item: type[T], *, timeout_s: float | None = None) -> tuple[list[T], str]:
        """The objects of a list and its resource version. No more than one of them is held undecoded."""
        deadline_s = self._deadline_s(timeout_s)
        splitter, decoder = Items(MAX_OBJECT_BYTES), msgspec.json.Decoder(item)
        objects: list[T] = []
        response = self._send("GET", _target(path, query), None, "", deadline_s)
        try:
            for piece in response.pieces():
                objects += [decoder.decode(found) for found in splitter.feed(piece)]
            envelope = msgspec.json.decode(splitter.envelope, type=_Envelope)
        except msgspec.MsgspecError as error:
            raise NonsenseError(f"cannot understand the list {path}: {shown(str(error))}") from error
        finally:
            self.finish(response)
        if not envelope.kind.endswith("List") or not envelope.metadata.resource_version:
            raise NonsenseError(f"cannot understand the list {path}: it is none, or has no resource version")
        return objects, envelope.metadata.resource_version

    def watch(self, path: str, query: Query, resource_version: str) -> "Watch":
        """What changes after `resource_version`. To be closed."""
        asked = {
            **query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(WATCH_S)),
            "resourceVersion": resource_version,
        }
        return Watch(self, self._send("GET", _target(path, asked), None, "", self._deadline_s(None)), self._monotonic)

    def abort(self) -> None:
        """Ends every request and watch that runs. Later ones are as ever."""
        with self._lock:  # or one would be kept for the next request meanwhile
            for connection in self._busy:
                connection.abort()

    def close(self) -> None:
        """Ends everything; later requests fail at once."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, None
        if idle is not None:
            idle.close()
        self.abort()

    # --- one exchange --------------------------------------------------------------------------------------------

    def _deadline_s(self, timeout_s: float | None) -> float:
        return self._monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _object(
        self, method: str, path: str, body: bytes | None, kind: str, result: type[T], timeout_s: float | None
    ) -> T:
        response = self._send(method, path, body, kind, self._deadline_s(timeout_s))
        try:
            data = _whole(response)
        finally:
            self.finish(response)
        try:
            return msgspec.json.decode(data, type=result)
        except msgspec.MsgspecError as error:
            raise NonsenseError(f"cannot understand the answer to {method} {path}: {shown(str(error))}") from error

    def _send(self, method: str, target: str, body: bytes | None, kind: str, deadline_s: float) -> "Response":
        """The answer to a request that the server granted. To be given to `finish`."""
        try:
            response = self._authorized(method, target, body, kind, deadline_s)
        except AbortedError:
            raise
        except (AccessError, UnreachableError, NonsenseError) as error:
            self.health.failed(error)
            raise
        self.health.answered()
        if response.status < 300:
            return response
        raise self._refusal(f"{method} {target.partition('?')[0]}", response)

    def _authorized(self, method: str, target: str, body: bytes | None, kind: str, deadline_s: float) -> "Response":
        endpoint = self._access.endpoint()
        shown_token = self._access.token(endpoint)
        response = self._once(method, target, body, kind, deadline_s)
        if response.status == 401 and endpoint.token_file:
            self._access.forget_token()
            if self._access.token(endpoint) != shown_token:
                self._discard(response)
                return self._once(method, target, body, kind, deadline_s)
        return response

    def _once(self, method: str, target: str, body: bytes | None, kind: str, deadline_s: float) -> "Response":
        connection = self._take(deadline_s)
        while True:
            endpoint = connection.endpoint
            headers = {"Accept": "application/json", "User-Agent": "gpufrac"}
            if body is not None:
                headers["Content-Type"] = kind
            if token := self._access.token(endpoint):
                headers["Authorization"] = f"Bearer {token}"
            try:
                return connection.exchange(method, endpoint.prefix + target, headers, body)
            except AbortedError:
                self._drop(connection)
                raise
            except ApiError:
                self._drop(connection)
                if not connection.used or self._monotonic() >= deadline_s:
                    raise
            connection = self._open(deadline_s)  # the server may have closed it as idle

    def _take(self, deadline_s: float) -> "Connection":
        endpoint = self._access.endpoint()
        with self._lock:
            idle, self._idle = self._idle, None
            if idle is not None and idle.endpoint == endpoint:
                self._busy.add(idle)
                idle.deadline_s = deadline_s
                return idle
        if idle is not None:
            idle.close()
        return self._open(deadline_s)

    def _open(self, deadline_s: float) -> "Connection":
        from deviceplugin.kubernetes.connection import Connection

        endpoint = self._access.endpoint()
        connection = Connection(endpoint, self._access.context(endpoint) if endpoint.tls else None)
        with self._lock:
            if self._closed:
                raise AbortedError("cannot ask the API server: closed")
            self._busy.add(connection)
        try:
            connection.open(deadline_s)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def finish(self, response: "Response") -> None:
        """Keeps the connection for the next request if it is fit."""
        connection = response.connection
        with self._lock:
            self._busy.discard(connection)
            if response.reusable and not connection.aborted and self._idle is None and not self._closed:
                self._idle = connection
                return
        response.close()
        connection.close()

    def _discard(self, response: "Response") -> None:
        try:
            _whole(response)
        finally:
            self.finish(response)

    def _drop(self, connection: "Connection") -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _refusal(self, what: str, response: "Response") -> ApiError:
        try:
            data = _whole(response)
        except ApiError as error:
            data = str(error).encode()
        finally:
            self.finish(response)
        text = f"cannot {what}: {response.status} {_status(data)}"
        refusal = error_of(response.status, text, response.retry_after_s)
        if isinstance(refusal, UnauthorizedError):
            self._access.forget_token()
        return refusal


class Watch:
    """Changes as they come, until the server ends it, or we do. Iterated by one thread, closed by any."""

    def __init__(self, client: ApiClient, response: "Response", monotonic: Callable[[], float]) -> None:
        self._client, self._response, self._monotonic = client, response, monotonic

    def __iter__(self) -> Iterator[WatchEvent]:
        """Raises ApiError; GoneError where the resource version is too old."""
        decoder, lines = msgspec.json.Decoder(WatchEvent), Lines(MAX_OBJECT_BYTES)
        self._response.connection.deadline_s = self._monotonic() + WATCH_ENDS_S
        try:
            for piece in self._response.pieces():
                for line in lines.feed(piece):
                    event = decoder.decode(line)
                    if event.type == "ERROR":
                        raise _watch_error(event.object)
                    yield event
        except AbortedError:
            return
        except msgspec.MsgspecError as error:
            raise NonsenseError(f"cannot understand a watch: {shown(str(error))}") from error

    def close(self) -> None:
        """Ends the iteration; to be called by who iterates, too."""
        self._response.connection.abort()

    def release(self) -> None:
        """Gives the connection back. By the thread that iterates, once it is done."""
        self._client.finish(self._response)


def api_path(*segments: str) -> str:
    """A path made of segments that may be anything."""
    from urllib.parse import quote

    return "".join(f"/{quote(segment, safe='')}" for segment in segments)


def _target(path: str, query: Query) -> str:
    from urllib.parse import urlencode

    return f"{path}?{urlencode(query)}" if query else path


def _whole(response: "Response") -> bytes:
    data = bytearray()
    for piece in response.pieces():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise NonsenseError(f"cannot take an answer of more than {MAX_BODY_BYTES} bytes")
    return bytes(data)


def _status(data: bytes) -> str:
    """What an error's body says: a Status object's message, or the text that a proxy sent."""
    try:
        status = msgspec.json.decode(data, type=_Status)
    except msgspec.MsgspecError:
        return shown(data[:4096].decode("utf-8", "replace"))
    return shown(status.message or status.reason)


def _watch_error(data: msgspec.Raw) -> ApiError:
    status = msgspec.json.decode(data, type=_Status)
    return error_of(status.code, f"cannot go on watching: {status.code} {shown(status.message or status.reason)}")
