"""The local API's lines."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.common.errors import ConfigError, GpufracError, NotReachableError, ProtocolError, TransientError
from mpsd.localapi import wire
from mpsd.localapi.snapshot import Desired
from tests.desired import allocation

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(min_value=-(2**63), max_value=2**64 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(method=st.text(), params=st.dictionaries(st.text(), JSON, max_size=4))
def test_requests_round_trip_on_one_line(method: str, params: dict[str, Any]) -> None:
    line = wire.encode_request(method, params)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert wire.decode_request(line[:-1]) == wire.Request(wire.VERSION, method, params)


@given(JSON)
def test_results_round_trip(result: object) -> None:
    line = wire.encode_result(result)
    assert line.count(b"\n") == 1
    decoded: object = wire.decode_answer(line[:-1], object)
    assert decoded == result


def test_typed_values_round_trip() -> None:
    desired = Desired(allocations=(allocation("GPU-a"),))
    assert wire.decode_answer(wire.encode_result(desired)[:-1], Desired) == desired


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_protocol_error(line: bytes) -> None:
    with suppress(ProtocolError):
        wire.decode_request(line)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_a_known_error(line: bytes) -> None:
    with suppress(GpufracError):
        wire.decode_answer(line, dict)


@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"a":' * 100_000])
def test_deep_nesting_is_a_protocol_error(deep: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_request(b'{"v":1,"method":"m","params":{"x":' + deep)
    with pytest.raises(ProtocolError):
        wire.decode_answer(b'{"result":' + deep, object)


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b'{"v":"1","method":"m"}', b'{"v":1,"method":"m","params":[]}'])
def test_malformed_requests(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot read the request: "):
        wire.decode_request(line)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ConfigError", ConfigError),
        ("TransientError", TransientError),
        ("busy", TransientError),
        ("denied", GpufracError),
        ("GpuError", GpufracError),
        ("NotReachableError", GpufracError),  # the process that said so was reached
        ("__doc__", GpufracError),
        ("", GpufracError),
    ],
)
def test_codes_name_classes(code: str, expected: type[GpufracError]) -> None:
    with pytest.raises(GpufracError, match="cannot do it") as caught:
        wire.decode_answer(wire.encode_failure(code, "cannot do it"), object)
    assert type(caught.value) is expected
    assert not isinstance(caught.value, NotReachableError)


def test_messages_of_any_text_are_sent() -> None:
    with pytest.raises(GpufracError, match="cannot read a"):
        wire.decode_answer(wire.encode_failure("x", "cannot read a\udcff\n"), object)


def test_limits() -> None:
    with pytest.raises(GpufracError, match="cannot send a request"):
        wire.encode_request("m", {"x": "y" * wire.MAX_REQUEST_BYTES})
    with pytest.raises(GpufracError, match="cannot send an answer"):
        wire.encode_result("y" * wire.MAX_ANSWER_BYTES)
    assert len(wire.encode_failure("x", "y" * wire.MAX_ANSWER_BYTES)) < wire.MAX_ANSWER_BYTES
