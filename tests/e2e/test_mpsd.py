"""mpsd as real processes on a simulated node."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.config.model import GIB
from mpsd.gpu.model import ComputeMode, Mode
from mpsd.snapshot import Desired, DesiredGpu, GpuStatus
from tests.e2e.mpsdnode import ROOT, WAIT_S, MpsdNode, end, first_line, is_ready, mpsd_node, saved_state


@pytest.fixture
def node(short_tmp: Path) -> Iterator[MpsdNode]:
    with mpsd_node(short_tmp) as node:
        yield node


@pytest.fixture
def pair(short_tmp: Path) -> Iterator[MpsdNode]:
    with mpsd_node(short_tmp, gpus=2) as node:
        yield node


def bind(node: MpsdNode, mode: Mode = Mode.SM_SHARING) -> GpuStatus:
    """Binds the first GPU and waits until that is in force."""
    uuid = node.client.snapshot().gpus[0].info.uuid
    node.apply(Desired(gpus=(DesiredGpu(uuid=uuid, mode=mode),)))
    return node.until_gpu(lambda gpu: gpu.mode is mode)


def pid_of(gpu: GpuStatus) -> int:
    assert gpu.daemon is not None
    assert gpu.daemon.pid is not None
    return gpu.daemon.pid


def terminate(mpsd: "subprocess.Popen[bytes]") -> None:
    mpsd.send_signal(signal.SIGTERM)
    assert mpsd.wait(WAIT_S) == 0


def test_a_killed_daemon_is_published_at_once_and_comes_back_with_its_limit(pair: MpsdNode) -> None:
    pair.start()
    before = pair.until_ready()
    os.kill(pid_of(before.gpus[0]), signal.SIGKILL)
    lost = pair.until_gpu(lambda gpu: not is_ready(gpu))
    assert lost.daemon is not None
    assert (lost.daemon.state, lost.daemon.pinned_limit_bytes) == ("backoff", None)
    assert lost.daemon.reason == f"the MPS control daemon (pid {pid_of(before.gpus[0])}) exited"
    after = pair.until_ready()
    assert after.gpus[0].daemon is not None
    assert (after.gpus[0].daemon.pinned_limit_bytes, after.gpus[0].daemon.restarts) == (8 * GIB, 1)
    assert pid_of(after.gpus[0]) != pid_of(before.gpus[0])
    assert after.gpus[1] == before.gpus[1]
    program = pair.cuda(after.gpus[0], "--allocate", "9Gi")
    assert program.communicate(timeout=WAIT_S)[0].strip() == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_killed_mpsd_is_followed_by_one_that_adopts_without_a_client_noticing(node: MpsdNode) -> None:
    mpsd = node.start()
    before = node.until_ready()
    gpu = bind(node)
    program = node.cuda(gpu, "--allocate", "4Gi", "--hold", GPUFRAC_ALLOCATION="k1")
    assert first_line(program) == str(4 * GIB)
    mpsd.kill()
    mpsd.wait()
    node.start()
    after = node.until_ready(before).gpus[0]
    assert pid_of(after) == pid_of(before.gpus[0])
    assert after.daemon is not None
    assert (after.daemon.pinned_limit_bytes, after.daemon.restarts) == (8 * GIB, 0)
    node.until_gpu(lambda g: g.mode is Mode.SM_SHARING and [c.allocation_key for c in g.clients] == ["k1"])
    assert program.poll() is None
    clients = node.call("clients", {"uuids": [gpu.info.uuid]})
    assert clients == {
        gpu.info.uuid: {
            "clients": [{"pid": program.pid, "allocation_key": "k1", "mps": True, "used_bytes": 4 * GIB}],
            "error": "",
        }
    }
    end(program)
    assert node.call("clients", {"uuids": [gpu.info.uuid]}) == {gpu.info.uuid: {"clients": [], "error": ""}}


def test_an_adopted_daemon_is_watched_too(node: MpsdNode) -> None:
    mpsd = node.start()
    before = node.until_ready()
    mpsd.kill()
    mpsd.wait()
    node.start()
    adopted = node.until_ready(before)
    os.kill(pid_of(adopted.gpus[0]), signal.SIGKILL)
    node.until_gpu(lambda gpu: not is_ready(gpu))
    node.until_ready()


def test_sigterm_ends_idle_daemons_and_leaves_no_process(pair: MpsdNode) -> None:
    mpsd = pair.start()
    gpu = pair.until_ready().gpus[0]
    bind(pair)
    pair.apply(Desired())
    pair.until_gpu(lambda g: g.mode is None and g.driver_compute_mode is ComputeMode.DEFAULT)
    terminate(mpsd)
    assert pair.mps_processes() == []
    assert pair.driver.compute_mode(gpu.info.uuid) == "DEFAULT"
    assert not os.path.exists(f"{pair.run_root}/mpsd.sock")
    assert saved_state(pair)["daemons"] == {}


def test_sigterm_leaves_the_daemon_of_a_client_and_the_next_mpsd_goes_on(pair: MpsdNode) -> None:
    mpsd = pair.start()
    before = pair.until_ready()
    gpu = bind(pair)
    program = pair.cuda(gpu, "--allocate", "1Gi", "--hold", GPUFRAC_ALLOCATION="k1")
    first_line(program)
    terminate(mpsd)
    assert pid_of(before.gpus[0]) in pair.mps_processes()
    assert pid_of(before.gpus[1]) not in pair.mps_processes()
    assert pair.driver.compute_mode(gpu.info.uuid) == "EXCLUSIVE_PROCESS"
    second = pair.start()
    after = pair.until_ready(before)
    assert pid_of(after.gpus[0]) == pid_of(before.gpus[0])
    assert program.poll() is None
    end(program)
    pair.apply(Desired())
    pair.until_gpu(lambda g: g.driver_compute_mode is ComputeMode.DEFAULT)
    terminate(second)
    assert pair.mps_processes() == []


def test_a_second_instance_names_the_first(node: MpsdNode) -> None:
    first = node.start()
    node.until_ready()
    second = subprocess.Popen(first.args, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert second.stderr is not None
        assert f"pid={first.pid}" in second.stderr.readline()  # it waits, and says for whom
        second.send_signal(signal.SIGTERM)
        said = second.communicate(timeout=WAIT_S)[1]
        assert second.returncode == 1
        assert f"(pid {first.pid})" in said
        assert said.startswith("cannot start")
    finally:
        end(second)
    node.until_ready()


def test_a_bad_config_is_refused_with_all_its_errors_and_nothing_is_started(node: MpsdNode) -> None:
    node.write_config(request="8GB", more="metric: {}")
    mpsd = node.start()
    assert mpsd.wait(WAIT_S) == 2
    assert "resources[0].memory.request" in node.log()
    assert "metric" in node.log()
    assert "Traceback" not in node.log()
    assert not os.path.exists(node.run_root)


def test_a_reload_changes_limits_and_a_bad_file_changes_nothing(node: MpsdNode) -> None:
    node.start()
    pid = pid_of(node.until_ready().gpus[0])
    node.write_config(request="16Gi")
    gpu = node.until_gpu(lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 16 * GIB)
    assert pid_of(gpu) == pid
    node.write_config(request="16GB")
    refused = node.until(lambda s: bool(s.config_error))
    assert "resources[0].memory.request" in refused.config_error
    assert is_ready(refused.gpus[0])
    node.write_config(request="16Gi")
    node.until(lambda s: not s.config_error)


def test_a_server_that_runs_gets_a_raised_limit_for_new_clients(node: MpsdNode) -> None:
    node.start()
    gpu = node.until_ready().gpus[0]
    holder = node.cuda(gpu, "--allocate", "1Gi", "--hold")
    first_line(holder)
    node.write_config(request="16Gi")
    node.until_gpu(lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 16 * GIB)
    assert node.cuda(gpu, "--allocate", "15Gi").communicate(timeout=WAIT_S)[0].strip() == str(15 * GIB)
    assert holder.poll() is None


def test_without_a_driver_it_runs_and_says_so_until_one_comes(node: MpsdNode) -> None:
    node.driver.set_fault("init-error", "Driver Not Loaded")
    node.start()
    snapshot = node.until(lambda s: "Driver Not Loaded" in s.reason)
    assert snapshot.gpus == ()
    node.driver.clear_fault("init-error")
    node.until_ready()


def test_cleanup_leaves_the_node_as_found(node: MpsdNode) -> None:
    node.start()
    gpu = node.until_ready().gpus[0]
    bind(node)
    program = node.cuda(gpu, "--allocate", "1Gi", "--hold", "--stay", GPUFRAC_ALLOCATION="k1")
    first_line(program)
    command = [sys.executable, "-m", "deviceplugin.cli.main", "mpsd", "cleanup", "--run-root", node.run_root]
    got = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (got.returncode, got.stderr) == (0, "")
    assert node.mps_processes() == []
    assert node.driver.compute_mode(gpu.info.uuid) == "DEFAULT"
    state = saved_state(node)
    assert (state["daemons"], state["compute_modes"]) == ({}, {})
    held = node.until_gpu(lambda g: bool(g.not_shared))
    assert "restart mpsd" in held.not_shared


def test_calls_with_nonsense_are_refused(node: MpsdNode) -> None:
    from mpsd.errors import ProtocolError

    node.start()
    node.until_ready()
    for method, params in (("watch", {"generation": "x"}), ("apply", {}), ("clients", {"uuids": "all"})):
        with pytest.raises(ProtocolError, match="cannot read the parameters"):
            node.call(method, params)
    unknown = node.call("clients", {"uuids": ["GPU-unknown"]})["GPU-unknown"]
    assert unknown["error"].startswith("cannot list the clients of GPU GPU-unknown: ")
    assert node.client.status()["pid"] > 0
