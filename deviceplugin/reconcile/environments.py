"""What a container's process was really started with, compared with what was granted (pure).

Limits and devices travel in variables. CDI edits should win over those of the pod and its image, but the runtime has
the last word, and a program can start itself anew with others; so every variable that carries a limit or a device is
looked at in the container's own process.
"""

import re
from collections.abc import Iterator, Mapping

import msgspec

from deviceplugin.nri.runtimes import CDI_WINS_IN
from deviceplugin.plan import render
from deviceplugin.plan.allocation import Allocation
from mpsd.common.quantity import format_bytes, quoted
from mpsd.common.reason import Code
from mpsd.config.model import Enforcement
from mpsd.gpu.model import MIB

VISIBLE, PINNED, PIPE, THREADS = (
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
)
_NO_DEVICES = frozenset(("", "void", "none"))
_PINNED = re.compile(r"0=([0-9]{1,12})([MG])")
_UNITS = {"M": MIB, "G": 1024 * MIB}
_INSTEAD = f"take it out of the pod and its image, or use a container runtime where CDI devices win: {CDI_WINS_IN}"


_TAKE_IT_OUT = "Take the variable out of the pod and its image, or use a runtime where CDI devices win."


class DeviationCode(Code):
    """In what a container's environment differs from what was granted."""

    OTHER_DEVICES = "OtherDevices", "It may use GPUs that were not granted.", _TAKE_IT_OUT
    HIGHER_LIMIT = "HigherLimit", "Its processes may take more memory than its limit.", _TAKE_IT_OUT
    OTHER_DAEMON = "OtherDaemon", "It does not reach its MPS daemon.", _TAKE_IT_OUT
    HIGHER_THREADS = "HigherThreads", "It may use more of the GPU's compute than granted.", _TAKE_IT_OUT
    OTHER_CGROUP_LIMIT = "OtherCgroupLimit", "Its memory limit had to be set again after it started.", _TAKE_IT_OUT


class Deviation(msgspec.Struct, frozen=True):
    """A variable that is not as granted. `unheld`: its container is not held to its memory limit by that."""

    code: DeviationCode
    message: str
    unheld: bool


def deviations(
    allocation: Allocation, variables: Mapping[str, str], *, default_limit_bytes: int | None
) -> tuple[Deviation, ...]:
    """All of a container, the worst first.

    Args:
        variables: of its first process, NVIDIA's only.
        default_limit_bytes: what its MPS daemon holds a client to that brings no limit of its own; None where nothing
            is known of one. Under protocol 3 that is its namespace's, so its own.
    """
    found = _deviations(allocation, variables, default_limit_bytes)
    return tuple(sorted(found, key=lambda deviation: not deviation.unheld))


def _deviations(allocation: Allocation, variables: Mapping[str, str], default_bytes: int | None) -> Iterator[Deviation]:
    granted = dict(render.environment(allocation))
    visible = variables.get(VISIBLE, granted[VISIBLE])
    if visible not in _NO_DEVICES and not set(visible.split(",")) <= set(allocation.gpus):
        effect = "it may use GPUs that were not granted, without a limit there"
        yield _deviation(DeviationCode.OTHER_DEVICES, VISIBLE, variables, granted, effect, unheld=True)
    cooperative = allocation.enforcement is Enforcement.COOPERATIVE
    if PIPE in granted and variables.get(PIPE, granted[PIPE]).rstrip("/") != granted[PIPE]:
        effect = "it does not reach its MPS daemon"
        yield _deviation(DeviationCode.OTHER_DAEMON, PIPE, variables, granted, effect, unheld=cooperative)
    if PINNED in granted and cooperative:
        holds_bytes = min(_pinned_bytes(variables.get(PINNED)), default_bytes or (1 << 63))
        if holds_bytes > allocation.limit_bytes:
            most = f"up to {format_bytes(default_bytes)}" if default_bytes else "more than its limit"
            effect = f"each of its processes may take {most}"
            yield _deviation(DeviationCode.HIGHER_LIMIT, PINNED, variables, granted, effect, unheld=True)
    if THREADS in granted and _percent(variables.get(THREADS)) > (allocation.thread_percent or 100):
        effect = "it may use more of the GPU's compute than granted"
        yield _deviation(DeviationCode.HIGHER_THREADS, THREADS, variables, granted, effect, unheld=False)
    for name in render.CGROUP_LIMITS:
        # What its cgroup has is read back from the driver.
        if name in granted and variables.get(name, granted[name]) != granted[name]:
            effect = "its memory limit had to be set again after it started"
            yield _deviation(DeviationCode.OTHER_CGROUP_LIMIT, name, variables, granted, effect, unheld=False)


def _deviation(
    code: DeviationCode,
    name: str,
    variables: Mapping[str, str],
    granted: Mapping[str, str],
    effect: str,
    *,
    unheld: bool,
) -> Deviation:
    has = quoted(variables[name]) if name in variables else "not set"
    return Deviation(
        code, f"{name} is {has} in its process, and {granted[name]} was granted: {effect}: {_INSTEAD}", unheld
    )


def _pinned_bytes(text: str | None) -> int:
    """What a process holds itself to on its first GPU; as good as no limit where that is not understood."""
    match = _PINNED.fullmatch(text or "")
    return int(match[1]) * _UNITS[match[2]] if match else 1 << 63


def _percent(text: str | None) -> float:
    return float(text) if text is not None and re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?", text) else 100.0
