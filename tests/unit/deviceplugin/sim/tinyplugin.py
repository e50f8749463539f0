"""A small device plugin on a real gRPC server, for tests of the stub kubelet."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.api import deviceplugin_v1beta1_pb2_grpc as rpc

RESOURCE = "example.com/share"


class TinyPlugin(rpc.DevicePluginServicer):
    """Serves one resource. Everything it is asked is recorded."""

    def __init__(
        self,
        directory: str | Path,
        devices: Sequence[str | tuple[str, str]] = (),
        *,
        resource: str = RESOURCE,
        socket: str = "tiny.sock",
        answer: Callable[[list[str]], pb.ContainerAllocateResponse] | None = None,
        options: pb.DevicePluginOptions | None = None,
    ) -> None:
        self.directory, self.resource, self.socket = Path(directory), resource, socket
        self.answer = answer or (lambda ids: pb.ContainerAllocateResponse(envs={"IDS": ",".join(sorted(ids))}))
        self.options = options or pb.DevicePluginOptions()
        self.refusal = ""
        self.preference: list[str] = []
        self.allocated: list[list[str]] = []
        self.preferred: list[tuple[list[str], list[str], int]] = []
        self.started: list[list[str]] = []
        self._changed = threading.Condition()
        self._devices = list(devices)
        self._generation = 0
        self._stopping = False
        self.streams = 0
        self._server: grpc.Server | None = None

    def serve(self) -> "TinyPlugin":
        path = self.directory / self.socket
        path.unlink(missing_ok=True)
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        rpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()
        return self

    def register(
        self, *, version: str = "v1beta1", endpoint: str = "", resource_name: str = "", timeout_s: float = 5.0
    ) -> None:
        request = pb.RegisterRequest(
            version=version, endpoint=endpoint or self.socket, resource_name=resource_name or self.resource
        )
        with grpc.insecure_channel(
            f"unix:{self.directory}/kubelet.sock", options=(("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            rpc.RegistrationStub(channel).Register(request, timeout=timeout_s)

    def update(self, *devices: str | tuple[str, str]) -> None:
        """Sends a new list."""
        with self._changed:
            self._devices = list(devices)
            self._generation += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._server is not None:
            self._server.stop(0.2).wait()
            self._pool.shutdown()
            self._server = None

    def __enter__(self) -> "TinyPlugin":
        self.serve()
        self.register()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the service

    def GetDevicePluginOptions(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.DevicePluginOptions:  # noqa: N802
        return self.options

    def ListAndWatch(self, request: pb.Empty, context: grpc.ServicerContext) -> Iterator[pb.ListAndWatchResponse]:  # noqa: N802
        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        context.add_callback(wake)
        self.streams += 1
        sent = -1
        while context.is_active():
            with self._changed:
                self._changed.wait_for(
                    lambda sent=sent: self._stopping or self._generation != sent or not context.is_active()  # type: ignore[misc]
                )
                if self._stopping or not context.is_active():
                    break
                sent = self._generation
                pairs = [d if isinstance(d, tuple) else (d, "Healthy") for d in self._devices]
            yield pb.ListAndWatchResponse(devices=[pb.Device(ID=i, health=h) for i, h in pairs])
        self.streams -= 1

    def GetPreferredAllocation(  # noqa: N802
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        wish = request.container_requests[0]
        asked = (list(wish.available_deviceIDs), list(wish.must_include_deviceIDs), wish.allocation_size)
        self.preferred.append(asked)
        if self.refusal == "preferred":
            context.abort(grpc.StatusCode.UNKNOWN, "no idea")
        chosen = pb.ContainerPreferredAllocationResponse(deviceIDs=self.preference)
        return pb.PreferredAllocationResponse(container_responses=[chosen])

    def Allocate(self, request: pb.AllocateRequest, context: grpc.ServicerContext) -> pb.AllocateResponse:  # noqa: N802
        ids = list(request.container_requests[0].devices_ids)
        self.allocated.append(ids)
        if self.refusal == "empty":
            return pb.AllocateResponse()
        if self.refusal:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.refusal)
        return pb.AllocateResponse(container_responses=[self.answer(ids)])

    def PreStartContainer(  # noqa: N802
        self, request: pb.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> pb.PreStartContainerResponse:
        self.started.append(list(request.devices_ids))
        if self.refusal == "pre-start":
            context.abort(grpc.StatusCode.INTERNAL, "not today")
        return pb.PreStartContainerResponse()


def socket_inode(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_ctime_ns
