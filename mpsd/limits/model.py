"""What a memory limit of a cgroup is worth, for both processes (pure)."""

from mpsd.gpu.model import MIB


def same_limit(wanted_bytes: int | None, found_bytes: int | None) -> bool:
    """Whether a limit that was read back is the one that was set; None: no ceiling.

    It may be floored to whole MiB, the unit of `nvidia-smi memory-limits`; no other rounding is known (r615).
    """
    if wanted_bytes is None or found_bytes is None:
        return wanted_bytes is found_bytes
    return found_bytes in (wanted_bytes, wanted_bytes // MIB * MIB)
