"""An MPS server is on the GPU from the binding to its end, whoever uses it."""

import pytest

from mpsd.common.errors import TransientError
from mpsd.daemon.logs.parse import ServerExited
from mpsd.gpu.model import ComputeMode, Mode
from mpsd.localapi.snapshot import DaemonState, GpuStatus
from mpsd.supervision import serverhold
from tests.desired import bind
from tests.unit.mpsd.supervision.bench import ONE, Bench, inventory, state_of


def unheld(gpu: GpuStatus) -> str:
    assert gpu.daemon is not None
    return gpu.daemon.unheld


def is_bound(gpu: GpuStatus) -> bool:
    return gpu.mode is Mode.SM_SHARING


def test_a_bound_gpu_is_closed_to_whoever_skips_mps_only_once_a_server_is_there(calm: Bench) -> None:
    calm.host.fail["hold server"] = TransientError("it is still starting")
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    assert "hold server" not in calm.host.verbs(ONE)
    calm.supervisor.apply(bind(ONE))
    gpu = calm.until_gpu(ONE, lambda gpu: is_bound(gpu) and "still starting" in unheld(gpu))
    assert unheld(gpu) == "no MPS server holds its GPU yet: it is still starting"
    assert calm.backend.modes[ONE] is ComputeMode.EXCLUSIVE_PROCESS
    del calm.host.fail["hold server"]
    calm.until_gpu(ONE, lambda gpu: is_bound(gpu) and not unheld(gpu))


def test_no_snapshot_shows_a_gpu_bound_and_closed_before_a_server_was_seen(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.until_daemon(ONE, DaemonState.READY)
    calm.supervisor.apply(bind(ONE))
    calm.until_gpu(ONE, lambda gpu: is_bound(gpu) and not unheld(gpu))
    assert ("hold server", ONE) in calm.host.calls


def test_a_server_that_ends_is_followed_by_another_and_nobody_starts_meanwhile(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE))
    calm.until_gpu(ONE, lambda gpu: is_bound(gpu) and not unheld(gpu))
    calm.host.fail["hold server"] = TransientError("its GPU is taken")
    calm.supervisor.log_event(ONE, ServerExited(7, 0))
    calm.until_gpu(ONE, lambda gpu: "its GPU is taken" in unheld(gpu))
    del calm.host.fail["hold server"]
    calm.until_gpu(ONE, lambda gpu: not unheld(gpu))


def test_servers_that_die_one_after_the_other_are_started_ever_more_slowly(
    calm: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serverhold, "RETRY_FIRST_S", 1000.0)
    monkeypatch.setattr(serverhold, "RETRY_LAST_S", 1000.0)
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE))
    calm.until_gpu(ONE, lambda gpu: is_bound(gpu) and not unheld(gpu))
    calm.supervisor.log_event(ONE, ServerExited(7, 1))  # the first is followed at once
    calm.until_gpu(ONE, lambda gpu: not unheld(gpu))
    calm.until(lambda _: calm.host.verbs(ONE).count("hold server") == 2)
    calm.supervisor.log_event(ONE, ServerExited(8, 1))
    calm.until_gpu(ONE, lambda gpu: bool(unheld(gpu)))
    for server in range(9, 20):
        calm.supervisor.log_event(ONE, ServerExited(server, 0))
    assert calm.supervisor.clients((ONE,))  # the loop has read them all
    assert calm.host.verbs(ONE).count("hold server") == 2


def test_time_slicing_holds_no_server(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE)))
    calm.supervisor.apply(bind(ONE, Mode.TIME_SLICING))
    gpu = calm.until_gpu(ONE, lambda gpu: gpu.mode is Mode.TIME_SLICING and gpu.daemon is not None)
    assert unheld(gpu) == ""
    assert "hold server" not in calm.host.verbs(ONE)
