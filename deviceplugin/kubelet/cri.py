"""The calls made to the container runtime's CRI socket: what it is, what runs there, and to stop a container."""

import os
from collections.abc import Sequence
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from deviceplugin.api import cri_v1_pb2 as pb
from deviceplugin.kubelet.rpcerror import describe
from deviceplugin.nri.model import Container, ContainerState, Inventory, Pod, Runtime
from mpsd.common.errors import TransientError

SERVICE: Final = "runtime.v1.RuntimeService"
ASK_S: Final = 2.0
GRACE_S: Final = 30
"""Between SIGTERM and SIGKILL."""
CONNECT_S: Final = 5.0
MAX_ID_BYTES: Final = 127
MAX_LIST_BYTES: Final = 64 << 20
SOCKETS: Final = ("/run/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock", "/run/crio/crio.sock")
"""Where runtimes serve CRI by default. With more than one there, which one the kubelet uses is not known."""
SIMULATED_SOCKET: Final = "cri.sock"
"""Of a simulated node, below its run directory."""
_STATES: Final = {
    pb.CONTAINER_CREATED: ContainerState.CREATED,
    pb.CONTAINER_RUNNING: ContainerState.RUNNING,
    pb.CONTAINER_EXITED: ContainerState.STOPPED,
}
M = TypeVar("M", bound=Message)


class CriError(TransientError):
    """The runtime did not answer."""


def stop_container(socket_path: str, container_id: str) -> str:
    """Has the runtime stop a container; the kubelet then does as its pod's restart policy says. Empty, or why it could
    not be stopped. May take GRACE_S."""
    if len(container_id.encode()) > MAX_ID_BYTES:
        return f"its ID is longer than {MAX_ID_BYTES} bytes"
    request = pb.StopContainerRequest(container_id=container_id, timeout=GRACE_S)
    try:
        _ask(socket_path, "StopContainer", request, pb.StopContainerResponse, GRACE_S + CONNECT_S)
    except CriError as error:
        return f"the container runtime does not stop it: {error}"
    return ""


def runtime_of(sockets: Sequence[str] = SOCKETS) -> Runtime | None:
    """The container runtime behind the one of these sockets that is there; None where that is not one, or it does not
    answer within ASK_S."""
    there = [path for path in sockets if os.path.exists(path)]
    if len(there) != 1:
        return None
    try:
        told = _ask(there[0], "Version", pb.VersionRequest(), pb.VersionResponse)
    except CriError:
        return None
    return Runtime(name=told.runtime_name, version=told.runtime_version) if told.runtime_name else None


def inventory(socket_path: str) -> Inventory:
    """All pods and containers that are there, as far as CRI tells: a container's environment it does not.

    Raises CriError.
    """
    # Containers first: the pod of each was there before it.
    containers = _ask(socket_path, "ListContainers", pb.ListContainersRequest(), pb.ListContainersResponse).containers
    pods = _ask(socket_path, "ListPodSandbox", pb.ListPodSandboxRequest(), pb.ListPodSandboxResponse).items
    return (
        [
            Pod(
                id=pod.id,
                name=pod.metadata.name,
                uid=pod.metadata.uid,
                namespace=pod.metadata.namespace,
                annotations=dict(pod.annotations),
                runtime_handler=pod.runtime_handler,
            )
            for pod in pods
            if pod.state == pb.SANDBOX_READY
        ],
        [
            Container(
                id=container.id,
                pod_id=container.pod_sandbox_id,
                name=container.metadata.name,
                state=_STATES.get(container.state, ContainerState.UNKNOWN),
                annotations=dict(container.annotations),
            )
            for container in containers
        ],
    )


def _ask(socket_path: str, method: str, request: Message, kind: type[M], timeout_s: float = ASK_S) -> M:
    """Raises CriError."""
    options = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", MAX_LIST_BYTES))
    with grpc.insecure_channel(f"unix:{socket_path}", options=options) as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        try:
            answer: M = call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise CriError(describe(error, socket_path)) from error
    return answer
