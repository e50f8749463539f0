"""The CDI files of allocations, each the permission of a container to start: written, withdrawn, put right."""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from cdi.errors import CdiError
from cdi.model import Spec
from cdi.writer import Applied
from deviceplugin.grants.reader import Reader
from deviceplugin.plan import render
from deviceplugin.plan.start import Grant
from deviceplugin.reconcile.reasons import FileCode
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason

log = get_logger("plugin")

GUARD_S = 5.0
"""How often it is looked whether somebody else changed something in the CDI directories, unless that was noticed."""


class SpecFiles(Protocol):
    """The CDI directory, our files only. `is_off`: whether somebody else changed something; `objections`: what of it
    is to be told."""

    def put(self, identifier: str, spec: Spec) -> bool: ...
    def remove(self, identifier: str) -> bool: ...
    def apply(self, desired: Mapping[str, Spec]) -> Applied: ...
    def is_off(self) -> bool: ...
    @property
    def objections(self) -> tuple[Reason, ...]: ...


class PermissionFiles:
    """Knows what is written. Thread-safe; each method holds its lock for its file operations.

    `error` says why files do not match what is permitted, `objections` what others did to them, each for status.
    """

    def __init__(self, reader: Reader, specs: SpecFiles, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._specs, self._monotonic = reader, specs, monotonic
        self._changed = threading.Condition()
        self._closed = False
        self._written: dict[str, Grant] = {}
        """Keys of the files, and what they say."""
        self._guarded_s = float("-inf")
        self.settable = False
        """Whether files tell the toolkit's hook a limit at every level."""
        self.written: frozenset[str] = frozenset()
        self.error: Reason | None = None
        self.objections: tuple[Reason, ...] = ()

    def wait(self, key: str, timeout_s: float) -> Grant | None:
        """Waits for the file of a live allocation as it is planned now; what it says, None after the time."""

        def written() -> Grant | None:
            grant = self._written.get(key)
            return grant if grant is not None and grant == self._reader.grant(key) else None

        with self._changed:
            self._changed.wait_for(lambda: written() is not None or self._closed, timeout_s)
            return written()

    def close(self) -> None:
        """Lets go who waits. Files stay: containers may start while we restart."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def new_in(self, permitted: Mapping[str, Grant]) -> list[str]:
        """Keys of what is permitted and not written, or otherwise."""
        with self._changed:
            return [key for key, grant in permitted.items() if self._written.get(key) != grant]

    def withdraw(self, key: str) -> str:
        """Removes one file; why it is still there, or nothing."""
        with self._changed:
            return self._withdraw(key)

    def withdraw_all_but(self, permitted: Collection[str]) -> list[str]:
        """Removes what we wrote and is no longer permitted. What went wrong."""
        with self._changed:
            problems = [self._withdraw(key) for key in sorted(self._written.keys() - permitted)]
            self.written = frozenset(self._written)
        return problems

    def write(self, grants: Mapping[str, Grant], barred: Collection[str] = ()) -> list[str]:
        """Writes these files, and removes those of `barred` keys, whoever wrote them. What went wrong."""
        with self._changed:
            problems = [self._withdraw(key) for key in sorted(barred)]
            problems += [self._put(key, grant) for key, grant in self._live(grants).items()]
            self._note()
        return problems

    def make_exactly(self, grants: Mapping[str, Grant]) -> list[str]:
        """Makes the directory exactly what is permitted, whatever was in it. What went wrong."""
        with self._changed:
            wanted = self._live(grants)
            try:
                applied = self._specs.apply({key: self._spec(grant) for key, grant in wanted.items()})
            except CdiError as error:
                return [str(error)]
            self._written = {key: grant for key, grant in wanted.items() if key not in applied.errors}
            self._note()
        return [str(error) for error in applied.errors.values()]

    def guard(self) -> None:
        """Somebody else changed something: `are_off` looks at once."""
        # No lock, or hints would wait for files. Set at any moment it is not lost: `are_off` notes its own look before
        # it looks, so what it overwrites was there to be seen.
        self._guarded_s = float("-inf")

    def are_off(self) -> bool:
        """Whether somebody else changed something, looked at every GUARD_S."""
        now_s = self._monotonic()
        if now_s - self._guarded_s < GUARD_S:
            return False
        self._guarded_s = now_s
        with self._changed:
            return self._specs.is_off()

    def note(self, problems: list[str]) -> None:
        """Says once what went wrong in a round, and what others did."""
        text = "; ".join([problem for problem in problems if problem][:3])
        error = Reason(FileCode.NOT_AS_PERMITTED, text) if text else None
        if error is not None and error != self.error:
            log.error("CDI files do not match what is permitted", error=text)
        self.error = error
        objections = self._specs.objections
        for objection in objections:
            if objection not in self.objections:
                log.error("CDI devices of ours are not ours alone", code=objection.code, reason=objection.message)
        self.objections = objections

    def _live(self, grants: Mapping[str, Grant]) -> dict[str, Grant]:
        """Without what was released since, which must not come back."""
        return {key: grant for key, grant in grants.items() if self._reader.is_live(key)}

    def _note(self) -> None:
        self.written = frozenset(self._written)
        self._changed.notify_all()

    def _spec(self, grant: Grant) -> Spec:
        allocation, way = grant
        writable = self._reader.node.config.mps.writable_mount
        return render.spec(allocation, *way, writable=writable, settable=self.settable)

    def _put(self, key: str, grant: Grant) -> str:
        try:
            self._specs.put(key, self._spec(grant))
        except CdiError as error:
            return str(error)
        self._written[key] = grant
        return ""

    def _withdraw(self, key: str) -> str:
        try:
            self._specs.remove(key)
        except CdiError as error:
            return str(error)
        self._written.pop(key, None)
        return ""
