import pytest

from mpsd.common.errors import GpufracError, ProtocolError, TransientError
from mpsd.common.reason import message_of
from mpsd.config.model import GIB, MpsConfig
from mpsd.daemon.controller import NotAClientError
from mpsd.daemon.controller2 import Controller2
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.plan import DaemonSpec
from tests.unit.mpsd.daemon.fakes import Scripted, refusal

SPEC = DaemonSpec("pair0", ("GPU-a", "GPU-b"), 2, 8 * GIB, daemon_dirs(MpsConfig(), "pair0"), ())
GET, SET = "get_default_device_pinned_mem_limit", "set_default_device_pinned_mem_limit"
GET_SERVER, SET_SERVER = "get_device_pinned_mem_limit", "set_device_pinned_mem_limit"
LIMITS = {f"{GET} 0": "8192M", f"{GET} 1": "8G"}


def test_start_arguments() -> None:
    controller = Controller2(Scripted({}))
    assert controller.start_arguments(SPEC, multiuser=True) == ("-d", "-multiuser-server")
    assert controller.start_arguments(SPEC, multiuser=False) == ("-d",)


def test_the_limit_is_set_and_read_back_on_each_gpu() -> None:
    control = Scripted(LIMITS)
    assert message_of(Controller2(control).configure(SPEC).note) == ""
    assert control.asked == [f"{SET} 0 8192M", f"{GET} 0", f"{SET} 1 8192M", f"{GET} 1", "get_server_list"]


def test_a_running_server_is_set_too_whatever_it_reads() -> None:
    control = Scripted({**LIMITS, "get_server_list": "5\n", f"{GET_SERVER} 5 0": "8G", f"{GET_SERVER} 5 1": "8192M"})
    assert message_of(Controller2(control).configure(SPEC).note) == ""
    assert control.asked[5:] == [
        f"{SET_SERVER} 5 0 8192M", f"{GET_SERVER} 5 0", f"{SET_SERVER} 5 1 8192M", f"{GET_SERVER} 5 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("replies", "error", "text"),
    [
        ({f"{GET} 1": "4G"}, TransientError, "limit 8192M of GPU 1 was set but reads back as 4G"),
        ({f"{GET} 0": ""}, TransientError, "limit 8192M of GPU 0 was set but reads back as none"),
        ({f"{GET} 0": "Unrecognized command\n"}, ProtocolError, "'Unrecognized command': expected a memory limit"),
        ({f"{SET} 1 8192M": TransientError("cannot: late")}, TransientError, "late"),
        ({"get_server_list": "Unrecognized command"}, ProtocolError, "expected a list of PIDs"),
        ({"get_server_list": "5", f"{GET_SERVER} 5 0": "1G"}, TransientError, "limit of the running MPS server 5"),
    ],
)
def test_what_is_not_read_back_is_not_configured(
    replies: dict[str, str | GpufracError], error: type[GpufracError], text: str
) -> None:
    with pytest.raises(error, match=text):
        Controller2(Scripted({**LIMITS, **replies})).configure(SPEC)


def test_a_servers_limit_that_cannot_be_read_is_noted() -> None:
    control = Scripted({**LIMITS, "get_server_list": "5", f"{GET_SERVER} 5 0": "Unrecognized command"})
    note = Controller2(control).configure(SPEC).note
    assert message_of(note).startswith("the limit of the running MPS server 5 is not proven: ")


def test_a_probe_is_one_query_for_each_gpu() -> None:
    control = Scripted(LIMITS)
    assert Controller2(control).probe(SPEC, servers=False) == {}
    assert control.asked == [f"{GET} 0", f"{GET} 1"]
    control.replies[f"{GET} 1"] = "80G"
    with pytest.raises(TransientError, match="limit 8192M of GPU 1 "):
        Controller2(control).probe(SPEC, servers=False)


def test_a_probe_of_servers_names_the_one_with_a_fault() -> None:
    control = Scripted({**LIMITS, "get_server_list": "5\n6", "get_server_status 5": "ACTIVE"})
    for status in ("INITIALIZING", "Server not found", ""):
        control.replies["get_server_status 6"] = status
        Controller2(control).probe(SPEC, servers=True)
    control.replies["get_server_status 6"] = "FAULT\n"
    Controller2(control).probe(SPEC, servers=False)
    with pytest.raises(TransientError, match="cannot rely on MPS server 6: a client's fault"):
        Controller2(control).probe(SPEC, servers=True)


CLIENTS = {
    "get_server_list": "5\n6", "get_client_list 5": "", "get_client_list 6": "70\n71",
}  # fmt: skip


def test_clients_are_those_of_all_servers() -> None:
    clients = Controller2(Scripted(CLIENTS)).clients(SPEC)
    assert (clients.servers, clients.clients) == ((5, 6), (70, 71))


def test_a_client_is_terminated_at_its_server_and_has_time_for_it() -> None:
    control = Scripted({**CLIENTS, "terminate_client 6 71": "0\n"})
    Controller2(control, query_s=1.0).terminate_client(SPEC, 71)
    assert control.asked[-1] == "terminate_client 6 71"
    assert control.timeouts_s == [1.0, 1.0, 1.0, 30.0]


@pytest.mark.parametrize(
    ("reply", "text"), [("1", "cannot terminate MPS client 71: server 6 said 1"), ("", "said nothing")]
)
def test_only_a_zero_says_that_a_client_was_terminated(reply: str, text: str) -> None:
    with pytest.raises(TransientError, match=text):
        Controller2(Scripted({**CLIENTS, "terminate_client 6 71": reply})).terminate_client(SPEC, 71)


def test_only_a_daemon_that_knows_its_clients_says_that_one_is_none() -> None:
    control = Scripted(CLIENTS)
    with pytest.raises(NotAClientError, match="cannot terminate pid 72: it is no client of the MPS daemon of pair0"):
        Controller2(control).terminate_client(SPEC, 72)
    replies = ("0\n71", TransientError("cannot get an answer"), "Server not found")
    for reply in replies:
        control.replies["get_client_list 6"] = reply
        with pytest.raises(GpufracError) as caught:
            Controller2(control).terminate_client(SPEC, 72)
        assert not isinstance(caught.value, NotAClientError)


def test_quit_leaves_servers_half_of_the_time() -> None:
    control = Scripted({"quit -t 5": refusal("Server 5 exited with status 1")})
    with pytest.raises(TransientError, match="exited with status 1"):
        Controller2(control).quit(SPEC, 10.0)
    assert control.timeouts_s == [10.0]
