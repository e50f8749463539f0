"""Does a container really run with our edits? Judged from the processes of its pod (pure; the caller looks and times).

No alarm may be false: a slow image pull, a crash loop or a long init container looks like a missing marker for a while.
So a container is accused only on one of two grounds. Either a process of its pod uses the GPU without our marker; or,
for SUSPECT_S, as many containers of the pod run as the kubelet shows, the kubelet has begun to create this one (which
it does after all init containers), and no process of the pod carries the marker. Where a process of the pod may not be
read, that it has none can't be said: that is a third answer.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from mpsd.common.marker import MARKER
from mpsd.common.processes import PodProcess
from mpsd.common.reason import Code, Reason

SUSPECT_S = 20.0


class VerdictCode(Code):
    """What the processes of a container tell of whether it runs with our edits."""

    WAITING = "Waiting", "Nothing can be said yet.", "Nothing."
    MARKED = "Marked", "It runs with our edits.", "Nothing."
    UNMARKED_CLIENT = (
        "UnmarkedClient",
        "A process of its pod uses the GPU without our marker, so it is not held to the limit.",
        "See that the container runtime has CDI enabled, and end the pod.",
    )
    NO_MARKER = (
        "NoMarker",
        "No process of its pod carries our marker: the runtime did not apply our CDI device.",
        "Enable CDI in the container runtime, and end the pod.",
    )
    UNREADABLE = (
        "Unreadable",
        "The plugin may not read its processes, so nothing can be said of it.",
        "Run the plugin as root and privileged, or with capability SYS_PTRACE.",
    )
    SANDBOX = (
        "NotOnThisHost",
        "Its processes are in a sandbox, not on this host.",
        "Leave `runtimeClassName` out.",
    )


class Verdict(msgspec.Struct, frozen=True):
    """What the marker in a container's process tells."""

    code: VerdictCode
    message: str = ""

    @property
    def unenforced(self) -> bool:
        """Whether its limit does not hold for certain."""
        return self.code in (VerdictCode.UNMARKED_CLIENT, VerdictCode.NO_MARKER, VerdictCode.SANDBOX)


WAITING, MARKED = Verdict(VerdictCode.WAITING), Verdict(VerdictCode.MARKED)
UNREADABLE = Verdict(
    VerdictCode.UNREADABLE,
    "whether it runs with its limit can't be told: the plugin may not read the environment of its processes: run the "
    "plugin as root and privileged, or with capability SYS_PTRACE",
)


class PodView(msgspec.Struct, frozen=True):
    """One pod now.

    `running`: containers with a process, the pause container aside. `marked`: allocation keys its processes carry, and
    the first process with each. `expected`: app and sidecar containers
    that the kubelet shows. `unmarked_clients`: PIDs on a GPU without marker. `unreadable`: a process may have one that
    can't be read. `isolation`: what the names of all its processes tell.
    """

    running: int
    marked: Mapping[str, PodProcess]
    expected: int
    unmarked_clients: tuple[int, ...] = ()
    unreadable: bool = False
    isolation: Reason | None = None


class Markers:
    """What is known of each allocation over time. State of one owner; times are monotonic seconds."""

    def __init__(self) -> None:
        self._verified: set[str] = set()
        self._before: set[str] = set()
        """Those of which an earlier container was verified: one that ended and debug containers beside it look just
        like one without a marker."""
        self._suspect_since_s: dict[str, float] = {}

    def unverified(self, keys: Iterable[str]) -> set[str]:
        """Those whose marker was not seen yet: only they are worth a look at processes."""
        return set(keys) - self._verified

    def keep(self, live: Collection[str]) -> None:
        """Forgets all others."""
        self._verified &= set(live)
        self._before &= set(live)
        self._suspect_since_s = {key: s for key, s in self._suspect_since_s.items() if key in live}

    def forget(self, key: str) -> None:
        """The container that was verified is gone: another one may come."""
        self._verified.discard(key)
        self._before.add(key)

    def judge(self, key: str, pod: PodView | None, *, begun: bool, now_s: float) -> Verdict:
        """Whether the container of an unverified allocation runs with our edits.

        Args:
            begun: whether the kubelet has begun to create the container.
        """
        if pod is None:
            self._suspect_since_s.pop(key, None)
            return WAITING
        if key in pod.marked:
            self._verified.add(key)
            self._suspect_since_s.pop(key, None)
            return MARKED
        if pod.unmarked_clients:
            pids = ", ".join(map(str, pod.unmarked_clients[:5]))
            return Verdict(
                VerdictCode.UNMARKED_CLIENT,
                f"pid {pids} of its pod uses the GPU without {MARKER}: it is not held to the limit",
            )
        if begun and pod.isolation is not None:
            return Verdict(VerdictCode.SANDBOX, pod.isolation.message)
        if key in self._before:
            return WAITING
        if not begun or pod.running < max(1, pod.expected):
            self._suspect_since_s.pop(key, None)
            return WAITING
        if now_s - self._suspect_since_s.setdefault(key, now_s) < SUSPECT_S:
            return WAITING
        if pod.unreadable:
            return UNREADABLE
        return Verdict(
            VerdictCode.NO_MARKER, f"no process of its pod carries {MARKER}: the runtime did not apply our CDI device"
        )
