"""The contract of `nvidia-cuda-mps-control`, protocol 2, at its command line: one documented fact, one test.

Runs on the emulator; with GPUFRAC_MPS_BINARY on that binary (as root, on a node with a GPU). Sources: nvidia-cuda-mps-
control(1), 'Legacy MPS v2 Interface' r615, 'Architecture' r615, public logs of drivers 535 to 595.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.mps import Mps, alive, real_or_emulator
from tests.waiting import WAIT_S, until

LIMIT = re.compile(r"\d+[GM]")
UUID = "GPU-51000000-0000-4000-8000-000000000000"


@pytest.fixture
def mps(short_tmp: Path) -> Iterator[Mps]:
    with real_or_emulator(short_tmp) as mps:
        yield mps


@pytest.fixture
def daemon(mps: Mps) -> Mps:
    mps.start()
    return mps


# Start and front-end


def test_without_a_daemon_the_front_end_says_so_and_fails(mps: Mps) -> None:
    done = mps.run(text="get_server_list\n")
    assert done.returncode == 1
    assert "Cannot find MPS control daemon process" in done.stdout + done.stderr


def test_start_returns_when_the_daemon_listens(mps: Mps) -> None:
    mps.start()
    assert mps.ask("get_default_active_thread_percentage") == "100.0\n"


def test_the_pid_file_names_the_daemon_in_a_process_group_of_its_own(daemon: Mps) -> None:
    assert alive(daemon.pid())
    assert os.getpgid(daemon.pid()) not in (os.getpgrp(), 0)
    assert Path(f"/proc/{daemon.pid()}/environ").read_bytes().count(f"CUDA_MPS_PIPE_DIRECTORY={daemon.pipe}\0".encode())


def test_the_daemon_holds_no_stdio_of_its_caller(daemon: Mps) -> None:
    assert {os.readlink(f"/proc/{daemon.pid()}/fd/{n}") for n in (0, 1, 2)} == {"/dev/null"}


def test_a_second_daemon_is_refused_and_the_first_lives(daemon: Mps) -> None:
    pid = daemon.pid()
    done = daemon.run("-d")
    assert done.returncode == 1
    assert "An instance of this daemon is already running" in done.stdout + done.stderr
    assert daemon.pid() == pid
    assert daemon.ask("get_server_list") == ""


def test_a_killed_daemon_leaves_its_files_and_a_new_one_starts_once_they_are_cleared(daemon: Mps) -> None:
    pid = daemon.pid()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), "the daemon's end")
    assert (daemon.pipe / "control").is_socket()
    assert daemon.run(text="get_server_list\n").returncode == 1
    (daemon.pipe / "control").unlink()
    assert daemon.start() != pid


def test_a_socket_path_over_107_bytes_leaves_no_daemon(mps: Mps) -> None:
    pipe = str(mps.root / ("p" * 100))
    mps.run("-d", CUDA_MPS_PIPE_DIRECTORY=pipe)
    done = mps.run(text="get_server_list\n", CUDA_MPS_PIPE_DIRECTORY=pipe)
    assert done.returncode == 1
    assert "Cannot find MPS control daemon process" in done.stdout + done.stderr


def test_commands_are_answered_in_order_without_framing(daemon: Mps) -> None:
    done = daemon.run(
        text="set_default_active_thread_percentage 10\n\nget_default_active_thread_percentage\nget_server_list\n"
    )
    assert (done.returncode, done.stdout) == (0, "10.0\n10.0\n")


@pytest.mark.parametrize(
    "command",
    [
        "no_such_command",
        "get_server_status 1",
        "get_server_status x",
        "get_client_list",
        "set_default_device_pinned_mem_limit 0 12Q",
        "set_default_active_thread_percentage many",
    ],
)
def test_a_rejected_command_exits_0_with_its_text_on_stdout(daemon: Mps, command: str) -> None:
    done = daemon.run(text=command + "\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_control_log_has_the_documented_lines(daemon: Mps) -> None:
    daemon.ask("get_server_list")
    until(lambda: "UI closed" in daemon.control_log(), "the end of the front-end in the log")
    line = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} Control\s+(\d+)\] (.+)")
    matches = [line.fullmatch(text) for text in daemon.control_log().splitlines()]
    assert all(matches)
    messages = [match[2] for match in matches if match]
    assert {int(match[1]) for match in matches if match} == {daemon.pid()}
    assert f"Starting control daemon using socket {daemon.pipe}/control" in messages
    assert messages.index("NEW UI") < messages.index("UI closed")


# Thread percentage and memory limits


def test_thread_percentage_echoes_one_decimal(daemon: Mps) -> None:
    assert daemon.ask("set_default_active_thread_percentage 33") == "33.0\n"
    assert daemon.ask("get_default_active_thread_percentage") == "33.0\n"


def test_thread_percentage_of_one_server_is_apart_from_the_default(daemon: Mps) -> None:
    daemon.ask(f"start_server -uid {os.getuid()}")
    server = daemon.wait_server()
    daemon.ask(f"set_active_thread_percentage {server} 40")
    assert daemon.ask(f"get_active_thread_percentage {server}") == "40.0\n"
    assert daemon.ask("get_default_active_thread_percentage") == "100.0\n"


def test_no_limit_by_default(daemon: Mps) -> None:
    assert not LIMIT.search(daemon.ask("get_default_device_pinned_mem_limit 0"))


@pytest.mark.parametrize("value", ["512M", "1G", "8192M"])
def test_a_limit_reads_back_as_set_or_rounded_down_to_g(daemon: Mps, value: str) -> None:
    daemon.ask(f"set_default_device_pinned_mem_limit 0 {value}")
    size_mib = int(value[:-1]) * (1024 if value.endswith("G") else 1)
    reply = daemon.ask("get_default_device_pinned_mem_limit 0").strip()
    assert reply in (f"{size_mib}M", f"{size_mib // 1024}G")


def test_ordinal_and_uuid_are_separate_keys_and_not_validated(daemon: Mps) -> None:
    daemon.ask(f"set_default_device_pinned_mem_limit {UUID} 512M")
    daemon.ask("set_default_device_pinned_mem_limit 77 256M")
    assert daemon.ask(f"get_default_device_pinned_mem_limit {UUID}") == "512M\n"
    assert daemon.ask("get_default_device_pinned_mem_limit 77") == "256M\n"
    assert not LIMIT.search(daemon.ask("get_default_device_pinned_mem_limit 0"))


def test_defaults_are_lost_on_quit(daemon: Mps) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 512M")
    daemon.ask("set_default_active_thread_percentage 10")
    assert daemon.run(text="quit\n").returncode == 0
    daemon.start()
    assert not LIMIT.search(daemon.ask("get_default_device_pinned_mem_limit 0"))
    assert daemon.ask("get_default_active_thread_percentage") == "100.0\n"


def test_the_environment_sets_the_defaults(mps: Mps) -> None:
    mps.start(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=512M", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="25")
    assert mps.ask("get_default_device_pinned_mem_limit 0") == "512M\n"
    assert mps.ask("get_default_active_thread_percentage") == "25.0\n"


# Servers


def test_no_server_until_one_is_asked_for(daemon: Mps) -> None:
    assert daemon.ask("get_server_list") == ""


def test_start_server_gives_a_child_in_the_daemons_process_group(daemon: Mps) -> None:
    daemon.ask(f"start_server -uid {os.getuid()}")
    server = daemon.wait_server()
    assert os.getpgid(server) == os.getpgid(daemon.pid())
    assert b"nvidia-cuda-mps-server" in Path(f"/proc/{server}/cmdline").read_bytes()
    assert (daemon.log / "server.log").read_text().count("Server has started") == 1


def test_limits_of_one_server_may_exceed_the_default(daemon: Mps) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 512M")
    daemon.ask(f"start_server -uid {os.getuid()}")
    server = daemon.wait_server()
    daemon.ask(f"set_device_pinned_mem_limit {server} 0 768M")
    assert daemon.ask(f"get_device_pinned_mem_limit {server} 0") == "768M\n"
    assert daemon.ask("get_default_device_pinned_mem_limit 0") == "512M\n"


def test_shutdown_server_ends_a_server_without_clients(daemon: Mps) -> None:
    daemon.ask(f"start_server -uid {os.getuid()}")
    server = daemon.wait_server()
    daemon.ask(f"shutdown_server {server}")
    until(lambda: not alive(server), "the server's end")
    until(lambda: daemon.servers() == [], "an empty server list")


def test_shutdown_server_by_force_does_not_wait_for_clients(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1048576")
    server = daemon.wait_server()
    daemon.ask(f"shutdown_server {server} -f")
    assert client.line().startswith("CUDA_ERROR_")
    until(lambda: not alive(server), "the server's end")


# Quit


def test_quit_returns_when_daemon_and_servers_are_gone(daemon: Mps) -> None:
    daemon.ask(f"start_server -uid {os.getuid()}")
    pids = [daemon.pid(), daemon.wait_server()]
    assert daemon.run(text="quit\n").returncode == 0
    assert not any(map(alive, pids))
    assert not (daemon.pipe / "control").exists()
    assert daemon.run(text="get_server_list\n").returncode == 1


def test_quit_waits_for_clients(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1048576")
    quitting = daemon.hold_command("quit")
    until(lambda: "Cmd:quit" in daemon.control_log(), "the command in the log")
    assert alive(daemon.pid())
    assert quitting.poll() is None
    client.end()
    assert quitting.wait(WAIT_S) == 0


def test_quit_with_a_time_ends_servers_by_force_and_fails(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1048576")
    pid = daemon.pid()
    assert daemon.run(text="quit -t 0\n").returncode != 0
    assert not alive(pid)
    assert client.line().startswith("CUDA_ERROR_")


# Clients


def test_the_first_client_starts_the_server_and_is_listed(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1048576")
    (server,) = daemon.servers()
    assert daemon.ask(f"get_server_status {server}") == "ACTIVE\n"
    assert daemon.ask(f"get_client_list {server}") == f"{client.pid}\n"
    rows = [line.split(maxsplit=5) for line in daemon.ask("ps").splitlines()]
    assert rows[0] == ["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]
    assert (int(rows[1][0]), int(rows[1][2])) == (client.pid, server)


def test_the_server_outlives_its_clients(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1048576")
    (server,) = daemon.servers()
    assert client.end() == 0
    until(lambda: daemon.ask(f"get_client_list {server}") == "", "an empty client list")
    assert daemon.servers() == [server]


def test_units_are_binary_and_the_limit_is_exact(daemon: Mps) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 2G")
    assert daemon.allocate(str(2 * 1024**3 + 1)) == "CUDA_ERROR_OUT_OF_MEMORY"
    # A real context takes some of it; the emulator's takes nothing.
    assert int(daemon.allocate(str(2 * 1024**3 - (1024**3 if "GPUFRAC_MPS_BINARY" in os.environ else 0))))


def test_a_running_server_keeps_the_limits_of_its_start(daemon: Mps) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 4G")
    daemon.hold("--allocate", "1048576")
    daemon.ask("set_default_device_pinned_mem_limit 0 1G")
    assert daemon.allocate(str(2 * 1024**3)) == str(2 * 1024**3)
    (server,) = daemon.servers()
    daemon.ask(f"set_device_pinned_mem_limit {server} 0 1G")
    assert daemon.allocate(str(2 * 1024**3)) == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_client_can_only_lower_its_limit(daemon: Mps) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 4G")
    assert daemon.allocate(str(2 * 1024**3), CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1G") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert daemon.allocate(str(5 * 1024**3), CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=40G") == "CUDA_ERROR_OUT_OF_MEMORY"


def test_the_limit_holds_per_process(daemon: Mps) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 4G")
    daemon.hold("--allocate", str(3 * 1024**3))
    assert daemon.allocate(str(3 * 1024**3)) == str(3 * 1024**3)


def test_terminate_client_prints_0_and_leaves_the_process(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1048576", "--stay")
    (server,) = daemon.servers()
    assert daemon.ask(f"terminate_client {server} {client.pid}") == "0\n"
    assert client.line() == "CUDA_ERROR_MPS_CLIENT_TERMINATED"
    assert alive(client.pid)
    assert daemon.ask(f"get_client_list {server}") == ""


def test_a_dead_server_fails_its_clients_and_the_next_client_gets_a_new_one(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1048576")
    (server,) = daemon.servers()
    os.kill(server, signal.SIGKILL)
    assert client.line() == "CUDA_ERROR_MPS_RPC_FAILURE"
    daemon.hold("--allocate", "1048576")
    (again,) = daemon.servers()
    assert again != server


def test_without_a_daemon_a_client_runs_without_any_limit(daemon: Mps) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 1G")
    assert daemon.allocate(str(2 * 1024**3)) == "CUDA_ERROR_OUT_OF_MEMORY"
    pid = daemon.pid()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), "the daemon's end")
    assert daemon.allocate(str(2 * 1024**3)) == str(2 * 1024**3)
