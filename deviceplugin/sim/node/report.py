"""What pods got on a simulated node, as a JSON document and as text (pure)."""

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deviceplugin.annotated.contract import ask_of
from deviceplugin.sim.kubelet.pod import START_ERROR, AdmittedPod, Phase
from deviceplugin.sim.objects.annotations import PREFIX, Asked, asked_of, wanting
from deviceplugin.sim.objects.pods import environment
from deviceplugin.sim.runtime.container import Container, State
from deviceplugin.sim.runtime.edits import Edits
from deviceplugin.sim.scheduling.placement import Lack
from mpsd.common.marker import MARKER
from mpsd.common.quantity import format_bytes
from mpsd.common.text import plain

ANNOTATED = "annotations"
"""Stands for the resource of what a container gets by its pod's annotations."""
_SHOWN_IDS = 8


def document(
    *,
    node: Mapping[str, Any],
    pods: Sequence[AdmittedPod],
    allocations: Iterable[Mapping[str, Any]],
    ours: Sequence[str],
    prefix: str = PREFIX,
    refusing: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The report. What is refused or waits has the `code` of why beside its message, where that is a reason of gpufrac
    (docs/reasons.md).

    Args:
        node: its resources as they were before these pods came, its `fractions` as they are now.
        allocations: as the plugin's local API lists them; a container's is found by its marker, or by its shares, or by
            its name where it has none.
        ours: resources of the plugin under test.
        prefix: of the keys of annotated containers.
        refusing: annotated containers that are refused, as the plugin's status has them.
    """
    listed = list(allocations)
    refused = {(r["namespace"], r["pod"], r["container"]): str(r["reasonCode"]) for r in refusing}
    shown = [_pod(pod, listed, ours, prefix) for pod in pods]
    for entry in shown:
        closed = (node["resources"].get(lack["resource"], {}).get("reasonCode", "") for lack in entry["insufficient"])
        entry["code"] = entry["code"] or next(filter(None, closed), "")
        for container in entry["containers"]:
            if container["state"] == State.WAITING or container["reason"] == START_ERROR:
                name = (entry["namespace"], entry["name"], container["name"])
                container["code"] = refused.get(name) or container["code"]
    return {"node": dict(node), "pods": shown}


def all_well(report: Mapping[str, Any]) -> bool:
    """Whether every pod was admitted, every container was started, and none runs without a limit or a device that it
    asks for."""
    return all(
        pod["phase"] == Phase.ADMITTED
        and all(_started(entry) and not entry["unlimited"] and not entry["without"] for entry in pod["containers"])
        for pod in report["pods"]
    )


def _started(entry: Mapping[str, Any]) -> bool:
    return entry["state"] in (State.RUNNING, State.TERMINATED) and entry["reason"] != START_ERROR


def _pod(pod: AdmittedPod, allocations: list[Mapping[str, Any]], ours: Sequence[str], prefix: str) -> dict[str, Any]:
    containers = [_container(pod, container, allocations, ours, prefix) for container in pod.containers]
    notes = [*pod.notes, *(note for container in pod.containers for note in _edit_notes(pod, container))]
    notes += [note for entry in containers for note in _reduced_notes(pod.spec.annotations, entry, prefix)]
    return {
        "name": pod.spec.name,
        "namespace": pod.spec.namespace,
        "phase": str(pod.phase),
        "reason": pod.reason,
        "message": pod.message,
        "code": pod.code,
        "insufficient": [_lack(lack) for lack in pod.lacks],
        "notes": list(dict.fromkeys(notes)),
        "containers": containers,
    }


def _container(
    pod: AdmittedPod, container: Container, allocations: list[Mapping[str, Any]], ours: Sequence[str], prefix: str
) -> dict[str, Any]:
    admitted = pod.phase is Phase.ADMITTED
    held = container.devices if admitted else {}  # what a refused pod holds is taken back
    devices = {name: held.get(name, ()) for name in sorted(container.spec.resources)}
    edits = container.edits or Edits()
    asked = asked_of(pod.spec.annotations, container.spec.name, prefix)
    allocation = _allocation(pod, container, edits, allocations) if admitted else None
    first = next((name for name in (*ours, *devices) if name in devices), ANNOTATED if asked.fractional else None)
    resource = allocation["resource"] if allocation else first
    entry = {
        "name": container.spec.name,
        "role": str(container.spec.role),
        "state": "Refused" if pod.phase is Phase.FAILED else str(container.state),
        "reason": container.reason if admitted else "",
        "message": container.message if admitted else "",
        "code": allocation["reasonCode"] if allocation and container.state is State.WAITING else "",
        "resource": resource,
        "deviceIDs": list(devices.get(resource, ())) if resource else [],
        "resources": {name: list(ids) for name, ids in devices.items()},
        "without": list(pod.unserved.get(container.spec.name, ())),
        "annotations": _asked(asked) if asked.fractional else None,
        "allocation": {
            key: allocation[key] for key in ("key", "gpus", "requestBytes", "limitBytes", "mode", "enforcement")
        }
        if allocation
        else None,
        "env": dict(sorted(edits.env.items())),
        "mounts": [
            {"containerPath": inside, "hostPath": host, "options": list(options)}
            for inside, host, options in edits.mounts
        ],
        "deviceNodes": [dict(node) for node in edits.device_nodes],
        "cdiDevices": list(edits.cdi_devices),
    }
    without = MARKER not in edits.env and container.spec.name in wanting(pod.spec, prefix)
    return {**entry, "unlimited": without and _started(entry)}


def _lack(lack: Lack) -> dict[str, Any]:
    return {
        "resource": lack.resource,
        "asked": lack.asked,
        "free": lack.offer.free,
        "offered": lack.offered,
        "didYouMean": lack.meant or None,
    }


def _asked(asked: Asked) -> dict[str, str | None]:
    return {"request": asked.request, "limit": asked.limit, "mode": asked.mode, "devices": asked.devices}


def _allocation(
    pod: AdmittedPod, container: Container, edits: Edits, allocations: list[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    key = edits.env.get(MARKER)

    def is_its(allocation: Mapping[str, Any]) -> bool:
        if key:
            return bool(key == allocation["key"])
        if allocation["resource"] == ANNOTATED:
            return pod.uid in allocation["podUIDs"] and bool(allocation["container"] == container.spec.name)
        return container.devices.get(str(allocation["resource"])) == tuple(sorted(allocation["deviceIDs"]))

    return next(filter(is_its, allocations[::-1]), None)  # the newest record of the same shares is the live one


def _edit_notes(pod: AdmittedPod, container: Container) -> list[str]:
    """Where the pod's own wishes were overruled."""
    if container.edits is None or not container.edits.cdi_devices:
        return []
    edits = container.edits
    wished = environment(pod.spec, container.spec, pod.uid)
    notes = [
        f"container {container.spec.name}: its own {name}={value} is overridden by {edits.env[name]!r}"
        for name, value in wished.items()
        if edits.env.get(name, value) != value
    ]
    injected = {posixpath.normpath(inside) for inside, _, _ in edits.mounts}
    notes += [
        f"container {container.spec.name}: its own volume at {path} is replaced by ours"
        for path in container.spec.mount_paths
        if posixpath.normpath(path) in injected
    ]
    return notes


def _reduced_notes(annotations: Mapping[str, str], entry: Mapping[str, Any], prefix: str) -> list[str]:
    """Where an annotated container gets less than it asks for."""
    got = entry["allocation"]
    ask = ask_of(annotations, entry["name"], prefix) if got and entry["resource"] == ANNOTATED else None
    if ask is None:
        return []
    sizes = (("request", got["requestBytes"], ask.request_bytes), ("limit", got["limitBytes"], ask.limit_bytes))
    less = [f"{what} {_size(has)} instead of {_size(wants)}" for what, has, wants in sizes if has < wants]
    why = "its scheduler counts memory that the driver and `memory.reserve` keep back"
    return [f"container {entry['name']}: {', '.join(less)}: {why}"] if less else []


# -- text


def lines(report: Mapping[str, Any], notes: Iterable[str] = ()) -> list[str]:
    """The report for people. `notes`: about what led to no pod."""
    index = {gpu["uuid"]: gpu["index"] for gpu in report["node"]["gpus"]}
    text = [*_node_lines(report["node"]), ""]
    for pod in report["pods"]:
        text += [*_pod_lines(pod, index), ""]
    text += [f"note: {note}" for note in dict.fromkeys(notes)]
    return [*text, _summary(report["pods"])]


def _summary(pods: Sequence[Mapping[str, Any]]) -> str:
    if not pods:
        return "No pods to admit."
    admitted = [pod for pod in pods if pod["phase"] == Phase.ADMITTED]
    containers = [entry for pod in admitted for entry in pod["containers"]]
    started, unlimited = sum(map(_started, containers)), sum(entry["unlimited"] for entry in containers)
    text = f"{len(admitted)} of {len(pods)} pods admitted"
    if started < len(containers):
        text += f", {started} of {len(containers)} containers started"
    if unlimited:
        one = unlimited == 1
        text += f"; {'1 container runs' if one else f'{unlimited} containers run'} without the limit "
        text += "it asks for" if one else "they ask for"
    if without := sum(bool(entry["without"]) for entry in containers):
        text += f"; {'1 container runs' if without == 1 else f'{without} containers run'} without a device that "
        text += "it asks for" if without == 1 else "they ask for"
    return f"{text}."


def _node_lines(node: Mapping[str, Any]) -> list[str]:
    sizes = [format_bytes(gpu["memoryBytes"]) for gpu in node["gpus"]]
    same = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else ", ".join(sizes)
    text = [f"Simulated node: {same}, driver {node['driver']}. Before these pods:"]
    for name, shown in node["resources"].items():
        reason = f": {shown['reason']}" if shown["reason"] else ""
        text.append(f"  {name}: {shown['allocatable']} of {shown['capacity']} allocatable{reason}")
    index = {gpu["uuid"]: gpu["index"] for gpu in node["gpus"]}
    if node.get("fractions"):
        text.append("After them:")
    text += [
        f"  GPU {index.get(shared['gpu'], '?')} is kept for fractions ({shared['mode']}): {shared['bookedMiB']} of "
        f"{shared['sizeMiB']} MiB booked by the scheduler"
        for shared in node.get("fractions", ())
    ]
    return text


def _pod_lines(pod: Mapping[str, Any], index: Mapping[str, int]) -> list[str]:
    head = f"{pod['namespace']}/{pod['name']}: {pod['phase']}"
    text = [f"{head}: {pod['reason']}" if pod["reason"] else head]
    if pod["message"]:
        text.append(f"  {pod['message']}")
    for entry in pod["containers"]:
        text += _container_lines(entry, index, refused=pod["phase"] != Phase.ADMITTED)
    text += [f"  note: {note}" for note in pod["notes"]]
    return text


def _container_lines(entry: Mapping[str, Any], index: Mapping[str, int], *, refused: bool) -> list[str]:
    role = "" if entry["role"] == "app" else f" ({entry['role']} container)"
    annotated = entry["annotations"]
    asked = ", ".join([*entry["resources"], *([ANNOTATED] if annotated else [])]) or "no device"
    text = [f"  container {entry['name']}{role}: {asked}"]
    rows: list[tuple[str, Sequence[str]]] = []
    if annotated:
        rows.append(
            ("asked for", [", ".join(f"{name} {value}" for name, value in annotated.items() if value is not None)])
        )
    if refused:
        return text + _table(rows)
    for name, ids in entry["resources"].items():
        more = [f"and {len(ids) - _SHOWN_IDS} more"] if len(ids) > _SHOWN_IDS else []
        rows.append(("devices" if len(entry["resources"]) == 1 else f"devices of {name}", [*ids[:_SHOWN_IDS], *more]))
    if allocation := entry["allocation"]:
        rows += [
            ("GPU", [f"{index.get(uuid, '?')} ({uuid})" for uuid in allocation["gpus"]]),
            ("request", [_size(allocation["requestBytes"])]),
            ("limit", [_size(allocation["limitBytes"])]),
            ("mode", [allocation["mode"]]),
            ("enforcement", [_LEVELS.get(allocation["enforcement"], allocation["enforcement"])]),
        ]
    if entry["unlimited"]:
        rows.append(("limit", ["none, though it asks for one"]))
    if entry["state"] == State.WAITING or entry["message"]:
        what = "not created" if entry["reason"] in _NOT_CREATED else "not running"
        rows.append((what, [f"{entry['reason']}: {entry['message']}" if entry["message"] else entry["reason"]]))
    rows += [
        ("env", [f"{name}={value}" for name, value in entry["env"].items()]),
        (
            "mounts",
            [f"{m['hostPath']} -> {m['containerPath']} ({','.join(m['options'])})" for m in entry["mounts"]],
        ),
        ("device nodes", [_node_text(node) for node in entry["deviceNodes"]]),
        ("CDI devices", entry["cdiDevices"]),
    ]
    return text + _table(rows)


def _table(rows: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    return [
        f"    {name if position == 0 else '':<13} {plain(value)}"
        for name, values in rows
        for position, value in enumerate(values)
    ]


_NOT_CREATED = ("ContainerCreating", "CreateContainerError")

_LEVELS = {"cooperative": "cooperative (through MPS, each process by itself)", "none": "none (nothing holds it)"}


def _size(size_bytes: int) -> str:
    return format_bytes(size_bytes)


def _node_text(node: Mapping[str, Any]) -> str:
    if "major" not in node:
        return str(node["path"])
    return f"{node['path']} ({node.get('type', '?')} {node['major']}:{node.get('minor', 0)})"
