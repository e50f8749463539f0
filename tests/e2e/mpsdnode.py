"""A simulated node for tests: real mpsd processes, real emulated daemons, real CUDA clients, all in one directory."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpsd.common import processes
from mpsd.localapi.call import call
from mpsd.localapi.client import MpsdClient
from mpsd.localapi.snapshot import Desired, GpuStatus, Snapshot
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.mps.faults import clear_fault, set_fault
from mpsd.sim.switches import set_switch
from tests.lines import next_line
from tests.waiting import WAIT_S

DRIVERS = {2: "580.95.05", 3: "615.71.09"}
"""A driver for each MPS protocol."""

ROOT = str(Path(__file__).resolve().parents[2])


class MpsdNode:
    """One node in `root`. Everything that runs on it is ended by `close`."""

    def __init__(self, root: Path, gpus: int = 1, driver: str = DRIVERS[2]) -> None:
        self.root = root
        self.run_root = f"{root}/run"
        self.simulation = f"{self.run_root}/sim"
        self.config_path = root / "config.yaml"
        self.gpus = gpus
        self.version = driver
        self.write_config()
        self.client = MpsdClient(f"{self.run_root}/mpsd.sock")
        self._stack = contextlib.ExitStack()
        self._count = 0

    def write_config(self, request: str = "8Gi", more: str = "", pair: str = "", mps: str = "") -> None:
        """Replaces the config file in one step. `pair`: members of a group of that name, which the resource is on."""
        resource, node = ("gpus: {groups: [pair]}", f"gpus: {{groups: {{pair: {pair}}}}}") if pair else ("", "")
        gpus = ", ".join(["{memory: 80Gi}"] * self.gpus)
        text = f"""
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:
  - name: gpufrac.dev/gpu
    memory: {{request: {request}}}
    compute: {{mode: sm-sharing}}
    {resource}
{node}
mps: {{runRoot: {self.run_root}, logRoot: {self.root}/log{mps}}}
cdi: {{directory: {self.root}/cdi}}
kubelet: {{root: {self.root}/kubelet, devicePlugins: {self.root}/kubelet/device-plugins}}
stateRoot: {self.root}/state
backend: simulated
simulated: {{gpus: [{gpus}], driver: {self.version}}}
metrics: {{address: ""}}
{more}
"""
        temporary = self.config_path.with_suffix(".new")
        temporary.write_text(text)
        temporary.rename(self.config_path)

    @property
    def driver(self) -> SimulatedDriver:
        return SimulatedDriver(self.simulation)

    def start(self) -> "subprocess.Popen[bytes]":
        """Starts mpsd; its log goes to a file of its own, see `log`."""
        self._count += 1
        with open(f"{self.root}/mpsd{self._count}.log", "wb") as log:
            mpsd = subprocess.Popen(
                [sys.executable, "-m", "mpsd", self.config_path],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(end, mpsd)
        return mpsd

    def log(self) -> str:
        """What the mpsd started last wrote."""
        return Path(f"{self.root}/mpsd{self._count}.log").read_text()

    def until(self, condition: Callable[[Snapshot], bool], after: Snapshot | None = None) -> Snapshot:
        """Waits by the watch API for a snapshot that fits; with `after`, for one of another mpsd."""
        deadline_s = time.monotonic() + WAIT_S
        instance, generation = "", -1
        while True:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"it did not happen; log:\n{self.log()}"
            try:
                snapshot = self.client.watch(instance, generation, min(left_s, 5.0))
            except Exception:  # noqa: BLE001 - not up yet, or going down
                select.select([], [], [], 0.02)
                continue
            if condition(snapshot) and (after is None or snapshot.instance != after.instance):
                return snapshot
            instance, generation = snapshot.instance, snapshot.generation

    def until_gpu(self, condition: Callable[[GpuStatus], bool], after: Snapshot | None = None) -> GpuStatus:
        """The same for the first GPU."""
        return self.until(lambda snapshot: bool(snapshot.gpus) and condition(snapshot.gpus[0]), after).gpus[0]

    def until_ready(self, after: Snapshot | None = None) -> Snapshot:
        """All daemons are ready."""
        return self.until(lambda s: len(s.gpus) == self.gpus and all(is_ready(gpu) for gpu in s.gpus), after)

    def apply(self, desired: Desired) -> None:
        self.client.apply(desired)

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        return call(f"{self.run_root}/mpsd.sock", method, params, object, WAIT_S)

    def cuda(self, gpu: GpuStatus, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        """A CUDA program with what its container would have of this GPU's daemon: under protocol 3 the namespace of the
        allocation that it names."""
        assert gpu.daemon is not None
        mounts = {attached.key: attached.pipe_directory for attached in gpu.daemon.attached}
        key = environment.get("GPUFRAC_ALLOCATION", "")
        variables = {
            "GPUFRAC_SIM_DIRECTORY": self.simulation,
            "CUDA_MPS_PIPE_DIRECTORY": mounts[key] if gpu.daemon.protocol == 3 else gpu.daemon.pipe_directory,
            "CUDA_VISIBLE_DEVICES": gpu.info.uuid,
            **environment,
        }
        program = cuda_program(variables, *arguments)
        self._stack.callback(end, program)
        return program

    def fault(self, name: str, value: str = "") -> None:
        """Switches a fault of all emulated daemons on."""
        set_fault(self.simulation, name, value)

    def switch(self, name: str, value: str) -> None:
        """Has the emulated daemons do otherwise what no source settles."""
        set_switch(self.simulation, name, value)

    def clear(self, name: str) -> None:
        clear_fault(self.simulation, name)

    def mps_processes(self) -> list[int]:
        """PIDs of the node's daemons and servers."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                environment = processes.environ(int(name))
                pipe_directory = environment.get("CUDA_MPS_PIPE_DIRECTORY", "")
                if pipe_directory.startswith(f"{self.root}/") and "GPUFRAC_DAEMON" in environment:
                    found.append(int(name))
        return found

    def close(self) -> None:
        """Ends mpsd, clients, daemons and servers, by the PIDs found in this node's own directories."""
        self._stack.close()
        for pid in self.mps_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_ready(gpu: GpuStatus) -> bool:
    return gpu.daemon is not None and gpu.daemon.state == "ready"


def cuda_program(variables: dict[str, str], *arguments: str) -> "subprocess.Popen[str]":
    """A CUDA program with this environment and nothing else, its three streams in pipes; whoever starts it ends it."""
    return subprocess.Popen(
        [sys.executable, "-m", "mpsd.sim.cuda", *arguments],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(child: "subprocess.Popen[Any]") -> None:
    """Ends a child of ours and closes its pipes."""
    if child.poll() is None:
        child.kill()
    child.communicate()


def first_line(program: "subprocess.Popen[str]") -> str:
    """Waits for the program's first line."""
    return next_line(program.stdout, WAIT_S)


def saved_state(node: MpsdNode) -> dict[str, Any]:
    """What mpsd remembers on disk."""
    value = json.loads(Path(f"{node.root}/state/mpsd.json").read_text())
    assert isinstance(value, dict)
    return value


@contextlib.contextmanager
def mpsd_node(root: Path, gpus: int = 1, driver: str = DRIVERS[2]) -> Iterator[MpsdNode]:
    node = MpsdNode(root, gpus, driver)
    try:
        yield node
    finally:
        node.close()
