"""Keeps the GPUs of the node: takes in what the prober sees, and holds each in the compute mode its binding needs."""

from collections.abc import Callable
from functools import partial

import msgspec

from mpsd.common.errors import TransientError
from mpsd.common.lanes import Lane, Post
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.daemon.host import DaemonHost
from mpsd.daemon.state import StateFile
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo, GpuState, Inventory
from mpsd.gpu.reasons import NOT_LISTED, GpuCode
from mpsd.limits.api import GpuLimits
from mpsd.localapi.snapshot import DaemonState
from mpsd.supervision.computemode import Hold, hold_for
from mpsd.supervision.daemon import DaemonKeeper
from mpsd.supervision.ends import Fate
from mpsd.supervision.indices import Indices
from mpsd.supervision.mode import ModeKeeper
from mpsd.supervision.node import Gpu, Node
from mpsd.supervision.usage import Count, Daemon, Usage

log = get_logger("mpsd")

NOT_FOUND_SO = (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED)
"""Compute modes that GPUs are rarely found in, and that we set."""


class Gpus:
    """Every method is for the supervisor's thread.

    Args:
        indices: which GPU an index of the config means.
        on_counted: told after each count of who uses a GPU.
        kick: asks the prober for a probe now.
    """

    def __init__(
        self,
        node: Node,
        backend: GpuBackend,
        host: DaemonHost,
        state: StateFile,
        indices: Indices,
        post: Post,
        *,
        on_counted: Callable[[str, Count], None],
        kick: Callable[[], None],
    ) -> None:
        self._node, self._backend, self._host, self._state, self._indices = node, backend, host, state, indices
        self._post, self._on_counted, self._kick = post, on_counted, kick

    def observe(self, inventory: Inventory) -> None:
        """What the prober sees now."""
        node = self._node
        node.inventory = inventory
        listed = {state.info.uuid for state in inventory.gpus}
        for seen in inventory.gpus:
            gpu = node.gpus.get(seen.info.uuid)
            if gpu is None:
                node.gpus[seen.info.uuid] = self._new(seen)
                if self._state.begins_anew and seen.compute_mode in NOT_FOUND_SO:
                    node.first_modes[seen.info.uuid] = seen.compute_mode
                log.info("GPU", gpu=seen.info.uuid, index=seen.info.index)
            else:
                compute_mode = gpu.mode.observe(seen, gpu.state.compute_mode)
                gpu.state = msgspec.structs.replace(seen, compute_mode=compute_mode)
        for uuid, gpu in node.gpus.items():
            if uuid not in listed:
                gpu.state = msgspec.structs.replace(gpu.state, health=GpuHealth.LOST, reason=NOT_LISTED, processes=())
        self.number()

    def number(self) -> None:
        """Gives each GPU the index that means it in the config."""
        self._indices.settle(self._node.config, self._listed())
        for gpu in self._node.gpus.values():
            gpu.state = msgspec.structs.replace(gpu.state, info=self._indices.of(gpu.state.info))

    def confirm_indices(self) -> None:
        """Raises TransientError while not all GPUs are seen."""
        if reason := self._node.inventory.reason:
            raise TransientError(f"cannot confirm the numbers of GPUs, as not all are seen: {reason}")
        self._indices.confirm(self._listed())
        self.number()

    def _listed(self) -> list[GpuInfo]:
        """All GPUs as the driver numbers them, lost ones last."""
        states = sorted(self._node.inventory.gpus, key=lambda state: state.health is GpuHealth.LOST)
        return [state.info for state in states]

    def _new(self, state: GpuState) -> Gpu:
        uuid = state.info.uuid
        lane = Lane(f"driver-{uuid[-8:]}")
        mode = ModeKeeper(uuid, lane, self._backend, self._state, self._post, partial(self._on_mode_set, uuid))
        usage = Usage(
            uuid,
            lane,
            self._backend,
            self._host,
            self._post,
            partial(self._daemon_to_ask, uuid),
            partial(self._on_counted, uuid),
            simulated=self._node.config.backend == "simulated",
        )
        return Gpu(state, lane, mode, usage, GpuLimits(self._backend, lane, self._post))

    def _daemon_to_ask(self, uuid: str) -> Daemon | None:
        daemon = self._node.daemon_on(uuid)
        return None if daemon is None else Daemon(daemon.spec, daemon.identity, daemon.answers)

    def _on_mode_set(self, uuid: str, compute_mode: ComputeMode) -> None:
        gpu = self._node.gpus[uuid]
        gpu.state = msgspec.structs.replace(gpu.state, compute_mode=compute_mode)
        self._node.inherited.discard(uuid)
        self._kick()

    def reconcile(self) -> None:
        """Has who uses them counted where the driver shows something new, and their compute modes set."""
        for gpu in self._node.gpus.values():
            daemon = self._node.daemon_on(gpu.uuid)
            if daemon is None or daemon.fate is Fate.STAYS:
                continue
            if not self._node.stopping:
                gpu.usage.observe(gpu.state.processes)
            elif daemon.fate is None:
                continue
            self._reconcile_mode(gpu, daemon)

    def _reconcile_mode(self, gpu: Gpu, daemon: DaemonKeeper) -> None:
        if daemon.state is DaemonState.STARTING and gpu.uuid in self._node.inherited:
            return  # the daemon of its clients is being looked for, and what it speaks decides
        target = self._target(gpu, daemon)
        if gpu.mode.needs_check(target) and gpu.uuid not in self._node.inherited:
            if not gpu.usage.known:
                return
            if foreign := [client.pid for client in gpu.usage.clients if client.allocation_key is None]:
                assert target is not None
                pids = ", ".join(map(str, foreign[:5]))
                text = f"cannot bind it to {target.mode}: foreign processes use it (pid {pids})"
                gpu.mode.refuse(Reason(GpuCode.FOREIGN_PROCESSES, text))
                return
        gpu.mode.reconcile(target)

    def _target(self, gpu: Gpu, daemon: DaemonKeeper) -> Hold | None:
        mode = None if self._node.gives_modes_back else self._node.bound(gpu.uuid)
        if mode is None:
            return None
        prohibit = self._node.config.mps.prohibit_while_down
        return hold_for(mode, daemon.spec.protocol, daemon_ready=daemon.answers, prohibit=prohibit)
