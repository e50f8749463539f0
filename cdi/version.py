"""Which CDI version a spec needs (pure).

A runtime ignores a whole file that is newer than its library, or older than its own fields allow, so files carry the
lowest version that covers them (verified with the CDI library 1.1.0).
"""

from collections.abc import Callable, Iterator

from cdi.model import ContainerEdits, Spec

KNOWN_VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""Oldest first. Readers take these strings only, with an optional leading `v`."""


def _all_edits(spec: Spec) -> Iterator[ContainerEdits]:
    yield spec.container_edits
    for device in spec.devices:
        yield device.container_edits


def _needs_1_1(spec: Spec) -> bool:
    """Network devices, and the newer RDT fields."""
    return any(
        e.net_devices or (e.intel_rdt is not None and (e.intel_rdt.schemata or e.intel_rdt.enable_monitoring))
        for e in _all_edits(spec)
    )


def _needs_0_7(spec: Spec) -> bool:
    """RDT, additional groups."""
    return any(e.intel_rdt is not None or e.additional_gids for e in _all_edits(spec))


def _needs_0_6(spec: Spec) -> bool:
    """Annotations, and a dot in the class."""
    return bool(spec.annotations or any(d.annotations for d in spec.devices) or "." in spec.kind.partition("/")[2])


def _needs_0_5(spec: Spec) -> bool:
    """Host paths of device nodes, and device names that start with a digit."""
    return any(not d.name[:1].isalpha() for d in spec.devices) or any(
        node.host_path for e in _all_edits(spec) for node in e.device_nodes
    )


def _needs_0_4(spec: Spec) -> bool:
    """Mount types."""
    return any(mount.type for e in _all_edits(spec) for mount in e.mounts)


_NEEDS: tuple[tuple[str, Callable[[Spec], bool]], ...] = (
    ("1.1.0", _needs_1_1),
    ("0.7.0", _needs_0_7),
    ("0.6.0", _needs_0_6),
    ("0.5.0", _needs_0_5),
    ("0.4.0", _needs_0_4),
)
"""Newest first: the first that holds decides. 0.8.0 and 1.0.0 brought no fields."""


def minimum_version(spec: Spec) -> str:
    """The lowest CDI version whose readers accept this spec."""
    return next((version for version, needed in _NEEDS if needed(spec)), KNOWN_VERSIONS[0])


def parse_version(text: str) -> str | None:
    """The known version that `text` names, None when a reader would not know it."""
    version = text.removeprefix("v")
    return version if version in KNOWN_VERSIONS else None


def is_older(version: str, other: str) -> bool:
    """Whether one known version came before another."""
    return KNOWN_VERSIONS.index(version) < KNOWN_VERSIONS.index(other)
