"""Looks at this node for a draft of its config: NVML, control groups, where the driver's programs are. Reads only."""

import os
import queue
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from deviceplugin.draft.facts import NodeFacts
from mpsd.common.errors import GpufracError
from mpsd.common.threads import GuardedThread
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import GpuInfo
from mpsd.limits.probe import probe
from mpsd.localapi.snapshot import HardLimits

LOOK_S: Final = 10.0
"""A healthy driver answers within a second; one that hangs does not answer at all."""
BINARY: Final = "nvidia-cuda-mps-control"
DRIVER_CONTAINER: Final = "/run/nvidia/driver"
"""Where the GPU Operator's driver container has its root (GPU Operator documentation)."""


def look(backend: GpuBackend, *, root: str = "/", limit_s: float = LOOK_S) -> NodeFacts:
    """The node as it is. Never raises: what could not be found out is among the troubles.

    Args:
        root: below it the driver's programs are looked for.
    """
    answers: queue.SimpleQueue[NodeFacts] = queue.SimpleQueue()
    GuardedThread(lambda: answers.put(_ask(backend)), "look").start()
    try:
        facts = answers.get(timeout=limit_s)
    except queue.Empty:
        text = f"the driver does not answer within {limit_s:g} s: look for NVRM and Xid in the kernel's log"
        return NodeFacts(troubles=(text,), driver_root=_driver_root(root))
    return NodeFacts(
        driver_version=facts.driver_version,
        gpus=facts.gpus,
        troubles=facts.troubles,
        hard_limits=facts.hard_limits,
        driver_root=_driver_root(root),
    )


def _ask(backend: GpuBackend) -> NodeFacts:
    try:
        backend.open()
    except Exception as error:  # noqa: BLE001 - it is told, whatever it is
        return NodeFacts(troubles=(str(error),))
    try:
        driver_version, uuids = backend.driver_version(), backend.uuids()
        gpus, troubles = _read(uuids, backend.info)
        if not uuids:
            troubles.append("the driver lists no GPU")
        shared = [gpu.uuid for gpu in gpus if not gpu.mig_enabled]
        limits = probe(backend, driver_version, shared, enable_dmem=False).limits if shared else HardLimits()
        ordered = tuple(sorted(gpus, key=lambda gpu: gpu.index))
        return NodeFacts(driver_version=driver_version, gpus=ordered, troubles=tuple(troubles), hard_limits=limits)
    except Exception as error:  # noqa: BLE001 - as above
        return NodeFacts(troubles=(str(error),))
    finally:
        backend.close()


def _read(uuids: Sequence[str], info: Callable[[str], GpuInfo]) -> tuple[list[GpuInfo], list[str]]:
    gpus, troubles = [], []
    for uuid in uuids:
        try:
            gpus.append(info(uuid))
        except GpufracError as error:
            troubles.append(str(error))
    return gpus, troubles


def _driver_root(root: str) -> str | None:
    """Where the control binary is: `/`, the root of a driver container, None for nowhere."""
    inside = partial(os.path.join, root)
    if shutil.which(BINARY) or os.access(inside(f"usr/bin/{BINARY}"), os.X_OK):
        return "/"
    return DRIVER_CONTAINER if os.access(inside(f"{DRIVER_CONTAINER[1:]}/usr/bin/{BINARY}"), os.X_OK) else None
