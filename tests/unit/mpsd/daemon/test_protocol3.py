import contextlib
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.common.errors import ProtocolError
from mpsd.daemon import protocol3
from mpsd.daemon.namespaces import Namespace
from mpsd.daemon.protocol3 import NamespaceRow
from mpsd.gpu.model import MIB

GIB = 1024 * MIB


def row(limit: str, percent: str = "100.00") -> NamespaceRow:
    return NamespaceRow("a", "Ready", limit, percent)


def test_the_config_file_has_what_r615_knows_and_nothing_else() -> None:
    text = protocol3.config([Namespace("gpu_8gi_0", 8 * GIB + 5, 30), Namespace("u_1", 512 * MIB)])
    assert tomllib.loads(text) == {
        "features": {
            "memacct": {"enabled": True},
            "context-share": {"enabled": True, "default_socket": "off"},
        },
        "servers": {
            "s": {
                "pinned_memory_limit": "64M",
                "active_thread_percentage": "1",
                "namespaces": {
                    "gpu_8gi_0": {"pinned_memory_limit": "8192M", "active_thread_percentage": "30"},
                    "u_1": {"pinned_memory_limit": "512M", "active_thread_percentage": "100"},
                },
            }
        },
    }


def test_a_namespace_is_found_in_the_file_as_it_is_and_not_otherwise() -> None:
    text = protocol3.config([Namespace("a", GIB), Namespace("ab", 2 * GIB, 10)])
    assert protocol3.table(Namespace("a", GIB)) in text
    for other in (Namespace("a", GIB, 10), Namespace("a", GIB + MIB), Namespace("b", 2 * GIB, 10)):
        assert protocol3.table(other) not in text


def test_commands() -> None:
    assert protocol3.create("a") == ("namespace", "create", "a", "--server=s")
    assert protocol3.set_limits(Namespace("a", GIB, 25)) == (
        "namespace", "set", "a", "--server=s", "--pinned-memory-limit=1024M", "--active-thread-percentage=25",
    )  # fmt: skip
    assert "--active-thread-percentage=100" in protocol3.set_limits(Namespace("a", GIB))
    assert protocol3.delete("a") == ("namespace", "delete", "a", "--server=s")
    assert protocol3.terminate_client(7) == ("client", "terminate", "7")


NAMESPACES = [
    pytest.param("a,s,Ready,20G,30.00\ndefault,s,Ready,64M,1.00\n", id="the five columns of the table on 615"),
    pytest.param("a,s,Ready,20G,30.00,0,/run/x/s/a\ndefault,s,Ready,64M,1.00,0,/run/x/s\n", id="all documented ones"),
    pytest.param("a,s,Ready,20G,30.00,0,/p,new,newer\r\ndefault,s,Ready,64M,1.00\r\n", id="more to come, CRLF"),
    pytest.param(
        "Warning: a notice, with commas\nname,server,server-status,pinned-memory-limit,active-thread-percentage\n\n"
        'a, s,"Ready", 20G , 30.00\ndefault,s,Ready,64M,1.00\n',
        id="lines before it, a header all the same, blanks, quotes",
    ),
    pytest.param("b,other,Ready,1G,2.00\na,s,Ready,20G,30.00\ndefault,s,Ready,64M,1.00", id="another server's too"),
]


@pytest.mark.parametrize("reply", NAMESPACES)
def test_namespaces(reply: str) -> None:
    assert protocol3.parse_namespaces(reply) == {
        "a": NamespaceRow("a", "Ready", "20G", "30.00"),
        "default": NamespaceRow("default", "Ready", "64M", "1.00"),
    }


@pytest.mark.parametrize("reply", ["", "\n", "No namespaces", "a,s,Ready,20G", "../x,s,Ready,20G,30.00", '"', "a\0b,s"])
def test_no_namespaces(reply: str) -> None:
    assert protocol3.parse_namespaces(reply) == {}


@pytest.mark.parametrize(
    ("reply", "pids"),
    [
        ("", ()),
        ("training,1000,48201,Ready,/run/nvidia-mps/training,GPU-abcd-1234,-\n", (48201,)),  # MPS v3 interface, r615
        ('s,0,7,Ready,/p,"GPU-1,GPU-2",-\nuid_5,5,8,Ready,/p,GPU-1,-', (7, 8)),
        ("s,0,7,Ready,/p,GPU-1,GPU-2,-", (7,)),  # an unquoted list of devices
        ("name,uid,pid,status\ns,0,-,Ready,/p,-,-", ()),
    ],
)
def test_servers(reply: str, pids: tuple[int, ...]) -> None:
    assert protocol3.parse_servers(reply) == pids


@pytest.mark.parametrize(
    ("reply", "pids"),
    [
        ("", ()),
        ("No clients\n", ()),
        # captured on 615, and the documented sample
        ("3167082,srv,GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d,srv/default (0),VLLM::EngineCore\n", (3167082,)),
        ("51023,training,0,default,python train.py", (51023,)),
        ("PID,SERVER,DEVICE,MAWS NS,CMD\n1,s,0,a,x\n1,s,1,a,x\n2,s,0,b,y", (1, 2)),
        ('1,s,0,a,say "hi\n2,s,0,b,"unbalanced\n3,s,0,c,x,y,z', (1, 2, 3)),
        ("1,s,0,a,x\ry\n2,s,0,b," + "z" * 200_000, (1, 2)),  # what the csv module refuses
        ("0,s,0,a,outside of the host's PID namespace", (0,)),
    ],
)
def test_clients(reply: str, pids: tuple[int, ...]) -> None:
    assert protocol3.parse_clients(reply) == pids


@pytest.mark.parametrize("reply", ["316...,s,GPU-1,a,python", "1,s,0,a,x\n,s,0,a,y", "-1,s,0,a,x", "²,s,0,a,x"])
def test_a_client_without_a_pid_is_never_overlooked(reply: str) -> None:
    with pytest.raises(ProtocolError, match="list of clients"):
        protocol3.parse_clients(reply)


@pytest.mark.parametrize(
    ("limit", "size_bytes", "same"),
    [
        ("8192M", 8 * GIB, True),
        ("8G", 8 * GIB, True),
        ("8388608K", 8 * GIB, True),
        ("8GiB", 8 * GIB, True),
        ("8G", 8 * GIB + 511 * MIB, True),  # the documented rounding
        ("8191M", 8 * GIB, False),
        ("8M", 8 * GIB + 511, False),
        ("7G", 8 * GIB, False),
        ("9G", 8 * GIB, False),
        ("0G", 512 * MIB, False),
        ("unlimited", 8 * GIB, False),
        ("", 8 * GIB, False),
        ("8", 8 * GIB, False),
        ("-8G", 8 * GIB, False),
    ],
)
def test_limit_read_back(limit: str, size_bytes: int, same: bool) -> None:
    assert protocol3.has_limits(row(limit), Namespace("a", size_bytes)) is same


@pytest.mark.parametrize(
    ("percent", "wanted", "same"),
    [
        ("30.00", 30, True),
        ("30", 30, True),
        ("30.0%", 30, True),
        ("100.00", None, True),
        ("30.50", 30, False),
        ("3.00", 30, False),
        ("30.00", None, False),
        ("-", None, False),
        ("nan", 30, False),
    ],
)
def test_percentage_read_back(percent: str, wanted: int | None, same: bool) -> None:
    assert protocol3.has_limits(row("1G", percent), Namespace("a", GIB, wanted)) is same


@given(st.integers(1, 2**24), st.one_of(st.none(), st.integers(1, 100)))
def test_what_is_set_reads_back_as_set_or_rounded(mib: int, percent: int | None) -> None:
    namespace = Namespace("a", mib * MIB, percent)
    limit, threads = (word.partition("=")[2] for word in protocol3.set_limits(namespace)[-2:])
    for shown in (limit, f"{mib * 1024}K", *([f"{mib // 1024}G"] if mib >= 1024 else [])):
        (back,) = protocol3.parse_namespaces(f"a,s,Ready,{shown},{float(threads):.2f}").values()
        assert protocol3.has_limits(back, namespace)
        assert protocol3.has_limits(back, Namespace("a", (mib + 1) * MIB, percent)) is (
            not protocol3.is_exact(back) and (mib + 1) % 1024 != 0
        )


@given(st.one_of(st.text(), st.binary().map(lambda b: b.decode(errors="replace"))))
def test_any_reply_is_a_value_or_a_protocol_error(reply: str) -> None:
    for parse in (protocol3.parse_namespaces, protocol3.parse_servers, protocol3.parse_clients):
        with contextlib.suppress(ProtocolError):
            parse(reply)


@pytest.mark.parametrize(
    ("status", "fault"), [("FAULT", True), ("Fault", True), ("Ready", False), ("INITIALIZING", False), ("", False)]
)
def test_fault(status: str, fault: bool) -> None:
    assert protocol3.is_fault(status) is fault


@pytest.mark.parametrize(
    ("name", "valid"), [("a", True), ("a_1", True), ("x" * 64, True), ("x" * 65, False), ("", False), ("A", False),
                        ("a-b", False), ("../a", False), ("a\n", False), ("é", False)]
)  # fmt: skip
def test_names(name: str, valid: bool) -> None:
    assert protocol3.is_name(name) is valid


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("Modules:\n  server     manage servers\n  namespace  manage namespaces\n", True),
        ("server, namespace, client", True),
        ("usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server]\n  namespace", False),
        ("server only", False),
        ("", None),
    ],
)
def test_help(text: str, offered: bool | None) -> None:
    assert protocol3.is_offered(text, 1) is offered


@pytest.mark.parametrize(("version", "major"), [("615.71.09", 615), ("615", 615), ("", 0), ("x.1", 0), ("²", 0)])
def test_driver_major(version: str, major: int) -> None:
    assert protocol3.driver_major(version) == major
