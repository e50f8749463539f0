"""One table of what can go wrong below mpsd: fault -> state it ends in, and what the operator is told.

The supervisor runs in this process with short deadlines; daemons, servers and clients are real processes.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpsd import processes
from mpsd.config.model import GIB, Enforcement, FixedMemory, MpsConfig, NodeConfig, Resource, SimulatedConfig
from mpsd.daemon import process
from mpsd.daemon.host import LocalHost
from mpsd.daemon.lifecycle import Policy
from mpsd.daemon.paths import DaemonDirs
from mpsd.gpu.model import ComputeMode, GpuHealth, Mode
from mpsd.gpu.prober import Prober
from mpsd.plan import daemon_spec
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.gpus import SimulatedBackend
from mpsd.sim.mps.faults import clear_fault, set_fault
from mpsd.sim.mps.install import install_emulator
from mpsd.sim.mps.switches import set_switch
from mpsd.snapshot import DaemonState, Desired, DesiredGpu, GpuClients, GpuStatus
from mpsd.state import StateFile
from mpsd.supervisor import Supervisor
from tests.e2e.mpsdnode import ROOT, WAIT_S, end, first_line

POLICY = Policy(
    retry_s=0.05,
    probe_interval_s=0.3,
    quit_s=2.0,
    terminate_s=0.5,
    backoff_min_s=0.3,
    backoff_max_s=0.3,
    failed_retry_s=60.0,
)
QUERY_S = 0.6
READY = DaemonState.READY


class Node:
    """One GPU, its driver and a supervisor that is started by `start`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.simulation = f"{root}/sim"
        binary = install_emulator(f"{root}/bin", self.simulation)
        self.driver = SimulatedDriver.create(self.simulation, SimulatedConfig())
        self.uuid = self.driver.gpus()[0].uuid
        memory = FixedMemory(request_bytes=8 * GIB, limit_bytes=8 * GIB)
        self.config = NodeConfig(
            resources=(Resource(name="x/y", memory=memory, mode=Mode.SM_SHARING, enforcement=Enforcement.COOPERATIVE),),
            mps=MpsConfig(binary=binary, run_root=f"{root}/run", log_root=f"{root}/log"),
        )
        self.backend = SimulatedBackend(self.simulation)
        self.supervisor: Supervisor | None = None
        self.prober: Prober | None = None

    @property
    def dirs(self) -> DaemonDirs:
        self.backend.open()
        try:
            return daemon_spec(self.config, self.backend.info(self.uuid)).dirs
        finally:
            self.backend.close()

    def use(self, **mps: str) -> None:
        """Other MPS settings, before the start."""
        values = {"binary": self.config.mps.binary, "run_root": f"{self.root}/run", "log_root": f"{self.root}/log"}
        self.config = NodeConfig(resources=self.config.resources, mps=MpsConfig(**{**values, **mps}))  # type: ignore[arg-type]

    def start(self) -> Supervisor:
        state = StateFile(f"{self.root}/state/mpsd.json", processes.boot_id())
        host = LocalHost(self.config.mps, state, query_s=QUERY_S)
        self.supervisor = Supervisor(self.config, self.backend, host, state, policy=POLICY)
        self.prober = Prober(self.backend, self.supervisor.inventory_changed, period_s=0.2)
        self.supervisor.start()
        self.prober.start()
        return self.supervisor

    def until(self, condition: Callable[[GpuStatus], bool]) -> GpuStatus:
        assert self.supervisor is not None
        snapshot = self.supervisor.snapshot
        while not (snapshot.gpus and condition(snapshot.gpus[0])):
            newer = self.supervisor.watch(snapshot.instance, snapshot.generation, WAIT_S)
            assert newer.generation != snapshot.generation, f"nothing more happens: {snapshot}"
            snapshot = newer
        return snapshot.gpus[0]

    def until_daemon(self, *states: DaemonState) -> GpuStatus:
        return self.until(lambda gpu: gpu.daemon is not None and gpu.daemon.state in states)

    def fault(self, name: str, value: str = "") -> None:
        set_fault(self.simulation, name, value)

    def clear(self, name: str) -> None:
        clear_fault(self.simulation, name)

    def client(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = {
            "GPUFRAC_SIM_DIRECTORY": self.simulation,
            "CUDA_MPS_PIPE_DIRECTORY": f"{self.root}/run/mps/{self.uuid}",
            "GPUFRAC_ALLOCATION": "k1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "mpsd.sim.cuda", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def mps_pids(self) -> set[int]:
        return {member.pid for member in process.members(self.uuid, f"{self.config.mps.run_root}/mps/{self.uuid}")}

    def close(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()
        if self.prober is not None:
            self.prober.close()
        for pid in self.mps_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    node = Node(short_tmp)
    yield node
    node.close()


@dataclass(frozen=True)
class Fault:
    """`inject` before the start; then the daemon comes to one of `states` with `reason` in its text."""

    name: str
    inject: Callable[[Node], None]
    states: tuple[DaemonState, ...]
    reason: str
    heal: Callable[[Node], None] | None = None
    """After this it is ready by itself; None where only a restart of mpsd or an operator helps."""


def emulator_fault(name: str, value: str = "", *, states: tuple[DaemonState, ...], reason: str) -> Fault:
    return Fault(name, lambda node: node.fault(name, value), states, reason, lambda node: node.clear(name))


def missing_binary(node: Node) -> None:
    os.rename(node.config.mps.binary, f"{node.root}/away")


def long_path(node: Node) -> None:
    node.use(run_root=f"{node.root}/{'r' * 60}")


def file_in_the_way(node: Node) -> None:
    Path(node.root, "run").mkdir(exist_ok=True)
    Path(node.root, "run", "mps").write_text("")


BACKOFF = (DaemonState.BACKOFF,)
NOT_READY = (DaemonState.CONFIGURING, DaemonState.STOPPING)
FAULTS = [
    Fault(
        "binary missing",
        missing_binary,
        BACKOFF,
        "is the driver's MPS package installed",
        lambda node: os.rename(f"{node.root}/away", node.config.mps.binary),
    ),
    Fault("socket path too long", long_path, (DaemonState.FAILED,), "more than the 107 a socket path may have"),
    Fault(
        "pipe directory can't be made",
        file_in_the_way,
        BACKOFF,
        "cannot make the directory",
        lambda node: Path(node.root, "run", "mps").unlink(),
    ),
    emulator_fault("refuse-start", "no CUDA-capable device", states=BACKOFF, reason="no CUDA-capable device"),
    emulator_fault("crash-on-start", states=BACKOFF, reason="MPS control daemon"),
    emulator_fault("wedge", states=NOT_READY, reason="cannot get an answer to 'set_default_device_pinned_mem_limit"),
    emulator_fault("slow", "2000", states=NOT_READY, reason="cannot get an answer to 'set_default_device"),
    emulator_fault("half-line", states=NOT_READY, reason="cannot"),
    emulator_fault("drop", states=NOT_READY, reason="cannot talk to the MPS control daemon"),
    emulator_fault(
        "limit-not-applied", states=NOT_READY, reason="cannot read the MPS control daemon's reply '': expected a memory"
    ),
    emulator_fault("limit-not-applied", "1024M", states=NOT_READY, reason="limit: set to 8192M, read back as 1024M"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_before_the_start(node: Node, fault: Fault) -> None:
    fault.inject(node)
    node.start()
    gpu = node.until(
        lambda g: g.daemon is not None and g.daemon.state in fault.states and fault.reason in g.daemon.reason
    )
    assert gpu.daemon is not None
    assert gpu.daemon.pinned_limit_bytes is None
    assert gpu.health is GpuHealth.OK
    if fault.heal is not None:
        fault.heal(node)
        gpu = node.until_daemon(READY)
        assert gpu.daemon is not None
        assert (gpu.daemon.reason, gpu.daemon.pinned_limit_bytes) == ("", 8 * GIB)


@pytest.mark.parametrize("fault", ["wedge", "drop", "half-line"])
def test_a_ready_daemon_that_goes_bad_is_not_ready_and_replaced(node: Node, fault: str) -> None:
    node.start()
    before = node.until_daemon(READY)
    node.fault(fault)
    gpu = node.until_daemon(*NOT_READY)
    assert gpu.daemon is not None
    assert gpu.daemon.reason
    assert gpu.daemon.pinned_limit_bytes is None
    node.until(lambda g: g.daemon is not None and "replaced after 3 failed attempts: cannot" in g.daemon.reason)
    node.clear(fault)
    after = node.until_daemon(READY)
    assert before.daemon is not None
    assert after.daemon is not None
    assert after.daemon.pid != before.daemon.pid


def test_a_default_limit_changed_by_someone_else_is_set_again(node: Node) -> None:
    node.start()
    gpu = node.until_daemon(READY)
    command = b"set_default_device_pinned_mem_limit 0 1024M\n"
    environment = {"PATH": "/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": node.dirs.pipe}
    process.run([node.config.mps.binary], environment, command, 10.0, 1000)
    node.until(lambda g: g.daemon is not None and g.daemon.since_unix_s > gpu.daemon.since_unix_s)  # type: ignore[union-attr]
    node.until_daemon(READY)
    reply = process.run([node.config.mps.binary], environment, b"get_default_device_pinned_mem_limit 0\n", 10.0, 1000)
    assert reply.output.strip() in (b"8192M", b"8G")


def test_a_dead_daemon_s_server_is_ended_before_the_next_start(node: Node) -> None:
    set_switch(node.simulation, "server-after-daemon-death", "stay")
    node.start()
    gpu = node.until_daemon(READY)
    assert gpu.daemon is not None
    assert gpu.daemon.pid is not None
    client = node.client("--allocate", "1Gi", "--hold", "--stay")
    try:
        first_line(client)
        servers = node.mps_pids() - {gpu.daemon.pid}
        assert len(servers) == 1
        os.kill(gpu.daemon.pid, signal.SIGKILL)
        node.until(lambda g: g.daemon is not None and g.daemon.restarts == 1 and g.daemon.state is READY)
        assert not servers & node.mps_pids()
        assert client.poll() is None  # a client of ours is never signalled
    finally:
        end(client)


@pytest.mark.parametrize("fault", ["hung-quit", "wedge"])
def test_a_stop_ends_whatever_the_daemon_does(node: Node, fault: str) -> None:
    supervisor = node.start()
    node.until_daemon(READY)
    node.fault(fault)
    supervisor.close()
    assert node.mps_pids() == set()
    assert supervisor.snapshot.gpus[0].daemon is not None
    assert supervisor.snapshot.gpus[0].daemon.state is DaemonState.ABSENT


def test_a_foreign_daemon_in_our_directory_is_left_alone(node: Node) -> None:
    dirs = node.dirs
    os.makedirs(dirs.pipe)
    os.makedirs(dirs.log)
    environment = (
        ("PATH", "/usr/bin:/bin"),
        ("CUDA_MPS_PIPE_DIRECTORY", dirs.pipe),
        ("CUDA_MPS_LOG_DIRECTORY", dirs.log),
    )
    process.start(node.config.mps.binary, environment, dirs, 10.0, multiuser=False)
    foreign = process.find_started(dirs, processes.boot_id())
    try:
        node.start()
        gpu = node.until_daemon(DaemonState.FAILED)
        assert gpu.daemon is not None
        assert gpu.daemon.reason == (
            f"cannot use {dirs.pipe}: the MPS control daemon with pid {foreign.pid} lives there, and we did not start "
            "it: end it"
        )
        assert process.is_alive(foreign)
    finally:
        process.kill_and_wait(lambda: (foreign,), 10.0)


def test_a_pid_file_that_names_something_else_is_stale(node: Node) -> None:
    dirs = node.dirs
    os.makedirs(dirs.pipe)
    Path(dirs.pid_file).write_text(str(os.getpid()))
    Path(dirs.control_socket).write_text("")
    node.start()
    gpu = node.until_daemon(READY)
    assert gpu.daemon is not None
    assert gpu.daemon.pid != os.getpid()


def test_a_compute_mode_that_may_not_be_set_keeps_the_gpu_unbound(node: Node) -> None:
    node.driver.set_fault("no-permission", "set_compute_mode")
    supervisor = node.start()
    node.until_daemon(READY)
    supervisor.apply(Desired(gpus=(DesiredGpu(uuid=node.uuid, mode=Mode.SM_SHARING),)))
    gpu = node.until(lambda g: bool(g.reason))
    assert (gpu.mode, gpu.driver_compute_mode) == (None, ComputeMode.DEFAULT)
    assert "Insufficient Permissions" in gpu.reason
    supervisor.apply(Desired())


def test_a_lost_gpu_is_reported_and_its_clients_can_still_be_told(node: Node) -> None:
    supervisor = node.start()
    node.until_daemon(READY)
    node.driver.set_fault("lost", uuid=node.uuid)
    node.until(lambda g: g.health is GpuHealth.LOST)
    # With no GPU left the driver is opened again and again; meanwhile "nobody" must be an error, never an answer.
    pause = threading.Event()
    for _ in range(200):
        found = supervisor.clients([node.uuid])[node.uuid]
        assert found.clients == ()
        if not found.error:
            break
        pause.wait(0.05)
    else:
        pytest.fail("the clients of a lost GPU were never told")
    node.driver.clear_fault("lost", node.uuid)
    node.until(lambda g: g.health is GpuHealth.OK)


def test_clients_of_a_hung_driver_are_an_error(node: Node) -> None:
    supervisor = node.start()
    node.until_daemon(READY)
    node.driver.set_fault("hang", "processes", uuid=node.uuid)
    assert "no answer in 0.3 s" in supervisor.clients([node.uuid], timeout_s=0.3)[node.uuid].error
    node.driver.clear_fault("hang", node.uuid)
    assert supervisor.clients([node.uuid]) == {node.uuid: GpuClients()}


def test_a_state_directory_that_cannot_be_written_stops_binding_not_running(node: Node) -> None:
    Path(node.root, "state").write_text("")
    supervisor = node.start()
    gpu = node.until_daemon(DaemonState.BACKOFF)
    assert gpu.daemon is not None
    assert "cannot write" in gpu.daemon.reason
    Path(node.root, "state").unlink()
    node.until_daemon(READY)
    supervisor.apply(Desired(gpus=(DesiredGpu(uuid=node.uuid, mode=Mode.SM_SHARING),)))
    node.until(lambda g: g.mode is Mode.SM_SHARING)
    supervisor.apply(Desired())
