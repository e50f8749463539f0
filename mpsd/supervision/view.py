"""The snapshot of the node, made of what the loop knows: nothing here changes anything."""

import time
import uuid as uuids
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from mpsd.config import numbering
from mpsd.daemon.state import StateFile
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import ComputeMode, Mode
from mpsd.limits.hardlimits import HardLimitsKeeper
from mpsd.localapi.snapshot import DesiredAllocation, GpuStatus, Snapshot
from mpsd.supervision.computemode import fits
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
    """

    def __init__(
        self,
        node: Node,
        state: StateFile,
        indices: Indices,
        hard_limits: HardLimitsKeeper,
        backend: GpuBackend,
        logs: DaemonLogs,
        warnings: tuple[str, ...],
    ) -> None:
        self._node, self._state, self._indices, self._hard_limits = node, state, indices, hard_limits
        self._backend, self._logs, self._warnings = backend, logs, warnings
        self._started_unix_s = time.time()
        self._instance = uuids.uuid4().hex[:12]

    def snapshot(self) -> Snapshot:
        """As it is now; its generation is for who publishes it."""
        node = self._node
        allocations: dict[str, list[DesiredAllocation]] = {}
        for allocation in node.desired.allocations:
            if allocation.mode is Mode.SM_SHARING or allocation.default_socket:
                allocations.setdefault(allocation.group, []).append(allocation)
        # None before daemons are planned, which takes the MPS protocol.
        planned = [node.gpus[state.info.uuid] for state in node.known() if state.info.uuid in node.owner]
        return Snapshot(
            instance=self._instance,
            generation=0,
            driver_version=node.inventory.driver_version,
            gpus=tuple(self._status(gpu, allocations) for gpu in planned),
            reason=node.inventory.reason,
            config_error=node.config_error,
            config_restart_needed=node.config_restart_needed,
            backend=node.config.backend,
            started_unix_s=self._started_unix_s,
            hard_limits=self._hard_limits.found,
            cgroup_root=self._backend.cgroup_root,
            warnings=(
                *self._warnings,
                *filter(None, [self._state.problem, never_seen(node.inventory.never_seen)]),
                *self._misnamed(),
                *self._nameless(),
                *self._homeless(),
                *self._inherited_modes(),
                *self._unlisted_processes(),
                *(text for gpu in node.gpus.values() if (text := gpu.mode.contested(gpu.state.info.index))),
                *self._hard_limits.warnings,
            ),
        )

    def _status(self, gpu: Gpu, allocations: Mapping[str, Sequence[DesiredAllocation]]) -> GpuStatus:
        node = self._node
        daemon = node.daemons[node.owner[gpu.uuid]]
        not_shared = daemon.plan.not_shared if daemon.plan is not None else "its group is being dissolved"
        if node.cleaned_up and not not_shared:
            not_shared = "everything was cleaned up on request: restart mpsd to share it again"
        if not not_shared and not daemon.life.wanted and node.is_blocked(daemon):
            not_shared = "daemons of an earlier grouping are still on its GPUs"
        applied = gpu.mode.applied
        held = applied is not None and applied.compute_mode is not ComputeMode.PROHIBITED
        servers = node.servers.get(daemon.name)
        return GpuStatus(
            info=gpu.state.info,
            health=gpu.state.health,
            reason=gpu.state.reason or gpu.mode.trouble,
            not_shared=not_shared,
            excluded=numbering.is_excluded(node.config, gpu.state.info),
            group=daemon.name,
            mode=applied.mode if applied is not None and held and fits(applied, gpu.state.compute_mode) else None,
            driver_compute_mode=gpu.state.compute_mode,
            daemon=daemon.status(allocations.get(daemon.name, ()), partial(self._logs.last_lines, daemon.name)),
            clients=gpu.usage.clients,
            evictions=servers.evictions(gpu.uuid) if servers is not None else 0,
        )

    # --- what is short of perfect --------------------------------------------------------------------------------

    def _misnamed(self) -> Iterable[str]:
        node = self._node
        if node.inventory.reason or not node.gpus:
            return ()  # not all are seen: one that is missing may only be late
        infos = [gpu.state.info for gpu in node.gpus.values()]
        return numbering.warnings(node.config, self._indices.numbering, infos)

    def _nameless(self) -> Iterable[str]:
        servers = self._node.servers.items()
        return (f"MPS daemon of {name}: {NO_HOST_PIDS}" for name, watch in servers if watch.nameless_clients)

    def _homeless(self) -> Iterable[str]:
        return (
            f"the MPS daemon of {daemon.name} runs (pid {daemon.identity.pid}), and none of its GPUs is on this node: "
            + (HOLDERS_FIRST if self._node.is_busy(daemon) else "it is being ended")
            for daemon in self._node.daemons.values()
            if daemon.identity is not None and not self._node.members(daemon)
        )

    def _inherited_modes(self) -> Iterable[str]:
        """A compute mode that may be an earlier mpsd's, where nothing tells what was found before it."""
        for uuid, first in self._node.first_modes.items():
            gpu = self._node.gpus[uuid]
            if self._state.saved.compute_modes.get(uuid, gpu.state.compute_mode) is first:
                yield (
                    f"GPU {gpu.state.info.index}: it was in compute mode {first} when mpsd started, without a record "
                    "of who set it (there was no mpsd.json of use), and is given back so: if that is not wanted: "
                    f"nvidia-smi -i {uuid} -c DEFAULT while nothing is bound there"
                )

    def _unlisted_processes(self) -> Iterable[str]:
        return (
            f"GPU {gpu.state.info.index}: its driver lists no processes: who uses it besides MPS clients is not known"
            for gpu in self._node.gpus.values()
            if not gpu.state.processes_told
        )


def never_seen(count: int) -> str:
    """That GPUs are missing which nobody could name since mpsd started; empty where none is (pure)."""
    if not count:
        return ""
    what, them = ("a GPU", "it") if count == 1 else (f"{count} GPUs", "them")
    return (
        f"the driver counts {what} more than it can read: lost since before mpsd started; look for NVRM and Xid in the "
        f"kernel's log, then reset {them} or reboot"
    )
