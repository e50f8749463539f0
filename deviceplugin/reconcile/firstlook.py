"""Nothing is taken away before the world was looked at.

Records can be lost. Who starts without them would have mpsd unbind GPUs under running containers, and would remove CDI
files that their restarts need. What we have no record of stays as it is until everybody who knows of containers was
heard once, and what they run was adopted: the kubelet of shares, the container runtime of annotated pods.
"""

from typing import Protocol

import msgspec

from deviceplugin.grants.broker import Broker
from deviceplugin.plan.allocation import ANNOTATED
from mpsd.localapi.snapshot import Desired


class Mpsd(Protocol):
    """What mpsd was told last; raises GpufracError."""

    def desired(self) -> Desired: ...


class Looked(msgspec.Struct, frozen=True):
    """Who was heard: of shares, of annotated pods."""

    shares: bool
    annotated: bool

    @property
    def all(self) -> bool:
        """Whether everybody was heard."""
        return self.shares and self.annotated


class FirstLook:
    """Who was heard since we started. State of one owner, who calls `adopted`."""

    def __init__(self, broker: Broker, mpsd: Mpsd) -> None:
        self._broker, self._mpsd = broker, mpsd
        self._shares = self._annotated = False
        self._judged = {allocation.key for allocation in broker.allocations()}
        """Had a record since we started: where they have none any more, they were released."""

    def adopted(self, *, checkpoint: bool, recorded: bool) -> None:
        """What the kubelet shows was adopted. `checkpoint`: it could be read, which alone shows plain init containers.
        `recorded`: nothing of it lacks a record for want of a disk that takes one.
        On GPUs that mpsd has not shown yet nothing can be adopted."""
        if not self._shares and checkpoint and recorded and self._broker.node.complete:
            self._shares = True
            self._broker.wake()

    def looked(self) -> Looked:
        """To be asked before the allocations are: what is adopted meanwhile is not among those."""
        self._annotated = self._annotated or self._broker.node.config.annotations is None or self._broker.runtime_heard
        return Looked(self._shares, self._annotated)

    def with_unknown(self, desired: Desired, looked: Looked) -> Desired:
        """The desired state, with what mpsd was told before of allocations that can't be judged yet.

        Raises:
            GpufracError: mpsd does not say what it was told.
        """
        if looked.all:
            return desired
        self._judged |= {allocation.key for allocation in desired.allocations}
        kept = (
            allocation
            for allocation in self._mpsd.desired().allocations
            if allocation.key not in self._judged
            and not (looked.annotated if allocation.resource == ANNOTATED else looked.shares)
        )
        return Desired(allocations=(*kept, *desired.allocations))
