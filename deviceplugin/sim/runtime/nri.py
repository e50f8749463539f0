"""A container runtime's side of NRI, on the real wire: takes plugins, tells them all there is, asks them.

It treats plugins as containerd's NRI does (containerd/nri pkg/adaptation): one call at a time under one lock, in the
order of their indices; a plugin that answers late or breaks the rules is dropped and its answer counts as none; an
error answer fails what was asked.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri import codec, mux
from deviceplugin.nri.dialogue import PLUGIN_SERVICE, RUNTIME_SERVICE
from deviceplugin.nri.link import CallError, Link, LinkError
from deviceplugin.nri.model import Adjustment, Container, Pod
from deviceplugin.nri.ttrpc import Answer, Code, Request
from mpsd.common.errors import GpufracError, ProtocolError
from mpsd.common.log import get_logger

REGISTRATION_TIMEOUT_S: Final = 5.0
PART_BYTES: Final = 3 << 20
"""A Synchronize that is larger goes in parts; ttrpc allows 4 MiB."""
_ALL_EVENTS: Final = (1 << 14) - 1
_OWN_CALLS: Final[dict[pb.Event, str]] = {
    pb.RUN_POD_SANDBOX: "RunPodSandbox",
    pb.STOP_POD_SANDBOX: "StopPodSandbox",
    pb.REMOVE_POD_SANDBOX: "RemovePodSandbox",
    pb.START_CONTAINER: "StartContainer",
    pb.STOP_CONTAINER: "StopContainer",
    pb.REMOVE_CONTAINER: "RemoveContainer",
}

log = get_logger("nri-sim")

Inventory = Callable[[], tuple[Sequence[Pod], Sequence[Container]]]


class NriError(GpufracError):
    """A plugin refused, in its words; or a plugin that is required is not there."""


class NriRuntime:
    """Serves NRI on a socket.

    Args:
        inventory: all there is. Called under the lock that every call here takes: it must not wait for one that is held
            around such a call.
        required: a container is created only when a plugin had its say, as with NRI's default validator.
        state_change: how state changes are spelled: as containerd 2.1 does, else by calls of their own as newer ones
            do, with StateChange where a plugin does not know them.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        name: str = "containerd",
        version: str = "2.1.9",
        request_timeout_s: float = 2.0,
        inventory: Inventory,
        required: bool = False,
        state_change: bool = True,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._path, self._name, self._version = socket_path, name, version
        self.request_timeout_s = request_timeout_s
        self._inventory, self._required = inventory, required
        self._state_change, self._part_bytes = state_change, part_bytes
        self._lock = threading.Lock()  # one call at a time
        self._changed = threading.Condition()  # guards the plugins
        self._plugins: list[_Plugin] = []
        self._gone: list[_Plugin] = []
        self._joining: _Plugin | None = None
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None
        self._accepting = threading.Thread(target=self._accept, name="nri-sim", daemon=True)

    @property
    def plugins(self) -> tuple[str, ...]:
        """Those that are asked, `<index>-<name>`, in their order."""
        with self._changed:
            return tuple(plugin.name for plugin in self._plugins if not plugin.ended)

    def start(self) -> None:
        """Replaces a socket that is there, as a real runtime does. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._path)
            listener.listen(16)
        except BaseException:
            listener.close()
            raise
        found = os.stat(self._path)
        self._listener, self._identity = listener, (found.st_dev, found.st_ino)
        self._accepting.start()

    def close(self) -> None:
        """As when the runtime ends: every link breaks, the socket goes. May be called twice."""
        self._closing.set()
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        with self._changed:
            for plugin in (*self._plugins, *((self._joining,) if self._joining else ())):
                plugin.end("the runtime ends")
        self._accepting.join()
        listener.close()
        with suppress(OSError):
            found = os.stat(self._path)
            if (found.st_dev, found.st_ino) == self._identity:
                os.unlink(self._path)
        with self._changed:
            plugins, self._plugins, self._gone = (*self._plugins, *self._gone), [], []
        for plugin in plugins:
            plugin.close()

    def wait_plugin(self, timeout_s: float) -> bool:
        """Whether a plugin is there, waiting for one so long."""
        with self._changed:
            return self._changed.wait_for(lambda: any(not plugin.ended for plugin in self._plugins), timeout_s)

    def run_pod(self, pod: Pod) -> None:
        """Raises NriError, as do all of these."""
        self._event(pb.RUN_POD_SANDBOX, pod)

    def stop_pod(self, pod: Pod) -> None:
        self._event(pb.STOP_POD_SANDBOX, pod)

    def remove_pod(self, pod: Pod) -> None:
        self._event(pb.REMOVE_POD_SANDBOX, pod)

    def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """What the plugins want changed, all of them together."""
        request = pb.CreateContainerRequest(pod=codec.pod_message(pod), container=codec.container_message(container))
        payload = request.SerializeToString()
        adjust = pb.ContainerAdjustment()
        with self._lock:
            for plugin in self._asked(pb.CREATE_CONTAINER):
                answer = self._ask(plugin, "CreateContainer", payload)
                if answer is not None:
                    try:
                        adjust.MergeFrom(codec.parse(pb.CreateContainerResponse, answer).adjust)
                    except ProtocolError as error:
                        plugin.end(str(error))
            if self._required and not self.plugins:
                raise NriError("cannot create a container: a required NRI plugin is not there")
        return codec.adjustment_of(adjust)

    def start_container(self, pod: Pod, container: Container) -> None:
        self._event(pb.START_CONTAINER, pod, container)

    def stop_container(self, pod: Pod, container: Container) -> None:
        self._event(pb.STOP_CONTAINER, pod, container)

    def remove_container(self, pod: Pod, container: Container) -> None:
        self._event(pb.REMOVE_CONTAINER, pod, container)

    def _event(self, event: pb.Event, pod: Pod, container: Container | None = None) -> None:
        change = pb.StateChangeEvent(event=event, pod=codec.pod_message(pod))
        own = pb.CreateContainerRequest(pod=change.pod)
        if container is not None:
            change.container.CopyFrom(codec.container_message(container))
            own.container.CopyFrom(change.container)
        with self._lock:
            for plugin in self._asked(event):
                if not self._state_change and not plugin.old:
                    try:
                        self._ask(plugin, _OWN_CALLS[event], own.SerializeToString())
                        continue
                    except _UnimplementedError:
                        plugin.old = True
                self._ask(plugin, "StateChange", change.SerializeToString())

    def _asked(self, event: pb.Event) -> "list[_Plugin]":
        with self._changed:
            self._gone = [plugin for plugin in (*self._gone, *self._plugins) if plugin.ended and plugin.is_alive()]
            self._plugins = [plugin for plugin in self._plugins if not plugin.ended]
            return [plugin for plugin in self._plugins if plugin.events & 1 << (event - 1)]

    def _ask(self, plugin: "_Plugin", method: str, payload: bytes) -> bytes | None:
        """None where the plugin is gone now. Raises NriError."""
        try:
            return plugin.call(method, payload, self.request_timeout_s)
        except CallError as error:
            if error.code == Code.UNIMPLEMENTED:
                raise _UnimplementedError(str(error)) from error
            raise NriError(str(error)) from error
        except (LinkError, TimeoutError) as error:
            plugin.end(f"dropped: {error}")
            log.warning("a plugin is dropped", plugin=plugin.name, method=method, error=error)
            return None

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None and not self._closing.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._changed:
                if self._closing.is_set():  # whoever closes has ended the plugins there were
                    connection.close()
                    return
                plugin = self._joining = _Plugin(connection)
            try:
                self._take(plugin)
            except (GpufracError, TimeoutError) as error:
                plugin.end(str(error))
                log.warning("a plugin is not taken", plugin=plugin.name, error=error)
                plugin.close()

    def _take(self, plugin: "_Plugin") -> None:
        """Registration, configuration, state. Raises CallError, LinkError, TimeoutError, ProtocolError."""
        plugin.start()
        deadline_s = time.monotonic() + REGISTRATION_TIMEOUT_S
        while not plugin.registered.wait(0.05):
            if plugin.ended or self._closing.is_set():
                raise LinkError("the plugin left before it registered")
            if time.monotonic() >= deadline_s:
                raise TimeoutError("the plugin did not register in time")
        configure = pb.ConfigureRequest(
            runtime_name=self._name,
            runtime_version=self._version,
            registration_timeout=int(REGISTRATION_TIMEOUT_S * 1000),
            request_timeout=int(self.request_timeout_s * 1000),
            NRI_version="v0.8.0",
        )
        answer = plugin.call("Configure", configure.SerializeToString(), self.request_timeout_s)
        plugin.events = codec.parse(pb.ConfigureResponse, answer).events or _ALL_EVENTS
        if plugin.events & ~_ALL_EVENTS:
            raise ProtocolError(f"cannot subscribe to events {plugin.events:#x}: there are no such")
        with self._lock:
            self._synchronize(plugin)
            with self._changed:
                if self._closing.is_set():
                    raise LinkError("the runtime ends")
                self._plugins = sorted((*self._plugins, plugin), key=lambda other: other.index)
                self._changed.notify_all()

    def _synchronize(self, plugin: "_Plugin") -> None:
        pods, containers = self._inventory()
        deadline_s = time.monotonic() + self.request_timeout_s  # for all parts together
        for part in _parts(pods, containers, self._part_bytes):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the plugin did not take the state in time")
            answer = codec.parse(pb.SynchronizeResponse, plugin.call("Synchronize", part.SerializeToString(), left_s))
            if answer.more != part.more or (part.more and answer.update):
                raise ProtocolError("the plugin does not handle a state in parts")


class _UnimplementedError(NriError):
    pass


def _parts(pods: Sequence[Pod], containers: Sequence[Container], part_bytes: int) -> list[pb.SynchronizeRequest]:
    """The state in parts of at most so many bytes, with one item at least in each."""
    parts = [pb.SynchronizeRequest()]
    size_bytes = 0
    items: list[pb.PodSandbox | pb.Container] = [*map(codec.pod_message, pods)]
    items += map(codec.container_message, containers)
    for item in items:
        item_bytes = item.ByteSize() + 8
        if size_bytes and size_bytes + item_bytes > part_bytes:
            parts[-1].more = True
            parts.append(pb.SynchronizeRequest())
            size_bytes = 0
        size_bytes += item_bytes
        if isinstance(item, pb.PodSandbox):
            parts[-1].pods.append(item)
        else:
            parts[-1].containers.append(item)
    return parts


class _Plugin:
    """A plugin at the other end, with a thread that reads."""

    def __init__(self, connection: socket.socket) -> None:
        self._link = Link(connection, serves=mux.RUNTIME_SERVICE, calls=mux.PLUGIN_SERVICE)
        self.name, self.index = "?", ""
        self.events = 0
        self.old = False
        """Does not know the calls of newer runtimes."""
        self.registered = threading.Event()
        self._reader = threading.Thread(target=self._read, name="nri-sim-reader", daemon=True)

    @property
    def ended(self) -> str:
        return self._link.ended

    def start(self) -> None:
        self._reader.start()

    def call(self, method: str, payload: bytes, timeout_s: float) -> bytes:
        return self._link.call(PLUGIN_SERVICE, method, payload, timeout_s)

    def end(self, reason: str) -> None:
        self._link.end(reason)

    def is_alive(self) -> bool:
        return self._reader.is_alive()

    def close(self) -> None:
        self._link.end("closed by the runtime")
        self._reader.join(5.0)

    def _read(self) -> None:
        try:
            while True:
                for request in self._link.pump(5.0):
                    self._serve(request)
        except LinkError:
            pass
        finally:
            self._link.release()

    def _serve(self, request: Request) -> None:
        answer = Answer(request.stream)
        if request.service != RUNTIME_SERVICE or request.method not in ("RegisterPlugin", "UpdateContainers"):
            answer = Answer(request.stream, code=Code.UNIMPLEMENTED, text=f"method {request.method}")
        elif request.method == "RegisterPlugin":
            # UpdateContainers is answered with success and nothing is done: real runtimes, too, drop its evictions.
            try:
                asked = codec.parse(pb.RegisterPluginRequest, request.payload)
                self.index, self.name = asked.plugin_idx, f"{asked.plugin_idx}-{asked.plugin_name}"
                if not (len(self.index) == 2 and self.index.isascii() and self.index.isdigit() and asked.plugin_name):
                    raise ProtocolError(f"invalid plugin index {self.index!r} or name {asked.plugin_name!r}")
            except ProtocolError as error:
                answer = Answer(request.stream, code=Code.INVALID_ARGUMENT, text=str(error))
        self._link.answer(answer)
        if request.method == "RegisterPlugin":
            if answer.code:
                raise self._link.end(answer.text)
            self.registered.set()
