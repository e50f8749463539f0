"""Descriptors of a control daemon and what is done when one is readable; sockets and pipes in its directories."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable


class Loop:
    """For one thread."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._listeners: dict[str, socket.socket] = {}
        """By path."""
        self._fifos: dict[str, int] = {}
        """By path."""

    def watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Calls the handler in each turn in which there is something to read."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def forget(self, descriptor: int) -> None:
        """No longer; one that is not watched is fine."""
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def turn(self, timeout_ms: float | None) -> None:
        """Waits until something is readable, or so long, and has it handled."""
        ready = [(fd, self._handlers[fd]) for fd, _ in self._poll.poll(timeout_ms)]
        for descriptor, handler in ready:
            if self._handlers.get(descriptor) is handler:  # not closed, and maybe reused, by one before it
                handler()

    def listen(self, path: str, on_connection: Callable[[socket.socket], None]) -> None:
        """Makes a socket, in place of one that was left behind; connections are given on."""
        unlink(path)
        listener = self._listeners[path] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        os.chmod(path, 0o666)  # noqa: S103 - clients of every user connect
        listener.listen(128)
        listener.setblocking(False)

        def accept() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setblocking(False)
            on_connection(connection)

        self.watch(listener.fileno(), accept)

    def open_fifo(self, path: str, on_text: Callable[[str], None]) -> None:
        """Makes a named pipe; what is written into it is given on."""
        unlink(path)
        os.mkfifo(path, 0o600)
        fifo = self._fifos[path] = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.watch(fifo, lambda: on_text(os.read(fifo, 4096).decode(errors="replace").strip()))

    def remove_below(self, directory: str) -> None:
        """Closes and removes sockets and named pipes in a directory and in those below it."""
        for path in [path for path in self._listeners if path.startswith(directory + "/")]:
            listener = self._listeners.pop(path)
            self.forget(listener.fileno())
            listener.close()
            unlink(path)
        for path in [path for path in self._fifos if path.startswith(directory + "/")]:
            fifo = self._fifos.pop(path)
            self.forget(fifo)
            os.close(fifo)
            unlink(path)


def unlink(path: str) -> None:
    """Removes a file; a missing one is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
