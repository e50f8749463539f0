"""The methods of mpsd, for the plugin and the command line."""

from collections.abc import Sequence
from typing import Any

from mpsd.localapi import wire
from mpsd.localapi.call import TIMEOUT_S, call
from mpsd.localapi.snapshot import Desired, GpuClients, LimitQuery, LimitReading, Snapshot


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
