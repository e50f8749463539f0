"""The emulator's faults and switches, one daemon each."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.config.model import SimulatedConfig
from mpsd.sim.cuda.client import Cuda
from mpsd.sim.cudaerrors import CudaError
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.mps.faults import FAULTS, clear_fault, daemon_key, set_fault
from mpsd.sim.mps.install import install_emulator
from mpsd.sim.switches import SWITCHES, binary_version, read_switch, set_switch
from tests.contract.mps import Mps, alive, emulator
from tests.waiting import WAIT_S, until

QUERY = "get_default_active_thread_percentage"


@pytest.fixture
def mps(short_tmp: Path) -> Iterator[Mps]:
    mps = emulator(short_tmp)
    yield mps
    mps.close()


@pytest.fixture
def daemon(mps: Mps) -> Mps:
    mps.start()
    return mps


def simulation(mps: Mps) -> str:
    return str(mps.root / "sim")


def fault(mps: Mps, name: str, value: str = "") -> None:
    set_fault(simulation(mps), name, value, str(mps.pipe))


def heal(mps: Mps, name: str) -> None:
    clear_fault(simulation(mps), name, str(mps.pipe))


def test_wedge_holds_every_answer_until_it_is_cleared(daemon: Mps) -> None:
    fault(daemon, "wedge")
    waiting = daemon.hold_command(QUERY)
    until(lambda: "NEW UI" in daemon.control_log(), "the front-end in the log")
    assert waiting.poll() is None
    assert f"Cmd:{QUERY}" not in daemon.control_log()
    heal(daemon, "wedge")
    assert waiting.wait(WAIT_S) == 0


def test_wedge_may_name_commands(daemon: Mps) -> None:
    fault(daemon, "wedge", "terminate_client")
    waiting = daemon.hold_command("terminate_client 1 2")
    assert daemon.ask(QUERY) == "100.0\n"
    assert waiting.poll() is None


def test_a_fault_of_one_daemon_leaves_the_others_alone(daemon: Mps) -> None:
    set_fault(simulation(daemon), "wedge", "", "/run/other")
    assert daemon.ask(QUERY) == "100.0\n"
    assert daemon_key("/run/other/") == "run_other"


def test_slow(daemon: Mps) -> None:
    fault(daemon, "slow", "50")
    assert daemon.ask(QUERY) == "100.0\n"


def test_half_line(daemon: Mps) -> None:
    fault(daemon, "half-line")
    done = daemon.run(text=QUERY + "\n")
    assert (done.returncode, done.stdout) == (0, "100")


def test_drop(daemon: Mps) -> None:
    fault(daemon, "drop")
    done = daemon.run(text=QUERY + "\n")
    assert (done.returncode, done.stdout) == (1, "")


def test_hung_quit(daemon: Mps) -> None:
    fault(daemon, "hung-quit")
    waiting = daemon.hold_command("quit -t 0")
    until(lambda: "Cmd:quit" in daemon.control_log(), "the command in the log")
    assert daemon.ask(QUERY) == "100.0\n"
    assert waiting.poll() is None
    heal(daemon, "hung-quit")
    assert waiting.wait(WAIT_S) == 0


def test_refuse_start(mps: Mps) -> None:
    fault(mps, "refuse-start", "no GPUs today")
    done = mps.run("-d")
    assert done.returncode == 1
    assert "no GPUs today" in done.stderr
    assert not mps.pipe.exists()


def test_crash_on_start(mps: Mps) -> None:
    fault(mps, "crash-on-start")
    pid = mps.start()
    until(lambda: not alive(pid), "the crash")
    assert mps.run(text=QUERY).returncode == 1


def test_server_crash_now(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1Mi")
    (server,) = daemon.servers()
    fault(daemon, "server-crash")
    assert client.line() == "CUDA_ERROR_MPS_RPC_FAILURE"
    until(lambda: "Server encountered a fatal exception" in daemon.control_log(), "the crash in the log")
    assert f"Server {server} exited with status 1" in daemon.control_log()
    daemon.hold("--allocate", "1Mi")


def test_restart_loop(daemon: Mps) -> None:
    fault(daemon, "restart-loop")
    client = daemon.hold("--allocate", "1Mi", await_line=False)
    until(lambda: daemon.control_log().count("Starting new server") > 3, "four starts")
    assert client.process.poll() is None
    heal(daemon, "restart-loop")
    assert client.line() == "1048576"


def test_pid_zero_clients(daemon: Mps) -> None:
    fault(daemon, "pid-zero")
    daemon.hold("--allocate", "1Mi")
    (server,) = daemon.servers()
    assert daemon.ask(f"get_client_list {server}") == "0\n"
    assert "NEW CLIENT 0 from user" in daemon.control_log()


def test_terminate_fails(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1Mi")
    (server,) = daemon.servers()
    fault(daemon, "terminate-fails", "999")
    assert daemon.ask(f"terminate_client {server} {client.pid}") == "999\n"
    heal(daemon, "terminate-fails")
    assert daemon.ask(f"terminate_client {server} {client.pid}") == "0\n"
    assert daemon.ask(f"terminate_client {server} {client.pid}") == "1\n"


def test_log_flood(daemon: Mps) -> None:
    fault(daemon, "log-flood", "50")
    daemon.ask(QUERY)
    assert daemon.control_log().count("] flood ") == 50


def test_limits_silently_not_applied(daemon: Mps) -> None:
    fault(daemon, "limit-not-applied")
    assert daemon.ask("set_default_device_pinned_mem_limit 0 8192M") == ""
    assert daemon.ask("get_default_device_pinned_mem_limit 0") == ""
    fault(daemon, "limit-not-applied", "4096M")
    daemon.ask("set_default_device_pinned_mem_limit 0 8192M")
    assert daemon.ask("get_default_device_pinned_mem_limit 0") == "4096M\n"


@pytest.mark.parametrize(("version", "shown"), [("580.95.05", "2500M"), ("595.91.07", "2G"), ("615.71.09", "2G")])
def test_limits_print_as_the_driver_version_does(mps: Mps, version: str, shown: str) -> None:
    SimulatedDriver(simulation(mps)).set_fault("driver-version", version)
    mps.start()
    mps.ask("set_default_device_pinned_mem_limit 0 2500M")
    assert mps.ask("get_default_device_pinned_mem_limit 0") == shown + "\n"


def test_a_stale_socket_is_reclaimed_or_refused_by_switch(daemon: Mps) -> None:
    os.kill(daemon.pid(), signal.SIGKILL)
    until(lambda: not alive(daemon.pid()), "the daemon's end")
    set_switch(simulation(daemon), "stale-socket", "refuse")
    assert daemon.run("-d").returncode == 1
    set_switch(simulation(daemon), "stale-socket", "reclaim")
    daemon.start()


def test_sigterm_quits_by_switch(mps: Mps) -> None:
    set_switch(simulation(mps), "sigterm", "quit")
    pid = mps.start()
    os.kill(pid, signal.SIGTERM)
    until(lambda: not alive(pid), "the daemon's end")
    assert not (mps.pipe / "control").exists()


def test_commands_as_arguments_by_switch(daemon: Mps) -> None:
    assert daemon.run("get_server_list").returncode == 1
    set_switch(simulation(daemon), "argv-commands", "yes")
    done = daemon.run("set_default_active_thread_percentage", "12")
    assert (done.returncode, done.stdout) == (0, "12.0\n")


def test_flags(mps: Mps) -> None:
    assert "usage" in mps.run("-h").stdout
    assert mps.run("-v").stdout == "13000\n"
    assert mps.run("-q").returncode == 1


@pytest.mark.parametrize("rule", ["ignore", "commands"])
def test_foreground(mps: Mps, rule: str) -> None:
    set_switch(simulation(mps), "foreground-stdin", rule)
    with subprocess.Popen(
        [mps.binary, "-f"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=mps.environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            until((mps.pipe / "nvidia-cuda-mps-control.pid").exists, "the daemon")
            process.stdin.write(QUERY.encode() + b"\n")
            process.stdin.close()
            if rule == "ignore":
                until(lambda: mps.run(text="get_server_list\n").returncode == 0, "an answer")
                assert mps.run(text="quit\n").returncode == 0
            assert process.wait(WAIT_S) == 0
            assert b"Starting control daemon using socket" in process.stdout.read()
        finally:
            process.kill()


def test_a_connection_that_speaks_nonsense_is_dropped(daemon: Mps) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(daemon.pipe / "control"))
        connection.sendall(b"\x00\xff hello\n")
        assert connection.recv(10) == b""
    assert daemon.ask(QUERY) == "100.0\n"


def test_the_log_pipe_reaches_the_log(daemon: Mps) -> None:
    with open(daemon.pipe / "log", "w") as pipe:
        pipe.write("from a client\n")
    until(lambda: "from a client" in daemon.control_log(), "the line in the log")


def test_idle_means_asleep(daemon: Mps) -> None:
    daemon.ask(f"start_server -uid {os.getuid()}")
    server = daemon.wait_server()

    def switches(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)

    def settled() -> bool:
        before = [switches(pid) for pid in (daemon.pid(), server)]
        signal.sigtimedwait([signal.SIGRTMAX], 0.2)  # time passes, nothing else does
        return before == [switches(pid) for pid in (daemon.pid(), server)]

    until(settled, "0.2 s without a wakeup")


def test_nothing_outlives_a_removed_simulation(daemon: Mps) -> None:
    daemon.ask(f"start_server -uid {os.getuid()}")
    pids = [daemon.pid(), daemon.wait_server()]
    (daemon.root / "sim" / "driver.json").unlink()
    until(lambda: not any(map(alive, pids)), "the end of daemon and server")


def test_a_removed_simulation_ends_servers_without_daemon_too(daemon: Mps) -> None:
    daemon.ask(f"start_server -uid {os.getuid()}")
    server = daemon.wait_server()
    os.kill(daemon.pid(), signal.SIGKILL)
    (daemon.root / "sim" / "driver.json").unlink()
    until(lambda: not alive(server), "the server's end")


def test_clients_of_a_quitting_daemon_are_turned_away(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1Mi")
    quitting = daemon.hold_command("quit")
    until(lambda: "Cmd:quit" in daemon.control_log(), "the command in the log")
    with pytest.raises(CudaError, match="MPS_CONNECTION_FAILED"):
        Cuda(daemon.environment)
    client.end()
    assert quitting.wait(WAIT_S) == 0


def test_paths_with_spaces_and_quotes(short_tmp: Path) -> None:
    root = short_tmp / "a b'c\"d"
    SimulatedDriver.create(str(root / "sim"), SimulatedConfig())
    binary = install_emulator(str(root / "bin"), str(root / "sim"))
    done = subprocess.run([binary, "-v"], capture_output=True, text=True, check=True, env={})
    assert done.stdout == "13000\n"


def test_every_name_is_explained_and_unknown_ones_are_refused(short_tmp: Path) -> None:
    assert all(FAULTS.values())
    assert all(text for _, text in SWITCHES.values())
    with pytest.raises(KeyError):
        set_fault(str(short_tmp), "wegde")
    with pytest.raises(KeyError):
        set_switch(str(short_tmp), "sigtrem", "quit")
    with pytest.raises(KeyError):
        read_switch(str(short_tmp), "sigtrem")


@pytest.mark.parametrize(
    ("driver", "version"),
    [("580.95.05", "13000"), ("610.1", "13030"), ("615.71.09", "13040"), ("470", "12000"), ("?", "12000")],
)
def test_binary_version_follows_the_driver(short_tmp: Path, driver: str, version: str) -> None:
    assert binary_version(str(short_tmp), driver) == version


def test_the_front_end_imports_nothing_heavy(mps: Mps) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import mpsd.sim.mps.frontend; print(*sys.modules)"
    root = str(Path(__file__).parents[4])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, root], capture_output=True, text=True, check=True)
    assert not {"json", "typing", "re", "msgspec", "dataclasses", "mpsd.sim.driver"} & set(done.stdout.split())
