"""The container toolkit's createRuntime hook for memory limits, as of container toolkit 1.20."""

import threading
from collections.abc import Mapping, Sequence

from mpsd.gpu.backend import GpuError
from mpsd.gpu.model import MIB
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.gpus import SimulatedBackend

MEMORY_REQUEST, MEMORY_LIMIT = "NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT"
"""MiB, whole numbers: what the memory hook reads."""
HOOK_TIMEOUT_S = 10.0
"""Ends a hook whose driver call hangs. The real one has no timeout."""

_MAX_MIB = (1 << 64) // MIB - 1


class HookError(Exception):
    """A hook failed; the text is what it writes to stderr."""


def apply_memory_limits(simulation_directory: str, gpu: str, env: Mapping[str, str], cgroup: str) -> None:
    """What the container toolkit's hook does for one GPU: limits from the container's environment onto its cgroup.

    Without both variables it does nothing; without a request that equals the limit, without a limit there is none
    (container toolkit 1.20). Raises HookError.
    """
    if MEMORY_REQUEST not in env and MEMORY_LIMIT not in env:
        return
    if not SimulatedDriver(simulation_directory).cgroups.is_v2():
        raise HookError("setting GPU memory limits is only supported in cgroup v2")
    limit_mib = _mib(env, MEMORY_LIMIT)
    request_mib = _mib(env, MEMORY_REQUEST) if MEMORY_REQUEST in env else limit_mib
    if request_mib is None:
        request_mib = 0
    if limit_mib is not None and request_mib > limit_mib:
        raise HookError(f"memory request ({request_mib} MiB) exceeds memory limit ({limit_mib} MiB)")
    backend = SimulatedBackend(simulation_directory)
    watchdog = threading.Timer(HOOK_TIMEOUT_S, backend.close)
    watchdog.daemon = True
    watchdog.start()
    try:
        backend.open()
        hard_bytes = None if limit_mib is None else limit_mib * MIB
        backend.set_memory_limits(gpu, cgroup, request_mib * MIB, hard_bytes)
    except GpuError as error:
        raise HookError(f'failed to set memory limits for gpu "{gpu}": {error}') from error
    finally:
        watchdog.cancel()
        backend.close()


def _mib(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise HookError(f'failed to parse {name}: strconv.ParseUint: parsing "{text}": invalid syntax')
    if int(text) > _MAX_MIB:
        raise HookError(f"failed to parse {name}: value {text} exceeds the maximum of {_MAX_MIB} MiB")
    return int(text)


def option(arguments: Sequence[str], name: str) -> str:
    """Value of `--name value` or `--name=value`, empty where it is missing."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if before == name:
            return argument
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return ""
