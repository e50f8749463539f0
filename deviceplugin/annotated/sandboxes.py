"""The sandboxes of pods: which there are, by what the runtime says and by their processes.

A runtime that was restarted no longer says that a sandbox from before was stopped (containerd 2.1.9), so the process
that holds a sandbox's namespaces is watched, too: once it was seen to be the pod's, its end is the sandbox's, unless
something of the pod runs on. Some runtimes have no such process; then only their word counts. Thread-safe.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from deviceplugin.nri.model import Container, Pod
from mpsd import processes

Identity = tuple[int, int]
"""PID and start time."""


def holder(pod: Pod) -> Identity | None:
    """The process that holds a sandbox's namespaces, None where none is known to be this pod's."""
    started = processes.start_time(pod.pid) if pod.pid > 0 else None
    return (pod.pid, started) if started is not None and processes.pod_uid_of(pod.pid) == pod.uid else None


def is_alive(identity: Identity) -> bool:
    """Whether that very process is there."""
    return processes.start_time(identity[0]) == identity[1]


class Sandboxes:
    """Args: how processes are looked at, for tests."""

    def __init__(
        self,
        holder: Callable[[Pod], Identity | None] = holder,
        is_alive: Callable[[Identity], bool] = is_alive,
    ) -> None:
        self._holder, self._is_alive = holder, is_alive
        self._lock = threading.Lock()
        self._pods: dict[str, tuple[Pod, Identity | None]] = {}

    def synchronize(self, pods: Sequence[Pod], containers: Iterable[Container]) -> None:
        """All there are. Runtimes show stopped ones, too: those without process and container."""
        used = {container.pod_id for container in containers}
        known = {pod.id: (pod, self._holder(pod)) for pod in pods if pod.pid > 0 or pod.id in used}
        with self._lock:
            self._pods = known

    def run(self, pod: Pod) -> None:
        """One was made."""
        known = (pod, self._holder(pod))
        with self._lock:
            self._pods[pod.id] = known

    def stop(self, pod: Pod) -> str:
        """One was stopped. The UID of its pod when that was its last, else nothing."""
        with self._lock:
            known, _ = self._pods.pop(pod.id, (pod, None))
            return "" if any(other.uid == known.uid for other, _ in self._pods.values()) else known.uid

    def pods(self) -> list[Pod]:
        with self._lock:
            return [pod for pod, _ in self._pods.values()]

    def find(self, sandbox_id: str) -> Pod | None:
        with self._lock:
            found = self._pods.get(sandbox_id)
            return None if found is None else found[0]

    def uids(self) -> set[str]:
        return {pod.uid for pod in self.pods()}

    def vanished(self, running: Callable[[], Collection[str]]) -> list[Pod]:
        """Those whose process ended without a word, and whose pods have no other.

        Args:
            running: UIDs of the pods with processes now; asked only where it matters.
        """
        with self._lock:
            dead = [pod for pod, known in self._pods.values() if known is not None and not self._is_alive(known)]
        if not dead:
            return []
        alive = running()
        return [pod for pod in dead if pod.uid not in alive]
