"""ttrpc messages <-> bytes of one connection (pure): frames, and the request or response in each.

A frame is 10 bytes of header (payload length, stream: 4 bytes big-endian each; kind; flags) and the payload
(containerd/ttrpc PROTOCOL.md). Every call has a stream of its own, odd and larger than the one before.
"""

import struct
from enum import IntEnum
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from deviceplugin.api import ttrpc_pb2 as pb
from mpsd.common.errors import ProtocolError

MAX_PAYLOAD_BYTES: Final = 4 << 20
MAX_TEXT: Final = 1000
_HEADER: Final = struct.Struct(">IIBB")


class FrameKind(IntEnum):
    """Types of ttrpc messages (containerd/ttrpc PROTOCOL.md)."""

    REQUEST = 1
    RESPONSE = 2
    DATA = 3


class Code(IntEnum):
    """Those of gRPC's status codes that we send or know."""

    OK = 0
    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13


class Frame(msgspec.Struct, frozen=True):
    """`kind` may be none of FrameKind. One with `oversized_bytes` came without its payload, which was too long."""

    stream: int
    kind: int
    payload: bytes = b""
    flags: int = 0
    oversized_bytes: int = 0


class Request(msgspec.Struct, frozen=True):
    """`timeout_s`: how long the caller waits, 0 where it does not tell."""

    stream: int
    service: str
    method: str
    payload: bytes = b""
    timeout_s: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """What came of a call: a payload, or a code that isn't 0 and why."""

    stream: int
    payload: bytes = b""
    code: int = Code.OK
    text: str = ""


class FrameDecoder:
    """Takes in a connection's bytes, however they are cut. Holds one frame at most."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._skip_bytes = 0

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now, in order. Any bytes are some frames: it raises nothing."""
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            data = data[skipped:]
        buffer = self._buffer
        buffer += data
        frames = []
        at = 0
        while len(buffer) - at >= _HEADER.size:
            length, stream, kind, flags = _HEADER.unpack_from(buffer, at)
            begin, end = at + _HEADER.size, at + _HEADER.size + length
            if length > MAX_PAYLOAD_BYTES:
                frames.append(Frame(stream, kind, flags=flags, oversized_bytes=length))
                self._skip_bytes = max(0, end - len(buffer))
            elif end > len(buffer):
                break
            else:
                frames.append(Frame(stream, kind, bytes(buffer[begin:end]), flags))
            at = min(end, len(buffer))
        del buffer[:at]
        return frames


def encode_frame(stream: int, kind: FrameKind, payload: bytes) -> bytes:
    """Raises ProtocolError for a payload that a peer would not take."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"cannot send a message of {len(payload)} bytes: ttrpc allows {MAX_PAYLOAD_BYTES}")
    return _HEADER.pack(len(payload), stream, kind, 0) + payload


def encode_request(request: Request) -> bytes:
    """Raises ProtocolError where it is too long."""
    message = pb.Request(
        service=request.service,
        method=request.method,
        payload=request.payload,
        timeout_nano=int(request.timeout_s * 1e9),
    )
    return encode_frame(request.stream, FrameKind.REQUEST, message.SerializeToString())


def encode_answer(answer: Answer) -> bytes:
    """Raises ProtocolError where it is too long. The text is cut."""
    text = answer.text[:MAX_TEXT].encode(errors="replace").decode()
    status = pb.Status(code=answer.code, message=text) if answer.code else None
    message = pb.Response(status=status, payload=answer.payload)
    return encode_frame(answer.stream, FrameKind.RESPONSE, message.SerializeToString())


def decode_request(frame: Frame) -> Request:
    """Raises ProtocolError for a payload that is no request."""
    message = pb.Request()
    try:
        message.ParseFromString(frame.payload)
    except DecodeError as error:
        raise ProtocolError(f"cannot read the request: {error}") from error
    timeout_s = max(0, message.timeout_nano) / 1e9
    return Request(frame.stream, message.service, message.method, message.payload, timeout_s)


def decode_answer(frame: Frame) -> Answer:
    """Raises ProtocolError for a payload that is no response."""
    message = pb.Response()
    try:
        message.ParseFromString(frame.payload)
    except DecodeError as error:
        raise ProtocolError(f"cannot read the response: {error}") from error
    return Answer(frame.stream, message.payload, message.status.code, message.status.message)
