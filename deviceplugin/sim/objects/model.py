"""What manifests lead to, and what is wrong with one (values)."""

from collections.abc import Iterable
from dataclasses import dataclass

from deviceplugin.sim.objects.pods import PodSpec
from mpsd.common.errors import ConfigError

MAX_PODS = 1000
"""Pods of one run. A real kubelet takes 110 by default."""
MAX_PROBLEMS = 50


@dataclass(frozen=True, slots=True)
class LoadedPod:
    """A pod that a manifest leads to. `source`: `FILE (document N)`; `notes`: what its author may not expect."""

    pod: PodSpec
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """Something in a manifest that leads to no pod here, and why."""

    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"


class ManifestError(ConfigError):
    """Manifests that can't be read or that the API server would refuse: one line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = list(self.problems[:MAX_PROBLEMS])
        if (more := len(self.problems) - MAX_PROBLEMS) > 0:
            lines.append(f"and {more} more problems")
        super().__init__("\n".join(lines))


class RefusedError(Exception):
    """One object is not usable; the text says why."""
