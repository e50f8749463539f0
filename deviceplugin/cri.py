"""The one call made to the container runtime's CRI socket: stopping a container in order."""

from typing import Final

import grpc

from deviceplugin.kubelet.rpcerror import describe

METHOD: Final = "/runtime.v1.RuntimeService/StopContainer"
GRACE_S: Final = 30
"""Between SIGTERM and SIGKILL."""
CONNECT_S: Final = 5.0


def stop_container(socket_path: str, container_id: str) -> str:
    """Has the runtime stop a container; the kubelet then does as its pod's restart policy says. Empty, or why it could
    not be stopped. May take GRACE_S."""
    request = _field(1, container_id.encode()) + b"\x10" + bytes((GRACE_S,))  # container_id = 1, timeout = 2 (int64)
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(f"unix:{socket_path}", options=options) as channel:
        call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(request, timeout=GRACE_S + CONNECT_S)
        except grpc.RpcError as error:
            return f"the container runtime does not stop it: {describe(error, socket_path)}"
    return ""


def _field(number: int, value: bytes) -> bytes:
    """A length-delimited field of a protobuf message (values below 128 bytes)."""
    value = value[:127]
    return bytes((number << 3 | 2, len(value))) + value
