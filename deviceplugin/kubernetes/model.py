"""What the plugin and its Kubernetes side say to each other: values and protocols, cheap to import."""

from typing import Literal, Protocol

import msgspec

ConditionStatus = Literal["True", "False", "Unknown"]
EventType = Literal["Normal", "Warning"]


class NodeReadiness(msgspec.Struct, frozen=True):
    """Whether pods with fractions may be placed on this node. `reason` is one CamelCase word; `driver_major` is empty
    while it is not known, and the label then stays as it is."""

    status: ConditionStatus
    reason: str
    message: str
    driver_major: str = ""


class PodRef(msgspec.Struct, frozen=True):
    """A pod."""

    namespace: str
    name: str
    uid: str


class KubernetesState(msgspec.Struct, frozen=True, kw_only=True):
    """For status. `access` is off, in-cluster or the path of a kubeconfig; `connected` is None before the first
    answer; `last_heartbeat_at` is seconds since 1970."""

    access: str = "off"
    node: str = ""
    connected: bool | None = None
    error: str = ""
    error_code: str = ""
    last_heartbeat_at: float | None = None
    pods: int = 0
    events_sent: int = 0
    events_dropped: int = 0


class Events(Protocol):
    """Takes what users should read in `kubectl describe`. Never blocks, never fails."""

    def pod(self, namespace: str, name: str, uid: str, kind: EventType, reason: str, message: str) -> None: ...
    def node(self, kind: EventType, reason: str, message: str) -> None: ...


class Pods(Protocol):
    """The pods of this node, as far as they are known. Never blocks."""

    def restart_policy(self, uid: str) -> str | None:
        """None where the pod is not known."""


class NoEvents:
    """Events without an API server: nobody hears of them."""

    def pod(self, namespace: str, name: str, uid: str, kind: EventType, reason: str, message: str) -> None: ...
    def node(self, kind: EventType, reason: str, message: str) -> None: ...


class NoPods:
    """Pods without an API server: none is known."""

    def restart_policy(self, uid: str) -> str | None:
        return None
