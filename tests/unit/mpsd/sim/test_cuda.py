"""The simulated CUDA process: what it finds and what it is refused."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mpsd.sim.cuda.client import Cuda, host_path_of
from mpsd.sim.cuda.program import main, parse_size
from mpsd.sim.cudaerrors import CudaError
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.model import EXCLUSIVE_PROCESS, PLAIN, gpu_uuid
from mpsd.sim.mps.faults import clear_fault, set_fault
from mpsd.sim.switches import set_switch
from tests.contract.mps import Mps, alive, emulator
from tests.waiting import NEVER_S, WAIT_S, until

A, B = gpu_uuid(0), gpu_uuid(1)
GIB = 1024**3


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


def driver(mps: Mps) -> SimulatedDriver:
    return SimulatedDriver(simulation(mps))


@pytest.mark.parametrize(("text", "size"), [("9Gi", 9 * GIB), ("512Mi", 512 << 20), ("7", 7), ("1Ki", 1024)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "1G", "1.5Gi", "-1", "1 Gi", "1Gii"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"^cannot read"):
        parse_size(text)


def test_paths_of_a_container() -> None:
    mounts = {"/mps": "/host/a", "/mps/deep": "/host/b"}
    assert host_path_of("/mps", mounts) == "/host/a"
    assert host_path_of("/mps/deep/x/../y", mounts) == "/host/b/y"
    assert host_path_of("/mps/../tmp", mounts) is None
    assert host_path_of("/mpsx", mounts) is None
    assert host_path_of("/etc", {"/": "/host"}) == "/host/etc"


def test_without_a_daemon_it_gets_the_whole_gpu(mps: Mps) -> None:
    with closing(Cuda({**mps.environment, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G"})) as cuda:
        assert not cuda.mps
        assert cuda.devices == [A, B]
        cuda.open_device(1)
        assert cuda.limit_bytes is None
        gpu = driver(mps).gpus()[1]
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            cuda.allocate(gpu.memory_bytes)
        cuda.allocate(gpu.memory_bytes - gpu.reserved_bytes)
    assert driver(mps).contexts(B) == []


def test_devices_come_from_the_container_and_cuda_visible_devices(mps: Mps) -> None:
    def devices(**environment: str) -> list[str]:
        with closing(Cuda({**mps.environment, **environment})) as cuda:
            return cuda.devices

    assert devices(GPUFRAC_SIM_DEVICES=B) == [B]
    assert devices(NVIDIA_VISIBLE_DEVICES=B) == [A, B]  # CUDA does not know it
    assert devices(CUDA_VISIBLE_DEVICES="1,0") == [B, A]
    for nothing in ({"GPUFRAC_SIM_DEVICES": "void"}, {"GPUFRAC_SIM_DEVICES": B, "CUDA_VISIBLE_DEVICES": "1"}):
        with pytest.raises(CudaError, match="NO_DEVICE"):
            devices(**nothing)


def test_ordinals_are_checked(mps: Mps) -> None:
    with closing(Cuda(mps.environment)) as cuda, pytest.raises(CudaError, match="INVALID_DEVICE"):
        cuda.open_device(2)


def test_the_exact_limit_and_one_byte_more(daemon: Mps) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 8192M")
    with closing(Cuda(daemon.environment)) as cuda:
        cuda.open_device()
        assert (cuda.mps, cuda.limit_bytes) == (True, 8 * GIB)
        cuda.allocate(8 * GIB - 1)
        cuda.allocate(1)
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            cuda.allocate(1)


def test_context_memory_counts_against_the_limit_by_switch(daemon: Mps) -> None:
    set_switch(simulation(daemon), "client-context-bytes", str(GIB))
    daemon.ask("set_default_device_pinned_mem_limit 0 2G")
    with closing(Cuda(daemon.environment)) as cuda:
        cuda.open_device()
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            cuda.allocate(GIB + 1)
        cuda.allocate(GIB)


def test_own_limit_is_keyed_as_the_process_counts(mps: Mps) -> None:
    mps.start(CUDA_VISIBLE_DEVICES=B)
    mps.ask("set_default_device_pinned_mem_limit 0 4G")

    def limit(own: str, **environment: str) -> int | None:
        environment = {**mps.environment, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": own, **environment}
        with closing(Cuda(environment)) as cuda:
            assert cuda.devices == [B]
            cuda.open_device()
            return cuda.limit_bytes

    assert limit("0=1G") == GIB
    assert limit(f"{B}=1G", GPUFRAC_SIM_DEVICES=B) == GIB
    assert limit("1=1G") is None  # the host's ordinal: every limit is gone
    assert limit(f"0=1G,{A}=1G") is None
    set_switch(simulation(mps), "invisible-entry", "drop-own")
    assert limit("1=1G") == 4 * GIB
    assert limit("0=1Gi") is None
    set_switch(simulation(mps), "malformed-limit", "ignore")
    assert limit("0=1Gi") == 4 * GIB


def test_thread_percentage_only_lowers(daemon: Mps) -> None:
    daemon.ask("set_default_active_thread_percentage 50")

    def percent(own: str) -> float:
        with closing(Cuda({**daemon.environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": own})) as cuda:
            return cuda.thread_percent

    assert [percent(own) for own in ("25", "75", "")] == [25.0, 50.0, 50.0]


def test_a_container_reaches_the_daemon_through_its_mount_only(daemon: Mps) -> None:
    mounts = json.dumps({"/run/mps": str(daemon.pipe)})
    base = {**daemon.environment, "GPUFRAC_SIM_MOUNTS": mounts}
    with closing(Cuda({**base, "CUDA_MPS_PIPE_DIRECTORY": "/run/mps"})) as cuda:
        assert cuda.mps
    for path in (str(daemon.pipe), ""):
        with closing(Cuda({**base, "CUDA_MPS_PIPE_DIRECTORY": path})) as cuda:
            assert not cuda.mps
    default = json.dumps({"/tmp/nvidia-mps": str(daemon.pipe)})
    with closing(Cuda({**base, "CUDA_MPS_PIPE_DIRECTORY": "", "GPUFRAC_SIM_MOUNTS": default})) as cuda:
        assert cuda.mps


def test_48_clients_fit_on_a_server(daemon: Mps) -> None:
    clients = [Cuda(daemon.environment) for _ in range(48)]
    try:
        with pytest.raises(CudaError) as caught:
            Cuda(daemon.environment)
        assert caught.value.code == 808
    finally:
        for client in clients:
            client.close()
    (server,) = daemon.servers()
    until(lambda: daemon.ask(f"get_client_list {server}") == "", "all clients to leave")
    Cuda(daemon.environment).close()


def test_exclusive_process_keeps_a_client_without_daemon_out(daemon: Mps) -> None:
    driver(daemon).set_compute_mode(A, EXCLUSIVE_PROCESS)
    with (
        closing(Cuda(daemon.environment)) as inside,
        closing(Cuda({**daemon.environment, "GPUFRAC_SIM_MOUNTS": "{}"})) as out,
    ):
        inside.open_device()
        assert not out.mps
        with pytest.raises(CudaError) as caught:
            out.open_device()
        assert caught.value.code == 46


def test_a_server_cannot_start_on_a_gpu_that_another_process_holds(daemon: Mps) -> None:
    driver(daemon).set_compute_mode(A, EXCLUSIVE_PROCESS)
    driver(daemon).open_context(A, os.getpid(), PLAIN)
    with pytest.raises(CudaError) as caught:
        Cuda(daemon.environment)
    assert caught.value.code == 807
    assert "MPS server failed to start" in (daemon.log / "server.log").read_text()


def test_a_fault_hits_every_client_and_heals_when_they_left(daemon: Mps) -> None:
    with closing(Cuda(daemon.environment)) as peer:
        with closing(Cuda(daemon.environment)) as faulty:
            faulty.open_device()
            faulty.launch(faulty=True)
            for cuda in (peer, faulty):
                with pytest.raises(CudaError, match="LAUNCH_FAILED"):
                    cuda.wait(WAIT_S)
        (server,) = daemon.servers()
        until(lambda: daemon.ask(f"get_server_status {server}") == "FAULT\n", "FAULT")
        with pytest.raises(CudaError) as caught:
            Cuda(daemon.environment)
        assert caught.value.code == 807
    until(lambda: daemon.ask(f"get_server_status {server}") == "ACTIVE\n", "ACTIVE again")
    Cuda(daemon.environment).close()


def test_a_client_killed_with_work_in_flight_wedges_the_server(daemon: Mps) -> None:
    with closing(Cuda(daemon.environment)) as peer:
        client = daemon.hold("--allocate", "1Mi", "--busy")
        client.process.send_signal(signal.SIGKILL)
        with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
            peer.wait(WAIT_S)
    late = daemon.hold("--allocate", "1Mi", await_line=False)
    (server,) = daemon.servers()
    until(lambda: str(late.pid) in daemon.ask(f"get_client_list {server}"), "the next client at the server")
    assert daemon.ask(f"get_server_status {server}") == "ACTIVE\n"
    assert late.process.poll() is None


def test_terminating_first_spares_the_others(daemon: Mps) -> None:
    with closing(Cuda(daemon.environment)) as peer:
        client = daemon.hold("--allocate", "1Mi", "--busy")
        (server,) = daemon.servers()
        assert daemon.ask(f"terminate_client {server} {client.pid}") == "0\n"
        assert client.line() == "CUDA_ERROR_MPS_CLIENT_TERMINATED"
        assert client.process.wait(WAIT_S) == 1
        peer.wait(0)


def test_users_take_turns(daemon: Mps) -> None:
    first = daemon.hold("--allocate", "1Mi", GPUFRAC_SIM_UID="1000")
    (server,) = daemon.servers()
    second = daemon.hold("--allocate", "1Mi", await_line=False, GPUFRAC_SIM_UID="2000")
    until(lambda: "from user 2000" in daemon.control_log(), "the second client")
    assert daemon.ask(f"get_client_list {server}") == f"{first.pid}\n"
    first.end()
    assert second.line() == "1048576"
    assert daemon.servers() != [server]


def test_a_multiuser_server_takes_all(mps: Mps) -> None:
    mps.start("-multiuser-server")
    mps.hold("--allocate", "1Mi", GPUFRAC_SIM_UID="1000")
    mps.hold("--allocate", "1Mi", GPUFRAC_SIM_UID="2000")
    (server,) = mps.servers()
    assert len(mps.ask(f"get_client_list {server}").split()) == 2


def test_clients_wait_while_a_server_initialises(daemon: Mps) -> None:
    set_fault(simulation(daemon), "server-init-delay", f"{NEVER_S * 1000:.0f}")
    client = daemon.hold("--allocate", "1Mi", await_line=False)
    until(daemon.servers, "a server")
    assert daemon.ask(f"get_server_status {daemon.servers()[0]}") == "INITIALIZING\n"
    clear_fault(simulation(daemon), "server-init-delay")
    assert client.line() == "1048576"


def test_the_server_outlives_a_killed_daemon_and_serves_on(daemon: Mps) -> None:
    with closing(Cuda(daemon.environment)) as cuda:
        cuda.open_device()
        (server,) = daemon.servers()
        os.kill(daemon.pid(), signal.SIGKILL)
        cuda.allocate(1)
        assert alive(server)
        set_switch(simulation(daemon), "server-after-daemon-death", "until-clients-leave")
    until(lambda: not alive(server), "the server's end")


def test_limits_that_are_shown_but_not_enforced(daemon: Mps) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 1G")
    set_fault(simulation(daemon), "limit-not-enforced")
    with closing(Cuda(daemon.environment)) as cuda:
        cuda.open_device()
        cuda.allocate(2 * GIB)
    assert daemon.ask("get_default_device_pinned_mem_limit 0") == "1G\n"
    clear_fault(simulation(daemon), "limit-not-enforced")


def test_command_line(daemon: Mps, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.ask("set_default_device_pinned_mem_limit 0 1G")
    assert main(["--allocate", "1Gi", "--info"], daemon.environment) == 0
    facts, granted = capsys.readouterr().out.splitlines()
    assert (json.loads(facts)["mps"], json.loads(facts)["limit_bytes"], granted) == (True, GIB, str(GIB))
    assert main(["--allocate", "1025Mi"], daemon.environment) == 1
    assert capsys.readouterr().out == "CUDA_ERROR_OUT_OF_MEMORY\n"
    assert main(["--allocate", "1Gi"], {}) == 2
    assert "GPUFRAC_SIM_DIRECTORY" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _default_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_a_holder_and_frees_its_memory(mps: Mps) -> None:
    client = mps.hold("--allocate", "1Gi")
    assert [(c.pid, c.used_bytes) for c in driver(mps).contexts(A)] == [(client.pid, GIB)]
    client.process.terminate()
    assert client.process.wait(WAIT_S) == 0
    assert driver(mps).contexts(A) == []
