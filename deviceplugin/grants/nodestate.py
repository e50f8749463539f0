"""What is known of this node besides what it has granted: what mpsd said last, the config in force, whether hard limits
can be set, whose other GPUs are (an immutable value; what is heard makes a new one)."""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import structs

from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.model import HardAbility, newer
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.plan.start import (
    Grant,
    attach_objection,
    gpus_objection,
    hard_objection,
    start_objection,
    way,
    with_effective_enforcement,
)
from mpsd.common.reason import Reason
from mpsd.config.model import NodeConfig
from mpsd.gpu.model import GpuHealth
from mpsd.localapi.snapshot import GpuStatus, HardLimits, Snapshot


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The node at one moment.

    `gpus` are as known last, ordered by index; `instance` and `generation` are of mpsd's last snapshot. `absence`: why
    mpsd can't be relied on now, None when it can; `heard_unix_s`: while it can't, when it could last, None where it
    never could since this process started. `mpsd_seen`: it has answered since then, `complete`: it has shown all GPUs.
    `hard`: whether new containers can be held to hard limits, as far as known. `cgroup_root`: where mpsd sees the
    cgroups of containers. `protocols`: the MPS protocol that each GPU's daemon spoke last. `kind_trouble`: GPU -> why
    the CDI kind of device nodes lacks it. `foreign`: GPU -> why it belongs to another plugin now. `reserved`: GPUs that
    a scheduler's reservation pods hold.
    """

    config: NodeConfig
    gpus: tuple[GpuStatus, ...] = ()
    instance: str = ""
    generation: int = 0
    absence: Reason | None = Reason(OfferCode.MPSD_AWAY, "mpsd has not answered yet")
    heard_unix_s: float | None = None
    mpsd_seen: bool = False
    complete: bool = False
    hard: HardAbility = HardAbility()
    cgroup_root: str = Snapshot(instance="", generation=0).cgroup_root
    driver_version: str | None = None
    protocols: Mapping[str, int] = {}
    kind_trouble: Mapping[str, Reason] = {}
    foreign: Mapping[str, Reason] = {}
    reserved: frozenset[str] = frozenset()

    # --- what is heard -------------------------------------------------------------------------------------------

    def observed(self, snapshot: Snapshot | None, now_unix_s: float) -> "NodeState":
        """With what mpsd sees; None: mpsd does not answer.

        No GPUs at all is not believed at once: a driver that is being loaded looks like that, and the shares of running
        pods must not turn Unhealthy for it. Nothing starts meanwhile.
        """
        if snapshot is None:
            now = structs.replace(self, absence=Reason(OfferCode.MPSD_AWAY, "mpsd does not answer"))
        elif not snapshot.gpus:
            text = f"mpsd sees no GPU: {snapshot.reason or 'none is there'}"
            now = structs.replace(self, mpsd_seen=True, absence=Reason(OfferCode.MPSD_AWAY, text))
        else:
            now = structs.replace(
                self,
                mpsd_seen=True,
                absence=None,
                gpus=_with_gone(snapshot, self.gpus),
                hard=structs.replace(self.hard, limits=newer(self.hard.limits, snapshot.hard_limits)),
                cgroup_root=snapshot.cgroup_root,
                driver_version=snapshot.driver_version,
                protocols={**self.protocols, **_protocols(snapshot.gpus)},
                complete=self.complete or not snapshot.reason,
            )
        if snapshot is not None:
            now = structs.replace(now, instance=snapshot.instance, generation=snapshot.generation)
        return structs.replace(now, heard_unix_s=now_unix_s) if now.absence and not self.absence else now

    def restored(self, gpus: tuple[GpuStatus, ...], hard_limits: HardLimits) -> "NodeState":
        """As an earlier run knew it."""
        hard = structs.replace(self.hard, limits=hard_limits)
        return structs.replace(self, gpus=gpus, hard=hard, protocols=_protocols(gpus))

    # --- questions -----------------------------------------------------------------------------------------------

    @property
    def by_uuid(self) -> dict[str, GpuStatus]:
        """What mpsd said last of each GPU."""
        return {gpu.info.uuid: gpu for gpu in self.gpus}

    def protocol(self, gpu: str) -> int:
        """The MPS protocol that the GPU's daemon spoke last; before any did, the configured one."""
        return self.protocols.get(gpu, 3 if self.config.mps.protocol == "3" else 2)

    def shared_memory(self, gpu: str) -> str | None:
        """What the GPU's daemon has as its /dev/shm by mpsd's last word, None where it did not tell."""
        return next((g.daemon.shared_memory for g in self.gpus if g.info.uuid == gpu and g.daemon), None)

    def lost(self, gpus: Iterable[str]) -> set[str]:
        """Which of these GPUs are gone: lost, or not there at all since mpsd has shown everything."""
        health = {status.info.uuid: status.health for status in self.gpus}
        gone = GpuHealth.LOST if self.complete else None
        return {gpu for gpu in gpus if health.get(gpu, gone) is GpuHealth.LOST}

    def waits_for(self, allocation: Allocation) -> Reason | None:
        """Why the container of a live allocation may not start now; None when it may."""
        return self.absence or start_objection(allocation, self.by_uuid, self.hard)

    def permitted(self, allocations: Iterable[Allocation]) -> dict[str, Grant]:
        """Those whose containers may start now, by key, at the level they would start with, and what they mount of
        their daemon: see plan.start."""
        if self.absence:
            return {}
        gpus = self.by_uuid
        judged: dict[object, Reason | None] = {}  # hundreds of allocations ask the same few questions
        allowed = {}
        for granted in allocations:
            if hard_objection(granted, self.hard):
                continue
            allocation = with_effective_enforcement(granted, self.hard)
            place = (allocation.group, allocation.gpus, allocation.mode)
            question = (*place, allocation.default_socket, allocation.limit_bytes)
            if question not in judged:
                judged[question] = gpus_objection(allocation, gpus)
            if judged[question] is None and attach_objection(allocation, gpus) is None:
                allowed[allocation.key] = (allocation, way(allocation, gpus, self.config.mps))
        return allowed


def _protocols(gpus: Iterable[GpuStatus]) -> dict[str, int]:
    return {gpu.info.uuid: gpu.daemon.protocol for gpu in gpus if gpu.daemon is not None}


def _with_gone(snapshot: Snapshot, before: tuple[GpuStatus, ...]) -> tuple[GpuStatus, ...]:
    """GPUs as reported, and those that vanished from the report: their shares must not vanish with them.

    They are lost, unless mpsd says that it does not see everything: a GPU it has not read yet looks the same.
    """
    reported = {status.info.uuid for status in snapshot.gpus}
    health = GpuHealth.UNRESPONSIVE if snapshot.reason else GpuHealth.LOST
    why = snapshot.why or Reason(OfferCode.GPU_NOT_REPORTED, "the GPU is no longer reported")
    gone = [
        structs.replace(status, health=health, reason=why.message, reason_code=why.code, daemon=None)
        for status in before
        if status.info.uuid not in reported
    ]
    return tuple(sorted((*snapshot.gpus, *gone), key=lambda status: status.info.index))
