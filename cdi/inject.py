"""What a container gets: CDI devices applied to an OCI runtime spec as a container runtime does it (pure).

Follows the CDI library 1.1.0. Spec-level edits apply once, at the first device of their file; device edits in the order
asked for. Env comes after what the container has and the last entry of a name wins when the process starts (verified
with runc); among the edits themselves a later entry takes the place of an earlier one. Not modelled: the id mapping
that newer libraries add to bind mounts of containers with a user namespace.
"""

import copy
import posixpath
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cdi.errors import DeviceNodeError, UnresolvableError
from cdi.model import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount
from cdi.registry import NotFound, Registry

OciSpec = dict[str, Any]


class HostNode(NamedTuple):
    """A device node of the host: type b, c or p, and its numbers."""

    type: str
    major: int = 0
    minor: int = 0


def apply(
    registry: Registry,
    qualified_names: Iterable[str],
    oci_spec: Mapping[str, Any],
    host_nodes: Mapping[str, HostNode] | None = None,
) -> OciSpec:
    """A new OCI spec with the devices in it; the one given stays as it is.

    Args:
        registry: the devices of the node.
        qualified_names: `vendor/class=device`, in the order of the request.
        oci_spec: the container's `config.json` as plain values.
        host_nodes: the host's nodes by path, for device nodes that carry no numbers.

    Raises:
        UnresolvableError: some device can't be resolved; all such are named.
        DeviceNodeError: a device node has no numbers and is not in `host_nodes`, or is of another type there.
    """
    edits = _collect_edits(registry, qualified_names)
    spec: OciSpec = copy.deepcopy(dict(oci_spec))
    _apply_env(spec, [entry for e in edits for entry in e.env])
    for node in (node for e in edits for node in e.device_nodes):
        _apply_node(spec, node, host_nodes or {})
    _apply_mounts(spec, [mount for e in edits for mount in e.mounts])
    for hook in (hook for e in edits for hook in e.hooks):
        spec.setdefault("hooks", {}).setdefault(hook.hook_name, []).append(_oci_hook(hook))
    for device in (device for e in edits for device in e.net_devices):
        spec.setdefault("linux", {}).setdefault("netDevices", {})[device.host_interface_name] = {"name": device.name}
    if rdts := [e.intel_rdt for e in edits if e.intel_rdt is not None]:
        spec.setdefault("linux", {})["intelRdt"] = _oci_rdt(rdts[-1])
    _apply_groups(spec, [gid for e in edits for gid in e.additional_gids if gid])
    return spec


def effective_env(oci_spec: Mapping[str, Any]) -> dict[str, str]:
    """The environment the container's process starts with: of several entries of one name the last."""
    entries: Iterable[str] = (oci_spec.get("process") or {}).get("env") or ()
    return {name: value for name, separator, value in (e.partition("=") for e in entries) if separator}


def _collect_edits(registry: Registry, qualified_names: Iterable[str]) -> list[ContainerEdits]:
    edits: list[ContainerEdits] = []
    unresolved: dict[str, str] = {}
    seen: set[str] = set()
    for name in qualified_names:
        answer = registry.resolve(name)
        if isinstance(answer, NotFound):
            unresolved[name] = answer.reason
            continue
        if answer.file.path not in seen:
            seen.add(answer.file.path)
            edits.append(answer.file.spec.container_edits)
        edits.append(answer.device.container_edits)
    if unresolved:
        raise UnresolvableError(unresolved)
    return edits


def _apply_env(spec: OciSpec, entries: list[str]) -> None:
    if entries:
        merged = {entry.partition("=")[0]: entry for entry in entries}
        process = spec.setdefault("process", {})
        process["env"] = [*(process.get("env") or ()), *merged.values()]


def _apply_node(spec: OciSpec, node: DeviceNode, host_nodes: Mapping[str, HostNode]) -> None:
    kind, major, minor = _numbers(node, host_nodes)
    user = (spec.get("process") or {}).get("user") or {}
    # A node without an owner goes to the container's user, unless that is root.
    uid = node.uid if node.uid is not None else (user.get("uid") or None)
    gid = node.gid if node.gid is not None else (user.get("gid") or None)
    device = {"path": node.path, "type": kind, "major": major, "minor": minor}
    device |= {k: v for k, v in (("fileMode", node.file_mode), ("uid", uid), ("gid", gid)) if v is not None}
    linux = spec.setdefault("linux", {})
    linux["devices"] = [*(d for d in linux.get("devices") or () if d.get("path") != node.path), device]
    if kind in ("b", "c"):
        rule: dict[str, Any] = {"allow": True, "type": kind, "major": major, "minor": minor}
        if node.permissions != "none":
            rule["access"] = node.permissions or "rwm"
        resources = linux.setdefault("resources", {})
        resources["devices"] = [*(resources.get("devices") or ()), rule]


def _numbers(node: DeviceNode, host_nodes: Mapping[str, HostNode]) -> HostNode:
    if node.type and (node.major or node.type == "p"):
        return HostNode(node.type, node.major, node.minor)
    path = node.host_path or node.path
    host = host_nodes.get(path)
    if host is None:
        raise DeviceNodeError(path, "no such device on the host")
    if node.type and node.type != host.type:
        raise DeviceNodeError(path, f"the spec says type {node.type}, the host {host.type}")
    return HostNode(host.type, node.major, node.minor) if node.major else host


def _apply_mounts(spec: OciSpec, mounts: list[Mount]) -> None:
    if not mounts:
        return
    result = list(spec.get("mounts") or ())
    for mount in mounts:
        result = [*(m for m in result if m.get("destination") != mount.container_path), _oci_mount(mount)]
    spec["mounts"] = sorted(result, key=_depth)


def _depth(mount: Mapping[str, Any]) -> int:
    return posixpath.normpath(mount.get("destination") or ".").count("/")


def _oci_mount(mount: Mount) -> dict[str, Any]:
    added: dict[str, Any] = {"destination": mount.container_path, "source": mount.host_path}
    if mount.type:
        added["type"] = mount.type
    if mount.options:
        added["options"] = list(mount.options)
    return added


def _oci_hook(hook: Hook) -> dict[str, Any]:
    added: dict[str, Any] = {"path": hook.path}
    if hook.args:
        added["args"] = list(hook.args)
    if hook.env:
        added["env"] = list(hook.env)
    if hook.timeout is not None:
        added["timeout"] = hook.timeout
    return added


def _oci_rdt(rdt: IntelRdt) -> dict[str, Any]:
    fields = {
        "closID": rdt.clos_id,
        "l3CacheSchema": rdt.l3_cache_schema,
        "memBwSchema": rdt.mem_bw_schema,
        "schemata": list(rdt.schemata),
        "enableMonitoring": rdt.enable_monitoring,
    }
    return {name: value for name, value in fields.items() if value}


def _apply_groups(spec: OciSpec, gids: list[int]) -> None:
    if gids:
        user = spec.setdefault("process", {}).setdefault("user", {})
        user["additionalGids"] = list(dict.fromkeys([*(user.get("additionalGids") or ()), *gids]))
