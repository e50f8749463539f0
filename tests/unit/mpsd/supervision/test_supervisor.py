"""The loop over fakes: what goes in, which snapshot and which effects come out."""

import dataclasses
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from mpsd.common.errors import ConfigError, TransientError
from mpsd.config.model import GIB, Enforcement, FixedMemory, GpuSelection, MpsConfig, NodeConfig, Resource
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.controller import MpsClients
from mpsd.daemon.exits import ExitWatcher
from mpsd.daemon.host import ForeignDaemonError, ProtocolChoice
from mpsd.daemon.lifecycle import Policy
from mpsd.daemon.logs.parse import ClientConnected, Evictions, FaultClients, FaultEnded, ServerExited
from mpsd.daemon.namespaces import Namespace
from mpsd.daemon.paths import MAIN
from mpsd.daemon.state import StateFile
from mpsd.gpu.backend import GpuError, GpuLostError, GpuNotSupportedError
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo, GpuProcess, GpuState, Inventory, Mode
from mpsd.localapi.snapshot import DaemonState, Desired, GpuClients, GpuStatus, Snapshot
from mpsd.supervision.supervisor import Supervisor
from tests.desired import allocation, bind
from tests.reasons import because
from tests.unit.mpsd.supervision.fakes import FakeBackend, FakeHost, FakeLogs
from tests.waiting import WAIT_S, until

ONE, TWO = (f"GPU-00000000-0000-4000-8000-{n:012d}" for n in (1, 2))
FAST = Policy(
    retry_s=0.01,
    probe_interval_s=0.01,
    drain_check_s=0.01,
    backoff_min_s=0.01,
    backoff_max_s=0.01,
    failed_retry_s=0.01,
    wedged_retry_s=0.01,
)
CALM = Policy(probe_interval_s=1000.0, backoff_min_s=1000.0, backoff_max_s=1000.0, drain_check_s=1000.0)


def resource(request_gib: int = 8) -> Resource:
    size = request_gib * GIB
    memory = FixedMemory(request_bytes=size, limit_bytes=size)
    return Resource(name="x/y", memory=memory, mode=Mode.SM_SHARING, enforcement=Enforcement.COOPERATIVE)


def state_of(uuid: str, **fields: object) -> GpuState:
    info = GpuInfo(uuid=uuid, index=int(uuid[-1]), name="", memory_total_bytes=80 * GIB)
    values = {"compute_mode": ComputeMode.DEFAULT, **fields}
    return GpuState(info=info, **values)  # type: ignore[arg-type]


def inventory(*states: GpuState) -> Inventory:
    return Inventory(driver_version="580.95.05", gpus=states)


class Bench:
    """A supervisor over fakes."""

    def __init__(self, root: Path, policy: Policy, config: NodeConfig | None = None) -> None:
        self.config = config or NodeConfig(resources=(resource(),), mps=MpsConfig(run_root=f"{root}/run"))
        self.host = FakeHost()
        self.backend = FakeBackend()
        self.state = StateFile(f"{root}/state/mpsd.json", "boot")
        self.kicks = 0
        self.backend_looked = self.backend.looked
        self.logs = FakeLogs()
        self.supervisor = Supervisor(
            self.config, self.backend, self.host, self.state, logs=self.logs, kick=self._kick, policy=policy
        )

    def _kick(self) -> None:
        self.kicks += 1

    def exits(self, uuid: str) -> None:
        """Posts the end of a daemon as its pidfd would."""
        identity = self.supervisor._node.daemons[uuid].identity
        assert identity is not None
        self.supervisor._watcher._on_exit(identity)

    def until(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """Waits by the watch API for a snapshot that fits."""
        snapshot = self.supervisor.snapshot
        while not condition(snapshot):
            newer = self.supervisor.watch(snapshot.instance, snapshot.generation, WAIT_S)
            assert newer.generation != snapshot.generation, f"nothing more happens: {snapshot}"
            snapshot = newer
        return snapshot

    def until_gpu(self, uuid: str, condition: Callable[[GpuStatus], bool]) -> GpuStatus:
        def find(snapshot: Snapshot) -> GpuStatus | None:
            return next((gpu for gpu in snapshot.gpus if gpu.info.uuid == uuid), None)

        found = find(self.until(lambda snapshot: (gpu := find(snapshot)) is not None and condition(gpu)))
        assert found is not None
        return found

    def until_daemon(self, uuid: str, *states: DaemonState) -> GpuStatus:
        return self.until_gpu(uuid, lambda gpu: gpu.daemon is not None and gpu.daemon.state in states)


@pytest.fixture
def watchless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake daemons have no process to watch."""
    monkeypatch.setattr(ExitWatcher, "watch", lambda _self, _identity: None)


@contextmanager
def running(bench: Bench) -> Iterator[Bench]:
    bench.supervisor.start()
    try:
        yield bench
    finally:
        bench.host.on_quit = bench.exits
        bench.supervisor.close()


@pytest.fixture
def calm(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    with running(Bench(short_tmp, CALM)) as bench:
        yield bench


@pytest.fixture
def fast(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    with running(Bench(short_tmp, FAST)) as bench:
        yield bench


def test_before_the_first_probe_there_is_a_snapshot_with_a_reason(calm: Bench) -> None:
    snapshot = calm.supervisor.snapshot
    assert (snapshot.gpus, snapshot.reason) == ((), "GPUs are not probed yet")


def test_a_gpu_comes_and_its_daemon_is_ready_with_its_limit(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(TWO), state_of(ONE)))
    gpu = calm.until_daemon(ONE, DaemonState.READY)
    calm.until_daemon(TWO, DaemonState.READY)
    assert gpu.daemon is not None
    assert gpu.daemon.pinned_limit_bytes == 8 * GIB == calm.host.limits[ONE]
    assert gpu.daemon.pipe_directory == f"{calm.config.mps.run_root}/mps/{ONE}"
    assert [g.info.uuid for g in calm.supervisor.snapshot.gpus] == [ONE, TWO]
    assert calm.host.verbs(ONE) == ["spawn", "find", "configure"]


def test_no_gpus_is_a_state_with_a_reason(calm: Bench) -> None:
    calm.supervisor.inventory_changed(Inventory(reason="cannot load libnvidia-ml.so.1"))
    calm.until(lambda snapshot: snapshot.reason == "cannot load libnvidia-ml.so.1")


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


@pytest.mark.parametrize(
    ("mode", "compute_mode"),
    [(Mode.SM_SHARING, ComputeMode.EXCLUSIVE_PROCESS), (Mode.TIME_SLICING, ComputeMode.DEFAULT)],
)
def test_binding_and_its_end(calm: Bench, mode: Mode, compute_mode: ComputeMode) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE, mode))
    gpu = calm.until_gpu(ONE, lambda g: g.mode is mode)
    assert gpu.driver_compute_mode is compute_mode is calm.backend.modes[ONE]
    calm.supervisor.apply(Desired())
    gpu = calm.until_gpu(ONE, lambda g: g.mode is None and g.driver_compute_mode is ComputeMode.DEFAULT)
    calm.until(lambda _: calm.state.saved.compute_modes == {})
    assert calm.backend.modes[ONE] is ComputeMode.DEFAULT


def test_what_cannot_be_remembered_is_said_and_written_once_it_can_be(
    calm: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    wanted = bind(ONE, Mode.TIME_SLICING)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("mpsd.common.records.replace_file", full)
        calm.supervisor.apply(wanted)
        calm.until(lambda snapshot: any("No space left" in warning for warning in snapshot.warnings))
    calm.supervisor.apply(wanted)  # the plugin says it again from time to time
    calm.until(lambda snapshot: not snapshot.warnings)
    assert calm.state.saved.desired == wanted


def test_an_index_of_the_config_means_the_gpu_of_before_until_it_is_confirmed(short_tmp: Path, watchless: None) -> None:
    """GPU 0 has fallen out at a boot, and the driver gives its number to the next: that one was kept out before."""
    chosen = NodeConfig(
        resources=(resource(),),
        gpus=GpuSelection(include=(0, 1)),
        mps=MpsConfig(run_root=f"{short_tmp}/run"),
    )
    zero, one, two = (f"GPU-{n}" for n in range(3))

    def at(uuid: str, index: int) -> GpuState:
        state = state_of(uuid)
        return msgspec.structs.replace(state, info=msgspec.structs.replace(state.info, index=index))

    def shared(snapshot: Snapshot) -> set[str]:
        return {gpu.info.uuid for gpu in snapshot.gpus if not gpu.not_shared}

    with running(Bench(short_tmp, CALM, chosen)) as bench:
        bench.supervisor.inventory_changed(inventory(at(zero, 0), at(one, 1), at(two, 2)))
        snapshot = bench.until(lambda s: len(s.gpus) == 3)
        assert (shared(snapshot), snapshot.warnings) == ({zero, one}, ())
    with running(Bench(short_tmp, CALM, chosen)) as bench:
        bench.supervisor.inventory_changed(inventory(at(one, 0), at(two, 1)))
        snapshot = bench.until(lambda s: len(s.gpus) == 2)
        assert shared(snapshot) == {one}
        moved, missing = snapshot.warnings
        assert f"{one} is 0 now and was 1" in moved
        assert f"{two} is 1 now and was 2" in moved
        assert "gpufrac mpsd confirm-indices" in moved
        assert missing.startswith(f"the config names GPU 0 ({zero}), which is not on this node: gpus.include")
        new = "GPU-9"
        bench.supervisor.inventory_changed(inventory(at(new, 0), at(one, 1), at(two, 2)))
        snapshot = bench.until(lambda s: any(gpu.info.uuid == new for gpu in s.gpus))
        (replaced,) = (gpu for gpu in snapshot.gpus if gpu.info.uuid == new)
        assert "the config means another GPU by its index 0" in replaced.not_shared
        bench.supervisor.inventory_changed(Inventory(driver_version="580.95.05", reason="GPU x: it hangs"))
        bench.until(lambda s: "hangs" in s.reason)
        with pytest.raises(TransientError, match="not all are seen"):
            bench.supervisor.confirm_indices()
        bench.supervisor.inventory_changed(inventory(at(new, 0), at(one, 1), at(two, 2)))
        bench.until(lambda s: not s.reason)
        bench.supervisor.confirm_indices()
        snapshot = bench.until(lambda s: shared(s) == {new, one})
        assert snapshot.warnings == ()
    assert bench.state.saved.numbering == {new: 0, one: 1, two: 2}


def test_a_mode_is_in_force_only_once_it_was_applied(calm: Bench) -> None:
    calm.backend.fail["set_compute_mode"] = GpuError("cannot set the compute mode: Insufficient Permissions")
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE, Mode.SM_SHARING))
    gpu = calm.until_gpu(ONE, lambda g: bool(g.reason))
    assert (gpu.mode, gpu.reason) == (None, "cannot set the compute mode: Insufficient Permissions")
    calm.backend.fail.clear()


def test_a_mode_changed_behind_our_back_is_set_again(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE, Mode.SM_SHARING))
    calm.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    calm.backend.modes[ONE] = ComputeMode.DEFAULT
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    for _ in range(2):
        assert calm.backend.sets.get(timeout=WAIT_S) == (ONE, ComputeMode.EXCLUSIVE_PROCESS)


@pytest.mark.parametrize(
    ("mode", "changed"),
    [
        (Mode.SM_SHARING, ComputeMode.DEFAULT),
        (Mode.TIME_SLICING, ComputeMode.EXCLUSIVE_PROCESS),
        (Mode.TIME_SLICING, ComputeMode.PROHIBITED),
    ],
)
def test_a_mode_is_not_in_force_while_the_driver_shows_another(calm: Bench, mode: Mode, changed: ComputeMode) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE, mode))
    before = calm.until_gpu(ONE, lambda g: g.mode is mode)
    gate = calm.backend.gates[ONE] = threading.Event()
    calm.backend.modes[ONE] = changed
    calm.supervisor.inventory_changed(inventory(state_of(ONE, compute_mode=changed)))
    assert calm.until_gpu(ONE, lambda g: g.driver_compute_mode is changed).mode is None
    gate.set()
    gpu = calm.until_gpu(ONE, lambda g: g.mode is mode)
    assert gpu.driver_compute_mode is before.driver_compute_mode is calm.backend.modes[ONE]


def test_a_reading_from_before_our_change_does_not_end_the_mode(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE, Mode.SM_SHARING))
    calm.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    calm.supervisor.inventory_changed(inventory(state_of(ONE, read_s=0.0, reason="old", health=GpuHealth.SICK)))
    gpu = calm.until_gpu(ONE, lambda g: g.reason == "old")
    assert (gpu.mode, gpu.driver_compute_mode) == (Mode.SM_SHARING, ComputeMode.EXCLUSIVE_PROCESS)


def test_an_unknown_compute_mode_fits(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE, Mode.SM_SHARING))
    calm.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    calm.supervisor.inventory_changed(inventory(state_of(ONE, compute_mode=ComputeMode.UNKNOWN)))
    gpu = calm.until_gpu(ONE, lambda g: g.driver_compute_mode is ComputeMode.UNKNOWN)
    assert gpu.mode is Mode.SM_SHARING


def test_the_trouble_of_a_binding_goes_with_it(calm: Bench) -> None:
    with gpu_user(None) as pid:
        calm.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        calm.supervisor.apply(bind(ONE, Mode.SM_SHARING))
        calm.until_gpu(ONE, lambda g: "foreign processes" in g.reason)
        calm.supervisor.apply(bind(ONE, None))
        calm.until_gpu(ONE, lambda g: g.reason == "")


def test_the_desired_state_outlives_mpsd(short_tmp: Path, watchless: None) -> None:
    StateFile(f"{short_tmp}/state/mpsd.json", "boot").record_desired(bind(ONE, Mode.SM_SHARING))
    with running(Bench(short_tmp, CALM)) as again:
        again.supervisor.inventory_changed(inventory(state_of(ONE)))
        again.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)


def test_a_mode_left_by_an_earlier_mpsd_is_restored(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, CALM)
    bench.state.record_compute_mode(ONE, ComputeMode.DEFAULT)
    bench.backend.modes[ONE] = ComputeMode.EXCLUSIVE_PROCESS
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE, compute_mode=ComputeMode.EXCLUSIVE_PROCESS)))
        bench.until_gpu(ONE, lambda g: g.driver_compute_mode is ComputeMode.DEFAULT)


@contextmanager
def gpu_user(key: str | None, **environment: str) -> Iterator[int]:
    """A process that holds an allocation, or none."""
    if key is not None:
        environment["GPUFRAC_ALLOCATION"] = key
    arguments = [sys.executable, "-ISc", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


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
    assert calm.supervisor.clients([ONE]) == {ONE: GpuClients(error=error)}
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


def test_a_gpu_with_foreign_processes_is_not_bound_until_they_end(calm: Bench) -> None:
    with gpu_user(None) as pid:
        calm.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        calm.until_daemon(ONE, DaemonState.READY)
        calm.supervisor.apply(bind(ONE, Mode.SM_SHARING))
        gpu = calm.until_gpu(ONE, lambda g: bool(g.reason))
        assert gpu.reason == f"cannot bind it to sm-sharing: foreign processes use it (pid {pid})"
        assert (gpu.mode, gpu.foreign_processes) == (None, (pid,))
        assert calm.backend.set_calls == []
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    gpu = calm.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    assert gpu.reason == ""


def test_a_new_limit_is_set_without_a_restart(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.supervisor.config_changed(msgspec.structs.replace(calm.config, resources=(resource(16),)))
    calm.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 16 * GIB)
    assert calm.host.verbs(ONE).count("spawn") == 1


def test_what_needs_a_restart_is_said_and_not_taken(calm: Bench) -> None:
    calm.supervisor.config_changed(msgspec.structs.replace(calm.config, mps=MpsConfig(run_root="/elsewhere")))
    calm.until(lambda s: (s.config_error, s.config_restart_needed) == ("", "mps.runRoot"))
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    gpu = calm.until_daemon(ONE, DaemonState.READY)
    assert gpu.daemon is not None
    assert gpu.daemon.pipe_directory.startswith(calm.config.mps.run_root)
    calm.supervisor.config_refused("c.yaml:3: memory: unknown key")
    calm.until(lambda s: s.config_error == "c.yaml:3: memory: unknown key")
    calm.supervisor.config_changed(calm.config)
    calm.until(lambda s: s.config_error == "")


def test_a_reload_does_not_put_the_limit_below_a_live_allocation(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.supervisor.apply(bind(ONE, Mode.SM_SHARING, 40 * GIB))
    calm.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 40 * GIB)
    calm.supervisor.config_changed(msgspec.structs.replace(calm.config, resources=(resource(4),)))
    calm.until_gpu(TWO, lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 4 * GIB)
    assert calm.host.limits[ONE] == 40 * GIB
    calm.supervisor.apply(bind(ONE, None))
    calm.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 4 * GIB)
    assert calm.host.verbs(ONE).count("spawn") == 1


def test_the_limit_of_live_allocations_outlives_mpsd(short_tmp: Path, watchless: None) -> None:
    StateFile(f"{short_tmp}/state/mpsd.json", "boot").record_desired(bind(ONE, Mode.SM_SHARING, 40 * GIB))
    with running(Bench(short_tmp, CALM)) as again:
        again.supervisor.inventory_changed(inventory(state_of(ONE)))
        gpu = again.until_daemon(ONE, DaemonState.READY)
        assert gpu.daemon is not None
        assert gpu.daemon.pinned_limit_bytes == 40 * GIB
        assert again.host.verbs(ONE).count("configure") == 1


def test_a_gpu_excluded_by_a_reload_keeps_its_daemon_while_it_is_bound(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.supervisor.apply(bind(ONE, Mode.SM_SHARING, 8 * GIB))
    fast.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    fast.until_daemon(ONE, DaemonState.READY)
    fast.supervisor.config_changed(msgspec.structs.replace(fast.config, gpus=GpuSelection(exclude=(ONE,))))
    gpu = fast.until_gpu(ONE, lambda g: g.not_shared == "it is excluded by the config")
    assert gpu.mode is Mode.SM_SHARING
    gpu = fast.until_daemon(ONE, DaemonState.READY)
    fast.exits(ONE)
    gpu = fast.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.restarts == 1 and g.daemon.state == "ready")
    assert gpu.daemon is not None
    assert gpu.daemon.pinned_limit_bytes is not None
    assert gpu.daemon.pinned_limit_bytes >= 8 * GIB
    assert "quit" not in fast.host.verbs(ONE)
    fast.supervisor.apply(Desired())
    fast.until_daemon(ONE, DaemonState.STOPPING)
    fast.exits(ONE)
    fast.until_gpu(ONE, lambda g: g.daemon is None)


def test_an_excluded_gpu_that_is_bound_gets_its_daemon_from_a_new_mpsd(short_tmp: Path, watchless: None) -> None:
    config = NodeConfig(resources=(), gpus=GpuSelection(exclude=(ONE,)), mps=MpsConfig(run_root=f"{short_tmp}/run"))
    StateFile(f"{short_tmp}/state/mpsd.json", "boot").record_desired(bind(ONE, Mode.SM_SHARING, 8 * GIB))
    with running(Bench(short_tmp, CALM, config)) as bench:
        bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
        gpu = bench.until_daemon(ONE, DaemonState.READY)
        assert gpu.not_shared == "it is excluded by the config"


def test_a_recorded_daemon_of_an_unshared_gpu_is_found_and_ended(short_tmp: Path, watchless: None) -> None:
    config = NodeConfig(resources=(), gpus=GpuSelection(exclude=(ONE,)), mps=MpsConfig(run_root=f"{short_tmp}/run"))
    bench = Bench(short_tmp, FAST, config)
    identity = DaemonIdentity(boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p")
    bench.state.record_daemon(ONE, identity)
    bench.host.adoptable[ONE] = identity
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.STOPPING)
        bench.exits(ONE)
        bench.until_gpu(ONE, lambda g: g.daemon is None)


def test_a_vanished_gpu_is_lost_and_keeps_its_place(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.until_daemon(TWO, DaemonState.READY)
    calm.supervisor.inventory_changed(inventory(state_of(TWO)))
    gpu = calm.until_gpu(ONE, lambda g: g.health is GpuHealth.LOST)
    assert gpu.reason == "the driver no longer lists this GPU"
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.until_gpu(ONE, lambda g: g.health is GpuHealth.OK)


def test_a_hung_driver_call_holds_up_one_gpu_only(calm: Bench) -> None:
    gate = calm.backend.gates[ONE] = threading.Event()
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.supervisor.apply(Desired(allocations=(allocation(ONE), allocation(TWO))))
    calm.until_gpu(TWO, lambda g: g.mode is Mode.SM_SHARING)
    calm.until_daemon(ONE, DaemonState.READY)
    assert calm.supervisor.snapshot.gpus[0].mode is None
    gate.set()
    calm.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)


# Groups


PAIR = NodeConfig(resources=(msgspec.structs.replace(resource(), groups=("pair",)),), groups=(("pair", (ONE, TWO)),))


@pytest.fixture
def pair(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    config = msgspec.structs.replace(PAIR, mps=MpsConfig(run_root=f"{short_tmp}/run"))
    with running(Bench(short_tmp, CALM, config)) as bench:
        yield bench


def test_a_group_has_one_daemon_that_each_of_its_gpus_shows(pair: Bench) -> None:
    pair.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    one, two = (pair.until_daemon(uuid, DaemonState.READY) for uuid in (ONE, TWO))
    assert one.daemon == two.daemon
    assert one.daemon is not None
    assert (one.group, two.group, one.daemon.name) == ("pair", "pair", "pair")
    assert {name for _, name in pair.host.calls} == {"pair"}


def test_a_group_is_bound_as_a_whole(pair: Bench) -> None:
    pair.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    pair.supervisor.apply(Desired(allocations=(allocation(ONE, TWO, group="pair"),)))
    for uuid in (ONE, TWO):
        pair.until_gpu(uuid, lambda g: g.mode is Mode.SM_SHARING)
    assert set(pair.backend.modes.values()) == {ComputeMode.EXCLUSIVE_PROCESS}


def test_regrouped_gpus_get_their_new_daemon_when_the_old_ones_are_gone(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    fast.until_daemon(ONE, DaemonState.READY)
    fast.until_daemon(TWO, DaemonState.READY)
    fast.supervisor.config_changed(msgspec.structs.replace(PAIR, mps=fast.config.mps))
    gpu = fast.until_gpu(ONE, lambda g: g.group == "pair")
    assert gpu.not_shared == "daemons of an earlier grouping are still on its GPUs"
    assert "pair" not in {name for _, name in fast.host.calls}
    for uuid in (ONE, TWO):
        fast.host.await_call("quit", uuid)
        fast.exits(uuid)
    gpu = fast.until_daemon(ONE, DaemonState.READY)
    assert (gpu.not_shared, gpu.daemon and gpu.daemon.name) == ("", "pair")


def test_a_regrouping_waits_for_allocations(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    fast.supervisor.apply(bind(ONE))
    fast.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    fast.supervisor.config_changed(msgspec.structs.replace(PAIR, mps=fast.config.mps))
    fast.until_gpu(TWO, lambda g: f"allocations granted on {ONE} must end first" in g.not_shared)
    gpu = fast.until_daemon(ONE, DaemonState.READY)
    assert (gpu.group, gpu.mode) == (ONE, Mode.SM_SHARING)
    fast.host.await_call("quit", TWO)
    fast.exits(TWO)
    fast.supervisor.apply(Desired())
    fast.host.await_call("quit", ONE)
    fast.exits(ONE)
    fast.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.name == "pair" and g.daemon.state == "ready")


def test_a_daemon_of_a_group_that_is_no_more_ends_before_its_gpus_are_served(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, FAST)
    old = DaemonIdentity(
        boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", gpus=(ONE, TWO)
    )
    bench.state.record_daemon("old", old)
    bench.host.adoptable["old"] = old
    bench.host.on_quit = bench.exits
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
        bench.until_daemon(ONE, DaemonState.READY)
        bench.until_daemon(TWO, DaemonState.READY)
        assert bench.host.calls.index(("kill", "old")) < bench.host.calls.index(("spawn", ONE))


# Protocol 3


@pytest.fixture
def three(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    bench = Bench(short_tmp, CALM)
    bench.host.choice = ProtocolChoice(3)
    with running(bench):
        yield bench


def attached(gpu: GpuStatus) -> dict[str, str]:
    return {a.key: a.objection for a in gpu.daemon.attached} if gpu.daemon is not None else {}


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


def burst(*gpus: str, **more: object) -> Desired:
    """A time-slicing allocation that may be above its request, beside one that may not."""
    values: dict[str, object] = {"mode": Mode.TIME_SLICING, **more}
    lent = allocation(*gpus, key="b1", limit_bytes=16 * GIB, default_socket=True, **values)  # type: ignore[arg-type]
    return Desired(allocations=(allocation(*gpus, **values), lent))  # type: ignore[arg-type]


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
    three.host.refused[MAIN] = because("cannot link it: Operation not permitted")
    three.supervisor.inventory_changed(inventory(state_of(ONE)))
    three.supervisor.apply(burst(ONE))
    three.until_gpu(ONE, lambda g: attached(g) == {"b1": "cannot link it: Operation not permitted"})


def test_under_protocol_2_nobody_can_be_above_its_request(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(burst(ONE))
    gpu = calm.until_gpu(ONE, lambda g: bool(attached(g)))
    assert "needs MPS protocol 3" in attached(gpu)["b1"]


def test_the_snapshot_says_what_the_node_proves_about_hard_limits(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, CALM)
    assert bench.supervisor.snapshot.hard_limits.missing == ("it is not probed yet",)
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        snapshot = bench.until(lambda s: "driver 580.95.05" in s.hard_limits.missing[0])
        assert snapshot.cgroup_root == bench.backend.cgroup_root


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
    assert keeper._verified
    keeper._on_answered(keeper.spec, {name: because("its limits read back as 9G")})
    assert keeper._refused == {name: because("its limits read back as 9G")}
    gate.set()


def test_under_protocol_3_a_binding_leaves_the_gpu_open_to_several_processes(three: Bench) -> None:
    three.supervisor.inventory_changed(inventory(state_of(ONE)))
    three.supervisor.apply(bind(ONE))
    gpu = three.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    assert gpu.driver_compute_mode is ComputeMode.DEFAULT


def test_a_node_that_cannot_speak_the_protocol_starts_no_daemon_and_says_why(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, CALM)
    bench.host.choice = ProtocolChoice(3, objection=because("cannot speak MPS protocol 3: the driver is too old"))
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        gpu = bench.until_daemon(ONE, DaemonState.FAILED)
        assert gpu.daemon is not None
        assert gpu.daemon.reason == "cannot speak MPS protocol 3: the driver is too old"
        assert bench.host.verbs(ONE) == ["find"]
        bench.supervisor.apply(bind(ONE, Mode.TIME_SLICING))  # what needs no daemon is served all the same
        gpu = bench.until_gpu(ONE, lambda g: g.mode is Mode.TIME_SLICING)
        assert gpu.not_shared == ""


def test_an_outdated_daemon_serves_in_its_own_protocol_and_is_replaced_when_unused(
    short_tmp: Path, watchless: None
) -> None:
    bench = Bench(short_tmp, FAST)
    bench.host.choice = ProtocolChoice(3)
    bench.host.adoptable[ONE] = DaemonIdentity(
        boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", protocol=2, gpus=(ONE,)
    )
    with running(bench):
        bench.supervisor.apply(bind(ONE, limit_bytes=8 * GIB))
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        gpu = bench.until_daemon(ONE, DaemonState.DRAINING)
        assert gpu.daemon is not None
        assert (gpu.daemon.protocol, gpu.daemon.pinned_limit_bytes) == (2, 8 * GIB)
        assert "it speaks MPS protocol 2, and 3 is wanted" in gpu.daemon.reason
        for _ in range(3):  # held: it is not ended however often it is looked at
            bench.backend_looked.get(timeout=WAIT_S)
        assert "quit" not in bench.host.verbs(ONE)
        bench.host.adoptable.clear()
        bench.host.on_quit = bench.exits
        bench.supervisor.apply(Desired())
        bench.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.protocol == 3 and g.daemon.state == "ready")


# Wedges, replacement, trouble in logs


def test_a_wedged_daemon_is_left_to_its_clients_and_replaced_when_they_are_gone(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.until_daemon(ONE, DaemonState.READY)
    fast.logs.lines[ONE] = ("the last line",)
    with gpu_user("k1") as pid:
        fast.backend.running[ONE] = (GpuProcess(pid=pid),)
        fast.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        fast.until_gpu(ONE, lambda g: bool(g.clients))
        for verb in ("configure", "probe", "probe servers", "clients"):
            fast.host.fail[verb] = TransientError("cannot get an answer")
        gpu = fast.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.wedged)
        assert gpu.daemon is not None
        assert gpu.daemon.pinned_limit_bytes is None
        assert gpu.daemon.last_log == ("the last line",)
        for _ in range(3):
            fast.backend_looked.get(timeout=WAIT_S)
        assert "quit" not in fast.host.verbs(ONE)
    fast.backend.running.clear()
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    gpu = fast.until_daemon(ONE, DaemonState.STOPPING)
    fast.host.fail.clear()
    fast.exits(ONE)
    fast.until_daemon(ONE, DaemonState.READY)


def test_a_daemon_is_replaced_on_request_when_its_clients_are_gone_and_at_once_with_now(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.supervisor.apply(bind(ONE, limit_bytes=8 * GIB))
    fast.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    fast.until_daemon(ONE, DaemonState.READY)
    with gpu_user("k1") as pid:
        fast.backend.running[ONE] = (GpuProcess(pid=pid),)
        fast.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        fast.until_gpu(ONE, lambda g: bool(g.clients))
        fast.supervisor.replace(ONE, "new binary", now=False)
        gpu = fast.until_daemon(ONE, DaemonState.DRAINING)
        assert gpu.daemon is not None
        assert (gpu.daemon.pinned_limit_bytes, "new binary" in gpu.daemon.reason) == (8 * GIB, True)
        fast.supervisor.replace(ONE, "no patience", now=True)
        fast.until_daemon(ONE, DaemonState.STOPPING)
        fast.exits(ONE)
    fast.until_daemon(ONE, DaemonState.READY)
    with pytest.raises(ConfigError, match="cannot replace the MPS daemon of GPU-x: there is none"):
        fast.supervisor.replace("GPU-x", "", now=True)


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


def test_clients_without_a_pid_are_explained(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.supervisor.log_event(ONE, ClientConnected(0, 1000))
    calm.until(lambda s: any("not in the host's PID namespace" in warning for warning in s.warnings))


def test_a_gpu_whose_daemon_is_down_is_prohibited_where_the_switch_says_so(short_tmp: Path, watchless: None) -> None:
    mps = MpsConfig(run_root=f"{short_tmp}/run", prohibit_while_down=True)
    bench = Bench(short_tmp, CALM, NodeConfig(resources=(resource(),), mps=mps))
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.supervisor.apply(bind(ONE))
        bench.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
        bench.exits(ONE)
        gpu = bench.until_gpu(ONE, lambda g: g.driver_compute_mode is ComputeMode.PROHIBITED)
        assert gpu.mode is None
        bench.supervisor.replace(ONE, "now", now=True)
        gpu = bench.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
        assert gpu.driver_compute_mode is ComputeMode.EXCLUSIVE_PROCESS
        bench.supervisor.apply(Desired())
        bench.until_gpu(ONE, lambda g: g.driver_compute_mode is ComputeMode.DEFAULT)
        assert bench.state.saved.compute_modes == {}


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


def test_a_control_binary_that_cannot_be_run_for_a_moment_outdates_no_daemon(
    short_tmp: Path, watchless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpsd.supervision.protocol.RETRY_S", 0.01)
    bench = Bench(short_tmp, FAST)
    bench.host.choice = ProtocolChoice(3)
    bench.host.fail["protocol"] = TransientError("cannot run it")
    bench.host.adoptable[ONE] = DaemonIdentity(
        boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", protocol=3, gpus=(ONE,)
    )
    with running(bench):
        bench.supervisor.apply(bind(ONE, limit_bytes=8 * GIB))
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.READY)
        bench.host.fail.clear()
        bench.until_gpu(ONE, lambda g: not g.not_shared)
        bench.host.await_call("probe", ONE)
        gpu = bench.until_daemon(ONE, DaemonState.READY)
        assert gpu.daemon is not None
        assert (gpu.daemon.protocol, gpu.daemon.reason) == (3, "")
        bench.host.adoptable.clear()


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
        gpu = bench.until_gpu(ONE, lambda g: bool(g.not_shared))
        assert gpu.not_shared == "daemons of an earlier grouping are still on its GPUs"
        assert "spawn" not in bench.host.verbs("pair")
        bench.host.fail.clear()
        bench.until_daemon(ONE, DaemonState.READY)
        assert bench.host.calls.index(("kill", ONE)) < bench.host.calls.index(("spawn", "pair"))


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


def test_a_daemon_whose_gpus_are_gone_ends_with_what_was_granted_there_and_nothing_else_does(
    short_tmp: Path, watchless: None
) -> None:
    old = DaemonIdentity(boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", gpus=(TWO,))
    state = StateFile(f"{short_tmp}/state/mpsd.json", "boot")
    state.record_daemon(TWO, old)
    state.record_desired(bind(TWO))
    bench = Bench(short_tmp, FAST)
    bench.host.adoptable[TWO] = old
    bench.host.on_quit = bench.exits
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.READY)
        (said,) = bench.until(lambda s: bool(s.warnings)).warnings
        assert said == (
            f"the MPS daemon of {TWO} runs (pid {old.pid}), and none of its GPUs is on this node: it ends by "
            "itself once nothing granted on them is left: delete the pods that `gpufrac allocations` names for it"
        )
        bench.supervisor.apply(Desired())
        bench.host.await_call("kill", TWO)
        bench.until(lambda s: not s.warnings)
        assert "quit" not in bench.host.verbs(ONE)


def test_a_foreign_process_is_seen_after_the_gpu_was_bound_once(short_tmp: Path, watchless: None) -> None:
    StateFile(f"{short_tmp}/state/mpsd.json", "boot").record_desired(bind(ONE))
    with running(Bench(short_tmp, CALM)) as bench, gpu_user(None) as pid:
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
        bench.supervisor.apply(Desired())
        bench.until_gpu(ONE, lambda g: g.driver_compute_mode is ComputeMode.DEFAULT)
        bench.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        bench.until_gpu(ONE, lambda g: bool(g.clients))
        bench.supervisor.apply(bind(ONE))
        bench.until_gpu(ONE, lambda g: "foreign processes" in g.reason)


def test_a_count_that_failed_does_not_say_that_nobody_is_there(short_tmp: Path, watchless: None) -> None:
    with running(Bench(short_tmp, CALM)) as bench, gpu_user(None) as pid:
        bench.host.fail["clients"] = TransientError("cannot get an answer")
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.READY)
        bench.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        bench.host.await_call("clients", ONE)
        bench.supervisor.apply(bind(ONE))
        bench.supervisor.config_refused("a mark")
        bench.until(lambda s: s.config_error == "a mark")
        assert bench.backend.set_calls == []
        bench.host.fail.clear()


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


def test_snapshots_grow_by_one_per_change_and_not_without(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    before = calm.supervisor.snapshot
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.config_refused("bad")
    after = calm.until(lambda s: s.config_error == "bad")
    assert after.generation == before.generation + 1
    assert calm.supervisor.watch("other", after.generation, WAIT_S) == after
    assert calm.supervisor.watch(after.instance, after.generation, 0.0) == after


def test_pids_of_tests_are_free() -> None:
    """The fakes' PIDs lie above what the kernel gives."""
    assert int(Path("/proc/sys/kernel/pid_max").read_text()) <= 2**22
    assert not os.path.exists(f"/proc/{2**22 + 1}")


def test_while_it_is_not_known_what_daemons_shall_speak_none_is_started_not_even_for_allocations(
    short_tmp: Path, watchless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpsd.supervision.protocol.RETRY_S", 0.01)
    bench = Bench(short_tmp, FAST)
    bench.host.fail["protocol"] = TransientError("it is slow")
    with running(bench):
        bench.supervisor.apply(bind(ONE))
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_gpu(ONE, lambda gpu: gpu.daemon is not None and "it is slow" in gpu.daemon.reason)
        assert "spawn" not in bench.host.verbs(ONE)
        bench.host.choice = ProtocolChoice(3)
        bench.host.fail.clear()
        gpu = bench.until_daemon(ONE, DaemonState.READY)
        assert gpu.daemon is not None
        assert gpu.daemon.protocol == 3


def test_what_was_chosen_before_is_used_and_asked_about_again(
    short_tmp: Path, watchless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpsd.supervision.protocol.RETRY_S", 0.01)
    bench = Bench(short_tmp, FAST)
    bench.host.choice = ProtocolChoice(3, unsure=because("it is slow"))
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        gpu = bench.until_daemon(ONE, DaemonState.READY)
        assert gpu.daemon is not None
        assert (gpu.daemon.protocol, gpu.not_shared) == (3, "")
        bench.host.on_quit = bench.exits
        bench.host.choice = ProtocolChoice(2)
        bench.host.await_call("quit", ONE)  # another is to take its place


def test_a_gpu_lost_since_before_the_start_is_told(calm: Bench) -> None:
    missing = msgspec.structs.replace(inventory(state_of(ONE)), never_seen=1)
    calm.supervisor.inventory_changed(missing)
    (said,) = calm.until(lambda s: bool(s.warnings)).warnings
    assert said.startswith("the driver counts a GPU more than it can read: lost since before mpsd started")
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until(lambda s: not s.warnings)


def test_a_compute_mode_that_nobody_remembers_setting_is_told(calm: Bench) -> None:
    exclusive = ComputeMode.EXCLUSIVE_PROCESS
    calm.backend.modes[ONE] = exclusive
    calm.supervisor.inventory_changed(inventory(state_of(ONE, compute_mode=exclusive), state_of(TWO)))
    snapshot = calm.until(lambda s: any("without a record of who set it" in warning for warning in s.warnings))
    (told,) = (warning for warning in snapshot.warnings if "without a record" in warning)
    assert told.startswith("GPU 1: it was in compute mode EXCLUSIVE_PROCESS when mpsd started")
    assert f"nvidia-smi -i {ONE} -c DEFAULT" in told
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.until(lambda s: not any("without a record" in warning for warning in s.warnings))


def test_evictions_that_the_daemons_log_tells_are_shown(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.supervisor.log_event(ONE, Evictions(ONE, 1))
    calm.supervisor.log_event(ONE, Evictions(ONE, 3))
    calm.until_gpu(ONE, lambda gpu: gpu.evictions == 3)
    assert [gpu.evictions for gpu in calm.supervisor.snapshot.gpus] == [3, 0]


def test_who_changes_a_bound_gpus_compute_mode_is_told_of(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE))
    calm.until_gpu(ONE, lambda gpu: gpu.mode is Mode.SM_SHARING)
    assert not any("somebody else" in warning for warning in calm.supervisor.snapshot.warnings)
    calm.backend.modes[ONE] = ComputeMode.DEFAULT
    calm.supervisor.inventory_changed(inventory(state_of(ONE, read_s=time.monotonic())))
    snapshot = calm.until(lambda s: any("somebody else" in warning for warning in s.warnings))
    (told,) = (warning for warning in snapshot.warnings if "somebody else" in warning)
    assert "(once; the last time to DEFAULT, and it needs EXCLUSIVE_PROCESS)" in told
    calm.until(lambda _: calm.backend.modes[ONE] is ComputeMode.EXCLUSIVE_PROCESS)
