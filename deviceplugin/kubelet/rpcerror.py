"""gRPC errors as sentences for an operator."""

import os

import grpc

MAX_LENGTH = 300


def describe(error: Exception, socket_path: str) -> str:
    """Why a call on that socket failed, without the layers of gRPC around it; at most MAX_LENGTH characters."""
    if not os.path.exists(socket_path):
        return f"{socket_path} is not there: is its process running?"
    if not isinstance(error, grpc.RpcError) or not callable(getattr(error, "details", None)):
        return _printable(str(error))[:MAX_LENGTH]
    code, details = error.code(), _printable(str(error.details()))
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
        return f"{socket_path} refuses connections"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer in time on {socket_path}"
    return f"{code.name}: {details}"[:MAX_LENGTH]


def _printable(text: str) -> str:
    """gRPC shows socket addresses as they lie in memory, with their zeros."""
    return text if text.isprintable() else " ".join("".join(c if c.isprintable() else " " for c in text).split())
