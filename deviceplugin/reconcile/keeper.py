"""Makes the world match the broker: CDI files, mpsd's desired state, the kubelet's view, released allocations.

Two threads. The *attacher* reacts at once: it writes and withdraws CDI files (the permission to start), pushes the
desired state and publishes lists. The *observer* looks at the kubelet every few seconds, releases what is gone and
checks that containers really carry our marker. Both compare desired with observed; a lost hint costs seconds only.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cdi.errors import CdiError
from cdi.model import Spec
from cdi.writer import Applied
from deviceplugin.grants.broker import Broker, Permissions
from deviceplugin.grants.holders.model import Holder, Observation, Shares
from deviceplugin.grants.ledger import LedgerError
from deviceplugin.kubelet import checkpoint
from deviceplugin.kubelet.places import KubeletPlaces, pod_exists
from deviceplugin.kubelet.podresources import Containers, PodResourcesError
from deviceplugin.plan import ids, render
from deviceplugin.plan.model import Allocation, Refusal, RefusalCode
from deviceplugin.plan.start import Grant, Way
from deviceplugin.reconcile.enforced import EnforcementCheck
from deviceplugin.reconcile.firstlook import FirstLook, Looked
from deviceplugin.reconcile.foreign import InitHolders, foreign_holders, reservations
from deviceplugin.reconcile.hardlimits import LimitKeeper, LimitState, MarkedCgroup
from deviceplugin.reconcile.lastowners import LastOwners
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.processes import PodProcess
from mpsd.common.threads import GuardedThread, Mishaps
from mpsd.localapi.snapshot import Desired, GpuClients, LimitQuery, LimitReading

log = get_logger("plugin")

OBSERVE_S = 5.0
"""How often the kubelet is looked at while allocations live; SLOW_OBSERVE_S while there are none."""
SLOW_OBSERVE_S = 15.0
SETTLE_S = 1.0
"""After a grant the kubelet is looked at this soon, so that its pod is known by name."""
NAMING_S = 0.5
UNKNOWN_S = 5.0
"""After our own start, how long CDI files of an earlier run stand before mpsd's first word."""
VERIFY_S = 30.0
"""How often the CDI directory is compared with what should be there, whatever happened."""
GUARD_S = 5.0
"""How often it is looked whether somebody else changed something in the CDI directories, unless that was noticed."""
CLIENTS_S = 10.0
PRESSED_CLIENTS_S = 2.0
"""How long mpsd may take to look up GPU processes; the shorter one while an Allocate waits for it."""


class SpecFiles(Protocol):
    """The CDI directory, our files only. `is_off`: whether somebody else changed something; `objections`: what of it
    is to be told."""

    def put(self, identifier: str, spec: Spec) -> bool: ...
    def remove(self, identifier: str) -> bool: ...
    def apply(self, desired: Mapping[str, Spec]) -> Applied: ...
    def is_off(self) -> bool: ...
    @property
    def objections(self) -> tuple[str, ...]: ...


class Mpsd(Protocol):
    """The calls the keeper makes to mpsd; they raise GpufracError."""

    def apply(self, desired: Desired) -> None: ...
    def desired(self) -> Desired: ...
    def clients(self, uuids: Sequence[str], timeout_s: float) -> Mapping[str, GpuClients]: ...
    def limits(self, queries: Sequence[LimitQuery]) -> Sequence[LimitReading]: ...
    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading: ...


class Kubelet(Protocol):
    def list(self) -> Containers: ...


class KubeletSocket(Protocol):
    """Where the kubelet takes registrations, see SocketFile."""

    @property
    def born_unix_s(self) -> float: ...
    def look(self) -> int | None: ...


@dataclass(slots=True)
class Report:
    """What the keeper knows beyond the broker; read by status. Replaced whole, never changed in place by readers."""

    kubelet_error: str = "not asked yet"
    checkpoint_error: str = ""
    spec_error: str = ""
    spec_objections: tuple[str, ...] = ()
    stale: frozenset[Shares] = frozenset()
    """Shares that the kubelet's checkpoint holds for pods that are gone, and nobody else does."""
    published: frozenset[str] = frozenset()
    unenforced: Mapping[str, str] = field(default_factory=dict)
    doubts: Mapping[str, str] = field(default_factory=dict)
    release_blocked: Mapping[str, str] = field(default_factory=dict)
    held_back: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, LimitState] = field(default_factory=dict)
    limit_drifts: int = 0


class Keeper:
    """Owns both threads.

    Args:
        pod_processes: one look at all processes of pods, by pod UID.
        marked_cgroups: one look at all cgroups of containers with our marker, below a root.
        blind: why processes of containers can't be seen at all, empty when they can.
    """

    def __init__(
        self,
        broker: Broker,
        specs: SpecFiles,
        mpsd: Mpsd,
        kubelet: Kubelet,
        *,
        places: KubeletPlaces,
        kubelet_socket: KubeletSocket,
        pod_processes: Callable[[], Mapping[str, list[PodProcess]]],
        marked_cgroups: Callable[[str], Iterable[MarkedCgroup]],
        blind: str = "",
        housekeeping: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker, self._specs, self._mpsd, self._kubelet = broker, specs, mpsd, kubelet
        self._plugins_directory = places.device_plugins
        self._pods_directory = places.pods
        self._housekeeping = housekeeping
        self._monotonic = monotonic
        self.report = Report()
        self._stop = threading.Event()
        self._look = threading.Event()
        self._started_s = monotonic()
        self._verified_s = 0.0
        self._guarded_s = float("-inf")
        self._named_s = 0.0
        self._pushed: Desired | None = None
        self._push_needed = True
        self._spec_lock = threading.Lock()
        self._attached = threading.Condition(self._spec_lock)
        self._settable = False
        """Whether files tell the toolkit's hook a limit at every level."""
        self._observe_lock = threading.Lock()
        self._observed_s = float("-inf")
        self._published: dict[str, Grant] = {}
        """Keys of the files written, and what they say."""
        self._containers: Containers = {}
        self._limits = LimitKeeper(broker, mpsd, marked_cgroups, monotonic=monotonic)
        self._enforced = EnforcementCheck(
            broker,
            pods_directory=self._pods_directory,
            pod_processes=pod_processes,
            look_up=lambda uuids: self._look_up(uuids, CLIENTS_S),
            blind=blind,
            monotonic=monotonic,
        )
        self._last_owners = LastOwners(
            broker,
            look_up=lambda uuids: self._look_up(uuids, PRESSED_CLIENTS_S),
            pod_processes=pod_processes,
            pod_exists=self._pod_exists,
        )
        self._init_holders = InitHolders()
        self._first_look = FirstLook(broker, mpsd)
        self._foreign: dict[str, str] = {}
        self._resent: set[str | Shares] = set()
        self._ledger_error = ""
        self._ledger_probed = False
        self._kubelet_socket = kubelet_socket
        self._kubelet_seen: int | None = None
        self._adoption_refused: dict[Shares, str] = {}
        self._removed: frozenset[str] = frozenset()
        """Of the pods that hold something, those that were gone at the last look."""
        self._threads = [
            GuardedThread(self._attach_loop, "attacher"),
            GuardedThread(self._observe_loop, "observer"),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops both threads. CDI files stay: containers may start while we restart."""
        self._stop.set()
        self._look.set()
        self._broker.wake()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def mpsd_returned(self) -> None:
        """A (new) mpsd answers: it gets the whole desired state again."""
        self._push_needed = True
        self._broker.wake()
        if not self._first_look.looked().all:
            self.look()

    def look(self) -> None:
        """Look at the kubelet soon."""
        self._look.set()

    def wait_attached(self, key: str, timeout_s: float) -> Grant | None:
        """Waits for the CDI file of a live allocation as it is planned now, the permission to start; what it says, None
        after the time."""

        def attached() -> Grant | None:
            grant = self._published.get(key)
            return grant if grant is not None and grant == self._broker.grant(key) else None

        with self._attached:
            self._attached.wait_for(lambda: attached() is not None or self._stop.is_set(), timeout_s)
            return attached()

    # --- attacher ------------------------------------------------------------------------------------------------

    def _attach_loop(self) -> None:
        mishaps = Mishaps("attacher", "the attacher failed and goes on", log)
        wait_s = 0.0
        while not self._stop.is_set():
            granted = self._broker.wait_dirty(wait_s)
            if self._stop.is_set():
                return
            try:
                self.note_ledger()
                wait_s = min(GUARD_S, self.attach() or GUARD_S)
                if self._push_needed or self.report.spec_error or self.report.held_back or self._broker.ledger_error:
                    wait_s = min(wait_s, 1.0)
                if granted:
                    self._look.set()
                mishaps.none()
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error)
                wait_s = 1.0

    def note_ledger(self) -> None:
        """Looks whether records can be written: at the start, and for as long as they could not be. Every failure is
        told, also one that is over by the time it is looked at."""
        self._tell_ledger()
        if self._ledger_error or not self._ledger_probed:
            self._ledger_probed = True
            self._broker.probe_ledger()
            self._tell_ledger()

    def _tell_ledger(self) -> None:
        error = self._broker.ledger_error
        if error and not self._ledger_error:
            log.error("allocations can't be recorded; nothing new is offered", error=error)
        elif self._ledger_error and not error:
            log.info("allocations can be recorded again")
        self._ledger_error = error

    def attach(self) -> float | None:
        """One round: files withdrawn first, lists published, desired state pushed, and only then files written: mpsd
        may take long to answer. Seconds until a list changes by time alone."""
        settled = self._broker.node.mpsd_seen or self._monotonic() - self._started_s >= UNKNOWN_S
        looked = self._first_look.looked()  # before the grants: what is adopted from now on may be missing there
        permissions = self._broker.permissions()
        problems = self._withdraw_all_but(permissions.permitted) if settled else []
        deadline_s = self._broker.publish()
        due = not self._verified_s or self._monotonic() - self._verified_s >= VERIFY_S
        settable = self._broker.node.hard.settable
        verify = due or bool(self.report.spec_error) or settable != self._settable
        self._settable = settable
        self._push(looked, again=verify)
        if settled:
            if self._broker.version != permissions.version:
                permissions = self._broker.permissions()
            verify = verify or self._files_are_off()
            problems += self._write_all(permissions, verify=verify, looked=looked.all)
            self._note_objections()
            self._note_spec_error("; ".join([problem for problem in problems if problem][:3]))
        return deadline_s

    def _withdraw_all_but(self, permitted: Mapping[str, Grant]) -> list[str]:
        with self._spec_lock:
            problems = [self._withdraw(key) for key in sorted(self._published.keys() - permitted.keys())]
            self.report.published = frozenset(self._published)
        return problems

    def _write_all(self, permissions: Permissions, *, verify: bool, looked: bool) -> list[str]:
        """Writes what is missing. To `verify` also puts right what is there: all of it once the world was `looked` at,
        until then only what has a record."""
        permitted = permissions.permitted
        changed = {key for key, grant in permitted.items() if self._published.get(key) != grant}
        held_back = self._last_owners.hold_back([permitted[key][0] for key in changed])
        with self._spec_lock:
            wanted = permitted.keys() if verify else changed
            # What was released since must not come back.
            grants = {key: permitted[key] for key in wanted - held_back.keys() if self._broker.is_live(key)}
            if verify and looked:
                problems = self._verify(grants)
                self._verified_s = self._monotonic()
            else:
                problems = [self._withdraw(key) for key in sorted({*permissions.barred, *held_back} if verify else ())]
                problems += [self._write(*grant) for grant in grants.values()]
            self.report.published = frozenset(self._published)
            self.report.held_back = held_back
            self._attached.notify_all()
        return problems

    def _verify(self, permitted: Mapping[str, Grant]) -> list[str]:
        """Makes the directory exactly what is permitted, whatever was in it."""
        try:
            applied = self._specs.apply({key: self._spec(*grant) for key, grant in permitted.items()})
        except CdiError as error:
            return [str(error)]
        self._published = {key: grant for key, grant in permitted.items() if key not in applied.errors}
        return [str(error) for error in applied.errors.values()]

    def _files_are_off(self) -> bool:
        now_s = self._monotonic()
        if now_s - self._guarded_s < GUARD_S:
            return False
        self._guarded_s = now_s
        with self._spec_lock:
            return self._specs.is_off()

    def _spec(self, allocation: Allocation, way: Way) -> Spec:
        writable = self._broker.node.config.mps.writable_mount
        return render.spec(allocation, *way, writable=writable, settable=self._settable)

    def _write(self, allocation: Allocation, way: Way) -> str:
        try:
            self._specs.put(allocation.key, self._spec(allocation, way))
        except CdiError as error:
            return str(error)
        self._published[allocation.key] = (allocation, way)
        return ""

    def _withdraw(self, key: str) -> str:
        try:
            self._specs.remove(key)
        except CdiError as error:
            return str(error)
        self._published.pop(key, None)
        return ""

    def _note_spec_error(self, text: str) -> None:
        if text != self.report.spec_error:
            if text:
                log.error("CDI files do not match what is permitted", error=text)
            self.report.spec_error = text

    def _note_objections(self) -> None:
        objections = self._specs.objections
        for text in objections:
            if text not in self.report.spec_objections:
                log.error("CDI devices of ours are not ours alone", reason=text)
        self.report.spec_objections = objections

    def _push(self, looked: Looked, *, again: bool) -> None:
        desired = self._broker.desired()
        if desired == self._pushed and not self._push_needed and not again:
            return
        self._push_needed = False  # before the call: a new mpsd may come up during it
        try:
            self._mpsd.apply(self._first_look.with_unknown(desired, looked))
        except GpufracError as error:
            self._push_needed = True
            log.debug("the desired state waits for mpsd", error=str(error))
            return
        self._pushed = desired

    # --- observer ------------------------------------------------------------------------------------------------

    def _observe_loop(self) -> None:
        mishaps = Mishaps("observer", "the observer failed and goes on", log)
        while not self._stop.is_set():
            try:
                if self.observe():
                    self.collect()
                self.check_markers()
                self.check_limits()
                self._housekeeping()
                mishaps.none()
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error)
            idle = not self._broker.allocations()
            if self._look.wait(SLOW_OBSERVE_S if idle else OBSERVE_S):
                self._look.clear()
                self._stop.wait(SETTLE_S)

    def recheck(self, *, release: bool = True) -> None:
        """While an Allocate waits: looks at the kubelet once and, before a refusal, lets go at once of what is gone."""
        seen = self.observe()
        if unseen := self._broker.unseen():
            self._broker.observe_started(self._last_owners.have_run(unseen))
        if seen and release:
            self.collect(pressed=True)

    def containers_of(self, namespace: str, pod: str) -> frozenset[str]:
        """The containers of a pod that the kubelet showed last: all but plain init containers."""
        return frozenset(name for where, of, name in self._containers if (where, of) == (namespace, pod))

    def name_holders(self) -> None:
        """Looks at the kubelet if an allocation's pod is not known yet, but not more often than every NAMING_S."""
        now_s = self._monotonic()
        if now_s - self._named_s >= NAMING_S and self._broker.has_unnamed():
            self._named_s = now_s
            self.observe()

    def observe(self, newer_than_s: float = 0.0) -> bool:
        """Looks at the kubelet once. False when it does not answer: then nothing is concluded.

        Args:
            newer_than_s: a look that is younger will do.
        """
        with self._observe_lock:
            if self._monotonic() - self._observed_s < newer_than_s:
                return True
            self._notice_kubelet()
            judged = self._broker.judgeable()
            try:
                containers = self._kubelet.list()
            except PodResourcesError as error:
                self._note_kubelet(str(error))
                return False
            if self._notice_kubelet():
                return False  # whose answer it was can't be told
            self._note_kubelet("")
            entries, self.report.checkpoint_error = self._read_checkpoint()
            seen = observation(containers, entries, self._pod_exists, self._holding_pods())
            self._removed = seen.removed
            uuids = {gpu.info.uuid for gpu in self._broker.node.gpus}
            reserved = reservations(containers, self._broker.node.config.annotations, uuids)
            ours = self._broker.resource_names()
            by_init = self._init_holders.look(seen, ours, uuids - reserved.keys())
            foreign = {**by_init, **foreign_holders(containers, ours, uuids, reserved)}
            self._note_foreign(foreign)
            self.report.stale = stale_shares(seen, entries or (), self._broker.resource_names())
            self._broker.observe_kubelet(seen, foreign, judged, frozenset(reserved))
            recorded = self._adopt(seen)
            self._first_look.adopted(checkpoint=entries is not None, recorded=recorded)
            self._containers = containers
            self._observed_s = self._monotonic()
            return True

    def _notice_kubelet(self) -> bool:
        """Whether another kubelet runs than at the last look; the broker is told. Looked at with every observation,
        not only when somebody hints: a young kubelet shows half of its pods."""
        now = self._kubelet_socket.look()
        if now is None or now == self._kubelet_seen:
            return False
        if self._kubelet_seen is not None:
            log.info("the kubelet restarted")
        self._kubelet_seen = now
        self._broker.kubelet_restarted(age_s=max(0.0, time.time() - self._kubelet_socket.born_unix_s))
        return True

    def _read_checkpoint(self) -> tuple[list[checkpoint.Entry] | None, str]:
        try:
            return checkpoint.read(self._plugins_directory), ""
        except checkpoint.CheckpointError as error:
            return None, str(error)

    def _pod_exists(self, uid: str) -> bool:
        return pod_exists(self._pods_directory, uid)

    def _holding_pods(self) -> set[str]:
        return {uid for uids in self._broker.pods().values() for uid in uids}

    def guard(self) -> None:
        """Somebody else changed a file in the CDI directories: whether it concerns us is looked at now."""
        self._guarded_s = float("-inf")
        self._broker.wake()

    def hint_pods(self) -> None:
        """Something may have changed about pods: looks at the kubelet soon if one that holds something is gone."""
        if any(not self._pod_exists(uid) for uid in self._holding_pods() - self._removed):
            self.look()

    def _note_kubelet(self, error: str) -> None:
        if error != self.report.kubelet_error and error:
            log.warning("the kubelet does not show its pods", error=error)
        self.report.kubelet_error = error

    def _note_foreign(self, foreign: dict[str, str]) -> None:
        for gpu in foreign.keys() - self._foreign.keys():
            log.warning("a GPU is held by another plugin", gpu=gpu, reason=foreign[gpu])
        for gpu in self._foreign.keys() - foreign.keys():
            log.info("a GPU is no longer held by another plugin", gpu=gpu)
        self._foreign = foreign

    def _adopt(self, seen: Observation) -> bool:
        """Takes in containers without a record, plain init containers among them, under the keys of their answers.
        False where one could not be recorded, which may be over later."""
        held = {**(seen.checkpointed or {}), **seen.listed}
        missing = missing_records(held, self._broker.allocations(), self._broker.resource_names())
        refused: dict[Shares, str] = {}
        recorded = True
        for shares in missing:
            holder = held[shares]
            answered = (seen.checkpointed or {}).get(shares, holder)
            facts = {"resource": shares[0], "pod": f"{holder.namespace}/{holder.pod}", "container": holder.container}
            try:
                outcome = self._broker.adopt(*shares, answered.key)
            except GpufracError as error:
                recorded = recorded and not isinstance(error, LedgerError)
                outcome = Refusal(RefusalCode.INVALID, str(error))
            if isinstance(outcome, Refusal):
                refused[shares] = outcome.text
                if self._adoption_refused.get(shares) != outcome.text:
                    log.error("cannot adopt a container that holds our shares", reason=outcome.text, **facts)
            else:
                log.warning("adopted a container that held our shares without a record", key=outcome.key, **facts)
        self._adoption_refused = refused
        return recorded

    def collect(self, *, pressed: bool = False) -> None:
        """Releases allocations that no kubelet entry and no process holds: CDI file first, record last."""
        going = self._broker.releasable(pressed=pressed)
        blocked: dict[str, str] = {}
        if going:
            uuids = sorted({gpu for allocation in going for gpu in allocation.gpus})
            lost = self._broker.node.lost(uuids)
            there = [uuid for uuid in uuids if uuid not in lost]
            clients = self._look_up(there, PRESSED_CLIENTS_S if pressed else CLIENTS_S) if there else {}
            blocked = self._last_owners.objections(going, clients)
            for allocation in going:
                if allocation.key not in blocked and (reason := self._release(allocation, pressed=pressed)):
                    blocked[allocation.key] = reason
        self.report.release_blocked = blocked
        self._resend_for_stale()

    def _look_up(self, uuids: Sequence[str], timeout_s: float) -> Mapping[str, GpuClients]:
        """Who uses these GPUs now."""
        try:
            return self._mpsd.clients(uuids, timeout_s)
        except GpufracError as error:
            return dict.fromkeys(uuids, GpuClients(error=str(error)))

    def _release(self, allocation: Allocation, *, pressed: bool) -> str:
        """Releases one allocation that nobody uses; why it stays, or nothing."""
        if not self._broker.begin_release(allocation.key, pressed=pressed):
            return ""  # given out again meanwhile
        with self._spec_lock:
            problem = self._withdraw(allocation.key)
        if not problem:
            try:
                self._broker.release(allocation.key)
            except GpufracError as error:
                problem = str(error)
        if problem:
            self._broker.end_release(allocation.key)
            return problem
        log.info("released", key=allocation.key, resource=allocation.resource, group=allocation.group)
        return ""

    def _resend_for_stale(self) -> None:
        """Has the kubelet rewrite its checkpoint once for entries that only the checkpoint keeps alive, or that are of
        pods that are gone."""
        stale: set[str | Shares] = {*self._broker.checkpoint_only(), *self.report.stale, *self._init_holders.entries}
        if stale - self._resent:
            self._broker.resend()
        self._resent = stale

    def check_markers(self) -> None:
        """Finds containers that are not held to what was granted, as far as their processes show."""
        self._enforced.look(self._published.keys(), self._containers)
        self.report.unenforced, self.report.doubts = self._enforced.found.unenforced, self._enforced.found.doubts

    def check_limits(self) -> None:
        """Finds containers whose hard limit is not in force, and sets it again."""
        self._limits.look()
        self.report.limits, self.report.limit_drifts = self._limits.report, self._limits.drifts


def observation(
    containers: Containers,
    entries: list[checkpoint.Entry] | None,
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


def stale_shares(seen: Observation, entries: Iterable[checkpoint.Entry], resources: Iterable[str]) -> frozenset[Shares]:
    """Shares of ours that the checkpoint holds for pods that are gone only (pure)."""
    ours = set(resources)
    held = {*seen.listed, *(seen.checkpointed or {})}
    named = {(entry.resource, entry.device_ids) for entry in entries if entry.resource in ours}
    return frozenset(named - held)


def missing_records(
    listed: Iterable[Shares], allocations: Iterable[Allocation], resources: Iterable[str]
) -> list[Shares]:
    """Containers at the kubelet with shares of ours that no record names (pure)."""
    recorded = {(allocation.resource, allocation.device_ids) for allocation in allocations}
    ours = set(resources)
    return [shares for shares in listed if shares[0] in ours and shares not in recorded and _are_ours(shares[1])]


def _are_ours(device_ids: tuple[str, ...]) -> bool:
    return all(ids.SEPARATOR in identifier for identifier in device_ids)
