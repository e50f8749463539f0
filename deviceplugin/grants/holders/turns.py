"""Which containers of annotated pods have had their turn? Judged from what the runtime tells of containers (pure).

A container that has ended holds its room for its pod, and another container of the pod may take that over. The runtime
does not say which are init containers, so what is observed decides. One of which it tells nothing counts as running:
one that is asked for again has not had its turn, nor has one that was never there.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Instance(NamedTuple):
    """One run of a container, as the runtime knows it. `container` is a ContainerRef's ID, which each run has again."""

    id: str
    container: str
    sandbox: str


class Turns:
    """State of one owner. `outdated` are keys of allocations whose containers are asked for with something else now:
    what is given in their place waits until they are let go."""

    def __init__(self) -> None:
        self._running: dict[str, Instance] = {}
        self._over: set[str] = set()
        self._heard = False
        self.outdated: set[str] = set()

    def asked(self, container: str) -> None:
        """It is about to be made, so its turn is not over."""
        self._over.discard(container)

    def runs(self, instance: Instance) -> None:
        """It was allowed to be made."""
        self._running[instance.id] = instance
        self._over.discard(instance.container)

    def ended(self, identifier: str) -> None:
        """The runtime says that a container, or a sandbox with all that ran in it, stopped or is removed. Unknown ones
        are no error."""
        gone = [one for one in self._running.values() if identifier in (one.id, one.sandbox)]
        self._running = {one.id: one for one in self._running.values() if one not in gone}
        self._over |= {one.container for one in gone} - {one.container for one in self._running.values()}

    def synchronized(self, running: Mapping[str, Instance], holders: Collection[str]) -> None:
        """All that run, by their IDs; runtimes do not show what has ended.

        Args:
            holders: the containers that hold something.
        """
        self._heard = True
        self._running = dict(running)
        self._over = set(holders) - {instance.container for instance in running.values()}

    def unheard(self) -> None:
        """The runtime is not heard of any more."""
        self._heard = False

    def is_over(self, container: str) -> bool:
        """Whether a container had its turn, and has ended."""
        return self._heard and container in self._over

    def keep(self, holders: Collection[str], live: Collection[str]) -> None:
        """Forgets all but the containers that hold something, and the allocations that live."""
        self._over &= set(holders)
        self.outdated &= set(live)
