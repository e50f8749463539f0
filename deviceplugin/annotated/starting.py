"""A container that is being started: its hard limit is set on its cgroup and read back before its program begins."""

from collections.abc import Callable
from typing import Protocol

from deviceplugin.annotated import shares
from deviceplugin.annotated.reasons import AnnotationCode, RefusedError
from deviceplugin.grants.reader import Reader
from deviceplugin.nri.model import Container
from deviceplugin.plan import render
from deviceplugin.plan.allocation import Allocation, ContainerRef
from deviceplugin.plan.start import with_effective_enforcement
from mpsd.common.errors import GpufracError
from mpsd.common.marker import MARKER
from mpsd.common.quantity import format_bytes
from mpsd.config.model import Enforcement
from mpsd.limits.model import same_limit
from mpsd.localapi.snapshot import LimitReading

START_S = 0.9
"""How long a start waits for its limit to be in force, where the runtime has its default patience."""
START_PAUSE_S = 0.05


class Mpsd(Protocol):
    """The one call made to mpsd; raises GpufracError."""

    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading: ...


class Starter:
    """Puts limits in force.

    Args:
        mpsd: answers well within START_S, or fails.
        observe: looks at the kubelet once more; see shares.share_of.
    """

    def __init__(
        self,
        reader: Reader,
        mpsd: Mpsd,
        observe: Callable[[float], object],
        monotonic: Callable[[], float],
        pause: Callable[[float], object],
    ) -> None:
        self._reader, self._mpsd, self._observe = reader, mpsd, observe
        self._monotonic, self._pause = monotonic, pause

    def start(self, ref: ContainerRef, container: Container, patience: float) -> None:
        """Raises GpufracError where the container must not start now.

        Args:
            patience: the part of START_S that there is.
        """
        allocation = with_effective_enforcement(self._planned(ref, container), self._reader.node.hard)
        if allocation.enforcement is not Enforcement.HARD:
            return
        directory = cgroup_directory(self._reader.node.cgroup_root, container.cgroups_path)
        if not directory:
            raise RefusedError(
                AnnotationCode.NO_CGROUP,
                f"the runtime names no cgroup of it that is understood: {container.cgroups_path[:200]!r}",
            )
        deadline_s = self._monotonic() + START_S * patience
        for gpu in allocation.gpus:
            self._limit(gpu, directory, allocation, deadline_s)

    def _planned(self, ref: ContainerRef, container: Container) -> Allocation:
        """What it was created with."""
        planned = self._reader.of_container(ref)
        planned = planned or shares.share_of(self._reader, ref, container, self._observe)
        key = container.variable(MARKER)
        if planned is None or planned.runs_unenforced:
            text = "it was created while gpufrac was not there, so it has no limit: it must be made again"
            raise RefusedError(AnnotationCode.NOT_MADE_BY_US, text)
        if key != planned.key:
            # What a runtime does not know of an answer it drops in silence, such as CDI devices (containerd 1.7.24).
            shown = render.is_key(key) if key else False
            raise RefusedError(
                AnnotationCode.NOT_MADE_BY_US,
                f"it was created without what gpufrac gave it (its {MARKER} is {key if shown else 'not ours'}): "
                "it must be made again; if that goes on, the container runtime does not apply it",
            )
        if takers := self._reader.takers(planned):
            names = ", ".join(str(taker.container) for taker in takers)
            text = f"its turn went to {names} while it was not known to run: it must be made again"
            raise RefusedError(AnnotationCode.NOT_MADE_BY_US, text)
        return planned

    def _limit(self, gpu: str, directory: str, allocation: Allocation, deadline_s: float) -> None:
        while error := self._set(gpu, directory, allocation):
            if self._monotonic() >= deadline_s:
                raise RefusedError(
                    AnnotationCode.LIMIT_NOT_IN_FORCE,
                    f"its memory limit of {format_bytes(allocation.limit_bytes)} can't be put in force on GPU {gpu}: "
                    f"{error}",
                )
            self._pause(START_PAUSE_S)

    def _set(self, gpu: str, directory: str, allocation: Allocation) -> str:
        """Sets and reads back; why it is not in force, empty when it is."""
        try:
            read = self._mpsd.set_limits(gpu, directory, allocation.soft_bytes, allocation.limit_bytes)
        except GpufracError as error:
            return str(error)
        if not read.error and not same_limit(allocation.limit_bytes, read.hard_bytes):
            return f"it reads back as {'none' if read.hard_bytes is None else format_bytes(read.hard_bytes)}"
        return read.error


def cgroup_directory(root: str, cgroups_path: str) -> str:
    """Directory of the cgroup that an OCI spec's `cgroupsPath` names, empty where it names none.

    With the systemd driver `slice:prefix:name` is the scope `prefix-name.scope`, below a directory for each dash in the
    slice's name (systemd.slice(5); runc's systemd driver).
    """
    if cgroups_path.startswith("/"):
        path = cgroups_path
    else:
        parts = cgroups_path.split(":")
        if len(parts) != 3 or not parts[0].endswith(".slice"):
            return ""
        names = parts[0].removesuffix(".slice").split("-")
        slices = ["-".join(names[: n + 1]) + ".slice" for n in range(len(names))]
        scope = f"{parts[1]}-{parts[2]}.scope" if parts[1] else f"{parts[2]}.scope"
        path = "/" + "/".join([*slices, scope])
    if any(part in ("", ".", "..") for part in path[1:].split("/")):
        return ""
    return root.rstrip("/") + path
