"""Do processes of a share's last owners live still? Then its new one may not start.

A pod that is deleted by force, or that the kubelet has forgotten, gives its shares back at once; its processes give the
memory back when they end.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from deviceplugin.grants.clients import is_of, pids_text
from deviceplugin.grants.holders.model import Pods
from deviceplugin.grants.reader import Reader
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.reasons import StartCode
from deviceplugin.reconcile.reasons import ReleaseCode
from mpsd.common.processes import PodProcess
from mpsd.common.reason import Reason
from mpsd.localapi.reasons import ClientsCode
from mpsd.localapi.snapshot import GpuClients

Processes = Mapping[str, Sequence[PodProcess]]
"""All processes of pods, by pod UID."""
UNKNOWN_CLIENTS = GpuClients(error="mpsd does not know the GPU", error_code=ClientsCode.GPU_NOT_KNOWN)


class LastOwners:
    """Looks for them.

    Args:
        look_up: asks mpsd for the processes on these GPUs now, by GPU.
        pod_processes: one look at all processes of pods, by pod UID.
        pod_exists: whether the kubelet has a directory of the pod, by UID.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        look_up: Callable[[Sequence[str]], Mapping[str, GpuClients]],
        pod_processes: Callable[[], Mapping[str, list[PodProcess]]],
        pod_exists: Callable[[str], bool],
    ) -> None:
        self._reader, self._look_up = reader, look_up
        self._pod_processes, self._pod_exists = pod_processes, pod_exists

    def hold_back(self, young: Iterable[Allocation]) -> dict[str, Reason]:
        """Which of these new allocations must wait, and why."""
        held_back: dict[str, Reason] = {}
        for allocation in young:
            older = self._reader.predecessors(allocation)
            if not older:
                continue
            clients, pods = self._look_up(allocation.gpus), self._reader.pods()
            own = pods.get(allocation.key, ())
            unknown, alive = living(allocation.gpus, clients, older, pods, but=own)
            who = "the share's last owner"
            if allocation.container is not None:
                who = "a container of its pod whose turn it takes"
            if unknown:
                held_back[allocation.key] = _in_use(f"whether {who} is gone can't be told: {unknown}")
            elif alive:
                held_back[allocation.key] = _in_use(f"pid {alive} of {who} still uses the GPU")
            elif alive := self._still_ending(allocation, older, pods):
                held_back[allocation.key] = _in_use(f"pid {alive} of {who} still runs and may use the GPU")
        return held_back

    def objections(self, going: Iterable[Allocation], clients: Mapping[str, GpuClients]) -> dict[str, Reason]:
        """Which of these allocations, whose pods are gone, may not be released, and why. By one look at all processes:
        a whole node may be emptied at once.

        A GPU that is lost tells nothing of its processes and gives nobody its memory: there the node's processes tell,
        and what they say that they were started with counts.
        """
        pods, processes = self._reader.pods(), self._pod_processes()
        reasons = {a.key: self._objection(a, clients, pods, processes) for a in going}
        return {key: reason for key, reason in reasons.items() if reason is not None}

    def _objection(
        self, allocation: Allocation, clients: Mapping[str, GpuClients], pods: Pods, processes: Processes
    ) -> Reason | None:
        lost = self._reader.node.lost(allocation.gpus)
        there = [gpu for gpu in allocation.gpus if gpu not in lost]
        stays = self._reader.living_pods(allocation)
        ended = "its container is made anew" if stays else "its pod is gone"
        unknown, alive = living(there, clients, {allocation.key}, pods, but=stays)
        if unknown:
            return Reason(ReleaseCode.NOT_KNOWN, f"mpsd can't say whether its processes live: {unknown}")
        if alive:
            return Reason(ReleaseCode.USES_GPU, f"{ended} but pid {alive} still uses the GPU")
        # Somebody else may have released it meanwhile.
        gone = [uid for uid in pods.get(allocation.key, ()) if uid not in stays]
        if alive := _running(processes, gone, {allocation.key} if lost or not gone else ()):
            return Reason(ReleaseCode.STILL_RUNS, f"{ended} but pid {alive} still runs and may use the GPU")
        return None

    def have_run(self, keys: Collection[str]) -> set[str]:
        """Which of these allocations a process was started with."""
        started = {process.marker for found in self._pod_processes().values() for process in found}
        return {key for key in keys if key in started}

    def _still_ending(self, allocation: Allocation, keys: Collection[str], pods: Pods) -> str:
        """PIDs (some, as text) of who has what these allocations held until the kubelet has cleaned up: one that holds
        no memory of a GPU now may take some yet. Of allocations of its own pod, and of those that no pod was seen with,
        such as after a restart, what processes were started with tells."""
        own = pods.get(allocation.key, ())
        if allocation.container is not None:
            return _running(self._pod_processes(), (), keys)
        there = {uid for key in keys for uid in pods.get(key, ()) if uid not in own and self._pod_exists(uid)}
        unseen = {key for key in keys if not pods.get(key)}
        return _running(self._pod_processes(), there, unseen, but=own) if there or unseen else ""


def _in_use(text: str) -> Reason:
    return Reason(StartCode.SHARES_IN_USE, text)


def _running(
    processes: Processes, pod_uids: Collection[str], markers: Collection[str], but: Collection[str] = ()
) -> str:
    """PIDs (some, as text) of processes in these pods, or started with these allocations in any pod but some (pure)."""
    found = [
        process.pid
        for uid, of_pod in processes.items()
        for process in of_pod
        if (uid in pod_uids and not process.is_pause) or (process.marker in markers and uid not in but)
    ]
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
        c for gpu in found for c in gpu.clients if c.pod_uid in gone or any(is_of(c, key, pods) for key in keys)
    )
    return error, pids_text(clients_of)
