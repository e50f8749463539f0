"""The serving side of the local API: a unix socket, one thread per connection, a table of methods.

Knows nothing of what it serves. A peer can at worst waste its own connection.
"""

import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from mpsd.common.errors import ConfigError, GpufracError, ProtocolError, TransientError
from mpsd.common.lockfile import open_lock, try_lock
from mpsd.common.log import get_logger
from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.common.threads import GuardedThread
from mpsd.localapi import wire
from mpsd.localapi.lines import LineReader
from mpsd.localapi.methods import Access, Method, rights
from mpsd.localapi.seats import MAX_CONNECTIONS, Seats

IDLE_S: Final = 60.0
"""A connection that brings no whole request in this time is closed."""
_SEND_S: Final = 10.0
_CLOSE_S: Final = 2.0
_MADE_ROOM: Final = wire.encode_failure(
    wire.BUSY, f"cannot keep a silent connection while more than {MAX_CONNECTIONS} are wanted"
)
_BIND_LOCK_S: Final = 5.0
LOOK_S = 5.0
"""How often it is seen whether our socket is still there: cleaners of /run have taken it before."""

log = get_logger("localapi")


class LocalServer:
    """Serves `methods` on the unix socket `path`, to whom `rights` lets."""

    def __init__(self, path: str, methods: Mapping[str, Method], *, mode: int = 0o600, idle_s: float = IDLE_S) -> None:
        self._path, self._methods, self._mode, self._idle_s = path, dict(methods), mode, idle_s
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, GuardedThread] = {}
        self._seats: Seats[socket.socket] = Seats()
        """Of `_lock`, as `_connections` is."""
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        """Of `_lock`, as `_identity` is."""
        self._identity: tuple[int, int] | None = None
        self._accepting = GuardedThread(self._accept, "localapi")

    def start(self) -> None:
        """Binds and serves. Raises ConfigError for an impossible path, GpufracError when it can't be had."""
        self._listener, self._identity = _listen(self._path, self._mode)
        self._accepting.start()

    def close(self) -> None:
        """Takes no more requests, lets running ones finish for a moment, removes the socket. May be called twice.

        A method that blocks must be woken by its owner first; otherwise its thread (a daemon) is left behind.
        """
        with self._lock:
            listener, self._listener = self._listener, None
            if listener is None:
                return
            self._closing.set()
        _shut(listener, socket.SHUT_RDWR)  # wakes accept()
        self._accepting.join(_CLOSE_S)
        listener.close()
        with suppress(OSError):
            if self._identity == _identity(self._path):  # never another instance's
                os.unlink(self._path)
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            _shut(connection, socket.SHUT_RD)  # an answer under way is still sent
        give_up_s = time.monotonic() + _CLOSE_S
        for connection, thread in connections.items():
            thread.join(max(0.0, give_up_s - time.monotonic()))
            if thread.is_alive():
                _shut(connection, socket.SHUT_RDWR)

    def _accept(self) -> None:
        while (listener := self._listener) is not None:
            if not _ready(listener, LOOK_S):
                self._look()
                continue
            try:
                connection, _ = listener.accept()
            except OSError as exc:
                if self._closing.is_set():
                    return
                log.error("cannot accept a connection", error=exc)
                self._closing.wait(1.0)  # out of descriptors: others have to go first
                continue
            try:
                self._admit(connection)
            except BaseException:
                connection.close()
                raise

    def _look(self) -> None:
        """Listens anew where our socket is gone."""
        if os.path.lexists(self._path):
            return
        try:
            listener, identity = _listen(self._path, self._mode)
        except GpufracError as exc:
            log.error("our socket is gone and can't be made again", error=str(exc))
            return
        with self._lock:
            old = self._listener
            if old is None:  # closed meanwhile
                listener.close()
                os.unlink(self._path)
                return
            self._listener, self._identity = listener, identity
        old.close()
        log.warning("our socket was gone and is made again", path=self._path)

    def _admit(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_S)
        pid, uid = _peer(connection)
        if allowed := rights(uid):
            objection = self._seat(connection, allowed, ours=is_ours(pid))
            if not objection:
                return
            answer = wire.encode_failure(wire.BUSY, objection)
        else:
            answer = wire.encode_failure(wire.DENIED, f"cannot serve UID {uid}: only root may call, use sudo")
        _tell(connection, answer)
        connection.close()

    def _seat(self, connection: socket.socket, allowed: frozenset[Access], *, ours: bool) -> str:
        """Serves it, if there is a place and a thread; else says which is missing. Who has been silent longest has to
        leave for it."""
        objection = ""
        with self._lock:
            admission = self._seats.admit(connection, time.monotonic(), ours=ours)
            if admission.admitted:
                thread = GuardedThread(partial(self._serve, connection, allowed), "localapi-peer")
                try:
                    thread.start()
                    self._connections[connection] = thread
                except TransientError as exc:  # the process may have no more threads
                    self._seats.leave(connection)
                    objection = str(exc)
            else:
                objection = f"cannot serve more than {MAX_CONNECTIONS} connections at a time"
            if admission.leaves is not None:  # under the lock: its thread closes it under it, too
                _tell(admission.leaves, _MADE_ROOM)
                _shut(admission.leaves, socket.SHUT_RDWR)
        return objection

    def _serve(self, connection: socket.socket, allowed: frozenset[Access]) -> None:
        try:
            reader = LineReader(connection, wire.MAX_REQUEST_BYTES)
            while not self._closing.is_set():
                line = reader.line(time.monotonic() + self._idle_s)
                if line is None:
                    return
                with self._lock:
                    if not self._seats.asks(connection):
                        return
                try:
                    answer = self._answer(line, allowed)
                finally:
                    with self._lock:
                        self._seats.answered(connection, time.monotonic())
                connection.settimeout(_SEND_S)
                connection.sendall(answer)
        except ProtocolError as exc:
            with suppress(OSError):
                connection.sendall(wire.encode_failure(wire.TOO_LARGE, str(exc)))
        except OSError:
            pass  # the peer left, or stays silent
        except Exception:
            log.exception("serving a connection failed")
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                self._seats.leave(connection)
                connection.close()

    def _answer(self, line: bytes, allowed: frozenset[Access]) -> bytes:
        try:
            request = wire.decode_request(line)
        except ProtocolError as exc:
            return wire.encode_failure(wire.BAD_REQUEST, str(exc))
        if request.v != wire.VERSION:
            text = f"cannot speak version {request.v} of the local API, only {wire.VERSION}: upgrade both sides"
            return wire.encode_failure(wire.UNKNOWN_VERSION, text)
        method = self._methods.get(request.method)
        if method is None:
            text = f"cannot call {request.method!r}: known methods are {', '.join(sorted(self._methods))}"
            return wire.encode_failure(wire.UNKNOWN_METHOD, text)
        if method.access not in allowed:
            text = f"cannot call {request.method!r}: it takes the right to {method.access}"
            return wire.encode_failure(wire.DENIED, text)
        try:
            return wire.encode_result(method(request.params))
        except GpufracError as exc:
            return wire.encode_failure(type(exc).__name__, str(exc))
        except Exception as exc:
            log.exception("a method of the local API failed", method=request.method)
            text = f"cannot finish {request.method}: {type(exc).__name__}: {exc}; see the log of this process"
            return wire.encode_failure(wire.INTERNAL, text)


def _listen(path: str, mode: int) -> tuple[socket.socket, tuple[int, int]]:
    """A listening socket and the identity of its file. Raises as `_bind`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        identity = _bind(listener, path, mode)
    except BaseException:
        listener.close()
        raise
    return listener, identity


def _ready(listener: socket.socket, wait_s: float) -> bool:
    """Whether somebody connects, or it is shut down. A timeout of its own would not see the latter (Linux)."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    return bool(waiting.poll(wait_s * 1000))


def _bind(listener: socket.socket, path: str, mode: int) -> tuple[int, int]:
    """Binds and listens; gives the identity of the socket file. A stale socket is replaced, a living one never.

    The mode is set between bind and listen: until then the kernel refuses every connection.
    """
    size_bytes = len(os.fsencode(path))
    if size_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"cannot listen on {path}: a socket path holds at most {MAX_SOCKET_PATH_BYTES} bytes, this one has "
            f"{size_bytes}; choose a shorter mps.runRoot"
        )
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise GpufracError(f"cannot listen on {path}: No such file or directory; create its directory first")
    lock = open_lock(f"{path}.lock")
    try:
        _lock(lock, path)
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, mode)
        listener.listen(MAX_CONNECTIONS)
        return _identity(path)
    except OSError as exc:
        raise GpufracError(f"cannot listen on {path}: {exc.strerror}") from exc
    finally:
        os.close(lock)  # unlocks, too


def _lock(lock: int, path: str) -> None:
    """Two instances that start at once must not both find the same socket stale."""
    give_up_s = time.monotonic() + _BIND_LOCK_S
    while not try_lock(lock):
        if time.monotonic() > give_up_s:
            raise GpufracError(f"cannot listen on {path}: another process keeps {path}.lock locked")
        time.sleep(0.05)


def _remove_stale(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise GpufracError(f"cannot listen on {path}: a file that is no socket is in the way; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass  # e.g. a full queue: somebody is there
    raise GpufracError(f"cannot listen on {path}: another process already serves it; stop that one first")


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _peer(connection: socket.socket) -> tuple[int, int]:
    """PID and UID of the process that connected, as the kernel saw them then (SO_PEERCRED, unix(7)). PID 0: one that
    this PID namespace does not have."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return int(pid), int(uid)


def is_ours(pid: int, proc: str = "/proc") -> bool:
    """Whether a process is this one or runs our program, by its command line: for a place, never for a right."""
    if pid == os.getpid():
        return True
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as file:
            words = file.read(4096).split(b"\0")[:4]
    except OSError:
        return False
    return any(word.rpartition(b"/")[2] == b"gpufrac" or word == b"deviceplugin.cli.main" for word in words)


def _tell(connection: socket.socket, answer: bytes) -> None:
    """Sends what fits at once. Not by `send`: with a timeout it waits for room first, whatever its flags (CPython), and
    who reads nothing must not hold up whoever comes next."""
    with suppress(OSError):
        os.write(connection.fileno(), answer)


def _shut(connection: socket.socket, how: int) -> None:
    with suppress(OSError):
        connection.shutdown(how)
