"""Config + inventory -> what each GPU should be: shared through which daemon, or left alone and why (pure)."""

from dataclasses import dataclass

from mpsd.config.model import NodeConfig
from mpsd.daemon.paths import DaemonDirs, base_environment, daemon_dirs
from mpsd.gpu.model import GpuInfo, Inventory
from mpsd.quantity import format_bytes
from mpsd.shares import largest_limit_bytes, usable_bytes

DAEMON_MARKER = "GPUFRAC_DAEMON"
"""In the environment of a control daemon we started: the GPU's UUID. Servers inherit it."""


@dataclass(frozen=True, slots=True)
class DaemonSpec:
    """One control daemon as it should run.

    `pinned_limit_bytes` is its default memory limit per client. Where no sm-sharing resource may use the GPU it is all
    usable memory: a client that finds the daemon all the same must not eat the reserve.
    """

    uuid: str
    pinned_limit_bytes: int
    dirs: DaemonDirs
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """One GPU: `daemon` is None exactly when `not_shared` says why."""

    info: GpuInfo
    usable_bytes: int
    not_shared: str = ""
    daemon: DaemonSpec | None = None


def plan(config: NodeConfig, inventory: Inventory) -> tuple[GpuPlan, ...]:
    """The plan of every GPU, in the inventory's order."""
    return tuple(_plan_gpu(config, gpu.info) for gpu in inventory.gpus)


def _plan_gpu(config: NodeConfig, info: GpuInfo) -> GpuPlan:
    usable = usable_bytes(info, config.memory_reserve_bytes)
    if reason := _not_shared(config, info, usable):
        return GpuPlan(info, usable, reason)
    return GpuPlan(info, usable, daemon=daemon_spec(config, info))


def daemon_spec(config: NodeConfig, info: GpuInfo, live_limit_bytes: int = 0) -> DaemonSpec:
    """The daemon of a GPU, whether or not it is to run now.

    Args:
        live_limit_bytes: largest limit granted on the GPU. The default is never below it, whatever the config says by
            now: a container's own limit cannot exceed the daemon's default.
    """
    usable = usable_bytes(info, config.memory_reserve_bytes)
    limit = largest_limit_bytes(config.resources, config, info, usable)
    dirs = daemon_dirs(config.mps, info.uuid)
    environment = (
        *base_environment(config.mps),
        ("CUDA_MPS_PIPE_DIRECTORY", dirs.pipe),
        ("CUDA_MPS_LOG_DIRECTORY", dirs.log),
        # By UUID, so that the daemon numbers its only GPU 0 whatever the host's index is.
        ("CUDA_VISIBLE_DEVICES", info.uuid),
        (DAEMON_MARKER, info.uuid),
    )
    pinned = max(usable if limit is None else limit, live_limit_bytes)
    return DaemonSpec(info.uuid, pinned, dirs, environment)


def _not_shared(config: NodeConfig, info: GpuInfo, usable: int) -> str:
    if config.mps.protocol == "3":
        return "mps.protocol 3 is not supported yet by this version: set it to auto or 2"
    if info.mig_enabled:
        return "MIG is enabled on it"
    if not config.gpus.admits(info.uuid, info.index):
        return "it is excluded by the config"
    for name, members in config.groups:
        if info.uuid in members or info.index in members:
            return f"it is a member of group {name}: groups are not supported yet by this version"
    if usable == 0:
        return (
            f"nothing of its {format_bytes(info.memory_total_bytes)} is left after "
            f"{format_bytes(info.memory_reserved_bytes)} reserved by the driver and "
            f"{format_bytes(config.memory_reserve_bytes)} by the config"
        )
    return ""
