"""What one process of the stub kubelet has: servers, plugins, devices, and the thread that starts containers."""

import contextlib
import heapq
import os
import random
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import grpc

from deviceplugin.api import deviceplugin_v1beta1_pb2_grpc as rpc
from deviceplugin.api import podresources_v1_pb2 as podresources_pb
from deviceplugin.api import podresources_v1_pb2_grpc as podresources_rpc
from deviceplugin.sim.kubelet import checkpoint
from deviceplugin.sim.kubelet.devicemanager import DeviceManager
from deviceplugin.sim.kubelet.plugins import PodResources, Registry
from deviceplugin.sim.kubelet.pod import AdmittedPod
from deviceplugin.sim.objects.pods import Role

WORKERS = 16


class Process:
    """Reads the checkpoint at once; everything else is new.

    Args:
        active: the pods of this node that are neither refused nor gone.
        advance: starts what may start of a pod; seconds until it is worth trying again, None when all run.
        notify: told of every change.
    """

    def __init__(
        self,
        *,
        device_plugins: str,
        socket: str,
        pod_resources_socket: str,
        active: Callable[[], list[AdmittedPod]],
        advance: Callable[[DeviceManager, AdmittedPod], float | None],
        notify: Callable[[], None],
        call_timeout_s: float | None,
        rng: random.Random,
        monotonic: Callable[[], float],
    ) -> None:
        self._device_plugins, self._socket, self._pod_resources_socket = device_plugins, socket, pod_resources_socket
        self._active, self._advance, self._notify, self._monotonic = active, advance, notify, monotonic
        self.stopping = threading.Event()
        held, registered = checkpoint.read(device_plugins)
        self.devices = DeviceManager(
            held,
            registered,
            active_pods=lambda: {pod.uid for pod in active()},
            save=lambda held, registered: checkpoint.write(device_plugins, held, registered),
            on_change=notify,
            rng=rng,
            monotonic=monotonic,
        )
        self.registry = Registry(device_plugins, self.devices, call_timeout_s=call_timeout_s)
        self._servers: list[grpc.Server] = []
        self._pools: list[ThreadPoolExecutor] = []
        self._queue: list[tuple[float, int, AdmittedPod]] = []
        self._queued = threading.Condition()
        self._count = 0
        self._worker = threading.Thread(target=self._work, name="pod-worker", daemon=True)

    def start(self) -> None:
        """Removes every socket of the plugin directory, and serves. Raises RuntimeError, OSError."""
        _remove_sockets(self._device_plugins)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._pod_resources_socket)
        lister = PodResources(lambda: listed(self._active(), self.devices))
        pods = self._server("pod-resources")
        podresources_rpc.add_PodResourcesListerServicer_to_server(lister, pods)
        registration = self._server("registration")
        rpc.add_RegistrationServicer_to_server(self.registry, registration)
        for server, path in ((pods, self._pod_resources_socket), (registration, self._socket)):
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
            heapq.heappush(self._queue, (self._monotonic() + after_s, self._count, pod))
            self._queued.notify_all()

    def kick(self) -> None:
        """Has the worker look at every pod."""
        for pod in self._active():
            self.enqueue(pod)

    def _work(self) -> None:
        while not self.stopping.is_set():
            with self._queued:
                wait_s = self._queue[0][0] - self._monotonic() if self._queue else None
                if wait_s is None or wait_s > 0:
                    self._queued.wait(wait_s)
                    continue
                pod = heapq.heappop(self._queue)[2]
            after_s = self._advance(self.devices, pod)
            if after_s is not None:
                self.enqueue(pod, after_s)
            self._notify()


def listed(pods: Iterable[AdmittedPod], devices: DeviceManager) -> podresources_pb.ListPodResourcesResponse:
    """PodResources: active pods, app containers and sidecars; one entry per device."""
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


def _remove_sockets(directory: str) -> None:
    """Removes sockets; files and directories stay, as with kubelets since 1.12."""
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # its plugin may be removing it just now
                if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    os.unlink(entry.path)
