"""Where this host has its control daemons started: outside of mpsd's pod where it can, with what they need around."""

import os
import shutil
import threading
from collections.abc import Mapping, Sequence

from mpsd.common.log import get_logger
from mpsd.daemon.paths import DaemonDirs
from mpsd.host import cgroups, launch, selinux, sharedmemory
from mpsd.host.survival import Survival

log = get_logger("host")


class HostPlace:
    """`mpsd.daemon.host.Place`: prepares and clears what lies around daemons.

    Args:
        survival: what `survival.probe` found.
        shared_memory: whether a daemon and its clients have a /dev/shm of their own.
    """

    def __init__(self, survival: Survival, *, shared_memory: bool = False) -> None:
        self._survival, self._shared_memory = survival, shared_memory
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def launch(
        self, name: str, dirs: DaemonDirs, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        """See Place: labels the pipe directory, mounts the shared memory, makes the cgroups."""
        self._warn(name, selinux.label(dirs.pipe))
        shm = ""
        if self._shared_memory:
            shm = dirs.shared_memory
            sharedmemory.mount(shm, self._survival.host_root)
        files = cgroups.prepare(self._survival.places, name)
        return launch.command(arguments, environment.items(), files, self._survival.namespaces, shm)

    def explain(self, returncode: int, output: str) -> str:
        """See Place."""
        return launch.explain(returncode, output)

    def reach(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        """See Place: from here where the program is here, too, as the container toolkit brings it; else in the host's
        mount namespace, where the daemon is."""
        mounts = [file for file in self._survival.namespaces if os.path.basename(file) == "mnt"]
        if not mounts or shutil.which(arguments[0], path=environment.get("PATH")) is not None:
            return arguments, environment
        return launch.command(arguments, environment.items(), namespaces=mounts)

    def leave(self, name: str) -> None:
        """See Place: removes the cgroups."""
        cgroups.remove(self._survival.places, name)

    def clear(self) -> tuple[str, ...]:
        """Removes every cgroup of ours, at an uninstall; those that still hold processes."""
        return cgroups.clear(self._survival.places)

    def remove(self, dirs: DaemonDirs) -> None:
        """See Place: unmounts the shared memory."""
        sharedmemory.unmount(dirs.shared_memory)

    def _warn(self, name: str, failure: str) -> None:
        with self._lock:
            fresh = bool(failure) and failure not in self._warned
            self._warned.add(failure)
        if fresh:
            log.warning("containers may not reach the MPS daemon", daemon=name, reason=failure)
