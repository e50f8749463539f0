"""Does a container really run with our edits? Judged from the processes of its pod (pure; the caller looks and times).

No alarm may be false: a slow image pull, a crash loop or a long init container looks like a missing marker for a while.
So a container is accused only on one of two grounds. Either a process of its pod uses the GPU without our marker; or,
for SUSPECT_S, as many containers of the pod run as the kubelet shows, the kubelet has begun to create this one (which
it does after all init containers), and no process of the pod carries the marker.
"""

from collections.abc import Collection, Iterable

import msgspec

from deviceplugin.render import MARKER

SUSPECT_S = 20.0


class PodView(msgspec.Struct, frozen=True):
    """One pod now.

    `running`: containers with a process, the pause container aside. `markers`: allocation keys its processes carry.
    `expected`: app and sidecar containers that the kubelet shows. `unmarked_clients`: PIDs on a GPU without marker.
    """

    running: int
    markers: frozenset[str]
    expected: int
    unmarked_clients: tuple[int, ...] = ()


class Markers:
    """What is known of each allocation over time. State of one owner; times are monotonic seconds."""

    def __init__(self) -> None:
        self._verified: set[str] = set()
        self._suspect_since_s: dict[str, float] = {}

    def unverified(self, keys: Iterable[str]) -> set[str]:
        """Those whose marker was not seen yet: only they are worth a look at processes."""
        return set(keys) - self._verified

    def keep(self, live: Collection[str]) -> None:
        """Forgets all others."""
        self._verified &= set(live)
        self._suspect_since_s = {key: s for key, s in self._suspect_since_s.items() if key in live}

    def judge(self, key: str, pod: PodView | None, *, begun: bool, now_s: float) -> str:
        """Why the container of an unverified allocation runs unenforced, empty while that can't be said.

        Args:
            begun: whether the kubelet has begun to create the container.
        """
        if pod is None:
            self._suspect_since_s.pop(key, None)
            return ""
        if key in pod.markers:
            self._verified.add(key)
            self._suspect_since_s.pop(key, None)
            return ""
        if pod.unmarked_clients:
            pids = ", ".join(map(str, pod.unmarked_clients[:5]))
            return f"pid {pids} of its pod uses the GPU without {MARKER}: it is not held to the limit"
        if not begun or pod.running < max(1, pod.expected):
            self._suspect_since_s.pop(key, None)
            return ""
        if now_s - self._suspect_since_s.setdefault(key, now_s) < SUSPECT_S:
            return ""
        return f"no process of its pod carries {MARKER}: the runtime did not apply our CDI device"
