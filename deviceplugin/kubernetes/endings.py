"""Takes pods that are being deleted off their GPUs before the kubelet kills them.

A process that is killed with GPU work in flight can wedge the MPS server of its neighbours (drivers before r625). The
runtime tells of a stop only when the processes are gone, so the hint is the pod's deletionTimestamp: shortly before its
grace ends, the MPS daemon is told to destroy the contexts of those that still have some.
"""

import heapq
import threading
import time
from collections.abc import Callable, Collection, Sequence

from deviceplugin.grants.reader import Reader
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.threads import GuardedThread

log = get_logger("plugin")

MARGIN_S = 3.0
"""How long before the end of its grace a pod's clients are terminated."""
CLOSE_S = 1.0
"""How long a call under way is waited for at the end."""


class Endings:
    """One thread that waits for graces to end.

    Args:
        terminate: (allocation keys, pod UIDs): has mpsd terminate their MPS clients; raises GpufracError.
    """

    def __init__(
        self,
        reader: Reader,
        terminate: Callable[[Sequence[str], Sequence[str]], object],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader, self._terminate, self._monotonic = reader, terminate, monotonic
        self._changed = threading.Condition()
        self._due: list[tuple[float, str]] = []
        self._stopped = False
        self._thread = GuardedThread(self._run, "endings")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def deleting(self, pod_uid: str, grace_s: float) -> None:
        """A pod is being deleted, and will be killed after this time."""
        if not self._keys([pod_uid]):
            return
        with self._changed:
            heapq.heappush(self._due, (self._monotonic() + max(0.0, grace_s - MARGIN_S), pod_uid))
            self._changed.notify_all()

    def _keys(self, pod_uids: Collection[str]) -> list[str]:
        """Their allocations that have a daemon."""
        pods = self._reader.pods()
        return [
            a.key
            for a in self._reader.allocations()
            if a.needs_daemon and any(u in pods.get(a.key, ()) for u in pod_uids)
        ]

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and not (self._due and self._due[0][0] <= self._monotonic()):
                    self._changed.wait(self._due[0][0] - self._monotonic() if self._due else None)
                if self._stopped:
                    return
                now_s = self._monotonic()
                due = []
                while self._due and self._due[0][0] <= now_s:  # a drain of the node ends many at once
                    due.append(heapq.heappop(self._due)[1])
            try:
                if keys := self._keys(due):
                    self._terminate(keys, due)
            except GpufracError as error:
                log.warning("cannot take pods off their GPUs before they are killed", pods=len(due), error=str(error))
            except Exception:
                log.exception("taking pods off their GPUs failed and goes on")
