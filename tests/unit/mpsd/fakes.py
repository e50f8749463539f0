"""A host and a driver that do what the test says, for everything above them."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from mpsd.daemon.adopt import DaemonIdentity, ProcessIdentity
from mpsd.daemon.host import DaemonHost, MpsClients, Running
from mpsd.errors import GpufracError
from mpsd.gpu.backend import GpuBackend, XidEvent
from mpsd.gpu.model import ComputeMode, GpuInfo, GpuProcess
from mpsd.plan import DaemonSpec

WAIT_S = 20.0
"""Longest wait for something that must happen; reached only by a failing test."""


class FakeHost:
    """Daemons that run in name only. `fail[verb]` is raised; calls are kept in order."""

    def __init__(self) -> None:
        self.fail: dict[str, GpufracError] = {}
        self.adoptable: dict[str, DaemonIdentity] = {}
        self.connected: dict[str, MpsClients] = {}
        self.calls: list[tuple[str, str]] = []
        self.limits: dict[str, int] = {}
        self.on_quit: Callable[[str], None] = lambda _: None

    def _call(self, verb: str, uuid: str) -> None:
        self.calls.append((verb, uuid))
        if (error := self.fail.get(verb)) is not None:
            raise error

    def verbs(self, uuid: str) -> list[str]:
        return [verb for verb, of in self.calls if of == uuid]

    def find(self, spec: DaemonSpec) -> Running | None:
        self._call("find", spec.uuid)
        found = self.adoptable.get(spec.uuid)
        return None if found is None else Running(found, adopted=True)

    def spawn(self, spec: DaemonSpec) -> Running:
        self._call("spawn", spec.uuid)
        return self.find(spec) or Running(self.identity(spec), adopted=False)

    def identity(self, spec: DaemonSpec) -> DaemonIdentity:
        """Of a process that never lived: its exit is seen at once unless `watch` is faked, too."""
        return DaemonIdentity(
            boot_id="boot", pid=2**22 + 1, start_time=1, process_group=0, pipe_directory=spec.dirs.pipe
        )

    def configure(self, spec: DaemonSpec) -> str:
        self._call("configure", spec.uuid)
        self.limits[spec.uuid] = spec.pinned_limit_bytes
        return ""

    def probe(self, spec: DaemonSpec) -> None:
        self._call("probe", spec.uuid)

    def clients(self, spec: DaemonSpec) -> MpsClients:
        self._call("clients", spec.uuid)
        return self.connected.get(spec.uuid, MpsClients())

    def quit(self, spec: DaemonSpec, timeout_s: float) -> None:
        self._call("quit", spec.uuid)
        self.on_quit(spec.uuid)

    def terminate(self, identity: DaemonIdentity) -> None:
        self._call("terminate", identity.pipe_directory.rpartition("/")[2])

    def kill(self, spec: DaemonSpec, identity: DaemonIdentity | None, servers: tuple[ProcessIdentity, ...]) -> None:
        self._call("kill", spec.uuid)

    def remove(self, spec: DaemonSpec) -> None:
        self._call("remove", spec.uuid)


class FakeBackend:
    """Compute modes and processes by UUID. `fail[call]` is raised, calls for a GPU in `gates` wait for its event."""

    def __init__(self) -> None:
        self.modes: dict[str, ComputeMode] = defaultdict(lambda: ComputeMode.DEFAULT)
        self.running: dict[str, tuple[GpuProcess, ...]] = {}
        self.fail: dict[str, GpufracError] = {}
        self.set_calls: list[tuple[str, ComputeMode]] = []
        self.sets: queue.SimpleQueue[tuple[str, ComputeMode]] = queue.SimpleQueue()
        self.ignore_set = False
        self.gates: dict[str, threading.Event] = {}

    def _call(self, name: str) -> None:
        if (error := self.fail.get(name)) is not None:
            raise error

    def compute_mode(self, uuid: str) -> ComputeMode:
        self._call("compute_mode")
        if (gate := self.gates.get(uuid)) is not None:
            assert gate.wait(WAIT_S)
        return self.modes[uuid]

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        self._call("set_compute_mode")
        self.set_calls.append((uuid, mode))
        self.sets.put((uuid, mode))
        if not self.ignore_set:
            self.modes[uuid] = mode

    def processes(self, uuid: str) -> Sequence[GpuProcess]:
        self._call("processes")
        return self.running.get(uuid, ())

    def open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def driver_version(self) -> str:
        raise NotImplementedError

    def uuids(self) -> Sequence[str]:
        raise NotImplementedError

    def info(self, uuid: str) -> GpuInfo:
        raise NotImplementedError

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        raise NotImplementedError


_host: type[DaemonHost] = FakeHost
_backend: type[GpuBackend] = FakeBackend
