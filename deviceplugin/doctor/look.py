"""Gathers the facts for `gpufrac doctor`. Reads only, and works while both processes are down."""

import ctypes
import os
import resource
import shutil
from collections.abc import Sequence

from cdi.registry import DEFAULT_DIRECTORIES
from cdi.scan import scan
from deviceplugin.doctor.checks import Facts, Place
from deviceplugin.draft.look import look as look_at_driver
from deviceplugin.kubelet.places import kubelet_places
from deviceplugin.reconcile.specguard import BARS, with_own
from deviceplugin.status.model import PluginStatus
from mpsd.common.reason import Reason
from mpsd.config.model import NodeConfig
from mpsd.daemon.paths import control_binary, daemon_dirs, socket_objection
from mpsd.host.checks import closed_objection, nofile_objection
from mpsd.localapi.snapshot import Snapshot

TIMEX_BYTES = 512
"""More than a `struct timex` has."""
TIME_ERROR = 5
"""What adjtimex(2) says of a clock that nothing keeps in time."""
STEM = "gpufrac.dev-allocation_"
LONGEST = "GPU-00000000-0000-0000-0000-000000000000"
"""A domain's name is the UUID of its GPU, or a shorter one."""


def gather(
    config: NodeConfig,
    snapshot: Snapshot | None,
    plugin: PluginStatus | None,
    errors: tuple[Reason | None, Reason | None],
    attention: Sequence[Reason],
    *,
    assumed: bool = False,
    proc: str = "/proc",
) -> Facts:
    """What the checks judge. The driver is asked only where mpsd does not answer: one process asks it at a time.

    Args:
        assumed: nobody named the config.
        errors: why mpsd and the plugin do not answer.
    """
    simulated = config.backend == "simulated"
    driver, trouble = (snapshot.driver_version or "" if snapshot is not None else ""), None
    if snapshot is None and not simulated:
        from mpsd.gpu.nvml import NvmlBackend

        seen = look_at_driver(NvmlBackend())
        driver, trouble = seen.driver_version or "", "; ".join(seen.troubles)
    return Facts(
        snapshot=snapshot,
        plugin=plugin,
        mpsd_error=errors[0],
        plugin_error=errors[1],
        attention=tuple(attention),
        driver=driver,
        driver_trouble=trouble,
        simulated=simulated,
        assumed=assumed,
        mps_binary=shutil.which(control_binary(config.mps)),
        socket_objection=socket_objection(daemon_dirs(config.mps, LONGEST)),
        closed="" if simulated else closed_objection(config.mps.run_root),
        places=tuple(_place(setting, path) for setting, path in settings(config)),
        nofile=nofile_objection(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        inotify_instances=_number(f"{proc}/sys/fs/inotify/max_user_instances"),
        kubelet_missing=kubelet_places(config).missing(),
        cdi_errors=dict(scan(with_own(DEFAULT_DIRECTORIES, config.cdi.directory)).errors),
        own_files=_own_files(config.cdi.directory),
        clock_kept=_clock_kept(),
    )


def _clock_kept() -> bool | None:
    """Whether some time service keeps the clock, as the kernel knows (adjtimex(2)); None where it does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def settings(config: NodeConfig) -> tuple[tuple[str, str], ...]:
    """The directories that the config names, by the key that names each."""
    return (
        ("mps.runRoot", config.mps.run_root),
        ("mps.logRoot", config.mps.log_root),
        ("stateRoot", config.state_root),
        ("cdi.directory", config.cdi.directory),
        ("kubelet.devicePlugins", config.kubelet_device_plugins),
    )


def _place(setting: str, path: str) -> Place:
    try:
        os.stat(path)
        room = os.statvfs(path)
    except (FileNotFoundError, NotADirectoryError):
        return Place(setting, path, exists=False)
    except OSError as error:
        return Place(setting, path, exists=False, trouble=error.strerror or str(error))
    return Place(setting, path, exists=True, free_bytes=room.f_bfree * room.f_frsize)


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _own_files(directory: str) -> tuple[str, ...] | None:
    """Keys of the allocations that our CDI files are of; None where it can't be listed."""
    try:
        names = os.listdir(directory)
    except OSError:
        return None
    keys = (name[len(STEM) : -len(".json")] for name in names if name.startswith(STEM) and name.endswith(".json"))
    return tuple(sorted(key for key in keys if key not in BARS))
