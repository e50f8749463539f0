"""Lines from a socket, for both sides of the local API."""

import socket
import time

from mpsd.common.errors import ProtocolError


class LineReader:
    """Lines from a socket, each within a deadline (monotonic seconds)."""

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        self._connection, self._max_bytes, self._buffer = connection, max_bytes, bytearray()

    def line(self, deadline_s: float) -> bytes | None:
        """The next line without its newline; None at the end of the stream, half a line then counts for nothing.

        Raises TimeoutError, OSError, and ProtocolError for a line that is too long.
        """
        searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            if 0 <= end < self._max_bytes:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                return line
            if end >= 0 or len(self._buffer) >= self._max_bytes:
                raise ProtocolError(f"cannot take a line of more than {self._max_bytes} bytes")
            searched = len(self._buffer)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no whole line in time")
            self._connection.settimeout(left_s)
            received = self._connection.recv(1 << 16)
            if not received:
                return None
            self._buffer += received
