"""May a container start now, and what does it mount? Judged from what mpsd said last (pure)."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import structs

from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.enforcement import UNKNOWN, level_words, mps_level
from deviceplugin.plan.model import NO_CDI_OF_PLUGINS, HardAbility
from deviceplugin.plan.reasons import EnforcementCode, OfferCode, StartCode
from deviceplugin.plan.view import domain_text, serves
from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason
from mpsd.config.model import Enforcement, MpsConfig
from mpsd.daemon.paths import daemon_dirs
from mpsd.gpu.model import GpuHealth
from mpsd.localapi.snapshot import Attached, DaemonStatus, GpuStatus

Gpus = Mapping[str, GpuStatus]
"""All GPUs that mpsd reports, by UUID."""


class Way(NamedTuple):
    """Directories of the host by which a container reaches its daemon; empty where it needs none. `shared_memory`: what
    the daemon has as its /dev/shm, empty for the node's."""

    pipe_directory: str = ""
    shared_memory: str = ""


Grant = tuple[Allocation, Way]
"""An allocation that may start, and what it mounts."""
RELEASED = Reason(StartCode.RELEASED, "its allocation is gone")


def start_objection(allocation: Allocation, gpus: Gpus, hard: HardAbility) -> Reason | None:
    """Why a container of this allocation may not start on its GPUs as they are now; None when it may.

    Each GPU must be there and bound to the mode. For sm-sharing its daemon must serve just these GPUs, answer, and hold
    the container to its limit: by a default limit that is not below it, or under MPS protocol 3 by a namespace of its
    own. A hard limit must be settable still, or the resource must accept less.
    """
    if reason := hard_objection(allocation, hard):
        return reason
    now = with_effective_enforcement(allocation, hard)
    return gpus_objection(now, gpus) or attach_objection(now, gpus)


def with_effective_enforcement(allocation: Allocation, hard: HardAbility) -> Allocation:
    """The allocation as a container of it would start now: on a node that lost hard limits, such as by an older driver,
    what was granted hard is what MPS gives."""
    if allocation.enforcement is not Enforcement.HARD or not hard.known or not hard.limits.missing:
        return allocation
    return structs.replace(allocation, enforcement=mps_level(allocation.mode), soft_bytes=0)


def hard_objection(allocation: Allocation, hard: HardAbility) -> Reason | None:
    """Why a container of an allocation that was granted hard may not start now; None for others."""
    if allocation.enforcement is not Enforcement.HARD:
        return None
    if not hard.known:
        return UNKNOWN
    now = with_effective_enforcement(allocation, hard)
    if now is allocation:
        if allocation.container is not None and hard.starts_wait:
            return None
        if allocation.container is not None and hard.kind and not allocation.gpu_kind and "" not in hard.hooked:
            return NO_CDI_OF_PLUGINS  # others get their GPUs by CDI
        return hard.no_setter(allocation.gpu_kind)
    missing = "; ".join(hard.limits.missing)
    if allocation.may_borrow:
        text = f"its limit is above its request, which needs hard limits, and this node has lost them: {missing}"
        return Reason(StartCode.HARD_LOST, text)
    if now.enforcement.rank < allocation.minimum.rank:
        given = level_words(now.enforcement)
        text = f"it needs a {allocation.minimum} limit, and this node enforces {given} by now: {missing}"
        return Reason(StartCode.HARD_LOST, text)
    return None


def gpus_objection(allocation: Allocation, gpus: Gpus) -> Reason | None:
    """The part that is the same for all allocations of one mode and limit on the same GPUs."""
    several = len(allocation.gpus) > 1
    for uuid in allocation.gpus:
        gpu = gpus.get(uuid)
        if gpu is None:
            named = f"its GPU {uuid}" if several else "its GPU"
            return Reason(StartCode.GPU_NOT_KNOWN, f"{named} is not known to mpsd")
        if reason := _gpu_objection(allocation, gpu, gpus):
            of_one = several and reason.code != StartCode.WAITS_FOR_DAEMON
            return reason.reworded(f"GPU {gpu.info.index}: {reason}") if of_one else reason
    if allocation.needs_daemon:
        daemons = [gpu.daemon for uuid in allocation.gpus if (gpu := gpus.get(uuid)) is not None and gpu.daemon]
        names = {daemon.name for daemon in daemons}
        served = {uuid for uuid, gpu in gpus.items() if gpu.daemon is not None and gpu.daemon.name in names}
        # How a client that sees some of a daemon's GPUs numbers them, and so its limit, is not known of protocol 2.
        if daemons[0].protocol == 2 and len(names) == 1 and served != set(allocation.gpus):
            text = f"its MPS daemon serves {len(served)} GPUs, and it uses {len(allocation.gpus)} of them"
            return Reason(StartCode.DAEMON_SERVES_OTHERS, text)
        if len(names) != 1:
            text = (
                f"its {len(allocation.gpus)} GPUs have {len(names)} MPS daemons still, and it needs one for all of them"
            )
            return Reason(StartCode.DAEMON_SERVES_OTHERS, text)
    return None


def _gpu_objection(allocation: Allocation, gpu: GpuStatus, gpus: Gpus) -> Reason | None:
    if gpu.health is GpuHealth.LOST:
        return gpu.why or Reason(OfferCode.GPU_NOT_WELL, "its GPU is lost")
    if allocation.needs_daemon:
        if gpu.daemon is None or not serves(gpu.daemon):
            # Why is said once, of the daemon, not of each container that waits for it.
            owner = domain_text(gpu.group, gpus.values())
            return Reason(StartCode.WAITS_FOR_DAEMON, f"waiting for the MPS daemon of {owner}")
        if reason := _default_limit_objection(allocation, gpu.daemon):
            return reason
    if gpu.mode is not allocation.mode:
        why = f": {gpu.reason}" if gpu.reason else ""
        return Reason(StartCode.GPU_NOT_IN_MODE, f"its GPU is not in {allocation.mode} yet{why}")
    if allocation.needs_daemon and gpu.daemon is not None and gpu.daemon.unheld:
        return Reason(StartCode.NOT_HELD, f"a process that skips MPS could take its GPU: {gpu.daemon.unheld}")
    return None


def _default_limit_objection(allocation: Allocation, daemon: DaemonStatus) -> Reason | None:
    if daemon.protocol != 2:
        return None
    if allocation.default_socket:
        text = "its MPS daemon speaks protocol 2, and memory is borrowed and taken back under protocol 3 only"
        return Reason(StartCode.BURST_NEEDS_PROTOCOL_3, text)
    if not daemon.pipe_directory:
        return Reason(StartCode.NO_DIRECTORY, "its MPS daemon names no pipe directory")
    limit_bytes = daemon.pinned_limit_bytes
    if limit_bytes is None or limit_bytes < allocation.limit_bytes:
        text = f"its MPS daemon's default limit of {limit_bytes} bytes is below {allocation.limit_bytes} bytes"
        return Reason(StartCode.LIMIT_NOT_SET, text)
    return None


def attach_objection(allocation: Allocation, gpus: Gpus) -> Reason | None:
    """The part that is the allocation's own, under MPS protocol 3: its namespace, or its way to the main socket. Call
    when the GPUs are well."""
    daemon = _daemon(allocation, gpus)
    if daemon is None or daemon.protocol == 2:
        return None
    attached = _attached(allocation, daemon)
    if attached is None:
        lacks = "way to its MPS daemon" if allocation.default_socket else "MPS namespace"
        return Reason(StartCode.NO_NAMESPACE, f"it has no {lacks} yet")
    if attached.why is not None:
        return attached.why
    if not allocation.default_socket and attached.limit_bytes != allocation.limit_bytes:
        text = f"its MPS namespace is limited to {attached.limit_bytes} bytes, not to {allocation.limit_bytes} bytes"
        return Reason(StartCode.LIMIT_NOT_SET, text)
    if not attached.pipe_directory:
        return Reason(StartCode.NO_DIRECTORY, "its MPS daemon names no directory for it")
    return None


def way(allocation: Allocation, gpus: Gpus, mps: MpsConfig) -> Way:
    """What the container mounts when it may start: what the daemon that runs has, whatever the config says by now."""
    daemon = _daemon(allocation, gpus)
    if daemon is None:
        return Way()
    attached = _attached(allocation, daemon) if daemon.protocol != 2 else None
    shared_memory = configured_shared_memory(allocation, mps) if daemon.shared_memory is None else daemon.shared_memory
    return Way(attached.pipe_directory if attached is not None else daemon.pipe_directory, shared_memory)


def configured_shared_memory(allocation: Allocation, mps: MpsConfig) -> str:
    """The directory on the host that the allocation's daemon will see as /dev/shm by the config, empty for the node's.
    Only where nothing is known of its daemon: one that runs may have been started otherwise."""
    return daemon_dirs(mps, allocation.group).shared_memory if mps.shared_memory else ""


def loosened(allocation: Allocation, gpus: Gpus) -> Reason | None:
    """Why a live allocation on several GPUs is held to more than its limit, None when it is not. Under MPS protocol 2
    the daemon's default alone holds there, and a reload may have raised it."""
    daemon = _daemon(allocation, gpus)
    if daemon is None or daemon.protocol != 2 or len(allocation.gpus) == 1:
        return None
    default_bytes = daemon.pinned_limit_bytes or 0
    if default_bytes <= allocation.limit_bytes or allocation.enforcement is not Enforcement.COOPERATIVE:
        return None
    return Reason(
        EnforcementCode.ONE_LIMIT_PER_GROUP,
        f"its processes are held to {format_bytes(default_bytes)} per GPU by now, not to "
        f"{format_bytes(allocation.limit_bytes)}: MPS protocol 2 has one limit for all containers of one "
        "daemon, and the config raised it",
    )


def _daemon(allocation: Allocation, gpus: Gpus) -> DaemonStatus | None:
    gpu = gpus.get(allocation.gpus[0])
    return gpu.daemon if gpu is not None and allocation.needs_daemon else None


def _attached(allocation: Allocation, daemon: DaemonStatus) -> Attached | None:
    return next((attached for attached in daemon.attached if attached.key == allocation.key), None)
