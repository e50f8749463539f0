"""Holds a GPU in the compute mode its binding needs, and gives back the one found before."""

from mpsd.errors import TransientError
from mpsd.gpu.backend import GpuBackend, GpuNotSupportedError
from mpsd.gpu.model import ComputeMode, Mode
from mpsd.state import StateFile


def wanted_mode(target: Mode | None, current: ComputeMode, found: ComputeMode | None) -> ComputeMode:
    """The compute mode for a binding (pure).

    sm-sharing: EXCLUSIVE_PROCESS, so that only the MPS server opens the GPU and a client that misses the daemon fails
    instead of running without a limit. time-slicing: DEFAULT, as several processes share it. Idle: what was found.
    """
    if target is Mode.SM_SHARING:
        return ComputeMode.EXCLUSIVE_PROCESS
    return ComputeMode.DEFAULT if target is Mode.TIME_SLICING else found or current


def fits(mode: Mode | None, seen: ComputeMode) -> bool:
    """Whether a GPU in this compute mode can hold the binding (pure); UNKNOWN, and an idle GPU, always fit."""
    return mode is None or seen in (ComputeMode.UNKNOWN, wanted_mode(mode, seen, None))


def hold_mode(uuid: str, target: Mode | None, backend: GpuBackend, state: StateFile) -> ComputeMode:
    """Sets what the target needs and reads it back; the mode found before is recorded first.

    A GPU without compute modes is left as it is.

    Raises:
        GpuError: the driver refuses. TransientError: what was read back differs, or the record can't be written.
    """
    try:
        current = backend.compute_mode(uuid)
    except GpuNotSupportedError:
        return ComputeMode.UNKNOWN
    found = state.saved.compute_modes.get(uuid)
    wanted = wanted_mode(target, current, found)
    if ComputeMode.UNKNOWN in (current, wanted):
        return current
    if found is None and wanted is not current:
        state.record_compute_mode(uuid, current)
    if wanted is not current:
        backend.set_compute_mode(uuid, wanted)
        current = backend.compute_mode(uuid)
        if current is not wanted:
            raise TransientError(f"cannot hold GPU {uuid} in compute mode {wanted}: it reads back as {current}")
    if current is found:
        state.record_compute_mode(uuid, None)
    return current
