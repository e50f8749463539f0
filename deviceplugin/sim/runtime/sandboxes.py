"""The container runtime's memory of pods and containers, and what it tells NRI plugins of them.

As containerd 2.1.9 was seen to: a pod's annotations are those it had when its sandbox was made; a container that could
not be created is removed at once, also when it was a plugin that refused; one that could not be started has ended; what
has ended is not shown to a plugin that comes. Of the containers that ended, the last of each name is kept until the
next one ends or the pod goes (the kubelet's garbage collection). Thread-safe.
"""

import contextlib
import hashlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from deviceplugin.nri.model import Adjustment, Container, ContainerState, Pod
from deviceplugin.sim.objects.pods import PodSpec
from deviceplugin.sim.runtime.nri import NriError

Inventory = tuple[Sequence[Pod], Sequence[Container]]

_RUNTIME_KEYS = "io.kubernetes.cri."
_RECORDED_S = 0.05
"""Ample time to record a container that plugins have had their say on."""


class Nri(Protocol):
    """The runtime's side of NRI: `runtime.nri.NriRuntime`. Calls raise NriError where a plugin refuses."""

    @property
    def plugins(self) -> Sequence[str]: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def wait_plugin(self, timeout_s: float) -> bool: ...
    def run_pod(self, pod: Pod) -> None: ...
    def stop_pod(self, pod: Pod) -> None: ...
    def remove_pod(self, pod: Pod) -> None: ...
    def create_container(self, pod: Pod, container: Container) -> Adjustment: ...
    def start_container(self, pod: Pod, container: Container) -> None: ...
    def stop_container(self, pod: Pod, container: Container) -> None: ...
    def remove_container(self, pod: Pod, container: Container) -> None: ...


NriFactory = Callable[[Callable[[], Inventory]], Nri]
"""Makes the runtime's side of NRI, from what shows all pods and containers."""


@dataclass(slots=True)
class _Entry:
    container: Container
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def now(self) -> Container:
        """The container with the state its process is in."""
        if self.process is not None and self.process.poll() is not None:
            return msgspec.structs.replace(self.container, state=ContainerState.STOPPED)
        return self.container


class Sandboxes:
    """See the module.

    Args:
        nri: None: nobody is told.
    """

    def __init__(self, nri: NriFactory | None) -> None:
        self._lock = threading.Lock()
        self._creating = threading.Lock()
        self._pods: dict[str, Pod] = {}
        self._entries: dict[str, _Entry] = {}
        self._made = 0
        self.nri = nri(self.inventory) if nri is not None else None

    def inventory(self) -> Inventory:
        """All pods, and all containers that have not ended. Plugins are not asked anything meanwhile."""
        # Whoever holds this lock longer has not got round to ask plugins, and has nothing to show yet.
        if self._creating.acquire(timeout=_RECORDED_S):
            self._creating.release()
        with self._lock:
            containers = [entry.now for entry in self._entries.values()]
            return tuple(self._pods.values()), tuple(c for c in containers if c.state is not ContainerState.STOPPED)

    def run(self, spec: PodSpec, uid: str, cgroup_parent: str) -> Pod:
        """A pod's sandbox, made where there is none. Raises NriError."""
        with self._lock:
            if (known := self._pods.get(uid)) is not None:
                return known
            pod = _pod(spec, uid, cgroup_parent)
            self._pods[uid] = pod
        if self.nri is not None:
            try:
                self.nri.run_pod(pod)
            except NriError:
                self.remove(uid)
                raise
        return pod

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Held from before plugins are asked for a container until that is recorded: a plugin that comes meanwhile is
        either asked or told of it."""
        with self._creating:
            yield

    def new_id(self, uid: str, name: str) -> str:
        """The ID of a container that is about to be created; of those that ended, all but the last are removed."""
        ended = [entry.now for entry in self._of(uid, name) if entry.now.state is ContainerState.STOPPED]
        for container in ended[:-1]:
            self._remove(container)
        with self._lock:
            self._made += 1
            return hashlib.sha256(f"{uid}/{name}/{self._made}".encode()).hexdigest()

    def create(self, container: Container) -> Adjustment:
        """What plugins change in a container. Raises NriError."""
        if self.nri is None:
            return Adjustment()
        return self.nri.create_container(self._pod_of(container), container)

    def created(self, container: Container) -> None:
        """The container is there, with everything that plugins changed."""
        with self._lock:
            self._entries[container.id] = _Entry(msgspec.structs.replace(container, state=ContainerState.CREATED))

    def undo(self, container: Container) -> None:
        """It could not be created."""
        self._tell(lambda nri: nri.remove_container(self._pod_of(container), container))

    def starting(self, identifier: str) -> None:
        """Asks plugins whether a container may start. Raises NriError: then it has ended."""
        with self._lock:
            entry = self._entries.get(identifier)
        if self.nri is None or entry is None:
            return
        self.nri.start_container(self._pod_of(entry.container), entry.container)

    def started(self, identifier: str, process: "subprocess.Popen[bytes]") -> None:
        """Its process runs."""
        with self._lock:
            if (entry := self._entries.get(identifier)) is not None:
                entry.process = process
                entry.container = msgspec.structs.replace(
                    entry.container, state=ContainerState.RUNNING, pid=process.pid
                )

    def stopped(self, uid: str, name: str = "") -> None:
        """A container of a pod has ended, or all of them."""
        for entry in self._of(uid, name):
            with self._lock:
                ends = entry.container.state is not ContainerState.STOPPED
                entry.process = None
                entry.container = msgspec.structs.replace(entry.container, state=ContainerState.STOPPED, pid=0)
            if ends:
                self._tell_of(entry.container, "stop")

    def remove(self, uid: str) -> None:
        """A pod goes, with what it had. Its containers have ended."""
        with self._lock:
            pod = self._pods.get(uid)
        if pod is None:
            return
        pod = msgspec.structs.replace(pod, pid=0)
        self._tell(lambda nri: nri.stop_pod(pod))
        for entry in self._of(uid):
            self._remove(entry.now)
        with self._lock:
            self._pods.pop(uid, None)
        own = {key: value for key, value in pod.annotations.items() if not key.startswith(_RUNTIME_KEYS)}
        self._tell(lambda nri: nri.remove_pod(msgspec.structs.replace(pod, annotations=own)))

    def newest(self, uid: str, name: str) -> str:
        """The ID of a pod's newest container of that name, empty for none."""
        return next((entry.container.id for entry in reversed(self._of(uid, name))), "")

    def _of(self, uid: str, name: str = "") -> list[_Entry]:
        with self._lock:
            return [
                entry
                for entry in self._entries.values()
                if entry.container.pod_id == sandbox_id(uid) and name in ("", entry.container.name)
            ]

    def _remove(self, container: Container) -> None:
        with self._lock:
            self._entries.pop(container.id, None)
        self._tell_of(container, "remove")

    def _tell_of(self, container: Container, what: Literal["stop", "remove"]) -> None:
        pod = self._pod_of(container)
        self._tell(lambda nri: (nri.stop_container if what == "stop" else nri.remove_container)(pod, container))

    def _tell(self, tell: Callable[[Nri], None]) -> None:
        """News that no plugin can object to."""
        if self.nri is not None:
            with contextlib.suppress(NriError):
                tell(self.nri)

    def _pod_of(self, container: Container) -> Pod:
        with self._lock:
            return next(pod for pod in self._pods.values() if pod.id == container.pod_id)


def sandbox_id(uid: str) -> str:
    """The ID of a pod's sandbox."""
    return hashlib.sha256(f"sandbox/{uid}".encode()).hexdigest()


def container_keys(pod: Pod, name: str, identifier: str) -> tuple[dict[str, str], dict[str, str]]:
    """Labels that the kubelet gives a container, and annotations that containerd does."""
    labels = {
        "io.kubernetes.container.name": name,
        "io.kubernetes.pod.name": pod.name,
        "io.kubernetes.pod.namespace": pod.namespace,
        "io.kubernetes.pod.uid": pod.uid,
    }
    annotations = {
        f"{_RUNTIME_KEYS}container-name": name,
        f"{_RUNTIME_KEYS}container-type": "container",
        f"{_RUNTIME_KEYS}sandbox-id": pod.id,
        f"{_RUNTIME_KEYS}sandbox-name": pod.name,
        f"{_RUNTIME_KEYS}sandbox-namespace": pod.namespace,
        f"{_RUNTIME_KEYS}sandbox-uid": pod.uid,
    }
    return labels, annotations


def _pod(spec: PodSpec, uid: str, cgroup_parent: str) -> Pod:
    identifier = sandbox_id(uid)
    return Pod(
        id=identifier,
        name=spec.name,
        uid=uid,
        namespace=spec.namespace,
        labels={
            **spec.labels,
            "io.kubernetes.pod.name": spec.name,
            "io.kubernetes.pod.namespace": spec.namespace,
            "io.kubernetes.pod.uid": uid,
        },
        annotations={
            **spec.annotations,
            f"{_RUNTIME_KEYS}container-type": "sandbox",
            f"{_RUNTIME_KEYS}sandbox-id": identifier,
            f"{_RUNTIME_KEYS}sandbox-name": spec.name,
            f"{_RUNTIME_KEYS}sandbox-namespace": spec.namespace,
            f"{_RUNTIME_KEYS}sandbox-uid": uid,
        },
        cgroup_parent=cgroup_parent,
        runtime_handler=spec.runtime_class,
        pid=os.getpid(),  # stands for the pause process: it lives as long as the sandbox
    )
