"""Keeps an MPS server on the GPUs of one daemon of protocol 2, before and after anybody uses it.

EXCLUSIVE_PROCESS closes a GPU only while a server has its context there. Without one, whoever skips MPS and comes first
gets the whole GPU and keeps everybody else out: before the first client, and after a server crashed or was told to
quit. So a server is started once the GPUs are in that mode, and no container starts before it is seen.
"""

import time
from functools import partial

from mpsd.common.errors import GpufracError
from mpsd.common.lanes import Lane, Post
from mpsd.common.log import get_logger
from mpsd.common.pacing import pause_s, whole
from mpsd.common.reason import Reason
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.host import DaemonHost
from mpsd.daemon.plan import DaemonSpec
from mpsd.localapi.reasons import ServerHoldCode

log = get_logger("mpsd")

RETRY_FIRST_S, RETRY_LAST_S = 0.1, 5.0
"""Pauses after failed tries: a server takes from a tenth of a second to many seconds to start."""

STABLE_S = 30.0
"""A server that was held for so long did not end at once."""


class ServerHold:
    """Of one daemon. Every method is for the supervisor's thread; the daemon is asked in its lane."""

    def __init__(self, lane: Lane, host: DaemonHost, post: Post) -> None:
        self._lane, self._host, self._post = lane, host, post
        self._wanted_on: DaemonIdentity | None = None
        self._held = False
        self._busy = False
        self._doubted = False
        """Whether a look that is under way may be older than what made us doubt."""
        self._failed = self._short_lived = 0
        self._held_s = 0.0
        self._retry_s: float | None = None
        self._error: str | None = None

    @property
    def objection(self) -> Reason | None:
        """Why nobody may rely on the GPUs being closed to those who skip MPS; None when they are, or need not be."""
        if self._wanted_on is None or self._held:
            return None
        text = f"no MPS server holds its GPU yet{f': {self._error}' if self._error is not None else ''}"
        return Reason(ServerHoldCode.NOT_HELD, text)

    @property
    def retry_s(self) -> float | None:
        """When to look again (monotonic), None when nothing waits for that."""
        return self._retry_s

    def doubt(self) -> None:
        """A server ended, or may have: it is looked at again. Nothing is relied on before."""
        self._doubted = True
        if not self._held:
            return  # of one that did not come up: the pause goes on
        self._held = False
        now_s = time.monotonic()
        self._short_lived = self._short_lived + 1 if now_s - self._held_s < STABLE_S else 0
        # The first is followed at once; servers that die one after the other are no loop of ours.
        self._retry_s = now_s + _pause_s(self._short_lived - 2) if self._short_lived > 1 else None

    def check(self) -> None:
        """Time to look again. What was seen last stays in force until the answer."""
        self._doubted = True

    def reconcile(self, spec: DaemonSpec, on: DaemonIdentity | None) -> None:
        """Has a server held on this daemon; None: none is needed, or none can be had now."""
        if on != self._wanted_on:
            self._wanted_on, self._held, self._doubted = on, False, False
            self._failed, self._retry_s, self._error = 0, None, None
        if on is None or self._busy or (self._held and not self._doubted):
            return
        if self._retry_s is not None and time.monotonic() < self._retry_s:
            return
        self._busy, self._doubted, self._retry_s = True, False, None
        self._lane.submit(partial(self._hold, spec, on))

    def _hold(self, spec: DaemonSpec, on: DaemonIdentity) -> None:
        error = None
        try:
            self._host.hold_server(spec)
        except Exception as failure:
            if not isinstance(failure, GpufracError):
                log.exception("holding an MPS server failed in an unforeseen way", daemon=spec.name)
            error = str(failure) or "it failed"
        self._post(partial(self._on_result, spec, on, error))

    def _on_result(self, spec: DaemonSpec, on: DaemonIdentity, error: str | None) -> None:
        self._busy = False
        if on != self._wanted_on:
            return
        held = error is None and not self._doubted
        if held and not self._held:
            self._held_s = time.monotonic()
            log.info("an MPS server holds the GPU", daemon=spec.name)
        if error is not None and error != self._error:
            log.warning("no MPS server holds the GPU", daemon=spec.name, reason=error)
        self._held, self._error = held, error
        if error is not None:
            self._retry_s = time.monotonic() + _pause_s(self._failed)
            self._failed += 1
        elif held:
            self._failed = 0


def _pause_s(failed: int) -> float:
    return pause_s(failed, RETRY_FIRST_S, RETRY_LAST_S, whole)
