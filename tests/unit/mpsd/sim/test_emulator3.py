"""The emulator's faults and switches under protocol 3, one daemon each."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mpsd.sim.cuda.client import Cuda
from mpsd.sim.cudaerrors import CudaError
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.model import gpu_uuid
from mpsd.sim.mps.faults import clear_fault, set_fault
from mpsd.sim.switches import set_switch
from tests.contract.mps import DRIVER_3, Mps, alive, emulator
from tests.waiting import NEVER_S, WAIT_S, until

LIST = ("namespace", "list", "--server=s", "--format=csv,noheader")
LISTED = "default,s,Ready,1G,10.00\nn,s,Ready,8G,50.00\n"
CONFIG = """
[servers.s]
pinned_memory_limit = "1G"
active_thread_percentage = "10"
[servers.s.namespaces.n]
pinned_memory_limit = "8G"
active_thread_percentage = "50"
"""
GIB = 1024**3


@pytest.fixture
def mps(short_tmp: Path) -> Iterator[Mps]:
    mps = emulator(short_tmp, driver=DRIVER_3)
    mps.environment["CUDA_MPS_PROTOCOL_VERSION"] = "3"
    yield mps
    mps.close()


@pytest.fixture
def daemon(mps: Mps) -> Mps:
    mps.start3(CONFIG, "-m")
    mps.wait_ready()
    return mps


def simulation(mps: Mps) -> str:
    return str(mps.root / "sim")


def switch(mps: Mps, name: str, value: str) -> None:
    set_switch(simulation(mps), name, value)


def fault(mps: Mps, name: str, value: str = "") -> None:
    set_fault(simulation(mps), name, value, str(mps.pipe))


def heal(mps: Mps, name: str) -> None:
    clear_fault(simulation(mps), name, str(mps.pipe))


def namespace(mps: Mps, *names: str) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(mps.pipe.joinpath("s", *names))}


def cuda(mps: Mps, *names: str, **environment: str) -> Cuda:
    return Cuda({**mps.environment, **namespace(mps, *names), **environment})


def waits(mps: Mps, *words: str) -> "subprocess.Popen[bytes]":
    """A command whose answer is not waited for."""
    process = subprocess.Popen([mps.binary, *words], stdout=subprocess.DEVNULL, env=mps.environment)
    mps.front_ends.append(process)
    return process


# Faults


@pytest.mark.parametrize("names", ["", "namespace list", "server list\nnamespace list"])
def test_wedge_names_commands_by_module_and_verb(daemon: Mps, names: str) -> None:
    ui = daemon.control_log().count("NEW UI")
    fault(daemon, "wedge", names)
    waiting = waits(daemon, *LIST)
    until(lambda: daemon.control_log().count("NEW UI") > ui, "the front-end in the log")
    if names:
        daemon.tell("feature", "describe")
    assert waiting.poll() is None
    heal(daemon, "wedge")
    assert waiting.wait(WAIT_S) == 0


def test_wedge_of_clients_leaves_the_status_ready(daemon: Mps) -> None:
    fault(daemon, "wedge", "clients")
    client = daemon.hold("--allocate", "1Mi", await_line=False, at=("s",))
    until(lambda: f"NEW CLIENT {client.pid}" in daemon.control_log(), "the client")
    assert daemon.tell(*LIST) == LISTED
    assert daemon.rows("client", "list") == []
    heal(daemon, "wedge")
    assert client.line() == "1048576"


@pytest.mark.parametrize(
    ("name", "value", "status", "output"),
    [("slow", "50", 0, LISTED), ("half-line", "", 0, LISTED[: len(LISTED) // 2]), ("drop", "", 1, "")],
)
def test_answers_that_are_not_what_they_should_be(daemon: Mps, name: str, value: str, status: int, output: str) -> None:
    fault(daemon, name, value)
    done = daemon.run(*LIST)
    assert (done.returncode, done.stdout) == (status, output)


def test_log_flood(daemon: Mps) -> None:
    fault(daemon, "log-flood", "50")
    daemon.tell(*LIST)
    assert daemon.control_log().count("] flood ") == 50


@pytest.mark.parametrize("blocks", ["yes", "no"])
def test_hung_quit(daemon: Mps, blocks: str) -> None:
    switch(daemon, "quit-blocks", blocks)
    fault(daemon, "hung-quit")
    pid = daemon.pid()
    quitting = waits(daemon, "-q")
    until(lambda: "Cmd:quit" in daemon.control_log(), "the command in the log")
    if blocks == "no":
        assert quitting.wait(WAIT_S) == 0
    assert daemon.run(*LIST).returncode == 0
    assert alive(pid)
    heal(daemon, "hung-quit")
    until(lambda: not alive(pid), "the daemon's end")
    assert quitting.wait(WAIT_S) == 0


def test_refuse_start_and_crash_on_start(mps: Mps) -> None:
    fault(mps, "refuse-start", "no GPUs today")
    done = mps.run("-p", "3", "-d")
    assert (done.returncode, "no GPUs today" in done.stderr) == (1, True)
    assert not mps.pipe.exists()
    heal(mps, "refuse-start")
    fault(mps, "crash-on-start")
    assert mps.run("-p", "3", "-d").returncode == 0
    until(lambda: mps.run(*LIST).returncode != 0, "the crash")


def test_a_server_that_takes_its_time_is_initializing(mps: Mps) -> None:
    fault(mps, "server-init-delay", f"{NEVER_S * 1000:.0f}")
    mps.start3(CONFIG)
    until(lambda: mps.tell("server", "get", "s", "status") == "Initializing\n", "Initializing")
    heal(mps, "server-init-delay")
    assert mps.allocate("1Mi", at=("s",)) == "1048576"
    assert mps.tell("server", "get", "s", "status") == "Ready\n"


@pytest.mark.parametrize("rule", ["restart", "vanish"])
def test_server_crash(daemon: Mps, rule: str) -> None:
    switch(daemon, "server-after-crash", rule)
    before = daemon.wait_ready()
    client = daemon.hold("--allocate", "1Mi", at=("s", "n"))
    fault(daemon, "server-crash")
    assert client.line() == "CUDA_ERROR_MPS_RPC_FAILURE"
    if rule == "vanish":
        until(lambda: daemon.rows("server", "list") == [], "an empty list")
        return
    until(lambda: f"Server {before} exited with status 1" in daemon.control_log(), "the crash in the log")
    assert daemon.wait_ready() != before
    assert daemon.tell(*LIST) == LISTED


def test_restart_loop(mps: Mps) -> None:
    fault(mps, "restart-loop")
    mps.start3(CONFIG)
    client = mps.hold("--allocate", "1Mi", await_line=False, at=("s",))
    until(lambda: mps.control_log().count("Starting new server") > 3, "four starts")
    assert client.process.poll() is None
    heal(mps, "restart-loop")
    assert client.line() == "1048576"


def test_a_server_vanishes_and_its_clients_come_back_without_limits(daemon: Mps) -> None:
    daemon.tell("server", "create", "other")
    server = daemon.wait_ready()
    client = daemon.hold("--allocate", "1Mi", at=("s",))
    fault(daemon, "server-vanishes", "s")
    assert client.line() == "CUDA_ERROR_MPS_RPC_FAILURE"
    until(lambda: [row[0] for row in daemon.rows("server", "list")] == ["other"], "the server to vanish")
    until(lambda: not alive(server), "the server's end")
    assert daemon.allocate("2Gi", at=("s",)) == str(2 * GIB)


def test_pid_zero_clients(daemon: Mps) -> None:
    fault(daemon, "pid-zero")
    daemon.hold("--allocate", "1Mi", at=("s",))
    assert daemon.rows("client", "list")[0][0] == "0"
    assert "[memacct] failed to register client pid 0" in daemon.control_log()


def test_terminate_fails_or_hangs(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1Mi", at=("s",))
    fault(daemon, "terminate-fails", "not today")
    done = daemon.run("client", "terminate", str(client.pid))
    assert (done.returncode, done.stderr) == (1, "not today\n")
    heal(daemon, "terminate-fails")
    fault(daemon, "terminate-hangs")
    ui = daemon.control_log().count("NEW UI")
    waiting = waits(daemon, "client", "terminate", str(client.pid))
    until(lambda: daemon.control_log().count("NEW UI") > ui, "the front-end in the log")
    assert daemon.tell("server", "get", "s", "status") == "Ready\n"
    assert waiting.poll() is None
    heal(daemon, "terminate-hangs")
    assert waiting.wait(WAIT_S) == 0
    assert client.line() == "CUDA_ERROR_MPS_CLIENT_TERMINATED"


def test_limits_that_are_not_what_was_set(mps: Mps) -> None:
    fault(mps, "limit-not-applied", "2G")
    mps.start3(CONFIG)
    mps.wait_ready()
    assert [row[3] for row in mps.rows(*LIST[:3])] == ["2G", "2G"]
    heal(mps, "limit-not-applied")
    mps.tell("namespace", "set", "n", "--server=s", "--pinned-memory-limit=1G")
    fault(mps, "limit-not-enforced")
    assert mps.allocate("4Gi", at=("s", "n")) == str(4 * GIB)
    assert mps.rows(*LIST[:3])[1][3] == "1G"


@pytest.mark.parametrize("protocol", [2, 3])
def test_fault_state_lasts_until_the_clients_have_left(mps: Mps, protocol: int) -> None:
    if protocol == 2:
        del mps.environment["CUDA_MPS_PROTOCOL_VERSION"]
        mps.start()
        client = mps.hold("--allocate", "1Mi", "--stay")
        log = mps.log / "server.log"
    else:
        mps.start3(CONFIG)
        mps.wait_ready()
        client = mps.hold("--allocate", "1Mi", "--stay", at=("s",))
        log = mps.log / "s" / "server.log"

    def status() -> str:
        if protocol == 2:
            return mps.ask(f"get_server_status {mps.servers()[0]}")
        return mps.tell("server", "get", "s", "status")

    fault(mps, "fault-state")
    assert client.line() == "CUDA_ERROR_LAUNCH_FAILED"
    until(lambda: status() == "FAULT\n", "FAULT")
    text = log.read_text()
    assert "Volta MPS: Server is handling a fatal GPU error." in text
    assert f"] {client.pid}\n" in text.split("The following clients have a sticky error set:")[1]
    with pytest.raises(CudaError, match="MPS_SERVER_NOT_READY"):
        Cuda({**mps.environment, **(namespace(mps) if protocol == 3 else {})})
    client.end()
    until(lambda: status() in ("ACTIVE\n", "Ready\n"), "the server's recovery")


def test_servers_survive_a_killed_daemon(daemon: Mps) -> None:
    server = daemon.wait_ready()
    pid = daemon.pid()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), "the daemon's end")
    assert alive(server)
    assert (daemon.pipe / "s" / "n" / "control").is_socket()
    daemon.start3(CONFIG)
    assert daemon.wait_ready() != server
    assert daemon.tell(*LIST) == LISTED


# Switches


def test_protocol_3_needs_driver_615(mps: Mps) -> None:
    SimulatedDriver(simulation(mps)).set_fault("driver-version", "610.1")
    done = mps.run("-p", "3", "-h")
    assert (done.returncode, done.stdout) == (1, "")
    switch(mps, "old-binary-protocol", "refuse")
    assert mps.run("-d").returncode == 1
    switch(mps, "old-binary-protocol", "ignore")
    mps.start()
    assert mps.run(*LIST).returncode == 1
    assert mps.ask("get_default_active_thread_percentage") == "100.0\n"


def test_flags(mps: Mps) -> None:
    assert mps.run("--protocol=3", "-v").stdout == mps.run("--version").stdout == "13040\n"
    assert "namespace" in mps.run("--help").stdout
    assert mps.run("-h", CUDA_MPS_PROTOCOL_VERSION="2").stdout.startswith("usage: nvidia-cuda-mps-control [-d | -f]")
    for wrong in (("-p", "4"), ("-p",), ("-S",), ("-d", "-a"), ("-d", "--colour")):
        done = mps.run(*wrong, CUDA_MPS_PROTOCOL_VERSION="3" if "-p" not in wrong else "")
        assert done.returncode == 1
        assert done.stderr
    assert not mps.pipe.exists()


def test_a_bad_configuration_file_refuses_the_start(mps: Mps) -> None:
    for config, text in (
        ("[servers.s]\nmemory = 1\n", "memory"),
        ('[servers.s]\npinned_memory_limit = "x"\n', "limit"),
    ):
        mps.config.write_text(config)
        done = mps.run("-p", "3", "-d", f"--apply={mps.config}")
        assert (done.returncode, text in done.stderr) == (1, True)
    assert mps.run("-p", "3", "-d", "-a", str(mps.root / "absent")).returncode == 1
    assert not mps.pipe.exists()


def test_commands_of_protocol_2_on_stdin_are_refused_by_default(daemon: Mps) -> None:
    done = daemon.run(text="quit\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr
    switch(daemon, "error-stream", "stdout")
    assert daemon.run(text="quit\n").stdout
    switch(daemon, "stdin-commands-3", "lines")
    done = daemon.run(text="namespace list --server=s --format=csv,noheader\nserver list nobody\n")
    assert (done.returncode, done.stdout.startswith(LISTED)) == (1, True)


def test_the_foreground_daemon_reads_commands_and_ends_with_them(mps: Mps) -> None:
    mps.config.write_text(CONFIG)
    with subprocess.Popen(
        [mps.binary, "-p", "3", "-m", "-f", "-a", str(mps.config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=mps.environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            until((mps.pipe / "control").exists, "the daemon")
            mps.wait_ready()
            process.stdin.write(b"namespace list --format=csv,noheader\n")
            process.stdin.close()
            assert process.wait(WAIT_S) == 0
            assert LISTED in process.stdout.read().decode()
        finally:
            process.kill()


@pytest.mark.parametrize("rule", ["remove", "stay"])
def test_directories_at_exit(daemon: Mps, rule: str) -> None:
    switch(daemon, "directories-at-exit", rule)
    switch(daemon, "quit-blocks", "yes")
    daemon.tell("-q")
    assert (daemon.pipe / "s" / "n").exists() == (rule == "stay")
    assert not (daemon.pipe / "s" / "n" / "control").exists()


@pytest.mark.parametrize("rule", ["wait", "force"])
def test_quit_with_clients(daemon: Mps, rule: str) -> None:
    switch(daemon, "quit-with-clients", rule)
    pid = daemon.pid()
    client = daemon.hold("--allocate", "1Mi", at=("s",))
    daemon.tell("-q")
    if rule == "wait":
        daemon.tell(*LIST)
        assert alive(pid)
        client.end()
    else:
        assert client.line() == "CUDA_ERROR_MPS_RPC_FAILURE"
    until(lambda: not alive(pid), "the daemon's end")


def test_servers_that_start_with_their_first_client(mps: Mps) -> None:
    switch(mps, "server-start", "first-client")
    mps.start3(CONFIG)
    assert mps.rows("server", "list")[0][2:4] == ["-", "Idle"]
    client = mps.hold("--allocate", "1Mi", at=("s",))
    server = mps.wait_ready()
    os.kill(server, signal.SIGKILL)
    assert client.line() == "CUDA_ERROR_MPS_RPC_FAILURE"
    until(lambda: mps.rows("server", "list")[0][3] == "Idle", "Idle")


@pytest.mark.parametrize("rule", ["yes", "no"])
def test_a_pid_file_by_switch(mps: Mps, rule: str) -> None:
    switch(mps, "pid-file-3", rule)
    assert alive(mps.start3(CONFIG))
    assert (mps.pipe / "nvidia-cuda-mps-control.pid").exists() == (rule == "yes")


def test_allowed_devices(mps: Mps) -> None:
    good, bad = gpu_uuid(1), "GPU-dead"
    switch(mps, "bad-allowed-device", "cut")
    mps.start3(f'[servers.s]\nallowed_devices = "{good}"\n[servers.cut]\nallowed_devices = "{good},{bad}"\n')
    for server in ("s", "cut"):
        mps.wait_ready(server)
        client = Cuda({**mps.environment, "CUDA_MPS_PIPE_DIRECTORY": str(mps.pipe / server)})
        assert client.devices == [good]
        client.close()
    switch(mps, "bad-allowed-device", "none")
    mps.tell("server", "create", "t", f"--allowed-devices={good},{bad}")
    until(lambda: mps.run("server", "list", "t").returncode == 1, "the server to vanish")


@pytest.mark.parametrize("off", ['default_socket = "off"', "enabled = false"])
def test_clients_where_contexts_are_not_shared(mps: Mps, off: str) -> None:
    mps.start3(f"[features.context-share]\n{off}\n{CONFIG}")
    plain = Cuda(mps.environment)
    assert (plain.mps, plain.limits) == (False, {})
    plain.close()
    switch(mps, "without-context-sharing", "refuse")
    with pytest.raises(CudaError, match="NOT_PERMITTED"):
        Cuda(mps.environment)
    switch(mps, "without-context-sharing", "share")
    shared = Cuda(mps.environment)
    assert shared.mps
    shared.close()


# Clients


def test_a_namespaces_limits_are_those_of_its_clients(daemon: Mps) -> None:
    client = cuda(daemon, "n")
    assert client.limits == dict.fromkeys((gpu_uuid(0), gpu_uuid(1)), 8 * GIB)  # the same on each GPU
    client.close()
    for own, percent in (("25", 25.0), ("75", 50.0), ("", 50.0)):
        client = cuda(daemon, "n", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=own)
        assert client.thread_percent == percent
        client.close()
    switch(daemon, "client-percentage", "namespace")
    client = cuda(daemon, "n", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="25")
    assert client.thread_percent == 50.0
    client.close()


@pytest.mark.parametrize("own", ["", "0=8G", "0=4G"])
def test_a_container_with_one_gpu_of_the_daemons_sees_that_one_and_has_its_limit_there(daemon: Mps, own: str) -> None:
    limit_bytes = (4 if own == "0=4G" else 8) * GIB
    for uuid in (gpu_uuid(1), gpu_uuid(0)):
        client = cuda(daemon, "n", GPUFRAC_SIM_DEVICES=uuid, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=own)
        with closing(client):
            assert (client.mps, client.devices, client.open_device()) == (True, [uuid], uuid)
            assert client.limit_bytes == limit_bytes
            with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
                client.allocate(limit_bytes + 1)
            client.allocate(limit_bytes)
            with pytest.raises(CudaError, match="INVALID_DEVICE"):
                client.open_device(1)


def test_a_client_reaches_only_the_namespace_that_is_mounted(daemon: Mps) -> None:
    mounts = f'{{"/tmp/nvidia-mps": "{daemon.pipe / "s" / "n"}"}}'
    client = Cuda({**daemon.environment, "CUDA_MPS_PIPE_DIRECTORY": "", "GPUFRAC_SIM_MOUNTS": mounts})
    client.open_device()
    assert client.limit_bytes == 8 * GIB
    client.close()


def test_a_single_user_server_permits_its_own_user_only(mps: Mps) -> None:
    mps.start3(CONFIG)
    mps.wait_ready()
    with pytest.raises(CudaError, match="NOT_PERMITTED"):
        cuda(mps, "n", GPUFRAC_SIM_UID="1234")
    client = Cuda({**mps.environment, "GPUFRAC_SIM_UID": "1234"})  # the main socket makes a server for it
    assert {row[0] for row in mps.rows("server", "list")} == {"s", "uid_1234"}
    client.close()


def test_a_multiuser_server_takes_all(daemon: Mps) -> None:
    cuda(daemon, "n", GPUFRAC_SIM_UID="1234").close()


def test_a_server_that_cannot_start_turns_its_clients_away(mps: Mps) -> None:
    driver = SimulatedDriver(simulation(mps))
    driver.set_compute_mode(gpu_uuid(0), "PROHIBITED")
    mps.start3(CONFIG)
    with pytest.raises(CudaError, match="MPS_SERVER_NOT_READY"):
        cuda(mps, "n")
    assert mps.rows("server", "list")[0][3] == "Idle"
    driver.set_compute_mode(gpu_uuid(0), "DEFAULT")
    cuda(mps, "n").close()


def test_a_namespace_whose_path_is_too_long_has_no_socket(daemon: Mps) -> None:
    name, server = "n" * 64, "s" * 40
    daemon.tell("server", "create", server)
    daemon.tell("namespace", "create", name, f"--server={server}")
    assert not (daemon.pipe / server / name / "control").exists()
    assert f"Failed to bind socket {daemon.pipe / server / name}/control" in daemon.control_log()
    assert daemon.rows("namespace", "list", name)
    switch(daemon, "overlong-path-3", "refuse")
    assert daemon.run("namespace", "create", "m" * 64, f"--server={server}").returncode == 1
