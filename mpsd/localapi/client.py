"""The calling side of the local API: used by the plugin and the command line. One connection per call."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from mpsd.common.errors import GpufracError, NotReachableError
from mpsd.localapi import wire
from mpsd.localapi.lines import LineReader
from mpsd.localapi.snapshot import Desired, GpuClients, LimitQuery, LimitReading, Snapshot

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


class MpsdClient:
    """The methods of `gpufrac mpsd`. Raises as call() does; keeps no connection."""

    def __init__(self, path: str, timeout_s: float = TIMEOUT_S) -> None:
        self._path, self._timeout_s = path, timeout_s

    def snapshot(self) -> Snapshot:
        """The node as mpsd sees it now. Raises GpufracError."""
        return call(self._path, "snapshot", None, Snapshot, self._timeout_s)

    def watch(self, instance: str, generation: int, timeout_s: float) -> Snapshot:
        """The snapshot, as soon as it is another than the one named, or after the time (at most 30 s).

        `instance` and `generation` are those of the snapshot already known, "" and 0 when there is none.
        """
        timeout_s = max(0.0, min(timeout_s, wire.MAX_BLOCK_S))
        params = {"instance": instance, "generation": generation, "timeout_s": timeout_s}
        return call(self._path, "watch", params, Snapshot, timeout_s + self._timeout_s)

    def apply(self, desired: Desired) -> None:
        """Hands over the whole desired state."""
        call(self._path, "apply", {"desired": desired}, object, self._timeout_s)

    def desired(self) -> Desired:
        """The desired state that was handed over last, by whomever."""
        return call(self._path, "desired", None, Desired, self._timeout_s)

    def clients(self, uuids: Sequence[str], timeout_s: float = TIMEOUT_S) -> dict[str, GpuClients]:
        """Who uses these GPUs, looked up now: GPU UUID -> its clients, or why that can't be told of this GPU."""
        # mpsd gives up on a hung GPU first, so that what the others said still gets here.
        params = {"uuids": tuple(uuids), "timeout_s": 0.8 * timeout_s}
        return call(self._path, "clients", params, dict[str, GpuClients], timeout_s)

    def limits(self, queries: Sequence[LimitQuery]) -> list[LimitReading]:
        """The memory limits in force for cgroups, in the order asked."""
        params = {"queries": tuple(queries), "timeout_s": 0.8 * self._timeout_s}
        return call(self._path, "limits", params, list[LimitReading], self._timeout_s)

    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading:
        """Sets the memory limits of a cgroup on one GPU and reads them back; soft 0 and hard None clear them."""
        params = {
            "gpu": gpu,
            "cgroup": cgroup,
            "soft_bytes": soft_bytes,
            "hard_bytes": hard_bytes,
            "timeout_s": 0.8 * self._timeout_s,
        }
        return call(self._path, "set_limits", params, LimitReading, self._timeout_s)

    def status(self) -> dict[str, Any]:
        """Facts about the process itself, for people."""
        return call(self._path, "status", None, dict[str, Any], self._timeout_s)
