"""What a kubelet remembers of devices, and how it picks them: the rules of kubelet 1.36.2's device manager.

No I/O of its own: plugins are behind `Endpoint`, the checkpoint behind a callback. Thread-safe. As in the kubelet, the
lock is not held while a plugin is asked, admission is serialised by the caller, and devices of finished pods are taken
back only when somebody asks (an allocation, a PodResources List).
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.sim.objects.pods import ContainerSpec, Role
from mpsd.common.errors import GpufracError

HEALTHY = "Healthy"
ENDPOINT_GRACE_S = 300.0
"""How long a resource keeps its capacity after its plugin went."""


class AllocationError(GpufracError):
    """The kubelet can't give a container its devices. The text is the kubelet's, so it opens with its words.
    `code`: what our plugin says beside it, empty where it is no refusal of it."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class ShortError(AllocationError):
    """There are too few devices now: a scheduler that knew would not have sent the pod."""


class PluginError(Exception):
    """A plugin answered with an error, or not at all. The text is the one gRPC for Go prints. `short`: it has no room
    now, by its status code. `code`: of why, where it names one."""

    def __init__(self, text: str, *, short: bool = False, code: str = "") -> None:
        super().__init__(text)
        self.short, self.code = short, code


class Endpoint(Protocol):
    """A registered plugin. Calls raise PluginError."""

    @property
    def options(self) -> pb.DevicePluginOptions: ...
    def allocate(self, device_ids: list[str]) -> pb.AllocateResponse: ...
    def preferred(self, available: list[str], must_include: list[str], size: int) -> pb.PreferredAllocationResponse: ...
    def pre_start(self, device_ids: list[str]) -> None: ...


class Slot(NamedTuple):
    """One container's devices of one resource."""

    pod_uid: str
    container: str
    resource: str


@dataclass(frozen=True, slots=True)
class Held:
    """Devices of a slot by NUMA node (-1: none known), and the plugin's answer as bytes."""

    by_numa: Mapping[int, tuple[str, ...]]
    answer: bytes

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(identifier for part in self.by_numa.values() for identifier in part)


@dataclass(frozen=True, slots=True)
class NodeResource:
    """What node status shows of one resource."""

    capacity: int = 0
    allocatable: int = 0


@dataclass(slots=True)
class _Resource:
    """One resource: healthy and unhealthy devices, and its plugin. `stopped_s` is None while that is connected."""

    healthy: set[str] = field(default_factory=set)
    unhealthy: set[str] = field(default_factory=set)
    numa: dict[str, tuple[int, ...]] = field(default_factory=dict)
    endpoint: Endpoint | None = None
    stopped_s: float | None = None


class DeviceManager:
    """One kubelet process' memory of devices.

    Args:
        held, registered: from the checkpoint. Registered resources have no capacity until their plugin is back.
        active_pods: UIDs of the pods that count as running now.
        save: writes the checkpoint: all slots, and healthy devices by resource.
        on_change: called after every change of lists or plugins, with the lock released.
    """

    def __init__(
        self,
        held: Mapping[Slot, Held],
        registered: Iterable[str],
        *,
        active_pods: Callable[[], set[str]],
        save: Callable[[Mapping[Slot, Held], Mapping[str, Iterable[str]]], None],
        on_change: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.RLock()
        self._held = dict(held)
        self._active_pods = active_pods
        self._save = save
        self._on_change = on_change
        self._rng = rng or random.Random()  # noqa: S311 - stands for the random order of sets in Go
        self._monotonic = monotonic
        self._resources = {name: _Resource(stopped_s=monotonic()) for name in registered}
        self._deleted: set[str] = set()
        self._allocated: dict[str, set[str]] = {}
        self._recount()
        self._given: set[Slot] = set()
        self._pending: str | None = None
        self._reuse: dict[str, set[str]] = {}

    # --- plugins -------------------------------------------------------------------------------------------------

    def connected(self, resource: str, endpoint: Endpoint) -> None:
        """A plugin registered: it takes the place of the one before."""
        with self._lock:
            entry = self._resources.setdefault(resource, _Resource())
            entry.endpoint, entry.stopped_s = endpoint, None
            self._deleted.discard(resource)
        self._on_change()

    def disconnected(self, resource: str) -> None:
        """The plugin went: all its devices are unhealthy at once, its capacity stays for a while."""
        with self._lock:
            entry = self._resources.get(resource)
            if entry is None or entry.endpoint is None:
                return
            entry.unhealthy |= entry.healthy
            entry.healthy = set()
            entry.stopped_s = self._monotonic()
        self._on_change()

    def listed(self, resource: str, devices: Iterable[pb.Device]) -> None:
        """A plugin's list: it replaces the one before. An ID given twice counts in both sets. Writes the checkpoint."""
        with self._lock:
            entry = self._resources.setdefault(resource, _Resource())
            entry.healthy, entry.unhealthy, entry.numa = set(), set(), {}
            for device in devices:
                (entry.healthy if device.health == HEALTHY else entry.unhealthy).add(device.ID)
                entry.numa[device.ID] = tuple(node.ID for node in device.topology.nodes)
            self._write()
        self._on_change()

    # --- admission -----------------------------------------------------------------------------------------------

    def begin_admission(self, pod_uid: str) -> None:
        """Nothing of this pod is taken back until its admission ends."""
        with self._lock:
            self._pending, self._reuse = pod_uid, {}

    def end_admission(self) -> None:
        """The pod is admitted, or refused."""
        with self._lock:
            self._pending = None

    def serves(self, resource: str) -> bool:
        """Whether the name is a device plugin's, now or by an allocation of the past."""
        with self._lock:
            given = {identifier for slot in self._given if slot.resource == resource for identifier in self._ids(slot)}
            return resource in self._resources or bool(self._allocated.get(resource, set()) - given)

    def allocate(
        self,
        pod_uid: str,
        container: ContainerSpec,
        given: Mapping[str, Held] | None = None,
        *,
        restarting: bool = False,
        running: bool = False,
    ) -> None:
        """Gives one container its devices, after those of the containers before it.

        Args:
            given: what it gets of resources whose plugin is not there: of another plugin than those under test.
            restarting: the kubelet has just started and does not know all pods yet.
            running: the container's process lives. Then a restarting kubelet leaves it alone.

        Raises:
            AllocationError: the pod has to be refused.
        """
        changed = False
        resources = list(container.resources.items())
        self._rng.shuffle(resources)
        for resource, count in resources:
            slot = Slot(pod_uid, container.name, resource)
            if given and resource in given:
                self._give(slot, given[resource])
                changed = True
                continue
            if not self.serves(resource):
                continue
            self.reclaim()
            with self._lock:
                reusable = set(self._reuse.get(resource, ()))
            wanted = self._pick(slot, count, reusable, skip=restarting and running)
            if wanted:
                self._ask(slot, wanted)
                changed = True
        if changed:
            with self._lock:
                self._write()
        self._offer_for_reuse(pod_uid, container)

    def _give(self, slot: Slot, held: Held) -> None:
        with self._lock:
            self._held[slot] = held
            self._given.add(slot)
            self._recount()

    def _ids(self, slot: Slot) -> frozenset[str]:
        return self._held[slot].ids if slot in self._held else frozenset()

    def _offer_for_reuse(self, pod_uid: str, container: ContainerSpec) -> None:
        """A plain init container passes its devices on; others keep theirs."""
        with self._lock:
            for slot, held in self._held.items():
                if (slot.pod_uid, slot.container) == (pod_uid, container.name):
                    reusable = self._reuse.setdefault(slot.resource, set())
                    if container.role is Role.INIT:
                        reusable |= held.ids
                    else:
                        reusable -= held.ids

    def _pick(self, slot: Slot, count: int, reusable: set[str], *, skip: bool) -> list[str]:
        """The devices to ask the plugin for, in random order; none where the container has them already."""
        resource = slot.resource
        with self._lock:
            before = self._held.get(slot)
            missing = count
            if before is not None:
                missing -= len(before.ids)
                if missing:
                    raise AllocationError(
                        f'pod "{slot.pod_uid}" container "{slot.container}" changed request for resource "{resource}" '
                        f"from {len(before.ids)} to {count}"
                    )
            if skip:
                return []
            entry = self._resources.get(resource)
            if entry is None:
                raise AllocationError(f"cannot allocate unregistered device {resource}")
            if not entry.healthy:
                raise ShortError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
            if before is not None and not before.ids <= entry.healthy:
                raise AllocationError(
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                )
            if missing <= 0:
                return []
            chosen = self._some(reusable, missing)
            missing -= len(chosen)
            if missing == 0:
                self._allocated.setdefault(resource, set()).update(chosen)
                return chosen
            available = entry.healthy - self._allocated.get(resource, set()) - set(chosen)
            if len(available) < missing:
                raise ShortError(
                    f"requested number of devices unavailable for {resource}. "
                    f"Requested: {missing}, Available: {len(available)}"
                )
            endpoint = entry.endpoint
        preferred = self._preferred(endpoint, available | set(chosen), chosen, count) & available
        with self._lock:
            chosen += self._some(preferred, missing)
            chosen += self._some(available - set(chosen), count - len(chosen))
            self._allocated.setdefault(resource, set()).update(chosen)
        self._rng.shuffle(chosen)
        return chosen

    def _preferred(
        self, endpoint: Endpoint | None, available: set[str], must_include: list[str], size: int
    ) -> set[str]:
        """The plugin's wish. What it names beyond the available ones is ignored by the caller."""
        if endpoint is None or not endpoint.options.get_preferred_allocation_available:
            return set()
        try:
            answer = endpoint.preferred(self._shuffled(available), list(must_include), size)
        except PluginError as error:
            raise AllocationError(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from error
        return set(answer.container_responses[0].deviceIDs) if answer.container_responses else set()

    def _ask(self, slot: Slot, wanted: list[str]) -> None:
        with self._lock:
            entry = self._resources.get(slot.resource)
            endpoint = entry.endpoint if entry is not None and entry.stopped_s is None else None
        try:
            if endpoint is None:
                raise AllocationError(f"unknown Device Plugin {slot.resource}")
            try:
                answer = endpoint.allocate(wanted)
            except PluginError as error:
                raise (ShortError if error.short else AllocationError)(str(error), error.code) from error
        except AllocationError:
            with self._lock:
                self._recount()
            raise
        if not answer.container_responses:
            raise AllocationError("no containers return in allocation response &AllocateResponse{}")
        with self._lock:
            numa = self._resources[slot.resource].numa if slot.resource in self._resources else {}
            by_numa: dict[int, list[str]] = {}
            for identifier in sorted(wanted):
                for node in numa.get(identifier) or (-1,):
                    by_numa.setdefault(node, []).append(identifier)
            self._held[slot] = Held(
                {node: tuple(ids) for node, ids in by_numa.items()},
                answer.container_responses[0].SerializeToString(),
            )

    def reclaim(self) -> None:
        """Takes back the devices of pods that are no longer active. The checkpoint is not written for it."""
        with self._lock:
            active = self._active_pods() | {self._pending}
            gone = [slot for slot in self._held if slot.pod_uid not in active]
            if gone:
                for slot in gone:
                    del self._held[slot]
                    self._given.discard(slot)
                self._recount()

    # --- looking in ----------------------------------------------------------------------------------------------

    def held(self, pod_uid: str, container: str) -> dict[str, Held]:
        """Resource -> what one container holds."""
        with self._lock:
            return {
                s.resource: held for s, held in self._held.items() if (s.pod_uid, s.container) == (pod_uid, container)
            }

    def endpoint(self, resource: str) -> Endpoint | None:
        """The connected plugin of a resource."""
        with self._lock:
            entry = self._resources.get(resource)
            return entry.endpoint if entry is not None and entry.stopped_s is None else None

    def resources(self) -> dict[str, NodeResource]:
        """Capacity and allocatable as node status shows them. A name once known stays with 0."""
        with self._lock:
            now_s = self._monotonic()
            for name, entry in list(self._resources.items()):
                if entry.stopped_s is not None and now_s - entry.stopped_s >= ENDPOINT_GRACE_S:
                    del self._resources[name]
                    self._deleted.add(name)
                    self._write()
            shown = {name: NodeResource() for name in self._deleted}
            for name, entry in self._resources.items():
                shown[name] = NodeResource(len(entry.healthy) + len(entry.unhealthy), len(entry.healthy))
            return shown

    # --- inside --------------------------------------------------------------------------------------------------

    def _recount(self) -> None:
        self._allocated = {}
        for slot, held in self._held.items():
            self._allocated.setdefault(slot.resource, set()).update(held.ids)

    def _write(self) -> None:
        self._save(dict(self._held), {name: sorted(entry.healthy) for name, entry in self._resources.items()})

    def _shuffled(self, identifiers: Iterable[str]) -> list[str]:
        listed = sorted(identifiers)
        self._rng.shuffle(listed)
        return listed

    def _some(self, identifiers: Iterable[str], count: int) -> list[str]:
        return self._shuffled(identifiers)[: max(0, count)]
