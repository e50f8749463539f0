"""The stub kubelet's gRPC: clients of device plugins, and the services it offers to them.

Behaves as kubelet 1.36.2 was seen to, also where that is awkward: Register returns after the plugin was dialled and
asked for its options; the end of an old list stream disconnects whoever holds the resource's name by then.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import grpc

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.api import deviceplugin_v1beta1_pb2_grpc as rpc
from deviceplugin.api import podresources_v1_pb2 as podresources_pb
from deviceplugin.api import podresources_v1_pb2_grpc as podresources_rpc
from deviceplugin.kubelet.refusals import CODE_METADATA
from deviceplugin.sim.kubelet.devicemanager import Endpoint, PluginError
from deviceplugin.sim.objects.pods import is_extended_resource

T = TypeVar("T")

VERSION = "v1beta1"
DIAL_TIMEOUT_S = 10.0
_NO_ROOM = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION)
"""What a plugin answers that could grant the same request at another time."""
PRE_START_TIMEOUT_S = 30.0
LIST_RATE_PER_S, LIST_BURST = 100.0, 10
"""What the kubelet's PodResources service takes; more is refused with RESOURCE_EXHAUSTED."""

_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
)


class DeviceEvents(Protocol):
    """Who hears of plugins: the device manager."""

    def connected(self, resource: str, endpoint: Endpoint) -> None: ...
    def listed(self, resource: str, devices: Iterable[pb.Device]) -> None: ...
    def disconnected(self, resource: str) -> None: ...


class PluginClient:
    """One registered plugin: a channel, and one thread that reads its list.

    Args:
        call_timeout_s: bounds Allocate and GetPreferredAllocation. A real kubelet has no such bound: None.
    """

    def __init__(self, resource: str, path: str, call_timeout_s: float | None = None) -> None:
        self.resource = resource
        self._call_timeout_s = call_timeout_s
        self._channel = grpc.insecure_channel(f"unix:{path}", options=_CHANNEL_OPTIONS)
        self._stub = rpc.DevicePluginStub(self._channel)
        self._options = pb.DevicePluginOptions()
        self._thread: threading.Thread | None = None

    @property
    def options(self) -> pb.DevicePluginOptions:
        return self._options

    @property
    def ended(self) -> bool:
        """Whether the list stream has ended and its thread with it."""
        return self._thread is not None and not self._thread.is_alive()

    def connect(self, timeout_s: float) -> None:
        """Dials and asks for the options. Raises PluginError."""
        try:
            self._options = self._stub.GetDevicePluginOptions(pb.Empty(), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise _plugin_error(error) from error

    def watch(self, on_list: Callable[[str, Iterable[pb.Device]], None], on_end: Callable[[str], None]) -> None:
        """Reads the list in a thread until the stream ends; it is never opened again."""

        def run() -> None:
            try:
                for message in self._stub.ListAndWatch(pb.Empty()):
                    on_list(self.resource, message.devices)
            except (grpc.RpcError, ValueError):  # ValueError: the channel is closed already
                pass
            self._channel.close()
            on_end(self.resource)

        thread = threading.Thread(target=run, name=f"list-{self.resource}", daemon=True)
        thread.start()
        self._thread = thread  # not before: who closes all plugins meanwhile would wait for one that does not run yet

    def allocate(self, device_ids: list[str]) -> pb.AllocateResponse:
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=device_ids)])
        answer: pb.AllocateResponse = self._call(lambda: self._stub.Allocate(request, timeout=self._call_timeout_s))
        return answer

    def preferred(self, available: list[str], must_include: list[str], size: int) -> pb.PreferredAllocationResponse:
        wish = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        request = pb.PreferredAllocationRequest(container_requests=[wish])
        answer: pb.PreferredAllocationResponse = self._call(
            lambda: self._stub.GetPreferredAllocation(request, timeout=self._call_timeout_s)
        )
        return answer

    def pre_start(self, device_ids: list[str]) -> None:
        request = pb.PreStartContainerRequest(devices_ids=device_ids)
        self._call(lambda: self._stub.PreStartContainer(request, timeout=PRE_START_TIMEOUT_S))

    def close(self) -> None:
        """Ends every call in flight, and the list stream."""
        self._channel.close()

    def join(self) -> None:
        """Waits for the list thread. Not from that thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            raise _plugin_error(error) from error
        except ValueError as error:  # a closed channel
            raise PluginError("rpc error: code = Canceled desc = grpc: the client connection is closing") from error


class Registry(rpc.RegistrationServicer):
    """The registration service. Keeps one client per resource name.

    Args:
        directory: where the plugins' sockets are.
    """

    def __init__(self, directory: str, devices: DeviceEvents, *, call_timeout_s: float | None = None) -> None:
        self._directory = directory
        self._devices = devices
        self._call_timeout_s = call_timeout_s
        self._lock = threading.Lock()
        self._clients: dict[str, PluginClient] = {}
        self._all: list[PluginClient] = []
        self._closing = False
        self.registrations = 0

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:  # noqa: N802
        name = request.resource_name
        if request.version != VERSION:
            context.abort(
                grpc.StatusCode.UNKNOWN,
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is "{VERSION}"',
            )
        if not is_extended_resource(name):
            context.abort(grpc.StatusCode.UNKNOWN, f'the ResourceName "{name}" is invalid')
        if not request.endpoint or "/" in request.endpoint or request.endpoint in (".", ".."):
            # A real kubelet joins whatever it gets; names from outside are no paths here.
            context.abort(grpc.StatusCode.UNKNOWN, f'failed to dial device plugin with socketPath "{request.endpoint}"')
        client = PluginClient(name, f"{self._directory}/{request.endpoint}", self._call_timeout_s)
        with self._lock:
            if self._closing:
                client.close()
                context.abort(grpc.StatusCode.UNAVAILABLE, "the kubelet is shutting down")
            self._clients[name] = client
            self._all = [c for c in self._all if not c.ended] + [client]
        left_s: float | None = context.time_remaining()  # None where the plugin set no deadline
        try:
            client.connect(DIAL_TIMEOUT_S if left_s is None else min(DIAL_TIMEOUT_S, left_s))
        except PluginError as error:
            with self._lock:
                self._clients.pop(name, None)
            client.close()
            context.abort(
                grpc.StatusCode.UNKNOWN,
                f"failed to dial device plugin with socketPath {self._directory}/{request.endpoint}: {error}",
            )
        self._devices.connected(name, client)
        self.registrations += 1
        client.watch(self._devices.listed, self._stream_ended)
        return pb.Empty()

    def _stream_ended(self, resource: str) -> None:
        """A list stream ended: disconnects the plugin that has the name now, be it another one (verified)."""
        with self._lock:
            client = None if self._closing else self._clients.pop(resource, None)
        if client is not None:
            client.close()
            self._devices.disconnected(resource)

    def close(self) -> None:
        """Drops all plugins and waits for their threads. No device changes health for it."""
        with self._lock:
            self._closing = True
            clients, self._all = self._all, []
            self._clients = {}
        for client in clients:
            client.close()
        for client in clients:
            client.join()


class PodResources(podresources_rpc.PodResourcesListerServicer):
    """The PodResources service, List only, with the kubelet's rate limit."""

    def __init__(
        self,
        answer: Callable[[], podresources_pb.ListPodResourcesResponse],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._answer = answer
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._tokens = float(LIST_BURST)
        self._filled_s = monotonic()

    def List(  # noqa: N802
        self, request: podresources_pb.ListPodResourcesRequest, context: grpc.ServicerContext
    ) -> podresources_pb.ListPodResourcesResponse:
        if not self._admit():
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        return self._answer()

    def _admit(self) -> bool:
        with self._lock:
            now_s = self._monotonic()
            self._tokens = min(LIST_BURST, self._tokens + (now_s - self._filled_s) * LIST_RATE_PER_S)
            self._filled_s = now_s
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


def _plugin_error(error: grpc.RpcError) -> PluginError:
    """The text a Go client prints for a failed call."""
    ask_code, ask_details = getattr(error, "code", None), getattr(error, "details", None)
    code = ask_code() if callable(ask_code) else grpc.StatusCode.UNKNOWN
    details = ask_details() if callable(ask_details) else str(error)
    name = "".join(word.capitalize() for word in code.name.split("_"))
    text = f"rpc error: code = {'Canceled' if name == 'Cancelled' else name} desc = {details}"
    ask_metadata = getattr(error, "trailing_metadata", None)
    metadata = dict(ask_metadata() or ()) if callable(ask_metadata) else {}
    return PluginError(text, short=code in _NO_ROOM, code=str(metadata.get(CODE_METADATA, "")))
