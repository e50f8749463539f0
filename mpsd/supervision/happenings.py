"""Tells what differs from one picture of the node to the next: its GPUs, MPS daemons, evictions, what is wrong (pure).

It remembers what it saw; whoever is told knows what was told by an mpsd before this one.
"""

from collections.abc import Mapping, Sequence

import msgspec

from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason, joined
from mpsd.events.kinds import EventKind
from mpsd.events.model import Subject
from mpsd.events.teller import Teller
from mpsd.gpu.model import MIB, GpuHealth
from mpsd.gpu.reasons import InventoryCode
from mpsd.localapi.reasons import DaemonCode, EvictionCode, WarningCode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuClient, GpuStatus, Snapshot

SETTLE_S = 2.0
"""After an eviction was logged, how long it is looked who is gone."""
LATE_S = 10.0
"""A log line may come so long after what it tells of, and a count before it have seen that."""
NAMED = 5
"""How many clients a message names."""

_HEALTH = {
    GpuHealth.OK: EventKind.GPU_BACK,
    GpuHealth.LOST: EventKind.GPU_LOST,
    GpuHealth.SICK: EventKind.GPU_SICK,
    GpuHealth.UNRESPONSIVE: EventKind.GPU_SILENT,
}
_YOUNG = (InventoryCode.NOT_PROBED,)
"""What is so for a moment after each start."""
_TOLD_ELSEWHERE = (WarningCode.COMPUTE_MODE_CONTESTED,)
_TROUBLES = (
    DaemonCode.SERVER_FAULT,
    DaemonCode.SERVERS_END,
    DaemonCode.NO_ANSWER,
    DaemonCode.QUERY_FAILED,
    DaemonCode.CONFIGURE_FAILED,
)

Word = tuple[EventKind, Reason | None, int]
"""Kind, reason, PID."""


class NodeNews:
    """Every method is for the supervisor's thread. Times are monotonic."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._said: dict[str, tuple[EventKind, str, int]] = {}
        """Name of a GPU or daemon -> what was told of it last."""
        self._wrong: frozenset[str] | None = None
        self._daemons: Mapping[str, Subject] | None = None
        """Those of the last picture; None before the first with GPUs."""
        self._gpus: dict[str, GpuStatus] = {}
        self._gone: dict[str, tuple[tuple[float, GpuClient], ...]] = {}
        """GPU -> MPS clients that left it lately, and when."""
        self._evicted: dict[str, _Evicted] = {}

    @property
    def deadline_s(self) -> float | None:
        """When to `tend` though nothing changes; None: no need."""
        return min((evicted.due_s for evicted in self._evicted.values()), default=None)

    def observe(self, snapshot: Snapshot, now_s: float, now_unix_s: float) -> None:
        """Takes in the next picture."""
        self._look_at_troubles(snapshot)
        for gpu in snapshot.gpus:
            uuid = gpu.info.uuid
            subject = Subject(gpus=(uuid,), indices=(gpu.info.index,), daemon=gpu.group)
            why = gpu.why if gpu.health is not GpuHealth.OK else None
            self._say(f"gpu {uuid}", subject, (_HEALTH[gpu.health], why, 0))
            before = self._gpus.get(uuid)
            self._gpus[uuid] = gpu
            if before is not None:
                self._compare(before, gpu, subject, now_s, now_unix_s)
        if snapshot.gpus:
            self._look_at_daemons(snapshot.gpus)

    def tend(self, now_s: float) -> None:
        """Tells of the evictions that were looked into long enough."""
        for uuid, evicted in list(self._evicted.items()):
            if now_s >= evicted.due_s:
                del self._evicted[uuid]
                self._tell_evicted(evicted, [c for at_s, c in self._gone.get(uuid, ()) if at_s >= evicted.since_s])

    # --- what is wrong -------------------------------------------------------------------------------------------

    def _look_at_troubles(self, snapshot: Snapshot) -> None:
        if snapshot.why is not None and snapshot.why.code in _YOUNG:
            return
        found: dict[str, list[Reason]] = {}
        for reason in (snapshot.why, *snapshot.shortfalls):
            if reason is not None and reason.code not in _TOLD_ELSEWHERE:
                found.setdefault(reason.code, []).append(reason)
        if self._wrong == found.keys():
            return
        for code, reasons in found.items():
            if code not in (self._wrong or ()):
                self._teller.tell(EventKind.TROUBLE_BEGUN, reason=joined(reasons))
        self._teller.settle(EventKind.TROUBLE_ENDED, frozenset(found))
        self._wrong = frozenset(found)

    # --- daemons -------------------------------------------------------------------------------------------------

    def _look_at_daemons(self, gpus: Sequence[GpuStatus]) -> None:
        served: dict[str, list[GpuStatus]] = {}
        for gpu in gpus:
            served.setdefault(gpu.group or gpu.info.uuid, []).append(gpu)
        if self._daemons is None:
            self._teller.settle(EventKind.DAEMON_STOPPED, frozenset(served))
        for name, subject in (self._daemons or {}).items():
            if name not in served:
                self._say(f"daemon {name}", subject, (EventKind.DAEMON_STOPPED, None, 0))
        self._daemons = {
            name: Subject(daemon=name, gpus=tuple(g.info.uuid for g in own), indices=tuple(g.info.index for g in own))
            for name, own in served.items()
        }
        for name, own in served.items():
            if (word := of_daemon(own[0].daemon)) is not None:
                self._say(f"daemon {name}", self._daemons[name], word)

    def _say(self, name: str, subject: Subject, word: Word) -> None:
        kind, why, pid = word
        said = (kind, why.code if why is not None else "", pid)
        if self._said.get(name) != said:
            self._said[name] = said
            self._teller.tell(kind, subject, why, pid=pid)

    # --- one GPU from picture to picture -------------------------------------------------------------------------

    def _compare(self, before: GpuStatus, gpu: GpuStatus, subject: Subject, now_s: float, now_unix_s: float) -> None:
        uuid = gpu.info.uuid
        if gpu.mode_changes > before.mode_changes:
            text = (
                f"somebody else set it to {gpu.driver_compute_mode} while it was bound: find what runs nvidia-smi -c, "
                "or another MPS agent on this node"
            )
            why = Reason(WarningCode.COMPUTE_MODE_CONTESTED, text)
            count = gpu.mode_changes - before.mode_changes
            self._teller.tell(EventKind.COMPUTE_MODE_CHANGED, subject, why, count=count)
        if before.clients != gpu.clients:
            there = {client.pid for client in gpu.clients}
            left = tuple((now_s, client) for client in before.clients if client.mps and client.pid not in there)
            lately = (gone for gone in self._gone.get(uuid, ()) if now_s - gone[0] <= LATE_S + SETTLE_S)
            self._gone[uuid] = (*lately, *left)
        pid = gpu.daemon.pid or 0 if gpu.daemon is not None else 0
        same = before.daemon is not None and before.daemon.pid == pid
        known = before.evictions if same else 0
        if gpu.evictions > known:
            earlier = self._evicted.get(uuid)
            if earlier is not None and earlier.pid == pid:
                self._evicted[uuid] = msgspec.structs.replace(earlier, total=gpu.evictions)
            else:
                self._evicted[uuid] = _Evicted(
                    subject, pid, known, gpu.evictions, now_s - LATE_S, now_s + SETTLE_S, now_unix_s
                )

    def _tell_evicted(self, evicted: "_Evicted", gone: Sequence[GpuClient]) -> None:
        """Each client by itself where it is clear who they were; what was before that counts, too."""
        total = evicted.total
        victims = gone if len(gone) <= total - evicted.known else ()
        if total - len(victims) > evicted.known or not victims:
            self._tell_of(evicted, total - len(victims), None, Reason(EvictionCode.CLIENT_NOT_KNOWN, _unknown(gone)))
        for number, client in enumerate(victims):
            why = Reason(EvictionCode.ABOVE_REQUEST, f"MPS ended {_name(client)}, for a client within its request")
            self._tell_of(evicted, total - len(victims) + number + 1, client, why)

    def _tell_of(self, evicted: "_Evicted", total: int, client: GpuClient | None, why: Reason) -> None:
        subject = evicted.subject
        if client is not None:
            subject = msgspec.structs.replace(subject, key=client.allocation_key or "", pod_uid=client.pod_uid)
        self._teller.tell(EventKind.EVICTED, subject, why, total=total, pid=evicted.pid, unix_s=evicted.at_unix_s)


class _Evicted(msgspec.Struct, frozen=True):
    """That the log of a daemon (`pid`) counts more evictions on a GPU: `known` before, `total` now. Who left since
    `since_s` may be who it was; at `due_s` that is judged."""

    subject: Subject
    pid: int
    known: int
    total: int
    since_s: float
    due_s: float
    at_unix_s: float


def of_daemon(status: DaemonStatus | None) -> Word | None:
    """What is to be told of a daemon as it is; None where that is no news in itself, such as that it starts."""
    if status is None or status.state is DaemonState.ABSENT:
        return EventKind.DAEMON_STOPPED, None, 0
    pid, why = status.pid or 0, status.why
    code = why.code if why is not None else ""
    if status.wedged:
        return EventKind.DAEMON_WEDGED, why, pid
    match status.state:
        case DaemonState.READY:
            return EventKind.DAEMON_READY, None, pid
        case DaemonState.FAILED:
            return EventKind.DAEMON_FAILED, why, pid
        case DaemonState.CONFIGURING if code in _TROUBLES:
            return EventKind.DAEMON_TROUBLED, why, pid
        case DaemonState.BACKOFF if code == DaemonCode.EXITED:
            return EventKind.DAEMON_CRASHED, why, pid
        case DaemonState.BACKOFF if code in (DaemonCode.START_FAILED, DaemonCode.START_OVERDUE):
            return EventKind.DAEMON_FAILED, why, pid
        case DaemonState.STOPPING | DaemonState.KILLING if code and code != DaemonCode.START_OVERDUE:
            return EventKind.DAEMON_REPLACED, why, pid
    return None


def _unknown(gone: Sequence[GpuClient]) -> str:
    if not gone:
        return "its daemon's log counts it, and does not say which client it was"
    names = "; ".join(map(_name, gone[:NAMED]))
    more = f"; and {len(gone) - NAMED} more" if len(gone) > NAMED else ""
    return f"its daemon's log counts it, and does not say which client it was; these left the GPU: {names}{more}"


def _name(client: GpuClient) -> str:
    of = f", allocation {client.allocation_key}" if client.allocation_key else ""
    size = "" if client.used_bytes is None else f", which held {format_bytes(-(-client.used_bytes // MIB) * MIB)}"
    return f"pid {client.pid} ({client.command or 'unknown'}{of}){size}"
