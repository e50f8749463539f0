"""What is said of the node itself, in `kubectl describe node`: a daemon that is wedged keeps all its pods waiting."""

from deviceplugin.kubernetes.model import Events
from deviceplugin.plan.view import daemon_text
from mpsd.localapi.snapshot import Snapshot

WEDGED = "MpsDaemonWedged"


class WedgeNews:
    """Tells once of each time that a daemon is found wedged. Of one thread."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._known: frozenset[str] = frozenset()

    def observe(self, snapshot: Snapshot) -> None:
        """Sends an event for each daemon that is wedged and was not before."""
        found = wedged(snapshot)
        for name in sorted(found.keys() - self._known):
            self._events.node("Warning", WEDGED, found[name])
        self._known = frozenset(found)


def wedged(snapshot: Snapshot) -> dict[str, str]:
    """Of each wedged daemon by its name: its GPUs, and what is with it (pure)."""
    found: dict[str, tuple[list[str], str]] = {}
    for gpu in snapshot.gpus:
        if gpu.daemon is not None and gpu.daemon.wedged:
            where, _ = found.setdefault(gpu.daemon.name, ([], daemon_text(gpu.daemon)))
            where.append(str(gpu.info.index))
    return {name: f"GPU {', '.join(where)}: {text}" for name, (where, text) in found.items()}
