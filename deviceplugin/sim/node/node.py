"""A whole simulated node in one directory: stub kubelet in this process, mpsd and the device plugin as children.

Below the directory: `config.yaml` (the effective config), `run/` (with `nri.sock` and `cri.sock` of the stub kubelet's
container runtime), `log/`, `state/`, `kubelet/`, `cdi/`, and `sim.lock`, which marks it as ours and keeps a
second node out.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from deviceplugin.kubelet.cri import SIMULATED_SOCKET
from deviceplugin.nri import runtimes
from deviceplugin.nri.model import Runtime
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from deviceplugin.sim.kubelet.pod import AdmittedPod, PodError
from deviceplugin.sim.node import report, scheduler
from deviceplugin.sim.node.children import Children, NodeError
from deviceplugin.sim.node.cluster import ClusterScheduler, waiting
from deviceplugin.sim.node.config import FILE_NAME, RUNTIME, config_text, default_config, node_config, takes_cdi
from deviceplugin.sim.node.directory import NodeDirectory
from deviceplugin.sim.node.readiness import pending, plugin_status
from deviceplugin.sim.node.scheduler import Scheduler
from deviceplugin.sim.objects import annotations
from deviceplugin.sim.objects.manifests import LoadedPod
from deviceplugin.sim.objects.pods import NODE_NAME, PodSpec
from deviceplugin.sim.runtime.nri import NriRuntime
from deviceplugin.sim.runtime.nvidia import DEVICE_PLUGIN_KIND, NVIDIA_KIND, write_nvidia_spec
from deviceplugin.sim.runtime.sandboxes import Inventory, Nri
from deviceplugin.sim.scheduling import placement
from deviceplugin.sim.scheduling.placement import WHOLE_GPU
from mpsd.common.errors import GpufracError
from mpsd.config.model import GpuDevices, NodeConfig
from mpsd.gpu.model import MIB, GpuInfo
from mpsd.localapi.client import MpsdClient
from mpsd.localapi.snapshot import DaemonState
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.memorylimits import FIRST_DRIVER
from mpsd.sim.switches import major

START_TIMEOUT_S = 80.0
"""As the other timeouts here: for what never comes, and too long for a busy machine to reach."""
POLL_S = 0.05
SETTLE_TIMEOUT_S = 60.0
"""How long to wait for the containers of pods that were just admitted."""
REFUSED_S = 4.0
"""How long for one that the plugin refuses again and again, in the same words: longer than it waits for anything."""
UNDER_WAY = (DaemonState.STARTING, DaemonState.CONFIGURING, DaemonState.STOPPING, DaemonState.KILLING)
NO_REASON = {"reason": "", "reasonCode": ""}
CALL_TIMEOUT_S = 60.0
"""Bounds a plugin's Allocate. A real kubelet would wait for ever."""


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
        self._config_text = config_text(self.config, directory)
        self.config_path = os.path.join(directory, FILE_NAME)
        self.simulation_directory = self.config.simulation_directory
        self._directory = NodeDirectory(directory, self.simulation_directory)
        self.processes = Children(directory)
        """`mpsd` and `plugin`."""
        self.plugin_log, self.mpsd_log = self.processes.log_path("plugin"), self.processes.log_path("mpsd")
        self._kubelet: StubKubelet | None = None
        self._scheduler: Scheduler | None = None
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
        self._directory.take(self._config_text)
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
        self.processes.start("mpsd")
        self.processes.start("plugin")
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
        while waits_for := pending(self.config, self.kubelet):
            self.processes.check()
            if time.monotonic() >= deadline_s:
                name, reason = waits_for
                raise NodeError(
                    f"cannot bring up the simulated node in {timeout_s:g} s: {reason}{self.processes.log_tail(name)}"
                )
            self._pause.wait(POLL_S)

    def close(self) -> None:
        """Ends every process of the node: containers, plugin, mpsd, MPS daemons. At any time, and again."""
        kubelet, self._kubelet = self._kubelet, None
        if kubelet is not None:
            kubelet.close()
        for name in ("plugin", "mpsd"):
            self.processes.stop(name)
        self._directory.release()

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
        self._wait_settled(admitted, time.monotonic() + settle_timeout_s)
        return self.report(admitted, before)

    def _wait_settled(self, pods: Sequence[AdmittedPod], until_s: float) -> None:
        """As the kubelet's, but that nobody is given up while a daemon is under way, which a busy machine delays."""
        while not self.kubelet.wait_settled(pods, max(0.0, until_s - time.monotonic()), REFUSED_S):
            if time.monotonic() >= until_s or not self._daemons_move():
                return
            time.sleep(POLL_S)

    def _daemons_move(self) -> bool:
        try:
            gpus = MpsdClient(self.config.mpsd_socket).snapshot().gpus
        except GpufracError:
            return False  # who asked for it may wait for mpsd in vain
        return any(gpu.daemon is not None and gpu.daemon.state in UNDER_WAY for gpu in gpus)

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

        def reasons() -> dict[str, str]:
            return {name: why["reason"] for name, why in self._reasons().items()}

        return ClusterScheduler(self.kubelet, self.config.resources, reasons).admit(pod, bind, others)

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
        status = plugin_status(self.config)
        return report.document(
            node={**(before or self._facts()), "fractions": self._fractions()},
            pods=list(pods),
            allocations=status["allocations"],
            refusing=(status["annotated"] or {}).get("refusing", ()),
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
                    **(reasons.get(name, NO_REASON) if not shown.allocatable else NO_REASON),
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

    def _reasons(self) -> dict[str, dict[str, str]]:
        """By resource: why it has no more to give."""
        resources = plugin_status(self.config)["resources"]
        return {entry["name"]: {key: entry[key] for key in NO_REASON} for entry in resources}

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
