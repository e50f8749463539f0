"""The sandboxes of pods: which there are, by what the runtime says and by their processes.

A runtime that was restarted no longer says that a sandbox from before was stopped (containerd 2.1.9), so the process
that holds a sandbox's namespaces is watched, too: once it was seen to be the pod's, its end is the sandbox's, unless
something of the pod runs on. Some runtimes have no such process; then only their word counts. Thread-safe.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from deviceplugin.nri.model import Container, Pod
from mpsd.common import processes

Identity = tuple[int, int]
"""PID and start time."""


class Sandbox(NamedTuple):
    """`name`: namespace and name of its pod. `process` holds its namespaces; None where none is known to."""

    id: str
    uid: str
    name: str
    process: Identity | None


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
        self._known: dict[str, Sandbox] = {}

    def synchronize(
        self, pods: Sequence[Pod], containers: Iterable[Container], *, pids_tell: bool = True
    ) -> Mapping[str, Pod]:
        """All there are; those that count, by ID.

        Args:
            pids_tell: of this runtime, which shows stopped ones, too, those without process and container are stopped.
        """
        used = {container.pod_id for container in containers}
        alive = {pod.id: pod for pod in pods if pod.pid > 0 or pod.id in used or not pids_tell}
        known = {pod.id: self._sandbox(pod) for pod in alive.values()}
        with self._lock:
            self._known = known
        return alive

    def knows(self, sandbox_id: str) -> bool:
        """Whether the sandbox was made and is not gone."""
        with self._lock:
            return sandbox_id in self._known

    def run(self, pod: Pod) -> None:
        """One was made."""
        sandbox = self._sandbox(pod)
        with self._lock:
            self._known[pod.id] = sandbox

    def stop(self, sandbox_id: str, uid: str) -> str:
        """One was stopped, of the pod with that UID. The UID when that was the pod's last, else nothing."""
        with self._lock:
            known = self._known.pop(sandbox_id, None)
            uid = known.uid if known is not None else uid
            return "" if any(other.uid == uid for other in self._known.values()) else uid

    def vanished(self, running: Callable[[], Collection[str]]) -> list[Sandbox]:
        """Those whose process ended without a word, and whose pods have no other.

        Args:
            running: UIDs of the pods with processes now; asked only where it matters.
        """
        with self._lock:
            watched = [(sandbox, sandbox.process) for sandbox in self._known.values()]
        dead = [sandbox for sandbox, process in watched if process is not None and not self._is_alive(process)]
        if not dead:
            return []
        alive = running()
        return [sandbox for sandbox in dead if sandbox.uid not in alive]

    def _sandbox(self, pod: Pod) -> Sandbox:
        return Sandbox(pod.id, pod.uid, pod.full_name, self._holder(pod))
