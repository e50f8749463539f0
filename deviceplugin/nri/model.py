"""What a container runtime tells over NRI and what is answered: values, and the calls a front end takes."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, Protocol

import msgspec


class ContainerState(IntEnum):
    """As in nri.pkg.api.v1alpha1; numbers we don't know count as UNKNOWN."""

    UNKNOWN = 0
    CREATED = 1
    PAUSED = 2
    RUNNING = 3
    STOPPED = 4


class Mount(msgspec.Struct, frozen=True):
    """Inside <- outside."""

    destination: str
    source: str = ""
    type: str = "bind"
    options: tuple[str, ...] = ()


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod's sandbox. `annotations` are those of the pod when the sandbox was made: later edits are not seen. `pid` is
    that of the process that holds its namespaces, 0 where the runtime does not tell. `runtime_handler` is what its
    RuntimeClass names, empty for the runtime's default."""

    id: str
    name: str
    uid: str
    namespace: str
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    cgroup_parent: str = ""
    pid: int = 0
    runtime_handler: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container as the runtime is about to make it, or made it. `env` holds `NAME=VALUE` entries, maybe the same name
    twice: the last one counts. `cgroups_path` is spelled as in an OCI spec: `slice:prefix:id` with the systemd driver,
    else a path."""

    id: str
    pod_id: str
    name: str
    state: ContainerState = ContainerState.UNKNOWN
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    cgroups_path: str = ""
    pid: int = 0
    cdi_devices: tuple[str, ...] = ()
    user_namespace: bool = False

    def variable(self, name: str) -> str | None:
        """The value of an environment variable: that of the last entry."""
        prefix = f"{name}="
        return next((e.removeprefix(prefix) for e in reversed(self.env) if e.startswith(prefix)), None)


class Adjustment(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to a container that is being created. What is removed goes first, so a name may be in both."""

    removed_env: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    removed_mounts: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()


REQUEST_TIMEOUT_S: Final = 2.0
"""How long a runtime waits by default, and one that does not tell (plugin_request_timeout)."""


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime as it introduced itself. `request_timeout_s`: how long it waits for an answer before it goes on
    without us."""

    name: str
    version: str
    request_timeout_s: float = REQUEST_TIMEOUT_S


class Refused(Exception):  # noqa: N818 - what it says, not that something broke
    """A container may not be created or started now. The text reaches the pod's events; the kubelet tries again."""


Inventory = tuple[Sequence[Pod], Sequence[Container]]


class Handler(Protocol):
    """A front end. Calls come one at a time and in the runtime's order, from a thread of the session's; each must be
    over within the session's budget, or is answered without it (creations and starts: refused)."""

    def concerns(self, pod: Pod, container: Container) -> bool:
        """Whether a creation or start needs us at all: pure, at once, from any thread. The others are answered without
        waiting for whatever else is going on."""
        ...

    def brief(self, pods: Sequence[Pod], containers: Sequence[Container]) -> "Inventory":
        """What of a part of all there is shall be remembered until the rest has come: pure, at once, from any thread.
        All together may be hundreds of MiB, most of it written by tenants."""
        ...

    def connected(self, runtime: Runtime) -> None:
        """A runtime was found. Nothing is known of its pods until `synchronize`."""

    def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> None:
        """All there is; what is not in it is gone."""

    def run_pod(self, pod: Pod) -> None: ...
    def stop_pod(self, pod: Pod) -> None: ...
    def remove_pod(self, pod: Pod) -> None: ...

    def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """Raises Refused."""

    def start_container(self, pod: Pod, container: Container) -> None:
        """The container's cgroup is there, its program has not begun. Raises Refused."""

    def stop_container(self, pod: Pod, container: Container) -> None:
        """Its processes have ended, by themselves or not."""

    def remove_container(self, pod: Pod, container: Container) -> None: ...

    def disconnected(self, reason: str) -> None:
        """From now on nothing is known of what the runtime does."""
