"""Attaches allocations: what is granted becomes mpsd's desired state, and what mpsd confirms a permission to start."""

import time
from collections.abc import Callable
from typing import Protocol

from deviceplugin.grants.broker import Broker, Permissions
from deviceplugin.reconcile.files import GUARD_S, PermissionFiles
from deviceplugin.reconcile.firstlook import FirstLook, Looked
from deviceplugin.reconcile.lastowners import LastOwners
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.localapi.snapshot import Desired

log = get_logger("plugin")

UNKNOWN_S = 5.0
"""After our own start, how long CDI files of an earlier run stand before mpsd's first word."""
VERIFY_S = 30.0
"""How often the CDI directory is compared with what should be there, whatever happened."""


class Mpsd(Protocol):
    """Raises GpufracError."""

    def apply(self, desired: Desired) -> None: ...


class Attacher:
    """The rounds of one thread, which calls `attach` whenever the broker is dirty. `held_back`: allocations whose
    shares processes of the last owner still use, and why.

    Args:
        on_round: called once files are as they should be, as far as they can be.
    """

    def __init__(
        self,
        broker: Broker,
        files: PermissionFiles,
        mpsd: Mpsd,
        first_look: FirstLook,
        last_owners: LastOwners,
        *,
        on_round: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker, self._files, self._mpsd = broker, files, mpsd
        self._first_look, self._last_owners = first_look, last_owners
        self._on_round, self._monotonic = on_round, monotonic
        self._started_s = monotonic()
        self._verified_s = 0.0
        self._pushed: Desired | None = None
        self._push_needed = True
        self._ledger_error: Reason | None = None
        self._ledger_probed = False
        self.held_back: dict[str, Reason] = {}

    def round(self) -> float:
        """One round of the thread. Seconds until the next is due, whatever happens."""
        self.note_ledger()
        wait_s = min(GUARD_S, self.attach() or GUARD_S)
        unsettled = self._push_needed or self._files.error or self.held_back or self._broker.ledger_error
        return min(wait_s, 1.0) if unsettled else wait_s

    def push_again(self) -> None:
        """A (new) mpsd answers: it gets the whole desired state."""
        self._push_needed = True
        self._broker.wake()

    def note_ledger(self) -> None:
        """Looks whether records can be written: at the start, and for as long as they could not be. Every failure is
        told, also one that is over by the time it is looked at."""
        self._tell_ledger()
        if self._ledger_error or not self._ledger_probed:
            self._ledger_probed = True
            self._broker.probe_ledger()
            self._tell_ledger()

    def _tell_ledger(self) -> None:
        error = self._broker.ledger_error
        if error and not self._ledger_error:
            log.error("allocations can't be recorded; nothing new is offered", error=error)
        elif self._ledger_error and not error:
            log.info("allocations can be recorded again")
        self._ledger_error = error

    def attach(self) -> float | None:
        """Files withdrawn first, lists published, desired state pushed, and only then files written: mpsd may take
        long to answer. Seconds until a list changes by time alone."""
        settled = self._broker.node.mpsd_seen or self._monotonic() - self._started_s >= UNKNOWN_S
        looked = self._first_look.looked()  # before the grants: what is adopted from now on may be missing there
        permissions = self._broker.permissions()
        problems = self._files.withdraw_all_but(permissions.permitted.keys()) if settled else []
        deadline_s = self._broker.publish()
        due = not self._verified_s or self._monotonic() - self._verified_s >= VERIFY_S
        settable = self._broker.node.hard.settable
        verify = due or bool(self._files.error) or settable != self._files.settable
        self._files.settable = settable
        self._push(looked, again=verify)
        if settled:
            if self._broker.version != permissions.version:
                permissions = self._broker.permissions()
            verify = verify or self._files.are_off()
            problems += self._write(permissions, verify=verify, looked=looked.all)
            self._files.note(problems)
            self._on_round()
        return deadline_s

    def _write(self, permissions: Permissions, *, verify: bool, looked: bool) -> list[str]:
        """Writes what is missing. To `verify` also puts right what is there: all of it once the world was `looked` at,
        until then only what has a record."""
        permitted = permissions.permitted
        new = self._files.new_in(permitted)
        held_back = self._last_owners.hold_back([permitted[key][0] for key in new])
        grants = {key: permitted[key] for key in (permitted if verify else new) if key not in held_back}
        self.held_back = held_back
        if not verify:
            return self._files.write(grants)
        if not looked:
            return self._files.write(grants, barred={*permissions.barred, *held_back})
        problems = self._files.make_exactly(grants)
        self._verified_s = self._monotonic()
        return problems

    def _push(self, looked: Looked, *, again: bool) -> None:
        desired = self._broker.desired()
        if desired == self._pushed and not self._push_needed and not again:
            return
        self._push_needed = False  # before the call: a new mpsd may come up during it
        try:
            self._mpsd.apply(self._first_look.with_unknown(desired, looked))
        except GpufracError as error:
            self._push_needed = True
            log.debug("the desired state waits for mpsd", error=str(error))
            return
        self._pushed = desired
