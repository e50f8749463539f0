"""The loop over fakes: what goes in, which snapshot comes out."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from mpsd.common.reason import Reason
from mpsd.config.model import MpsConfig
from mpsd.daemon.state import StateFile
from mpsd.gpu.model import Inventory, Mode
from mpsd.gpu.reasons import InventoryCode
from mpsd.localapi.reasons import ConfigCode
from mpsd.localapi.snapshot import DaemonState
from tests.desired import bind
from tests.unit.mpsd.supervision.bench import CALM, ONE, Bench, inventory, running, state_of
from tests.waiting import WAIT_S


def test_before_the_first_probe_there_is_a_snapshot_with_a_reason(calm: Bench) -> None:
    snapshot = calm.supervisor.snapshot
    assert (snapshot.gpus, snapshot.reason) == ((), "GPUs are not probed yet")


def test_no_gpus_is_a_state_with_a_reason(calm: Bench) -> None:
    calm.supervisor.inventory_changed(
        Inventory(reason=Reason(InventoryCode.DRIVER_FAILED, "cannot load libnvidia-ml.so.1"))
    )
    calm.until(lambda snapshot: snapshot.reason == "cannot load libnvidia-ml.so.1")


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


def test_the_desired_state_outlives_mpsd(short_tmp: Path, watchless: None) -> None:
    StateFile(f"{short_tmp}/state/mpsd.json", "boot").record_desired(bind(ONE, Mode.SM_SHARING))
    with running(Bench(short_tmp, CALM)) as again:
        again.supervisor.inventory_changed(inventory(state_of(ONE)))
        again.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)


def test_what_needs_a_restart_is_said_and_not_taken(calm: Bench) -> None:
    calm.supervisor.config_changed(msgspec.structs.replace(calm.config, mps=MpsConfig(run_root="/elsewhere")))
    calm.until(lambda s: (s.config_error, s.config_restart_needed) == ("", "mps.runRoot"))
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    gpu = calm.until_daemon(ONE, DaemonState.READY)
    assert gpu.daemon is not None
    assert gpu.daemon.pipe_directory.startswith(calm.config.mps.run_root)
    calm.supervisor.config_refused(Reason(ConfigCode.REFUSED, "c.yaml:3: memory: unknown key"))
    calm.until(lambda s: s.config_error == "c.yaml:3: memory: unknown key")
    calm.supervisor.config_refused(Reason(ConfigCode.REFUSED, "c.yaml:3: memory: unknown key"))
    calm.supervisor.config_changed(calm.config)
    calm.until(lambda s: s.config_error == "")
    told = [(word.kind, word.detail) for word in calm.heard.words if word.kind.startswith("Config")]
    assert told == [
        ("ConfigReloaded", "waits for a restart: mps.runRoot"),
        ("ConfigRefused", ""),
        ("ConfigReloaded", ""),
    ]


def test_the_snapshot_says_what_the_node_proves_about_hard_limits(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, CALM)
    assert bench.supervisor.snapshot.hard_limits.missing == ("it is not probed yet",)
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        snapshot = bench.until(lambda s: "driver 580.95.05" in s.hard_limits.missing[0])
        assert snapshot.cgroup_root == bench.backend.cgroup_root


def test_the_snapshot_says_how_many_events_there_were(calm: Bench) -> None:
    calm.supervisor.look_again()
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    snapshot = calm.until(lambda s: bool(s.gpus))
    assert (snapshot.events, snapshot.events_lost) == (calm.heard.counts, calm.heard.lost)


def test_snapshots_grow_by_one_per_change_and_not_without(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    before = calm.until(lambda s: s.hard_limits.probed)  # that is news of its own
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.config_refused(Reason(ConfigCode.REFUSED, "bad"))
    after = calm.until(lambda s: s.config_error == "bad")
    assert after.generation == before.generation + 1
    assert calm.supervisor.watch("other", after.generation, WAIT_S) == after
    assert calm.supervisor.watch(after.instance, after.generation, 0.0) == after
