"""The one owner of what this node knows and has granted: one lock, and in it plain parts that lock nothing.

`node` (nodestate.py) what is known, `view` (nodeview.py) the same as the planner sees it, `grants` (grants.py, over
store.py: accounts and ledger) what is given, `holders` who has it, `lists` (lists.py) what is listed. Every front end
goes through here: device plugin calls, and annotated containers. Allocate never waits for mpsd, NVML, the kubelet or a
list; the one I/O under the lock is the durable record, so that a grant that was answered is never lost.
Who needs to react to a change waits on `wait_dirty` (the keeper) or `wait_list` (the kubelet's streams).
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import structs

from deviceplugin.grants.changes import Changes
from deviceplugin.grants.drains import Drain, Drains
from deviceplugin.grants.grants import Grants
from deviceplugin.grants.holders.holders import Holders
from deviceplugin.grants.holders.model import Observation
from deviceplugin.grants.holders.turns import Instance
from deviceplugin.grants.ledger import Ledger
from deviceplugin.grants.lists import Lists, Published
from deviceplugin.grants.nodestate import NodeState
from deviceplugin.grants.nodeview import CurrentView
from deviceplugin.grants.reader import Reader
from deviceplugin.grants.store import AllocationStore
from deviceplugin.plan.allocation import Allocation, ContainerAsk, Refusal
from deviceplugin.plan.model import HardAbility
from deviceplugin.plan.preferred import preferred
from deviceplugin.plan.start import Grant
from mpsd.common.reason import Reason
from mpsd.config.model import NodeConfig
from mpsd.localapi.snapshot import GpuStatus, HardLimits, Snapshot


class Recheck(Protocol):
    """Looks at the kubelet once, and with `release` lets go at once of what is gone."""

    def __call__(self, *, release: bool = True) -> None: ...


class Permissions(msgspec.Struct, frozen=True):
    """Whose containers may start at one moment, by key, and the keys of the live allocations whose may not. `version`:
    see Broker."""

    version: int
    permitted: Mapping[str, Grant]
    barred: frozenset[str]


class Broker(Reader):
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
        lock = threading.Lock()
        changes = Changes(lock)
        self._list_condition = threading.Condition(lock)
        self._monotonic, self._wall = monotonic, wall
        self._closed = False
        store = AllocationStore(ledger, self._rebuild_and_mark, wall)
        holders = Holders(store.accounts, changes.mark)
        grants = Grants(store, holders, changes.mark)
        super().__init__(
            lock, changes, NodeState(config=config), CurrentView(), store, holders, grants, Lists(), drains
        )
        for allocation in store.accounts:
            holders.shares.admitted(allocation.key)
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
        if isinstance(outcome, Refusal) and not outcome.is_final and recheck is not None:
            recheck()
            with self._lock:
                outcome = self._allocate(resource, wanted)
        return outcome

    def _allocate(self, resource: str, wanted: tuple[str, ...]) -> Allocation | Refusal:
        if (live := self._grants.again(resource, wanted)) is not None:
            return live
        outcome = self._grants.allocate(resource, wanted, self._view.now, self._node)
        if isinstance(outcome, Allocation):
            if self._lists.granted(outcome, self._monotonic()):
                self._publish()
            self._changes.mark(urgent=False)
        return outcome

    def allocate_container(
        self, ask: ContainerAsk, *, by_cdi: bool, lasting: Collection[str] = (), recheck: "Recheck | None" = None
    ) -> Allocation | Refusal:
        """Grants an annotated container what it asks for; see Grants.

        Args:
            by_cdi: whether its runtime takes CDI devices from us.
            lasting: see Grants.
            recheck: as `allocate`.

        Raises:
            LedgerError: as `allocate`.
        """
        with self._lock:
            outcome = self._grants.allocate_container(ask, self._view.now, self._gpu_kind(by_cdi), lasting)
        if isinstance(outcome, Refusal) and not outcome.is_final and recheck is not None:
            recheck()
            with self._lock:
                outcome = self._grants.allocate_container(ask, self._view.now, self._gpu_kind(by_cdi), lasting)
        return outcome

    def adopt_container(self, ask: ContainerAsk, key: str | None, *, trusted: bool, by_cdi: bool) -> Allocation:
        """Takes in an annotated container that runs without a record of ours; see Grants."""
        with self._lock:
            return self._grants.adopt_container(ask, key, self._view.now, self._gpu_kind(by_cdi), trusted=trusted)

    def _gpu_kind(self, by_cdi: bool) -> str:
        return self._node.hard.kind if by_cdi else ""

    def lower_limit(self, key: str, limit_bytes: int) -> Allocation:
        """Lowers the limit of a live share for as long as it lives. Raises LedgerError; then nothing changed."""
        with self._lock:
            return self._grants.lower_limit(key, limit_bytes)

    def preferred(self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int) -> list[str]:
        """The shares a container should get; see plan.preferred. Unknown resources have no preference."""
        with self._lock:
            view = self._view.now.resources.get(resource)
            return preferred(view, self._view.now, self._accounts, available, must_include, size) if view else []

    def wait_list(self, resource: str, seen: int, timeout_s: float, stop: Callable[[], bool]) -> Published | None:
        """The resource's list once its generation is not `seen`; None after the time or when `stop()` turns true."""
        with self._list_condition:
            self._list_condition.wait_for(
                lambda: stop() or self._closed or self._lists.of(resource).generation != seen, timeout_s
            )
            now = self._lists.of(resource)
            return now if now.generation != seen and not stop() else None

    def pause_list(self, seconds: float, stop: Callable[[], bool]) -> None:
        """Lets the time pass, or less when `stop()` turns true."""
        with self._list_condition:
            self._list_condition.wait_for(lambda: stop() or self._closed, seconds)

    def wake_streams(self) -> None:
        """Lets every waiting stream look at its `stop()` again."""
        with self._list_condition:
            self._list_condition.notify_all()

    # --- what is known of the node -------------------------------------------------------------------------------

    def observe_snapshot(self, snapshot: Snapshot | None) -> None:
        """Takes in what mpsd sees; None: mpsd does not answer. See NodeState."""
        with self._lock:
            self._node = self._node.observed(snapshot, self._wall())
            self._rebuild_and_mark()

    def restore(self, gpus: tuple[GpuStatus, ...], hard_limits: HardLimits) -> None:
        """The node as an earlier run knew it: the first list must not wait for mpsd."""
        with self._lock:
            if not self._node.gpus:
                self._node = self._node.restored(gpus, hard_limits)
                self._rebuild()
                self._publish()

    def apply_config(self, config: NodeConfig) -> None:
        """Puts a new config in force. Live allocations keep their plans."""
        with self._lock:
            self._node = structs.replace(self._node, config=config)
            self._rebuild_and_mark()

    def set_gpu_kind(self, kind: str, trouble: Mapping[str, Reason], hooked: frozenset[str] = frozenset()) -> None:
        """Which CDI kind carries the GPUs' device nodes (empty: none), why it lacks a GPU, and which kinds set memory
        limits."""
        with self._lock:
            hard = structs.replace(self._node.hard, kind=kind, hooked=hooked)
            self._learn(structs.replace(self._node, hard=hard, kind_trouble=dict(trouble)))

    def set_runtime(self, *, starts_wait: bool, takes_cdi: bool) -> None:
        """Whether the container runtime keeps a program from starting when we say so, and takes CDI devices from us."""
        with self._lock:
            self._learn_hard(structs.replace(self._node.hard, starts_wait=starts_wait, takes_cdi=takes_cdi))

    def set_cdi_loses(self, reason: Reason | None) -> None:
        """Why a pod's or an image's environment beats that of a share's CDI device; None: it does not, as far as is
        known."""
        with self._lock:
            self._learn_hard(structs.replace(self._node.hard, cdi_loses=reason))

    def _learn_hard(self, hard: HardAbility) -> None:
        self._learn(structs.replace(self._node, hard=hard))

    def _learn(self, node: NodeState) -> None:
        if node != self._node:
            self._node = node
            self._rebuild_and_mark()

    def drain(self, gpu: str, reason: str = "") -> Drain:
        """Gives nothing new on a GPU (by UUID) from now on, in no mode; what is held goes on; see Drains."""
        with self._lock:
            drain = self._drains.drain(gpu, reason, [status.info for status in self._node.gpus], self._wall())
            self._rebuild_and_mark()
            return drain

    def undrain(self, gpu: str) -> None:
        """Ends a drain; see Drains."""
        with self._lock:
            self._drains.undrain(gpu, [status.info for status in self._node.gpus])
            self._rebuild_and_mark()

    # --- who holds what ------------------------------------------------------------------------------------------

    def observe_kubelet(
        self,
        seen: Observation,
        foreign: Mapping[str, Reason],
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
            self._learn(structs.replace(self._node, foreign=dict(foreign), reserved=reserved))

    def kubelet_restarted(self, age_s: float = 0.0) -> None:
        """A new kubelet runs, for `age_s` seconds already. What it has not shown yet is held for longer."""
        with self._lock:
            self._holders.kubelet_restarted(self._monotonic() - age_s)

    def observe_started(self, keys: Collection[str]) -> None:
        """Processes were started with these allocations, so their pods' admission is over."""
        with self._lock:
            for key in keys:
                self._holders.shares.admitted(key)

    def observe_pods(self, alive: Collection[str] | None) -> None:
        """Takes in the UIDs of all pods with a sandbox; None: the runtime is not heard of any more."""
        with self._lock:
            self._holders.observe_pods(alive, self._monotonic())

    def pod_runs(self, uid: str) -> None:
        """A pod has a sandbox."""
        with self._lock:
            self._holders.pod_runs(uid)

    def pod_stopped(self, uid: str) -> None:
        """A pod's last sandbox was stopped."""
        with self._lock:
            self._holders.pod_stopped(uid, self._monotonic())

    def container_runs(self, instance: Instance) -> None:
        """An annotated container was allowed to be made."""
        with self._lock:
            self._holders.turns.runs(instance)

    def run_ended(self, identifier: str) -> None:
        """A container, or a sandbox with all that ran in it, was stopped or removed."""
        with self._lock:
            self._holders.turns.ended(identifier)

    def observe_containers(self, running: Mapping[str, Instance]) -> None:
        """Takes in all containers of annotated pods that have not ended, by their IDs."""
        with self._lock:
            self._holders.observe_containers(running)

    # --- what the keeper does ------------------------------------------------------------------------------------

    def adopt(self, resource: str, device_ids: tuple[str, ...], key: str | None) -> Allocation | Refusal:
        """Takes in what the kubelet runs without a record of ours, under the key it was answered with if known.

        Raises:
            LedgerError: as `allocate`.
        """
        with self._lock:
            return self._grants.adopt(resource, device_ids, key, self._view.now, self._node)

    def releasable(self, *, pressed: bool = False) -> list[Allocation]:
        """Allocations that nobody holds any more, to be released once no process of theirs lives.

        Args:
            pressed: a request is about to be refused: what is known to be gone need not wait out a grace.
        """
        with self._lock:
            return self._grants.releasable(self._monotonic(), pressed=pressed)

    def begin_release(self, key: str, *, pressed: bool = False) -> bool:
        """Whether an allocation may still go, after the slow look at its processes. From now on it is not given out
        again: who asks for its shares gets a new one."""
        with self._lock:
            return self._grants.begin_release(key, self._monotonic(), pressed=pressed)

    def end_release(self, key: str) -> None:
        """A release came to nothing: the allocation may be given out again."""
        with self._lock:
            self._grants.end_release(key)

    def release(self, key: str) -> None:
        """Forgets an allocation whose CDI file is gone. Raises LedgerError; then it stays."""
        with self._lock:
            self._grants.release(key)

    def probe_ledger(self) -> None:
        """Looks whether records can be written."""
        with self._lock:
            self._store.probe()

    def permissions(self) -> Permissions:
        """Whose containers may start, from now on."""
        with self._lock:
            permitted = self._node.permitted(self._accounts)
            self._holders.may_start(allocation for allocation, _ in permitted.values())
            return Permissions(
                self._changes.version, permitted, frozenset(a.key for a in self._accounts) - permitted.keys()
            )

    def publish(self) -> float | None:
        """Recomputes every list and wakes streams where one changed. Seconds until a list changes by time alone."""
        with self._lock:
            self._rebuild()  # graces pass with time
            self._publish()
            now_s = self._monotonic()
            ends = (*self._view.changes_s(), *self._lists.changes_s(now_s))
            return min((end_s - now_s for end_s in ends if end_s > now_s), default=None)

    def resend(self) -> None:
        """Sends every list once more, unchanged: a kubelet rewrites its checkpoint on each list."""
        with self._list_condition:
            self._lists.resend()
            self._list_condition.notify_all()

    def wait_dirty(self, timeout_s: float) -> bool:
        """Waits until something changed (true) or the time passed (false); see Changes."""
        return self._changes.wait(timeout_s)

    @property
    def version(self) -> int:
        """Grows with every change that could matter to anybody."""
        return self._changes.version

    def wake(self) -> None:
        """Marks everything dirty: some fact outside changed."""
        with self._lock:
            self._changes.mark()

    def close(self) -> None:
        """Wakes every waiter for good."""
        with self._lock:
            self._closed = True
            self._changes.mark()
            self._list_condition.notify_all()

    # --- inside the lock -----------------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        self._view.rebuild(
            self._node,
            self._accounts,
            self._drains.by_gpu,
            ledger_error=self._store.ledger_error,
            now_s=self._monotonic(),
        )

    def _rebuild_and_mark(self) -> None:
        self._rebuild()
        self._changes.mark()

    def _publish(self) -> None:
        self._listed_version = self._changes.version
        if self._lists.publish(self._view.now, self._accounts, self._monotonic()):
            self._list_condition.notify_all()
