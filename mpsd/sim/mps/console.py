"""What the front-ends of both protocols do: they talk to the daemon, and print. Imports stay tiny."""

from __future__ import annotations

import _socket as socket
import os
import select
import sys
from io import BufferedReader

from mpsd.sim.switches import read_switch
from mpsd.sim.wire import peer_credentials, pipe_directory


def say(simulation: str, text: str) -> None:
    """Prints an error where this simulation prints them."""
    if text:
        stream = sys.stdout if read_switch(simulation, "error-stream") == "stdout" else sys.stderr
        stream.write(text + "\n")
        stream.flush()


def print_version(simulation: str) -> None:
    from mpsd.sim.driver import SimulatedDriver
    from mpsd.sim.switches import binary_version

    sys.stdout.write(f"{binary_version(simulation, SimulatedDriver(simulation).version())}\n")


class Connection:
    """A front-end's connection to the daemon of this pipe directory; `protocol` is the daemon's."""

    def __init__(self, connection: socket.socket, replies: BufferedReader, protocol: int) -> None:
        self._connection = connection
        self._replies = replies
        self.protocol = protocol
        self.ended = False
        """The daemon has broken off, or quit."""

    @classmethod
    def open(cls, asks_for_3: bool) -> Connection | None:
        """Connects; None where no daemon answers."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(os.path.join(pipe_directory(3 if asks_for_3 else 2), "control"))
            connection.sendall(b"UI\n")
            replies = open(connection.fileno(), "rb", closefd=False)  # noqa: SIM115 - closed with the connection
            return cls(connection, replies, int(replies.readline()))
        except (OSError, ValueError):
            connection.close()
            return None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self._replies.close()
        self._connection.close()

    def exchange(self, command: bytes) -> tuple[int, bytes]:
        """One command: exit status and reply. After `ended` there is none any more."""
        quits = command.split()[:1] == [b"quit"]
        daemon = self._open_daemon() if quits else None
        try:
            self._connection.sendall(command + b"\n")
            header = self._replies.readline().split()
            if len(header) == 2 and header[0] != b"exit":
                return int(header[0]), self._replies.read(int(header[1]))
        except OSError:
            header = []
        self.ended = True
        if not header:
            return 1, b""
        if daemon is not None:
            select.select([daemon], [], [])  # quit returns when the daemon's process is gone
        return int(header[1]), b""

    def _open_daemon(self) -> int | None:
        try:
            return os.pidfd_open(peer_credentials(self._connection)[0])
        except OSError:
            return None
