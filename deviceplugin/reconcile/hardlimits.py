"""Are the hard limits of running containers in force? Reads them back through mpsd, sets them again where they are not,
and clears what would leak. Of containers with another level it reads back that they have no guarantee: a pod that gets
one for itself past us takes that memory from its neighbours.

A container's limits lie on its cgroup, set by the container toolkit's hook before its process starts. Which cgroup is
an allocation's is told by our marker in its oldest process. One thread looks (the observer); `report` is replaced
whole for readers.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from deviceplugin.grants.holders.model import Holder
from deviceplugin.grants.inspection import Inspection
from deviceplugin.grants.reader import Reader
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.render import CGROUP_LIMITS
from deviceplugin.reconcile.reasons import HeldCode
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.processes import container_cgroup, processes_of_pods, start_time
from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason
from mpsd.config.model import Enforcement
from mpsd.limits.model import same_limit
from mpsd.localapi.reasons import LimitReadingCode
from mpsd.localapi.snapshot import LimitQuery, LimitReading

log = get_logger("plugin")

VERIFIED_S = 10.0
"""How often limits that were in force are read again; others with every look."""

QUERIES = 500
"""How many readings are asked for in one call."""


class MarkedCgroup(NamedTuple):
    """A container's cgroup (its whole directory), and what its oldest marked process says it is."""

    key: str
    pod_uid: str
    directory: str


class Mpsd(Protocol):
    """The calls made to mpsd; they raise GpufracError."""

    def limits(self, queries: Sequence[LimitQuery]) -> Sequence[LimitReading]: ...
    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading: ...


class LimitState(msgspec.Struct, frozen=True):
    """What is known of the limits of one running allocation. `trouble`: not in force, and what was done; `unknown`: why
    that can't be told now. `used_bytes` is the most on any of its GPUs."""

    trouble: Reason | None = None
    unknown: Reason | None = None
    used_bytes: int | None = None


class LimitKeeper:
    """See the module.

    Args:
        marked: one look at all containers with our marker; it is told where cgroups are.
        exists: whether a cgroup is still there.
    """

    def __init__(
        self,
        reader: Reader,
        mpsd: Mpsd,
        marked: Callable[[str], Iterable[MarkedCgroup]],
        *,
        exists: Callable[[str], bool] = os.path.isdir,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader, self._mpsd, self._marked, self._exists = reader, mpsd, marked, exists
        self._monotonic = monotonic
        self.report: Mapping[str, LimitState] = {}
        self.drifts = 0
        """How often a limit was found not in force."""
        self._known: dict[str, Allocation] = {}
        self._owners: dict[str, str] = {}
        """Cgroup -> allocation. The first word counts: a program can change its environment later."""
        self._verified: set[str] = set()
        self._cleared: set[str] = set()
        self._full_s = float("-inf")

    def look(self) -> None:
        """Looks once: at new containers, and now and then at all."""
        inspection = self._reader.inspect()
        settable = inspection.node.hard.settable
        live = {a.key: a for a in inspection.allocations if settable or a.enforcement is Enforcement.HARD}
        self._clear(live, inspection.vacated)
        if not live or (inspection.node.hard.known and inspection.node.hard.limits.missing):
            # A node that lost hard limits has nothing to read back; status says so.
            self._verified.clear()
            self._note({})
            return
        running = {key: live[key] for key in live.keys() - inspection.vacated}
        lost = {key for directory, key in self._owners.items() if not self._exists(directory)}
        self._verified -= lost
        now_s = self._monotonic()
        due = now_s - self._full_s >= VERIFIED_S
        wanted = running.keys() if due else running.keys() - self._verified
        if due:
            self._full_s = now_s
        states = {key: state for key, state in self.report.items() if key in running.keys() - wanted}
        if wanted:
            self._find(running, inspection)
            states |= self._read([running[key] for key in sorted(wanted)])
        self._note(states)

    def _find(self, running: Mapping[str, Allocation], inspection: Inspection) -> None:
        owners = {}
        for found in self._marked(inspection.node.cgroup_root):
            key = self._owners.get(found.directory, found.key)
            holder = inspection.holders.get(key)
            pod_uid = holder.pod_uid if isinstance(holder, Holder) else ""
            # Any pod can set our marker; it must not get another pod's limits by that.
            if key in running and pod_uid in ("", found.pod_uid):
                owners[found.directory] = key
        self._owners = owners
        self._known = dict(running)

    def _read(self, allocations: Sequence[Allocation]) -> dict[str, LimitState]:
        places: dict[str, list[str]] = {}
        for directory, key in sorted(self._owners.items()):
            places.setdefault(key, []).append(directory)
        asked = [
            (allocation, LimitQuery(gpu, directory))
            for allocation in allocations
            for directory in places.get(allocation.key, ())
            for gpu in allocation.gpus
        ]
        if not asked:
            return {}
        readings: list[LimitReading] = []
        try:
            for begin in range(0, len(asked), QUERIES):
                readings += self._mpsd.limits([query for _, query in asked[begin : begin + QUERIES]])
        except GpufracError as error:
            readings += [LimitReading(error=str(error), error_code=LimitReadingCode.NOT_ASKED)] * (
                len(asked) - len(readings)
            )
        states: dict[str, LimitState] = {}
        for (allocation, query), reading in zip(asked, readings, strict=True):
            before = states.get(allocation.key, LimitState())
            states[allocation.key] = self._judge(allocation, query, reading, before)
        for key, state in states.items():
            if state.trouble or state.unknown:
                self._verified.discard(key)
            else:
                self._verified.add(key)
        return states

    def _judge(
        self, allocation: Allocation, query: LimitQuery, reading: LimitReading, before: LimitState
    ) -> LimitState:
        """The state with one more reading."""
        if allocation.enforcement is not Enforcement.HARD:
            return self._judge_unheld(query, reading, before)
        if reading.error:
            old = self.report.get(allocation.key, LimitState())
            text = f"whether its memory limit is in force can't be told: {reading.error}"
            unknown = before.unknown or Reason(HeldCode.LIMIT_NOT_TOLD, text)
            return LimitState(before.trouble or old.trouble, unknown, before.used_bytes)
        used_bytes = max(reading.used_bytes, before.used_bytes or 0)
        in_force = same_limit(allocation.limit_bytes, reading.hard_bytes)
        if in_force and same_limit(allocation.soft_bytes, reading.soft_bytes):
            return LimitState(before.trouble, before.unknown, used_bytes)
        done, hard_bytes, soft_bytes = "set again", allocation.limit_bytes, allocation.soft_bytes
        if not in_force and reading.hard_bytes is not None and reading.hard_bytes < hard_bytes:
            # A container with several allocations in its pod can name the larger one: what holds it stays.
            done, hard_bytes = "left as it is, as a limit in force is never raised", reading.hard_bytes
            soft_bytes = min(soft_bytes, reading.soft_bytes)
            if same_limit(soft_bytes, reading.soft_bytes):
                return LimitState(before.trouble or _wrong(allocation, reading, done), before.unknown, used_bytes)
        try:
            self._mpsd.set_limits(query.gpu, query.cgroup, soft_bytes, hard_bytes)
        except GpufracError as error:
            done = f"it can't be set again: {error}"
        return LimitState(before.trouble or _wrong(allocation, reading, done), before.unknown, used_bytes)

    def _judge_unheld(self, query: LimitQuery, reading: LimitReading, before: LimitState) -> LimitState:
        """Of a container whose limit is not its cgroup's: that may not guarantee it anything."""
        if reading.error or not reading.soft_bytes:
            return before
        done = "taken back"
        try:
            self._mpsd.set_limits(query.gpu, query.cgroup, 0, reading.hard_bytes)
        except GpufracError as error:
            done = f"it can't be taken back: {error}"
        had = f"{format_bytes(reading.soft_bytes)} of GPU memory was guaranteed to its cgroup and not granted: {done}"
        text = f"{had}; look for {CGROUP_LIMITS[0]} in its pod and image"
        return LimitState(before.trouble or Reason(HeldCode.NOT_GRANTED, text))

    def _clear(self, live: Mapping[str, Allocation], vacated: frozenset[str]) -> None:
        """What a cgroup reserves on its ancestors stays there when it goes (MPS memory partitioning), so it is given
        back before. Best effort: a container that ended has no cgroup any more, and mpsd looks after the rest."""
        leaving = vacated & live.keys() - self._cleared
        failed: set[str] = set()
        for directory, key in list(self._owners.items()):
            if key in live and key not in leaving:
                continue
            allocation = live.get(key) or self._known[key]
            self._verified.discard(key)
            if allocation.soft_bytes and self._exists(directory):
                # Its ceiling stays: it goes with the cgroup, and until then a process of it may live.
                for gpu in allocation.gpus:
                    try:
                        self._mpsd.set_limits(gpu, directory, 0, allocation.limit_bytes)
                    except GpufracError:
                        failed.add(key)  # again at the next look
            if key not in live:
                del self._owners[directory]
        self._cleared = ((self._cleared | leaving) - failed) & vacated & live.keys()

    def _note(self, states: Mapping[str, LimitState]) -> None:
        for key, state in states.items():
            before = self.report.get(key, LimitState())
            if state.trouble and not before.trouble:
                self.drifts += 1
                log.error("a memory limit is not in force", key=key, reason=state.trouble.message)
            elif before.trouble and not state.trouble:
                log.info("a memory limit is in force again", key=key)
            if state.unknown and not before.unknown:
                log.warning("a memory limit can't be read back", key=key, reason=state.unknown.message)
        self.report = states


def _wrong(allocation: Allocation, reading: LimitReading, done: str) -> Reason:
    return Reason(HeldCode.LIMIT_NOT_IN_FORCE, f"{_difference(allocation, reading)}: {done}")


def _difference(allocation: Allocation, reading: LimitReading) -> str:
    hard = "no limit" if reading.hard_bytes is None else f"a limit of {format_bytes(reading.hard_bytes)}"
    if not same_limit(allocation.limit_bytes, reading.hard_bytes):
        return f"its memory limit is not in force: reads back {hard} instead of {format_bytes(allocation.limit_bytes)}"
    return (
        f"its guaranteed memory is not in force: reads back {format_bytes(reading.soft_bytes)} instead of "
        f"{format_bytes(allocation.soft_bytes)}"
    )


def marked_cgroups(
    root: str, *, simulated: Callable[[Iterable[int]], Mapping[int, str]] | None = None, proc: str = "/proc"
) -> list[MarkedCgroup]:
    """The cgroups below `root` of all containers with our marker, from one look at all processes.

    Args:
        simulated: the cgroups of these processes on a simulated node, by PID.
    """
    oldest: dict[tuple[str, str], tuple[int, int, str]] = {}
    for uid, processes in processes_of_pods(proc, simulated=simulated is not None).items():
        for process in processes:
            if process.marker:
                container, age = (uid, process.container), start_time(process.pid, proc) or 0
                seen = (age, process.pid, process.marker)
                oldest[container] = min(seen, oldest.get(container, seen))
    pids = [pid for _, pid, _ in oldest.values()]
    if simulated is not None:
        directories = simulated(pids)
    else:
        directories = {pid: root.rstrip("/") + path for pid in pids if (path := container_cgroup(pid, proc))}
    found = [(key, uid, directories.get(pid, root)) for (uid, _), (_, pid, key) in oldest.items()]
    return [MarkedCgroup(*cgroup) for cgroup in found if cgroup[2] != root]
