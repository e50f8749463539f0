"""Containers of the simulated runtime: values, and why one can't be made or started."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from deviceplugin.sim.objects.pods import ContainerSpec
from deviceplugin.sim.runtime.edits import Edits
from mpsd.common.errors import TransientError


class CreateContainerError(TransientError):
    """A container can't be created now; the kubelet tries again. The text is what the runtime says.

    `refused`: an NRI plugin refused it.
    """

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class StartContainerError(CreateContainerError):
    """A container was created and can't be started: it has ended. The kubelet makes another one by restartPolicy."""


class State(StrEnum):
    WAITING = "Waiting"
    RUNNING = "Running"
    TERMINATED = "Terminated"


@dataclass(frozen=True, slots=True)
class Created:
    """A container that was created and not started yet."""

    id: str
    pod_uid: str
    name: str
    edits: Edits


@dataclass(slots=True, eq=False)
class Container:
    """A container of an admitted pod. `reason` and `message` say why it waits; `refused_since_s` since when an NRI
    plugin has said so, in the same words."""

    spec: ContainerSpec
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    state: State = State.WAITING
    reason: str = "ContainerCreating"
    message: str = ""
    refused_since_s: float | None = None
    id: str = ""
    edits: Edits | None = None
    process: "subprocess.Popen[bytes] | None" = None
    process_env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    retry_at_s: float = 0.0
    backoff_s: float = 0.0

    @property
    def pid(self) -> int | None:
        """PID of its process, None when there is none or it has ended."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None
