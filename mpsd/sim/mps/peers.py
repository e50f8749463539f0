"""Who is connected to a control daemon: front-ends, and clients that wait for a server."""

from __future__ import annotations

import socket

from mpsd.sim.wire import LineReader

Target = tuple[str, str]
"""Server and namespace that a socket belongs to; both empty for the main one and for protocol 2."""


class Peer:
    """A front-end, or a connection that has not said yet what it is. Commands wait in `lines`."""

    __slots__ = ("connection", "descriptor", "hello", "lines", "reader", "target", "terminating", "uid")

    def __init__(self, connection: socket.socket | None, uid: int, target: Target = ("", "")) -> None:
        self.connection = connection
        self.descriptor = 0 if connection is None else connection.fileno()
        self.uid = uid
        self.target = target
        self.reader = LineReader(self.descriptor)
        self.hello = connection is None  # the foreground daemon's own stdin needs none
        self.lines: list[str] = []
        self.terminating: tuple[int, int] | None = None
        """(server, client) whose end the last command waits for"""


class Waiting:
    """A client that has no server yet."""

    __slots__ = ("connection", "pid", "target", "uid")

    def __init__(self, connection: socket.socket, pid: int, uid: int, target: Target) -> None:
        self.connection = connection
        self.pid = pid
        self.uid = uid
        self.target = target
