"""Benchmarks: figures as ratios to floors measured in the same run. Not a test: nothing here fails on a slow machine.

usage: hack/bench [--rounds N]
"""

import argparse
import contextlib
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import grpc

from cdi.atomic import DurableDirectory
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.api import deviceplugin_v1beta1_pb2_grpc as rpc
from mpsd.common.errors import GpufracError
from mpsd.config.load import parse_config
from mpsd.localapi.client import MpsdClient

T = TypeVar("T")
PROBES = 10
CONFIG = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:
{resources}
mps: {{runRoot: {root}/run, logRoot: {root}/log}}
cdi: {{directory: {root}/cdi}}
kubelet: {{root: {root}/kubelet, devicePlugins: {root}/kubelet/device-plugins}}
stateRoot: {root}/state
backend: simulated
simulated:
  driver: "{driver}"
  gpus: [{gpus}]
metrics: {{address: ""}}
{more}
"""
ANNOTATED = """
annotations: {{gpus: {{include: all}}, share: true, trust: any}}
nri: {{socket: {root}/run/nri.sock}}
"""
SHARES = "  - {name: gpufrac.dev/gpu-1gi, memory: {request: 1Gi}, compute: {mode: sm-sharing}}"
UNITS = "  - {name: gpufrac.dev/units, unit: 64Mi, compute: {mode: sm-sharing}}"


class Registry(rpc.RegistrationServicer):
    """The kubelet's half of registration: dials back, opens the list, notes the time."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.registered_s: dict[str, float] = {}
        self.devices: dict[str, list[pb.Device]] = {}
        self.channels: list[grpc.Channel] = []
        self.plugins: dict[str, rpc.DevicePluginStub] = {}
        self.changed = threading.Condition()

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:  # noqa: N802
        channel = grpc.insecure_channel(f"unix:{self.directory}/{request.endpoint}")
        plugin = rpc.DevicePluginStub(channel)
        plugin.GetDevicePluginOptions(pb.Empty(), timeout=10)
        stream = plugin.ListAndWatch(pb.Empty())
        with self.changed:
            self.registered_s[request.resource_name] = time.perf_counter()
            self.plugins[request.resource_name] = plugin
            self.channels.append(channel)
            self.changed.notify_all()
        threading.Thread(target=self._read, args=(request.resource_name, stream), daemon=True).start()
        return pb.Empty()

    def _read(self, name: str, stream: Iterator[pb.ListAndWatchResponse]) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):
            for message in stream:
                with self.changed:
                    self.devices[name] = list(message.devices)
                    self.changed.notify_all()

    def wait(self, done: Callable[[], bool], timeout_s: float = 60) -> None:
        with self.changed:
            if not self.changed.wait_for(done, timeout_s):
                raise SystemExit("bench: the plugin did not get there in time")


class Node:
    """mpsd and plugin as real processes in a temporary directory, and a registration server."""

    def __init__(self, resources: str, gpus: list[str], driver: str = "580.95.05", more: str = "") -> None:
        self.root = tempfile.mkdtemp(prefix="gfb-", dir="/tmp")
        self.plugins = f"{self.root}/kubelet/device-plugins"
        os.makedirs(self.plugins)
        os.makedirs(f"{self.root}/cdi")
        self.config = f"{self.root}/config.yaml"
        text = CONFIG.format(
            resources=resources,
            root=self.root,
            gpus=", ".join(f"{{memory: {g}}}" for g in gpus),
            driver=driver,
            more=more.format(root=self.root),
        )
        parse_config(text, self.config)
        Path(self.config).write_text(text)
        self.registry = Registry(self.plugins)
        self.server = grpc.server(ThreadPoolExecutor(8))
        rpc.add_RegistrationServicer_to_server(self.registry, self.server)
        self.server.add_insecure_port(f"unix:{self.plugins}/kubelet.sock")
        self.server.start()
        self.log = open(f"{self.root}/log.txt", "wb")  # noqa: SIM115 - closed with the node
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self, name: str) -> float:
        started_s = time.perf_counter()
        command = [str(Path(sys.executable).parent / "gpufrac"), name, "--config", self.config]
        self.processes[name] = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        return started_s

    def wait_daemons(self, timeout_s: float = 120) -> None:
        client, until_s = MpsdClient(f"{self.root}/run/mpsd.sock"), time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with contextlib.suppress(GpufracError):
                gpus = client.snapshot().gpus
                if gpus and all(gpu.daemon is not None and gpu.daemon.state == "ready" for gpu in gpus):
                    return
            time.sleep(0.1)
        raise SystemExit("bench: the MPS daemons did not get ready in time")

    def offer(self, name: str, shares: int) -> None:
        """mpsd, its daemons, then the plugin, until so many shares of a resource are Healthy."""
        self.spawn("mpsd")
        self.wait_daemons()
        self.spawn("plugin")
        devices = self.registry.devices
        self.registry.wait(lambda: sum(d.health == "Healthy" for d in devices.get(name, ())) >= shares)

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        process.wait(30)

    def close(self) -> None:
        for name in list(self.processes):
            self.stop(name)
        for channel in self.registry.channels:
            channel.close()
        self.server.stop(0).wait()
        self.log.close()
        shutil.rmtree(self.root, ignore_errors=True)


def timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def show(name: str, value_s: float, floor_s: float, target: str) -> None:
    took, floor = f"{value_s * 1000:9.2f} ms", f"{floor_s * 1000:8.2f} ms"
    print(f"{name:46} {took}   {value_s / floor_s:6.2f} x floor {floor}   (target {target})", flush=True)


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command_s(command: list[str], rounds: int) -> float:
    subprocess.run(command, check=True, capture_output=True)
    return statistics.median(
        timed(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(rounds)
    )


def bench_cli(rounds: int) -> None:
    python, gpufrac = sys.executable, str(Path(sys.executable).parent / "gpufrac")
    floor = command_s([python, "-c", "import click"], rounds)
    show("gpufrac --help", command_s([gpufrac, "--help"], rounds), floor, "<= 3 x import click")


def bench_start(rounds: int) -> None:
    floor = command_s([sys.executable, "-c", "import grpc"], rounds)
    took = []
    for _ in range(rounds):
        node = Node(SHARES, ["80Gi"])
        started_s = node.spawn("plugin")
        node.registry.wait(lambda: "gpufrac.dev/gpu-1gi" in node.registry.registered_s)  # noqa: B023
        took.append(node.registry.registered_s["gpufrac.dev/gpu-1gi"] - started_s)
        node.close()
    show("plugin: start to registered", statistics.median(took), floor, "<= 2.2 x import grpc")


def bench_allocate(gpus: int) -> None:
    node = Node(SHARES, ["80Gi"] * gpus)
    try:
        name = "gpufrac.dev/gpu-1gi"
        node.offer(name, 48 * gpus)
        ids = [device.ID for device in node.registry.devices[name]]
        plugin = node.registry.plugins[name]

        def allocate(identifier: str) -> None:
            request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[identifier])])
            plugin.Allocate(request, timeout=10)

        for identifier in ids[:20]:
            allocate(identifier)
        empty, durable, took, again = [], [], [], []
        with DurableDirectory(f"{node.root}/floor") as floor_directory:
            for identifier in ids[20:]:  # floors and calls in turn, so that a slow moment hits all alike
                empty.append(timed(lambda: plugin.GetDevicePluginOptions(pb.Empty(), timeout=10)))
                durable.append(timed(lambda: floor_directory.put("record.json", b"x" * 600)))
                took.append(timed(lambda: allocate(identifier)))  # noqa: B023
            idle = []
            for identifier in ids[20:]:
                idle.append(timed(lambda: plugin.GetDevicePluginOptions(pb.Empty(), timeout=10)))
                again.append(timed(lambda: allocate(identifier)))  # noqa: B023
        print(f"-- {len(took)} allocations on {gpus} GPUs")
        for part, label in ((0.5, "p50"), (0.99, "p99")):
            floor = percentile(empty, part) + percentile(durable, part)
            show(f"Allocate {label}", percentile(took, part), floor, "<= 1.5 x" if part == 0.5 else "<= 3 x")
        show("Allocate repeated p50", percentile(again, 0.5), percentile(idle, 0.5), "<= 2 x empty call")
        show("Allocate repeated p99", percentile(again, 0.99), percentile(idle, 0.99), "for information")
        print(f"{'plugin RSS after load':46} {rss_mib(node.processes['plugin'].pid):9.1f} MiB")
    finally:
        node.close()


def bench_idle(seconds: float) -> None:
    node = Node(SHARES, ["80Gi"] * 8)
    try:
        node.spawn("mpsd")
        node.spawn("plugin")
        node.wait_daemons()
        node.registry.wait(lambda: "gpufrac.dev/gpu-1gi" in node.registry.devices)
        time.sleep(5)
        before = {name: cpu_s(process.pid) for name, process in node.processes.items()}
        time.sleep(seconds)
        for name, target in (("plugin", 55), ("mpsd", 38)):
            pid = node.processes[name].pid
            share = (cpu_s(pid) - before[name]) / seconds * 100
            print(f"{name + ' RSS, 8 GPUs':46} {rss_mib(pid):9.1f} MiB   (target <= {target} MiB)")
            print(
                f"{name + ' idle CPU, 8 GPUs':46} {share:9.2f} % of a core over {seconds:g} s   (target < 0.5 %)",
                flush=True,
            )
        gpufrac = str(Path(sys.executable).parent / "gpufrac")
        floor = command_s([sys.executable, "-c", "import click, msgspec"], PROBES)
        for process in ("mpsd", "plugin"):
            probe = [gpufrac, "status", "--check=live", "--process", process, "--run-root", f"{node.root}/run"]
            show(f"probe of {process}", command_s(probe, PROBES), floor, "<= 2 x import click, msgspec")
    finally:
        node.close()


def bench_crash(gpus: int) -> None:
    """From the kill of a daemon to its GPU's CDI file withdrawn and its free shares Unhealthy, one sample per GPU."""
    node = Node(SHARES, ["80Gi"] * gpus)
    try:
        name = "gpufrac.dev/gpu-1gi"
        node.offer(name, 48 * gpus)
        mpsd = MpsdClient(f"{node.root}/run/mpsd.sock")
        first = {d.ID.partition("::")[0]: d.ID for d in reversed(node.registry.devices[name])}
        withdrawn, exits = [], []
        for gpu in mpsd.snapshot().gpus:
            request = pb.ContainerAllocateRequest(devices_ids=[first[gpu.info.uuid]])
            answer = node.registry.plugins[name].Allocate(pb.AllocateRequest(container_requests=[request]), timeout=10)
            key = answer.container_responses[0].cdi_devices[-1].name.rpartition("=s")[2]
            (file,) = _await(lambda key=key: list(Path(node.root, "cdi").glob(f"*{key}*")))  # type: ignore[misc]
            assert gpu.daemon is not None
            assert gpu.daemon.pid is not None
            os.kill(gpu.daemon.pid, signal.SIGKILL)
            killed_s = time.perf_counter()
            _await(lambda file=file: not file.exists())  # type: ignore[misc]
            withdrawn.append(time.perf_counter() - killed_s)
            exits.append(exit_wakeup_s())
        print(f"-- {gpus} daemons killed")
        for part, label in ((0.5, "p50"), (1.0, "max")):
            floor_s = percentile(exits, part)
            show(f"daemon killed -> CDI file gone {label}", percentile(withdrawn, part), floor_s, "event, no poll")
    finally:
        node.close()


def bench_nri(containers: int) -> None:
    """Answers to a container runtime that asks over NRI, which waits 2 s for each and holds all others up meanwhile."""
    from deviceplugin.nri.model import Container, Pod
    from deviceplugin.sim.runtime.nri import NriRuntime
    from mpsd.sim.driver import KUBEPODS, SimulatedDriver
    from mpsd.sim.model import gpu_uuid

    node = Node(SHARES, ["80Gi"] * 2, "615.71.09", ANNOTATED)
    runtime = None
    try:
        node.offer("gpufrac.dev/gpu-1gi", 96)
        driver = SimulatedDriver(f"{node.root}/run/sim")
        runtime = NriRuntime(f"{node.root}/run/nri.sock", inventory=lambda: ((), ()))
        runtime.start()
        if not runtime.wait_plugin(30):
            raise SystemExit("bench: the plugin did not come to the container runtime")
        keys = "nvidia.com/container.main.gpu-memory.limit", "nvidia.com/container.main.gpu-compute.mode"

        def pod(name: str, annotations: dict[str, str]) -> tuple[Pod, Container]:
            made = Pod(id=f"s-{name}", name=name, uid=name, namespace="bench", annotations=annotations, pid=1)
            path = f"kubepods-pod{name}.slice:cri-containerd:{name}"
            return made, Container(id=name, pod_id=made.id, name="main", cgroups_path=path)

        for number, mode in enumerate(("time-slicing", "sm-sharing")):
            floor, create, start = [], [], []
            for n in range(containers):
                other = pod(f"other{number}{n}", {"team": "x"})
                floor.append(timed(lambda: runtime.create_container(*other)))  # noqa: B023
                devices = {"nvidia.com/container.main.gpus.devices": gpu_uuid(number)}
                asked, container = pod(f"pod{number}x{n}", {keys[0]: "512Mi", keys[1]: mode, **devices})
                runtime.run_pod(asked)
                begun_s = time.perf_counter()
                given = dict(runtime.create_container(asked, container).env)
                create.append(time.perf_counter() - begun_s)
                env = tuple(f"{name}={value}" for name, value in given.items())
                made = Container(
                    id=container.id, pod_id=asked.id, name="main", env=env, cgroups_path=container.cgroups_path
                )
                driver.make_cgroup(
                    f"{KUBEPODS}/kubepods-{asked.uid.join(('pod', '.slice'))}/cri-containerd-{asked.uid}.scope"
                )
                start.append(timed(lambda: runtime.start_container(asked, made)))  # noqa: B023
            print(f"-- {containers} annotated containers, {mode}; the runtime waits 2000 ms for an answer")
            for part, label in ((0.5, "p50"), (0.99, "p99")):
                show(f"NRI create, not ours {label}", percentile(floor, part), percentile(floor, 0.5), "floor")
                show(f"NRI create {label}", percentile(create, part), percentile(floor, part), "p99 <= 500 ms")
                show(f"NRI start {label}", percentile(start, part), percentile(floor, part), "p99 <= 100 ms")
        print(f"{'plugin RSS with annotated pods':46} {rss_mib(node.processes['plugin'].pid):9.1f} MiB")
    finally:
        if runtime is not None:
            runtime.close()
        node.close()


def exit_wakeup_s() -> float:
    """How long a process that is killed takes to wake who waits for it."""
    child = subprocess.Popen(["sleep", "60"])
    descriptor = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    took_s = timed(lambda: (child.kill(), poll.poll()))
    os.close(descriptor)
    child.wait()
    return took_s


def _await(done: Callable[[], T], timeout_s: float = 30.0) -> T:
    """Looks without a pause, so that the look itself adds nothing to what is measured."""
    until_s = time.monotonic() + timeout_s
    while not (found := done()):
        if time.monotonic() > until_s:
            raise SystemExit("bench: what was waited for did not happen")
    return found


def bench_preferred(rounds: int) -> None:
    from deviceplugin.grants.broker import Broker
    from deviceplugin.grants.drains import Drains
    from deviceplugin.grants.ledger import Ledger
    from mpsd.config.model import GIB
    from mpsd.gpu.model import MIB, GpuHealth, GpuInfo
    from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuStatus, Snapshot

    with tempfile.TemporaryDirectory(prefix="gfb-", dir="/tmp") as root:
        text = CONFIG.format(resources=UNITS, root=root, gpus="{memory: 80Gi}", driver="580.95.05", more="")
        ledger = Ledger(f"{root}/ledger")
        broker = Broker(parse_config(text, "bench"), ledger, Drains(f"{root}/drains.json"))
        ready = DaemonStatus(state=DaemonState.READY, pipe_directory="/x", pinned_limit_bytes=80 * GIB)
        gpus = [
            GpuStatus(
                info=GpuInfo(
                    uuid=f"GPU-00000000-0000-4000-8000-{n:012d}",
                    index=n,
                    name="",
                    memory_total_bytes=GIB + 1000 * 64 * MIB,
                    compute_capability=(9, 0),
                ),
                health=GpuHealth.OK,
                daemon=ready,
            )
            for n in range(16)
        ]
        broker.observe_snapshot(Snapshot(instance="x", generation=1, gpus=tuple(gpus)))
        broker.publish()
        view = broker.inspect().view.resources["gpufrac.dev/units"]
        ids = [identifier for all_ids in view.device_ids.values() for identifier in all_ids]
        assert len(ids) == 16_000
        wish = pb.ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=8)
        wire = pb.PreferredAllocationRequest(container_requests=[wish]).SerializeToString()

        def floor() -> bytes:
            got = list(pb.PreferredAllocationRequest.FromString(wire).container_requests[0].available_deviceIDs)
            return _encode(got[:8])

        def ours() -> bytes:
            request = pb.PreferredAllocationRequest.FromString(wire).container_requests[0]
            return _encode(
                broker.preferred("gpufrac.dev/units", request.available_deviceIDs, [], request.allocation_size)
            )

        def _encode(chosen: list[str]) -> bytes:
            answer = pb.PreferredAllocationResponse()
            answer.container_responses.add(deviceIDs=chosen)
            return answer.SerializeToString()

        floors = [timed(floor) for _ in range(rounds * 5)]
        show(
            "GetPreferredAllocation, 16 x 1000 units, 8",
            statistics.median(timed(ours) for _ in range(rounds * 5)),
            statistics.median(floors),
            "<= 5 x",
        )
        ledger.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the Allocate benchmark, 48 shares each")
    parser.add_argument("--idle-s", type=float, default=60)
    options = parser.parse_args()
    bench_cli(options.rounds)
    bench_start(options.rounds)
    bench_preferred(options.rounds)
    bench_allocate(options.gpus)
    bench_crash(options.gpus)
    bench_nri(min(48, options.gpus * 6))
    bench_idle(options.idle_s)


if __name__ == "__main__":
    main()
