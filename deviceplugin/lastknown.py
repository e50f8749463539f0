"""What the plugin knew when it last ran, so that its first list needs neither mpsd nor NVML."""

import os

import msgspec

from cdi.atomic import replace_file
from mpsd.log import get_logger
from mpsd.snapshot import GpuStatus

log = get_logger("plugin")


class LastKnown(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs as last reported, and the CDI kind that carried their device nodes (empty: none was found)."""

    gpus: tuple[GpuStatus, ...] = ()
    gpu_kind: str = ""


def load(path: str) -> LastKnown:
    """The stored value; nothing known where the file is missing or unreadable."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=LastKnown)
    except FileNotFoundError:
        return LastKnown()
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("cannot use what an earlier run knew", path=path, error=str(error))
        return LastKnown()


def store(path: str, value: LastKnown) -> None:
    """Replaces the file. A failure is logged only: the next start is slower, nothing is lost."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        replace_file(path, msgspec.json.encode(value), 0o600)
    except OSError as error:
        log.warning("cannot store what is known of the GPUs", path=path, error=str(error))


def without_moments(gpus: tuple[GpuStatus, ...]) -> tuple[GpuStatus, ...]:
    """GPUs less what changes from moment to moment: what is worth a durable write (pure)."""
    return tuple(
        msgspec.structs.replace(
            gpu, clients=(), daemon=None, mode=None, reason="" if gpu.health == "ok" else gpu.reason
        )
        for gpu in gpus
    )
