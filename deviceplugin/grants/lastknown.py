"""What the plugin knew when it last ran, so that its first list needs neither mpsd nor NVML."""

import msgspec
from msgspec import structs

from mpsd.common import records
from mpsd.common.log import get_logger
from mpsd.gpu.model import GpuHealth
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuStatus, HardLimits

log = get_logger("plugin")


class LastKnown(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs as last reported, the CDI kind that carried their device nodes (empty: none was found), the kinds that set
    memory limits, whether hard limits could be set, and the boot."""

    gpus: tuple[GpuStatus, ...] = ()
    gpu_kind: str = ""
    hooked: frozenset[str] = frozenset()
    hard_limits: HardLimits = HardLimits()
    boot_id: str = ""


def load(path: str, boot_id: str) -> LastKnown:
    """The stored value, with this boot; nothing known where the file is missing or unreadable.

    What was wrong with a GPU before a reboot says nothing now: it may have mended it, and a held share that starts as
    Unhealthy kills its pod at re-admission.
    """
    try:
        known = records.take(path, LastKnown, _flaw) or LastKnown()
    except records.RecordError as error:
        log.warning("cannot use what an earlier run knew", path=path, error=f"{error}; {error.kept}")
        known = LastKnown()
    if known.boot_id == boot_id:
        return known
    return structs.replace(known, boot_id=boot_id, gpus=tuple(_not_seen_yet(gpu) for gpu in known.gpus))


def _flaw(known: LastKnown) -> str:
    infos = [gpu.info for gpu in known.gpus]
    if len({info.uuid for info in infos}) < len(infos):
        return "it names a GPU twice"
    if any(info.memory_reserved_bytes > info.memory_total_bytes for info in infos):
        return "the driver can't reserve more memory of a GPU than it has"
    return ""


def _not_seen_yet(gpu: GpuStatus) -> GpuStatus:
    if gpu.health is GpuHealth.OK:
        return gpu
    return structs.replace(
        gpu, health=GpuHealth.UNRESPONSIVE, reason=f"not seen since the reboot; before: {gpu.reason}"
    )


def store(path: str, value: LastKnown) -> None:
    """Replaces the file. A failure is logged only: the next start is slower, nothing is lost."""
    try:
        records.write(path, value)
    except OSError as error:
        log.warning("cannot store what is known of the GPUs", path=path, error=str(error))


def without_moments(gpus: tuple[GpuStatus, ...]) -> tuple[GpuStatus, ...]:
    """GPUs less what changes from moment to moment: what is worth a durable write (pure)."""
    return tuple(
        structs.replace(
            gpu,
            clients=(),
            daemon=_spoken(gpu.daemon) if gpu.daemon is not None else None,
            mode=None,
            reason="" if gpu.health == "ok" else gpu.reason,
        )
        for gpu in gpus
    )


def _spoken(daemon: DaemonStatus) -> DaemonStatus:
    """What is worth knowing of a daemon: with `delivery: both` an answer depends on the protocol it speaks."""
    return DaemonStatus(state=DaemonState.ABSENT, name=daemon.name, protocol=daemon.protocol)
