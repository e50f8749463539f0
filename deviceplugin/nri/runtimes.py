"""What is known of container runtimes by their name and version (pure)."""

import re
from dataclasses import dataclass

from deviceplugin.nri.model import REQUEST_TIMEOUT_S, Runtime
from mpsd.common.reason import Code, Reason

_CDI_FROM_PLUGINS_SINCE = {"containerd": (2, 1), "cri-o": (1, 34)}
"""First versions whose NRI takes CDI devices from plugins (NRI 0.7)."""
_CDI_WINS_SINCE = {"cri-o": (1, 34)}
"""CRI-O put a container's own environment over that of its CDI devices until its pull request 9292 (2025-06-27, 1.34).
A later release of an older branch may have the fix, which its version does not tell."""
CDI_WINS_IN = "containerd, or CRI-O 1.34 or newer"
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


class RuntimeCode(Code):
    """What a container runtime does that keeps limits from holding."""

    POD_ENVIRONMENT_WINS = (
        "PodEnvironmentWins",
        "The container runtime lets a pod's environment override that of its CDI device.",
        "Upgrade the runtime, or accept the resource unenforced.",
    )


def takes_cdi(runtime: Runtime, *, unknown: bool = False) -> bool:
    """Whether a runtime injects CDI devices that a plugin names.

    Args:
        unknown: the answer for one whose name or version tells nothing. We don't ask such a one to.
    """
    since = _CDI_FROM_PLUGINS_SINCE.get(runtime.name.lower())
    return unknown if since is None or _VERSION.match(runtime.version) is None else at_least(runtime, since)


def starts_wait(runtime: Runtime) -> bool:
    """Whether a start that we refuse does not happen. CRI-O logs the refusal and starts the container (cri-o main,
    server/nri-api.go); one we don't know is not trusted to wait."""
    return runtime.name.lower() == "containerd"


def cdi_loses(runtime: Runtime | None) -> Reason | None:
    """Why a pod's and an image's environment beats that of a CDI device; None where it is not known to: what a runtime
    really did is looked at in each container."""
    since = _CDI_WINS_SINCE.get(runtime.name.lower()) if runtime is not None else None
    if runtime is None or since is None or at_least(runtime, since):
        return None
    return Reason(
        RuntimeCode.POD_ENVIRONMENT_WINS,
        f"{runtime.name} {runtime.version} lets the environment of a pod and its image override that of CDI devices, "
        f"and so a limit: use {CDI_WINS_IN}, or configure `annotations`, whose NRI plugin sets it last",
    )


@dataclass(frozen=True, slots=True)
class Traits:
    """What of a runtime decides how its containers are made and looked at."""

    takes_cdi: bool = False
    """It injects CDI devices that a plugin names."""
    pods_win: bool = False
    """A pod's environment beats that of its CDI devices, so that shares, too, get theirs from our NRI plugin."""
    has_sandbox_processes: bool = True
    """A sandbox has a process of its own, and one without has ended."""
    patience: float = 1.0
    """The time it gives us for an answer, as a part of the default and at most all of it."""


def traits(runtime: Runtime) -> Traits:
    """Of a runtime as it introduced itself."""
    return Traits(
        takes_cdi=takes_cdi(runtime),
        pods_win=cdi_loses(runtime) is not None,
        has_sandbox_processes=runtime.name.lower() == "containerd",  # others may have none
        patience=min(1.0, runtime.request_timeout_s / REQUEST_TIMEOUT_S),
    )


def at_least(runtime: Runtime, since: tuple[int, int]) -> bool:
    """Whether a runtime is of that version or newer; one that names none is not."""
    version = _VERSION.match(runtime.version)
    return version is not None and (int(version[1]), int(version[2])) >= since
