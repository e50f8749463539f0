"""The socket of a simulated node that stays up (`gpufrac sim up`): what other commands ask of it.

Same wire as the local API of the real processes: one JSON object per line, `{"v": 1, "method": ..., "params": {...}}`.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from mpsd.common.errors import ConfigError, NotReachableError
from mpsd.localapi.call import call

if TYPE_CHECKING:  # whoever only asks a node needs nothing of what it is made of
    from deviceplugin.sim.node.node import SimulatedNode
    from mpsd.localapi.server import LocalServer

T = TypeVar("T")

SOCKET = "sim.sock"
CALL_TIMEOUT_S = 300.0
"""Longer than the node waits for anything: pods of several manifests are admitted in one call."""


class Manifest(msgspec.Struct, frozen=True):
    source: str
    text: str


class Admit(msgspec.Struct, frozen=True):
    """`schedule`: see SimulatedNode.admit."""

    manifests: tuple[Manifest, ...]
    schedule: bool = False


class Admitted(msgspec.Struct, frozen=True):
    """`notes`: what in the manifests led to no pod."""

    report: dict[str, Any]
    notes: tuple[str, ...] = ()


class PodName(msgspec.Struct, frozen=True):
    namespace: str
    name: str


class Delete(msgspec.Struct, frozen=True):
    pods: tuple[PodName, ...]
    force: bool = False


class Restarted(msgspec.Struct, frozen=True):
    """`failed`: full name of a pod that failed for the restart -> message."""

    pods: int
    failed: dict[str, str]


class Client(msgspec.Struct, frozen=True):
    """`pid`: the process that is to be in the container."""

    namespace: str
    pod: str
    container: str = ""
    pid: int | None = None


def server(node: "SimulatedNode") -> "LocalServer":
    """The node's control socket, not started yet."""
    from deviceplugin.sim.objects.manifests import LoadedPod, Note, parse_all
    from mpsd.localapi.methods import operating, shaped
    from mpsd.localapi.server import LocalServer

    def admit(params: dict[str, Any]) -> Admitted:
        asked = shaped(params, Admit)
        try:
            found = parse_all([(manifest.source, manifest.text.encode()) for manifest in asked.manifests])
        except ConfigError as error:
            raise ConfigError(str(error)) from error  # of subclasses the caller's side knows nothing
        report = node.admit([item for item in found if isinstance(item, LoadedPod)], schedule=asked.schedule)
        return Admitted(report, tuple(str(item) for item in found if isinstance(item, Note)))

    def delete(params: dict[str, Any]) -> None:
        asked = shaped(params, Delete)
        for pod in asked.pods:
            node.kubelet.pod(pod.name, pod.namespace)  # all of them, or none
        for pod in asked.pods:
            node.delete(pod.namespace, pod.name, force=asked.force)

    def restart_kubelet(params: dict[str, Any]) -> Restarted:
        failed = node.restart_kubelet()
        return Restarted(len(node.kubelet.pods()), {pod.spec.full_name: pod.message for pod in failed})

    def client(params: dict[str, Any]) -> dict[str, str]:
        asked = shaped(params, Client)
        return node.client_environment(asked.namespace, asked.pod, asked.container, asked.pid)

    methods = operating({"admit": admit, "delete": delete, "restart_kubelet": restart_kubelet, "client": client})
    return LocalServer(os.path.join(node.directory, SOCKET), methods)


class ControlClient:
    """Calls a node that is up. Raises NotReachableError where there is none, and what the method raised."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def admit(self, manifests: Sequence[tuple[str, bytes]], *, schedule: bool = False) -> Admitted:
        """Admits the pods of manifests: (what error texts call it, content)."""
        texts = tuple(Manifest(source, text.decode("utf-8", "replace")) for source, text in manifests)
        return self._call("admit", Admit(texts, schedule), Admitted)

    def delete(self, pods: Sequence[tuple[str, str]], *, force: bool = False) -> None:
        """Deletes pods: (namespace, name)."""
        self._call("delete", Delete(tuple(PodName(*pod) for pod in pods), force), object)

    def restart_kubelet(self) -> Restarted:
        return self._call("restart_kubelet", None, Restarted)

    def enter(self, namespace: str, pod: str, container: str) -> dict[str, str]:
        """Puts this process into a container; the environment of one that is started there."""
        return self._call("client", Client(namespace, pod, container, os.getpid()), dict[str, str])

    def _call(self, method: str, params: msgspec.Struct | None, result: type[T]) -> T:
        values = {} if params is None else msgspec.to_builtins(params)
        try:
            return call(os.path.join(self._directory, SOCKET), method, values, result, CALL_TIMEOUT_S)
        except NotReachableError as error:
            raise NotReachableError(
                f"cannot reach a simulated node in {self._directory}: none answers there; "
                f"start one with: gpufrac sim up --directory {self._directory}"
            ) from error
