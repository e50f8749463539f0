"""Which GPU's free units a resource offers, over time (pure state; the caller brings times).

All units of a container lie on one GPU, and only one GPU's free units are Healthy. A list reaches the kubelet at any
time, so an offer that moves while a pod is admitted gives its init container units of one GPU and its app container
those of another. Pods are admitted in bursts: an offer rests until none was for a while, whatever they asked for.
"""

REST_S = 1.0
"""How long after a grant an offer stays on its GPU, so that a pod's next container finds its units there."""
REST_LONGEST_S = 5.0
"""For how long grants of other resources keep it there: without an end it would never reach an emptier GPU."""


class Offers:
    """State of one owner; times are monotonic seconds."""

    def __init__(self) -> None:
        self._granted: dict[str, tuple[float, str]] = {}
        self._last_s = self._since_s = float("-inf")

    def granted(self, resource: str, group: str, now_s: float) -> None:
        """Shares of a resource were granted on a group."""
        if now_s - self._last_s >= REST_S:
            self._since_s = now_s
        self._last_s = now_s
        self._granted[resource] = (now_s, group)

    def kept(self, resource: str, before: str | None, now_s: float) -> str | None:
        """The group that stays on offer, None where the offer may move. `before`: the one on offer now."""
        own_s, group = self._granted.get(resource, (float("-inf"), ""))
        if now_s - own_s < REST_S:
            return group  # where its pod's next container must find more, whatever is on offer by now
        return before if self._rests(now_s) else None

    def published(self, now_s: float) -> None:
        """All offers that might move have done so."""
        if not self._rests(now_s):
            self._since_s = now_s

    def next_s(self, now_s: float) -> list[float]:
        """When offers may move next."""
        ends = [at_s + REST_S for at_s, _ in self._granted.values()]
        return [end_s for end_s in (*ends, self._last_s + REST_S) if end_s > now_s]

    def _rests(self, now_s: float) -> bool:
        return now_s - self._last_s < REST_S and now_s - self._since_s < REST_LONGEST_S
