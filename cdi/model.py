"""A CDI spec as frozen values: data only. Field notes say which spec version brought a field (none: 0.3.0).

Source: CDI specification 1.1.0. Zero and empty mean absent, as in the Go library. Attribute names are the JSON names
in snake case.
"""

from collections.abc import Mapping

import msgspec

_JSON_NAMES = {"host_path": "hostPath", "container_path": "containerPath", "file_mode": "fileMode"}


class DeviceNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename=_JSON_NAMES):
    """A device node for the container. Without `type` and `major` the runtime looks `host_path` up when it injects."""

    path: str
    host_path: str = ""
    """Where the node is on the host, empty: at `path`. 0.5.0."""
    type: str = ""
    """b, c, u or p; empty: as on the host."""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = ""
    """Some of r, w, m for the device cgroup; empty: all three; `none`: no access."""
    uid: int | None = None
    """None: the container's user, when it is not root."""
    gid: int | None = None


class Mount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename=_JSON_NAMES):
    """A mount for the container. Nothing is implied: a bind mount needs the option `bind` or `rbind`."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""
    """0.4.0."""


class Hook(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename={"hook_name": "hookName"}
):
    """An OCI hook. `args[0]` is the program's name; `timeout` in seconds."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class IntelRdt(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={
        "clos_id": "closID",
        "l3_cache_schema": "l3CacheSchema",
        "mem_bw_schema": "memBwSchema",
        "enable_monitoring": "enableMonitoring",
    },
):
    """Intel RDT settings. 0.7.0; `schemata` and `enable_monitoring` 1.1.0."""

    clos_id: str = ""
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False


class NetDevice(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"host_interface_name": "hostInterfaceName"}
):
    """A host network interface moved into the container. 1.1.0."""

    host_interface_name: str
    name: str


class ContainerEdits(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={
        "device_nodes": "deviceNodes",
        "additional_gids": "additionalGids",
        "intel_rdt": "intelRdt",
        "net_devices": "netDevices",
    },
):
    """What a device changes in a container. `env` entries are `NAME=value`."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    """0.7.0. Runtimes skip 0."""
    intel_rdt: IntelRdt | None = None
    net_devices: tuple[NetDevice, ...] = ()


NO_EDITS = ContainerEdits()


class Device(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"container_edits": "containerEdits"},
):
    """One device of a spec. Its edits must not be empty."""

    name: str
    """A name that starts with a digit needs 0.5.0."""
    container_edits: ContainerEdits = NO_EDITS
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    """0.6.0."""


class Spec(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"container_edits": "containerEdits"},
):
    """One spec file: devices of one kind (`vendor/class`), and edits that apply once if any of them is used.

    The version is not part of it: files are written with the lowest one their fields need.
    """

    kind: str
    """A dot in the class part needs 0.6.0."""
    devices: tuple[Device, ...] = ()
    container_edits: ContainerEdits = NO_EDITS
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    """0.6.0."""
