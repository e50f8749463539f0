"""All CDI devices of a node, as a container runtime's library finds them in its directories (pure; `scan` reads them).

Rules as in the CDI library 1.1.0, verified with
it or with podman 4.3.1: only `*.json` and `*.yaml` directly in a directory, dot-files included; a broken file hurts
only itself; a later directory overrides an earlier one for the same device; a device that two files of one directory
define is unusable whatever another directory says, while other devices of these files stay.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cdi import names
from cdi.errors import InvalidNameError
from cdi.model import Device, Spec

DEFAULT_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
GPU_KINDS = ("nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu")
"""Kinds that name whole GPUs: of NVIDIA's container toolkit, and of its device plugin."""
MEMORY_HOOK = "apply-cuda-memory-limits"
"""In the arguments of the container toolkit's createRuntime hook that sets a container's memory limits before its
process starts, from NVIDIA_GPU_MEMORY_REQUEST and NVIDIA_GPU_MEMORY_LIMIT in its environment (NVIDIA container toolkit,
cuda-memory-limits)."""
_SHOWN = 5


class SpecFile(msgspec.Struct, frozen=True):
    """A file a runtime takes. `priority` is the place of its directory in the list; the highest wins."""

    path: str
    priority: int
    version: str
    spec: Spec


class BrokenFile(msgspec.Struct, frozen=True):
    """A file or directory a runtime ignores, and why."""

    path: str
    faults: tuple[str, ...]


class Found(msgspec.Struct, frozen=True):
    """A device that can be injected, and the file that defines it."""

    name: str
    device: Device
    file: SpecFile


class NotFound(msgspec.Struct, frozen=True):
    """A device that can't, and why: one line for an operator."""

    name: str
    reason: str


class Registry(msgspec.Struct, frozen=True):
    """The devices of a node by qualified name. `conflicts`: device -> the files of one directory that all define it."""

    directories: tuple[str, ...] = DEFAULT_DIRECTORIES
    files: tuple[SpecFile, ...] = ()
    broken: tuple[BrokenFile, ...] = ()
    devices: Mapping[str, Found] = msgspec.field(default_factory=dict)
    conflicts: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)

    @property
    def errors(self) -> dict[str, tuple[str, ...]]:
        """Path -> everything wrong there, conflicts included."""
        errors = {broken.path: list(broken.faults) for broken in self.broken}
        for name, paths in self.conflicts.items():
            for path in paths:
                errors.setdefault(path, []).append(f"device {name} is also defined in {_others(path, paths)}")
        return {path: tuple(faults) for path, faults in errors.items()}

    def resolve(self, qualified: str) -> Found | NotFound:
        """The device of a qualified name, or why there is none."""
        if found := self.devices.get(qualified):
            return found
        try:
            kind = names.parse_qualified(qualified).kind
        except InvalidNameError as exc:
            return NotFound(qualified, str(exc))
        if paths := self.conflicts.get(qualified):
            return NotFound(qualified, f"defined more than once in one directory: {', '.join(paths)}; keep one")
        known = self.devices_of(kind)
        if not known:
            return NotFound(qualified, f"no spec of kind {kind} in {', '.join(self.directories)}{self._broken_hint()}")
        return NotFound(qualified, f"kind {kind} has only {_list(known)}{self._broken_hint()}")

    def devices_of(self, kind: str) -> tuple[str, ...]:
        """Device names of a kind that can be injected, sorted."""
        return tuple(sorted(found.device.name for name, found in self.devices.items() if name.startswith(f"{kind}=")))

    def _broken_hint(self) -> str:
        if not self.broken:
            return ""
        return "; ignored: " + "; ".join(f"{b.path} ({b.faults[0]})" for b in self.broken[:_SHOWN])


class GpuKind(msgspec.Struct, frozen=True):
    """The kind whose devices name every asked GPU by UUID. `kind` None: there is none, `reasons` says why by UUID.
    `hooked`: all kinds that name every GPU and set memory limits; see `sets_limits`."""

    kind: str | None
    reasons: Mapping[str, str] = msgspec.field(default_factory=dict)
    hooked: frozenset[str] = frozenset()

    def qualified(self, uuid: str) -> str:
        """The qualified name of a GPU. Only where a kind was found."""
        assert self.kind is not None
        return f"{self.kind}={uuid}"


def build(files: Iterable[SpecFile | BrokenFile], directories: Sequence[str] = DEFAULT_DIRECTORIES) -> Registry:
    """The registry of files that were read, in any order."""
    entries = list(files)
    good = sorted((f for f in entries if isinstance(f, SpecFile)), key=lambda f: (f.priority, f.path))
    devices: dict[str, Found] = {}
    conflicts: dict[str, list[str]] = {}
    for file in good:
        for device in file.spec.devices:
            name = f"{file.spec.kind}={device.name}"
            other = devices.get(name)
            if other is not None and other.file.priority == file.priority:
                paths = conflicts.setdefault(name, [])
                paths += [path for path in (other.file.path, file.path) if path not in paths]
            else:
                devices[name] = Found(name, device, file)
    return Registry(
        directories=tuple(directories),
        files=tuple(good),
        broken=tuple(f for f in entries if isinstance(f, BrokenFile)),
        devices={name: found for name, found in devices.items() if name not in conflicts},
        conflicts={name: tuple(paths) for name, paths in conflicts.items()},
    )


def sets_limits(found: Found) -> bool:
    """Whether the device, or its file for all devices, carries the toolkit's hook for memory limits."""
    hooks = (*found.device.container_edits.hooks, *found.file.spec.container_edits.hooks)
    return any(MEMORY_HOOK in hook.args for hook in hooks)


def find_gpu_kind(
    registry: Registry, uuids: Iterable[str], kinds: Sequence[str] = GPU_KINDS, *, prefer_hooked: bool = False
) -> GpuKind:
    """The first of `kinds` with a device named after each GPU's UUID.

    Devices of an index are not taken: an index is not stable, and the files may be older than the order of GPUs now.

    Args:
        prefer_hooked: one that sets memory limits on every GPU comes before the others.
    """
    asked = tuple(dict.fromkeys(uuids))
    missing = {
        kind: [uuid for uuid in asked if isinstance(registry.resolve(f"{kind}={uuid}"), NotFound)] for kind in kinds
    }
    complete = [kind for kind in kinds if not missing[kind]]
    hooked = frozenset(
        kind for kind in complete if all(sets_limits(registry.devices[f"{kind}={uuid}"]) for uuid in asked)
    )
    if complete:
        preferred = [kind for kind in complete if kind in hooked] if prefer_hooked else []
        return GpuKind((preferred or complete)[0], hooked=hooked)
    # The kind that gets closest is the one to repair; one that is absent altogether only when all are.
    present = [kind for kind in kinds if registry.devices_of(kind) or _conflicting(registry, kind)]
    nearest = min(present or kinds, key=lambda kind: len(missing[kind]), default=None)
    if nearest is None:
        return GpuKind(None, dict.fromkeys(asked, "no kind to look in"))
    return GpuKind(None, {uuid: _why_no_gpu(registry, nearest, uuid) for uuid in missing[nearest]})


def _why_no_gpu(registry: Registry, kind: str, uuid: str) -> str:
    name = f"{kind}={uuid}"
    known = registry.devices_of(kind)
    answer = registry.resolve(name)
    assert isinstance(answer, NotFound)
    if name in registry.conflicts or not names.is_qualified(name):
        return answer.reason
    if not known:
        return f"{answer.reason}; generate one with: nvidia-ctk cdi generate --device-name-strategy=uuid"
    if not any(device.startswith(("GPU-", "MIG-")) for device in known):
        return (
            f"kind {kind} names devices by index only ({_list(known)}); generate its spec with the UUID names: "
            "nvidia-ctk cdi generate --device-name-strategy=uuid"
        )
    return f"{answer.reason}; its spec is older than this GPU, generate it again"


def _conflicting(registry: Registry, kind: str) -> bool:
    return any(name.startswith(f"{kind}=") for name in registry.conflicts)


def _others(path: str, paths: tuple[str, ...]) -> str:
    return ", ".join(other for other in paths if other != path)


def _list(values: Sequence[str]) -> str:
    shown = ", ".join(values[:_SHOWN])
    return shown if len(values) <= _SHOWN else f"{shown} and {len(values) - _SHOWN} more"
