"""A host and a driver that do what the test says, for everything above them."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from mpsd.common.errors import GpufracError, TransientError
from mpsd.common.reason import Reason
from mpsd.daemon.adopt import DaemonIdentity, ProcessIdentity
from mpsd.daemon.controller import Configured, MpsClients, NotAClientError
from mpsd.daemon.host import DaemonHost, ProtocolChoice, Running
from mpsd.daemon.plan import DaemonSpec
from mpsd.gpu.backend import GpuBackend, MemoryLimits, NoLimitError, XidEvent
from mpsd.gpu.model import ComputeMode, GpuInfo, GpuProcess
from tests.waiting import WAIT_S


class FakeHost:
    """Daemons that run in name only. `fail[verb]` is raised; calls are kept in order."""

    def __init__(self) -> None:
        self.fail: dict[str, GpufracError] = {}
        self.adoptable: dict[str, DaemonIdentity] = {}
        self.connected: dict[str, MpsClients] = {}
        self.calls: list[tuple[str, str]] = []
        self._called = threading.Condition()
        self.limits: dict[str, int] = {}
        self.namespaces: dict[str, frozenset[str]] = {}
        self.refused: dict[str, Reason] = {}
        self.spoilt: dict[str, Reason] = {}
        self.choice = ProtocolChoice(2)
        self.terminated: list[int] = []
        self.strict = False
        """Whether probes compare the limit with the one that was set."""
        self.gates: dict[str, threading.Event] = {}
        self.on_quit: Callable[[str], None] = lambda _: None

    def _call(self, verb: str, uuid: str) -> None:
        with self._called:
            self.calls.append((verb, uuid))
            self._called.notify_all()
        if (gate := self.gates.get(verb)) is not None:
            assert gate.wait(WAIT_S)
        if (error := self.fail.get(verb)) is not None:
            raise error

    def await_namespaces(self, name: str, wanted: Callable[[frozenset[str]], bool]) -> None:
        """Waits until the daemon was configured with namespaces that fit."""
        with self._called:
            assert self._called.wait_for(lambda: wanted(self.namespaces[name]), WAIT_S), self.namespaces

    def await_call(self, verb: str, uuid: str) -> None:
        """Waits until it was called at least once."""
        with self._called:
            assert self._called.wait_for(lambda: (verb, uuid) in self.calls, WAIT_S), f"{verb} {uuid}: {self.calls}"

    def verbs(self, uuid: str) -> list[str]:
        return [verb for verb, of in self.calls if of == uuid]

    def find(self, spec: DaemonSpec) -> Running | None:
        self._call("find", spec.name)
        found = self.adoptable.get(spec.name)
        return None if found is None else Running(found, adopted=True)

    def protocol(self, driver_version: str) -> ProtocolChoice:
        if (error := self.fail.get("protocol")) is not None:
            raise error
        return self.choice

    def spawn(self, spec: DaemonSpec) -> Running:
        self._call("spawn", spec.name)
        return self.find(spec) or Running(self.identity(spec), adopted=False)

    def identity(self, spec: DaemonSpec) -> DaemonIdentity:
        """Of a process that never lived: its exit is seen at once unless `watch` is faked, too."""
        return DaemonIdentity(
            boot_id="boot",
            pid=2**22 + 1,
            start_time=len(self.calls),
            process_group=0,
            pipe_directory=spec.dirs.pipe,
            protocol=spec.protocol,
            gpus=spec.gpus,
        )

    def configure(self, spec: DaemonSpec) -> Configured:
        self._call("configure", spec.name)
        self.limits[spec.name] = spec.pinned_limit_bytes
        names = frozenset(namespace.name for namespace in spec.namespaces)
        with self._called:
            self.namespaces[spec.name] = names
            self._called.notify_all()
        names |= {link.directory for link in spec.links}
        return Configured(attached=names - self.refused.keys(), refused=self.refused)

    def probe(self, spec: DaemonSpec, *, servers: bool) -> Mapping[str, Reason]:
        self._call("probe servers" if servers else "probe", spec.name)
        if self.strict and spec.pinned_limit_bytes and spec.pinned_limit_bytes != self.limits[spec.name]:
            raise TransientError("cannot rely on the memory limit")
        # What a tenant spoilt is found once: to configure sets it right, or refuses it.
        spoilt, self.spoilt = self.spoilt, {}
        return spoilt

    def terminate_client(self, spec: DaemonSpec, pid: int) -> None:
        self._call("terminate client", spec.name)
        if pid not in self.connected.get(spec.name, MpsClients()).clients:
            raise NotAClientError(f"cannot terminate pid {pid}: it is no client")
        self.terminated.append(pid)

    def hold_server(self, spec: DaemonSpec) -> None:
        self._call("hold server", spec.name)

    def clients(self, spec: DaemonSpec) -> MpsClients:
        self._call("clients", spec.name)
        return self.connected.get(spec.name, MpsClients())

    def quit(self, spec: DaemonSpec, timeout_s: float) -> None:
        self._call("quit", spec.name)
        self.on_quit(spec.name)

    def terminate(self, identity: DaemonIdentity) -> None:
        self._call("terminate", identity.pipe_directory.rpartition("/")[2])

    def kill(self, spec: DaemonSpec, identity: DaemonIdentity | None, servers: tuple[ProcessIdentity, ...]) -> None:
        self._call("kill", spec.name)

    def remove(self, spec: DaemonSpec, *, homes: bool) -> None:
        self._call("remove", spec.name)


class FakeBackend:
    """Compute modes and processes by UUID, memory limits by UUID and cgroup. `fail[call]` is raised, calls for a GPU in
    `gates` wait for its event. `keep` is what becomes of limits that are set."""

    def __init__(self) -> None:
        self.modes: dict[str, ComputeMode] = defaultdict(lambda: ComputeMode.DEFAULT)
        self.running: dict[str, tuple[GpuProcess, ...]] = {}
        self.fail: dict[str, GpufracError] = {}
        self.set_calls: list[tuple[str, ComputeMode]] = []
        self.sets: queue.SimpleQueue[tuple[str, ComputeMode]] = queue.SimpleQueue()
        self.ignore_set = False
        self.gates: dict[str, threading.Event] = {}
        self.looked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.cgroup_root = "/nowhere"
        self.limits: dict[tuple[str, str], MemoryLimits] = {}
        self.keep: Callable[[MemoryLimits], MemoryLimits] = lambda limits: limits

    def _call(self, name: str) -> None:
        if (error := self.fail.get(name)) is not None:
            raise error

    def _enter(self, name: str, uuid: str) -> None:
        self._call(name)
        if (gate := self.gates.get(uuid)) is not None:
            assert gate.wait(WAIT_S)

    def compute_mode(self, uuid: str) -> ComputeMode:
        self._enter("compute_mode", uuid)
        return self.modes[uuid]

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        self._call("set_compute_mode")
        self.set_calls.append((uuid, mode))
        self.sets.put((uuid, mode))
        if not self.ignore_set:
            self.modes[uuid] = mode

    def processes(self, uuid: str) -> Sequence[GpuProcess]:
        self.looked.put(uuid)
        self._call("processes")
        return self.running.get(uuid, ())

    def recovery_action(self, uuid: str) -> int:
        raise NotImplementedError

    def memory_limits(self, uuid: str, cgroup: str) -> MemoryLimits:
        self._enter("memory_limits", uuid)
        if (found := self.limits.get((uuid, cgroup))) is None:
            raise NoLimitError("no limit", 6)
        return found

    def set_memory_limits(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        self._enter("set_memory_limits", uuid)
        self.limits[uuid, cgroup] = self.keep(MemoryLimits(soft_bytes, hard_bytes))

    def open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def driver_version(self) -> str:
        raise NotImplementedError

    def uuids(self) -> Sequence[str]:
        raise NotImplementedError

    def unnamed(self) -> int:
        raise NotImplementedError

    def info(self, uuid: str) -> GpuInfo:
        raise NotImplementedError

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        raise NotImplementedError


_host: type[DaemonHost] = FakeHost
_backend: type[GpuBackend] = FakeBackend


class FakeLogs:
    """Log files that nobody reads."""

    def __init__(self) -> None:
        self.followed: dict[str, int] = {}
        self.lines: dict[str, tuple[str, ...]] = {}

    def add(self, name: str, log_directory: str, protocol: int) -> None:
        self.followed[name] = protocol

    def remove(self, name: str) -> None:
        self.followed.pop(name, None)

    def last_lines(self, name: str) -> tuple[str, ...]:
        return self.lines.get(name, ())
