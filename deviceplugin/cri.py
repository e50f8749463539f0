"""The two calls made to the container runtime's CRI socket: what it is, and stopping a container in order."""

import os
from collections.abc import Sequence
from typing import Final

import grpc

from deviceplugin.kubelet.rpcerror import describe
from deviceplugin.nri.model import Runtime

METHOD: Final = "/runtime.v1.RuntimeService/StopContainer"
VERSION_METHOD: Final = "/runtime.v1.RuntimeService/Version"
VERSION_S: Final = 2.0
SOCKETS: Final = ("/run/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock", "/run/crio/crio.sock")
"""Where runtimes serve CRI by default. With more than one there, which one the kubelet uses is not known."""
SIMULATED_SOCKET: Final = "cri.sock"
"""Of a simulated node, below its run directory."""
_RUNTIME_NAME, _RUNTIME_VERSION, _STRING = 2, 3, 2
GRACE_S: Final = 30
"""Between SIGTERM and SIGKILL."""
CONNECT_S: Final = 5.0
MAX_ID_BYTES: Final = 127


def stop_container(socket_path: str, container_id: str) -> str:
    """Has the runtime stop a container; the kubelet then does as its pod's restart policy says. Empty, or why it could
    not be stopped. May take GRACE_S."""
    identifier = container_id.encode()
    if len(identifier) > MAX_ID_BYTES:
        return f"its ID is longer than {MAX_ID_BYTES} bytes"
    # StopContainerRequest{container_id = 1, timeout = 2}: values below 128 are one byte of a varint.
    request = bytes((1 << 3 | 2, len(identifier))) + identifier + bytes((2 << 3, GRACE_S))
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(f"unix:{socket_path}", options=options) as channel:
        call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(request, timeout=GRACE_S + CONNECT_S)
        except grpc.RpcError as error:
            return f"the container runtime does not stop it: {describe(error, socket_path)}"
    return ""


def runtime_of(sockets: Sequence[str] = SOCKETS) -> Runtime | None:
    """The container runtime behind the one of these sockets that is there; None where that is not one, or it does not
    answer within VERSION_S."""
    there = [path for path in sockets if os.path.exists(path)]
    if len(there) != 1:
        return None
    with grpc.insecure_channel(f"unix:{there[0]}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        call = channel.unary_unary(VERSION_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            answer = call(b"", timeout=VERSION_S)
        except grpc.RpcError:
            return None
    texts = _strings(answer)
    name, version = texts.get(_RUNTIME_NAME, ""), texts.get(_RUNTIME_VERSION, "")
    return Runtime(name=name, version=version) if name else None


def _strings(message: bytes) -> dict[int, str]:
    """The strings of a protobuf message that has nothing else, by field number: what of it is understood."""
    found: dict[int, str] = {}
    at = 0
    # VersionResponse{version = 1, runtime_name = 2, runtime_version = 3, runtime_api_version = 4}; lengths below 128.
    while at + 2 <= len(message) and message[at] & 7 == _STRING and message[at + 1] < 0x80:
        end = at + 2 + message[at + 1]
        found[message[at] >> 3] = message[at + 2 : end].decode(errors="replace")
        at = end
    return found
