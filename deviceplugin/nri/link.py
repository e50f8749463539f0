"""A connected socket that carries NRI calls both ways at once. The same for a runtime and for a plugin."""

import select
import socket
import threading
import time
from contextlib import suppress
from typing import Final

from deviceplugin.nri.endpoint import Endpoint
from deviceplugin.nri.ttrpc import MAX_TEXT, Answer, Request
from mpsd.common.errors import GpufracError, ProtocolError, TransientError

_RECEIVE_BYTES: Final = 1 << 18
_SEND_S: Final = 2.0
"""How long a peer may take to make room for what we send. One that does not is gone for us: a part may be out."""


class LinkError(TransientError):
    """The link has ended; the text says why."""


class CallError(GpufracError):
    """The peer answered a call with an error: its code and its words."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text[:MAX_TEXT] or f"error {code} without words")
        self.code = code


class PendingCall:
    """A call that was sent."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._outcome: Answer | str = ""

    @property
    def done(self) -> bool:
        """Whether its answer, or its failure, is there."""
        return self._done.is_set()

    def result(self, timeout_s: float) -> bytes:
        """The answer's payload. Raises TimeoutError, CallError, LinkError."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        if isinstance(self._outcome, str):
            raise LinkError(self._outcome)
        if self._outcome.code:
            raise CallError(self._outcome.code, self._outcome.text)
        return self._outcome.payload

    def settle(self, outcome: Answer | str) -> None:
        """The answer, or why none will come."""
        self._outcome = outcome
        self._done.set()


class Link:
    """One thread pumps, and releases the socket in the end; all else is for any thread.

    Args:
        serves: the connection over which the peer calls us.
        calls: the one over which we call it.
    """

    def __init__(self, connection: socket.socket, *, serves: int, calls: int) -> None:
        connection.settimeout(_SEND_S)
        self._connection = connection
        self._endpoint = Endpoint(serves=serves, calls=calls)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._lock = threading.Lock()  # pending calls, stream numbers, why it ended
        self._sending = threading.Lock()
        self._pending: dict[int, PendingCall] = {}
        self._ended = ""

    @property
    def ended(self) -> str:
        """Why it ended, empty while it lasts."""
        return self._ended

    def pump(self, timeout_s: float) -> list[Request]:
        """Waits for input, at most so long, and takes it in. What the peer asks; answers go to those who wait for them.

        Raises LinkError when the link has ended: the socket, or a peer that breaks the rules.
        """
        if not self._poll.poll(max(0.0, timeout_s) * 1000):
            return []
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except TimeoutError:
            return []
        except OSError as error:
            raise self.end(self._why_left(f"the connection broke: {error.strerror or error}")) from error
        if not data:
            raise self.end(self._why_left("the other side closed the connection"))
        try:
            received = self._endpoint.feed(data)
        except ProtocolError as error:
            raise self.end(str(error)) from error
        for answer in received.answers:
            with self._lock:
                call = self._pending.pop(answer.stream, None)
            if call is not None:
                call.settle(answer)
        if received.replies:
            self._send(bytes(received.replies))
        return received.requests

    def _why_left(self, how: str) -> str:
        objection = self._endpoint.objection
        return f"{how}, after we refused what it sent: {objection}" if objection else how

    def begin(self, service: str, method: str, payload: bytes, timeout_s: float) -> PendingCall:
        """Sends a call; the timeout is told to the peer. Raises LinkError, and ProtocolError where it is too long."""
        call = PendingCall()
        with self._sending:  # streams must reach the peer in the order of their numbers
            with self._lock:
                if self._ended:
                    raise LinkError(self._ended)
                stream, data = self._endpoint.request(service, method, payload, timeout_s)
                self._pending[stream] = call
            self._send_all(data)
        return call

    def call(self, service: str, method: str, payload: bytes, timeout_s: float) -> bytes:
        """Calls and waits; the answer's payload. Raises TimeoutError, CallError, LinkError, and ProtocolError."""
        call = self.begin(service, method, payload, timeout_s)
        try:
            return call.result(timeout_s)
        finally:
            with self._lock:
                self._pending = {stream: other for stream, other in self._pending.items() if other is not call}

    def answer(self, answer: Answer) -> None:
        """Answers a request. Raises LinkError."""
        self._send(self._endpoint.answer(answer))

    def end(self, reason: str) -> LinkError:
        """Ends the link; callers learn it, also one that pumps. An error that says why: the first reason counts."""
        with self._lock:
            first, self._ended = not self._ended, self._ended or reason
            pending, self._pending = self._pending, {}
        if first:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        for call in pending.values():
            call.settle(self._ended)
        return LinkError(self._ended)

    def release(self) -> None:
        """Ends the link and closes its socket. For the thread that pumps, or after it is gone."""
        self.end("closed")
        with self._sending:
            self._connection.close()

    def _send(self, data: bytes) -> None:
        with self._sending:
            self._send_all(data)

    def _send_all(self, data: bytes) -> None:
        if self._ended:
            raise LinkError(self._ended)
        begun_s = time.monotonic()
        try:
            self._connection.sendall(data)
        except TimeoutError as error:
            took_s = time.monotonic() - begun_s
            raise self.end(f"the other side takes no more data since {took_s:.1f} s") from error
        except OSError as error:
            raise self.end(f"the connection broke: {error.strerror or error}") from error
