"""Who holds what on this node: the sums that every decision rests on (pure state, no I/O).

Shares are counted once however many allocations name them: a kubelet gives an init container's IDs to later containers
of the pod again, alone or among more. A share of a group counts on each of its GPUs. Annotated containers of one pod
count as Kubernetes counts them: with the most that they could hold at one moment, as some take the turn of others.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from deviceplugin.plan.allocation import Allocation, ContainerRef
from mpsd.gpu.model import Mode
from mpsd.shares.groups import is_set_name


class Accounts:
    """All live allocations, indexed by key, by share and by GPU. Owned by one thread at a time."""

    def __init__(self) -> None:
        self._by_key: dict[str, Allocation] = {}
        self._by_share: dict[tuple[str, str], list[Allocation]] = {}
        self._by_pod: dict[str, list[Allocation]] = {}
        self._by_gpu: dict[str, dict[str, Allocation]] = {}
        self._granted_bytes: dict[str, int] = {}
        self._borrowers: Counter[str] = Counter()
        self._helpless: Counter[str] = Counter()
        self._vacated: set[str] = set()
        self._left_spans: list[tuple[str, ...]] = []

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def get(self, key: str) -> Allocation | None:
        """The allocation of that key, None when it is not live."""
        return self._by_key.get(key)

    def add(self, allocation: Allocation) -> None:
        """Takes an allocation in. Its key must be new."""
        if allocation.key in self._by_key:
            raise ValueError(f"allocation {allocation.key} is already in the accounts")
        self._by_key[allocation.key] = allocation
        if allocation.container is not None:
            self._change_pod(allocation, lambda of_pod: of_pod.append(allocation))
        else:
            self._add_shares(allocation)
        for gpu in allocation.gpus:
            self._by_gpu.setdefault(gpu, {})[allocation.key] = allocation
        self._count(allocation, 1)

    def remove(self, key: str) -> None:
        """Lets an allocation go; unknown keys are no error."""
        allocation = self._by_key.pop(key, None)
        if allocation is None:
            return
        self._vacated.discard(key)
        if allocation.container is not None:
            self._change_pod(allocation, lambda of_pod: of_pod.remove(allocation))
        else:
            self._remove_shares(allocation)
        for gpu in allocation.gpus:
            del self._by_gpu[gpu][key]
        self._count(allocation, -1)

    def _count(self, allocation: Allocation, by: int) -> None:
        for gpu in allocation.gpus:
            self._borrowers[gpu] += by * allocation.may_borrow
            self._helpless[gpu] += by * (not allocation.takes_back)

    def replace(self, allocation: Allocation) -> None:
        """Puts another plan in the place of a live one of the same key, shares and GPUs."""
        before = self._by_key[allocation.key]
        self._by_key[allocation.key] = allocation
        own = [] if (pod := _pod_of(before)) is None else [self._by_pod[pod]]
        for holders in own or [self._by_share[allocation.resource, share] for share in allocation.device_ids]:
            holders[holders.index(before)] = allocation
        for gpu in allocation.gpus:
            self._by_gpu[gpu][allocation.key] = allocation
        self._count(before, -1)
        self._count(allocation, 1)

    def without(self, keys: Collection[str], undone: Collection[str] = ()) -> "Accounts":
        """A copy that lacks some allocations, whose daemons stay as they are but for those of `undone`; nothing in it
        counts as vacated."""
        others = Accounts()
        for allocation in self:
            if allocation.key not in keys:
                others.add(allocation)
        others._left_spans = self.spans(undone)
        return others

    def set_vacated(self, keys: set[str]) -> bool:
        """Marks the allocations that the kubelet no longer holds. Their memory still counts; their shares may turn
        Unhealthy. True when the marks changed."""
        vacated = keys & self._by_key.keys()
        changed = vacated != self._vacated
        self._vacated = vacated
        return changed

    def is_vacated(self, key: str) -> bool:
        """Whether the kubelet no longer holds it."""
        return key in self._vacated

    def on_gpu(self, gpu: str) -> Mapping[str, Allocation]:
        """Allocations on one GPU by key."""
        return self._by_gpu.get(gpu, {})

    def clients(self, gpu: str, after: Collection[str] = ()) -> int:
        """How many containers the GPU has that may be there side by side: one that has another's shares, or its turn,
        waits for the end of that one.

        Args:
            after: keys whose shares somebody new is to have.
        """
        there = self.on_gpu(gpu)
        passed_on = {key for allocation in there.values() for key in allocation.after}.union(after)
        return len(there.keys() - passed_on)

    def granted_bytes(self, gpu: str) -> int:
        """Sum of the requests of all held shares on the GPU."""
        return self._granted_bytes.get(gpu, 0)

    def has_borrowers(self, gpu: str) -> bool:
        """Whether somebody on the GPU may borrow memory."""
        return self._borrowers[gpu] > 0

    def has_helpless(self, gpu: str) -> bool:
        """Whether somebody on the GPU can't have memory taken back that others borrowed."""
        return self._helpless[gpu] > 0

    def limit_bytes(self, gpu: str) -> int:
        """Sum of what the holders of shares on the GPU may take at most. Who shares with another container of its pod
        counts once, with the higher limit."""
        limits: dict[tuple[str, str], int] = {}
        for allocation in self.on_gpu(gpu).values():
            if allocation.container is None:
                each = allocation.limit_bytes // len(allocation.device_ids)
                for share in allocation.device_ids:
                    name = (allocation.resource, share)
                    limits[name] = max(limits.get(name, 0), each)
        return sum(limits.values()) + self._of_pods(gpu, lambda allocation: allocation.limit_bytes)

    def booked_bytes(self, gpu: str) -> int:
        """Sum of what schedulers that wrote annotations count on the GPU, and of what shares hold."""
        shares = sum(a.booked_bytes for a in self.on_gpu(gpu).values() if a.container is None)
        return shares + self._of_pods(gpu, lambda allocation: allocation.booked_bytes)

    def mode(self, gpu: str) -> Mode | None:
        """The mode the GPU is bound to; None when no allocation is on it."""
        return next((allocation.mode for allocation in self.on_gpu(gpu).values()), None)

    def share_bytes(self, resource: str, share: str, gpu: str) -> int:
        """What a share counts on a GPU now, 0 when it is free."""
        return _held_bytes(self._by_share.get((resource, share), ()), gpu)

    def is_held(self, resource: str, share: str) -> bool:
        """Whether a live allocation has the share."""
        return (resource, share) in self._by_share

    def held_groups(self) -> dict[str, tuple[str, ...]]:
        """The groups that live allocations were granted on, each with its GPUs."""
        return {a.group: a.gpus for a in self._by_key.values() if a.group and not is_set_name(a.group)}

    def held_sets(self) -> dict[str, tuple[str, ...]]:
        """The sets of GPUs that live shares lie on, each with its GPUs."""
        return {a.group: a.gpus for a in self._by_key.values() if a.container is None and is_set_name(a.group)}

    def spans(self, but: Collection[str] = ()) -> list[tuple[str, ...]]:
        """GPUs that a live allocation needs one MPS daemon for. `but`: keys of some that don't count."""
        reaching = (a for a in self._by_key.values() if a.group and a.needs_daemon)
        return [a.gpus for a in reaching if a.key not in but] + self._left_spans

    def newest(self, resource: str, device_ids: tuple[str, ...]) -> Allocation | None:
        """The newest live allocation of exactly these shares."""
        holders = self._by_share.get((resource, device_ids[0]), []) if device_ids else []
        same = [a for a in holders if a.device_ids == device_ids]
        return max(same, key=lambda a: a.generation, default=None)

    def overlapping(self, resource: str, device_ids: tuple[str, ...]) -> list[Allocation]:
        """Live allocations of any of these shares, the oldest first."""
        found = {a.key: a for share in device_ids for a in self._by_share.get((resource, share), ())}
        return sorted(found.values(), key=lambda a: a.generation)

    def held_shares(self, resource: str) -> dict[str, bool]:
        """All shares of the resource that count: share -> whether the kubelet still holds it."""
        held: dict[str, bool] = {}
        for allocation in self._by_key.values():
            if allocation.resource == resource:
                at_kubelet = allocation.key not in self._vacated
                for share in allocation.device_ids:
                    held[share] = held.get(share, False) or at_kubelet
        return held

    def resources(self) -> set[str]:
        """Names of the resources with live allocations."""
        return {allocation.resource for allocation in self._by_key.values() if allocation.container is None}

    def of_container(self, container: ContainerRef) -> Allocation | None:
        """What an annotated container holds."""
        own = [a for a in self.of_pod(container.pod_uid) if a.device_ids == (container.id,)]
        return max(own, key=lambda a: a.generation, default=None)

    def of_pod(self, uid: str) -> list[Allocation]:
        """What the annotated containers of a pod hold."""
        return list(self._by_pod.get(uid, ()))

    def takers(self, allocation: Allocation) -> list[Allocation]:
        """Annotated containers that took over what another one of their pod holds since that has ended."""
        uid = _pod_of(allocation)
        return [] if uid is None else [a for a in self._by_pod.get(uid, ()) if allocation.key in a.after]

    def annotated(self) -> Iterator[tuple[Allocation, ContainerRef]]:
        """The allocations of annotated containers."""
        return ((a, a.container) for a in self._by_key.values() if a.container is not None)

    def _add_shares(self, allocation: Allocation) -> None:
        for share in allocation.device_ids:
            holders = self._by_share.setdefault((allocation.resource, share), [])
            for gpu in allocation.gpus:
                more = max(0, allocation.share_bytes - _held_bytes(holders, gpu))
                self._granted_bytes[gpu] = self._granted_bytes.get(gpu, 0) + more
            holders.append(allocation)

    def _remove_shares(self, allocation: Allocation) -> None:
        for share in allocation.device_ids:
            holders = self._by_share[allocation.resource, share]
            holders.remove(allocation)
            for gpu in allocation.gpus:
                self._granted_bytes[gpu] -= max(0, allocation.share_bytes - _held_bytes(holders, gpu))
            if not holders:
                del self._by_share[allocation.resource, share]

    def _change_pod(self, allocation: Allocation, change: Callable[[list[Allocation]], object]) -> None:
        """Changes what a pod holds, and counts that anew on all its GPUs: who goes gives back to whom it came after."""
        uid = _pod_of(allocation) or ""
        of_pod = self._by_pod.setdefault(uid, [])
        gpus = {gpu for one in (allocation, *of_pod) for gpu in one.gpus}
        before = {gpu: _peak_bytes(of_pod, gpu, _request_bytes) for gpu in gpus}
        change(of_pod)
        for gpu in gpus:
            more = _peak_bytes(of_pod, gpu, _request_bytes) - before[gpu]
            self._granted_bytes[gpu] = self._granted_bytes.get(gpu, 0) + more
        if not of_pod:
            del self._by_pod[uid]

    def _of_pods(self, gpu: str, size_bytes: Callable[[Allocation], int]) -> int:
        uids = {uid for allocation in self.on_gpu(gpu).values() if (uid := _pod_of(allocation)) is not None}
        return sum(_peak_bytes(self._by_pod[uid], gpu, size_bytes) for uid in uids)


def _held_bytes(holders: "list[Allocation] | tuple[()]", gpu: str) -> int:
    return max((allocation.share_bytes for allocation in holders if gpu in allocation.gpus), default=0)


def _peak_bytes(of_pod: Iterable[Allocation], gpu: str, size_bytes: Callable[[Allocation], int]) -> int:
    """The most that the containers of one pod could hold at one moment on a GPU: who takes another's turn stands in its
    place from its own grant on."""
    standing: dict[str, int] = {}
    peak_bytes = 0
    for allocation in sorted((a for a in of_pod if gpu in a.gpus), key=lambda a: a.generation):
        for key in allocation.after:
            standing.pop(key, None)
        standing[allocation.key] = size_bytes(allocation)
        peak_bytes = max(peak_bytes, sum(standing.values()))
    return peak_bytes


def _request_bytes(allocation: Allocation) -> int:
    return allocation.request_bytes


def _pod_of(allocation: Allocation) -> str | None:
    """UID of the pod whose annotations describe it, None of a share."""
    return allocation.container.pod_uid if allocation.container is not None else None
