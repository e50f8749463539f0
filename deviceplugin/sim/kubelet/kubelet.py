"""A stub kubelet: admits pods through real device plugins over real gRPC, as kubelet 1.36.2 was seen to.

What it keeps across `restart()`: the pods (a real one gets them from the API server and the runtime) and the checkpoint
file. Everything else is new, and every plugin has to register again. What it does not have: a topology manager, images,
probes, restarts of containers that end by themselves.
"""

import os
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from deviceplugin.sim.kubelet.devicemanager import AllocationError, DeviceManager, Held, NodeResource, ShortError
from deviceplugin.sim.kubelet.pod import AdmittedPod, Phase, PodError
from deviceplugin.sim.kubelet.process import Process
from deviceplugin.sim.kubelet.starting import Starter, again
from deviceplugin.sim.objects.pods import PodSpec
from deviceplugin.sim.runtime.container import Container, State
from deviceplugin.sim.runtime.cri import CriServer
from deviceplugin.sim.runtime.runtime import Runtime
from deviceplugin.sim.runtime.sandboxes import Nri, NriFactory
from mpsd.common.errors import GpufracError

ADMISSION_ERROR = "UnexpectedAdmissionError"
READMIT_S = 0.95
"""How long after its registration server a restarted kubelet admits its first pods (verified)."""


class StubKubelet:
    """One node's kubelet and container runtime.

    Args:
        root: the kubelet's directory; `pod-resources/` and `pods/` are made below it.
        device_plugins: its directory for device plugins, a constant of a real one; None: below `root`, too.
        cdi_directories: of the container runtime, lowest priority first.
        gpus, nvidia_runtime, nvidia_hook, simulation_directory, nri, nri_cdi, cdi_wins: see Runtime.
        cri_socket: where the container runtime is asked what it is and to stop a container; empty: nowhere.
        runtime: its name and version.
        call_timeout_s: bounds a plugin's calls; None as in a real kubelet.
        rng: decides what a real kubelet leaves to chance.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        cdi_directories: Sequence[str],
        *,
        device_plugins: str | None = None,
        gpus: Sequence[str] = (),
        nvidia_runtime: bool = True,
        nvidia_hook: bool = False,
        simulation_directory: str = "",
        nri: NriFactory | None = None,
        nri_cdi: bool = True,
        cdi_wins: bool = True,
        cri_socket: str = "",
        runtime: tuple[str, str] = ("containerd", "2.1.9"),
        call_timeout_s: float | None = None,
        rng: random.Random | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = os.fspath(root)
        self.device_plugins = device_plugins or os.path.join(self.root, "device-plugins")
        self.socket = os.path.join(self.device_plugins, "kubelet.sock")
        self.pod_resources_socket = os.path.join(self.root, "pod-resources", "kubelet.sock")
        self._runtime = Runtime(
            cdi_directories,
            gpus,
            nvidia_runtime=nvidia_runtime,
            nvidia_hook=nvidia_hook,
            simulation_directory=simulation_directory,
            nri=nri,
            nri_cdi=nri_cdi,
            cdi_wins=cdi_wins,
        )
        self._cri = (
            CriServer(cri_socket, self._stop_container, runtime, self._runtime.sandboxes.inventory)
            if cri_socket
            else None
        )
        self._runtime_serves = False
        self._call_timeout_s = call_timeout_s
        self._rng = rng or random.Random()  # noqa: S311
        self._monotonic = monotonic
        self._starter = Starter(self._runtime, self._pods_directory, self._rng, monotonic)
        self._changed = threading.Condition()
        self._admission = threading.Lock()
        self._pods: dict[str, AdmittedPod] = {}
        self._leftover: dict[str, AdmittedPod] = {}
        self._process: Process | None = None

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Reads the checkpoint, removes every socket of the plugin directory, and serves.

        Raises GpufracError when a socket can't be had.
        """
        assert self._process is None
        for directory in (self.device_plugins, os.path.dirname(self.pod_resources_socket), self._pods_directory):
            os.makedirs(directory, mode=0o750, exist_ok=True)
        process = Process(
            device_plugins=self.device_plugins,
            socket=self.socket,
            pod_resources_socket=self.pod_resources_socket,
            active=self._active,
            advance=self._starter.advance,
            notify=self._notify,
            call_timeout_s=self._call_timeout_s,
            rng=self._rng,
            monotonic=self._monotonic,
        )
        try:
            self._serve_runtime()
            process.start()
        except (RuntimeError, OSError) as error:
            process.close()
            self._close_runtime()
            raise GpufracError(f"cannot start the stub kubelet in {self.root}: {error}") from error
        self._process = process

    def stop(self) -> None:
        """Ends the kubelet process. Containers go on running."""
        process, self._process = self._process, None
        if process is not None:
            process.close()
        self._notify()

    def restart(self, *, readmit_after_s: float = READMIT_S) -> list[AdmittedPod]:
        """Stops, starts anew from the checkpoint and re-admits all pods; gives those that failed for it.

        A container that runs is left alone; one that has ended or never started asks for its devices again.
        """
        with self._admission:
            self.stop()
            self.start()
            process = self._running
            process.stopping.wait(readmit_after_s)
            failed = [pod for pod in list(self._pods.values()) if not self._readmit(process.devices, pod)]
            process.kick()
        self._notify()
        return failed

    def close(self) -> None:
        """Stops, and ends every container."""
        self.stop()
        for pod in (*self._pods.values(), *self._leftover.values()):
            self._end_processes(pod)
        self._pods, self._leftover = {}, {}
        self._close_runtime()

    def _serve_runtime(self) -> None:
        """The container runtime's sockets. They outlive kubelet processes. Raises OSError, RuntimeError."""
        if self._runtime_serves:
            return
        self._runtime_serves = True
        if self.nri is not None:
            self.nri.start()
        if self._cri is not None:
            self._cri.start()

    def _close_runtime(self) -> None:
        if not self._runtime_serves:
            return
        self._runtime_serves = False
        if self._cri is not None:
            self._cri.close()
        if self.nri is not None:
            self.nri.close()

    def __enter__(self) -> "StubKubelet":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- pods ----------------------------------------------------------------------------------------------------

    def admit(self, spec: PodSpec, given: Mapping[str, Mapping[str, Held]] | None = None) -> AdmittedPod:
        """Admits a pod that is bound to this node: devices for each container in turn. Its containers start later.

        Args:
            given: what containers get of device plugins that are not here, by container and resource.

        Raises PodError when a pod of that name is there. A refusal is no error: the pod has phase Failed.
        """
        with self._admission:
            if any(pod.spec.full_name == spec.full_name for pod in self._pods.values()):
                raise PodError(f'cannot admit pod {spec.full_name}: pods "{spec.name}" already exists')
            process = self._running
            containers = tuple(Container(container) for container in spec.containers)
            pod = AdmittedPod(spec, str(uuid.uuid4()), containers, given or {})
            self._pods[pod.uid] = pod
            if self._allocate(process.devices, pod):
                os.makedirs(os.path.join(self._pods_directory, pod.uid), mode=0o750, exist_ok=True)
                process.enqueue(pod)
        self._notify()
        return pod

    def take_over(self, pods: Iterable[AdmittedPod]) -> None:
        """Pods that an earlier process admitted: what they hold is in the checkpoint. Their sandboxes run;
        `restart` or `restart_container` makes their containers."""
        with self._admission:
            for pod in pods:
                self._pods[pod.uid] = pod
                os.makedirs(os.path.join(self._pods_directory, pod.uid), mode=0o750, exist_ok=True)
                for container in pod.containers:
                    held = self._running.devices.held(pod.uid, container.spec.name)
                    container.devices = {resource: tuple(sorted(slot.ids)) for resource, slot in held.items()}
                self._runtime.run_sandbox(pod.spec, pod.uid)

    def delete(self, pod: AdmittedPod, *, force: bool = False) -> None:
        """Ends a pod's containers and forgets it. Its devices come back when somebody asks for devices next.

        Args:
            force: forget it at once and leave its processes running, until `end_leftovers`.
        """
        with pod.lock:
            pod.phase = Phase.DELETED
        if force:
            self._leftover[pod.uid] = pod
        else:
            self._end_processes(pod)
        self._pods.pop(pod.uid, None)
        self._notify()

    def end_leftovers(self) -> None:
        """Ends the processes of pods that were deleted by force."""
        while self._leftover:
            self._end_processes(self._leftover.popitem()[1])

    def restart_container(self, pod: AdmittedPod, name: str = "") -> None:
        """Ends a container's process and creates it again from the cached answer. Raises PodError."""
        container = pod.container(name)
        with pod.lock:
            if container.process is not None:
                self._runtime.end([container.process], pod.uid, container.spec.name)
            again(container)
        self._running.enqueue(pod)

    def exec_environment(self, pod: AdmittedPod, container: Container, pid: int | None = None) -> dict[str, str]:
        """The environment of a process started in a container that runs; `pid` becomes one of the container's.

        Raises PodError where it does not run.
        """
        reason = f"{container.reason}: {container.message}" if container.message else container.reason
        with pod.lock:
            try:
                if container.state is not State.RUNNING:
                    raise FileNotFoundError(f"it is {container.state} ({reason})")
                if pid is not None:
                    self._runtime.enter(pod.uid, container.spec.name, pid)
            except FileNotFoundError as error:
                name = f"{pod.spec.name}/{container.spec.name}"
                raise PodError(f"cannot start a client in {name}: {error}") from error
            return dict(container.process_env)

    def pods(self) -> list[AdmittedPod]:
        """All pods, refused ones included, in the order they came."""
        return list(self._pods.values())

    def pod(self, name: str, namespace: str = "default") -> AdmittedPod:
        """A pod by name. Raises PodError."""
        for pod in self.pods():
            if (pod.spec.namespace, pod.spec.name) == (namespace, name):
                return pod
        raise PodError(f"cannot find pod {namespace}/{name}: it is not on this node")

    def wait_settled(self, pods: Iterable[AdmittedPod], timeout_s: float, refused_s: float | None = None) -> bool:
        """Waits until no container of these pods waits. False after the time.

        Args:
            refused_s: give up on a pod when an NRI plugin has refused it for so long, always in the same words.
        """
        waiting = list(pods)

        def given_up(pod: AdmittedPod) -> bool:
            since_s = pod.refused_since_s
            return refused_s is not None and since_s is not None and self._monotonic() - since_s >= refused_s

        with self._changed:  # each try to create a container wakes it
            self._changed.wait_for(lambda: all(pod.settled or given_up(pod) for pod in waiting), timeout_s)
            return all(pod.settled for pod in waiting)

    @property
    def nri(self) -> Nri | None:
        """The container runtime's side of NRI."""
        return self._runtime.sandboxes.nri

    # --- node status ---------------------------------------------------------------------------------------------

    @property
    def resources(self) -> dict[str, NodeResource]:
        """Capacity and allocatable by resource, as node status shows them."""
        return self._running.devices.resources()

    @property
    def registrations(self) -> int:
        """Successful registrations since the start."""
        return self._running.registry.registrations

    def serves(self, resource: str) -> bool:
        """Whether a device plugin serves the name, or did."""
        return self._running.devices.serves(resource)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until a condition on pods or lists holds; it is asked after each change. False after the time."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def wait_for(self, resource: str, allocatable: int = 1, timeout_s: float = 10.0) -> bool:
        """Waits until at least that many devices of a resource are allocatable. False after the time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.resources.get(resource, NodeResource()).allocatable >= allocatable, timeout_s
            )

    # --- inside --------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> Process:
        if self._process is None:
            raise GpufracError("cannot ask the stub kubelet: it is stopped; start it first")
        return self._process

    @property
    def _pods_directory(self) -> str:
        return os.path.join(self.root, "pods")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _active(self) -> list[AdmittedPod]:
        return [pod for pod in list(self._pods.values()) if pod.phase is Phase.ADMITTED]

    def _allocate(self, devices: DeviceManager, pod: AdmittedPod, *, restarting: bool = False) -> bool:
        devices.begin_admission(pod.uid)
        try:
            for container in pod.containers:
                given, running = pod.given.get(container.spec.name), container.pid is not None
                devices.allocate(pod.uid, container.spec, given, restarting=restarting, running=running)
                held = devices.held(pod.uid, container.spec.name)
                container.devices = {resource: tuple(sorted(slot.ids)) for resource, slot in held.items()}
        except AllocationError as error:
            pod.phase, pod.reason = Phase.FAILED, ADMISSION_ERROR
            pod.short, pod.code = isinstance(error, ShortError), error.code
            pod.message = f"Allocate failed due to {error}, which is unexpected"
            return False
        finally:
            devices.end_admission()
        return True

    def _readmit(self, devices: DeviceManager, pod: AdmittedPod) -> bool:
        with pod.lock:
            if pod.phase is not Phase.ADMITTED or self._allocate(devices, pod, restarting=True):
                return True
        self._end_processes(pod)
        return False

    def _end_processes(self, pod: AdmittedPod) -> None:
        with pod.lock:
            self._runtime.end([c.process for c in pod.containers if c.process is not None], pod.uid)
            for container in pod.containers:
                container.state = State.TERMINATED
            self._runtime.remove(pod.uid)
        shutil.rmtree(os.path.join(self._pods_directory, pod.uid), ignore_errors=True)

    def _stop_container(self, identifier: str) -> None:
        """What CRI's StopContainer does, whoever asks. What comes then is a matter of restartPolicy."""
        for pod in self._active():
            if all(container.id != identifier for container in pod.containers):
                continue  # not to wait for other pods
            with pod.lock:
                for container in pod.containers:
                    if container.id == identifier and container.state is State.RUNNING:
                        assert container.process is not None
                        self._runtime.end([container.process], pod.uid, container.spec.name)
                        if pod.spec.restart_policy == "Never":
                            container.state, container.reason = State.TERMINATED, "Error"
                        else:
                            again(container)
            process = self._process
            if process is not None:
                process.enqueue(pod)
        self._notify()
