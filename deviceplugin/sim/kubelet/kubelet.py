"""A stub kubelet: admits pods through real device plugins over real gRPC, as kubelet 1.36.2 was seen to.

What it keeps across `restart()`: the pods (a real one gets them from the API server and the runtime) and the checkpoint
file. Everything else is new, and every plugin has to register again. What it does not have: a topology manager, images,
probes, restarts of containers that end by themselves.
"""

import contextlib
import heapq
import os
import random
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

import grpc

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.api import deviceplugin_v1beta1_pb2_grpc as rpc
from deviceplugin.api import podresources_v1_pb2 as podresources_pb
from deviceplugin.api import podresources_v1_pb2_grpc as podresources_rpc
from deviceplugin.sim.kubelet import checkpoint
from deviceplugin.sim.kubelet.devicemanager import (
    AllocationError,
    DeviceManager,
    Held,
    NodeResource,
    PluginError,
    ShortError,
    Slot,
)
from deviceplugin.sim.kubelet.plugins import PodResources, Registry
from deviceplugin.sim.objects.pods import PodSpec, Role
from deviceplugin.sim.runtime.container import Container, CreateContainerError, StartContainerError, State
from deviceplugin.sim.runtime.cri import CriServer
from deviceplugin.sim.runtime.runtime import Runtime
from deviceplugin.sim.runtime.sandboxes import Nri, NriFactory
from deviceplugin.sim.scheduling.placement import Lack
from mpsd.common.errors import GpufracError

ADMISSION_ERROR = "UnexpectedAdmissionError"
READMIT_S = 0.95
"""How long after its registration server a restarted kubelet admits its first pods (verified)."""
BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.05, 1.0
"""Pauses between tries to create a container. A real kubelet's last one is longer (6 s were seen)."""
WORKERS = 16
START_ERROR = "StartError"


class PodError(GpufracError):
    """No such pod or container, or one of that name is there already."""


class Phase(StrEnum):
    """Of a pod on this node; PENDING: no scheduler gave it to the node."""

    PENDING = "Pending"
    ADMITTED = "Admitted"
    FAILED = "Failed"
    DELETED = "Deleted"


@dataclass(slots=True, eq=False)
class AdmittedPod:
    """A pod of this node. `notes`: what a user would be misled about otherwise; `given`: devices of other plugins than
    those that are here, by container and resource; `short`: refused for too few devices now; `lacks`: why it is
    PENDING; `unserved`: resources by container that no plugin serves: a kubelet takes no notice of them."""

    spec: PodSpec
    uid: str
    containers: tuple[Container, ...]
    given: Mapping[str, Mapping[str, Held]] = field(default_factory=dict)
    phase: Phase = Phase.ADMITTED
    reason: str = ""
    message: str = ""
    notes: list[str] = field(default_factory=list)
    short: bool = False
    lacks: tuple[Lack, ...] = ()
    unserved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def container(self, name: str = "") -> Container:
        """A container by name; without one, the only app container. Raises PodError."""
        apps = [c for c in self.containers if c.spec.role is Role.APP]
        if not name and len(apps) == 1:
            return apps[0]
        for container in self.containers:
            if container.spec.name == name:
                return container
        known = ", ".join(c.spec.name for c in self.containers)
        wanted = f"container {name!r} of pod" if name else "one container of pod"
        raise PodError(f"cannot find {wanted} {self.spec.full_name}: it has {known}; name one of them")

    @property
    def settled(self) -> bool:
        """Whether nothing of it waits any more, but for what never comes."""
        return (
            self.phase is not Phase.ADMITTED or self.stuck or all(c.state is not State.WAITING for c in self.containers)
        )

    @property
    def refused_since_s(self) -> float | None:
        """Since when nothing happens to it but the same refusals of an NRI plugin, None where something else may."""
        since_s: float | None = None
        for container in self.containers:
            if container.state is State.WAITING:
                if container.refused_since_s is None:
                    return None
                since_s = max(since_s or 0.0, container.refused_since_s)
                if container.spec.role is not Role.APP:
                    break  # what comes after has to wait for it
        return since_s

    @property
    def stuck(self) -> bool:
        """Whether an init container failed for good: what comes after it is never made."""
        return any(c.spec.role is not Role.APP and c.reason == START_ERROR for c in self.containers)


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
        self._changed = threading.Condition()
        self._admission = threading.Lock()
        self._pods: dict[str, AdmittedPod] = {}
        self._leftover: dict[str, AdmittedPod] = {}
        self._process: _Process | None = None

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Reads the checkpoint, removes every socket of the plugin directory, and serves.

        Raises GpufracError when a socket can't be had.
        """
        assert self._process is None
        for directory in (self.device_plugins, os.path.dirname(self.pod_resources_socket), self._pods_directory):
            os.makedirs(directory, mode=0o750, exist_ok=True)
        held, registered = checkpoint.read(self.device_plugins)
        _remove_sockets(self.device_plugins)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.pod_resources_socket)
        process = _Process(self, held, registered)
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
            self._again(container)
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
    def _running(self) -> "_Process":
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
            pod.short = isinstance(error, ShortError)
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

    def _list(self, devices: DeviceManager) -> podresources_pb.ListPodResourcesResponse:
        """PodResources: active pods, app containers and sidecars; one entry per device."""
        pods = self._active()
        devices.reclaim()
        answer = podresources_pb.ListPodResourcesResponse()
        for pod in pods:
            shown = answer.pod_resources.add(name=pod.spec.name, namespace=pod.spec.namespace)
            for container in pod.containers:
                if container.spec.role is Role.INIT:
                    continue
                entry = shown.containers.add(name=container.spec.name)
                for resource, held in devices.held(pod.uid, container.spec.name).items():
                    for ids in held.by_numa.values():
                        for identifier in ids:
                            entry.devices.add(resource_name=resource, device_ids=[identifier])
        return answer

    def _advance(self, devices: DeviceManager, pod: AdmittedPod) -> float | None:
        """Starts what may start. Seconds until it is worth trying again, None when all run."""
        with pod.lock:
            if pod.phase is not Phase.ADMITTED:
                return None
            waits: list[float] = []
            for container in pod.containers:
                if container.state is State.WAITING:
                    wait_s = self._try_create(devices, pod, container)
                    if wait_s is not None:
                        waits.append(wait_s)
                        if container.spec.role is not Role.APP:
                            break  # what comes after has to wait for it
                if pod.stuck:
                    break
            return min(waits, default=None)

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
                            self._again(container)
            process = self._process
            if process is not None:
                process.enqueue(pod)
        self._notify()

    def _again(self, container: Container) -> None:
        """A container whose process has ended is to be made anew."""
        container.state, container.reason, container.message = State.WAITING, "ContainerCreating", ""
        container.restarts += 1
        container.retry_at_s = container.backoff_s = 0.0
        container.refused_since_s = None

    def _try_create(self, devices: DeviceManager, pod: AdmittedPod, container: Container) -> float | None:
        now_s = self._monotonic()
        if now_s < container.retry_at_s:
            return container.retry_at_s - now_s
        held = devices.held(pod.uid, container.spec.name)
        # Made before each creation, for the termination message.
        os.makedirs(os.path.join(self._pods_directory, pod.uid, "containers", container.spec.name), exist_ok=True)
        try:
            self._runtime.run_sandbox(pod.spec, pod.uid)
            self._pre_start(devices, held)
            answers = [pb.ContainerAllocateResponse.FromString(slot.answer) for slot in held.values()]
            self._rng.shuffle(answers)
            created = self._runtime.create(pod.spec, pod.uid, container.spec, answers)
            container.id = created.id
            to_completion = container.spec.role is Role.INIT
            process, env = self._runtime.start(created, to_completion=to_completion)
        except CreateContainerError as error:
            return self._failed(pod, container, error, now_s)
        container.process, container.process_env, container.edits = process, env, created.edits
        container.reason = container.message = ""
        container.refused_since_s = None
        container.state = State.RUNNING
        if to_completion:
            process.wait()
            self._runtime.end((), pod.uid, container.spec.name)
            container.state, container.reason = State.TERMINATED, "Completed"
        return None

    def _failed(
        self, pod: AdmittedPod, container: Container, error: CreateContainerError, now_s: float
    ) -> float | None:
        """A container could not be created or started. Seconds until it is tried again, None for never."""
        same = (container.reason, container.message)
        container.message = str(error)
        if isinstance(error, StartContainerError):
            container.reason = "RunContainerError"
            if pod.spec.restart_policy == "Never":
                container.state, container.reason = State.TERMINATED, START_ERROR
                return None
        else:
            container.reason = "CreateContainerError"
        if not error.refused:
            container.refused_since_s = None
        elif container.refused_since_s is None or same != (container.reason, container.message):
            container.refused_since_s = now_s
        container.backoff_s = min(BACKOFF_LAST_S, container.backoff_s * 1.5 or BACKOFF_FIRST_S)
        container.retry_at_s = now_s + container.backoff_s
        return container.backoff_s

    def _pre_start(self, devices: DeviceManager, held: Mapping[str, Held]) -> None:
        for resource, slot in held.items():
            endpoint = devices.endpoint(resource)
            if endpoint is None or not endpoint.options.pre_start_required:
                continue
            try:
                endpoint.pre_start(sorted(slot.ids))
            except PluginError as error:
                raise CreateContainerError(f"device plugin PreStartContainer rpc failed with err: {error}") from error


class _Process:
    """What one kubelet process has in memory: servers, plugins, devices, and the thread that starts containers."""

    def __init__(self, kubelet: StubKubelet, held: Mapping[Slot, Held], registered: Sequence[str]) -> None:
        self._kubelet = kubelet
        self.stopping = threading.Event()
        self.devices = DeviceManager(
            held,
            registered,
            active_pods=lambda: {pod.uid for pod in kubelet._active()},
            save=lambda held, registered: checkpoint.write(kubelet.device_plugins, held, registered),
            on_change=kubelet._notify,
            rng=kubelet._rng,
            monotonic=kubelet._monotonic,
        )
        self.registry = Registry(kubelet.device_plugins, self.devices, call_timeout_s=kubelet._call_timeout_s)
        self._servers: list[grpc.Server] = []
        self._pools: list[ThreadPoolExecutor] = []
        self._queue: list[tuple[float, int, AdmittedPod]] = []
        self._queued = threading.Condition()
        self._count = 0
        self._worker = threading.Thread(target=self._work, name="pod-worker", daemon=True)

    def start(self) -> None:
        """Serves. Raises RuntimeError."""
        lister = PodResources(lambda: self._kubelet._list(self.devices))
        pods = self._server("pod-resources")
        podresources_rpc.add_PodResourcesListerServicer_to_server(lister, pods)
        registration = self._server("registration")
        rpc.add_RegistrationServicer_to_server(self.registry, registration)
        for server, path in ((pods, self._kubelet.pod_resources_socket), (registration, self._kubelet.socket)):
            server.add_insecure_port(f"unix:{path}")
            server.start()
            self._servers.append(server)
            os.chmod(path, 0o600)
        self._worker.start()

    def close(self) -> None:
        self.stopping.set()
        with self._queued:
            self._queued.notify_all()
        stopped = [server.stop(0.2) for server in self._servers]
        self.registry.close()
        for event in stopped:
            event.wait()
        for pool in self._pools:
            pool.shutdown()  # gRPC leaves its threads to the garbage collector
        if self._worker.ident is not None:
            self._worker.join()

    def _server(self, name: str) -> grpc.Server:
        pool = ThreadPoolExecutor(WORKERS, thread_name_prefix=name)
        self._pools.append(pool)
        return grpc.server(
            pool, options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 * 1024 * 1024))
        )

    def enqueue(self, pod: AdmittedPod, after_s: float = 0.0) -> None:
        """Has the worker look at a pod."""
        with self._queued:
            self._count += 1
            heapq.heappush(self._queue, (self._kubelet._monotonic() + after_s, self._count, pod))
            self._queued.notify_all()

    def kick(self) -> None:
        """Has the worker look at every pod."""
        for pod in self._kubelet._active():
            self.enqueue(pod)

    def _work(self) -> None:
        while not self.stopping.is_set():
            with self._queued:
                wait_s = self._queue[0][0] - self._kubelet._monotonic() if self._queue else None
                if wait_s is None or wait_s > 0:
                    self._queued.wait(wait_s)
                    continue
                pod = heapq.heappop(self._queue)[2]
            after_s = self._kubelet._advance(self.devices, pod)
            if after_s is not None:
                self.enqueue(pod, after_s)
            self._kubelet._notify()


def _remove_sockets(directory: str) -> None:
    """Removes sockets; files and directories stay, as with kubelets since 1.12."""
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # its plugin may be removing it just now
                if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    os.unlink(entry.path)
