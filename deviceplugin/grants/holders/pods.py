"""Is an annotated pod still there? Judged from what the runtime tells of sandboxes (pure; the caller brings times).

A pod's memory is booked from its first annotated container until its last sandbox is stopped: a container that restarts
keeps its place. While the runtime is not heard of nothing is concluded from its silence. A pod whose directory the
kubelet has removed is gone all the same, whatever a runtime forgets to tell.
"""

from collections.abc import Collection

GONE_S = 15.0
"""How long a pod must be gone before what it held is released, while its directory is there: the kubelet may make its
sandbox anew."""


class PodHolders:
    """Since when each pod, by UID, is gone. State of one owner; times are monotonic seconds."""

    def __init__(self) -> None:
        self._gone_since_s: dict[str, float] = {}
        self._seen: set[str] = set()
        self._removed: frozenset[str] = frozenset()
        self.heard = False
        """Whether the runtime tells what becomes of sandboxes now."""

    def runs(self, uid: str) -> None:
        """It has a sandbox."""
        self._gone_since_s.pop(uid, None)

    def stopped(self, uid: str, now_s: float) -> None:
        """Its last sandbox was stopped."""
        self._gone_since_s.setdefault(uid, now_s)

    def synchronized(self, holders: Collection[str], alive: Collection[str], now_s: float) -> None:
        """The runtime shows all its sandboxes.

        Args:
            holders: the pods that hold something.
        """
        self.heard = True
        self._gone_since_s = {uid: self._gone_since_s.get(uid, now_s) for uid in holders if uid not in alive}

    def unheard(self) -> None:
        """The runtime is not heard of any more."""
        self.heard = False

    def directories(self, there: Collection[str], missing: Collection[str], now_s: float) -> None:
        """Of these pods, which are all that hold something, the kubelet has a directory or none. One that is heard of
        must have had one: not every pod is a kubelet's."""
        self._seen = {*there, *(self._seen & set(missing))}
        self._removed = frozenset(missing) if not self.heard else frozenset(self._seen & set(missing))
        for uid in self._removed:
            self._gone_since_s.setdefault(uid, now_s)

    def keep(self, holders: Collection[str]) -> None:
        """Forgets all pods but those that hold something."""
        self._gone_since_s = {uid: since_s for uid, since_s in self._gone_since_s.items() if uid in holders}

    def gone(self) -> Collection[str]:
        """Pods that held something and are there no more."""
        return self._gone_since_s.keys()

    def releasable(self, now_s: float, *, pressed: bool = False) -> set[str]:
        """Pods whose allocations may go.

        Args:
            pressed: a request is about to be refused: the grace need not pass.
        """
        ended = self._removed & self._seen  # a directory that was there goes last: nothing is made anew
        return {
            uid
            for uid, since_s in self._gone_since_s.items()
            if (self.heard or uid in self._removed) and (pressed or uid in ended or now_s - since_s >= GONE_S)
        }
