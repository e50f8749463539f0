"""Do processes of a share's last owners live still? Then its new one may not start.

A pod that is deleted by force, or that the kubelet has forgotten, gives its shares back at once; its processes give the
memory back when they end.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from deviceplugin import owners
from deviceplugin.broker import Broker
from deviceplugin.enforced import PAUSE
from deviceplugin.owners import Pods
from deviceplugin.plan.model import Allocation
from mpsd.processes import PodProcess
from mpsd.snapshot import GpuClients

UNKNOWN_CLIENTS = GpuClients(error="mpsd does not know the GPU")


class LastOwners:
    """Looks for them.

    Args:
        look_up: asks mpsd for the processes on these GPUs now, by GPU.
        pod_processes: one look at all processes of pods, by pod UID.
        pod_exists: whether the kubelet has a directory of the pod, by UID.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        look_up: Callable[[Sequence[str]], Mapping[str, GpuClients]],
        pod_processes: Callable[[], Mapping[str, list[PodProcess]]],
        pod_exists: Callable[[str], bool],
    ) -> None:
        self._broker, self._look_up = broker, look_up
        self._pod_processes, self._pod_exists = pod_processes, pod_exists

    def hold_back(self, young: Iterable[Allocation]) -> dict[str, str]:
        """Which of these new allocations must wait, and why."""
        held_back: dict[str, str] = {}
        for allocation in young:
            older = self._broker.predecessors(allocation)
            if not older:
                continue
            clients, pods = self._look_up(allocation.gpus), self._broker.pods()
            unknown, alive = living(allocation.gpus, clients, older, pods, but=pods.get(allocation.key, ()))
            if unknown:
                held_back[allocation.key] = f"whether its last owner is gone can't be told: {unknown}"
            elif alive:
                held_back[allocation.key] = f"pid {alive} of the share's last owner still uses the GPU"
            elif alive := self._still_ending({uid for key in older for uid in pods.get(key, ())}):
                held_back[allocation.key] = f"pid {alive} of the share's last owner still runs and may use the GPU"
        return held_back

    def of(self, allocation: Allocation, clients: Mapping[str, GpuClients]) -> tuple[str, str]:
        """Of an allocation whose pod is gone: why it can't be told, and the PIDs (some, as text) of its processes.

        A GPU that is lost tells nothing of its processes and gives nobody its memory: there the node's processes tell.
        """
        pods = self._broker.pods()
        lost = self._broker.lost(allocation.gpus)
        there = [gpu for gpu in allocation.gpus if gpu not in lost]
        unknown, alive = living(there, clients, {allocation.key}, pods)
        if not lost or unknown or alive:
            return unknown, alive
        gone = pods.get(allocation.key, ())  # somebody else may have released it meanwhile
        of_pods = self._pod_processes().items()
        mine = [p for uid, found in of_pods for p in found if uid in gone or p.marker == allocation.key]
        return "", ", ".join(str(process.pid) for process in mine if process.name != PAUSE)

    def _still_ending(self, pod_uids: Collection[str]) -> str:
        """PIDs (some, as text) of pods that the kubelet has given up and not cleaned up after: a process of theirs that
        holds no memory of a GPU now may take some yet."""
        there = [uid for uid in sorted(pod_uids) if self._pod_exists(uid)]
        if not there:
            return ""
        processes = self._pod_processes()
        found = [process.pid for uid in there for process in processes.get(uid, ()) if process.name != PAUSE]
        return ", ".join(map(str, found[:5]))


def living(
    gpus: Iterable[str],
    clients: Mapping[str, GpuClients],
    keys: Collection[str],
    pods: Pods,
    but: Collection[str] = (),
) -> tuple[str, str]:
    """Why it can't be told, and the PIDs (some, as text) of processes of these allocations on the GPUs (pure). Pods in
    `but` (UIDs) are there still."""
    found = [clients.get(gpu, UNKNOWN_CLIENTS) for gpu in gpus]
    error = next((gpu.error for gpu in found if gpu.error), "")
    # Their pods are gone: whatever of these still runs holds them all, whichever it says it has.
    gone = {uid for key in keys for uid in pods.get(key, ())} - set(but)
    clients_of = (
        c for gpu in found for c in gpu.clients if c.pod_uid in gone or any(owners.is_of(c, key, pods) for key in keys)
    )
    return error, owners.pids(clients_of)
