"""One HTTP/1.1 connection: every wait ends at a deadline, and another thread can end it at once.

`http.client` speaks; the socket below it is ours, since its timeouts are per read: a server that sends a byte now and
then would hold it forever. Imported with the first connection only.
"""

import errno
import http.client
import io
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deviceplugin.kubernetes.access import Endpoint
from deviceplugin.kubernetes.errors import AbortedError, ApiError, NonsenseError, UnreachableError, shown

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_PIECE_BYTES = 1 << 16
_CONNECT_LOOK_S = 0.1
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""A server whose host is gone is noticed within a minute, also by a watch that waits for hours."""


class Connection:
    """Used by one thread at a time; `abort` may come from any."""

    def __init__(self, endpoint: Endpoint, context: ssl.SSLContext | None) -> None:
        self.endpoint = endpoint
        self.deadline_s = 0.0
        """Monotonic; of whatever waits next."""
        self.used = False
        """Whether it has brought an answer: a failure may then mean that the server closed it as idle."""
        self._context = context
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.aborted = False
        """Whether another thread ended it: it is fit for nothing any more."""
        self._http = _Http(endpoint.host, endpoint.port)

    def open(self, deadline_s: float) -> None:
        """Connects. Raises UnreachableError, AbortedError."""
        self.deadline_s = deadline_s
        try:
            self._connect()
        except (OSError, ValueError) as error:
            raise self.failure(error, "cannot reach") from error
        self._http.sock = _Socket(self)

    def exchange(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> "Response":
        """Sends a request; its answer, of which only the head was read. Raises UnreachableError, NonsenseError."""
        try:
            self._http.request(method, target, body, dict(headers))
            answer = self._http.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self.failure(error, "cannot talk to") from error
        self.used = True
        return Response(self, answer)

    def abort(self) -> None:
        """Ends whatever waits on it, now and from now on."""
        with self._lock:
            self.aborted = True
            if self._socket is not None:
                with suppress(OSError):
                    # Not SSLSocket.shutdown(): it takes the TLS state away from a thread that reads.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._http.close()
        with self._lock:
            opened, self._socket = self._socket, None
            if opened is not None:
                opened.close()

    def receive(self, buffer: "WriteableBuffer") -> int:
        """Reads into `buffer`; the number of bytes, 0 at the end. Raises OSError, also once aborted."""
        received = self._waiting().recv_into(buffer)
        if not received and self.aborted:
            raise _aborted()  # or what came so far would count as the whole
        return received

    def send(self, data: bytes) -> None:
        """Sends all of it. Raises OSError."""
        self._waiting().sendall(data)

    def _waiting(self) -> socket.socket:
        """The socket, set to wait until the deadline. Raises OSError."""
        opened = self._socket
        if opened is None or self.aborted:
            raise _aborted()
        opened.settimeout(self._left_s())
        return opened

    def _left_s(self) -> float:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def _connect(self) -> None:
        failure: OSError | None = None
        found = socket.getaddrinfo(self.endpoint.host, self.endpoint.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            plain = socket.socket(family, kind, protocol)
            try:
                self._keep(plain)
                self._connect_to(plain, address)
                self._secure(plain)
                return
            except TimeoutError:
                self.close()
                raise
            except OSError as error:
                self.close()
                failure = error
        raise failure or OSError("its name has no address")

    def _connect_to(self, plain: socket.socket, address: Any) -> None:
        for option in _OPTIONS:
            plain.setsockopt(*option)
        plain.setblocking(False)
        code = plain.connect_ex(address)
        if code == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(plain, select.POLLOUT)
            # A shutdown doesn't end every wait for a connection, so this one looks up.
            while not poller.poll(1000 * min(_CONNECT_LOOK_S, self._left_s())):
                self._waiting()
            code = plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def _secure(self, plain: socket.socket) -> None:
        if self._context is None:
            return
        plain.settimeout(self._left_s())
        wrapped = self._context.wrap_socket(
            plain,
            server_hostname=self.endpoint.server_name or self.endpoint.host,
            do_handshake_on_connect=False,
        )
        self._keep(wrapped)
        wrapped.do_handshake()

    def _keep(self, opened: socket.socket) -> None:
        with self._lock:
            self._socket = opened
        self._waiting()

    def failure(self, error: Exception, what: str) -> ApiError:
        """What an error of the socket, of TLS or of http.client means."""
        if self.aborted:
            return AbortedError(f"cannot finish a request to {self.endpoint.url}: closing")
        prefix = f"{what} {self.endpoint.url}"
        if isinstance(error, TimeoutError):
            return UnreachableError(f"{prefix}: no answer in time")
        if isinstance(error, ssl.SSLCertVerificationError):
            return UnreachableError(f"{prefix}: its certificate is not trusted: {error.verify_message}")
        if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead):
            return UnreachableError(f"{prefix}: it closed the connection in the middle of an answer")
        if isinstance(error, OSError):
            return UnreachableError(f"{prefix}: {shown(error.strerror or str(error))}")
        return NonsenseError(f"{prefix}: it speaks no HTTP: {type(error).__name__}: {shown(str(error))}")


def _aborted() -> OSError:
    return ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))


class Response:
    """An answer whose body is still to come."""

    def __init__(self, connection: Connection, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.connection = connection
        self._answer = answer

    @property
    def retry_after_s(self) -> float | None:
        """How long the server asks to wait, None where it does not say so in seconds."""
        text = self._answer.headers.get("Retry-After", "").strip()
        return float(text[:6]) if text.isascii() and text.isdigit() else None

    @property
    def reusable(self) -> bool:
        """Whether the connection is fit for another request."""
        return self._answer.isclosed() and not self._answer.will_close

    def pieces(self) -> Iterator[bytes]:
        """The body, as it arrives. Raises UnreachableError, NonsenseError."""
        try:
            while piece := self._piece():
                yield piece
            if self._answer.length:
                raise http.client.IncompleteRead(b"", self._answer.length)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self.connection.failure(error, "cannot read an answer of") from error

    def close(self) -> None:
        self._answer.close()

    def _piece(self) -> bytes:
        # read1() of a body with a length waits for more than there is, before Python 3.11.8 (python/cpython#113199).
        known_length = self._answer.length is not None
        return self._answer.read(_PIECE_BYTES) if known_length else self._answer.read1(_PIECE_BYTES)


class _Http(http.client.HTTPConnection):
    auto_open = 0
    sock: Any


class _Socket:
    """What http.client needs of a socket. Closing is the connection's affair."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def sendall(self, data: bytes) -> None:
        self._connection.send(data)

    def makefile(self, mode: str, *_: object) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Incoming(self._connection))

    def close(self) -> None: ...


class _Incoming(io.RawIOBase):
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        return self._connection.receive(buffer)
