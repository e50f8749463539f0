"""The device plugin service of one resource: translate, call the broker, map errors. No decisions."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.grants.broker import Broker, Recheck
from deviceplugin.grants.ledger import LedgerError
from deviceplugin.kubelet.listbytes import ListBytes
from deviceplugin.kubelet.refusals import CODE_METADATA, Refusals
from deviceplugin.plan import render
from deviceplugin.plan.allocation import Allocation, Refusal
from deviceplugin.plan.reasons import FINAL, OfferCode
from deviceplugin.plan.start import configured_shared_memory
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.plan import mount_of

SERVICE = "v1beta1.DevicePlugin"
OPTIONS = pb.DevicePluginOptions(get_preferred_allocation_available=True)
STREAM_WAIT_S = 60.0
LIST_PAUSE_S = 0.1
"""Between two lists of a stream, however many grants come: a kubelet takes in each whole, and writes its checkpoint."""
NO_ROOM = grpc.StatusCode.RESOURCE_EXHAUSTED
STATUS: dict[str, grpc.StatusCode] = {
    **dict.fromkeys(FINAL, grpc.StatusCode.INVALID_ARGUMENT),
    OfferCode.MODE_BOUND: grpc.StatusCode.FAILED_PRECONDITION,
}
"""Of refusals by their code; NO_ROOM of all others."""


class DevicePlugin:
    """Serves one resource.

    Args:
        recheck: looks at the kubelet once more before a refusal.
        refusals: hears of each.
        on_stream_end: called when a kubelet's list stream ends while we are not stopping.
    """

    def __init__(
        self,
        resource: str,
        broker: Broker,
        recheck: Recheck,
        refusals: Refusals,
        on_stream_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._resource = resource
        self._broker = broker
        self._recheck = recheck
        self._refusals = refusals
        self._on_stream_end = on_stream_end
        self._stopping = threading.Event()
        self._streams_lock = threading.Lock()
        self.streams = 0

    def stop(self) -> None:
        """Ends all streams soon; call before the server is stopped, which otherwise waits for them."""
        self._stopping.set()
        self._broker.wake_streams()

    def GetDevicePluginOptions(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.DevicePluginOptions:  # noqa: N802
        return OPTIONS

    def ListAndWatch(self, request: pb.Empty, context: grpc.ServicerContext) -> Iterator[bytes]:  # noqa: N802
        ended = threading.Event()

        def on_end() -> None:
            ended.set()
            self._broker.wake_streams()

        def over() -> bool:
            return ended.is_set() or self._stopping.is_set()

        if not context.add_callback(on_end):
            return  # the kubelet has gone already
        with self._streams_lock:
            self.streams += 1
        seen, lists = -1, ListBytes()
        try:
            while not over():
                published = self._broker.wait_list(self._resource, seen, STREAM_WAIT_S, over)
                if published is not None:
                    seen = published.generation
                    yield lists.of(published.advertisement)
                    self._broker.pause_list(LIST_PAUSE_S, over)
        finally:
            with self._streams_lock:
                self.streams -= 1
            if not self._stopping.is_set():
                self._on_stream_end()

    def GetPreferredAllocation(  # noqa: N802
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        response = pb.PreferredAllocationResponse()
        for wish in request.container_requests:
            chosen = self._broker.preferred(
                self._resource, wish.available_deviceIDs, wish.must_include_deviceIDs, wish.allocation_size
            )
            response.container_responses.add(deviceIDs=chosen)
        return response

    def Allocate(self, request: pb.AllocateRequest, context: grpc.ServicerContext) -> pb.AllocateResponse:  # noqa: N802
        response = pb.AllocateResponse()
        for container in request.container_requests:
            try:
                outcome = self._broker.allocate(self._resource, container.devices_ids, self._recheck)
            except LedgerError as error:
                self._refusals.note(self._resource, Refusal(OfferCode.NO_RECORDS, str(error)))
                context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            if isinstance(outcome, Refusal):
                self._refusals.note(self._resource, outcome)
                context.set_trailing_metadata(((CODE_METADATA, str(outcome.code)),))
                context.abort(STATUS.get(outcome.code, NO_ROOM), outcome.message)
            response.container_responses.append(self._answer(outcome))
        return response

    def PreStartContainer(  # noqa: N802
        self, request: pb.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()

    def _answer(self, allocation: Allocation) -> pb.ContainerAllocateResponse:
        mps = self._broker.node.config.mps
        shared_memory = self._broker.node.shared_memory(allocation.gpus[0])
        if shared_memory is None:
            shared_memory = configured_shared_memory(allocation, mps)
        answer = render.answer(
            allocation, self._pipe_directory(allocation), shared_memory, settable=self._broker.node.hard.settable
        )
        return pb.ContainerAllocateResponse(
            envs=dict(answer.envs),
            mounts=[
                pb.Mount(
                    container_path=inside,
                    host_path=host,
                    read_only=render.is_read_only(inside, writable=mps.writable_mount),
                )
                for inside, host in answer.mounts
            ],
            annotations=dict(answer.annotations),
            cdi_devices=[pb.CDIDevice(name=name) for name in answer.cdi_devices],
        )

    def _pipe_directory(self, allocation: Allocation) -> str:
        """What the container will mount, told before it is there: it is fixed by names alone."""
        dirs = daemon_dirs(self._broker.node.config.mps, allocation.group)
        if self._broker.node.protocol(allocation.gpus[0]) == 2:
            return dirs.pipe
        return mount_of(render.desired_allocation(allocation), dirs, allocation.group)


def add_to_server(servicer: DevicePlugin, server: grpc.Server) -> None:
    """As the generated function of that kind, but that lists are serialised already."""
    unary = grpc.unary_unary_rpc_method_handler
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "GetDevicePluginOptions": unary(
            servicer.GetDevicePluginOptions, pb.Empty.FromString, pb.DevicePluginOptions.SerializeToString
        ),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(servicer.ListAndWatch, pb.Empty.FromString, None),
        "GetPreferredAllocation": unary(
            servicer.GetPreferredAllocation,
            pb.PreferredAllocationRequest.FromString,
            pb.PreferredAllocationResponse.SerializeToString,
        ),
        "Allocate": unary(servicer.Allocate, pb.AllocateRequest.FromString, pb.AllocateResponse.SerializeToString),
        "PreStartContainer": unary(
            servicer.PreStartContainer,
            pb.PreStartContainerRequest.FromString,
            pb.PreStartContainerResponse.SerializeToString,
        ),
    }
    server.add_registered_method_handlers(SERVICE, handlers)
