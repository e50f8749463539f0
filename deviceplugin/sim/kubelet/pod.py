"""A pod of the stub kubelet's node."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from deviceplugin.sim.kubelet.devicemanager import Held
from deviceplugin.sim.objects.pods import PodSpec, Role
from deviceplugin.sim.runtime.container import Container, State
from deviceplugin.sim.scheduling.placement import Lack
from mpsd.common.errors import GpufracError

START_ERROR = "StartError"


class PodError(GpufracError):
    """No such pod or container, or one of that name is there already."""


class Phase(StrEnum):
    """Of a pod on this node; PENDING: no scheduler gave it to the node."""

    PENDING = "Pending"
    ADMITTED = "Admitted"
    FAILED = "Failed"
    DELETED = "Deleted"


@dataclass(slots=True, eq=False)
class AdmittedPod:
    """A pod of this node. `code`: why our plugin refused it, see docs/reasons.md. `notes`: what a user would be misled
    about otherwise; `given`: devices of other plugins than those that are here, by container and resource; `short`:
    refused for too few devices now; `lacks`: why it is PENDING; `unserved`: resources by container that no plugin
    serves: a kubelet takes no notice of them."""

    spec: PodSpec
    uid: str
    containers: tuple[Container, ...]
    given: Mapping[str, Mapping[str, Held]] = field(default_factory=dict)
    phase: Phase = Phase.ADMITTED
    reason: str = ""
    message: str = ""
    code: str = ""
    notes: list[str] = field(default_factory=list)
    short: bool = False
    lacks: tuple[Lack, ...] = ()
    unserved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def container(self, name: str = "") -> Container:
        """A container by name; without one, the only app container. Raises PodError."""
        apps = [c for c in self.containers if c.spec.role is Role.APP]
        if not name and len(apps) == 1:
            return apps[0]
        for container in self.containers:
            if container.spec.name == name:
                return container
        known = ", ".join(c.spec.name for c in self.containers)
        wanted = f"container {name!r} of pod" if name else "one container of pod"
        raise PodError(f"cannot find {wanted} {self.spec.full_name}: it has {known}; name one of them")

    @property
    def settled(self) -> bool:
        """Whether nothing of it waits any more, but for what never comes."""
        return (
            self.phase is not Phase.ADMITTED or self.stuck or all(c.state is not State.WAITING for c in self.containers)
        )

    @property
    def refused_since_s(self) -> float | None:
        """Since when nothing happens to it but the same refusals of an NRI plugin, None where something else may."""
        since_s: float | None = None
        for container in self.containers:
            if container.state is State.WAITING:
                if container.refused_since_s is None:
                    return None
                since_s = max(since_s or 0.0, container.refused_since_s)
                if container.spec.role is not Role.APP:
                    break  # what comes after has to wait for it
        return since_s

    @property
    def stuck(self) -> bool:
        """Whether an init container failed for good: what comes after it is never made."""
        return any(c.spec.role is not Role.APP and c.reason == START_ERROR for c in self.containers)
