"""How the emulated daemon answers commands of protocol 2, without processes."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.sim.mps.control2 import Control2, Server2
from mpsd.sim.mps.views import ACTIVE, ClientView, DeviceView, Settings
from mpsd.sim.switches import SWITCHES

UUIDS = ("GPU-aa11", "GPU-bb22")


def default_switch(name: str) -> str:
    return SWITCHES[name][0]


def make(switch: Callable[[str], str] = default_switch, *, floor_g: bool = False) -> Control2:
    devices = [DeviceView(uuid, "Simulated", "") for uuid in UUIDS]
    return Control2(Settings(devices, switch, floor_g=floor_g, command_of=lambda pid: "prog -x"))


def with_server(control: Control2, *pids: int) -> Control2:
    server = Server2(100, 0, dict(control.limits), control.threads)
    server.state = ACTIVE
    server.clients = {number: ClientView(pid, 0) for number, pid in enumerate(pids, 1)}
    control.servers[100] = server
    return control


def reply(control: Control2, line: str) -> str:
    return control.execute(line)[0]


def test_floor_display_of_595() -> None:
    control = make(floor_g=True)
    for value, shown in (("1919M", "1G"), ("1023M", "1023M"), ("8192M", "8G"), ("2G", "2G")):
        reply(control, f"set_default_device_pinned_mem_limit 0 {value}")
        assert reply(control, "get_default_device_pinned_mem_limit 0") == shown


@pytest.mark.parametrize("value", ["0", "-5", "100.1", "nan", "inf", "x", ""])
def test_percentages_out_of_range_are_rejected(value: str) -> None:
    control = make()
    text, actions = control.execute(f"set_default_active_thread_percentage {value}")
    assert (text, actions, control.threads) == ("Invalid argument", [], 100.0)


def test_percentages_out_of_range_are_clamped_by_switch() -> None:
    control = make(lambda name: "clamp" if name == "percentage-range" else default_switch(name))
    assert reply(control, "set_default_active_thread_percentage 250") == "100.0"
    assert reply(control, "set_default_active_thread_percentage 0") == "0.1"
    assert reply(control, "set_default_active_thread_percentage nan") == "Invalid argument"


def test_server_commands_carry_their_effects() -> None:
    control = with_server(make(), 7)
    assert control.execute("shutdown_server 100")[1] == [("drain", 100, "")]
    assert control.execute("shutdown_server 100 -f")[1] == [("exit", 100, "")]
    assert control.execute("terminate_client 100 7")[1] == [("terminate", 100, "7")]
    assert control.execute("set_device_pinned_mem_limit 100 0 1G")[1] == [("send", 100, "limit 0 1073741824")]
    assert control.execute("set_active_thread_percentage 100 40")[0] == "40.0"
    assert control.execute("quit -t 3")[1] == [("quit", 3, "")]
    assert control.execute("quit")[1] == [("quit", -1, "")]
    assert control.execute("start_server -uid 5")[1] == []
    assert make().execute("start_server -uid 5")[1] == [("start", 5, "")]


def test_terminating_no_client_prints_a_number_other_than_0() -> None:
    text, actions = with_server(make()).execute("terminate_client 100 7")
    assert text.isdigit()
    assert text != "0"
    assert actions == []


def test_a_per_server_limit_does_not_touch_the_default() -> None:
    control = make()
    reply(control, "set_default_device_pinned_mem_limit 0 1G")
    with_server(control)
    reply(control, "set_device_pinned_mem_limit 100 0 3G")
    assert reply(control, "get_device_pinned_mem_limit 100 0") == "3G"
    assert reply(control, "get_default_device_pinned_mem_limit 0") == "1G"


def test_lists_and_tables() -> None:
    control = with_server(make(), 7, 8)
    control.servers[100].clients[1].device = UUIDS[0]
    assert reply(control, "get_client_list 100") == "7\n8"
    assert reply(control, "get_device_client_list 100") == f"{UUIDS[0]} 7\n{UUIDS[1]}"
    assert [line.split() for line in reply(control, "ps -p 8").splitlines()[1:]] == [
        ["8", "2", "100", "-", "8", "prog", "-x"]
    ]
    assert reply(control, "device_query --csv").splitlines()[1] == f"0,{UUIDS[0]},Simulated"
    assert reply(control, "get_default_client_priority") == "0 [NORMAL]"
    reply(control, "set_default_client_priority 1")
    assert reply(control, "get_default_client_priority") == "1 [BELOW NORMAL]"


_WORDS = [line.split()[0] for line in reply(make(), "help").splitlines()]


@given(st.sampled_from([*_WORDS, "nonsense"]), st.lists(st.text("0179-xGM.t/", max_size=5), max_size=4))
def test_no_command_breaks_the_daemon(name: str, words: list[str]) -> None:
    for control in (with_server(make(), 7), make()):
        text, actions = control.execute(" ".join((name, *words)))
        assert isinstance(text, str)
        assert isinstance(actions, list)
