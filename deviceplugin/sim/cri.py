"""The calls of the container runtime's CRI socket that the plugin makes: Version and StopContainer.

As containerd: the latter returns once the container has stopped, and also for one that is not there (CRI: it is
idempotent).
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

SERVICE, METHOD, VERSION_METHOD = "runtime.v1.RuntimeService", "StopContainer", "Version"
_CONTAINER_ID, _STRING, _VARINT = 1, 2, 0


class CriServer:
    """Serves on a socket.

    Args:
        stop: ends a container by its ID.
        runtime: name and version that it tells.
    """

    def __init__(self, socket_path: str, stop: Callable[[str], None], runtime: tuple[str, str]) -> None:
        self._path, self._stop, self._runtime = socket_path, stop, runtime
        self._pool: ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Raises RuntimeError."""
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="cri")
        server = grpc.server(self._pool, options=(("grpc.so_reuseport", 0),))
        calls = {METHOD: self._stop_container, VERSION_METHOD: self._version}
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(call, request_deserializer=bytes, response_serializer=bytes)
            for name, call in calls.items()
        }
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

    def _version(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """VersionResponse {1: version, 2: runtime_name, 3: runtime_version, 4: runtime_api_version}."""
        texts = ("0.1.0", *self._runtime, "v1")
        return b"".join(bytes((n << 3 | _STRING, len(text))) + text.encode() for n, text in enumerate(texts, 1))

    def _stop_container(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            identifier = _container_id(request)
        except (IndexError, ValueError):
            context.abort(grpc.StatusCode.INTERNAL, "grpc: error unmarshalling request")
        self._stop(identifier)
        return b""


def _container_id(request: bytes) -> str:
    """Of StopContainerRequest {1: container_id, 2: timeout}. Raises IndexError, ValueError."""
    identifier, position = "", 0
    while position < len(request):
        tag, position = _varint(request, position)
        value, position = _varint(request, position)
        if tag & 7 == _STRING:
            if position + value > len(request):
                raise ValueError(value)
            if tag >> 3 == _CONTAINER_ID:
                identifier = request[position : position + value].decode()
            position += value
        elif tag & 7 != _VARINT:
            raise ValueError(tag)
    return identifier


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
