"""The calls of the container runtime's CRI socket that the plugin makes: Version, lists, and StopContainer.

As containerd: the last returns once the container has stopped, and also for one that is not there (CRI: it is
idempotent).
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from deviceplugin.api import cri_v1_pb2 as pb
from deviceplugin.kubelet.cri import SERVICE
from deviceplugin.nri.model import ContainerState, Inventory

_STATES = {ContainerState.CREATED: pb.CONTAINER_CREATED, ContainerState.RUNNING: pb.CONTAINER_RUNNING}


class CriServer:
    """Serves on a socket.

    Args:
        stop: ends a container by its ID.
        runtime: name and version that it tells.
        inventory: all pods and containers there are.
    """

    def __init__(
        self,
        socket_path: str,
        stop: Callable[[str], None],
        runtime: tuple[str, str],
        inventory: Callable[[], Inventory] = lambda: ((), ()),
    ) -> None:
        self._path, self._stop, self._runtime, self._inventory = socket_path, stop, runtime, inventory
        self._pool: ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Raises RuntimeError."""
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="cri")
        server = grpc.server(self._pool, options=(("grpc.so_reuseport", 0),))
        calls: dict[str, tuple[Callable[[Any], Any], Any]] = {
            "Version": (self._version, pb.VersionRequest),
            "StopContainer": (self._stop_container, pb.StopContainerRequest),
            "ListPodSandbox": (self._list_pods, pb.ListPodSandboxRequest),
            "ListContainers": (self._list_containers, pb.ListContainersRequest),
        }
        handlers = {name: _handler(call, request) for name, (call, request) in calls.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_insecure_port(f"unix:{self._path}")
        server.start()
        os.chmod(self._path, 0o600)
        self._server = server

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop(0.2).wait()
        if self._pool is not None:
            self._pool.shutdown()

    def _version(self, request: pb.VersionRequest) -> pb.VersionResponse:
        name, version = self._runtime
        return pb.VersionResponse(version="0.1.0", runtime_name=name, runtime_version=version, runtime_api_version="v1")

    def _stop_container(self, request: pb.StopContainerRequest) -> pb.StopContainerResponse:
        self._stop(request.container_id)
        return pb.StopContainerResponse()

    def _list_pods(self, request: pb.ListPodSandboxRequest) -> pb.ListPodSandboxResponse:
        return pb.ListPodSandboxResponse(
            items=[
                pb.PodSandbox(
                    id=pod.id,
                    metadata=pb.PodSandboxMetadata(name=pod.name, uid=pod.uid, namespace=pod.namespace),
                    annotations=pod.annotations,
                    runtime_handler=pod.runtime_handler,
                )
                for pod in self._inventory()[0]
            ]
        )

    def _list_containers(self, request: pb.ListContainersRequest) -> pb.ListContainersResponse:
        return pb.ListContainersResponse(
            containers=[
                pb.Container(
                    id=container.id,
                    pod_sandbox_id=container.pod_id,
                    metadata=pb.ContainerMetadata(name=container.name),
                    state=_STATES.get(container.state, pb.CONTAINER_UNKNOWN),
                    annotations=container.annotations,
                )
                for container in self._inventory()[1]
            ]
        )


def _handler(call: Callable[[Any], Any], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        lambda asked, _: call(asked),
        request_deserializer=request.FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )
