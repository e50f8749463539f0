"""GPUs that come, go, are bound and are set otherwise by others, over fakes."""

import threading
import time
from pathlib import Path

import msgspec
import pytest

from mpsd.common.errors import TransientError
from mpsd.common.reason import Reason
from mpsd.config.model import GpuSelection, MpsConfig, NodeConfig
from mpsd.daemon.state import StateFile
from mpsd.gpu.backend import GpuError
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuProcess, GpuState, Inventory, Mode
from mpsd.gpu.reasons import GpuCode, InventoryCode
from mpsd.localapi.snapshot import DaemonState, Desired, Snapshot
from tests.desired import allocation, bind
from tests.unit.mpsd.supervision.bench import CALM, ONE, TWO, Bench, gpu_user, inventory, resource, running, state_of
from tests.waiting import WAIT_S


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
        unread = Reason(InventoryCode.GPU_UNREAD, "GPU x: it hangs")
        bench.supervisor.inventory_changed(Inventory(driver_version="580.95.05", reason=unread))
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
    calm.supervisor.inventory_changed(
        inventory(state_of(ONE, read_s=0.0, reason=Reason(GpuCode.PROBE_FAILED, "old"), health=GpuHealth.SICK))
    )
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


def test_a_mode_left_by_an_earlier_mpsd_is_restored(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, CALM)
    bench.state.record_compute_mode(ONE, ComputeMode.DEFAULT)
    bench.backend.modes[ONE] = ComputeMode.EXCLUSIVE_PROCESS
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE, compute_mode=ComputeMode.EXCLUSIVE_PROCESS)))
        bench.until_gpu(ONE, lambda g: g.driver_compute_mode is ComputeMode.DEFAULT)


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


def test_a_vanished_gpu_is_lost_and_keeps_its_place(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.until_daemon(TWO, DaemonState.READY)
    calm.supervisor.inventory_changed(inventory(state_of(TWO)))
    gpu = calm.until_gpu(ONE, lambda g: g.health is GpuHealth.LOST)
    assert gpu.reason == "the driver no longer lists this GPU"
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.until_gpu(ONE, lambda g: g.health is GpuHealth.OK)


def test_a_group_is_bound_as_a_whole(pair: Bench) -> None:
    pair.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    pair.supervisor.apply(Desired(allocations=(allocation(ONE, TWO, group="pair"),)))
    for uuid in (ONE, TWO):
        pair.until_gpu(uuid, lambda g: g.mode is Mode.SM_SHARING)
    assert set(pair.backend.modes.values()) == {ComputeMode.EXCLUSIVE_PROCESS}


def test_under_protocol_3_a_binding_leaves_the_gpu_open_to_several_processes(three: Bench) -> None:
    three.supervisor.inventory_changed(inventory(state_of(ONE)))
    three.supervisor.apply(bind(ONE))
    gpu = three.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    assert gpu.driver_compute_mode is ComputeMode.DEFAULT


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
