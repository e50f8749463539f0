"""The directory of a simulated node: who has it, what lies in it, and which processes are the node's."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable

from cdi.atomic import read_regular
from deviceplugin.sim.node.config import FILE_NAME
from deviceplugin.sim.runtime.processes import processes_where
from mpsd.common.errors import ConfigError
from mpsd.common.lockfile import LockFileError, open_lock, try_lock
from mpsd.sim.driver import KUBEPODS, SimulatedDriver

_OURS = ("run", "log", "state", "kubelet", "cdi")
_LOCK = "sim.lock"
_MARK = b"gpufrac simulated node\n"
_POLL_S = 0.05


class NodeDirectory:
    """Taken until released.

    Args:
        path: absolute.
        simulation: the simulated driver's directory below it.
    """

    def __init__(self, path: str, simulation: str) -> None:
        self.path, self._simulation = path, simulation
        self._lock_fd = -1

    def take(self, config_text: str) -> None:
        """Makes it, empties it of an earlier node, and writes the effective config. Raises ConfigError."""
        try:
            os.makedirs(self.path, mode=0o755, exist_ok=True)
            entries = os.listdir(self.path)
            if set(entries) - {_LOCK} and not self._is_ours():
                raise ConfigError(
                    f"cannot use directory {self.path}: it is not empty and was never a simulated node's; "
                    "name an empty or a new one"
                )
            fd = open_lock(os.path.join(self.path, _LOCK))
        except OSError as error:
            raise ConfigError(f"cannot use directory {self.path}: {error.strerror}") from error
        except LockFileError as error:
            raise ConfigError(f"cannot use directory {self.path}: {error}") from error
        if not try_lock(fd):
            os.close(fd)
            raise ConfigError(f"cannot use directory {self.path}: a simulated node runs there")
        self._lock_fd = fd
        os.pwrite(fd, _MARK, 0)
        _end_all(self._processes)  # of a node that was killed
        for name in _OURS:
            shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)
            os.makedirs(os.path.join(self.path, name), mode=0o755, exist_ok=True)
        with open(os.path.join(self.path, FILE_NAME), "w", encoding="utf-8") as file:
            file.write(config_text)

    def release(self) -> None:
        """Ends every process of the node; another one may have the directory then. At any time, and again."""
        if self._lock_fd >= 0:
            _end_all(self._processes)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _is_ours(self) -> bool:
        """Whether the directory bears a simulated node's mark: only then may it be emptied."""
        try:
            return read_regular(os.path.join(self.path, _LOCK))[0].startswith(_MARK)
        except OSError:
            return False

    def _processes(self) -> list[int]:
        """The node's processes, known by their environment (its own two, containers, MPS daemons, servers and clients)
        or by their cgroup."""
        node = f"GPUFRAC_SIM_NODE={self.path}".encode()
        simulation = f"GPUFRAC_SIM_DIRECTORY={self.path}/".encode()
        pipe = f"CUDA_MPS_PIPE_DIRECTORY={self.path}/run/".encode()
        found = processes_where(lambda env: any(entry == node or entry.startswith((simulation, pipe)) for entry in env))
        cgroups = SimulatedDriver(self._simulation).cgroups
        return [*found, *(pid for pid in cgroups.members(f"{cgroups.root}/{KUBEPODS}") if pid != os.getpid())]


def _end_all(find: Callable[[], list[int]], grace_s: float = 3.0) -> None:
    """Ends processes that are not our children: SIGTERM, after a grace SIGKILL."""
    deadline_s = time.monotonic() + grace_s
    number = signal.SIGTERM
    pause = threading.Event()
    while pids := find():
        if time.monotonic() >= deadline_s:
            number = signal.SIGKILL
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        pause.wait(_POLL_S)
