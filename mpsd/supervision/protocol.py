"""Keeps which MPS protocol daemons are to speak: chosen per driver version, asked again while it is not sure."""

import time
from collections.abc import Callable
from functools import partial

from mpsd.common.errors import GpufracError
from mpsd.common.lanes import Lane, Post
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason, message_of
from mpsd.daemon.host import DaemonHost, ProtocolChoice
from mpsd.localapi.reasons import DaemonCode

log = get_logger("mpsd")

RETRY_S = 10.0


class ProtocolKeeper:
    """Every method is for the supervisor's thread; the host is asked in the lane.

    Args:
        on_choice: told after each answer, with whether it is another than before.
    """

    def __init__(self, host: DaemonHost, post: Post, on_choice: Callable[[bool], None]) -> None:
        self._host, self._post, self._on_choice = host, post, on_choice
        self.lane = Lane("protocol")
        self.found: ProtocolChoice | None = None
        self.retry_s: float | None = None
        """When to ask again (monotonic), None when nothing waits for that."""
        self._of = ""
        """The driver version that the choice was made for, or is being made."""

    @property
    def choice(self) -> ProtocolChoice:
        """Once there is one: nothing is planned before."""
        assert self.found is not None
        return self.found

    @property
    def settled(self) -> ProtocolChoice | None:
        """The choice, where it will not be another in a moment."""
        return self.found if self.retry_s is None else None

    def observe(self, driver_version: str | None) -> None:
        """The version of the driver now; None: not known."""
        if driver_version is not None and driver_version != self._of:
            self._of = driver_version
            self._ask()

    def pass_deadline(self, now_s: float) -> None:
        if self.retry_s is not None and now_s >= self.retry_s:
            self._ask()

    def _ask(self) -> None:
        self.retry_s = None
        self.lane.submit(partial(self._choose, self._of))

    def _choose(self, driver_version: str) -> None:
        try:
            choice = self._host.protocol(driver_version)
        except Exception as error:
            if not isinstance(error, GpufracError):
                log.exception("choosing the MPS protocol failed in an unforeseen way")
            unknown = Reason(DaemonCode.PROTOCOL_NOT_KNOWN, str(error))
            choice = ProtocolChoice(3, objection=unknown, unsure=unknown)
        self._post(partial(self._on_answer, driver_version, choice))

    def _on_answer(self, driver_version: str, choice: ProtocolChoice) -> None:
        if driver_version != self._of:
            return
        before, self.found = self.found, choice
        self.retry_s = time.monotonic() + RETRY_S if choice.unsure else None
        if choice != before:
            reason = choice.unsure or choice.objection
            said = log.warning if reason else log.info
            said("MPS protocol", protocol=choice.protocol, driver=driver_version, reason=message_of(reason))
        self._on_choice(choice != before)
