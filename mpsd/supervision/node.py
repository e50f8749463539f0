"""What the loop knows of this node: one value, changed in its thread alone, and the questions that need several parts
of it. No effects."""

from dataclasses import dataclass

from mpsd.common.lanes import Lane
from mpsd.common.reason import Reason
from mpsd.config.model import NodeConfig
from mpsd.daemon.plan import can_move, needs_daemon
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuState, Inventory, Mode
from mpsd.gpu.reasons import NOT_PROBED
from mpsd.limits.api import GpuLimits
from mpsd.localapi.snapshot import Desired
from mpsd.supervision.daemon import DaemonKeeper
from mpsd.supervision.ends import ENDS, End, Modes, ruling
from mpsd.supervision.mode import ModeKeeper
from mpsd.supervision.servers import ServerWatch
from mpsd.supervision.usage import Usage


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU. `counted_s`: when the driver was last asked who uses it, with an answer (monotonic)."""

    state: GpuState
    lane: Lane
    mode: ModeKeeper
    usage: Usage
    limits: GpuLimits
    counted_s: float = 0.0

    @property
    def uuid(self) -> str:
        return self.state.info.uuid


class Node:
    """See the module."""

    def __init__(self, config: NodeConfig, desired: Desired) -> None:
        self.config = config
        """The one in force."""
        self.config_error: Reason | None = None
        """Why a new file is not in force."""
        self.config_restart_needed = ""
        """Which keys of a new file wait for a restart, by comma."""
        self.desired = desired
        self.inherited = {uuid for a in desired.allocations for uuid in a.gpus}
        """GPUs that were bound before we came: who is on them is no stranger until they were bound by us, too."""
        self.inventory = Inventory(reason=NOT_PROBED)
        self.gpus: dict[str, Gpu] = {}
        """All that were seen since start, by UUID."""
        self.first_modes: dict[str, ComputeMode] = {}
        """Compute modes seen first that may be an earlier mpsd's, where no record tells."""
        self.daemons: dict[str, DaemonKeeper] = {}
        self.servers: dict[str, ServerWatch] = {}
        """What the logs of daemons that ran say, by the daemon's name."""
        self.owner: dict[str, str] = {}
        """The daemon that serves each GPU."""
        self.ends: set[End] = set()
        """Of everything, that are under way."""

    @property
    def stopping(self) -> bool:
        """Whether mpsd is on its way out."""
        return End.STOPPING in self.ends

    @property
    def cleaned_up(self) -> bool:
        """Whether nothing is to run until mpsd is started again."""
        return End.CLEANED_UP in self.ends

    @property
    def gives_modes_back(self) -> bool:
        """Whether an end has every GPU left in the compute mode that it was found in."""
        end = ruling(self.ends)
        return end is not None and ENDS[end].modes is Modes.AS_FOUND

    def known(self) -> tuple[GpuState, ...]:
        """All GPUs seen since start, by index: a lost one keeps its daemon and its place."""
        states = [gpu.state for gpu in self.gpus.values()]
        return tuple(sorted(states, key=lambda state: (state.info.index, state.info.uuid)))

    def lost(self) -> frozenset[str]:
        """UUIDs of GPUs that are gone."""
        return frozenset(uuid for uuid, gpu in self.gpus.items() if gpu.state.health is GpuHealth.LOST)

    def members(self, daemon: DaemonKeeper) -> list[Gpu]:
        """Its GPUs that are on this node."""
        return [gpu for uuid in daemon.spec.gpus if (gpu := self.gpus.get(uuid)) is not None]

    def daemon_of(self, uuid: str) -> DaemonKeeper | None:
        """The daemon that serves a GPU."""
        return self.daemons.get(self.owner.get(uuid, ""))

    def daemon_on(self, uuid: str) -> DaemonKeeper | None:
        """The daemon that is on a GPU now: of an earlier grouping while that ends, else the one that serves it."""
        there = (d for d in self.daemons.values() if uuid in d.spec.gpus and not d.is_absent)
        return next(there, None) or self.daemon_of(uuid)

    def is_wanted(self, daemon: DaemonKeeper) -> bool:
        """Whether it should run. Allocations outlive a reload that no longer shares their GPU."""
        if self.cleaned_up or daemon.plan is None:
            return False
        gpus = daemon.plan.domain.gpus
        return not daemon.plan.not_shared or any(not set(a.gpus).isdisjoint(gpus) for a in self.desired.allocations)

    def blockers(self, daemon: DaemonKeeper) -> list[DaemonKeeper]:
        """Other daemons that are still on its GPUs: these were of other domains."""
        gpus = set(daemon.spec.gpus)
        return [
            other
            for other in self.daemons.values()
            if other is not daemon and not other.is_absent and not gpus.isdisjoint(other.spec.gpus)
        ]

    def bound(self, uuid: str) -> Mode | None:
        """The mode that allocations on the GPU need; None without."""
        return next((a.mode for a in self.desired.allocations if uuid in a.gpus), None)

    def is_busy(self, daemon: DaemonKeeper) -> bool:
        """Whether an allocation or a client of ours is on its GPUs."""
        return any(self.bound(uuid) is not None for uuid in daemon.spec.gpus) or self.has_clients(daemon)

    def has_clients(self, daemon: DaemonKeeper) -> bool:
        """Whether anybody uses the daemon's GPUs through it, as far as is known."""
        return any(
            client.mps or client.allocation_key is not None
            for gpu in self.members(daemon)
            for client in gpu.usage.clients
        )

    def is_drained(self, daemon: DaemonKeeper) -> bool:
        """Whether nobody uses it, asked since it waits for that. Allocations whose containers are down don't count
        where the same daemon comes back to them."""
        members = self.members(daemon)
        if not all(gpu.counted_s >= daemon.since_s or gpu.state.health is GpuHealth.LOST for gpu in members):
            return False
        if daemon.life.wanted and not daemon.outdated:  # the same comes back
            return not self.has_clients(daemon)
        return not (self.is_needed(daemon) if daemon.plan is None else self.is_busy(daemon))

    def has_users(self, daemon: DaemonKeeper) -> bool:
        """Whether somebody is a client of the daemon, or should be, as far as is known."""
        others = {a.key for a in self.desired.allocations if not needs_daemon(a)}
        clients = (client for gpu in self.members(daemon) for client in gpu.usage.clients)
        return any(c.mps or (c.allocation_key is not None and c.allocation_key not in others) for c in clients)

    def is_needed(self, daemon: DaemonKeeper) -> bool:
        """Whether somebody uses a daemon whose GPUs are of other domains by now, or can't be served by theirs."""
        domains = [set(d.plan.domain.gpus) for d in self.daemons.values() if d.plan is not None]
        return self.has_users(daemon) or any(
            needs_daemon(a)
            and set(a.gpus).issubset(daemon.spec.gpus)
            and not (can_move(a, daemon.spec) and any(gpus.issuperset(a.gpus) for gpus in domains))
            for a in self.desired.allocations
        )

    def kept_domains(self) -> dict[str, tuple[str, ...]]:
        """Daemons of several GPUs that are in use: name -> GPUs. While nobody knows, they are."""
        return {
            daemon.name: daemon.identity.gpus
            for daemon in self.daemons.values()
            if daemon.identity is not None
            and len(daemon.identity.gpus) > 1
            and (self._stays(daemon) or (daemon.life.wanted and not self._is_counted(daemon)))
        }

    def _stays(self, daemon: DaemonKeeper) -> bool:
        """Whether no other can take a daemon's place now."""
        return self.has_users(daemon) or any(
            needs_daemon(a) and set(a.gpus).issubset(daemon.spec.gpus) and not can_move(a, daemon.spec)
            for a in self.desired.allocations
        )

    def _is_counted(self, daemon: DaemonKeeper) -> bool:
        return all(gpu.usage.known or gpu.state.health is GpuHealth.LOST for gpu in self.members(daemon))

    def is_down(self, daemon: DaemonKeeper) -> bool:
        """Nothing of ours is on its GPUs, or all was tried."""
        return daemon.has_ended and all(gpu.mode.idle or gpu.mode.given_up for gpu in self.members(daemon))

    def is_closed(self, daemon: DaemonKeeper) -> bool:
        """Whether all of its GPUs are bound so that one process at a time may open them."""
        holds = [gpu.mode.applied for gpu in self.members(daemon)]
        return bool(holds) and all(h is not None and h.compute_mode is ComputeMode.EXCLUSIVE_PROCESS for h in holds)
