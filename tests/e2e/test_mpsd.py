"""mpsd as real processes on a simulated node."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.common import processes
from mpsd.common.errors import ConfigError, ProtocolError
from mpsd.config.model import GIB
from mpsd.daemon.namespaces import share_name
from mpsd.gpu.model import ComputeMode, Mode
from mpsd.localapi.snapshot import Desired, DesiredAllocation, GpuStatus
from tests.desired import allocation
from tests.desired import bind as binding
from tests.e2e.mpsdnode import DRIVERS, ROOT, MpsdNode, end, first_line, is_ready, mpsd_node, saved_state
from tests.waiting import WAIT_S, until


@pytest.fixture
def node(short_tmp: Path) -> Iterator[MpsdNode]:
    with mpsd_node(short_tmp) as node:
        yield node


@pytest.fixture
def pair(short_tmp: Path) -> Iterator[MpsdNode]:
    with mpsd_node(short_tmp, gpus=2) as node:
        yield node


@pytest.fixture
def pair3(short_tmp: Path) -> Iterator[MpsdNode]:
    """With a driver that speaks MPS protocol 3."""
    with mpsd_node(short_tmp, gpus=2, driver=DRIVERS[3]) as node:
        yield node


@pytest.fixture(params=[2, 3])
def any_pair(short_tmp: Path, request: pytest.FixtureRequest) -> Iterator[MpsdNode]:
    with mpsd_node(short_tmp, gpus=2, driver=DRIVERS[request.param]) as node:
        yield node


def bind(node: MpsdNode, mode: Mode = Mode.SM_SHARING) -> GpuStatus:
    """Binds the first GPU and waits until that is in force."""
    uuid = node.client.snapshot().gpus[0].info.uuid
    node.apply(binding(uuid, mode))
    return node.until_gpu(lambda gpu: gpu.mode is mode)


def share(uuid: str, slot: int | None = 0, gib: int = 8, **more: object) -> DesiredAllocation:
    """A share of the node's resource."""
    values = {"resource": "gpufrac.dev/gpu", "key": f"k{slot}", "slot": slot, "limit_bytes": gib * GIB, **more}
    return allocation(uuid, **values)  # type: ignore[arg-type]


def attached(gpu: GpuStatus) -> dict[str, tuple[int, str]]:
    """Allocations that may start: limit in GiB and namespace."""
    found = gpu.daemon.attached if is_ready(gpu) and gpu.daemon is not None else ()
    return {a.key: (a.limit_bytes // GIB, os.path.basename(a.pipe_directory)) for a in found if not a.objection}


def grants(node: MpsdNode, gpu: GpuStatus, size: str, key: str = "k0") -> str:
    """What a CUDA program of an allocation gets."""
    program = node.cuda(gpu, "--allocate", size, GPUFRAC_ALLOCATION=key)
    return program.communicate(timeout=WAIT_S)[0].strip()


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
    found = node.call("clients", {"uuids": [gpu.info.uuid]})[gpu.info.uuid]
    (client,) = found["clients"]
    wanted = {"pid": program.pid, "allocation_key": "k1", "mps": True, "used_bytes": 4 * GIB}
    assert {key: client[key] for key in wanted} == wanted
    assert (client["command"], found["error"]) == (processes.name(program.pid), "")
    end(program)
    nobody = {"clients": [], "error": "", "error_code": ""}
    assert node.call("clients", {"uuids": [gpu.info.uuid]}) == {gpu.info.uuid: nobody}


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
        assert "cannot start" in said
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
    command = [sys.executable, "-m", "deviceplugin.cli.main", "mpsd", "cleanup", "--yes", "--run-root", node.run_root]
    got = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (got.returncode, got.stderr) == (0, "")
    assert node.mps_processes() == []
    assert node.driver.compute_mode(gpu.info.uuid) == "DEFAULT"
    state = saved_state(node)
    assert (state["daemons"], state["compute_modes"]) == ({}, {})
    held = node.until_gpu(lambda g: bool(g.not_shared))
    assert "restart mpsd" in held.not_shared


def test_namespaces_come_back_under_their_names_with_their_limits_before_the_daemon_is_ready(pair3: MpsdNode) -> None:
    pair3.start()
    uuid = pair3.until_ready().gpus[0].info.uuid
    pair3.apply(Desired(allocations=(share(uuid), share(uuid, 1, gib=3), share(uuid, None, gib=5, key="unit"))))
    before = pair3.until_gpu(lambda gpu: len(attached(gpu)) == 3 and gpu.mode is Mode.SM_SHARING)
    name = share_name("gpufrac.dev/gpu", 0)[:-1]
    assert attached(before) == {"k0": (8, f"{name}0"), "k1": (3, f"{name}1"), "unit": (5, "u_unit")}
    assert [grants(pair3, before, "3Gi", key) for key in ("k0", "k1", "unit")] == [str(3 * GIB)] * 3
    assert [grants(pair3, before, "4Gi", key) for key in ("k1", "unit")] == ["CUDA_ERROR_OUT_OF_MEMORY", str(4 * GIB)]
    other = pid_of(pair3.client.snapshot().gpus[1])
    os.kill(pid_of(before), signal.SIGKILL)
    pair3.until_gpu(lambda gpu: not is_ready(gpu))
    after = pair3.until_gpu(is_ready)
    assert attached(after) == attached(before)
    assert [grants(pair3, after, "9Gi"), grants(pair3, after, "4Gi", "k1")] == ["CUDA_ERROR_OUT_OF_MEMORY"] * 2
    assert pid_of(pair3.client.snapshot().gpus[1]) == other


def test_units_come_and_go_without_the_daemon_leaving_ready(pair3: MpsdNode) -> None:
    pair3.start()
    gpu = pair3.until_ready().gpus[0]
    fixed = share(gpu.info.uuid)
    pair3.apply(Desired(allocations=(fixed,)))
    gpu = pair3.until_gpu(lambda gpu: "k0" in attached(gpu) and gpu.mode is Mode.SM_SHARING)
    holder = pair3.cuda(gpu, "--allocate", "1Gi", "--hold", GPUFRAC_ALLOCATION="k0")
    first_line(holder)
    for count in (1, 2, 0):
        units = [share(gpu.info.uuid, None, gib=1 + n, key=f"unit{n}") for n in range(count)]
        pair3.apply(Desired(allocations=(fixed, *units)))
        # A daemon that was not ready in between would have published that, with another time.
        now = pair3.until_gpu(lambda gpu, count=count: len(attached(gpu)) == 1 + count)  # type: ignore[misc]
        assert now.daemon is not None
        assert gpu.daemon is not None
        assert (now.daemon.since_unix_s, now.daemon.pid) == (gpu.daemon.since_unix_s, gpu.daemon.pid)
        for n in range(count):
            assert grants(pair3, now, f"{1 + n}Gi", f"unit{n}") == str((1 + n) * GIB)
            assert grants(pair3, now, f"{2 + n}Gi", f"unit{n}") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert holder.poll() is None
    assert now.daemon is not None
    directory = f"{now.daemon.pipe_directory}/s/u_unit0"
    until(lambda: not os.path.exists(directory), "the namespace of an allocation that is gone is deleted")


def test_a_reload_changes_the_limits_of_free_namespaces_only(pair3: MpsdNode) -> None:
    pair3.start()
    gpu = pair3.until_ready().gpus[0]
    pair3.apply(Desired(allocations=(share(gpu.info.uuid),)))
    gpu = pair3.until_gpu(lambda gpu: "k0" in attached(gpu))
    pair3.write_config(request="16Gi")
    pair3.until(lambda s: all(g.daemon is not None and g.daemon.pinned_limit_bytes == 16 * GIB for g in s.gpus))
    pair3.apply(Desired(allocations=(share(gpu.info.uuid), share(gpu.info.uuid, 1, gib=16))))
    after = pair3.until_gpu(lambda gpu: len(attached(gpu)) == 2)
    assert pid_of(after) == pid_of(gpu)
    assert [grants(pair3, after, "9Gi"), grants(pair3, after, "9Gi", "k1")] == [
        "CUDA_ERROR_OUT_OF_MEMORY",
        str(9 * GIB),
    ]
    assert grants(pair3, after, "17Gi", "k1") == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_group_has_one_daemon_and_its_limit_on_each_gpu(any_pair: MpsdNode) -> None:
    any_pair.write_config(pair="[1, 0]")
    any_pair.start()
    gpus = any_pair.until_ready().gpus
    assert [(gpu.group, pid_of(gpu)) for gpu in gpus] == [("pair", pid_of(gpus[0]))] * 2
    uuids = [gpu.info.uuid for gpu in reversed(gpus)]
    both = allocation(*uuids, group="pair", resource="gpufrac.dev/gpu", key="k0", slot=0, limit_bytes=8 * GIB)
    any_pair.apply(Desired(allocations=(both,)))
    any_pair.until(lambda s: all(gpu.mode is Mode.SM_SHARING for gpu in s.gpus))
    gpu = any_pair.until_gpu(lambda gpu: gpu.daemon is not None and (gpu.daemon.protocol == 2 or bool(attached(gpu))))
    for device in ("0", "1"):
        for size, answer in (("8Gi", str(8 * GIB)), ("9Gi", "CUDA_ERROR_OUT_OF_MEMORY")):
            more = {"GPUFRAC_ALLOCATION": "k0", "CUDA_VISIBLE_DEVICES": ",".join(uuids)}
            program = any_pair.cuda(gpu, "--allocate", size, "--device", device, "--info", **more)
            facts, granted = program.communicate(timeout=WAIT_S)[0].splitlines()
            assert (json.loads(facts)["devices"], granted) == (uuids, answer)


def test_clients_are_terminated_and_daemons_replaced_on_demand(any_pair: MpsdNode) -> None:
    any_pair.start()
    first, other = any_pair.until_ready().gpus
    uuid = first.info.uuid
    any_pair.apply(Desired(allocations=(share(uuid), share(uuid, 1))))
    bound = any_pair.until_gpu(lambda gpu: gpu.mode is Mode.SM_SHARING and (is_v2(gpu) or len(attached(gpu)) == 2))
    gone, stays = (any_pair.cuda(bound, "--allocate", "1Gi", "--hold", GPUFRAC_ALLOCATION=key) for key in ("k0", "k1"))
    assert [first_line(program) for program in (gone, stays)] == [str(GIB)] * 2
    done = any_pair.call("terminate", {"keys": ["k0"], "kill": True})
    assert [(one["pid"], one["outcome"], one["error"]) for one in done["clients"]] == [(gone.pid, "killed", "")]
    assert done["errors"] == []
    gone.wait(WAIT_S)
    assert stays.poll() is None
    any_pair.call("replace", {"daemon": uuid, "reason": "for the test"})
    waits = any_pair.until_gpu(lambda gpu: gpu.daemon is not None and gpu.daemon.state == "draining")
    assert waits.daemon is not None
    assert waits.daemon.reason == "it is replaced when its clients have ended: for the test"
    end(stays)
    any_pair.call("clients", {"uuids": [uuid]})  # who is left is looked up now
    second = any_pair.until_gpu(lambda gpu: is_ready(gpu) and pid_of(gpu) != pid_of(first))
    any_pair.call("replace", {"daemon": uuid, "now": True})
    third = any_pair.until_gpu(lambda gpu: is_ready(gpu) and pid_of(gpu) not in (pid_of(first), pid_of(second)))
    assert is_v2(third) or len(attached(third)) == 2
    assert pid_of(any_pair.client.snapshot().gpus[1]) == pid_of(other)
    with pytest.raises(ConfigError, match="there is none; known: "):
        any_pair.call("replace", {"daemon": "GPU-unknown"})


def is_v2(gpu: GpuStatus) -> bool:
    return gpu.daemon is not None and gpu.daemon.protocol == 2


def test_a_fault_is_in_the_log_once_with_the_daemon_s_name(pair: MpsdNode) -> None:
    pair.start()
    uuid = pair.until_ready().gpus[0].info.uuid
    pair.apply(Desired(allocations=(share(uuid),)))
    gpu = pair.until_gpu(lambda gpu: gpu.mode is Mode.SM_SHARING)
    program = pair.cuda(gpu, "--fault", "--hold", "--stay", GPUFRAC_ALLOCATION="k0")
    assert first_line(program) == "0"
    pair.call("clients", {"uuids": [uuid]})
    text = rf"MPS server \d+ is in FAULT until the clients it served have left: client pid {program.pid} \(\S+, "
    pair.until_gpu(lambda gpu: gpu.daemon is not None and re.search(text, gpu.daemon.reason) is not None)
    end(program)
    pair.until_ready()
    said = [line for line in pair.log().splitlines() if f"daemon={uuid}" in line]
    for text in (
        "Server is handling a fatal GPU error",
        "clients with a sticky error",
        "daemon configuring .*was=ready .*FAULT",
    ):
        assert len([line for line in said if re.search(text, line)]) == 1, said


def test_calls_with_nonsense_are_refused(node: MpsdNode) -> None:
    node.start()
    node.until_ready()
    for method, params in (("watch", {"generation": "x"}), ("apply", {}), ("clients", {"uuids": "all"})):
        with pytest.raises(ProtocolError, match="cannot read the parameters"):
            node.call(method, params)
    unknown = node.call("clients", {"uuids": ["GPU-unknown"]})["GPU-unknown"]
    assert unknown["error"].startswith("cannot list the clients of GPU GPU-unknown: ")
    assert node.client.status()["pid"] > 0


def past_mps(node: MpsdNode, gpu: GpuStatus, size: str = "70Gi") -> str:
    """What a CUDA program gets that a container of the GPU runs and that finds no daemon."""
    program = node.cuda(gpu, "--allocate", size, GPUFRAC_ALLOCATION="k0", CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    return program.communicate(timeout=WAIT_S)[0].strip()


BUSY = "CUDA_ERROR_DEVICE_UNAVAILABLE"


def is_held(gpu: GpuStatus) -> bool:
    return gpu.mode is Mode.SM_SHARING and is_ready(gpu) and gpu.daemon is not None and not gpu.daemon.unheld


@pytest.mark.parametrize("ending", ["none yet", "crash", "quit", "shutdown"])
def test_first_past_mps_finds_the_gpu_closed(node: MpsdNode, ending: str) -> None:
    """Before any client came, and when the last server crashed, was told to quit or was shut down."""
    node.start()
    node.until_ready()
    bind(node)
    gpu = node.until_gpu(is_held)
    assert gpu.daemon is not None
    if ending != "none yet":
        servers = [pid for pid in node.mps_processes() if pid != pid_of(gpu)]
        if ending == "crash":
            for pid in servers:
                os.kill(pid, signal.SIGKILL)
        else:
            tell(gpu, "quit" if ending == "quit" else f"shutdown_server {servers[0]} -f")
        old = {*servers, *([pid_of(gpu)] if ending == "quit" else [])}
        until(lambda: len(now := node.mps_processes()) == 2 and not old & set(now), "another server is there")
        gpu = node.until_gpu(is_held)
    assert past_mps(node, gpu) == BUSY
    assert grants(node, gpu, "4Gi") == str(4 * GIB)


def tell(gpu: GpuStatus, command: str) -> None:
    """What a container that runs as root can tell its daemon."""
    assert gpu.daemon is not None
    binary = os.path.join(
        os.path.dirname(os.path.dirname(gpu.daemon.pipe_directory)), "sim/bin/nvidia-cuda-mps-control"
    )
    environment = {"CUDA_MPS_PIPE_DIRECTORY": gpu.daemon.pipe_directory}
    subprocess.run([binary], input=command + "\n", env=environment, text=True, check=False, timeout=WAIT_S)


def test_where_no_server_can_be_started_nobody_is_let_in_and_it_is_said(node: MpsdNode) -> None:
    node.start()
    node.until_ready()
    node.switch("start-server", "nothing")
    bind(node)
    gpu = node.until_gpu(lambda gpu: gpu.daemon is not None and "told to start one" in gpu.daemon.unheld)
    node.switch("start-server", "starts")
    gpu = node.until_gpu(is_held)
    assert past_mps(node, gpu) == BUSY


def test_shared_memory_switched_on_is_told_once_the_daemon_that_runs_has_it(node: MpsdNode) -> None:
    mpsd = node.start()
    node.until_ready()
    gpu = bind(node)
    program = node.cuda(gpu, "--allocate", "4Gi", "--hold", GPUFRAC_ALLOCATION="k0")
    assert first_line(program) == str(4 * GIB)
    terminate(mpsd)
    node.write_config(mps=", sharedMemory: true")
    node.start()
    gpu = node.until_gpu(lambda g: g.daemon is not None and "no shared memory of its own" in g.daemon.reason)
    assert gpu.daemon is not None
    assert gpu.daemon.shared_memory == ""
    end(program)
    node.apply(Desired())
    gpu = node.until_gpu(lambda g: is_ready(g) and g.daemon is not None and g.daemon.shared_memory != "")
    assert gpu.daemon is not None
    assert gpu.daemon.shared_memory is not None
    assert os.path.isdir(gpu.daemon.shared_memory)
