"""Chunks on one socket <-> a stream of bytes per connection (pure).

NRI carries two ttrpc connections over one socket: each chunk is the connection's number and the payload's length, both
4 bytes big-endian, and the payload (containerd/nri pkg/net/multiplex). Chunks have nothing to do with messages: one
message may span several, one chunk may hold several.
"""

import struct
from typing import Final

from mpsd.common.errors import ProtocolError

PLUGIN_SERVICE: Final = 1
"""The connection over which the runtime calls a plugin."""
RUNTIME_SERVICE: Final = 2
"""The connection over which a plugin calls the runtime."""
MAX_PAYLOAD_BYTES: Final = (4 << 20) + 10
FIRST_CHUNK_BYTES: Final = 4096
_HEADER: Final = struct.Struct(">II")


def encode(connection: int, message: bytes) -> bytes:
    """A message of that connection in chunks: its first 4 KiB, then the rest, as the Go side writes them.

    That side also reads through a buffer of 4 KiB and fails (ENOMEM) on a chunk that is larger than the room it offers:
    the buffer where a message begins, what the message still lacks after that. So a message must begin with a chunk of
    its own that fits, and no chunk may hold the end of one message and the begin of another.
    """
    chunks = []
    begin, end = 0, min(FIRST_CHUNK_BYTES, len(message))
    while begin < len(message):
        chunks += [_HEADER.pack(connection, end - begin), message[begin:end]]
        begin, end = end, min(end + MAX_PAYLOAD_BYTES, len(message))
    return b"".join(chunks)


class Demultiplexer:
    """Takes in a socket's bytes, however they are cut. Holds no payload back: a header at most."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._connection = 0
        self._left_bytes = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Pieces of the connections' streams, in order. Raises ProtocolError for a chunk that is too long; what follows
        it has no meaning any more."""
        pieces: list[tuple[int, bytes]] = []
        at = 0
        while at < len(data):
            if self._left_bytes:
                piece = data[at : at + self._left_bytes]
                self._left_bytes -= len(piece)
                pieces.append((self._connection, piece))
                at += len(piece)
                continue
            lacking = _HEADER.size - len(self._header)
            self._header += data[at : at + lacking]
            at += lacking
            if len(self._header) == _HEADER.size:
                self._connection, self._left_bytes = _HEADER.unpack(self._header)
                self._header.clear()
                if self._left_bytes > MAX_PAYLOAD_BYTES:
                    raise ProtocolError(
                        f"cannot take a chunk of {self._left_bytes} bytes: NRI allows {MAX_PAYLOAD_BYTES}"
                    )
        return pieces
