"""A scripted `GpuBackend`, a clock that only the test moves, and a receiver that can be waited on."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from mpsd.common.errors import GpufracError
from mpsd.gpu.backend import GpuBackend, GpuError, MemoryLimits, XidEvent
from mpsd.gpu.health import Policy
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo, GpuProcess, GpuState, Inventory
from mpsd.gpu.prober import Prober
from tests.waiting import WAIT_S, until


def gpu_uuid(number: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{number:012d}"


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class ScriptedBackend:
    """`fail[(call, uuid)]` is raised, a call in `gates` waits for its event. Counts every finished or begun call."""

    cgroup_root = "/nowhere"

    def __init__(self, gpus: int = 2) -> None:
        self.listed: list[str] = [gpu_uuid(n) for n in range(gpus)]
        self.left_out = 0
        self.fail: dict[tuple[str, str], Exception] = {}
        self.gates: dict[tuple[str, str], threading.Event] = {}
        self.running: dict[str, tuple[GpuProcess, ...]] = {}
        self.modes: dict[str, ComputeMode] = {}
        self.actions: dict[str, int] = {}
        self.xids: queue.SimpleQueue[XidEvent | Exception] = queue.SimpleQueue()
        self.calls: list[tuple[str, str]] = []
        self._closed = threading.Event()
        self._changed = threading.Condition()

    def _call(self, name: str, uuid: str = "") -> None:
        with self._changed:
            self.calls.append((name, uuid))
            self._changed.notify_all()
        gate = self.gates.get((name, uuid))
        if gate is not None:
            assert gate.wait(WAIT_S)
        if (error := self.fail.get((name, uuid))) is not None:
            raise error

    def count(self, name: str, uuid: str = "") -> int:
        return self.calls.count((name, uuid))

    def await_calls(self, count: int, name: str, uuid: str = "") -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count(name, uuid) >= count, WAIT_S), self.calls

    def open(self) -> None:
        self._closed.clear()
        self._call("open")

    def close(self) -> None:
        self._closed.set()
        self.xids.put(GpuError("cannot wait: closed"))
        self._call("close")

    def driver_version(self) -> str:
        self._call("driver_version")
        return "580.95.05"

    def uuids(self) -> Sequence[str]:
        self._call("uuids")
        return tuple(self.listed)

    def unnamed(self) -> int:
        return self.left_out

    def info(self, uuid: str) -> GpuInfo:
        self._call("info", uuid)
        return GpuInfo(uuid=uuid, index=int(uuid[-3:]), name="Fake", memory_total_bytes=80 << 30)

    def compute_mode(self, uuid: str) -> ComputeMode:
        self._call("compute_mode", uuid)
        return self.modes.get(uuid, ComputeMode.DEFAULT)

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        raise AssertionError("the prober never sets a mode")

    def recovery_action(self, uuid: str) -> int:
        self._call("recovery_action", uuid)
        return self.actions.get(uuid, 0)

    def memory_limits(self, uuid: str, cgroup: str) -> MemoryLimits:
        raise AssertionError("the prober never asks for limits")

    def set_memory_limits(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        raise AssertionError("the prober never sets limits")

    def processes(self, uuid: str) -> Sequence[GpuProcess]:
        self._call("processes", uuid)
        return self.running.get(uuid, ())

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        if self._closed.is_set():
            raise GpuError("cannot wait: closed")
        try:
            event = self.xids.get(timeout=min(timeout_s, 0.05))
        except queue.Empty:
            return None
        if isinstance(event, Exception):
            raise event
        return event


_proof: Callable[[], GpuBackend] = ScriptedBackend


class Receiver:
    """Keeps every published inventory."""

    def __init__(self) -> None:
        self.all: list[Inventory] = []
        self._changed = threading.Condition()

    def __call__(self, inventory: Inventory) -> None:
        with self._changed:
            self.all.append(inventory)
            self._changed.notify_all()

    def await_one(self, wanted: Callable[[Inventory], bool]) -> Inventory:
        """Waits until the last published one is as wanted."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.all) and wanted(self.all[-1]), WAIT_S), self.all[-1:]
            return self.all[-1]

    def await_health(self, **health: GpuHealth) -> Inventory:
        """E.g. `await_health(gpu0=GpuHealth.LOST)`: the GPU with index 0."""

        return self.await_one(lambda inventory: _has(inventory, health))

    def has(self, **health: GpuHealth) -> bool:
        """Whether that is so now."""
        return bool(self.all) and _has(self.all[-1], health)


def _has(inventory: Inventory, health: Mapping[str, GpuHealth]) -> bool:
    found = {f"gpu{s.info.index}": s.health for s in inventory.gpus}
    return health.items() <= found.items()


def state(inventory: Inventory, index: int) -> GpuState:
    return next(s for s in inventory.gpus if s.info.index == index)


class CountedProber(Prober):
    """Whose rounds can be waited for."""

    begun = done = 0
    changed: threading.Condition

    def _round(self) -> None:
        with self.changed:
            self.begun += 1
        super()._round()
        with self.changed:
            self.done += 1
            self.changed.notify_all()

    def round(self) -> None:
        """Has all GPUs probed once, from after this call on, and waits for the end of it."""
        with self.changed:
            number = self.begun + 1
            self.kick()
            assert self.changed.wait_for(lambda: self.done >= number, WAIT_S)


class Rig:
    """A prober on a scripted backend, driven by rounds: nothing is probed unless the test asks or moves the clock."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self.backend, self.clock, self.seen = backend, FakeClock(), Receiver()
        self.errors: queue.SimpleQueue[GpufracError] = queue.SimpleQueue()
        self.xids: list[tuple[str, int]] = []
        self.prober = CountedProber(
            backend,
            self.seen,
            on_error=self.errors.put,
            on_xid=lambda uuid, row: self.xids.append((uuid, row.xid)),
            deadline_s=10.0,
            policy=Policy(quiet_s=60.0),
            clock=self.clock,
        )
        self.prober.changed = threading.Condition()

    def rounds(self, count: int = 1) -> None:
        """Runs whole probes of all GPUs. None goes on afterwards, so that a clock set on makes no answer late."""
        for _ in range(count):
            self.prober.round()

    def rounds_until(self, **health: GpuHealth) -> None:
        """Where a call that hung is on its way back: until then its GPU is left out."""

        def healthy() -> bool:
            self.rounds()
            return self.seen.has(**health)

        until(healthy)

    def advance(self, seconds: float) -> None:
        """Moves the clock and wakes the loop."""
        self.clock.now_s += seconds
        self.prober.kick()


@contextmanager
def probing(backend: ScriptedBackend) -> Iterator[Rig]:
    rig = Rig(backend)
    rig.prober.start()
    try:
        yield rig
    finally:
        for gate in backend.gates.values():
            gate.set()
        rig.prober.close()
