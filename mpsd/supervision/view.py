"""The snapshot of the node, made of what the loop knows: nothing here changes anything."""

import time
import uuid as uuids
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from mpsd.common.reason import Reason, code_of, message_of
from mpsd.config import numbering
from mpsd.daemon.plan import needs_daemon
from mpsd.daemon.state import StateFile
from mpsd.events.teller import SILENT, Counting
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import ComputeMode
from mpsd.limits.hardlimits import HardLimitsKeeper
from mpsd.localapi.reasons import DaemonCode, SharingCode, WarningCode
from mpsd.localapi.snapshot import DaemonStatus, DesiredAllocation, GpuStatus, Snapshot
from mpsd.shares.groups import label
from mpsd.supervision.computemode import fits
from mpsd.supervision.daemon import DaemonKeeper
from mpsd.supervision.indices import Indices
from mpsd.supervision.node import Gpu, Node
from mpsd.supervision.servers import NO_HOST_PIDS, DaemonLogs

HOLDERS_FIRST = (
    "it ends by itself once nothing granted on them is left: delete the pods that `gpufrac allocations` names for it"
)
"""What helps with a daemon whose GPUs are gone. A cleanup would end the daemons of all other GPUs, too."""


class View:
    """Of one mpsd, which it names.

    Args:
        warnings: what is short of perfect on this host, for people.
        events: how many there were.
    """

    def __init__(
        self,
        node: Node,
        state: StateFile,
        indices: Indices,
        hard_limits: HardLimitsKeeper,
        backend: GpuBackend,
        logs: DaemonLogs,
        warnings: tuple[Reason, ...],
        events: Counting = SILENT,
    ) -> None:
        self._node, self._state, self._indices, self._hard_limits = node, state, indices, hard_limits
        self._backend, self._logs, self._warnings, self._events = backend, logs, warnings, events
        self._started_unix_s = time.time()
        self._instance = uuids.uuid4().hex[:12]

    def snapshot(self) -> Snapshot:
        """As it is now; its generation is for who publishes it."""
        node = self._node
        reaching = [allocation for allocation in node.desired.allocations if needs_daemon(allocation)]
        allocations = {
            daemon.name: [a for a in reaching if set(a.gpus).issubset(daemon.spec.gpus)]
            for daemon in node.daemons.values()
        }
        # None before daemons are planned, which takes the MPS protocol.
        warnings = tuple(self._all_warnings())
        planned = [node.gpus[state.info.uuid] for state in node.known() if state.info.uuid in node.owner]
        return Snapshot(
            instance=self._instance,
            generation=0,
            driver_version=node.inventory.driver_version,
            gpus=tuple(self._status(gpu, allocations) for gpu in planned),
            reason=message_of(node.inventory.reason),
            reason_code=code_of(node.inventory.reason),
            config_error=message_of(node.config_error),
            config_error_code=code_of(node.config_error),
            config_restart_needed=node.config_restart_needed,
            backend=node.config.backend,
            started_unix_s=self._started_unix_s,
            hard_limits=self._hard_limits.found,
            cgroup_root=self._backend.cgroup_root,
            warnings=tuple(warning.message for warning in warnings),
            warning_codes=tuple(warning.code for warning in warnings),
            events=dict(self._events.counts),
            events_lost=self._events.lost,
        )

    def _all_warnings(self) -> Iterator[Reason]:
        node = self._node
        yield from self._warnings
        if self._state.problem is not None:
            yield self._state.problem
        if node.inventory.never_seen:
            yield never_seen(node.inventory.never_seen)
        yield from self._misnamed()
        yield from self._nameless()
        yield from self._homeless()
        yield from self._inherited_modes()
        yield from self._unlisted_processes()
        for gpu in node.gpus.values():
            if contested := gpu.mode.contested(gpu.state.info.index):
                yield contested
        yield from self._hard_limits.warnings

    def _status(self, gpu: Gpu, allocations: Mapping[str, Sequence[DesiredAllocation]]) -> GpuStatus:
        node = self._node
        daemon = node.daemons[node.owner[gpu.uuid]]
        not_shared = self._not_shared(daemon)
        reason = gpu.state.reason or gpu.mode.trouble
        applied = gpu.mode.applied
        held = applied is not None and applied.compute_mode is not ComputeMode.PROHIBITED
        servers = node.servers.get(daemon.name)
        return GpuStatus(
            info=gpu.state.info,
            health=gpu.state.health,
            reason=message_of(reason),
            reason_code=code_of(reason),
            not_shared=message_of(not_shared),
            not_shared_code=code_of(not_shared),
            excluded=numbering.is_excluded(node.config, gpu.state.info),
            group=daemon.name,
            mode=applied.mode if applied is not None and held and fits(applied, gpu.state.compute_mode) else None,
            driver_compute_mode=gpu.state.compute_mode,
            daemon=self._daemon_status(daemon, allocations[daemon.name]),
            clients=gpu.usage.clients,
            evictions=servers.evictions(gpu.uuid) if servers is not None else 0,
            mode_changes=gpu.mode.changes,
        )

    def _not_shared(self, daemon: DaemonKeeper) -> Reason | None:
        """Why the daemon's GPUs are left alone; None when they are not."""
        if daemon.plan is None:
            return Reason(SharingCode.DISSOLVED, "its MPS daemon is of other GPUs by now, and is ending")
        if daemon.plan.not_shared is not None:
            return daemon.plan.not_shared
        if self._node.cleaned_up:
            text = "everything was cleaned up on request: restart mpsd to share it again"
            return Reason(SharingCode.CLEANED_UP, text)
        return None

    def _daemon_status(self, daemon: DaemonKeeper, allocations: Iterable[DesiredAllocation]) -> DaemonStatus | None:
        status = daemon.status(allocations, partial(self._logs.last_lines, daemon.name))
        if status is None or not daemon.is_absent or not (others := self._node.blockers(daemon)):
            return status
        names = ", ".join(
            f"{self._label(other)} ({'looked for' if other.finding else other.state})" for other in others
        )
        why = Reason(DaemonCode.OTHERS_STILL_THERE, f"it takes the place of others, which end when unused: {names}")
        return msgspec.structs.replace(status, reason=why.message, reason_code=why.code)

    def _label(self, daemon: DaemonKeeper) -> str:
        """How texts call a daemon: by the GPUs that it runs on."""
        gpus = daemon.identity.gpus if daemon.identity is not None else daemon.spec.gpus
        return label(daemon.name, gpus, {uuid: gpu.state.info.index for uuid, gpu in self._node.gpus.items()})

    # --- what is short of perfect --------------------------------------------------------------------------------

    def _misnamed(self) -> Iterable[Reason]:
        node = self._node
        if node.inventory.reason or not node.gpus:
            return ()  # not all are seen: one that is missing may only be late
        infos = [gpu.state.info for gpu in node.gpus.values()]
        moved, missing = numbering.warnings(node.config, self._indices.numbering, infos)
        return (
            *(Reason(WarningCode.INDICES_MOVED, text) for text in moved),
            *(Reason(WarningCode.GPU_NOT_HERE, text) for text in missing),
        )

    def _nameless(self) -> Iterable[Reason]:
        return (
            Reason(WarningCode.NO_HOST_PIDS, f"MPS daemon of {self._label(self._node.daemons[name])}: {NO_HOST_PIDS}")
            for name, watch in self._node.servers.items()
            if watch.nameless_clients
        )

    def _homeless(self) -> Iterable[Reason]:
        return (
            Reason(
                WarningCode.DAEMON_WITHOUT_GPU,
                f"the MPS daemon of {self._label(daemon)} runs (pid {daemon.identity.pid}), and none of its GPUs is on "
                f"this node: {HOLDERS_FIRST if self._node.is_busy(daemon) else 'it is being ended'}",
            )
            for daemon in self._node.daemons.values()
            if daemon.identity is not None and not self._node.members(daemon)
        )

    def _inherited_modes(self) -> Iterable[Reason]:
        """A compute mode that may be an earlier mpsd's, where nothing tells what was found before it."""
        for uuid, first in self._node.first_modes.items():
            gpu = self._node.gpus[uuid]
            if self._state.saved.compute_modes.get(uuid, gpu.state.compute_mode) is first:
                yield Reason(
                    WarningCode.COMPUTE_MODE_INHERITED,
                    f"GPU {gpu.state.info.index}: it was in compute mode {first} when mpsd started, without a record "
                    "of who set it (there was no mpsd.json of use), and is given back so: if that is not wanted: "
                    f"nvidia-smi -i {uuid} -c DEFAULT while nothing is bound there",
                )

    def _unlisted_processes(self) -> Iterable[Reason]:
        return (
            Reason(
                WarningCode.PROCESSES_NOT_LISTED,
                f"GPU {gpu.state.info.index}: its driver lists no processes: who uses it besides MPS clients is not "
                "known",
            )
            for gpu in self._node.gpus.values()
            if not gpu.state.processes_told
        )


def never_seen(count: int) -> Reason:
    """That GPUs are missing which nobody could name since mpsd started (pure)."""
    what, them = ("a GPU", "it") if count == 1 else (f"{count} GPUs", "them")
    return Reason(
        WarningCode.GPU_NEVER_READ,
        f"the driver counts {what} more than it can read: lost since before mpsd started; look for NVRM and Xid in the "
        f"kernel's log, then reset {them} or reboot",
    )
