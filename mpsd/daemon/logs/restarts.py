"""When servers that die one after the other are a loop (pure).

A server that cannot start is started again for the same waiting client about every 50 ms, for ever
(NVIDIA/k8s-device-plugin issue 762).
"""

from collections import deque

from mpsd.common.reason import Reason
from mpsd.daemon.logs.parse import LogEvent, ServerExited, ServerReady, StartFailed
from mpsd.localapi.reasons import DaemonCode


class RestartLoop:
    """Fed with what the log of one daemon tells, says whether its servers are in a restart loop. All times monotonic.

    Args:
        failures: so many servers that ended with a failure...
        window_s: ...within this time are a loop.
        stable_s: a server that was ready for so long ends the loop and clears the count.
        quiet_s: so does so long a time without a failure: nobody waits for a server any more.
    """

    def __init__(
        self, *, failures: int = 5, window_s: float = 30.0, stable_s: float = 30.0, quiet_s: float = 300.0
    ) -> None:
        self._window_s, self._stable_s, self._quiet_s = window_s, stable_s, quiet_s
        self._failed_s: deque[float] = deque(maxlen=failures)
        self._ready: tuple[int, float] | None = None
        """The first server that became ready since the last failure, and when."""
        self._first_s = 0.0
        self._count = 0
        self._status = 0
        self._cause = ""
        self._looping = False

    def feed(self, event: LogEvent, now_s: float) -> None:
        """Takes any event; most do not matter here."""
        if isinstance(event, ServerReady):
            self._ready = self._ready or (event.pid, now_s)
        elif isinstance(event, StartFailed) and (not event.generic or not self._cause):
            self._cause = event.text
        elif isinstance(event, ServerExited):
            self._forget_if_over(now_s)
            if self._ready is not None and self._ready[0] == event.pid:
                self._ready = None
            if event.status:
                self._fail(event.status, now_s)

    def reason(self, now_s: float) -> Reason | None:
        """What is wrong, for an operator; None while there is no loop."""
        self._forget_if_over(now_s)
        if not self._looping:
            return None
        cause = f" ({self._cause})" if self._cause else ""
        text = (
            f"MPS servers end as soon as they are started: {self._count} times in "
            f"{self._failed_s[-1] - self._first_s:.0f} s, the last with status {self._status}{cause}"
        )
        return Reason(DaemonCode.SERVERS_END, text)

    def clear(self) -> None:
        """For a new daemon."""
        self._failed_s.clear()
        self._ready = None
        self._count, self._cause, self._looping = 0, "", False

    def _fail(self, status: int, now_s: float) -> None:
        if not self._count:
            self._first_s = now_s
        self._count += 1
        self._status = status
        self._ready = None  # an older one proves nothing about what fails now
        self._failed_s.append(now_s)
        if len(self._failed_s) == self._failed_s.maxlen and now_s - self._failed_s[0] <= self._window_s:
            self._looping = True

    def _forget_if_over(self, now_s: float) -> None:
        stable = self._ready is not None and now_s - self._ready[1] >= self._stable_s
        if stable or (self._failed_s and now_s - self._failed_s[-1] >= self._quiet_s):
            ready = self._ready
            self.clear()
            self._ready = ready
