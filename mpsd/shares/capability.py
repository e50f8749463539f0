"""What MPS can do on a GPU, by its compute capability (pure).

Pinned memory limits, thread percentages, clients of several users and more than 16 of them need 7.0 or newer (MPS
documentation; nvidia-cuda-mps-control(1)). A capability that the driver does not tell proves none of these.
"""

from collections.abc import Iterable

from mpsd.gpu.model import GpuInfo

FIRST = (7, 0)
UNKNOWN = (0, 0)
OLD_CLIENTS = 16
"""Clients of a GPU below FIRST."""


def objection(infos: Iterable[GpuInfo]) -> str:
    """Why MPS can't hold clients on these GPUs to limits, empty when it can."""
    for info in infos:
        if info.compute_capability == UNKNOWN:
            return (
                f"the driver does not tell the compute capability of GPU {info.index}, and MPS has memory limits and "
                "thread percentages only from 7.0 on"
            )
        if info.compute_capability < FIRST:
            major, minor = info.compute_capability
            return (
                f"GPU {info.index} has compute capability {major}.{minor}, and MPS has memory limits and thread "
                "percentages only from 7.0 on"
            )
    return ""


def several_users(infos: Iterable[GpuInfo]) -> bool:
    """Whether one MPS server takes clients of several users there: not where a GPU is known to be older."""
    return all(info.compute_capability == UNKNOWN or info.compute_capability >= FIRST for info in infos)


def client_limit(infos: Iterable[GpuInfo], configured: int) -> int:
    """How many MPS clients a group takes: as configured, but no more than its least GPU."""
    return min(configured, OLD_CLIENTS) if objection(infos) else configured
