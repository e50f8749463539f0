"""A simulated node with the supervisor in this process: short deadlines, real daemons, servers and clients.

GPU 0 is the one that faults strike. Every snapshot that is looked at must show the daemons of the other GPUs ready and
the same as ever, unless a test says that its fault is the whole node's.
"""

import contextlib
import dataclasses
import logging
import os
import re
import select
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from mpsd.common import processes
from mpsd.common.log import get_logger
from mpsd.config.model import (
    GIB,
    Enforcement,
    FixedMemory,
    GpuRef,
    MpsConfig,
    NodeConfig,
    Resource,
    SimulatedConfig,
    SimulatedGpu,
)
from mpsd.daemon import process
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.control import FrontEnd
from mpsd.daemon.host import LocalHost, Place
from mpsd.daemon.lifecycle import Policy
from mpsd.daemon.logs.parse import Severity
from mpsd.daemon.logs.tail import LogTails
from mpsd.daemon.namespaces import share_name
from mpsd.daemon.paths import DaemonDirs, daemon_dirs
from mpsd.daemon.state import StateFile
from mpsd.gpu import prober as probing
from mpsd.gpu.health import Policy as HealthPolicy
from mpsd.gpu.model import Mode
from mpsd.gpu.prober import Prober
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, Desired, DesiredAllocation, GpuStatus, Snapshot
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.gpus import SimulatedBackend
from mpsd.sim.mps.faults import clear_fault, set_fault
from mpsd.sim.mps.install import install_emulator
from mpsd.supervision import mode as modes
from mpsd.supervision import protocol as protocols
from mpsd.supervision.supervisor import Supervisor
from tests.desired import allocation
from tests.e2e.mpsdnode import DRIVERS, cuda_program, end, first_line, is_ready
from tests.mpspaths import mount_directory
from tests.waiting import WAIT_S

LIMIT = 8 * GIB
RESOURCE = "x/y"
STEPS = 40
"""Snapshots that may be published before something has come about, where a test says no other number."""

POLICY = Policy(
    retry_s=0.05,
    probe_interval_s=0.3,
    wedged_retry_s=0.1,
    quit_s=0.3,
    terminate_s=0.3,
    drain_check_s=0.1,
    backoff_min_s=0.25,
    backoff_max_s=0.25,
    failed_retry_s=60.0,
)
QUERY_S = 20.0
"""For answers that come; see `Control` for those that can't."""
CALL_S = 5.0
"""The same of driver calls; see `hang`."""
HOPELESS_S = 0.15
_SILENT = {"wedge": "", "slow": "", "terminate-hangs": "terminate", "hung-quit": "q"}
"""Faults of the emulator that leave commands without an answer, and what is in these commands."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that are constants in the product, short."""
    monkeypatch.setattr(protocols, "RETRY_S", 0.2)
    monkeypatch.setattr(modes, "RETRY_S", 0.2)
    monkeypatch.setattr(process, "PID_FILE_S", 0.3)
    monkeypatch.setattr(probing, "BACKOFF_S", (0.1, 0.1))


class Control(FrontEnd):
    """The front end, with a short deadline where an answer can't come: so a short one need not do for all."""

    def __init__(self, mps: MpsConfig) -> None:
        super().__init__(mps)
        self.hopeless: dict[str, str] = {}
        self._asked: Counter[str] = Counter()
        self._more = threading.Condition()

    def ask(self, dirs: DaemonDirs, command: str, timeout_s: float) -> str:
        return super().ask(dirs, command, self._deadline_s(dirs, command, timeout_s))

    def call(self, dirs: DaemonDirs, arguments: Sequence[str], timeout_s: float) -> str:
        return super().call(dirs, arguments, self._deadline_s(dirs, " ".join(arguments), timeout_s))

    def _deadline_s(self, dirs: DaemonDirs, command: str, timeout_s: float) -> float:
        with self._more:
            self._asked[dirs.pipe] += 1
            self._more.notify_all()
        part = self.hopeless.get(dirs.pipe)
        return timeout_s if part is None or part not in command else HOPELESS_S

    def until_asked(self, dirs: DaemonDirs, more: int) -> None:
        """Waits until so many more commands were sent to a daemon."""
        with self._more:
            enough = self._asked[dirs.pipe] + more
            assert self._more.wait_for(lambda: self._asked[dirs.pipe] >= enough, WAIT_S), "nobody asks any more"


class Backend(SimulatedBackend):
    """Its end is not waited for."""

    def wait_xid(self, timeout_s: float):  # type: ignore[no-untyped-def]
        return super().wait_xid(min(timeout_s, 0.05))


class Said(logging.Handler):
    """What mpsd logged: `event key=value ...`, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.crashes: list[str] = []
        """Faults of our own, logged with a stack."""
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "gpufrac_fields", {})
        if record.exc_info:
            self.crashes.append(record.getMessage())
        with self._more:
            self.lines.append(" ".join([record.getMessage(), *(f"{key}={value}" for key, value in fields.items())]))
            self._more.notify_all()

    def find(self, pattern: str, after: int = 0) -> int | None:
        """The number of the first line that has the pattern."""
        return next((n for n, line in enumerate(self.lines) if n >= after and re.search(pattern, line)), None)

    def until(self, pattern: str, after: int = 0) -> int:
        with self._more:
            found = self._more.wait_for(lambda: self.find(pattern, after) is not None, WAIT_S)
        number = self.find(pattern, after)
        assert found, f"nobody said {pattern!r}; said was: {chr(10).join(self.lines)}"
        assert number is not None
        return number

    def count(self, pattern: str, after: int = 0) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.lines[after:])


class Node:
    """Ended by `close`. Nothing runs before `start`."""

    def __init__(
        self,
        root: Path,
        protocol: int,
        gpus: int = 2,
        groups: tuple[tuple[str, tuple[GpuRef, ...]], ...] = (),
        policy: Policy = POLICY,
        place: Place | None = None,
        **mps: object,
    ) -> None:
        self.root, self.protocol, self.place = root, protocol, place
        self.policy = policy
        if "on_wedge" in mps:
            self.policy = dataclasses.replace(policy, on_wedge=mps["on_wedge"])  # type: ignore[arg-type]
        self.simulation = f"{root}/sim"
        binary = install_emulator(f"{root}/bin", self.simulation)
        simulated = SimulatedConfig(gpus=(SimulatedGpu(),) * gpus, driver=DRIVERS[protocol])
        self.driver = SimulatedDriver.create(self.simulation, simulated)
        self.uuids = [gpu.uuid for gpu in self.driver.gpus()]
        self.uuid = self.uuids[0]
        memory = FixedMemory(request_bytes=LIMIT, limit_bytes=LIMIT)
        resource = Resource(name=RESOURCE, memory=memory, mode=Mode.SM_SHARING, enforcement=Enforcement.COOPERATIVE)
        grouped = msgspec.structs.replace(resource, name="x/g", groups=tuple(name for name, _ in groups))
        values = {"binary": binary, "run_root": f"{root}/run", "log_root": f"{root}/log", **mps}
        self.config = NodeConfig(
            resources=(resource, grouped) if groups else (resource,),
            groups=groups,
            mps=MpsConfig(**values),  # type: ignore[arg-type]
        )
        self.control = Control(self.config.mps)
        self.said = Said()
        self.desired = Desired()
        """What is wanted from the start on."""
        self.guarded = True
        """Whether the daemons of other GPUs must stay as they are."""
        self.log_max_bytes = 1 << 20
        self.held: list[subprocess.Popen[str]] = []
        """CUDA programs that hold memory."""
        self.noticed = False
        """Whether they were told of trouble."""
        self.survivors: set[int] = set()
        self.foreign: DaemonIdentity | None = None
        self.bystander: subprocess.Popen[bytes] | None = None
        self.listener: socket.socket | None = None
        self.others: dict[str, int] = {}
        """Daemons of other GPUs by UUID: their PIDs."""
        self.marked = 0
        self._supervisor: Supervisor | None = None
        self._parts = contextlib.ExitStack()
        self._stack = contextlib.ExitStack()

    # --- as it is ------------------------------------------------------------------------------------------------

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None
        return self._supervisor

    @property
    def dirs(self) -> DaemonDirs:
        return self.dirs_of(self.uuid)

    def dirs_of(self, name: str) -> DaemonDirs:
        return daemon_dirs(self.config.mps, name)

    @property
    def allocations(self) -> tuple[DesiredAllocation, ...]:
        return self.desired.allocations

    @property
    def state_path(self) -> Path:
        return self.root / "state" / "mpsd.json"

    @property
    def server_log(self) -> Path:
        return Path(self.dirs.server_log if self.protocol == 3 else f"{self.dirs.log}/server.log")

    @property
    def gpu(self) -> GpuStatus:
        """GPU 0 as published now."""
        found = self._first(self.supervisor.snapshot)
        assert found is not None
        return found

    def mps_pids(self, name: str = "") -> set[int]:
        """The daemon of a group and its servers."""
        name = name or self.uuid
        return {member.pid for member in process.members(name, self.dirs_of(name).pipe)}

    # --- mpsd ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Another mpsd."""
        root, level = logging.getLogger(), logging.getLogger().level
        root.addHandler(self.said)
        root.setLevel(logging.INFO)
        self._parts.callback(root.setLevel, level)
        self._parts.callback(root.removeHandler, self.said)
        state = StateFile(str(self.state_path), processes.boot_id())
        host = LocalHost(self.config.mps, state, self.control, query_s=QUERY_S, place=self.place)
        log = get_logger("tail")
        say = {Severity.INFO: log.info, Severity.WARNING: log.warning, Severity.ERROR: log.error}
        logs = LogTails(
            lambda name, event: self.supervisor.log_event(name, event),  # noqa: PLW0108 - made after
            lambda name, severity, text: say[severity](text, daemon=name),
            max_bytes=self.log_max_bytes,
            poll_s=0.05,
        )
        backend = Backend(self.simulation)
        self._supervisor = supervisor = Supervisor(
            self.config,
            backend,
            host,
            state,
            logs=logs,
            kick=lambda: prober.kick(),  # noqa: PLW0108 - the prober comes after
            policy=self.policy,
            rng=lambda: 0.0,
        )
        health = HealthPolicy(recover_probes=1, failing_probes=1, quiet_s=0.1)
        prober = Prober(backend, supervisor.inventory_changed, period_s=0.1, deadline_s=CALL_S, policy=health)
        self._prober = prober
        logs.start()
        self._parts.callback(prober.close)
        self._parts.callback(logs.close)
        self._parts.callback(supervisor.close)
        supervisor.start()
        if self.desired.allocations:
            supervisor.apply(self.desired)
        prober.start()
        self.mark()

    def hang(self, call: str) -> None:
        """The driver's calls of this name hang on GPU 0, and no answer is waited for as long as for one that comes."""
        self._prober._deadline_s = 0.5
        self.driver.set_fault("hang", call, self.uuid)

    def unhang(self) -> None:
        self._prober._deadline_s = CALL_S
        self.driver.clear_fault("hang", self.uuid)

    def stop(self) -> None:
        """Ends mpsd as SIGTERM does."""
        self._parts.close()
        self._supervisor = None
        self.others.clear()

    def close(self) -> None:
        """Ends everything of this node, the quick way."""
        for fault in ("hang", "fail", "init-error", "lost"):
            for uuid in (None, *self.uuids):
                self.driver.clear_fault(fault, uuid)
        self._kill()
        self.stop()
        self._stack.close()
        self._kill()
        assert self.said.crashes == []

    def _kill(self) -> None:
        for name in (*self.uuids, *(name for name, _ in self.config.groups)):
            for pid in self.mps_pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # --- waiting -------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Steps are counted from here."""
        self.marked = self.supervisor.snapshot.generation

    def until_all(self, condition: Callable[[Snapshot], bool], steps: int = STEPS) -> Snapshot:
        """Waits for a snapshot that fits, as one reader of many would, and not longer than so many steps."""
        snapshot = self.supervisor.snapshot
        while not condition(snapshot):
            self._check_others(snapshot)
            newer = self.supervisor.watch(snapshot.instance, snapshot.generation, WAIT_S)
            assert newer.generation != snapshot.generation, f"nothing more happens: {self._shown(snapshot)}"
            assert newer.generation - self.marked <= steps, f"not within {steps} steps: {self._shown(newer)}"
            snapshot = newer
        self._check_others(snapshot)
        return snapshot

    def until(self, condition: Callable[[GpuStatus], bool], steps: int = STEPS) -> GpuStatus:
        """The same for GPU 0."""
        snapshot = self.until_all(lambda s: (gpu := self._first(s)) is not None and condition(gpu), steps)
        found = self._first(snapshot)
        assert found is not None
        return found

    def until_ready(self, steps: int = STEPS) -> GpuStatus:
        """Every daemon is, but for GPUs that can't have one."""
        self.until_all(lambda s: len(s.gpus) == len(self.uuids) and all(map(is_ready, s.gpus)), steps)
        self.mark()
        return self.gpu

    def _first(self, snapshot: Snapshot) -> GpuStatus | None:
        return next((gpu for gpu in snapshot.gpus if gpu.info.uuid == self.uuid), None)

    def _shown(self, snapshot: Snapshot) -> str:
        return "\n".join([*map(str, snapshot.gpus), *self.said.lines[-20:]])

    def _check_others(self, snapshot: Snapshot) -> None:
        """A daemon that was ready is ready, and the same."""
        mine = self._first(snapshot)
        for gpu in snapshot.gpus if self.guarded and mine is not None else ():
            if mine is None or gpu.group == mine.group:
                continue
            daemon, uuid = gpu.daemon, gpu.info.uuid
            if uuid in self.others:
                assert daemon is not None, snapshot
                assert (daemon.state, daemon.pid) == (DaemonState.READY, self.others[uuid]), snapshot
            elif daemon is not None and daemon.state is DaemonState.READY and daemon.pid is not None:
                self.others[uuid] = daemon.pid

    # --- what is done to it --------------------------------------------------------------------------------------

    def fault(self, name: str, value: str = "") -> None:
        """Switches a fault on, of GPU 0's daemon alone."""
        if name in _SILENT:
            self.control.hopeless[self.dirs.pipe] = _SILENT[name]
        set_fault(self.simulation, name, value, self.dirs.pipe)

    def clear(self, name: str) -> None:
        clear_fault(self.simulation, name, self.dirs.pipe)
        self.control.hopeless.pop(self.dirs.pipe, None)

    def signal(self, number: signal.Signals) -> None:
        """Signals GPU 0's daemon, nothing else."""
        os.kill(pid_of(self.gpu), number)

    def bind(self, *allocations: DesiredAllocation) -> None:
        """Has GPU 0 bound, by these or by one allocation that has slot 0."""
        self.desired = Desired(allocations=allocations or (self.share(),))
        if self._supervisor is not None:
            self.supervisor.apply(self.desired)

    def release(self) -> None:
        self.desired = Desired()
        self.supervisor.apply(self.desired)

    def share(self, slot: int = 0, gpu: int = 0, **more: object) -> DesiredAllocation:
        values = {"resource": RESOURCE, "limit_bytes": LIMIT, "key": f"k{slot}", **more}
        return allocation(self.uuids[gpu], slot=slot, **values)  # type: ignore[arg-type]

    def mount(self, slot: int = 0, gpu: int = 0) -> str:
        """What the container of a share finds as its pipe directory."""
        dirs = self.dirs_of(self.uuids[gpu])
        return mount_directory(dirs, share_name(RESOURCE, slot)) if self.protocol == 3 else dirs.pipe

    def cuda(self, *arguments: str, slot: int | None = 0, gpu: int = 0, **environment: str) -> "subprocess.Popen[str]":
        """A CUDA program in a share of a GPU; slot None: one of the host, without MPS."""
        variables = {
            "GPUFRAC_SIM_DIRECTORY": self.simulation,
            "CUDA_VISIBLE_DEVICES": self.uuids[gpu],
            "CUDA_MPS_PIPE_DIRECTORY": f"{self.root}/none" if slot is None else self.mount(slot, gpu),
            **({} if slot is None else {"GPUFRAC_ALLOCATION": f"k{slot}"}),
            **environment,
        }
        program = cuda_program(variables, *arguments)
        self._stack.callback(end, program)
        return program

    def hold(self, slot: int | None = 0, gpu: int = 0) -> "subprocess.Popen[str]":
        """A CUDA program that holds 1 GiB and says when MPS fails it."""
        program = self.cuda("--allocate", "1Gi", "--hold", "--stay", slot=slot, gpu=gpu)
        assert first_line(program) == str(GIB)
        self.held.append(program)
        return program

    def end_clients(self) -> None:
        for program in self.held:
            end(program)
        self.held.clear()

    def is_untouched(self) -> bool:
        """Whether no held client ended or noticed anything."""
        outputs = [program.stdout for program in self.held if program.stdout is not None]
        return not select.select(outputs, [], [], 0)[0] and all(program.poll() is None for program in self.held)

    def until_told(self) -> None:
        """Waits until every held client has noticed."""
        for program in self.held:
            assert first_line(program).startswith("CUDA_ERROR_"), program
        self.noticed = True

    def command(self, *words: str) -> str:
        """Says something to GPU 0's daemon behind mpsd's back."""
        control = FrontEnd(self.config.mps)
        if self.protocol == 3:
            return control.call(self.dirs, words, WAIT_S)
        return control.ask(self.dirs, " ".join(words), WAIT_S)

    def program(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Any other process on the host."""
        program = subprocess.Popen(arguments or ("sleep", "600"), stdin=subprocess.DEVNULL, env={})
        self._stack.callback(end, program)
        return program

    def later(self, callback: Callable[[], object]) -> None:
        """Has something undone at the end."""
        self._stack.callback(callback)


def daemon_of(gpu: GpuStatus) -> DaemonStatus:
    assert gpu.daemon is not None
    return gpu.daemon


def pid_of(gpu: GpuStatus) -> int:
    pid = daemon_of(gpu).pid
    assert pid is not None
    return pid


def texts(gpu: GpuStatus) -> str:
    """All that is said of a GPU, line by line."""
    daemon = gpu.daemon
    said = [gpu.not_shared, gpu.reason]
    if daemon is not None:
        said += [daemon.reason, *(attached.objection for attached in daemon.attached)]
    return "\n".join(filter(None, said))


@contextlib.contextmanager
def opened(node: Node) -> Iterator[Node]:
    try:
        yield node
    finally:
        node.close()
