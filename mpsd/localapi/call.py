"""One call of a local API: a connection, a request, an answer. Light: probes load it, and must start fast."""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from mpsd.common.errors import GpufracError, NotReachableError
from mpsd.localapi import wire
from mpsd.localapi.lines import LineReader

TIMEOUT_S: Final = 5.0

T = TypeVar("T")


def call(
    path: str, method: str, params: Mapping[str, Any] | None, result_type: type[T], timeout_s: float = TIMEOUT_S
) -> T:
    """Calls `method` of the process that serves `path`. The whole call takes at most about `timeout_s`.

    Raises NotReachableError when nobody answers in time, what the method raised (its class where mpsd.errors has it,
    GpufracError otherwise), ProtocolError for an answer that makes no sense.
    """
    process = f"gpufrac {os.path.basename(path).removesuffix('.sock')}"
    request = wire.encode_request(method, dict(params or {}))
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError) as exc:
            missing = isinstance(exc, FileNotFoundError)
            elsewhere = ", unless its mps.runRoot is another: name that with --run-root or --config" if missing else ""
            raise NotReachableError(
                f"cannot reach `{process}` on {path}: it is not running; start it (its systemd unit or DaemonSet, "
                f"or `{process}`) and see its log{elsewhere}"
            ) from exc
        except PermissionError as exc:
            raise GpufracError(f"cannot reach `{process}` on {path}: permission denied; call it as root") from exc
        except TimeoutError as exc:
            raise _hangs(process, path, timeout_s) from exc
        except OSError as exc:
            raise NotReachableError(f"cannot reach `{process}` on {path}: {exc.strerror or exc}") from exc
        try:
            # A server that refuses a peer answers before it reads: that answer is still to be had.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(request)
            line = LineReader(connection, wire.MAX_ANSWER_BYTES).line(deadline_s)
        except TimeoutError as exc:
            raise _hangs(process, path, timeout_s) from exc
        except OSError as exc:
            raise NotReachableError(f"cannot finish the call of `{process}` on {path}: {exc.strerror or exc}") from exc
    if line is None:
        raise NotReachableError(f"cannot finish the call of `{process}` on {path}: it went away; see its log")
    return wire.decode_answer(line, result_type)


def _hangs(process: str, path: str, timeout_s: float) -> NotReachableError:
    text = f"cannot reach `{process}` on {path}: no answer within {timeout_s:g} s; see its log, restart it if it hangs"
    return NotReachableError(text)
