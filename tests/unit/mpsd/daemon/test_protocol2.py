import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.common.errors import ProtocolError
from mpsd.daemon import protocol2
from mpsd.gpu.model import MIB

GIB = 1024 * MIB


def test_commands() -> None:
    assert protocol2.set_default_limit(0, 8 * GIB + MIB + 5) == "set_default_device_pinned_mem_limit 0 8193M"
    assert protocol2.get_default_limit(1) == "get_default_device_pinned_mem_limit 1"
    assert protocol2.set_server_limit(7, 1, GIB) == "set_device_pinned_mem_limit 7 1 1024M"
    assert protocol2.get_server_limit(7, 1) == "get_device_pinned_mem_limit 7 1"
    assert protocol2.get_status(7) == "get_server_status 7"
    assert protocol2.terminate_client(7, 8) == "terminate_client 7 8"
    assert protocol2.get_clients(7) == "get_client_list 7"
    assert protocol2.quit_after(5) == "quit -t 5"
    assert protocol2.start_server(0) == "start_server -uid 0"


@pytest.mark.parametrize(("reply", "pids"), [("", ()), ("\n", ()), ("12\n34\n", (12, 34)), (" 12 \n\n", (12,))])
def test_pids(reply: str, pids: tuple[int, ...]) -> None:
    assert protocol2.parse_pids(reply) == pids


@pytest.mark.parametrize("reply", ["Server not found", "12 34", "-1", "1.0", "99999999999", "²"])
def test_no_pids(reply: str) -> None:
    with pytest.raises(ProtocolError, match="expected a list of PIDs"):
        protocol2.parse_pids(reply)


@pytest.mark.parametrize(
    ("reply", "size_bytes", "same"),
    [
        ("8192M\n", 8 * GIB, True),
        ("8G", 8 * GIB, True),
        ("8G", 8 * GIB + 511 * MIB, True),  # the documented rounding
        ("8191M", 8 * GIB, False),
        ("9G", 8 * GIB, False),
        ("7G", 8 * GIB, False),
        ("512M", 512 * MIB, True),
        ("0G", 512 * MIB, False),
        ("8G", 8 * MIB, False),
    ],
)
def test_limit_read_back(reply: str, size_bytes: int, same: bool) -> None:
    assert protocol2.limit_is(reply, size_bytes) is same


@pytest.mark.parametrize("reply", ["", "0", "8", "8MB", "8 G", "8g", "-8G", "8G\n8G", "Invalid argument"])
def test_no_limit(reply: str) -> None:
    with pytest.raises(ProtocolError, match="expected a memory limit"):
        protocol2.limit_is(reply, 8 * GIB)


@pytest.mark.parametrize(("reply", "fault"), [("FAULT\n", True), ("ACTIVE", False), ("", False), ("no FAULT", False)])
def test_fault(reply: str, fault: bool) -> None:
    assert protocol2.is_fault(reply) is fault


@pytest.mark.parametrize(("reply", "starting"), [("INITIALIZING\n", True), ("ACTIVE", False), ("", False)])
def test_starting(reply: str, *, starting: bool) -> None:
    assert protocol2.is_starting(reply) is starting


@pytest.mark.parametrize(("reply", "done"), [("0\n", True), ("1", False), ("", False), ("00", False), ("0\n0", False)])
def test_terminated(reply: str, done: bool) -> None:
    assert protocol2.is_terminated(reply) is done


@given(st.one_of(st.text(), st.binary().map(lambda b: b.decode(errors="replace"))))
def test_any_reply_is_a_value_or_a_protocol_error(reply: str) -> None:
    for parse in (protocol2.parse_pids, lambda text: protocol2.limit_is(text, GIB)):
        with contextlib.suppress(ProtocolError):
            parse(reply)


@given(st.integers(1, 2**24))
def test_what_is_set_reads_back_as_set_or_rounded(mib: int) -> None:
    word = protocol2.set_default_limit(0, mib * MIB).split()[-1]
    assert protocol2.limit_is(word, mib * MIB)
    if mib >= 1024:
        assert protocol2.limit_is(f"{mib // 1024}G", mib * MIB)
