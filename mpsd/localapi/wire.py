"""The local API on the wire (pure): one JSON object per line, one answer per request, in order.

    request   {"v": 1, "method": "snapshot", "params": {...}}
    answer    {"result": ...}  or  {"error": {"code": "ConfigError", "message": "cannot ..."}}

Codes are the names of our error classes, or one of the constants below.
"""

from typing import Any, Final, TypeVar

import msgspec

from mpsd.common import errors
from mpsd.common.errors import GpufracError, NotReachableError, ProtocolError, TransientError

VERSION: Final = 1
MAX_REQUEST_BYTES: Final = 1 << 20
MAX_ANSWER_BYTES: Final = 16 << 20
"""Longest lines, the newline included."""

MAX_BLOCK_S: Final = 30.0
"""Longest time a method may wait for something to happen."""

BAD_REQUEST, DENIED, BUSY, INTERNAL = "bad_request", "denied", "busy", "internal"
UNKNOWN_METHOD, UNKNOWN_VERSION, TOO_LARGE = "unknown_method", "unknown_version", "too_large"

T = TypeVar("T")


class Request(msgspec.Struct, frozen=True):
    """One line from a client."""

    v: int
    method: str
    params: dict[str, Any] = {}


class Failure(msgspec.Struct, frozen=True):
    """Why a request has no result."""

    code: str
    message: str


class _Answer(msgspec.Struct, frozen=True):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: Failure | None = None


_requests = msgspec.json.Decoder(Request)
_answers = msgspec.json.Decoder(_Answer)
_encoder = msgspec.json.Encoder()


def encode_request(method: str, params: dict[str, Any]) -> bytes:
    """A whole line. Raises GpufracError when it is too long."""
    line = _encoder.encode(Request(VERSION, method, params)) + b"\n"
    if len(line) > MAX_REQUEST_BYTES:
        raise GpufracError(f"cannot send a request of {len(line)} bytes: the limit is {MAX_REQUEST_BYTES}")
    return line


def decode_request(line: bytes) -> Request:
    """Raises ProtocolError for anything that is no request; the version is not judged here."""
    try:
        return _requests.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        raise ProtocolError(f"cannot read the request: {exc}") from exc


def encode_result(result: object) -> bytes:
    """A whole line. Raises TypeError for what msgspec can't encode, GpufracError when it is too long."""
    line = b'{"result":' + _encoder.encode(result) + b"}\n"
    if len(line) > MAX_ANSWER_BYTES:
        raise GpufracError(f"cannot send an answer of {len(line)} bytes: the limit is {MAX_ANSWER_BYTES}")
    return line


def encode_failure(code: str, message: str) -> bytes:
    """A whole line. What is no Unicode in the message is replaced."""
    text = message.encode("utf-8", "replace").decode()
    return _encoder.encode({"error": Failure(code, text[: MAX_ANSWER_BYTES // 16])}) + b"\n"


def decode_answer(line: bytes, result_type: type[T]) -> T:
    """The result. Raises what the peer reported: a class of mpsd.errors where the code names one, GpufracError
    otherwise; ProtocolError for anything that is no answer."""
    try:
        answer = _answers.decode(line)
        if answer.error is None:
            return msgspec.json.decode(answer.result, type=result_type)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        raise ProtocolError(f"cannot read the answer: {exc}") from exc
    raise _error(answer.error)


def _error(failure: Failure) -> GpufracError:
    if failure.code == BUSY:
        return TransientError(failure.message)
    known = getattr(errors, failure.code, None)
    if isinstance(known, type) and issubclass(known, GpufracError) and known is not NotReachableError:
        return known(failure.message)
    return GpufracError(failure.message)
