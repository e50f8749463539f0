"""The one call made to the container runtime's CRI socket: stopping a container in order."""

from typing import Final

import grpc

from deviceplugin.kubelet.rpcerror import describe

METHOD: Final = "/runtime.v1.RuntimeService/StopContainer"
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
