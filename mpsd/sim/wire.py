"""How the emulator's processes talk. The real protocol is unpublished; this one is ours, and only as large as needed.

On a stream socket `control` a peer opens with one line:
  `UI`                 answered by the daemon's protocol; then command lines, each answered by `<exit status> <length>`
                       and that many bytes, or by `exit <status>` where the daemon ends. A command of protocol 3 has
                       its words apart by WORD_END
  `CLIENT <uid or ->`  answered by `ok <JSON>` or `error <CUresult>` once a server is ready, or by `plain`: CUDA goes on
                       without MPS, or by `registered`: it goes on alone, but known for memory accounting (protocol 3).
                       Afterwards the server, or the daemon of one that is registered, may send `error <CUresult>`; the
                       client `context <GPU UUID>`, `fault`, `busy` (work in flight), or `evict <GPU UUID>` for want of
                       memory, answered by `retry` or `no-victim`. A registered one only sends the last
Between daemon and server each packet of a socket pair is one message of words. `client <number> <PID> <terms>` carries
the connection; its terms are `server` (what the server was started with), `unlimited`, or
`limits <bytes per GPU, -> <thread percentage>`. `evict <number> <GPU UUID>` passes a client's wish on to the daemon,
`evicted <number> <answer>` comes back.
"""

from __future__ import annotations

import _socket as socket  # what the front-end needs of it, at a fifth of the time: it starts again and again
import os
import sys

MAX_MESSAGE_BYTES = 65536
WORD_END = "\0"
CHANNEL_DESCRIPTOR = 3
"""Where a server finds its end of the socket pair."""


def pipe_directory(protocol: int = 2) -> str:
    """Where the control socket is, by the environment, else the documented default."""
    default = "/run/nvidia-mps" if protocol == 3 and os.getuid() == 0 else "/tmp/nvidia-mps"  # noqa: S108
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or default


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """PID and UID of the process at the other end (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(raw[:4], sys.byteorder), int.from_bytes(raw[4:8], sys.byteorder)


def send_message(channel: socket.socket, text: str, descriptor: int | None = None) -> bool:
    """Sends one message, with a descriptor where given. False where the peer is gone."""
    rights = (
        [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))]
    )
    try:
        channel.sendmsg([text.encode()], rights)
    except OSError:
        return False
    return True


def receive_message(channel: socket.socket) -> tuple[str, int | None] | None:
    """One message and the descriptor it carried, None where the peer is gone."""
    try:
        data, rights, _, _ = channel.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4))
    except OSError:
        return None
    descriptor = None
    for level, kind, raw in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptor = int.from_bytes(raw[:4], sys.byteorder)
    if not data:
        return None
    return data.decode(), descriptor


def send_line(connection: socket.socket, text: str) -> bool:
    """Sends one line to a client or front-end. False where it is gone."""
    try:
        connection.sendall(text.encode() + b"\n")
    except OSError:
        return False
    return True


class LineReader:
    """Whole lines out of a stream, whatever the pieces they come in."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""

    def read(self) -> list[str] | None:
        """Reads once; the lines complete by now, None at the end of the stream."""
        try:
            data = os.read(self._descriptor, MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]
