"""What one look at the kubelet shows: PodResources and its checkpoint joined (pure)."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from deviceplugin.grants.holders.model import Holder, Observation, Shares
from deviceplugin.kubelet.checkpoint import Entry
from deviceplugin.kubelet.podresources import Containers


def observation(
    containers: Containers,
    entries: list[Entry] | None,
    pod_exists: Callable[[str], bool],
    holders: Collection[str] = (),
) -> Observation:
    """Joins PodResources and the checkpoint's entries, less those whose pod directory is gone.

    Args:
        holders: UIDs of pods that were seen to hold something.
    """
    there = frozenset(uid for uid in holders if pod_exists(uid))
    removed = frozenset(holders) - there
    listed: dict[Shares, Holder] = {}
    for (namespace, pod, container), by_resource in containers.items():
        for resource, device_ids in by_resource.items():
            listed[resource, device_ids] = Holder(namespace, pod, container)
    if entries is None:
        return Observation(listed, None, removed=removed, there=there)
    exists = {uid: pod_exists(uid) for uid in {entry.pod_uid for entry in entries}}
    live = [entry for entry in entries if exists[entry.pod_uid]]
    # PodResources names pods, the checkpoint their UIDs; one container in both names the pod of the others. Not where
    # two pods have the same shares in containers of the same name: one of them is being deleted.
    places = Counter((entry.resource, entry.device_ids, entry.container) for entry in live)
    names: dict[str, tuple[str, str]] = {}
    for entry in live:
        shown = listed.get((entry.resource, entry.device_ids))
        place = (entry.resource, entry.device_ids, entry.container)
        if shown is not None and shown.container == entry.container and places[place] == 1:
            names[entry.pod_uid] = (shown.namespace, shown.pod)
    held: dict[Shares, Holder] = {}
    keyed: dict[str, Holder] = {}
    for entry in live:
        name = names.get(entry.pod_uid, ("", ""))
        holder = Holder(*name, entry.container, entry.pod_uid, entry.allocation_key)
        held[entry.resource, entry.device_ids] = holder
        if entry.allocation_key is not None:
            keyed[entry.allocation_key] = holder
    return Observation(listed, held, keyed, removed, there)


def stale_shares(seen: Observation, entries: Iterable[Entry], resources: Iterable[str]) -> frozenset[Shares]:
    """Shares of ours that the checkpoint holds for pods that are gone only (pure)."""
    ours = set(resources)
    held = {*seen.listed, *(seen.checkpointed or {})}
    named = {(entry.resource, entry.device_ids) for entry in entries if entry.resource in ours}
    return frozenset(named - held)
