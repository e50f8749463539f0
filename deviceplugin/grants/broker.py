"""The one owner of what this node has granted: planner, accounts and ledger behind one lock.

Every front end goes through here: device plugin calls, and annotated containers. Allocate never waits for mpsd, NVML,
the kubelet or a list; the one I/O under the lock is the durable record, so that a grant that was answered is never
lost.
Who needs to react to a change waits on `wait_dirty` (the keeper) or `wait_list` (the kubelet's streams).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import structs

from deviceplugin.grants.clients import Pods
from deviceplugin.grants.drains import Drain, Drains, checked_reason
from deviceplugin.grants.holders.holders import Holders
from deviceplugin.grants.holders.model import Holder, Observation
from deviceplugin.grants.ledger import Ledger, LedgerError
from deviceplugin.grants.offers import Offers
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import Advertisement, advertise
from deviceplugin.plan.allocate import plan
from deviceplugin.plan.annotated import plan_container, same_ask, same_plan
from deviceplugin.plan.model import (
    Allocation,
    ContainerAsk,
    ContainerRef,
    HardAbility,
    NodeView,
    Refusal,
    RefusalCode,
    ResourceView,
    newer,
)
from deviceplugin.plan.preferred import preferred
from deviceplugin.plan.start import (
    Grant,
    attach_objection,
    gpus_objection,
    hard_objection,
    start_objection,
    way,
    with_effective_enforcement,
)
from deviceplugin.plan.view import RESERVED, daemon_trouble, gpu_view, node_view
from mpsd.common.errors import GpufracError
from mpsd.config.model import Delivery, Enforcement, FixedMemory, NodeConfig, Resource, UnitMemory
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.localapi.snapshot import Desired, DesiredAllocation, GpuStatus, HardLimits, Snapshot

DAEMON_GRACE_S = 10.0
"""How long a daemon (or mpsd) may be away before free shares turn Unhealthy: a restart takes about a second."""
GRANT_REST_S = 0.01
EMPTY = Advertisement(())


class Recheck(Protocol):
    """Looks at the kubelet once, and with `release` lets go at once of what is gone."""

    def __call__(self, *, release: bool = True) -> None: ...


class Published(msgspec.Struct, frozen=True):
    """A resource's list and its generation, which grows with every change."""

    generation: int
    advertisement: Advertisement


class Broker:
    """Thread-safe; every public method takes the lock for microseconds, `allocate` for one durable write."""

    def __init__(
        self,
        config: NodeConfig,
        ledger: Ledger,
        drains: Drains,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._lock = threading.Lock()
        self._dirty_condition = threading.Condition(self._lock)
        self._list_condition = threading.Condition(self._lock)
        self._monotonic, self._wall = monotonic, wall
        self._ledger, self._drains = ledger, drains
        self._config = config
        self._accounts = Accounts()
        self._holders = Holders(self._accounts)
        self._reserved: frozenset[str] = frozenset()
        self._gpus: tuple[GpuStatus, ...] = ()
        self._absence = "mpsd has not answered yet"
        self._mpsd_seen = False
        self._heard_unix_s: float | None = None
        self._complete = False
        self._releasing: set[str] = set()
        self._ledger_error = ""
        self._trouble_since: dict[str, tuple[str, float]] = {}
        self._foreign: dict[str, str] = {}
        self._protocols: dict[str, int] = {}
        self._hard = HardAbility()
        self._cgroup_root = Snapshot(instance="", generation=0).cgroup_root
        self._driver_version: str | None = None
        self._kind_trouble: dict[str, str] = {}
        self._generation = 0
        self._offers = Offers()
        self._lists: dict[str, Published] = {}
        self._view = NodeView(gpus={}, groups={}, resources={})
        self._dirty = self._urgent = True
        self._version = 0
        self._closed = False
        self.problems: tuple[str, ...] = ()
        allocations, problems = ledger.load()
        self.problems = (*problems, *filter(None, [drains.problem]))
        for allocation in allocations:  # the oldest first
            if allocation.container is not None and (older := self._accounts.of_container(allocation.container)):
                self._accounts.remove(older.key)  # a crash came between its record and the end of the older one
                with contextlib.suppress(LedgerError):
                    ledger.remove(older.key)
            self._accounts.add(allocation)
            self._holders.shares.admitted(allocation.key)
            self._generation = max(self._generation, allocation.generation)
        self._rebuild()

    # --- what front ends ask -------------------------------------------------------------------------------------

    def allocate(
        self, resource: str, device_ids: Sequence[str], recheck: "Recheck | None" = None
    ) -> Allocation | Refusal:
        """Grants shares durably, or refuses. Containers of one pod that ask for the same shares have one allocation;
        no other pod gets it.

        Args:
            recheck: looks at the kubelet once more and reports what it saw (`observe_kubelet`). Called without the
                lock, and only where it matters: where the shares have a live allocation whose pod may be admitted
                already, and before a refusal for lack of room or a mode conflict.

        Raises:
            LedgerError: the grant can't be recorded; nothing is granted.
        """
        wanted = tuple(sorted(device_ids))
        with self._lock:
            doubtful = self._holders.question(resource, wanted)
            outcome = None if doubtful else self._allocate(resource, wanted)
        if outcome is None:
            if recheck is not None:
                recheck(release=False)
            with self._lock:
                outcome = self._allocate(resource, wanted)
        if isinstance(outcome, Refusal) and outcome.code is not RefusalCode.INVALID and recheck is not None:
            recheck()
            with self._lock:
                outcome = self._allocate(resource, wanted)
        return outcome

    def _allocate(self, resource: str, wanted: tuple[str, ...]) -> Allocation | Refusal:
        live, left = self._accounts.newest(resource, wanted), self._holders.left(resource, wanted)
        if live is not None and live.key not in left and live.key not in self._releasing:
            self._holders.shares.renew(live.key)
            return live  # another container of the same pod, or the kubelet asks again
        view = self._view.resources.get(resource)
        if view is None:
            return Refusal(RefusalCode.INVALID, f"{resource}: this node does not offer it")
        outcome = plan(
            view,
            self._view,
            self._accounts,
            wanted,
            generation=self._next_generation(),
            delivery=self._config.cdi.delivery,
            gpu_kind=self._hard.kind,
            after=left,
        )
        if isinstance(outcome, Allocation):
            outcome = structs.replace(outcome, created_unix_s=round(self._wall(), 3))
            self._record(outcome)
            self._accounts.add(outcome)
            if outcome.delivery is Delivery.BOTH:  # a runtime without CDI waits for no file
                self._holders.may_start((outcome,))
            self._offers.granted(resource, outcome.group, self._monotonic())
            if self._published(resource).advertisement.offer not in (None, outcome.group):
                self._publish()  # it has moved while this pod is admitted: back, before its next container asks
            if left:
                self._note_vacated()
            self._mark_dirty(urgent=False)
        return outcome

    def allocate_container(
        self, ask: ContainerAsk, *, by_cdi: bool, recheck: Callable[[], None] | None = None
    ) -> Allocation | Refusal:
        """Grants an annotated container what it asks for, durably, or refuses. One that is made anew keeps what it
        held, unless it asks for something else now or can have better.

        Args:
            by_cdi: whether its runtime takes CDI devices from us.
            recheck: as `allocate`.

        Raises:
            LedgerError: as `allocate`.
        """
        with self._lock:
            outcome = self._allocate_container(ask, by_cdi=by_cdi)
        if isinstance(outcome, Refusal) and outcome.code is not RefusalCode.INVALID and recheck is not None:
            recheck()
            with self._lock:
                outcome = self._allocate_container(ask, by_cdi=by_cdi)
        return outcome

    def _allocate_container(self, ask: ContainerAsk, *, by_cdi: bool) -> Allocation | Refusal:
        self._holders.annotated.runs(ask.container.pod_uid)
        self._note_vacated()
        old = self._accounts.of_container(ask.container)
        if old is not None and old.key in self._releasing:
            return Refusal(RefusalCode.NO_ROOM, "what it held before is just being released")
        outcome = plan_container(
            ask,
            self._view,
            self._accounts if old is None else self._accounts.without(old.key),
            generation=self._next_generation(),
            gpu_kind=self._hard.kind if by_cdi else "",
        )
        if isinstance(outcome, Refusal):
            keeps = old is not None and not old.adopted and same_ask(old, ask)
            return old if keeps and old is not None else outcome
        if old is not None and same_plan(old, outcome):
            return old
        return self._replace(old, outcome)

    def adopt_container(self, ask: ContainerAsk, key: str | None, *, trusted: bool, by_cdi: bool) -> Allocation:
        """Takes in an annotated container that runs without a record of ours: what it takes counts, fit or not.

        Args:
            key: what it says it was started with. With a hard limit it is believed: that is set again where it is not
                in force.
            trusted: believe it whatever the limit is.

        Raises:
            LedgerError: as `allocate`.
            GpufracError: it can't be planned at all.
        """
        with self._lock:
            self._holders.annotated.runs(ask.container.pod_uid)
            self._note_vacated()
            if (known := self._accounts.of_container(ask.container)) is not None:
                return known
            outcome = plan_container(
                ask,
                self._view,
                self._accounts,
                generation=self._next_generation(),
                gpu_kind=self._hard.kind if by_cdi else "",
                force=True,
            )
            if isinstance(outcome, Refusal):
                raise GpufracError(outcome.text)
            believed = trusted or outcome.enforcement is Enforcement.HARD
            if key is not None and key not in self._accounts and believed:
                outcome = structs.replace(outcome, key=key)
            else:
                outcome = structs.replace(outcome, enforcement=Enforcement.NONE, soft_bytes=0)
            return self._replace(None, outcome)

    def lower_limit(self, key: str, limit_bytes: int) -> Allocation:
        """Lowers the limit of a live share for as long as it lives. Raises LedgerError; then nothing changed."""
        with self._lock:
            old = self._accounts.get(key)
            if old is None:
                raise GpufracError(f"allocation {key} is gone")
            if limit_bytes >= old.limit_bytes:
                return old
            soft_bytes = min(old.soft_bytes, limit_bytes)
            new = structs.replace(old, limit_bytes=limit_bytes, soft_bytes=soft_bytes)
            self._record(new)
            self._accounts.replace(new)
            self._mark_dirty()
            return new

    def _next_generation(self) -> int:
        self._generation = max(self._generation + 1, int(self._wall() * 1000))
        return self._generation

    def _replace(self, old: Allocation | None, new: Allocation) -> Allocation:
        """Puts a new plan of a container in the place of its old one. A crash between the two records leaves both; the
        newer one counts."""
        new = structs.replace(new, created_unix_s=round(self._wall(), 3))
        self._record(new)
        if old is not None:
            self._accounts.remove(old.key)
            with contextlib.suppress(LedgerError):
                self._ledger.remove(old.key)
        self._accounts.add(new)
        self._mark_dirty()
        return new

    def _record(self, allocation: Allocation) -> None:
        """Writes the record. When that fails, nothing more is offered until `probe_ledger` finds it mended: each
        refused pod would only be followed by the next."""
        try:
            self._ledger.put(allocation)
        except LedgerError as error:
            self._note_ledger(str(error))
            raise

    def _note_ledger(self, error: str) -> None:
        if error != self._ledger_error:
            self._ledger_error = error
            self._rebuild()
            self._mark_dirty()

    def probe_ledger(self) -> None:
        """Looks whether records can be written."""
        with self._lock:
            self._probe_ledger()

    def _probe_ledger(self) -> None:
        try:
            self._ledger.probe()
        except LedgerError as error:
            self._note_ledger(str(error))
        else:
            self._note_ledger("")

    @property
    def ledger_error(self) -> str:
        """Why nothing can be recorded, and so nothing is offered; empty when fine."""
        return self._ledger_error

    def preferred(self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str]:
        """The shares a container should get; see plan.preferred. Unknown resources have no preference."""
        with self._lock:
            view = self._view.resources.get(resource)
            return preferred(view, self._view, self._accounts, available, must_include, size) if view else []

    def wait_list(self, resource: str, seen: int, timeout_s: float, stop: Callable[[], bool]) -> Published | None:
        """The resource's list once its generation is not `seen`; None after the time or when `stop()` turns true."""
        with self._list_condition:
            self._list_condition.wait_for(
                lambda: stop() or self._closed or self._published(resource).generation != seen, timeout_s
            )
            now = self._published(resource)
            return now if now.generation != seen and not stop() else None

    def wake_streams(self) -> None:
        """Lets every waiting stream look at its `stop()` again."""
        with self._list_condition:
            self._list_condition.notify_all()

    # --- what the world tells ------------------------------------------------------------------------------------

    def observe_snapshot(self, snapshot: Snapshot | None) -> None:
        """Takes in what mpsd sees; None: mpsd does not answer.

        No GPUs at all is not believed at once: a driver that is being loaded looks like that, and the shares of running
        pods must not turn Unhealthy for it. Nothing starts meanwhile.
        """
        with self._lock:
            heard = not self._absence
            if snapshot is None:
                self._absence = "mpsd does not answer"
            else:
                self._mpsd_seen = True
                self._absence = "" if snapshot.gpus else f"mpsd sees no GPU: {snapshot.reason or 'none is there'}"
                if snapshot.gpus:
                    self._gpus = _with_gone(snapshot, self._gpus)
                    limits = newer(self._hard.limits, snapshot.hard_limits)
                    self._hard = structs.replace(self._hard, limits=limits)
                    self._cgroup_root = snapshot.cgroup_root
                    self._driver_version = snapshot.driver_version
                    self._note_protocols(snapshot.gpus)
                    self._complete = self._complete or not snapshot.reason
            if heard and self._absence:
                self._heard_unix_s = self._wall()
            self._rebuild()
            self._mark_dirty()

    def restore(self, gpus: tuple[GpuStatus, ...], hard_limits: HardLimits) -> None:
        """The node as an earlier run knew it: the first list must not wait for mpsd."""
        with self._lock:
            if not self._gpus:
                self._gpus = gpus
                self._hard = structs.replace(self._hard, limits=hard_limits)
                self._note_protocols(gpus)
                self._rebuild()
                self._publish()

    def _note_protocols(self, gpus: Iterable[GpuStatus]) -> None:
        self._protocols |= {gpu.info.uuid: gpu.daemon.protocol for gpu in gpus if gpu.daemon is not None}

    def set_gpu_kind(self, kind: str, trouble: Mapping[str, str], hooked: frozenset[str] = frozenset()) -> None:
        """Which CDI kind carries the GPUs' device nodes (empty: none), why it lacks a GPU, and which kinds set memory
        limits."""
        with self._lock:
            hard = structs.replace(self._hard, kind=kind, hooked=hooked)
            if (hard, dict(trouble)) != (self._hard, self._kind_trouble):
                self._hard, self._kind_trouble = hard, dict(trouble)
                self._rebuild()
                self._mark_dirty()

    def set_runtime(self, *, starts_wait: bool, takes_cdi: bool) -> None:
        """Whether the container runtime keeps a program from starting when we say so, and takes CDI devices from us."""
        with self._lock:
            self._set_hard(structs.replace(self._hard, starts_wait=starts_wait, takes_cdi=takes_cdi))

    def set_cdi_loses(self, reason: str) -> None:
        """Why a pod's or an image's environment beats that of a share's CDI device; empty: it does not, as far as is
        known."""
        with self._lock:
            self._set_hard(structs.replace(self._hard, cdi_loses=reason))

    def _set_hard(self, hard: HardAbility) -> None:
        if hard != self._hard:
            self._hard = hard
            self._rebuild()
            self._mark_dirty()

    def apply_config(self, config: NodeConfig) -> None:
        """Puts a new config in force. Live allocations keep their plans."""
        with self._lock:
            self._config = config
            self._rebuild()
            self._mark_dirty()

    def drain(self, gpu: str, reason: str = "") -> Drain:
        """Gives nothing new on a GPU (by UUID) from now on, in no mode; what is held goes on. Again with the same
        reason, nothing changes. A drained member drains its group.

        Raises:
            GpufracError: no such GPU is known, or the drain can't be recorded: then nothing changed.
            ConfigError: the reason is no short plain text.
        """
        reason = checked_reason(reason)
        with self._lock:
            known = [status.info for status in self._gpus]
            if gpu not in {info.uuid for info in known}:
                names = ", ".join(f"{info.uuid} (GPU {info.index})" for info in known) or "none"
                raise GpufracError(f"cannot drain GPU {gpu[:80]!r}: it is not known: known are {names}")
            before = self._drains.by_gpu.get(gpu)
            if before is not None and before.reason == reason:
                return before
            drain = Drain(gpu=gpu, reason=reason, at_unix_s=round(self._wall(), 3))
            self._drains.put(drain)
            self._rebuild()
            self._mark_dirty()
            return drain

    def undrain(self, gpu: str) -> None:
        """Ends a drain. One that is over, or of a GPU that is gone, is no error.

        Raises:
            GpufracError: no such GPU is known or drained, or it can't be recorded: then the drain goes on.
        """
        with self._lock:
            known = {status.info.uuid for status in self._gpus} | self._drains.by_gpu.keys()
            if gpu not in known:
                raise GpufracError(
                    f"cannot undrain GPU {gpu[:80]!r}: it is not known: known are {', '.join(sorted(known)) or 'none'}"
                )
            self._drains.remove(gpu)
            self._rebuild()
            self._mark_dirty()

    def unseen(self) -> set[str]:
        """Shares that may have started and that the kubelet never showed."""
        with self._lock:
            return self._holders.shares.unseen()

    def observe_started(self, keys: Collection[str]) -> None:
        """Processes were started with these allocations, so their pods' admission is over."""
        with self._lock:
            for key in keys:
                self._holders.shares.admitted(key)

    def judgeable(self) -> dict[str, int]:
        """What an observation that begins now may judge; to be handed to `observe_kubelet` with it."""
        with self._lock:
            return self._holders.judgeable()

    def observe_kubelet(
        self,
        seen: Observation,
        foreign: Mapping[str, str],
        judged: Mapping[str, int],
        reserved: frozenset[str] = frozenset(),
    ) -> None:
        """Takes in what the kubelet holds.

        Args:
            foreign: GPU -> why it belongs to another plugin now.
            reserved: GPUs that a scheduler's reservation pods hold for annotated pods.
            judged: from `judgeable`, before the kubelet was asked. What was granted or given out again since would
                seem absent, or held by its last owner.
        """
        with self._lock:
            self._holders.observe_kubelet(seen, judged, self._monotonic())
            self._note_vacated()
            if (dict(foreign), reserved) != (self._foreign, self._reserved):
                self._foreign, self._reserved = dict(foreign), reserved
                self._rebuild()
                self._mark_dirty()

    def _note_vacated(self) -> None:
        if self._accounts.set_vacated(self._holders.vacated()):
            self._mark_dirty()

    def observe_pods(self, alive: Collection[str] | None) -> None:
        """Takes in the UIDs of all pods with a sandbox; None: the runtime is not heard of any more."""
        with self._lock:
            self._holders.observe_pods(alive, self._monotonic())
            self._note_vacated()

    def pod_runs(self, uid: str) -> None:
        """A pod has a sandbox."""
        with self._lock:
            self._holders.annotated.runs(uid)
            self._note_vacated()

    def pod_stopped(self, uid: str) -> None:
        """A pod's last sandbox was stopped."""
        with self._lock:
            self._holders.pod_stopped(uid, self._monotonic())
            self._note_vacated()

    def observe_directories(self, exists: Callable[[str], bool]) -> None:
        """Looks which annotated pods the kubelet has a directory of."""
        with self._lock:
            uids = self._holders.annotated_pods()
        there = {uid for uid in uids if exists(uid)}
        with self._lock:
            self._holders.annotated.directories(there, uids - there, self._monotonic())
            self._note_vacated()

    def kubelet_restarted(self, age_s: float = 0.0) -> None:
        """A new kubelet runs, for `age_s` seconds already. What it has not shown yet is held for longer."""
        with self._lock:
            self._holders.kubelet_restarted(self._monotonic() - age_s)

    def adopt(self, resource: str, device_ids: tuple[str, ...], key: str | None) -> Allocation | Refusal:
        """Takes in what the kubelet runs without a record of ours, under the key it was answered with if known.

        Raises:
            LedgerError: as `allocate`.
        """
        with self._lock:
            live = self._accounts.newest(resource, device_ids)
            if live is not None:
                return live
            view = self._view.resources.get(resource)
            if view is None:
                return Refusal(RefusalCode.INVALID, f"{resource}: it is no longer in the config")
            outcome = plan(
                view,
                self._view,
                self._accounts,
                device_ids,
                generation=self._next_generation(),
                delivery=self._config.cdi.delivery,
                gpu_kind=self._hard.kind,
                force=True,
            )
            if isinstance(outcome, Allocation):
                outcome = structs.replace(outcome, key=key or outcome.key, created_unix_s=round(self._wall(), 3))
                if outcome.key in self._accounts:
                    return Refusal(RefusalCode.INVALID, f"{resource}: key {outcome.key} already names other shares")
                self._record(outcome)
                self._accounts.add(outcome)
                self._holders.shares.admitted(outcome.key)
                self._mark_dirty()
            return outcome

    # --- what the keeper does ------------------------------------------------------------------------------------

    def releasable(self, *, pressed: bool = False) -> list[Allocation]:
        """Allocations that the kubelet no longer holds, to be released once no process of theirs lives."""
        with self._lock:
            keys = self._holders.releasable(self._monotonic(), pressed=pressed)
            return [allocation for allocation in self._accounts if allocation.key in keys]

    def pods(self) -> Pods:
        """The UIDs of the pods that were seen to hold each live allocation."""
        with self._lock:
            return self._holders.pods_by_key()

    def checkpoint_only(self) -> set[str]:
        """See ShareHolders.checkpoint_only."""
        with self._lock:
            return set(self._holders.shares.checkpoint_only())

    def begin_release(self, key: str, *, pressed: bool = False) -> bool:
        """Whether an allocation may still go, after the slow look at its processes. From now on it is not given out
        again: who asks for its shares gets a new one."""
        with self._lock:
            if key not in self._accounts or key not in self._holders.releasable(self._monotonic(), pressed=pressed):
                return False
            self._releasing.add(key)
            return True

    def end_release(self, key: str) -> None:
        """A release came to nothing: the allocation may be given out again."""
        with self._lock:
            self._releasing.discard(key)

    def release(self, key: str) -> None:
        """Forgets an allocation whose CDI file is gone. Raises LedgerError; then it stays."""
        with self._lock:
            if key in self._accounts:
                try:
                    self._ledger.remove(key)
                except LedgerError:
                    self._probe_ledger()  # one record that can't go closes nothing; a disk that takes none does
                    raise
                self._accounts.remove(key)
                self._releasing.discard(key)
                self._holders.forget(key)
                self._mark_dirty()

    def permitted(self) -> dict[str, Grant]:
        """Allocations whose containers may start now, at the level they would start with, with what they mount
        of their daemon. Everything is checked against what mpsd said last: see
        plan.start."""
        with self._lock:
            permitted = self._permitted(self._accounts)
            self._holders.may_start(allocation for allocation, _ in permitted.values())
            return permitted

    def grant(self, key: str) -> Grant | None:
        """What `permitted` has for one allocation."""
        with self._lock:
            found = self._accounts.get(key)
            return None if found is None else self._permitted((found,)).get(key)

    def _permitted(self, granted_ones: Iterable[Allocation]) -> dict[str, Grant]:
        if self._absence:
            return {}
        gpus = {gpu.info.uuid: gpu for gpu in self._gpus}
        judged: dict[object, str] = {}  # hundreds of allocations ask the same few questions
        allowed = {}
        for granted in granted_ones:
            if hard_objection(granted, self._hard):
                continue
            allocation = with_effective_enforcement(granted, self._hard)
            place = (allocation.group, allocation.gpus, allocation.mode)
            question = (*place, allocation.default_socket, allocation.limit_bytes)
            if question not in judged:
                judged[question] = gpus_objection(allocation, gpus)
            if not judged[question] and not attach_objection(allocation, gpus):
                allowed[allocation.key] = (allocation, way(allocation, gpus, self._config.mps))
        return allowed

    def desired(self) -> Desired:
        """The whole desired state for mpsd: every live allocation, whether its GPU was heard of yet or not, oldest
        first."""
        with self._lock:
            return Desired(allocations=tuple(desired_allocation(allocation) for allocation in self._accounts))

    def protocol(self, gpu: str) -> int:
        """The MPS protocol that the GPU's daemon spoke last; before any did, the configured one."""
        return self._protocols.get(gpu, 3 if self._config.mps.protocol == "3" else 2)

    def shared_memory(self, gpu: str) -> str | None:
        """What the GPU's daemon has as its /dev/shm by mpsd's last word, None where it did not tell."""
        with self._lock:
            return next((g.daemon.shared_memory for g in self._gpus if g.info.uuid == gpu and g.daemon), None)

    def publish(self) -> float | None:
        """Recomputes every list and wakes streams where one changed. Seconds until a list changes by time alone."""
        with self._lock:
            self._rebuild()  # graces pass with time
            self._publish()
            return self._next_deadline_s()

    def wait_dirty(self, timeout_s: float) -> bool:
        """Waits until something changed (true) or the time passed (false); clears the mark.

        Grants alone rest for GRANT_REST_S, so that a burst of them is worked off together; all else is told at once.
        """
        with self._dirty_condition:
            self._dirty_condition.wait_for(lambda: self._dirty or self._urgent, max(0.0, timeout_s))
            if self._dirty and not self._urgent:
                self._dirty_condition.wait_for(lambda: self._urgent, GRANT_REST_S)
            dirty = self._dirty or self._urgent
            self._dirty = self._urgent = False
            return dirty

    def wake(self) -> None:
        """Marks everything dirty: some fact outside changed."""
        with self._lock:
            self._mark_dirty()

    def close(self) -> None:
        """Wakes every waiter for good."""
        with self._lock:
            self._closed = True
            self._mark_dirty()
            self._list_condition.notify_all()

    # --- looking in ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> NodeConfig:
        return self._config

    @property
    def version(self) -> int:
        """Grows with every change that could matter to anybody."""
        return self._version

    @property
    def mpsd_seen(self) -> bool:
        """Whether mpsd has answered since this process started."""
        return self._mpsd_seen

    @property
    def complete(self) -> bool:
        """Whether mpsd has shown all GPUs since this process started."""
        return self._complete

    @property
    def runtime_heard(self) -> bool:
        """Whether the container runtime tells of annotated pods now."""
        return self._holders.annotated.heard

    @property
    def hard(self) -> HardAbility:
        """Whether new containers can be held to hard limits, as far as known."""
        return self._hard

    @property
    def absence(self) -> str:
        """Why mpsd can't be relied on now, empty when it can."""
        return self._absence

    @property
    def heard_unix_s(self) -> float | None:
        """While mpsd can't be relied on: when it could last; None where it never could since this process started."""
        return self._heard_unix_s

    @property
    def cgroup_root(self) -> str:
        """Where mpsd sees the cgroups of containers."""
        return self._cgroup_root

    @property
    def driver_version(self) -> str | None:
        """As mpsd said last, None before."""
        return self._driver_version

    def gpus(self) -> tuple[GpuStatus, ...]:
        """The GPUs as known last, ordered by index."""
        return self._gpus

    def allocations(self) -> list[Allocation]:
        """All live allocations, oldest first."""
        with self._lock:
            return list(self._accounts)

    def inspect(self) -> "Inspection":
        """One consistent picture for status and metrics."""
        with self._lock:
            held = {
                uuid: Held(
                    self._accounts.granted_bytes(uuid),
                    self._accounts.limit_bytes(uuid),
                    self._accounts.mode(uuid),
                    len(self._accounts.on_gpu(uuid)),
                )
                for uuid in self._view.gpus
            }
            return Inspection(
                view=self._view,
                lists=dict(self._lists),
                allocations=tuple(self._accounts),
                holders={a.key: self._holders.holder(a) for a in self._accounts},
                pods={a.key: dict(self._holders.pods(a)) for a in self._accounts},
                vacated=frozenset(a.key for a in self._accounts if self._accounts.is_vacated(a.key)),
                held=held,
                gpus=self._gpus,
                absence=self._absence,
                hard=self._hard,
                delivery=self._config.cdi.delivery,
                drained=self._drains.by_gpu,
            )

    def has_unnamed(self) -> bool:
        """Whether a live allocation's holder was not shown by the kubelet yet."""
        with self._lock:
            return any(self._holders.holder(a) is None and not self._accounts.is_vacated(a.key) for a in self._accounts)

    def of_container(self, container: ContainerRef) -> Allocation | None:
        """What an annotated container holds now."""
        with self._lock:
            return self._accounts.of_container(container)

    def share(self, key: str) -> tuple[Allocation, Holder | None] | None:
        """A live share of the device plugin by its key, and who holds it as far as the kubelet has shown."""
        with self._lock:
            found = self._accounts.get(key)
            return None if found is None or found.container is not None else (found, self._holders.holder(found))

    @property
    def reserved(self) -> frozenset[str]:
        """GPUs that a scheduler's reservation pods held at the last look at the kubelet."""
        return self._reserved

    def as_started(self, allocation: Allocation) -> Allocation:
        """An allocation as a container of it starts now: see plan.start."""
        with self._lock:
            return with_effective_enforcement(allocation, self._hard)

    def waits_for(self, key: str) -> str:
        """Why the container of a live allocation may not start now; empty when it may."""
        with self._lock:
            found = self._accounts.get(key)
            if found is None:
                return "its allocation is gone"
            gpus = {gpu.info.uuid: gpu for gpu in self._gpus}
            return self._absence or start_objection(found, gpus, self._hard)

    def lost(self, gpus: Iterable[str]) -> set[str]:
        """Which of these GPUs are gone: lost, or not there at all since mpsd has shown everything."""
        with self._lock:
            health = {status.info.uuid: status.health for status in self._gpus}
            gone = GpuHealth.LOST if self._complete else None
            return {gpu for gpu in gpus if health.get(gpu, gone) is GpuHealth.LOST}

    def is_idle(self, gpu: str) -> bool:
        """Whether nobody holds anything on a GPU."""
        with self._lock:
            return not self._accounts.on_gpu(gpu)

    def is_live(self, key: str) -> bool:
        """Whether the allocation is not released."""
        with self._lock:
            return key in self._accounts and key not in self._releasing

    def predecessors(self, allocation: Allocation) -> set[str]:
        """Older allocations of the same shares, not released yet, that were another pod's or whose pod is gone."""
        with self._lock:
            mine = set(allocation.device_ids)
            return {key for key in allocation.after if key in self._accounts} | {
                other.key
                for other in self._accounts.on_gpu(allocation.gpus[0]).values()
                if other.generation < allocation.generation
                and other.resource == allocation.resource
                and mine & set(other.device_ids)
                and self._accounts.is_vacated(other.key)
            }

    def resource_names(self) -> list[str]:
        """Resources that need a server: those in the config, then those with live allocations only."""
        with self._lock:
            return list(self._view.resources)

    # --- inside the lock -----------------------------------------------------------------------------------------

    def _mark_dirty(self, *, urgent: bool = True) -> None:
        self._dirty = True
        self._urgent = self._urgent or urgent
        self._version += 1
        self._dirty_condition.notify_all()

    def _published(self, resource: str) -> Published:
        return self._lists.get(resource) or Published(0, EMPTY)

    def _rebuild(self) -> None:
        now_s = self._monotonic()
        views = []
        for status in self._gpus:
            uuid = status.info.uuid
            trouble = self._graced(uuid, self._absence or daemon_trouble(status), now_s)
            waiting = self._ledger_error or self._kind_trouble.get(uuid, "") or (trouble if self._absence else "")
            blocked = self._blocked(status)
            views.append(
                gpu_view(
                    status,
                    self._config,
                    blocked=blocked,
                    waiting=waiting,
                    daemon_waiting=trouble,
                    reserved=RESERVED if uuid in self._reserved else "",
                    protocol=self.protocol(uuid),
                )
            )
        held = self._accounts.held_groups()
        view = node_view(self._config, views, held, hard=self._hard, complete=self._complete, previous=self._view)
        resources = dict(view.resources)
        for name in sorted(self._accounts.resources() - resources.keys()):
            resources[name] = self._dropped(name)
        self._view = structs.replace(view, resources=resources)

    def _graced(self, uuid: str, trouble: str, now_s: float) -> str:
        if not trouble:
            self._trouble_since.pop(uuid, None)
            return ""
        since_s = self._trouble_since.get(uuid, ("", now_s))[1]
        self._trouble_since[uuid] = (trouble, since_s)
        return trouble if now_s - since_s >= DAEMON_GRACE_S else ""

    def _blocked(self, status: GpuStatus) -> str:
        uuid = status.info.uuid
        if drain := self._drains.by_gpu.get(uuid):
            return drain.text
        if reason := self._foreign.get(uuid):
            return reason
        foreign = status.foreign_processes
        if foreign and self._accounts.mode(uuid) is None:
            pids = ", ".join(str(pid) for pid in foreign[:5])
            return f"foreign processes use it (pid {pids}): end them before it is shared"
        return ""

    def _dropped(self, name: str) -> ResourceView:
        """The view of a resource that only live allocations keep."""
        sample = next(allocation for allocation in self._accounts if allocation.resource == name)
        memory = (
            UnitMemory(unit_bytes=sample.share_bytes)
            if sample.slot is None
            else FixedMemory(request_bytes=sample.share_bytes, limit_bytes=sample.limit_bytes)
        )
        resource = Resource(name=name, memory=memory, mode=sample.mode, enforcement=sample.enforcement)
        return ResourceView(
            resource=resource, enforcement=sample.enforcement, objection="it is no longer in the config"
        )

    def _publish(self) -> None:
        changed = False
        now_s = self._monotonic()
        for name, view in self._view.resources.items():
            before = self._published(name)
            offer = self._offers.kept(name, before.advertisement.offer, now_s)
            advertisement = advertise(view, self._view, self._accounts, offer)
            if before.generation == 0 or advertisement.devices != before.advertisement.devices:
                self._lists[name] = Published(before.generation + 1, advertisement)
                changed = True
            else:
                self._lists[name] = Published(before.generation, advertisement)
        self._offers.published(now_s)
        for name in self._lists.keys() - self._view.resources.keys():
            before = self._lists[name]
            if before.advertisement.devices:
                self._lists[name] = Published(before.generation + 1, EMPTY)
                changed = True
        if changed:
            self._list_condition.notify_all()

    def resend(self) -> None:
        """Sends every list once more, unchanged: a kubelet rewrites its checkpoint on each list."""
        with self._list_condition:
            self._lists = {name: Published(p.generation + 1, p.advertisement) for name, p in self._lists.items()}
            self._list_condition.notify_all()

    def _next_deadline_s(self) -> float | None:
        now_s = self._monotonic()
        ends = [since_s + DAEMON_GRACE_S for _, since_s in self._trouble_since.values()]
        ends += self._offers.next_s(now_s)
        return min((end - now_s for end in ends if end > now_s), default=None)


class Held(msgspec.Struct, frozen=True):
    """What is held on one GPU: the sums of requests and of limits, the mode (None: idle), and by how many."""

    granted_bytes: int
    limit_bytes: int
    mode: Mode | None
    allocations: int


class Inspection(msgspec.Struct, frozen=True):
    """What `Broker.inspect` shows. `held` is by GPU. `holders`: who holds an allocation now; `pods`: the pods that were
    seen to, by UID, the newest last."""

    view: NodeView
    lists: Mapping[str, Published]
    allocations: tuple[Allocation, ...]
    holders: Mapping[str, Holder | None]
    pods: Mapping[str, Mapping[str, Holder]]
    vacated: frozenset[str]
    held: Mapping[str, Held]
    gpus: tuple[GpuStatus, ...]
    absence: str
    hard: HardAbility
    delivery: Delivery
    drained: Mapping[str, Drain]


def desired_allocation(allocation: Allocation) -> DesiredAllocation:
    """An allocation as mpsd is told of it (pure)."""
    return DesiredAllocation(
        key=allocation.key,
        resource=allocation.resource,
        group=allocation.group,
        gpus=allocation.gpus,
        mode=allocation.mode,
        limit_bytes=allocation.limit_bytes,
        thread_percent=allocation.thread_percent,
        slot=allocation.slot,
        default_socket=allocation.default_socket,
    )


def _with_gone(snapshot: Snapshot, before: tuple[GpuStatus, ...]) -> tuple[GpuStatus, ...]:
    """GPUs as reported, and those that vanished from the report: their shares must not vanish with them.

    They are lost, unless mpsd says that it does not see everything: a GPU it has not read yet looks the same.
    """
    reported = {status.info.uuid for status in snapshot.gpus}
    health = GpuHealth.UNRESPONSIVE if snapshot.reason else GpuHealth.LOST
    reason = snapshot.reason or "the GPU is no longer reported"
    gone = [
        structs.replace(status, health=health, reason=reason, daemon=None)
        for status in before
        if status.info.uuid not in reported
    ]
    return tuple(sorted((*snapshot.gpus, *gone), key=lambda status: status.info.index))
