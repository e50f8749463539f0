"""Are containers held to what was granted, as far as their processes show?

Finds those that run without our edits, with other values than granted, with two of our resources, or outside of MPS;
and those of which that can't be told. What a cgroup holds is read back elsewhere (hardlimits.py). One thread looks (the
observer).
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from deviceplugin.grants.clients import claims, is_of, pids_text
from deviceplugin.grants.holders.model import Holder, Pods
from deviceplugin.grants.inspection import Inspection
from deviceplugin.grants.reader import Reader
from deviceplugin.kubelet.podresources import Containers
from deviceplugin.plan import isolation
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.start import with_effective_enforcement
from deviceplugin.reconcile.environments import deviations
from deviceplugin.reconcile.markers import MARKED, Markers, PodView, Verdict, VerdictCode
from deviceplugin.reconcile.reasons import HeldCode
from mpsd.common.log import get_logger
from mpsd.common.processes import PodProcess, start_time
from mpsd.common.reason import Reason
from mpsd.config.model import Enforcement
from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import DaemonState, GpuClients, GpuStatus

log = get_logger("plugin")

MARKERS_S = 4.0
"""How often processes are looked at, at most, while a container's marker was not seen yet."""


class Enforced(msgspec.Struct, frozen=True):
    """By key of the allocation: why its container runs unenforced; what else somebody should know of it, such as that
    nothing can be told."""

    unenforced: Mapping[str, Reason] = {}
    doubts: Mapping[str, Reason] = {}


def _is_alive(process: PodProcess) -> bool:
    """Whether that very process is there; one of which the start is not known is taken to be."""
    return process.started in (0, start_time(process.pid))


class EnforcementCheck:
    """See the module.

    Args:
        pod_processes: one look at all processes of pods, by pod UID.
        look_up: who uses these GPUs now.
        blind: why processes of containers can't be seen at all, empty when they can.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        pods_directory: str,
        pod_processes: Callable[[], Mapping[str, list[PodProcess]]],
        look_up: Callable[[Sequence[str]], Mapping[str, GpuClients]],
        blind: str = "",
        is_alive: Callable[[PodProcess], bool] = _is_alive,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_alive = is_alive
        self._reader, self._pods_directory = reader, pods_directory
        self._pod_processes, self._look_up, self._monotonic = pod_processes, look_up, monotonic
        self._blind = Verdict(VerdictCode.UNREADABLE, blind)
        self._sees = not blind
        self._markers = Markers()
        self._marked_s = float("-inf")
        self._verdicts: dict[str, Verdict] = {}
        """Of those whose marker was not seen, as of the last look."""
        self._first: dict[str, PodProcess] = {}
        """The first process of each container whose marker was seen."""
        self._past_mps: dict[str, Reason] = {}
        self.found = Enforced()

    def look(self, published: Collection[str], containers: Containers) -> None:
        """Looks once; `found` is replaced.

        Args:
            published: keys of allocations that may start.
            containers: as the kubelet showed them last.
        """
        inspection = self._reader.inspect()
        allocations = [
            with_effective_enforcement(allocation, inspection.node.hard) for allocation in inspection.allocations
        ]
        holders = {key: holder for key, holder in inspection.holders.items() if isinstance(holder, Holder)}
        self._past_mps = self._outside_mps(allocations, inspection)
        unenforced = self._past_mps | _doubled(holders, set(inspection.view.resources), containers)
        self._look_at_markers(inspection, holders, published - unenforced.keys(), containers)
        doubts: dict[str, Reason] = {}
        for key, verdict in self._verdicts.items():
            if verdict.message:
                (unenforced if verdict.unenforced else doubts).setdefault(key, Reason(verdict.code, verdict.message))
        gpus = {gpu.info.uuid: gpu for gpu in inspection.node.gpus}
        for allocation in allocations:
            if (first := self._first.get(allocation.key)) is None:
                continue
            apart = isolation.USER_NAMESPACE
            left = isolation.level_left(apart, allocation.enforcement)
            if first.own_users and left is not allocation.enforcement:
                unenforced.setdefault(allocation.key, apart)
            for one in deviations(allocation, first.variables, default_limit_bytes=_default_limit(allocation, gpus)):
                (unenforced if one.unheld else doubts).setdefault(allocation.key, Reason(one.code, one.message))
        doubts = {key: text for key, text in doubts.items() if key not in unenforced}
        for key in unenforced.keys() - self.found.unenforced.keys():
            why = unenforced[key]
            log.error("a container runs unenforced", key=key, code=why.code, reason=why.message)
        for key in doubts.keys() - self.found.doubts.keys():
            why = doubts[key]
            log.warning("a container may not be as granted", key=key, code=why.code, reason=why.message)
        self.found = Enforced(unenforced, doubts)

    def _look_at_markers(
        self, inspection: Inspection, holders: Mapping[str, Holder], published: Collection[str], containers: Containers
    ) -> None:
        self._markers.keep(inspection.holders.keys())
        for key, first in list(self._first.items()):
            if key not in inspection.holders or not self._is_alive(first):
                del self._first[key]
                self._markers.forget(key)
        # A plain init container, which only the checkpoint shows, may have ended long ago: nothing can be told of it.
        # Of annotated containers the runtime tells: at each start, and of all when it is met again.
        told = {a.key for a in inspection.allocations if a.container is not None}
        may_run = set(published) - inspection.checkpoint_only - told
        worth = self._markers.unverified(key for key, holder in holders.items() if holder.pod_uid and key in may_run)
        self._verdicts = {key: verdict for key, verdict in self._verdicts.items() if key in worth}
        now_s = self._monotonic()
        if not worth or now_s - self._marked_s < MARKERS_S:
            return
        self._marked_s = now_s
        if not self._sees:
            self._verdicts = dict.fromkeys(worth, self._blind)
            return
        pods = self._pod_views({holders[key] for key in worth}, inspection, containers)
        for key in sorted(worth):
            pod = pods.get(holders[key].pod_uid)
            begun = self._creation_begun(holders[key])
            self._verdicts[key] = self._markers.judge(key, pod, begun=begun, now_s=now_s)
            if self._verdicts[key] is MARKED and pod is not None:
                self._first[key] = pod.marked[key]

    def _creation_begun(self, holder: Holder) -> bool:
        """Whether the kubelet has made the directory it makes before it creates a container."""
        return os.path.isdir(os.path.join(self._pods_directory, holder.pod_uid, "containers", holder.container))

    def _outside_mps(self, allocations: Iterable[Allocation], inspection: Inspection) -> dict[str, Reason]:
        """Allocations that a process uses past the MPS daemon, and so past their limit. A container may: nothing but
        its environment and the compute mode, which MPS protocol 3 leaves at DEFAULT, lead it to the daemon."""
        gpus = {gpu.info.uuid: gpu for gpu in inspection.node.gpus if _tells_clients(gpu)}
        plain = {uuid: GpuClients(clients=gpu.clients) for uuid, gpu in gpus.items()}
        pods = inspection.pods
        live = [a for a in allocations if a.mode is Mode.SM_SHARING]
        # A hard limit is the cgroup's: it holds past MPS, too.
        live = [a for a in live if a.enforcement is Enforcement.COOPERATIVE and _plain(a, plain, pods)]
        if not live:
            return {}
        # What mpsd knew may be of a moment when the daemon could not say who its clients are.
        uuids = sorted({uuid for a in live for uuid in a.gpus if uuid in gpus})
        fresh = {uuid: answer for uuid, answer in self._look_up(uuids).items() if not answer.error}
        found = {}
        for allocation in live:
            if pids := _plain(allocation, fresh, pods):
                text = f"pid {pids} uses its GPU past MPS: it is not held to the limit"
                found[allocation.key] = Reason(HeldCode.PAST_MPS, text)
            elif allocation.key in self._past_mps and not fresh.keys() >= gpus.keys() & set(allocation.gpus):
                found[allocation.key] = self._past_mps[allocation.key]
        return found

    def _pod_views(self, holders: set[Holder], inspection: Inspection, containers: Containers) -> dict[str, PodView]:
        """The pods of these containers that have processes, by UID."""
        processes = self._pod_processes()
        clients = [client for gpu in inspection.node.gpus for client in gpu.clients]
        strangers = {c.pid for c in clients if c.allocation_key is None}
        claimers = {c.pid for c in clients if claims(c, inspection.pods)}
        views = {}
        for holder in holders:
            running = [process for process in processes.get(holder.pod_uid, ()) if not process.is_pause]
            if not running:
                continue
            first: dict[str, PodProcess] = {}
            for process in sorted(running, key=lambda process: (process.started, process.pid)):
                if process.marker:
                    first.setdefault(process.marker, process)
            # What mpsd could not read may be read here, or not be readable here either.
            unmarked = {p.pid for p in running if p.marker is None and not p.unreadable} & strangers
            views[holder.pod_uid] = PodView(
                running=len({process.container for process in running}),
                marked=first,
                expected=sum(1 for ns, pod, _ in containers if (ns, pod) == (holder.namespace, holder.pod)),
                unmarked_clients=tuple(p.pid for p in running if p.pid in unmarked | claimers),
                unreadable=any(process.unreadable for process in running),
                isolation=isolation.of_processes(process.name for process in running),
            )
        return views


def _doubled(holders: Mapping[str, Holder], ours: set[str], containers: Containers) -> dict[str, Reason]:
    """Allocations of containers that hold two of our resources: only one limit takes effect (verified)."""
    found = {}
    for key, holder in holders.items():
        by_resource = containers.get((holder.namespace, holder.pod, holder.container), {})
        both = sorted(ours & by_resource.keys())
        if len(both) > 1:
            text = f"its container holds {' and '.join(both)}: only one of them takes effect"
            found[key] = Reason(HeldCode.TWO_RESOURCES, text)
    return found


def _default_limit(allocation: Allocation, gpus: Mapping[str, GpuStatus]) -> int | None:
    """What holds its clients whatever their environment says: see environments.deviations."""
    gpu = gpus.get(allocation.gpus[0])
    if gpu is None or gpu.daemon is None:
        return None
    return allocation.limit_bytes if gpu.daemon.protocol == 3 else gpu.daemon.pinned_limit_bytes


def _tells_clients(gpu: GpuStatus) -> bool:
    """Whether mpsd can tell MPS clients of this GPU from others."""
    return gpu.daemon is not None and gpu.daemon.state is DaemonState.READY and not gpu.daemon.wedged


def _plain(allocation: Allocation, clients: Mapping[str, GpuClients], pods: Pods) -> str:
    """PIDs (some, as text) of an allocation's processes on its GPUs that are no MPS clients (pure)."""
    found = [c for uuid in allocation.gpus if uuid in clients for c in clients[uuid].clients if not c.mps]
    return pids_text(client for client in found if is_of(client, allocation.key, pods))
