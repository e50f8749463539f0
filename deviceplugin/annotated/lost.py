"""Containers of which no message reached us: what the runtime has, compared with what it told (pure).

A container that is made while a plugin is just being told of all there are may be in neither (seen with containerd
2.1.9): nobody asks us before it starts, and no list has it. CRI lists it; what it was started with its processes tell.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from deviceplugin.nri.model import Container, ContainerState, Inventory, Pod
from deviceplugin.plan.allocation import Allocation
from mpsd.common.marker import MARKER
from mpsd.common.processes import PodProcess


def lost(
    listed: Inventory,
    processes: Mapping[str, Sequence[PodProcess]],
    asks: Callable[[Pod, Container], bool],
    known: Callable[[Pod, Container], Allocation | None],
) -> list[tuple[Pod, Container]]:
    """Annotated containers that run without what we would have given them, with the marker of another if they have one.

    One whose processes are not seen, or can't be read, is not named: it may just have ended, or be ours.

    Args:
        processes: of pods, by UID.
        asks: whether a container's annotations ask for anything.
        known: what we have granted to a container.
    """
    pods = {pod.id: pod for pod in listed[0]}
    found = []
    for container in listed[1]:
        pod = pods.get(container.pod_id)
        if container.state is not ContainerState.RUNNING or pod is None or not asks(pod, container):
            continue
        own = [process for process in processes.get(pod.uid, ()) if _is_of(process, container)]
        if not own or any(process.unreadable for process in own):
            continue
        markers = {process.marker for process in own if process.marker}
        granted = known(pod, container)
        if granted is not None and (granted.key in markers or granted.runs_unenforced):
            continue
        env = tuple(f"{MARKER}={marker}" for marker in sorted(markers)[:1])
        found.append((pod, structs.replace(container, env=env)))
    return found


def _is_of(process: PodProcess, container: Container) -> bool:
    """Its cgroup is named by the container's ID; on a simulated node by its name."""
    return process.container == container.name or (bool(container.id) and container.id in process.container)
