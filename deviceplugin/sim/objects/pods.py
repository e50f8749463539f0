"""A pod as far as a node's device handling sees it: values only (pure)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

NODE_NAME = "simulated"
NODE_LABELS = {
    "kubernetes.io/hostname": NODE_NAME,
    "kubernetes.io/os": "linux",
    "kubernetes.io/arch": "amd64",
    "nvidia.com/gpu.present": "true",
}
"""What a nodeSelector is compared with. The last one is set by NVIDIA's GPU feature discovery on every GPU node."""
NODE_IP = POD_IP = "127.0.0.1"

_REFERENCE = re.compile(r"\$(\$|\([^()]*\))?")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class Role(StrEnum):
    """When a container of a pod runs. A sidecar is an init container with `restartPolicy: Always`: started in the
    order of the init containers, and running as long as the pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    APP = "app"


@dataclass(frozen=True, slots=True)
class FieldRef:
    """An env value taken from the pod itself: `valueFrom.fieldRef.fieldPath`."""

    path: str


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container. `resources`: extended resource -> count (its limit, which equals the request)."""

    name: str
    resources: Mapping[str, int] = field(default_factory=dict)
    role: Role = Role.APP
    env: tuple[tuple[str, str | FieldRef], ...] = ()
    mount_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodSpec:
    """One pod. `containers`: init containers and sidecars first, then app containers, as the kubelet admits them.
    `scheduler` is its schedulerName, empty for the cluster's own; `node` its nodeName, which passes every scheduler by;
    `claims` are its resource claims (DRA). `runtime_class` is its runtimeClassName, which stands for the handler, too;
    `host_users` is False for a user namespace of its own."""

    name: str
    containers: tuple[ContainerSpec, ...]
    namespace: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    service_account: str = "default"
    restart_policy: str = "Always"
    scheduler: str = ""
    node: str = ""
    claims: tuple[str, ...] = ()
    runtime_class: str = ""
    host_users: bool = True

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"


def environment(pod: PodSpec, container: ContainerSpec, uid: str) -> dict[str, str]:
    """The pod spec's env of a container: references to the pod's fields and `$(NAME)` resolved as the kubelet does."""
    resolved: dict[str, str] = {}
    for name, value in container.env:
        if isinstance(value, FieldRef):
            found = field_value(pod, uid, value.path)
            if found is not None:
                resolved[name] = found
        else:
            resolved[name] = expand(value, resolved)
    return resolved


def field_value(pod: PodSpec, uid: str, path: str) -> str | None:
    """What `fieldPath` stands for, None for a path that the downward API does not know."""
    if keyed := _KEYED.fullmatch(path):
        return (pod.labels if keyed[1] == "labels" else pod.annotations).get(keyed[2], "")
    return {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "metadata.uid": uid,
        "spec.nodeName": NODE_NAME,
        "spec.serviceAccountName": pod.service_account,
        "status.podIP": POD_IP,
        "status.podIPs": POD_IP,
        "status.hostIP": NODE_IP,
        "status.hostIPs": NODE_IP,
    }.get(path)


def expand(text: str, known: Mapping[str, str]) -> str:
    """`$(NAME)` -> the value of an env entry before this one; `$$` is a dollar sign; what is unknown stays as it is."""

    def replace(match: re.Match[str]) -> str:
        what = match[1]
        if what is None:
            return "$"
        return "$" if what == "$" else known.get(what[1:-1], match[0])

    return _REFERENCE.sub(replace, text)


def is_extended_resource(name: str) -> bool:
    """Whether a resource of this name may be a device plugin's: it has a domain, and that is not kubernetes.io."""
    prefix, slash, base = name.partition("/")
    return bool(prefix and slash and base) and "kubernetes.io/" not in name and not name.startswith("requests.")
