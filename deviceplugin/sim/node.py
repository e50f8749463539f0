"""A whole simulated node in one directory: stub kubelet in this process, mpsd and the device plugin as children.

Below the directory: `config.yaml` (the effective config), `run/` (with `nri.sock` and `cri.sock` of the stub kubelet's
container runtime), `log/`, `state/`, `kubelet/`, `cdi/`, and `sim.lock`, which marks it as ours and keeps a
second node out.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

import deviceplugin
from cdi.atomic import read_regular
from deviceplugin.kubelet.cri import SIMULATED_SOCKET
from deviceplugin.nri import runtimes
from deviceplugin.nri.model import Runtime
from deviceplugin.sim import report, scheduler
from deviceplugin.sim.cluster import ClusterScheduler, waiting
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from deviceplugin.sim.kubelet.pod import AdmittedPod, PodError
from deviceplugin.sim.objects import annotations
from deviceplugin.sim.objects.manifests import LoadedPod
from deviceplugin.sim.objects.pods import NODE_NAME, PodSpec
from deviceplugin.sim.runtime.nri import NriRuntime
from deviceplugin.sim.runtime.nvidia import DEVICE_PLUGIN_KIND, NVIDIA_KIND, write_nvidia_spec
from deviceplugin.sim.runtime.processes import processes_where
from deviceplugin.sim.runtime.sandboxes import Inventory, Nri
from deviceplugin.sim.scheduler import Scheduler
from deviceplugin.sim.scheduling import placement
from deviceplugin.sim.scheduling.placement import WHOLE_GPU
from mpsd.common.errors import ConfigError, GpufracError
from mpsd.common.lockfile import LockFileError, open_lock, try_lock
from mpsd.config.load import ConfigErrors, parse_config
from mpsd.config.model import (
    GIB,
    AnnotationsConfig,
    CdiConfig,
    Enforcement,
    FixedMemory,
    GpuDevices,
    GpuSelection,
    KubernetesConfig,
    MpsConfig,
    NodeConfig,
    Resource,
    SimulatedConfig,
    SimulatedGpu,
    TrustPolicy,
    UnitMemory,
)
from mpsd.config.show import effective
from mpsd.gpu.model import MIB, GpuInfo, Mode
from mpsd.localapi.client import MpsdClient, call
from mpsd.localapi.snapshot import DaemonState, Snapshot
from mpsd.sim.driver import KUBEPODS, SimulatedDriver
from mpsd.sim.memorylimits import FIRST_DRIVER
from mpsd.sim.switches import major

START_TIMEOUT_S = 40.0
SETTLE_TIMEOUT_S = 15.0
"""How long to wait for the containers of pods that were just admitted."""
REFUSED_S = 4.0
"""How long for one that the plugin refuses again and again, in the same words: longer than it waits for anything."""
CALL_TIMEOUT_S = 20.0
"""Bounds a plugin's Allocate. A real kubelet would wait for ever."""
STOP_TIMEOUT_S = 20.0
POLL_S = 0.05
LOG_TAIL_LINES = 20
DEFAULT_DRIVER = "580.95.05"
DEFAULT_GPU_MEMORY_BYTES = 80 * GIB

_OURS = ("run", "log", "state", "kubelet", "cdi")
_LOCK, _CONFIG = "sim.lock", "config.yaml"
_MARK = b"gpufrac simulated node\n"
_PATHS = (
    "mps.runRoot",
    "mps.logRoot",
    "cdi.directory",
    "kubelet.root",
    "kubelet.devicePlugins",
    "stateRoot",
    "nri.socket",
    "annotations.criSocket",
)
RUNTIME = ("containerd", "2.1.9")
"""Name and version of the container runtime, as NRI plugins are told."""
_ON_THE_WAY = (DaemonState.ABSENT, DaemonState.STARTING, DaemonState.CONFIGURING)


class NodeError(GpufracError):
    """The simulated node can't be brought up, or one of its processes died."""


def default_config() -> NodeConfig:
    """What a simulated node offers when no config is given."""

    def offer(name: str, memory: FixedMemory | UnitMemory) -> Resource:
        return Resource(
            name=f"gpufrac.dev/{name}", memory=memory, mode=Mode.SM_SHARING, enforcement=Enforcement.COOPERATIVE
        )

    return NodeConfig(
        resources=(
            offer("gpu-8gi", FixedMemory(request_bytes=8 * GIB, limit_bytes=8 * GIB)),
            offer("gpu-16gi", FixedMemory(request_bytes=16 * GIB, limit_bytes=16 * GIB)),
            offer("memory-gib", UnitMemory(unit_bytes=GIB)),
        ),
        annotations=AnnotationsConfig(
            gpus=GpuSelection(), share=True, trust=TrustPolicy.ANY, enforcement=Enforcement.COOPERATIVE
        ),
    )


def node_config(
    config: NodeConfig,
    directory: str,
    *,
    gpus: int | None = None,
    gpu_memory_bytes: int | None = None,
    driver: str | None = None,
) -> NodeConfig:
    """`config` moved onto a simulated node in `directory` (pure): what it offers stays, where it lives does not.

    Args:
        gpus, gpu_memory_bytes, driver: override the config's own simulation. None: as there, otherwise 1 GPU (or as
            many as the config names by index), 80Gi, DEFAULT_DRIVER.
    """
    before = config.simulated if config.backend == "simulated" else None
    count = gpus or (len(before.gpus) if before else max(1, _highest_index(config) + 1))
    sizes = [gpu.memory_bytes for gpu in before.gpus] if before else []
    memory = [
        gpu_memory_bytes or (sizes[min(index, len(sizes) - 1)] if sizes else DEFAULT_GPU_MEMORY_BYTES)
        for index in range(count)
    ]
    simulated = SimulatedConfig(
        gpus=tuple(SimulatedGpu(memory_bytes=size_bytes // MIB * MIB) for size_bytes in memory),
        driver=driver or (before.driver if before else DEFAULT_DRIVER),
    )
    standard = MpsConfig()
    mps = msgspec.structs.replace(
        config.mps,
        run_root=f"{directory}/run",
        log_root=f"{directory}/log",
        binary=standard.binary,
        driver_root=standard.driver_root,
    )
    cdi: CdiConfig = msgspec.structs.replace(config.cdi, directory=f"{directory}/cdi")
    annotated = config.annotations
    if annotated is not None:
        annotated = msgspec.structs.replace(annotated, cri_socket=f"{directory}/run/cri.sock")
    return msgspec.structs.replace(
        config,
        mps=mps,
        cdi=cdi,
        kubelet_root=f"{directory}/kubelet",
        kubelet_device_plugins=f"{directory}/kubelet/device-plugins",
        annotations=annotated,
        nri=msgspec.structs.replace(config.nri, socket=f"{directory}/run/nri.sock"),
        kubernetes=KubernetesConfig(),
        state_root=f"{directory}/state",
        backend="simulated",
        simulated=simulated,
        metrics_address="",
    )


def takes_cdi(runtime: tuple[str, str]) -> bool:
    """Whether a container runtime takes CDI devices from NRI plugins; one we don't know does."""
    name, version = runtime
    return runtimes.takes_cdi(Runtime(name=name, version=version), unknown=True)


def _highest_index(config: NodeConfig) -> int:
    selections = [config.gpus, *(resource.gpus for resource in config.resources)]
    if config.annotations is not None:
        selections.append(config.annotations.gpus)
    named = [ref for selection in selections for ref in (*(selection.include or ()), *selection.exclude)]
    for _, members in config.groups:
        named += members
    return max((ref for ref in named if isinstance(ref, int)), default=-1)


@dataclass(slots=True, eq=False)
class _Child:
    """One of the node's long-lived processes."""

    name: str
    process: "subprocess.Popen[bytes]"
    log_path: str


class SimulatedNode:
    """Brings a simulated node up and takes it down. A context manager; not thread-safe, `admit` and `delete` aside.

    Args:
        directory: absolute; made if missing. It must be empty, or have been a simulated node's before.
        config: of the node; None for default_config().
        gpus, gpu_memory_bytes, driver: see node_config.
        memory_hook: NVIDIA's CDI specs carry the hook that sets memory limits, given a driver that has them.
        dmem: the kernel has the dmem controller.
        nri: the container runtime takes NRI plugins.
        runtime: its name and version, as it tells them. With one that takes no CDI devices from NRI plugins there is
            the nvidia runtime, which makes devices from NVIDIA_VISIBLE_DEVICES.

    Raises:
        ConfigError: the directory can't be used.
    """

    def __init__(
        self,
        directory: str,
        config: NodeConfig | None = None,
        *,
        gpus: int | None = None,
        gpu_memory_bytes: int | None = None,
        driver: str | None = None,
        memory_hook: bool = True,
        dmem: bool = True,
        nri: bool = True,
        runtime: tuple[str, str] = RUNTIME,
    ) -> None:
        self.directory = directory
        self._memory_hook, self._dmem, self._nri, self._runtime = memory_hook, dmem, nri, runtime
        self.config = node_config(
            config or default_config(), directory, gpus=gpus, gpu_memory_bytes=gpu_memory_bytes, driver=driver
        )
        self._config_text = json.dumps(effective(self.config), indent=2) + "\n"
        try:
            parse_config(self._config_text, _CONFIG)
        except ConfigErrors as error:
            others = [problem for problem in error.problems if problem.path not in _PATHS]
            if others:
                text = "; ".join(f"{problem.path}: {problem.value or ''} {problem.rule}" for problem in others)
                raise ConfigError(f"cannot simulate this node: {text}") from error
            raise ConfigError(
                f"cannot use directory {directory}: its path is too long for the sockets below it, or has characters "
                "that a path in a config may not have; name another"
            ) from error
        self.config_path = os.path.join(directory, _CONFIG)
        self.simulation_directory = self.config.simulation_directory
        self.plugin_log = os.path.join(directory, "log", "plugin.log")
        self.mpsd_log = os.path.join(directory, "log", "mpsd.log")
        self._lock_fd = -1
        self._kubelet: StubKubelet | None = None
        self._scheduler: Scheduler | None = None
        self._children: dict[str, _Child] = {}
        self._uuids: tuple[str, ...] = ()
        self._pause = threading.Event()

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def kubelet(self) -> StubKubelet:
        """The stub kubelet of a node that is up."""
        if self._kubelet is None:
            raise NodeError(f"cannot use the simulated node in {self.directory}: it is not up")
        return self._kubelet

    @property
    def scheduler(self) -> Scheduler:
        """The stand-in for KAI of a node that is up."""
        if self._scheduler is None:
            raise NodeError(f"cannot use the simulated node in {self.directory}: it is not up")
        return self._scheduler

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Brings the node up: all resources registered, all daemons ready.

        Raises:
            ConfigError: the directory can't be used.
            NodeError: it didn't come up; the text ends with the log of the process to blame.
        """
        self._prepare()
        if not self._dmem:
            SimulatedDriver(self.simulation_directory).set_fault("no-dmem")
        driver = SimulatedDriver.create(self.simulation_directory, self.config.simulated)
        self._uuids = tuple(gpu.uuid for gpu in driver.gpus())
        write_nvidia_spec(self.config.cdi.directory, self._uuids)
        hooked = self._memory_hook and major(driver.version()) >= FIRST_DRIVER
        if hooked:
            write_nvidia_spec(self.config.cdi.directory, self._uuids, memory_hook=True)
        kubelet = StubKubelet(
            self.config.kubelet_root,
            (self.config.cdi.directory,),
            gpus=self._uuids,
            nvidia_runtime=self.config.cdi.gpu_devices is GpuDevices.ENVVAR or not takes_cdi(self._runtime),
            nvidia_hook=hooked,
            simulation_directory=self.simulation_directory,
            nri=self._serve_nri if self._nri else None,
            nri_cdi=takes_cdi(self._runtime),
            cdi_wins=not runtimes.cdi_loses(Runtime(name=self._runtime[0], version=self._runtime[1])),
            cri_socket=os.path.join(self.config.mps.run_root, SIMULATED_SOCKET),
            runtime=self._runtime,
            call_timeout_s=CALL_TIMEOUT_S,
        )
        kubelet.start()
        self._kubelet = kubelet
        kind = DEVICE_PLUGIN_KIND if hooked else NVIDIA_KIND
        self._scheduler = Scheduler(
            kubelet,
            gpus=[g.uuid for g in driver.gpus() if self._for_annotated(g.uuid, g.index)],
            gpu_mib=driver.gpus()[0].memory_bytes // MIB,
            prefix=self.prefix,
            gpu_kind="" if self.config.cdi.gpu_devices is GpuDevices.ENVVAR else kind,
        )
        self.start_process("mpsd")
        self.start_process("plugin")
        self.wait_ready(timeout_s)

    def _serve_nri(self, inventory: Callable[[], Inventory]) -> Nri:
        name, version = self._runtime
        return NriRuntime(self.config.nri.socket, name=name, version=version, inventory=inventory)

    def _for_annotated(self, uuid: str, index: int) -> bool:
        config = self.config.annotations
        info = GpuInfo(uuid=uuid, index=index, name="", memory_total_bytes=0)
        return self.config.gpus.admits(info) and (config is None or config.gpus.admits(info))

    @property
    def prefix(self) -> str:
        """What the keys of annotated containers begin with."""
        return self.config.annotations.prefix if self.config.annotations is not None else annotations.PREFIX

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until everything that the config offers can be had. Raises NodeError."""
        deadline_s = time.monotonic() + timeout_s
        while pending := self._pending():
            self.check()
            if time.monotonic() >= deadline_s:
                name, reason = pending
                raise NodeError(
                    f"cannot bring up the simulated node in {timeout_s:g} s: {reason}{self._log_tail(name)}"
                )
            self._pause.wait(POLL_S)

    def check(self) -> None:
        """Raises NodeError when a process of the node has died."""
        for child in self._children.values():
            code = child.process.poll()
            if code is not None:
                how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                raise NodeError(f"cannot go on: gpufrac {child.name} died ({how}){self._log_tail(child.name)}")

    def start_process(self, name: str) -> int:
        """Starts `mpsd` or `plugin`; its PID."""
        path = self.mpsd_log if name == "mpsd" else self.plugin_log
        with open(path, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "deviceplugin.cli.main", name, "--config", self.config_path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_child_environment(self.directory),
                start_new_session=True,  # Ctrl-C is for us: we stop them in order
            )
        self._children[name] = _Child(name, process, path)
        return process.pid

    def stop_process(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends `mpsd` or `plugin` and waits for it; SIGKILL after STOP_TIMEOUT_S."""
        child = self._children.pop(name, None)
        if child is None:
            return
        if child.process.poll() is None:
            child.process.send_signal(number)
            try:
                child.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
        child.process.wait()

    def restart_process(self, name: str) -> int:
        """Ends and starts `mpsd` or `plugin`; the new PID."""
        self.stop_process(name)
        return self.start_process(name)

    def close(self) -> None:
        """Ends every process of the node: containers, plugin, mpsd, MPS daemons. At any time, and again."""
        kubelet, self._kubelet = self._kubelet, None
        if kubelet is not None:
            kubelet.close()
        for name in ("plugin", "mpsd"):
            self.stop_process(name)
        if self._lock_fd >= 0:
            _end_all(self._processes)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- pods ----------------------------------------------------------------------------------------------------

    def admit(
        self, pods: Sequence[LoadedPod], settle_timeout_s: float = SETTLE_TIMEOUT_S, *, schedule: bool = False
    ) -> dict[str, Any]:
        """Admits pods one after the other and waits for their containers; the report (see report.document).

        Args:
            schedule: the stand-in for KAI places its pods that ask for fractions of GPUs.

        Raises:
            PodError: a pod of that name is there already; none is admitted then.
            ConfigError: KAI's admission denies some of them; none is admitted then.
        """
        present = {pod.spec.full_name for pod in self.kubelet.pods()}
        if taken := [loaded.pod.full_name for loaded in pods if loaded.pod.full_name in present]:
            raise PodError(f"cannot admit pods that exist already: {', '.join(taken)}; delete them first")
        if schedule:
            scheduler.check(pods, self.prefix)
        before = self._facts()
        admitted: list[AdmittedPod] = []
        for loaded in pods:
            scheduled = schedule and self.scheduler.takes(loaded.pod)
            pod = self._admit(loaded.pod, schedule=schedule, fractional=scheduled)
            pod.notes += [*loaded.notes, *self._resource_notes(pod), *self._annotation_notes(pod, scheduled)]
            admitted.append(pod)
            if annotations.is_placed(pod.spec, self.prefix):
                # It gets its GPU when its container is created, and is to have it before the pods after it.
                self.kubelet.wait_settled([pod], settle_timeout_s, 0.0)
        self.kubelet.wait_settled(admitted, settle_timeout_s, REFUSED_S)
        return self.report(admitted, before)

    def _admit(self, pod: PodSpec, *, schedule: bool, fractional: bool) -> AdmittedPod:
        """Has the cluster's scheduler, and the stand-in for KAI where it takes part, give a pod to the kubelet."""
        bind: Callable[[PodSpec], AdmittedPod] = self.kubelet.admit
        if not schedule and annotations.awaits_scheduler(pod, self.prefix):
            return waiting(
                pod, f"No scheduler named {annotations.SCHEDULER} is here; --schedule brings a stand-in for it."
            )
        if fractional:
            bind = self.scheduler.admit
        elif schedule and not pod.node and WHOLE_GPU in placement.requests(pod):
            bind = self.scheduler.admit_whole
        others = {WHOLE_GPU: self.scheduler.whole_offer()} if schedule else {}
        return ClusterScheduler(self.kubelet, self.config.resources, self._reasons).admit(pod, bind, others)

    def delete(self, namespace: str, name: str, *, force: bool = False) -> None:
        """Deletes a pod, and reservation pods that are left without use. Raises PodError."""
        pod = self.kubelet.pod(name, namespace)
        self.kubelet.delete(pod, force=force)
        self.scheduler.sync()

    def restart_kubelet(self) -> list[AdmittedPod]:
        """Restarts the kubelet; the pods that failed for it."""
        return self.kubelet.restart()

    def client_environment(
        self, namespace: str, pod: str, container: str = "", pid: int | None = None
    ) -> dict[str, str]:
        """The environment of a process started in a container; `pid` is moved there. Raises PodError when it does not
        run."""
        found = self.kubelet.pod(pod, namespace)
        return self.kubelet.exec_environment(found, found.container(container), pid)

    def report(self, pods: Iterable[AdmittedPod], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What these pods got. `before`: the facts of the node before they came; None for those of now."""
        allocations = call(self.config.plugin_socket, "allocations", {}, list[dict[str, Any]])
        return report.document(
            node={**(before or self._facts()), "fractions": self._fractions()},
            pods=list(pods),
            allocations=allocations,
            ours=[r.name for r in self.config.resources],
            prefix=self.prefix,
        )

    def _facts(self) -> dict[str, Any]:
        reasons = self._reasons()
        gpus = SimulatedDriver(self.simulation_directory).gpus()
        at_kubelet = self.kubelet.resources
        return {
            "name": NODE_NAME,
            "directory": self.directory,
            "driver": self.config.simulated.driver,
            "gpus": [
                {"uuid": gpu.uuid, "index": gpu.index, "name": gpu.name, "memoryBytes": gpu.memory_bytes}
                for gpu in gpus
            ],
            "resources": {
                name: {
                    "capacity": shown.capacity,
                    "allocatable": shown.allocatable,
                    "reason": reasons.get(name, "") if not shown.allocatable else "",
                }
                for name in dict.fromkeys((*reasons, *at_kubelet))  # in the config's order
                if (shown := at_kubelet.get(name)) is not None
            },
        }

    def _fractions(self) -> list[dict[str, Any]]:
        """The GPUs that the stand-in for KAI has shared out."""
        size_mib = self.scheduler.size_mib
        return [
            {"gpu": group.gpu, "mode": group.mode, "bookedMiB": group.booked_mib, "sizeMiB": size_mib}
            for group in self.scheduler.groups
        ]

    def _reasons(self) -> dict[str, str]:
        """By resource: why it has no more to give."""
        return {entry["name"]: entry["reason"] for entry in self._plugin_status()["resources"]}

    def _resource_notes(self, pod: AdmittedPod) -> list[str]:
        notes = []
        ours = {resource.name for resource in self.config.resources}
        for container in pod.spec.containers:
            if unserved := pod.unserved.get(container.name):
                without = "" if len(unserved) < len(container.resources) else ", WITHOUT devices"
                notes.append(
                    f"container {container.name}: no device plugin of this node serves {', '.join(unserved)}: a "
                    "scheduler would leave the pod Pending, but its nodeName passes schedulers by, and a kubelet takes "
                    f"no notice of what nobody serves: the container runs without it{without}"
                )
            if len(both := sorted(ours & container.resources.keys())) > 1:
                notes.append(
                    f"container {container.name} asks for {' and '.join(both)}: only one of them takes effect in a "
                    "container; ask for one"
                )
        return notes

    def _annotation_notes(self, pod: AdmittedPod, scheduled: bool) -> list[str]:
        served = self.config.annotations is not None
        return annotations.notes(pod.spec, self.prefix, served=served, reached=self._nri, scheduled=scheduled)

    # --- inside --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Takes the directory, empties it of an earlier node, and writes the effective config."""
        try:
            os.makedirs(self.directory, mode=0o755, exist_ok=True)
            entries = os.listdir(self.directory)
            if set(entries) - {_LOCK} and not self._is_ours():
                raise ConfigError(
                    f"cannot use directory {self.directory}: it is not empty and was never a simulated node's; "
                    "name an empty or a new one"
                )
            fd = open_lock(os.path.join(self.directory, _LOCK))
        except OSError as error:
            raise ConfigError(f"cannot use directory {self.directory}: {error.strerror}") from error
        except LockFileError as error:
            raise ConfigError(f"cannot use directory {self.directory}: {error}") from error
        if not try_lock(fd):
            os.close(fd)
            raise ConfigError(f"cannot use directory {self.directory}: a simulated node runs there")
        self._lock_fd = fd
        os.pwrite(fd, _MARK, 0)
        _end_all(self._processes)  # of a node that was killed
        for name in _OURS:
            shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)
            os.makedirs(os.path.join(self.directory, name), mode=0o755, exist_ok=True)
        with open(self.config_path, "w", encoding="utf-8") as file:
            file.write(self._config_text)

    def _is_ours(self) -> bool:
        """Whether the directory bears a simulated node's mark: only then may it be emptied."""
        try:
            return read_regular(os.path.join(self.directory, _LOCK))[0].startswith(_MARK)
        except OSError:
            return False

    def _processes(self) -> list[int]:
        """The node's processes, known by their environment (its own two, containers, MPS daemons, servers and clients)
        or by their cgroup."""
        node = f"GPUFRAC_SIM_NODE={self.directory}".encode()
        simulation = f"GPUFRAC_SIM_DIRECTORY={self.directory}/".encode()
        pipe = f"CUDA_MPS_PIPE_DIRECTORY={self.directory}/run/".encode()
        found = processes_where(lambda env: any(entry == node or entry.startswith((simulation, pipe)) for entry in env))
        cgroups = SimulatedDriver(self.simulation_directory).cgroups
        return [*found, *(pid for pid in cgroups.members(f"{cgroups.root}/{KUBEPODS}") if pid != os.getpid())]

    def _pending(self) -> tuple[str, str] | None:
        """Which process the node waits for and why, None when it is up."""
        try:
            snapshot = MpsdClient(self.config.mpsd_socket).snapshot()
        except GpufracError as error:
            return "mpsd", str(error)
        if reason := _daemons_pending(snapshot):
            return "mpsd", reason
        try:
            status = self._plugin_status()
        except GpufracError as error:
            return "plugin", str(error)
        if status["mpsdError"]:
            return "plugin", str(status["mpsdError"])
        shown = self.kubelet.resources
        for resource in status["resources"]:
            name = resource["name"]
            if resource["registration"] != "registered" or name not in shown:
                return "plugin", f"{name} is not registered: {resource['registrationError'] or 'no reason given'}"
            if (shown[name].allocatable, shown[name].capacity) != (resource["healthy"], resource["listed"]):
                return "plugin", f"the kubelet has not got the list of {name} yet"
        if not status["runtime"]:
            return "plugin", "it does not know the container runtime yet"
        runtime = self.kubelet.nri
        if self.config.annotations is not None and runtime is not None and not runtime.plugins:
            return "plugin", "it has not registered at the container runtime (NRI)"
        return None

    def _plugin_status(self) -> dict[str, Any]:
        return call(self.config.plugin_socket, "status", {}, dict[str, Any])

    def _log_tail(self, name: str) -> str:
        path = self.mpsd_log if name == "mpsd" else self.plugin_log
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            lines = []
        return "\n".join([f"\nlast lines of the log of {name}:", *(f"  {line}" for line in lines or ["(none)"])])


def _daemons_pending(snapshot: Snapshot) -> str:
    if not snapshot.gpus:
        return f"mpsd sees no GPU: {snapshot.reason or 'not looked yet'}"
    for gpu in snapshot.gpus:
        if gpu.daemon is not None and gpu.daemon.state in _ON_THE_WAY and not gpu.not_shared:
            return f"the MPS daemon of GPU {gpu.info.index} is {gpu.daemon.state}: {gpu.daemon.reason}"
    return ""


def _child_environment(directory: str) -> dict[str, str]:
    environment = {**os.environ, "GPUFRAC_SIM_NODE": directory}
    root = os.path.dirname(os.path.dirname(os.path.abspath(deviceplugin.__file__)))
    if "site-packages" not in root:  # run from a checkout: the children need it on their path, too
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return environment


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
        pause.wait(POLL_S)
