"""One resource at the kubelet: serve, register, and do both again whenever the kubelet lost us.

One thread per resource is the only one that starts, stops or registers, so a name is never registered twice at once
(kubernetes/kubernetes#124716) and the old server is fully closed before the new one registers: the end of an old
stream would disconnect the new plugin (verified on kubelet 1.36.2). What makes it begin again: a new kubelet.sock, our
own socket gone or replaced, a list stream that ended, a self-dial that failed. All are looked at.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import grpc

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.api import deviceplugin_v1beta1_pb2_grpc as rpc
from deviceplugin.grants.broker import Broker, Recheck
from deviceplugin.kubelet.places import KubeletPlaces
from deviceplugin.kubelet.reasons import KubeletCode
from deviceplugin.kubelet.refusals import Refusals
from deviceplugin.kubelet.rpcerror import describe
from deviceplugin.kubelet.servicer import OPTIONS, DevicePlugin, add_to_server
from mpsd.common.errors import TransientError
from mpsd.common.log import get_logger
from mpsd.common.pacing import Backoff
from mpsd.common.reason import Reason
from mpsd.common.socketfile import SocketFile
from mpsd.common.threads import GuardedThread, Mishaps, full_pool

VERSION = "v1beta1"
REGISTER_TIMEOUT_S = 12.0
"""The kubelet dials back within this call, for up to 10 s."""
RETRY_FIRST_S = 0.05
RETRY_LAST_S = 5.0
SELF_DIAL_S = 30.0
SELF_DIAL_TIMEOUT_S = 5.0
STREAM_DUE_S = 3.0
"""A kubelet opens the list stream right after registration, unless the end of an old stream came in between."""
STOP_GRACE_S = 0.5
WORKERS = 12
"""Each open stream keeps one; the rest answer calls."""

log = get_logger("plugin")


class SessionState(StrEnum):
    """Of one resource at the kubelet; the values are what status shows."""

    STARTING = "starting"
    WAITING = "waiting for the kubelet"
    REGISTERED = "registered"
    STOPPED = "stopped"


class Again(NamedTuple):
    """Why a session begins again; `serving`: all it takes is to register, as it serves well."""

    why: str
    serving: bool = False


class Session:
    """Keeps one resource registered until closed.

    Args:
        socket_name: base name of our socket in the kubelet's directory for device plugins.
        recheck: see Broker.allocate.
        refusals: hears of each.
        on_registered: called after each successful registration.
    """

    def __init__(
        self,
        resource: str,
        places: KubeletPlaces,
        socket_name: str,
        broker: Broker,
        recheck: Recheck,
        refusals: Refusals,
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        self.resource = resource
        self.state = SessionState.STARTING
        self.trouble: Reason | None = None
        """Why it is not registered, None while it is or was not tried yet."""
        self.registrations = 0
        self._socket_name = socket_name
        self._places = places
        self._path = os.path.join(places.device_plugins, socket_name)
        self._kubelet = SocketFile(places.registration_socket)
        self._own_file = SocketFile(self._path)
        self._broker = broker
        self._recheck, self._refusals = recheck, refusals
        self._on_registered = on_registered
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._stream_ended = threading.Event()
        self._server: grpc.Server | None = None
        self._servicer: DevicePlugin | None = None
        self._own: int | None = None
        self._stream_due_s = float("inf")
        self._thread = GuardedThread(self._run, f"session-{resource}")

    @property
    def streams(self) -> int:
        """Open list streams: 1 while a kubelet listens."""
        return self._servicer.streams if self._servicer else 0

    def start(self) -> None:
        self._thread.start()

    def hint(self) -> None:
        """Something may have changed at the kubelet: look now."""
        self._wake.set()

    def close(self) -> None:
        """Stops serving and removes the socket."""
        self.begin_close()
        self._thread.join()

    def begin_close(self) -> None:
        """Starts to close without waiting, so that several sessions close side by side."""
        self._stop.set()
        self._wake.set()

    def _run(self) -> None:
        mishaps = Mishaps(f"session-{self.resource}", "a session failed and begins again", log)
        while not self._stop.is_set():
            try:
                self._keep_registered()
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error, resource=self.resource)
                self._stop.wait(RETRY_LAST_S)
        self._stop_server()
        self._kubelet.close()
        self._own_file.close()
        self.state = SessionState.STOPPED

    def _keep_registered(self) -> None:
        registered_with: int | None = None
        last_kubelet: int | None = None
        backoff, not_before_s = Backoff(RETRY_FIRST_S, RETRY_LAST_S), 0.0
        dial_at_s = time.monotonic() + SELF_DIAL_S
        while not self._stop.is_set():
            kubelet = self._kubelet.look()
            if kubelet != last_kubelet:  # the pauses of the last kubelet are not this one's
                last_kubelet, not_before_s = kubelet, 0.0
                backoff.reset()
            now_s = time.monotonic()
            again = self._why_again(registered_with, kubelet)
            if again is None and now_s >= dial_at_s:
                again = self._self_dial()
                dial_at_s = now_s + SELF_DIAL_S
            if again is not None and now_s >= not_before_s:
                before = registered_with
                registered_with = self._begin_again(again, kubelet)
                # Also after a success: a kubelet that takes us and drops us again must not be asked in a tight loop.
                not_before_s = time.monotonic() + backoff.pause_s()
                if registered_with is not None:
                    dial_at_s = time.monotonic() + SELF_DIAL_S
                    if registered_with != before:
                        continue
            elif again is None and now_s >= not_before_s + RETRY_LAST_S:
                backoff.reset()
            until_s = (
                not_before_s if again is not None or registered_with is None else min(dial_at_s, self._stream_due_s)
            )
            self._wake.wait(max(0.01, until_s - time.monotonic()))
            self._wake.clear()

    def _why_again(self, registered_with: int | None, kubelet: int | None) -> Again | None:
        if self._server is None:
            return Again("starting")
        if self._own is None or self._own_file.look() != self._own:
            return Again("our socket is gone")
        if registered_with is None:
            return Again("not registered", serving=True)
        if kubelet is not None and kubelet != registered_with:
            return Again("the kubelet's socket is new")
        if self._stream_ended.is_set():
            return Again("the kubelet ended its list stream")
        if self.streams:
            self._stream_due_s = float("inf")
        elif time.monotonic() >= self._stream_due_s:
            return Again("the kubelet opened no list stream")
        return None

    def _begin_again(self, again: Again, kubelet: int | None) -> int | None:
        """Serves on a fresh socket if need be and registers. The kubelet's socket that we are registered at."""
        code = KubeletCode.NOT_SERVED
        try:
            if not again.serving:
                self._stop_server()
                self._start_server()
            code = KubeletCode.NOT_REGISTERED
            if kubelet is None:
                missing = self._places.missing() or "kubelet.sock was not there"
                self._note_waiting(Reason(KubeletCode.NOT_THERE, missing))
                return None
            self._register()
        except TransientError as error:
            self._note_waiting(Reason(code, str(error)))
            return None
        except (OSError, RuntimeError, grpc.RpcError) as error:
            missing = self._places.missing()
            text = missing or describe(error, self._kubelet.path)
            self._note_waiting(Reason(KubeletCode.NOT_THERE if missing else code, text))
            return None
        self.registrations += 1
        self._stream_due_s = time.monotonic() + STREAM_DUE_S
        log.info("registered", resource=self.resource, reason=again.why)
        self.state, self.trouble = SessionState.REGISTERED, None
        self._on_registered()
        return kubelet

    def _start_server(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._stream_ended.clear()
        servicer = DevicePlugin(self.resource, self._broker, self._recheck, self._refusals, self._on_stream_end)
        pool = full_pool(WORKERS, f"rpc-{self._socket_name}")
        server = grpc.server(
            pool,
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 * 1024 * 1024)),
        )
        add_to_server(servicer, server)
        try:
            server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:  # gRPC keeps its reason for a log of its own
            pool.shutdown()
            misplaced = "" if os.path.isdir(self._places.device_plugins) else self._places.missing()
            raise TransientError(misplaced or f"cannot listen on {self._path}: {_why_unbound(self._path)}") from error
        server.start()
        os.chmod(self._path, 0o600)
        self._server, self._servicer = server, servicer
        self._own = self._own_file.look()

    def _stop_server(self) -> None:
        server, servicer = self._server, self._servicer
        self._server = self._servicer = None
        if servicer is not None:
            servicer.stop()
        if server is not None:
            server.stop(STOP_GRACE_S).wait()
        if self._own is not None and self._own_file.look() == self._own:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._own = None

    def _register(self) -> None:
        with _channel(self._kubelet.path) as channel:
            rpc.RegistrationStub(channel).Register(
                pb.RegisterRequest(
                    version=VERSION, endpoint=self._socket_name, resource_name=self.resource, options=OPTIONS
                ),
                timeout=REGISTER_TIMEOUT_S,
            )

    def _self_dial(self) -> Again | None:
        """Asks ourselves, as a kubelet would: nobody else notices a server that hangs."""
        try:
            with _channel(self._path) as channel:
                rpc.DevicePluginStub(channel).GetDevicePluginOptions(pb.Empty(), timeout=SELF_DIAL_TIMEOUT_S)
        except grpc.RpcError as error:
            return Again(f"our own server does not answer: {describe(error, self._path)}")
        return None

    def _on_stream_end(self) -> None:
        self._stream_ended.set()
        self._wake.set()

    def _note_waiting(self, trouble: Reason) -> None:
        if (self.state, self.trouble) != (SessionState.WAITING, trouble):
            log.warning("not registered", resource=self.resource, code=trouble.code, error=trouble.message)
        self.state, self.trouble = SessionState.WAITING, trouble


def _why_unbound(path: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(path)
        except OSError as error:
            return error.strerror or str(error)
    with contextlib.suppress(OSError):
        os.unlink(path)
    return "gRPC could not bind it just now"


def _channel(path: str) -> grpc.Channel:
    return grpc.insecure_channel(
        f"unix:{path}", options=(("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    )
