"""Who uses a GPU, over fakes."""

import os
import threading
from pathlib import Path

import pytest

from mpsd.common.errors import TransientError
from mpsd.common.reason import Reason
from mpsd.config.model import MpsConfig, NodeConfig
from mpsd.daemon.controller import MpsClients
from mpsd.daemon.logs.parse import ClientConnected, Evictions
from mpsd.gpu.backend import GpuError, GpuLostError, GpuNotSupportedError
from mpsd.gpu.model import GpuProcess, Mode
from mpsd.localapi.reasons import ClientsCode, ConfigCode
from mpsd.localapi.snapshot import DaemonState, GpuClients
from mpsd.supervision import happenings
from tests.desired import bind
from tests.unit.mpsd.supervision.bench import CALM, ONE, TWO, Bench, gpu_user, inventory, resource, running, state_of
from tests.waiting import WAIT_S, until


def test_clients_are_joined_and_told_apart(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    with gpu_user("k1") as mps, gpu_user("k2") as plain, gpu_user(None) as foreign, gpu_user(None) as server:
        processes = tuple(GpuProcess(pid=pid, used_bytes=pid) for pid in (mps, plain, foreign, server))
        calm.host.connected[ONE] = MpsClients((server,), (mps, 2**22 + 5))
        calm.supervisor.inventory_changed(inventory(state_of(ONE, processes=processes)))
        gpu = calm.until_gpu(ONE, lambda g: bool(g.clients))
        seen = {client.pid: (client.allocation_key, client.mps, client.used_bytes) for client in gpu.clients}
        assert seen == {mps: ("k1", True, mps), plain: ("k2", False, plain), foreign: (None, False, foreign)}
        assert gpu.foreign_processes == (foreign,)
        calm.backend.running[ONE] = (GpuProcess(pid=mps),)
        assert [c.pid for c in calm.supervisor.clients([ONE])[ONE].clients] == [mps]
        calm.until_gpu(ONE, lambda g: len(g.clients) == 1)
        calm.backend.running.clear()
        calm.host.connected.clear()
        assert calm.supervisor.clients([ONE]) == {ONE: GpuClients()}


def test_a_tenant_that_says_it_is_a_daemon_stays_a_client_of_its_pod(short_tmp: Path, watchless: None) -> None:
    mps = MpsConfig(run_root=f"{short_tmp}/run")
    config = NodeConfig(resources=(resource(),), mps=mps, backend="simulated")
    with running(Bench(short_tmp, CALM, config)) as bench, gpu_user(None, GPUFRAC_DAEMON=ONE) as server:
        with gpu_user(None, GPUFRAC_DAEMON=ONE, GPUFRAC_SIM_POD_UID="uid-1") as tenant:
            bench.supervisor.inventory_changed(inventory(state_of(ONE)))
            bench.until_daemon(ONE, DaemonState.READY)
            bench.backend.running[ONE] = tuple(GpuProcess(pid=pid) for pid in (server, tenant))
            (client,) = bench.supervisor.clients([ONE])[ONE].clients
            assert (client.pid, client.pod_uid, client.allocation_key) == (tenant, "uid-1", None)
        bench.backend.running.clear()


def test_more_memory_alone_asks_no_daemon(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    with gpu_user("k1") as pid:
        calm.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid, used_bytes=1),))))
        calm.until_gpu(ONE, lambda g: bool(g.clients))
        asked = calm.host.verbs(ONE).count("clients")
        calm.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid, used_bytes=2),))))
        calm.until_gpu(ONE, lambda g: bool(g.clients) and g.clients[0].used_bytes == 2)
        assert calm.host.verbs(ONE).count("clients") == asked
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))


def test_clients_that_cannot_be_told_are_an_error_not_an_empty_list(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.host.fail["clients"] = TransientError("cannot get an answer")
    error = f"cannot list the clients of GPU {ONE}: cannot get an answer"
    assert calm.supervisor.clients([ONE]) == {ONE: GpuClients(error=error, error_code=ClientsCode.FAILED)}
    calm.host.fail.clear()
    calm.backend.fail["processes"] = GpuError("cannot call")
    assert calm.supervisor.clients([ONE])[ONE].error.endswith(": cannot call")
    calm.backend.fail["processes"] = GpuLostError("lost")
    assert calm.supervisor.clients([ONE]) == {ONE: GpuClients()}
    calm.backend.fail.clear()


def test_a_hung_gpu_spoils_no_other_answer_and_no_look_up_piles_up(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.until_daemon(TWO, DaemonState.READY)
    asked = calm.host.verbs(ONE).count("clients")
    gate = calm.backend.gates[ONE] = threading.Event()
    calm.supervisor.apply(bind(ONE, Mode.SM_SHARING))  # hangs, and with it all driver calls of this GPU

    def other_is_told() -> bool:
        found = calm.supervisor.clients([ONE, TWO, "GPU-unknown"], timeout_s=0.2)
        assert found[ONE].error == f"cannot list the clients of GPU {ONE}: no answer in 0.2 s"
        assert "does not know this GPU" in found["GPU-unknown"].error
        return found[TWO] == GpuClients()

    for _ in range(5):
        until(other_is_told)
    gate.set()
    assert calm.supervisor.clients([ONE]) == {ONE: GpuClients()}
    # The one that hung, and the one just asked for, which waited for it.
    assert calm.host.verbs(ONE).count("clients") <= asked + 2


def test_clients_without_a_pid_are_explained(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.supervisor.log_event(ONE, ClientConnected(0, 1000))
    calm.until(lambda s: any("not in the host's PID namespace" in warning for warning in s.warnings))


def test_clients_that_have_no_pid_are_not_nobody(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.until_daemon(ONE, DaemonState.READY)
    fast.host.connected[ONE] = MpsClients((), (0,))
    assert "knows clients by PID 0 only" in fast.supervisor.clients([ONE])[ONE].error
    fast.supervisor.replace(ONE, "newer", now=False)
    fast.until_daemon(ONE, DaemonState.DRAINING)
    for _ in range(3):
        fast.backend_looked.get(timeout=WAIT_S)
    assert "quit" not in fast.host.verbs(ONE)
    fast.host.connected.clear()
    fast.host.await_call("quit", ONE)
    fast.exits(ONE)


def test_a_driver_that_lists_no_processes_does_not_make_a_wedged_daemon_idle(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.until_daemon(ONE, DaemonState.READY)
    fast.backend.fail["processes"] = GpuNotSupportedError("cannot: not supported")
    for verb in ("configure", "probe", "probe servers", "clients"):
        fast.host.fail[verb] = TransientError("cannot get an answer")
    fast.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.wedged)
    for _ in range(3):
        fast.backend_looked.get(timeout=WAIT_S)
    assert "quit" not in fast.host.verbs(ONE)
    fast.host.fail.clear()
    fast.until_daemon(ONE, DaemonState.READY)


def test_a_count_that_failed_does_not_say_that_nobody_is_there(short_tmp: Path, watchless: None) -> None:
    with running(Bench(short_tmp, CALM)) as bench, gpu_user(None) as pid:
        bench.host.fail["clients"] = TransientError("cannot get an answer")
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.READY)
        bench.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        bench.host.await_call("clients", ONE)
        bench.supervisor.apply(bind(ONE))
        bench.supervisor.config_refused(Reason(ConfigCode.REFUSED, "a mark"))
        bench.until(lambda s: s.config_error == "a mark")
        assert bench.backend.set_calls == []
        bench.host.fail.clear()


def test_pids_of_tests_are_free() -> None:
    """The fakes' PIDs lie above what the kernel gives."""
    assert int(Path("/proc/sys/kernel/pid_max").read_text()) <= 2**22
    assert not os.path.exists(f"/proc/{2**22 + 1}")


def test_evictions_that_the_daemons_log_tells_are_shown(calm: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(happenings, "SETTLE_S", 0.2)
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.supervisor.log_event(ONE, Evictions(ONE, 1))
    calm.supervisor.log_event(ONE, Evictions(ONE, 3))
    calm.until_gpu(ONE, lambda gpu: gpu.evictions == 3)
    told = until(lambda: [(w.total, w.subject.gpus) for w in calm.heard.words if w.kind == "Evicted"])
    assert told == [(3, (ONE,))]
    assert [gpu.evictions for gpu in calm.supervisor.snapshot.gpus] == [3, 0]
