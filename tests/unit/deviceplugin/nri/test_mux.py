"""Chunks and streams of bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.nri import mux
from mpsd.common.errors import ProtocolError
from tests.unit.deviceplugin.nri.peers import chunk


def joined(pieces: list[tuple[int, bytes]]) -> dict[int, bytes]:
    streams: dict[int, bytes] = {}
    for connection, piece in pieces:
        streams[connection] = streams.get(connection, b"") + piece
    return streams


def test_a_chunk_is_spelled_as_the_reference_has_it() -> None:
    assert mux.encode(1, b"hello") == b"\x00\x00\x00\x01\x00\x00\x00\x05hello"
    assert mux.encode(2, b"\xff") == b"\x00\x00\x00\x02\x00\x00\x00\x01\xff"


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=8), st.lists(st.integers(0, 400))
)
def test_however_the_bytes_are_cut_the_streams_are_the_same(chunks: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(chunk(connection, payload) for connection, payload in chunks)
    expected = joined([piece for piece in chunks if piece[1]])
    pieces = []
    decoder = mux.Demultiplexer()
    for begin, end in zip(
        marks := sorted({0, len(data), *(c for c in cuts if c < len(data))}), marks[1:], strict=False
    ):
        pieces += decoder.feed(data[begin:end])
    assert joined(pieces) == expected


def test_a_chunk_may_be_as_long_as_the_longest_message_and_no_longer() -> None:
    longest = 4 * 1024 * 1024 + 10
    decoder = mux.Demultiplexer()
    assert decoder.feed(chunk(1, b"x", length=longest)) == [(1, b"x")]
    with pytest.raises(ProtocolError, match=f"chunk of {longest + 1} bytes"):
        mux.Demultiplexer().feed(chunk(1, b"", length=longest + 1))


def test_nothing_is_held_back_but_a_header() -> None:
    decoder = mux.Demultiplexer()
    assert decoder.feed(b"\x00\x00\x00\x01\x00\x00\x00") == []
    assert decoder.feed(b"\x02a") == [(1, b"a")]
    assert decoder.feed(b"b\x00\x00") == [(1, b"b")]


class GoReader:
    """How the Go side reads a message: through a buffer of 4 KiB, from a connection that gives whole chunks only and
    fails on one that is larger than the room it is offered (bufio.Reader over containerd/nri's multiplexed Conn)."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks, self._buffer = chunks, b""

    def _read(self, room: int) -> bytes:
        first = self._chunks.pop(0)
        assert len(first) <= room, "ENOMEM"
        return first

    def read_full(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            left = size - len(data)
            if not self._buffer and left >= 4096:
                data += self._read(left)
                continue
            if not self._buffer:
                self._buffer = self._read(4096)
            data, self._buffer = data + self._buffer[:left], self._buffer[left:]
        return data


@pytest.mark.parametrize("size", [10, 11, 4095, 4096, 4097, 4106, 8191, 8192, 8193, 100_000, 4 * 1024 * 1024 + 10])
def test_the_go_side_can_read_what_we_write(size: int) -> None:
    messages = [bytes([n]) * size for n in range(3)]
    data = b"".join(mux.encode(1, message) for message in messages)
    chunks = []
    while data:
        end = 8 + int.from_bytes(data[4:8], "big")
        chunks.append(data[8:end])
        data = data[end:]
    assert all(len(payload) <= mux.MAX_PAYLOAD_BYTES for payload in chunks)
    reader = GoReader(chunks)
    assert [reader.read_full(10) + reader.read_full(size - 10) for _ in messages] == messages
