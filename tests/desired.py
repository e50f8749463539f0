"""What a plugin would want of mpsd, for tests."""

from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import Desired, DesiredAllocation


def allocation(
    *gpus: str, mode: Mode = Mode.SM_SHARING, limit_bytes: int = 1 << 30, group: str = "", **more: object
) -> DesiredAllocation:
    """One allocation; on one GPU it is its own group."""
    values = {"key": "k1", "resource": "x/y", "slot": 0, **more}
    return DesiredAllocation(gpus=gpus, group=group or gpus[0], mode=mode, limit_bytes=limit_bytes, **values)  # type: ignore[arg-type]


def bind(uuid: str, mode: Mode | None = Mode.SM_SHARING, limit_bytes: int = 1 << 30) -> Desired:
    """One allocation on one GPU; none for no mode."""
    return Desired() if mode is None else Desired(allocations=(allocation(uuid, mode=mode, limit_bytes=limit_bytes),))
