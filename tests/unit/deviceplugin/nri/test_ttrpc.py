"""Frames, requests and answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.nri import ttrpc
from deviceplugin.nri.ttrpc import Answer, Code, Frame, FrameDecoder, FrameKind, Request
from mpsd.common.errors import ProtocolError
from tests.unit.deviceplugin.nri.peers import whole_frame

# Spelled by hand from the reference: length, stream, kind, flags; then protobuf field by field.
REQUEST = (
    b"\x00\x00\x00\x13\x00\x00\x00\x03\x01\x00"
    b"\x0a\x03svc"  # 1: service
    b"\x12\x04Meth"  # 2: method
    b"\x1a\x02ab"  # 3: payload
    b"\x20\xc0\x84\x3d"  # 4: timeout, a million ns
)
ANSWER = b"\x00\x00\x00\x04\x00\x00\x00\x03\x02\x00\x12\x02ok"
REFUSAL = b"\x00\x00\x00\x08\x00\x00\x00\x03\x02\x00\x0a\x06\x08\x09\x12\x02no"


def only(data: bytes) -> Frame:
    (frame,) = FrameDecoder().feed(data)
    return frame


def test_messages_are_spelled_as_the_reference_has_them() -> None:
    assert ttrpc.encode_request(Request(3, "svc", "Meth", b"ab", 0.001)) == REQUEST
    assert ttrpc.encode_answer(Answer(3, b"ok")) == ANSWER
    assert ttrpc.encode_answer(Answer(3, code=Code.FAILED_PRECONDITION, text="no")) == REFUSAL


def test_messages_are_read_as_the_reference_has_them() -> None:
    assert ttrpc.decode_request(only(REQUEST)) == Request(3, "svc", "Meth", b"ab", 0.001)
    assert ttrpc.decode_answer(only(ANSWER)) == Answer(3, b"ok")
    assert ttrpc.decode_answer(only(REFUSAL)) == Answer(3, code=9, text="no")


def test_fields_that_we_do_not_know_are_skipped() -> None:
    assert ttrpc.decode_answer(Frame(1, 2, b"\x12\x02ok\x7a\x01x")) == Answer(1, b"ok")
    assert ttrpc.decode_request(Frame(1, 1, b"\x0a\x01s\x2a\x04\x0a\x02kk")) == Request(1, "s", "")


def test_a_timeout_of_the_past_counts_as_none() -> None:
    assert ttrpc.decode_request(Frame(1, 1, b"\x20" + b"\xff" * 9 + b"\x01")).timeout_s == 0


@pytest.mark.parametrize("payload", [b"\xff", b"\x0a\x05abc", b"\x0a\x02\xff\xfe"])
def test_what_is_no_message_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot read the request"):
        ttrpc.decode_request(Frame(1, 1, payload))
    if payload != b"\x0a\x02\xff\xfe":  # there it is a status with a field that we don't know
        with pytest.raises(ProtocolError, match="cannot read the response"):
            ttrpc.decode_answer(Frame(1, 2, payload))


frames = st.builds(Frame, st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(max_size=60))


@settings(deadline=None)
@given(st.lists(frames, max_size=8), st.lists(st.integers(0, 500)))
def test_however_the_bytes_are_cut_the_frames_are_the_same(expected: list[Frame], cuts: list[int]) -> None:
    data = b"".join(whole_frame(frame.stream, frame.kind, frame.payload) for frame in expected)
    decoder, got = FrameDecoder(), []
    for begin, end in zip(
        marks := sorted({0, len(data), *(c for c in cuts if c < len(data))}), marks[1:], strict=False
    ):
        got += decoder.feed(data[begin:end])
    assert got == expected


@pytest.mark.parametrize("size", [1, 7, 4096, 10**6])
def test_a_frame_that_is_too_long_is_told_at_once_and_its_bytes_are_skipped(size: int) -> None:
    length = 4 * 1024 * 1024 + 1
    data = whole_frame(5, 1, length=length) + bytes(length) + whole_frame(7, 1, b"next")
    decoder, got = FrameDecoder(), decoder_feed(FrameDecoder(), whole_frame(5, 1, length=length))
    assert got == [Frame(5, 1, oversized_bytes=length)]
    assert decoder_feed(decoder, data, size) == [Frame(5, 1, oversized_bytes=length), Frame(7, 1, b"next")]


def decoder_feed(decoder: FrameDecoder, data: bytes, size: int = 10**9) -> list[Frame]:
    step = max(size, 1 << 12)
    first = [data[:size], *(data[begin : begin + step] for begin in range(size, len(data), step))]
    return [frame for piece in first for frame in decoder.feed(piece)]


def test_a_message_may_be_4_mib_and_no_longer() -> None:
    payload = bytes(4 * 1024 * 1024)
    assert len(only(whole_frame(1, 1, payload)).payload) == len(payload)
    with pytest.raises(ProtocolError, match="cannot send a message of 4194305 bytes"):
        ttrpc.encode_frame(1, FrameKind.REQUEST, payload + b"x")


def test_a_text_is_cut_and_always_sendable() -> None:
    answer = ttrpc.decode_answer(only(ttrpc.encode_answer(Answer(1, code=13, text="\ud800" + "x" * 5000))))
    assert answer.text.startswith("?x")
    assert len(answer.text) == ttrpc.MAX_TEXT
