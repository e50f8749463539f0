"""Pods and containers as a runtime shows them: whose, how kept apart, and what of them is remembered (pure)."""

from collections.abc import Mapping, Sequence

from deviceplugin.annotated.adjust import RESERVED_ENV
from deviceplugin.grants.holders.turns import Instance
from deviceplugin.nri.model import Container, ContainerState, Inventory, Pod
from deviceplugin.plan import isolation, render
from deviceplugin.plan.allocation import ContainerRef
from mpsd.common.reason import Reason

MAX_VALUE = 16 << 10
"""Of an annotation or a variable, in characters: the longest that is legal, a list of devices, has fewer."""
MAX_HANDLER = 256


def reference(pod: Pod, container: Container) -> ContainerRef:
    """A container by its pod."""
    return ContainerRef(namespace=pod.namespace, pod=pod.name, pod_uid=pod.uid, container=container.name)


def isolation_of(pod: Pod, container: Container) -> Reason | None:
    """What keeps a container apart from the host, None where nothing does."""
    return isolation.of_container(pod.runtime_handler, user_namespace=container.user_namespace)


def running_of(pods: Mapping[str, Pod], containers: Sequence[Container]) -> dict[str, Instance]:
    """The containers of these pods, by ID, that are not known to have ended, by ID."""
    return {
        one.id: Instance(one.id, reference(pods[one.pod_id], one).id, one.pod_id)
        for one in containers
        if one.pod_id in pods and one.state is not ContainerState.STOPPED
    }


def brief(prefix: str, pods: Sequence[Pod], containers: Sequence[Container]) -> Inventory:
    """Only what is looked at later: keys that are ours or could be meant to be, and what containers have of us. Tenants
    wrote most of the rest."""
    return [_pod(prefix, pod) for pod in pods], [_container(container) for container in containers]


def _pod(prefix: str, pod: Pod) -> Pod:
    return Pod(
        id=pod.id,
        name=pod.name,
        uid=pod.uid,
        namespace=pod.namespace,
        annotations={
            key: value[:MAX_VALUE]
            for key, value in pod.annotations.items()
            if key.startswith(prefix) or "gpu" in key.lower()
        },
        pid=pod.pid,
        runtime_handler=pod.runtime_handler[:MAX_HANDLER],
    )


def _container(container: Container) -> Container:
    return Container(
        id=container.id,
        pod_id=container.pod_id,
        name=container.name,
        state=container.state,
        env=tuple(entry[:MAX_VALUE] for entry in container.env if entry.startswith(RESERVED_ENV)),
        user_namespace=container.user_namespace,
        mounts=tuple(m for m in container.mounts if m.destination == render.CONTAINER_PIPE_DIRECTORY),
    )
