"""GPUs that other device plugins' pods hold: nothing of ours goes there.

PodResources shows who holds them, but for plain init containers. Those are in the kubelet's checkpoint alone, and keep
their devices for their pod's whole life; its entries of pods that are over go stale, so where PodResources has shown a
container once, it alone speaks of it.
"""

from collections.abc import Collection, Iterable, Mapping

from deviceplugin.grants.holders.model import Observation
from deviceplugin.kubelet.podresources import Containers
from deviceplugin.plan import ids
from deviceplugin.plan.reasons import OfferCode
from mpsd.common.reason import Reason
from mpsd.config.model import AnnotationsConfig


class InitHolders:
    """What the checkpoint alone shows of GPUs. State of one owner."""

    def __init__(self) -> None:
        self._listed: set[tuple[str, str]] = set()
        self._reasons: dict[str, Reason] = {}
        self.entries: frozenset[str] = frozenset()
        """Names of the entries that hold a GPU by the checkpoint's word alone: of plain init containers, or stale."""

    def look(self, seen: Observation, ours: Collection[str], gpus: Collection[str]) -> Mapping[str, Reason]:
        """GPU -> reason. While the checkpoint can't be read its last word counts."""
        if seen.checkpointed is None:
            return self._reasons
        reasons: dict[str, Reason] = {}
        entries: set[str] = set()
        containers: set[tuple[str, str]] = set()
        for (resource, device_ids), holder in seen.checkpointed.items():
            held = [] if resource in ours else list(gpus_of(device_ids, gpus))
            if not held:
                continue
            container = (holder.pod_uid, holder.container)
            containers.add(container)
            listed = seen.listed.get((resource, device_ids))
            if listed is not None:
                if listed.container == holder.container:
                    self._listed.add(container)
            elif container not in self._listed:
                pod = f"pod {holder.namespace}/{holder.pod}" if holder.pod else f"the pod of UID {holder.pod_uid}"
                for gpu in held:
                    reasons[gpu] = _held(f"{pod} holds it through {resource} in its init container {holder.container}")
                entries.add("/".join((*container, resource)))
        self._listed &= containers
        self._reasons, self.entries = reasons, frozenset(entries)
        return reasons


def foreign_holders(
    containers: Containers, ours: list[str], gpus: set[str], reserved: Mapping[str, str]
) -> dict[str, Reason]:
    """GPUs that other resources' devices name: GPU -> reason (pure).

    Args:
        reserved: GPUs that are held for annotated pods, and by which pod.
    """
    mine = set(ours)
    reasons: dict[str, Reason] = {}
    for (namespace, pod, _), by_resource in containers.items():
        holder = f"{namespace}/{pod}"
        for resource, device_ids in by_resource.items():
            for uuid in gpus_of(device_ids, gpus) if resource not in mine else ():
                if reserved.get(uuid) != holder:
                    reasons[uuid] = _held(f"pod {holder} holds it through {resource}")
    return reasons


def _held(text: str) -> Reason:
    return Reason(OfferCode.HELD_BY_OTHER_PLUGIN, text)


RESERVATION_POD = "gpu-reservation-"
"""How KAI's binder begins the names of its reservation pods (KAI Scheduler 0.17, docs/gpu-sharing)."""


def reservations(containers: Containers, config: AnnotationsConfig | None, gpus: set[str]) -> dict[str, str]:
    """GPUs that KAI's reservation pods hold for annotated pods: GPU -> pod (pure). Only its binder makes pods in that
    namespace."""
    if config is None:
        return {}
    return {
        uuid: f"{namespace}/{pod}"
        for (namespace, pod, _), by_resource in containers.items()
        if namespace == config.reservation_namespace and pod.startswith(RESERVATION_POD)
        for device_ids in by_resource.values()
        for uuid in gpus_of(device_ids, gpus)
    }


def gpus_of(device_ids: Iterable[str], gpus: Collection[str]) -> Iterable[str]:
    """The GPUs that devices of any plugin name."""
    return (uuid for device_id in device_ids if (uuid := device_id.partition(ids.SEPARATOR)[0]) in gpus)
