from pathlib import Path

import pytest

from mpsd.common.errors import TransientError
from mpsd.daemon.state import StateFile
from mpsd.gpu.backend import GpuError, GpuNotSupportedError
from mpsd.gpu.model import ComputeMode, Mode
from mpsd.supervision.computemode import Hold, fits, hold_for, hold_mode
from tests.unit.mpsd.supervision.fakes import FakeBackend

DEFAULT, EXCLUSIVE, PROHIBITED = ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED
SM, TIME = Hold(Mode.SM_SHARING, EXCLUSIVE), Hold(Mode.TIME_SLICING, DEFAULT)
GUARD = Hold(Mode.SM_SHARING, PROHIBITED)


@pytest.fixture
def state(short_tmp: Path) -> StateFile:
    return StateFile(f"{short_tmp}/mpsd.json", "boot")


@pytest.mark.parametrize(
    ("mode", "fitting"),
    [(SM, {EXCLUSIVE}), (TIME, {DEFAULT}), (None, {DEFAULT, EXCLUSIVE, PROHIBITED})],
)
def test_which_compute_modes_fit_a_binding(mode: Hold | None, fitting: set[ComputeMode]) -> None:
    assert {seen for seen in ComputeMode if fits(mode, seen)} == {*fitting, ComputeMode.UNKNOWN}


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("prohibit", [True, False])
def test_what_a_binding_needs(protocol: int, ready: bool, prohibit: bool) -> None:
    sharing = EXCLUSIVE if protocol == 2 else DEFAULT
    expected = PROHIBITED if prohibit and not ready else sharing
    assert hold_for(Mode.SM_SHARING, protocol, daemon_ready=ready, prohibit=prohibit).compute_mode is expected
    assert hold_for(Mode.TIME_SLICING, protocol, daemon_ready=ready, prohibit=prohibit) == TIME


@pytest.mark.parametrize("found", [DEFAULT, EXCLUSIVE, PROHIBITED])
@pytest.mark.parametrize(
    "targets",
    [
        [SM, None],
        [TIME, None],
        [SM, GUARD, TIME, None],
        [TIME, SM, SM, GUARD, None],
    ],
)
def test_each_binding_has_its_mode_and_the_one_found_comes_back(
    state: StateFile, found: ComputeMode, targets: list[Hold | None]
) -> None:
    backend = FakeBackend()
    backend.modes["GPU-1"] = found
    expected = {SM: EXCLUSIVE, TIME: DEFAULT, GUARD: PROHIBITED, None: found}
    for target in targets:
        assert hold_mode("GPU-1", target, backend, state) is expected[target] is backend.modes["GPU-1"]
    assert state.saved.compute_modes == {}


def test_the_mode_found_is_on_disk_before_ours_is_set(state: StateFile, short_tmp: Path) -> None:
    backend = FakeBackend()
    backend.fail["set_compute_mode"] = GpuError("cannot set: killed here")
    with pytest.raises(GpuError):
        hold_mode("GPU-1", SM, backend, state)
    assert StateFile(f"{short_tmp}/mpsd.json", "boot").saved.compute_modes == {"GPU-1": DEFAULT}


def test_the_mode_found_is_not_overwritten_by_our_own(state: StateFile) -> None:
    backend = FakeBackend()
    hold_mode("GPU-1", SM, backend, state)
    hold_mode("GPU-1", SM, backend, state)
    assert state.saved.compute_modes == {"GPU-1": DEFAULT}
    assert backend.set_calls == [("GPU-1", EXCLUSIVE)]


def test_a_mode_that_does_not_stick_is_an_error(state: StateFile) -> None:
    backend = FakeBackend()
    backend.ignore_set = True
    with pytest.raises(TransientError, match="cannot hold GPU GPU-1 in compute mode EXCLUSIVE_PROCESS"):
        hold_mode("GPU-1", SM, backend, state)


def test_nothing_is_set_that_cannot_be_recorded(short_tmp: Path) -> None:
    (short_tmp / "file").write_text("")
    backend = FakeBackend()
    with pytest.raises(TransientError):
        hold_mode("GPU-1", SM, backend, StateFile(f"{short_tmp}/file/x.json", "boot"))
    assert backend.set_calls == []


def test_a_gpu_without_compute_modes_is_left_as_it_is(state: StateFile) -> None:
    backend = FakeBackend()
    backend.fail["compute_mode"] = GpuNotSupportedError("cannot read: not supported")
    assert hold_mode("GPU-1", SM, backend, state) is ComputeMode.UNKNOWN
    assert backend.set_calls == []
