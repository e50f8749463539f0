"""Lists and lines that arrive in pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.kubernetes.errors import NonsenseError
from deviceplugin.kubernetes.jsonstream import Items, Lines

TEXT = st.text(st.sampled_from('ab"\\{}[],:\n\u2028é'), max_size=8) | st.just("items")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)
ENVELOPES = st.dictionaries(TEXT.filter(lambda key: key != "items"), VALUES, max_size=4)


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    cut, at = [], 0
    for size in sizes:
        cut.append(data[at : at + size])
        at += size
    return [*cut, data[at:]]


@given(ENVELOPES, st.lists(OBJECTS, max_size=4), ENVELOPES, st.lists(st.integers(0, 20)), st.booleans(), st.booleans())
def test_a_list_falls_into_the_same_objects_however_it_arrives(
    before: dict[str, Any], objects: list[Any], after: dict[str, Any], sizes: list[int], ascii_only: bool, pretty: bool
) -> None:
    whole = {**before, "items": objects, **after}
    data = json.dumps(whole, ensure_ascii=ascii_only, indent=1 if pretty else None).encode()
    splitter = Items(1 << 20)
    found = [item for piece in pieces(data, sizes) for item in splitter.feed(piece)]
    assert [json.loads(item) for item in found] == objects
    assert json.loads(splitter.envelope) == {**whole, "items": []}


@given(st.binary(max_size=200), st.lists(st.integers(0, 20)))
def test_any_bytes_give_objects_or_the_one_error(data: bytes, sizes: list[int]) -> None:
    splitter = Items(100)
    try:
        for piece in pieces(data, sizes):
            assert all(len(item) <= 100 for item in splitter.feed(piece))
    except NonsenseError:
        pass


@pytest.mark.parametrize(
    "data", [b'{"items":[1,2]}', b'{"items":["a"]}', b'{"items":[{} x {}]}', b'{"items":[null]}', b'{"items":[true']
)
def test_what_is_no_object_never_passes_for_an_empty_list(data: bytes) -> None:
    with pytest.raises(NonsenseError, match="stands between"):
        list(Items(100).feed(data))


def test_neither_an_object_nor_what_is_beside_them_may_be_endless() -> None:
    splitter = Items(1000)
    with pytest.raises(NonsenseError, match="object of more than 1000 bytes"):
        list(splitter.feed(b'{"items":[{"a":"' + b"x" * 1000))
    with pytest.raises(NonsenseError, match="beside its objects"):
        list(Items(1000).feed(b'{"a":"' + b"x" * 70_000))


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b""))), st.lists(st.integers(0, 20)))
def test_lines_are_the_same_however_they_arrive(lines: list[bytes], sizes: list[int]) -> None:
    reader = Lines(100)
    data = b"".join(line + b"\n" for line in lines) + b"half a line"
    found = [line for piece in pieces(data, sizes) for line in reader.feed(piece)]
    assert found == [line.strip() for line in lines if line.strip()]


def test_a_line_may_not_be_endless() -> None:
    reader = Lines(100)
    assert list(reader.feed(b"x" * 100)) == []
    with pytest.raises(NonsenseError, match="line of more than 100 bytes"):
        list(reader.feed(b"x"))
    with pytest.raises(NonsenseError):
        list(Lines(100).feed(b"x" * 101 + b"\n"))
