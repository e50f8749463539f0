"""One daemon in the loop: its life, its limits, its namespaces, over fakes."""

import dataclasses
import threading
from pathlib import Path

import msgspec
import pytest

from mpsd.common.errors import TransientError
from mpsd.config.model import GIB, MpsConfig, NodeConfig
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.host import ForeignDaemonError, ProtocolChoice
from mpsd.daemon.logs.parse import FaultClients, FaultEnded, ServerExited
from mpsd.daemon.namespaces import Namespace
from mpsd.gpu.model import ComputeMode, GpuProcess, Mode
from mpsd.localapi.snapshot import DaemonState, Desired
from tests.desired import allocation, bind
from tests.reasons import because
from tests.unit.mpsd.supervision.bench import (
    CALM,
    FAST,
    ONE,
    PAIR,
    TWO,
    Bench,
    attached,
    burst,
    gpu_user,
    inventory,
    resource,
    running,
    state_of,
)
from tests.waiting import WAIT_S


def test_a_gpu_comes_and_its_daemon_is_ready_with_its_limit(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(TWO), state_of(ONE)))
    gpu = calm.until_daemon(ONE, DaemonState.READY)
    calm.until_daemon(TWO, DaemonState.READY)
    assert gpu.daemon is not None
    assert gpu.daemon.pinned_limit_bytes == 8 * GIB == calm.host.limits[ONE]
    assert gpu.daemon.pipe_directory == f"{calm.config.mps.run_root}/mps/{ONE}"
    assert [g.info.uuid for g in calm.supervisor.snapshot.gpus] == [ONE, TWO]
    assert calm.host.verbs(ONE) == ["spawn", "find", "configure"]


def test_an_exit_is_published_at_once_and_other_gpus_go_on(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.until_daemon(TWO, DaemonState.READY)
    calm.exits(ONE)
    gpu = calm.until_daemon(ONE, DaemonState.BACKOFF)
    assert gpu.daemon is not None
    assert "exited" in gpu.daemon.reason
    assert (gpu.daemon.pid, gpu.daemon.pinned_limit_bytes) == (None, None)
    calm.until_daemon(TWO, DaemonState.READY)


def test_a_lost_daemon_is_configured_again_before_ready(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.until_daemon(ONE, DaemonState.READY)
    configured = fast.host.verbs(ONE).count("configure")
    fast.exits(ONE)
    gpu = fast.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.restarts == 1 and g.daemon.state == "ready")
    assert gpu.daemon is not None
    assert gpu.daemon.pinned_limit_bytes == 8 * GIB
    assert fast.host.verbs(ONE).count("configure") > configured


def test_a_failing_query_ends_ready_and_says_why(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.until_daemon(ONE, DaemonState.READY)
    fast.host.fail["configure"] = TransientError("still wedged")
    fast.host.fail["probe"] = TransientError("cannot get an answer")
    gpu = fast.until_daemon(ONE, DaemonState.CONFIGURING)
    assert gpu.daemon is not None
    assert gpu.daemon.reason in ("cannot get an answer", "still wedged")
    gpu = fast.until_daemon(ONE, DaemonState.STOPPING)
    assert gpu.daemon is not None
    assert gpu.daemon.reason == "replaced as nobody uses it: wedged, 3 attempts in a row failed: still wedged"
    fast.exits(ONE)


def test_a_foreign_daemon_is_left_alone_and_reported(calm: Bench) -> None:
    calm.host.fail["spawn"] = ForeignDaemonError("cannot use /x: a daemon lives there")
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    gpu = calm.until_daemon(ONE, DaemonState.FAILED)
    assert gpu.daemon is not None
    assert gpu.daemon.reason == "cannot use /x: a daemon lives there"
    assert calm.host.verbs(ONE) == ["spawn"]


def test_an_unforeseen_exception_of_an_effect_is_a_failed_effect(calm: Bench) -> None:
    calm.host.fail["spawn"] = ZeroDivisionError("bug")  # type: ignore[assignment]
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.BACKOFF)


def test_a_running_daemon_is_adopted(calm: Bench) -> None:
    identity = DaemonIdentity(boot_id="b", pid=2**22 + 7, start_time=1, process_group=0, pipe_directory="/p")
    calm.host.adoptable[ONE] = identity
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    gpu = calm.until_daemon(ONE, DaemonState.READY)
    assert gpu.daemon is not None
    assert (gpu.daemon.pid, gpu.daemon.restarts) == (identity.pid, 0)
    calm.host.adoptable.clear()


def test_a_new_limit_is_set_without_a_restart(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.supervisor.config_changed(msgspec.structs.replace(calm.config, resources=(resource(16),)))
    calm.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 16 * GIB)
    assert calm.host.verbs(ONE).count("spawn") == 1


def test_a_hung_driver_call_holds_up_one_gpu_only(calm: Bench) -> None:
    gate = calm.backend.gates[ONE] = threading.Event()
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.supervisor.apply(Desired(allocations=(allocation(ONE), allocation(TWO))))
    calm.until_gpu(TWO, lambda g: g.mode is Mode.SM_SHARING)
    calm.until_daemon(ONE, DaemonState.READY)
    assert calm.supervisor.snapshot.gpus[0].mode is None
    gate.set()
    calm.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)


def test_an_allocation_of_units_gets_a_namespace_without_the_daemon_leaving_ready(three: Bench) -> None:
    three.supervisor.inventory_changed(inventory(state_of(ONE)))
    three.until_daemon(ONE, DaemonState.READY)
    units = allocation(ONE, key="u1", resource="x/units", slot=None)
    three.supervisor.apply(Desired(allocations=(units, allocation(ONE, limit_bytes=8 * GIB))))
    gpu = three.until_gpu(ONE, lambda g: attached(g) == {"u1": "", "k1": ""})
    assert gpu.daemon is not None
    assert (gpu.daemon.state, gpu.daemon.protocol) == (DaemonState.READY, 3)
    assert "u_u1" in three.host.namespaces[ONE]
    assert three.host.verbs(ONE).count("spawn") == 1
    three.supervisor.apply(Desired())
    three.until_gpu(ONE, lambda g: attached(g) == {})
    three.host.await_namespaces(ONE, lambda names: "u_u1" not in names)


def test_a_namespace_that_cannot_be_set_up_holds_up_its_allocation_only(three: Bench) -> None:
    three.host.refused["u_u1"] = because("cannot change its limit while a client of it lives")
    three.supervisor.inventory_changed(inventory(state_of(ONE)))
    units = allocation(ONE, key="u1", resource="x/units", slot=None)
    three.supervisor.apply(Desired(allocations=(units, allocation(ONE, limit_bytes=8 * GIB))))
    gpu = three.until_gpu(ONE, lambda g: bool(attached(g)) and "not set up" not in str(attached(g)))
    assert attached(gpu) == {"u1": "cannot change its limit while a client of it lives", "k1": ""}


def test_who_may_be_above_its_request_gets_the_main_socket(three: Bench) -> None:
    three.supervisor.inventory_changed(inventory(state_of(ONE)))
    three.until_daemon(ONE, DaemonState.READY)
    three.supervisor.apply(burst(ONE))
    gpu = three.until_gpu(ONE, lambda g: attached(g) == {"b1": ""} and g.mode is not None)
    assert gpu.daemon is not None
    (found,) = gpu.daemon.attached
    directory = f"{three.config.mps.run_root}/mps/{ONE}.ns/_main"
    assert (found.pipe_directory, found.limit_bytes) == (directory, 16 * GIB)
    assert (gpu.mode, gpu.driver_compute_mode) == (Mode.TIME_SLICING, ComputeMode.DEFAULT)
    three.exits(ONE)
    three.until_gpu(ONE, lambda g: attached(g) == {})
    three.supervisor.apply(Desired())


def test_the_main_socket_of_a_group(short_tmp: Path, watchless: None) -> None:
    config = NodeConfig(
        resources=(resource(),), mps=MpsConfig(run_root=f"{short_tmp}/run"), groups=(("pair0", (1, 2)),)
    )
    bench = Bench(short_tmp, CALM, config)
    bench.host.choice = ProtocolChoice(3)
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
        bench.supervisor.apply(burst(ONE, TWO, group="pair0"))
        for uuid in (ONE, TWO):
            gpu = bench.until_gpu(uuid, lambda g: attached(g) == {"b1": ""})
            assert gpu.daemon is not None
            assert gpu.daemon.attached[0].pipe_directory == f"{config.mps.run_root}/mps/pair0.ns/_main"


def test_a_main_socket_that_cannot_be_linked_holds_up_its_allocation(three: Bench) -> None:
    three.host.refused[f"{three.config.mps.run_root}/mps/{ONE}.ns/_main"] = because(
        "cannot link it: Operation not permitted"
    )
    three.supervisor.inventory_changed(inventory(state_of(ONE)))
    three.supervisor.apply(burst(ONE))
    three.until_gpu(ONE, lambda g: attached(g) == {"b1": "cannot link it: Operation not permitted"})


def test_under_protocol_2_nobody_can_be_above_its_request(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(burst(ONE))
    gpu = calm.until_gpu(ONE, lambda g: bool(attached(g)))
    assert "needs MPS protocol 3" in attached(gpu)["b1"]


def test_a_namespace_that_a_tenant_spoilt_holds_up_its_allocation_only(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, FAST)
    bench.host.choice = ProtocolChoice(3)
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        units = allocation(ONE, key="u1", resource="x/units", slot=None)
        bench.supervisor.apply(Desired(allocations=(units, allocation(ONE, limit_bytes=8 * GIB))))
        bench.until_gpu(ONE, lambda g: attached(g) == {"u1": "", "k1": ""})
        for refused in ("its socket was removed: end its clients", ""):
            bench.host.refused = {"u_u1": because(refused)} if refused else {}
            spoilt = {"u_u1": "its socket is not there", "default": "its limits read back as 1G"}
            bench.host.spoilt = {name: because(text) for name, text in spoilt.items()}
            gpu = bench.until_gpu(ONE, lambda g: attached(g) == {"u1": refused, "k1": ""})  # noqa: B023
            assert gpu.daemon is not None
            assert (gpu.daemon.state, gpu.daemon.restarts) == (DaemonState.READY, 0)
        assert "quit" not in bench.host.verbs(ONE)


def test_an_objection_to_what_is_set_otherwise_by_now_is_none(three: Bench) -> None:
    three.supervisor.inventory_changed(inventory(state_of(ONE)))
    three.supervisor.apply(Desired(allocations=(allocation(ONE, limit_bytes=8 * GIB),)))
    three.until_gpu(ONE, lambda g: attached(g) == {"k1": ""})
    keeper = three.supervisor._node.daemons[ONE]
    name = keeper.spec.namespaces[0].name
    old = dataclasses.replace(keeper.spec, namespaces=(Namespace(name, GIB),))
    gate = three.host.gates["configure"] = threading.Event()
    keeper._on_answered(old, {name: because("its limits read back as 8G")})
    assert keeper.in_force.verified
    keeper._on_answered(keeper.spec, {name: because("its limits read back as 9G")})
    assert keeper.in_force.refused == {name: because("its limits read back as 9G")}
    gate.set()


def test_a_fault_in_the_logs_ends_ready_names_the_client_and_passes(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.until_daemon(ONE, DaemonState.READY)
    with gpu_user("k1") as pid:
        fast.backend.running[ONE] = (GpuProcess(pid=pid),)
        fast.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        fast.until_gpu(ONE, lambda g: bool(g.clients))
        fast.supervisor.log_event(ONE, FaultClients(server=77, pids=(pid,)))
        gpu = fast.until_daemon(ONE, DaemonState.CONFIGURING)
        assert gpu.daemon is not None
        assert f"MPS server 77 is in FAULT until the clients it served have left: client pid {pid} (python" in (
            gpu.daemon.reason
        )
        assert "allocation k1)" in gpu.daemon.reason
        fast.supervisor.log_event(ONE, FaultEnded(server=77))
        fast.until_daemon(ONE, DaemonState.READY)
        fast.backend.running.clear()
        fast.supervisor.inventory_changed(inventory(state_of(ONE)))
        fast.until_gpu(ONE, lambda g: not g.clients)


def test_servers_in_a_restart_loop_end_ready(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    for pid in range(100, 105):
        calm.supervisor.log_event(ONE, ServerExited(pid=pid, status=1))
    gpu = calm.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.state == "configuring")
    assert gpu.daemon is not None
    assert "MPS servers end as soon as they are started: 5 times" in gpu.daemon.reason


def test_a_draining_daemon_is_asked_for_the_limit_it_has_not_for_the_next(fast: Bench) -> None:
    fast.host.strict = True
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.supervisor.apply(bind(ONE, limit_bytes=8 * GIB))
    fast.until_daemon(ONE, DaemonState.READY)
    with gpu_user("k1") as pid:
        fast.backend.running[ONE] = (GpuProcess(pid=pid),)
        fast.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        fast.until_gpu(ONE, lambda g: bool(g.clients))
        fast.supervisor.replace(ONE, "newer", now=False)
        fast.until_daemon(ONE, DaemonState.DRAINING)
        fast.supervisor.config_changed(msgspec.structs.replace(fast.config, resources=(resource(16),)))
        for _ in range(3):
            fast.backend_looked.get(timeout=WAIT_S)
        gpu = fast.until_daemon(ONE, DaemonState.DRAINING)
        assert gpu.daemon is not None
        assert (gpu.daemon.pinned_limit_bytes, gpu.daemon.reason.endswith("newer")) == (8 * GIB, True)
        fast.backend.running.clear()
        fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.host.await_call("quit", ONE)
    fast.exits(ONE)
    fast.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 16 * GIB)


def test_a_daemon_that_cannot_be_judged_is_not_taken_for_gone(
    short_tmp: Path, watchless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpsd.supervision.daemon.FIND_RETRY_S", 0.01)
    bench = Bench(short_tmp, FAST, msgspec.structs.replace(PAIR, mps=MpsConfig(run_root=f"{short_tmp}/run")))
    old = DaemonIdentity(boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p")
    bench.state.record_daemon(ONE, old)  # of a version that recorded no GPUs
    bench.host.adoptable[ONE] = old
    bench.host.fail["find"] = TransientError("cannot read")
    bench.host.on_quit = bench.exits
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
        bench.host.await_call("find", ONE)
        gpu = bench.until_gpu(ONE, lambda g: g.daemon is not None and bool(g.daemon.reason))
        assert gpu.daemon is not None
        assert gpu.daemon.reason == "it takes the place of others, which end when unused: GPU 1 (looked for)"
        assert "spawn" not in bench.host.verbs("pair")
        bench.host.fail.clear()
        bench.until_daemon(ONE, DaemonState.READY)
        assert bench.host.calls.index(("kill", ONE)) < bench.host.calls.index(("spawn", "pair"))
