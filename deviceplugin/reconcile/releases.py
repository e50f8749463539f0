"""Lets go of allocations that nobody holds any more: CDI file first, record last."""

from collections.abc import Callable, Mapping, Sequence

from deviceplugin.grants.broker import Broker
from deviceplugin.plan.allocation import Allocation
from deviceplugin.reconcile.files import PermissionFiles
from deviceplugin.reconcile.lastowners import LastOwners
from deviceplugin.reconcile.reasons import ReleaseCode
from mpsd.common.errors import GpufracError
from mpsd.common.reason import Reason
from mpsd.localapi.snapshot import GpuClients


class Releases:
    """`blocked`: allocations whose pods are gone and that can't be let go yet, and why.

    Args:
        look_up: asks mpsd for the processes on these GPUs now, by GPU; `pressed`: somebody waits for the answer.
    """

    def __init__(
        self,
        broker: Broker,
        files: PermissionFiles,
        last_owners: LastOwners,
        look_up: Callable[[Sequence[str], bool], Mapping[str, GpuClients]],
    ) -> None:
        self._broker, self._files, self._last_owners, self._look_up = broker, files, last_owners, look_up
        self.blocked: dict[str, Reason] = {}

    def collect(self, *, pressed: bool = False) -> None:
        """Releases what no kubelet entry and no process holds.

        Args:
            pressed: a request waits for room.
        """
        going = self._broker.releasable(pressed=pressed)
        blocked: dict[str, Reason] = {}
        if going:
            uuids = sorted({gpu for allocation in going for gpu in allocation.gpus})
            lost = self._broker.node.lost(uuids)
            there = [uuid for uuid in uuids if uuid not in lost]
            blocked = self._last_owners.objections(going, self._look_up(there, pressed) if there else {})
            for allocation in going:
                if allocation.key not in blocked and (reason := self._release(allocation, pressed=pressed)):
                    blocked[allocation.key] = reason
        self.blocked = blocked

    def _release(self, allocation: Allocation, *, pressed: bool) -> Reason | None:
        """Releases one allocation that nobody uses; why it stays, None when it is gone."""
        if not self._broker.begin_release(allocation.key, pressed=pressed):
            return None  # given out again meanwhile
        problem = None
        if error := self._files.withdraw(allocation.key):
            problem = Reason(ReleaseCode.FILE_STAYS, error)
        else:
            try:
                self._broker.release(allocation.key)
            except GpufracError as refused:
                problem = Reason(ReleaseCode.RECORD_STAYS, str(refused))
        if problem is not None:
            self._broker.end_release(allocation.key)
            return problem
        return None
