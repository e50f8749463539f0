"""Serves metrics and probes over HTTP: one thread, few connections, a deadline for each exchange as a whole.

Anybody on the node may connect, so nothing here is shared with the kubelet's calls or the local API: no pool, no lock
that waits, and a number of descriptors that is fixed. When all places are taken, the connection that has been there
longest goes: a scrape sends its request at once, so it is served also where others hold every place they can get.
"""

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from deviceplugin.status.reasons import MetricsCode
from mpsd.common.log import get_logger
from mpsd.common.pacing import Backoff
from mpsd.common.reason import Reason
from mpsd.common.text import one_line
from mpsd.common.threads import GuardedThread

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS: Final = 32
EXCHANGE_S: Final = 5.0
"""From connecting until the answer is taken."""
MAX_HEAD_BYTES: Final = 8192
FRESH_S: Final = 1.0
"""An answer is that old at most: how often the metrics are rendered has a bound, too."""
RETRY_FIRST_S: Final = 1.0
RETRY_LAST_S: Final = 30.0
ACCEPT_PAUSE_S: Final = 0.2

log = get_logger("plugin")


Probe = Callable[[], Iterable[Reason]]
"""Why something is not well; none where it is."""


class MetricsServer:
    """Serves `/metrics` and probes at an address until closed. One that can't be had is tried again and again.

    A probe is answered with 200, or with 503 and a line for each reason.

    Args:
        address: `host:port`, `[IPv6]:port` or `name:port`.
        render: the exposition; called at most every FRESH_S, as each of the probes is.
        probes: by path, such as `/healthz`.
    """

    def __init__(self, address: str, render: Callable[[], str], probes: Mapping[str, Probe] | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self._host, self._port = host.strip("[]"), int(port)
        self._pages = {b"/metrics": _Page(lambda: ("200 OK", render()), CONTENT_TYPE)} | {
            path.encode(): _Page(partial(_probed, probe), "text/plain") for path, probe in (probes or {}).items()
        }
        self._problem: Reason | None = None
        self._stop = threading.Event()
        self._wake: socket.socket
        self._woken: socket.socket
        self._thread = GuardedThread(self._run, "metrics")
        self.port = 0
        """The one bound, where the address says 0."""

    @property
    def problem(self) -> Reason | None:
        """Why nothing is served, None while it is."""
        return self._problem

    def start(self) -> None:
        self._wake, self._woken = socket.socketpair()
        self._thread.start()

    def close(self) -> None:
        """Stops serving; nothing to do where it was not started."""
        self._stop.set()
        if self._thread.ident is None:
            return
        with contextlib.suppress(OSError):
            self._wake.send(b".")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        backoff = Backoff(RETRY_FIRST_S, RETRY_LAST_S)
        while not self._stop.is_set():
            listeners: list[socket.socket] = []
            try:
                listeners = listen(self._host, self._port)
                self.port = listeners[0].getsockname()[1]
                self._note(None)
                self._serve(listeners)
            except OSError as error:
                self._note(_problem(self.address, error))
                self._stop.wait(backoff.pause_s())
            finally:
                for listener in listeners:
                    listener.close()

    def _note(self, problem: Reason | None) -> None:
        if problem != self._problem:
            if problem is not None:
                log.error("cannot serve metrics", address=self.address, error=problem.message)
            else:
                log.info("metrics are served", address=self.address)
        self._problem = problem

    def _serve(self, listeners: list[socket.socket]) -> None:
        peers: dict[socket.socket, _Peer] = {}  # oldest first
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for listener in listeners:
                selector.register(listener, selectors.EVENT_READ)
            try:
                while not self._stop.is_set():
                    first = next(iter(peers.values()), None)
                    left_s = None if first is None else max(0.0, first.deadline_s - time.monotonic())
                    for key, _ in selector.select(left_s):
                        if key.fileobj in listeners:
                            self._accept(key.fileobj, selector, peers)
                        elif (peer := peers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                            if not peer.go_on(self._answer):
                                _drop(peer, selector, peers)
                            else:
                                selector.modify(peer.connection, peer.waits_for)
                    now_s = time.monotonic()
                    for peer in [peer for peer in peers.values() if peer.deadline_s <= now_s]:
                        _drop(peer, selector, peers)
            finally:
                for peer in list(peers.values()):
                    peer.connection.close()

    def _accept(
        self, listener: socket.socket, selector: selectors.BaseSelector, peers: "dict[socket.socket, _Peer]"
    ) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("cannot accept a connection for metrics", error=str(error))
            self._stop.wait(ACCEPT_PAUSE_S)  # out of descriptors: others have to go first
            return
        if len(peers) >= MAX_CONNECTIONS:
            _drop(next(iter(peers.values())), selector, peers)
        connection.setblocking(False)
        peer = peers[connection] = _Peer(connection, time.monotonic() + EXCHANGE_S)
        selector.register(connection, peer.waits_for)

    def _answer(self, head: bytes) -> bytes:
        """The whole answer to a request's head."""
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"bad request\n")
        method, target = words[0], words[1].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET\n", more="Allow: GET, HEAD\r\n")
        page, head_only = self._pages.get(target), method == b"HEAD"
        if page is None:
            known = b", ".join(sorted(self._pages))
            return _response("404 Not Found", b"see " + known + b"\n", head_only=head_only)
        status, body = page.fresh()
        return _response(status, body, kind=page.kind, head_only=head_only)


class _Page:
    """What is served at one path: status and text, at most FRESH_S old."""

    def __init__(self, render: Callable[[], tuple[str, str]], kind: str) -> None:
        self._render, self.kind = render, kind
        self._answer, self._rendered_s = ("", b""), float("-inf")
        self._failed = False

    def fresh(self) -> tuple[str, bytes]:
        now_s = time.monotonic()
        if now_s - self._rendered_s < FRESH_S:
            return self._answer
        try:
            status, text = self._render()
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("a page can't be rendered", kind=self.kind)
            return "500 Internal Server Error", b"it can't be rendered, see the log\n"
        self._answer, self._rendered_s, self._failed = (status, text.encode()), now_s, False
        return self._answer


def _probed(probe: Probe) -> tuple[str, str]:
    lines = [f"{reason.code}: {one_line(reason.message)}" for reason in probe()]
    return ("503 Service Unavailable", "\n".join(lines) + "\n") if lines else ("200 OK", "ok\n")


class _Peer:
    """One connection: its request's head comes, the answer goes, and what else comes is let pass until it leaves."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self.connection, self.deadline_s = connection, deadline_s
        self._head = bytearray()
        self._left: memoryview | None = None
        self._answered = False

    @property
    def waits_for(self) -> int:
        return selectors.EVENT_READ if self._left is None else selectors.EVENT_WRITE

    def go_on(self, answer: Callable[[bytes], bytes]) -> bool:
        """Does what can be done at once. False when it is over."""
        try:
            if self._left is not None:
                return self._send()
            received = self.connection.recv(4096)
            if not received:
                return False
            if self._answered:
                return True  # closing before all was read would take the answer back from the peer (RST)
            self._head += received
            end = self._head.find(b"\r\n\r\n")
            if end < 0 and len(self._head) <= MAX_HEAD_BYTES:
                return True
            too_long = _response("431 Request Header Fields Too Large", b"too long\n")
            self._left = memoryview(answer(bytes(self._head[:end])) if 0 <= end <= MAX_HEAD_BYTES else too_long)
            return self._send()
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _send(self) -> bool:
        assert self._left is not None
        self._left = self._left[self.connection.send(self._left) :]
        if not self._left:
            self._left, self._answered = None, True
            self.connection.shutdown(socket.SHUT_WR)
        return True


def _drop(peer: _Peer, selector: selectors.BaseSelector, peers: dict[socket.socket, _Peer]) -> None:
    selector.unregister(peer.connection)
    del peers[peer.connection]
    peer.connection.close()


def _response(status: str, body: bytes, *, kind: str = "text/plain", more: str = "", head_only: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listens at every address of a host (a name may have several), IPv4 or IPv6. Those that this machine does not have
    are left out where others can be had.

    Raises:
        OSError: nothing can be had, or somebody else has one of them.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:  # no IPv6 here
                absent = error
                continue
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
                listener.bind(address)
                listener.listen(MAX_CONNECTIONS)
                listener.setblocking(False)
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                absent = error
                continue
            listeners.append(listener)
        if not listeners:
            raise absent or OSError(errno.EADDRNOTAVAIL, "it has no address")
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _problem(address: str, error: OSError) -> Reason:
    if isinstance(error, socket.gaierror):
        code, advice = MetricsCode.ADDRESS_UNKNOWN, "name an address of this node in metrics.address"
    elif error.errno == errno.EADDRINUSE:
        code, advice = (
            MetricsCode.ADDRESS_IN_USE,
            "another process listens there: end it, or set another metrics.address",
        )
    elif error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        code, advice = MetricsCode.ADDRESS_NOT_HERE, "this node has no such address: set another metrics.address"
    else:
        code, advice = MetricsCode.CANNOT_LISTEN, "see metrics.address"
    text = error.strerror or str(error)
    return Reason(code=code, message=f"metrics are not served on {address}: {text}: {advice}; it is tried again")
