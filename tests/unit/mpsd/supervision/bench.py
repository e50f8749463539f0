"""A supervisor over fakes, and what tests put in and look for."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from mpsd.config.model import GIB, Enforcement, FixedMemory, MpsConfig, NodeConfig, Resource
from mpsd.daemon.lifecycle import Policy
from mpsd.daemon.state import StateFile
from mpsd.gpu.model import ComputeMode, GpuInfo, GpuState, Inventory, Mode
from mpsd.localapi.snapshot import DaemonState, Desired, GpuStatus, Snapshot
from mpsd.supervision.supervisor import Supervisor
from tests.desired import allocation
from tests.heard import Heard
from tests.unit.mpsd.supervision.fakes import FakeBackend, FakeHost, FakeLogs
from tests.waiting import WAIT_S

ONE, TWO = (f"GPU-00000000-0000-4000-8000-{n:012d}" for n in (1, 2))


FAST = Policy(
    retry_s=0.01,
    probe_interval_s=0.01,
    drain_check_s=0.01,
    backoff_min_s=0.01,
    backoff_max_s=0.01,
    failed_retry_s=0.01,
    wedged_retry_s=0.01,
)


CALM = Policy(probe_interval_s=1000.0, backoff_min_s=1000.0, backoff_max_s=1000.0, drain_check_s=1000.0)


def resource(request_gib: int = 8) -> Resource:
    size = request_gib * GIB
    memory = FixedMemory(request_bytes=size, limit_bytes=size)
    return Resource(name="x/y", memory=memory, mode=Mode.SM_SHARING, enforcement=Enforcement.COOPERATIVE)


def state_of(uuid: str, **fields: object) -> GpuState:
    info = GpuInfo(uuid=uuid, index=int(uuid[-1]), name="", memory_total_bytes=80 * GIB)
    values = {"compute_mode": ComputeMode.DEFAULT, **fields}
    return GpuState(info=info, **values)  # type: ignore[arg-type]


def inventory(*states: GpuState) -> Inventory:
    return Inventory(driver_version="580.95.05", gpus=states)


class Bench:
    """A supervisor over fakes."""

    def __init__(self, root: Path, policy: Policy, config: NodeConfig | None = None) -> None:
        self.config = config or NodeConfig(resources=(resource(),), mps=MpsConfig(run_root=f"{root}/run"))
        self.host = FakeHost()
        self.backend = FakeBackend()
        self.state = StateFile(f"{root}/state/mpsd.json", "boot")
        self.kicks = 0
        self.backend_looked = self.backend.looked
        self.logs = FakeLogs()
        self.heard = Heard()
        self.supervisor = Supervisor(
            self.config,
            self.backend,
            self.host,
            self.state,
            logs=self.logs,
            kick=self._kick,
            policy=policy,
            teller=self.heard,
        )

    def _kick(self) -> None:
        self.kicks += 1

    def exits(self, uuid: str) -> None:
        """Posts the end of a daemon as its pidfd would."""
        identity = self.supervisor._node.daemons[uuid].identity
        assert identity is not None
        self.supervisor._watcher._on_exit(identity)

    def until(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """Waits by the watch API for a snapshot that fits."""
        snapshot = self.supervisor.snapshot
        while not condition(snapshot):
            newer = self.supervisor.watch(snapshot.instance, snapshot.generation, WAIT_S)
            assert newer.generation != snapshot.generation, f"nothing more happens: {snapshot}"
            snapshot = newer
        return snapshot

    def until_gpu(self, uuid: str, condition: Callable[[GpuStatus], bool]) -> GpuStatus:
        def find(snapshot: Snapshot) -> GpuStatus | None:
            return next((gpu for gpu in snapshot.gpus if gpu.info.uuid == uuid), None)

        found = find(self.until(lambda snapshot: (gpu := find(snapshot)) is not None and condition(gpu)))
        assert found is not None
        return found

    def until_daemon(self, uuid: str, *states: DaemonState) -> GpuStatus:
        return self.until_gpu(uuid, lambda gpu: gpu.daemon is not None and gpu.daemon.state in states)


@contextmanager
def running(bench: Bench) -> Iterator[Bench]:
    bench.supervisor.start()
    try:
        yield bench
    finally:
        bench.host.on_quit = bench.exits
        bench.supervisor.close()


@contextmanager
def gpu_user(key: str | None, **environment: str) -> Iterator[int]:
    """A process that holds an allocation, or none."""
    if key is not None:
        environment["GPUFRAC_ALLOCATION"] = key
    arguments = [sys.executable, "-ISc", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def attached(gpu: GpuStatus) -> dict[str, str]:
    return {a.key: a.objection for a in gpu.daemon.attached} if gpu.daemon is not None else {}


def burst(*gpus: str, **more: object) -> Desired:
    """A time-slicing allocation that may be above its request, beside one that may not."""
    values: dict[str, object] = {"mode": Mode.TIME_SLICING, **more}
    lent = allocation(*gpus, key="b1", limit_bytes=16 * GIB, default_socket=True, **values)  # type: ignore[arg-type]
    return Desired(allocations=(allocation(*gpus, **values), lent))  # type: ignore[arg-type]


# Groups
PAIR = NodeConfig(resources=(msgspec.structs.replace(resource(), groups=("pair",)),), groups=(("pair", (ONE, TWO)),))
