"""A cleanup on request, and the end of mpsd, over fakes."""

import threading
from pathlib import Path

from mpsd.daemon.adopt import DaemonIdentity
from mpsd.gpu.backend import GpuError
from mpsd.gpu.model import ComputeMode, GpuProcess, Mode
from mpsd.localapi.snapshot import DaemonState
from tests.desired import bind
from tests.unit.mpsd.supervision.bench import CALM, FAST, ONE, TWO, Bench, gpu_user, inventory, running, state_of
from tests.waiting import WAIT_S


def test_cleanup_before_any_gpu_is_known_ends_what_is_recorded_and_names_the_rest(
    short_tmp: Path, watchless: None
) -> None:
    bench = Bench(short_tmp, FAST)
    old = DaemonIdentity(boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", gpus=(ONE,))
    bench.state.record_daemon(ONE, old)
    bench.state.record_compute_mode(TWO, ComputeMode.DEFAULT)
    bench.host.adoptable[ONE] = old
    bench.host.on_quit = bench.exits
    with running(bench):
        left = bench.supervisor.cleanup(0.5)
        assert left == [f"GPU {TWO}: its compute mode DEFAULT is to be given back"]
        assert "kill" in bench.host.verbs(ONE)


def test_an_idle_daemon_adopted_while_mpsd_stops_is_ended(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, CALM)
    gate = bench.host.gates["spawn"] = threading.Event()
    bench.host.adoptable[ONE] = DaemonIdentity(
        boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", gpus=(ONE,)
    )
    bench.host.on_quit = bench.exits
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.host.await_call("spawn", ONE)
        closer = threading.Thread(target=bench.supervisor.close)
        closer.start()
        bench.backend_looked.get(timeout=WAIT_S)
        gate.set()
        closer.join(WAIT_S)
        assert not closer.is_alive()
        assert "kill" in bench.host.verbs(ONE)


def test_cleanup_ends_everything_and_starts_nothing_again(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE, Mode.SM_SHARING))
    calm.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    calm.until_daemon(ONE, DaemonState.READY)
    calm.host.on_quit = calm.exits
    assert calm.supervisor.cleanup() == []
    gpu = calm.until_daemon(ONE, DaemonState.ABSENT)
    assert gpu.mode is None
    assert "restart mpsd" in gpu.not_shared
    assert calm.backend.modes[ONE] is ComputeMode.DEFAULT
    assert calm.state.saved.compute_modes == {}


def test_cleanup_names_what_it_could_not_undo(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE, Mode.SM_SHARING))
    calm.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    calm.until_daemon(ONE, DaemonState.READY)
    calm.backend.fail["set_compute_mode"] = GpuError("cannot set it")
    calm.host.on_quit = calm.exits
    assert calm.supervisor.cleanup() == [f"GPU {ONE}: cannot set it"]
    calm.backend.fail.clear()


def test_a_stop_leaves_the_daemon_of_a_bound_gpu_and_ends_the_idle_one(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, CALM)
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
        bench.supervisor.apply(bind(ONE, Mode.SM_SHARING))
        bench.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
        bench.until_daemon(ONE, DaemonState.READY)
        bench.until_daemon(TWO, DaemonState.READY)
    assert "quit" not in bench.host.verbs(ONE)
    assert bench.host.verbs(TWO)[-2:] == ["quit", "kill"]
    assert bench.backend.modes[ONE] is ComputeMode.EXCLUSIVE_PROCESS
    assert bench.state.saved.compute_modes == {ONE: ComputeMode.DEFAULT}
    assert bench.state.saved.desired == bind(ONE, Mode.SM_SHARING)


def test_a_stop_leaves_a_daemon_with_a_client(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, CALM)
    with gpu_user("k1") as pid, running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.READY)
        bench.backend.running[ONE] = (GpuProcess(pid=pid),)  # came after the last probe
        bench.supervisor.close()
    assert "quit" not in bench.host.verbs(ONE)
