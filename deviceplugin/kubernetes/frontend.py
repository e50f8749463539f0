"""The optional Kubernetes side of the plugin process: condition and label of the node, events, the node's pods.

With `kubernetes.access: off` nothing beyond this module is imported and nothing runs. With it on, nothing else depends
on it: no call here waits for the server, and no answer of it is needed to enforce anything.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from deviceplugin.kubernetes.model import Events, KubernetesState, NodeReadiness, NoEvents, NoPods, PodRef, Pods
from mpsd.config.model import KubernetesConfig

if TYPE_CHECKING:
    from deviceplugin.kubernetes.access import Access
    from deviceplugin.kubernetes.events import EventRecorder
    from deviceplugin.kubernetes.node import NodeReporter
    from deviceplugin.kubernetes.pods import PodWatch

OFF = "off"


class KubernetesApi:
    """Reports to the API server and follows it, until closed.

    Args:
        readiness: asked on `wake` and once a minute; it must not block. None: nothing is said of the node.
        on_deleting: called once per pod of this node that begins to be deleted, with its grace in seconds, or 0 where
            the pod is gone already. From a thread of its own, one pod after the other.
        access: where the server is, for tests; else made from `config`.
    """

    def __init__(
        self,
        config: KubernetesConfig,
        *,
        readiness: Callable[[], NodeReadiness] | None,
        on_deleting: Callable[[PodRef, float], None],
        access: "Access | None" = None,
    ) -> None:
        self._config = config
        self._parts: _Parts | None = None
        if config.access != OFF:
            self._parts = _Parts(config, readiness, on_deleting, access)

    @property
    def events(self) -> Events:
        """Takes events also before `start`; the same object always."""
        return _NO_EVENTS if self._parts is None else self._parts.events

    @property
    def pods(self) -> Pods:
        """Pods of this node; none is known where access is off."""
        return _NO_PODS if self._parts is None else self._parts.pods

    def start(self) -> None:
        if self._parts is not None:
            self._parts.start()

    def wake(self) -> None:
        """Readiness may have changed."""
        if self._parts is not None and self._parts.node is not None:
            self._parts.node.wake()

    def close(self) -> None:
        """Ends within 2.5 s, whatever the server does."""
        if self._parts is not None:
            self._parts.close()

    @property
    def state(self) -> KubernetesState:
        """For status."""
        return KubernetesState() if self._parts is None else self._parts.state(self._config)


_NO_EVENTS, _NO_PODS = NoEvents(), NoPods()


class _Parts:
    """All that runs. Each part has a client of its own, so that one that hangs holds up no other."""

    def __init__(
        self,
        config: KubernetesConfig,
        readiness: Callable[[], NodeReadiness] | None,
        on_deleting: Callable[[PodRef, float], None],
        access: "Access | None",
    ) -> None:
        from deviceplugin.kubernetes.access import Access, node_name
        from deviceplugin.kubernetes.client import ApiClient, Health
        from deviceplugin.kubernetes.events import EventRecorder
        from deviceplugin.kubernetes.node import NodeReporter
        from deviceplugin.kubernetes.pods import PodWatch

        access = access or Access(config.access)
        self._health: Health = Health()
        self._name = partial(node_name, config.node_name)
        self.node: NodeReporter | None = None
        if readiness is not None:
            self.node = NodeReporter(ApiClient(access, self._health), self._name, readiness)
        self.events: EventRecorder = EventRecorder(ApiClient(access, self._health), self._name)
        self.pods: PodWatch = PodWatch(ApiClient(access, self._health), self._name, on_deleting)

    def start(self) -> None:
        for part in self._all():
            part.start()

    def close(self) -> None:
        for part in self._all():
            part.begin_close()
        for part in reversed(self._all()):
            part.close()

    def _all(self) -> "list[NodeReporter | PodWatch | EventRecorder]":
        return [*([self.node] if self.node is not None else []), self.pods, self.events]

    def state(self, config: KubernetesConfig) -> KubernetesState:
        from deviceplugin.kubernetes.errors import AccessError
        from deviceplugin.kubernetes.reasons import KubernetesCode

        try:
            node = self._name()
        except AccessError:
            node = config.node_name
        errors = dict.fromkeys(filter(None, (part.error for part in self._all())))
        away = self._health.error
        refused = KubernetesCode.REFUSES if errors else ""
        return KubernetesState(
            access=config.access,
            node=node,
            connected=self._health.connected,
            error=away or "; ".join(errors),
            error_code=KubernetesCode.AWAY if away else refused,
            last_heartbeat_at=self.node.last_heartbeat_at if self.node is not None else None,
            pods=len(self.pods),
            events_sent=self.events.sent,
            events_dropped=self.events.dropped,
        )
