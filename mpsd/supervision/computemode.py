"""Which compute mode a GPU's binding needs, holding it there, and giving back the one found before."""

from dataclasses import dataclass

from mpsd.common.errors import TransientError
from mpsd.daemon.state import StateFile
from mpsd.gpu.backend import GpuBackend, GpuNotSupportedError
from mpsd.gpu.model import ComputeMode, Mode


@dataclass(frozen=True, slots=True)
class Hold:
    """A GPU bound to a mode, and the compute mode that this needs now."""

    mode: Mode
    compute_mode: ComputeMode


def hold_for(mode: Mode, protocol: int, *, daemon_ready: bool, prohibit: bool) -> Hold:
    """What a binding needs (pure).

    sm-sharing, protocol 2: EXCLUSIVE_PROCESS, so that only the MPS server opens the GPU and a client that misses the
    daemon fails instead of running without a limit. Protocol 3 and time-slicing: DEFAULT, as several processes open it.
    `prohibit`: where the daemon can't take clients nobody may open the GPU.
    """
    if mode is Mode.SM_SHARING and prohibit and not daemon_ready:
        return Hold(mode, ComputeMode.PROHIBITED)
    exclusive = mode is Mode.SM_SHARING and protocol == 2
    return Hold(mode, ComputeMode.EXCLUSIVE_PROCESS if exclusive else ComputeMode.DEFAULT)


def fits(hold: Hold | None, seen: ComputeMode) -> bool:
    """Whether a GPU in this compute mode can hold the binding (pure); UNKNOWN, and an idle GPU, always fit."""
    return hold is None or seen in (ComputeMode.UNKNOWN, hold.compute_mode)


def hold_mode(uuid: str, hold: Hold | None, backend: GpuBackend, state: StateFile) -> ComputeMode:
    """Sets what the binding needs and reads it back; the mode found before is recorded first. None: gives that back.

    A GPU without compute modes is left as it is.

    Raises:
        GpuError: the driver refuses. TransientError: what was read back differs, or the record can't be written.
    """
    try:
        current = backend.compute_mode(uuid)
    except GpuNotSupportedError:
        return ComputeMode.UNKNOWN
    found = state.saved.compute_modes.get(uuid)
    wanted = hold.compute_mode if hold is not None else found or current
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
