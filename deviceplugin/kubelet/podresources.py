"""What the kubelet says it has allocated: PodResources v1 List over its local socket."""

import threading
from collections.abc import Callable

import grpc

from deviceplugin.api import podresources_v1_pb2 as pb
from deviceplugin.api import podresources_v1_pb2_grpc as rpc
from deviceplugin.kubelet.rpcerror import describe
from mpsd.common.errors import TransientError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
LIST_TIMEOUT_S = 2.0

Containers = dict[tuple[str, str, str], dict[str, tuple[str, ...]]]
"""(namespace, pod, container) -> resource -> sorted device IDs. Containers without devices are there, too."""


class PodResourcesError(TransientError):
    """The kubelet does not answer, or answers with an error."""


class PodResourcesClient:
    """One channel, reopened after an error (a restarted kubelet has a new socket). Safe from several threads.

    Args:
        missing: says what is not there of the kubelet, empty when all is.
    """

    def __init__(self, socket_path: str, missing: Callable[[], str] = lambda: "") -> None:
        self._path, self._missing = socket_path, missing
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stub: rpc.PodResourcesListerStub | None = None

    def list(self, timeout_s: float = LIST_TIMEOUT_S) -> Containers:
        """All app and sidecar containers. Entries of one container and resource are united.

        Raises:
            PodResourcesError: with the kubelet's reason.
        """
        stub = self._open()
        try:
            answer = stub.List(pb.ListPodResourcesRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            self.close()
            reason = self._missing() or describe(error, self._path)
            raise PodResourcesError(f"cannot list pod resources: {reason}") from error
        return parse(answer)

    def close(self) -> None:
        """Closes the channel; the next call opens a new one."""
        with self._lock:
            channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()

    def _open(self) -> "rpc.PodResourcesListerStub":
        with self._lock:
            if self._stub is None:
                self._channel = grpc.insecure_channel(
                    f"unix:{self._path}",
                    options=(
                        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                        ("grpc.enable_http_proxy", 0),
                        ("grpc.use_local_subchannel_pool", 1),
                    ),
                )
                self._stub = rpc.PodResourcesListerStub(self._channel)
            return self._stub


def parse(answer: pb.ListPodResourcesResponse) -> Containers:
    """Unites the entries of each container and resource (pure)."""
    containers: Containers = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            united: dict[str, set[str]] = {}
            for entry in container.devices:
                united.setdefault(entry.resource_name, set()).update(entry.device_ids)
            key = (pod.namespace, pod.name, container.name)
            containers[key] = {name: tuple(sorted(all_ids)) for name, all_ids in united.items()}
    return containers
