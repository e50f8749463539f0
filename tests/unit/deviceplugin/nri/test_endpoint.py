"""Calls both ways over one socket, and peers that break the rules."""

import pytest

from deviceplugin.nri.endpoint import Endpoint, Received
from deviceplugin.nri.ttrpc import Answer, Code, Request
from mpsd.common.errors import ProtocolError
from tests.unit.deviceplugin.nri.peers import chunk, whole_frame

CALL = b"\x0a\x01s\x12\x01m"


def plugin() -> Endpoint:
    return Endpoint(serves=1, calls=2)


def runtime() -> Endpoint:
    return Endpoint(serves=2, calls=1)


def objection(received: Received) -> Answer:
    """The one answer that was sent back though nothing was asked."""
    assert not received.requests
    peer = runtime()
    (answer,) = peer.feed(bytes(received.replies)).answers
    return answer


def test_calls_go_both_ways() -> None:
    ours, theirs = plugin(), runtime()
    stream, data = ours.request("svc", "Register", b"me")
    assert (stream, theirs.feed(data).requests) == (1, [Request(1, "svc", "Register", b"me")])
    assert ours.feed(theirs.answer(Answer(1, b"fine"))).answers == [Answer(1, b"fine")]
    first, data = theirs.request("svc", "Configure", b"", 2.0)
    second, more = theirs.request("svc", "Synchronize", b"")
    assert (first, second) == (1, 3)
    assert [request.method for request in ours.feed(data + more).requests] == ["Configure", "Synchronize"]
    assert theirs.feed(ours.answer(Answer(3)) + ours.answer(Answer(1, code=9, text="no"))).answers == [
        Answer(3),
        Answer(1, code=9, text="no"),
    ]


def test_one_message_may_span_chunks_and_one_chunk_hold_several() -> None:
    first, second = whole_frame(1, 1, CALL), whole_frame(3, 1, CALL)
    split = b"".join(chunk(1, first[at : at + 1]) for at in range(len(first)))
    assert [r.stream for r in plugin().feed(split + chunk(1, second)).requests] == [1, 3]
    assert [r.stream for r in plugin().feed(chunk(1, first + second)).requests] == [1, 3]
    assert [r.stream for r in plugin().feed(chunk(1, first + second[:5]) + chunk(1, second[5:])).requests] == [1, 3]


def test_chunks_of_the_two_connections_may_alternate() -> None:
    asked, answered = whole_frame(1, 1, CALL), whole_frame(1, 2, b"\x12\x01x")
    received = plugin().feed(
        chunk(1, asked[:9]) + chunk(2, answered[:3]) + chunk(1, asked[9:]) + chunk(2, answered[3:])
    )
    assert received.requests == [Request(1, "s", "m")]
    assert received.answers == [Answer(1, b"x")]


@pytest.mark.parametrize("connection", [0, 3, 2**32 - 1])
def test_what_is_on_no_connection_of_ours_counts_for_nothing(connection: int) -> None:
    endpoint = plugin()
    received = endpoint.feed(chunk(connection, whole_frame(1, 1, CALL)) + chunk(1, whole_frame(1, 1, CALL)))
    assert (len(received.requests), bytes(received.replies)) == (1, b"")


@pytest.mark.parametrize(
    ("frame", "code", "text"),
    [
        (whole_frame(2, 1, CALL), Code.INVALID_ARGUMENT, "even stream"),
        (whole_frame(1, 3, b"data"), Code.INVALID_ARGUMENT, "no such stream is open"),
        (whole_frame(1, 1, b"\xff\xff"), Code.INVALID_ARGUMENT, "cannot read the request"),
        (whole_frame(1, 1, length=5_000_000), Code.RESOURCE_EXHAUSTED, "5000000 bytes"),
    ],
)
def test_a_frame_that_is_no_call_is_answered_with_an_error_and_the_link_goes_on(
    frame: bytes, code: Code, text: str
) -> None:
    endpoint = plugin()
    answer = objection(endpoint.feed(chunk(1, frame)))
    assert (answer.code, text in answer.text) == (code, True)
    if code is not Code.RESOURCE_EXHAUSTED:  # after that one, 5 MB are skipped first
        assert endpoint.feed(chunk(1, whole_frame(11, 1, CALL))).requests == [Request(11, "s", "m")]


def test_a_stream_number_is_taken_once_and_only_upwards() -> None:
    endpoint = plugin()
    assert len(endpoint.feed(chunk(1, whole_frame(5, 1, CALL))).requests) == 1
    for stream in (5, 3):
        assert objection(endpoint.feed(chunk(1, whole_frame(stream, 1, CALL)))).stream == stream
    assert len(endpoint.feed(chunk(1, whole_frame(7, 1, CALL))).requests) == 1


def test_frames_of_unknown_kinds_and_responses_nobody_asked_for_count_for_nothing() -> None:
    received = plugin().feed(chunk(1, whole_frame(1, 2) + whole_frame(1, 9) + whole_frame(3, 0)))
    assert received == Received()
    assert plugin().feed(chunk(2, whole_frame(1, 1, CALL) + whole_frame(1, 77))) == Received()


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (whole_frame(1, 2, b"\xff"), Code.INTERNAL),
        (whole_frame(1, 3, b"x"), Code.INTERNAL),
        (whole_frame(1, 2, length=5_000_000), Code.RESOURCE_EXHAUSTED),
    ],
)
def test_what_is_no_answer_fails_the_call(frame: bytes, code: Code) -> None:
    (answer,) = plugin().feed(chunk(2, frame)).answers
    assert (answer.stream, answer.code) == (1, code)


def test_a_chunk_that_is_too_long_ends_it() -> None:
    with pytest.raises(ProtocolError, match="chunk of 4294967295 bytes"):
        plugin().feed(chunk(1, b"", length=2**32 - 1))


def test_an_answer_that_is_too_long_becomes_an_error() -> None:
    (answer,) = runtime().feed(plugin().answer(Answer(1, bytes(5_000_000)))).answers
    assert (answer.code, "cannot send a message of" in answer.text) == (Code.RESOURCE_EXHAUSTED, True)


def test_memory_stays_bounded_when_a_message_never_ends() -> None:
    endpoint = plugin()
    endpoint.feed(chunk(1, whole_frame(1, 1, length=4 * 1024 * 1024), length=mux_max()))
    for _ in range(60):
        endpoint.feed(bytes(1 << 16))
    assert len(endpoint._frames[1]._buffer) < 4 * 1024 * 1024 + 11
    oversized = plugin()
    oversized.feed(chunk(1, whole_frame(1, 1, length=2**32 - 1), length=mux_max()))
    for _ in range(60):
        oversized.feed(bytes(1 << 16))
    assert len(oversized._frames[1]._buffer) == 0


def mux_max() -> int:
    return 4 * 1024 * 1024 + 10
