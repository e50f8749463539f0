from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.daemon.logs.follow import LINE_BYTES, LineSplitter


@pytest.mark.parametrize(
    ("chunks", "lines", "half"),
    [
        ([b"a\nb\n"], ["a", "b"], ""),
        ([b"a\nb"], ["a"], "b"),
        ([b"a", b"b", b"\nc\n"], ["ab", "c"], ""),
        ([b"\n\n"], ["", ""], ""),
        ([b"a\r\n"], ["a"], ""),
        ([b"\0\0\0a\0\n", b"\0b"], ["a"], "b"),
        ([b"\xff\x1b[2J\xe2\x80\xa8\n"], ["\ufffd\ufffd[2J"], ""),
        ([b"x" * (LINE_BYTES + 5) + b"\nb\n"], ["x" * LINE_BYTES, "b"], ""),
        ([b"x" * LINE_BYTES, b"yy", b"yyy\nb\n"], ["x" * LINE_BYTES, "b"], ""),
        ([b"x" * (1 << 20)] * 3 + [b"\nb"], ["x" * LINE_BYTES], "b"),
    ],
)
def test_lines(chunks: list[bytes], lines: list[str], half: str) -> None:
    splitter = LineSplitter()
    assert [line for chunk in chunks for line in splitter.feed(chunk)] == lines
    assert splitter.half == half
    assert splitter.end() == ([half] if half else [])
    assert splitter.end() == []


def test_after_a_gap_the_next_whole_line_counts() -> None:
    splitter = LineSplitter()
    splitter.feed(b"half")
    splitter.skip()
    assert splitter.feed(b"the rest of another\nwhole\n") == ["whole"]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_chunks_make_no_difference(data: bytes, cuts: list[int]) -> None:
    whole, pieces = LineSplitter(), LineSplitter()
    marks = [0, *sorted(cuts), len(data)]
    lines = [line for start, end in pairwise(marks) for line in pieces.feed(data[start:end])]
    assert lines == whole.feed(data)
    assert pieces.half == whole.half
