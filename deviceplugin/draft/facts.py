"""What a config is drafted from: the GPUs of a node, its driver, and what they give (pure)."""

import msgspec

from mpsd.gpu.model import GpuInfo
from mpsd.limits.judge import Answer, Facts, Hierarchy, Verdict, judge
from mpsd.localapi.snapshot import HardLimits


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`troubles`: why there are no GPUs, or what could not be read of some. `driver_root` is None where the control
    binary of MPS was found nowhere, `/` where it is in the usual place or was not looked for. `told`: it was not looked
    at, somebody said so."""

    driver_version: str | None = None
    gpus: tuple[GpuInfo, ...] = ()
    troubles: tuple[str, ...] = ()
    hard_limits: HardLimits = HardLimits()
    driver_root: str | None = "/"
    told: bool = False


def told(count: int, memory_bytes: int, driver_version: str) -> NodeFacts:
    """A node like that, where nothing else is missing."""
    gpus = tuple(
        GpuInfo(
            uuid=f"GPU {index}",
            index=index,
            name="a GPU",
            memory_total_bytes=memory_bytes,
            compute_capability=(8, 0),
        )
        for index in range(count)
    )
    facts = Facts(driver_version, "/sys/fs/cgroup", Hierarchy.UNIFIED, dmem=True, answers=(Answer(Verdict.OFFERED),))
    return NodeFacts(driver_version=driver_version, gpus=gpus, hard_limits=judge(facts), told=True)
