"""Tells of shares: granted, allowed to start or not, given back. It compares what is with what it saw last, so nothing
waits for it and a grant is told even where the plugin was killed right after."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from deviceplugin.grants.reader import Reader
from deviceplugin.plan.allocation import Allocation
from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason
from mpsd.events.kinds import EventKind
from mpsd.events.model import Subject
from mpsd.events.teller import Teller

PATIENCE_S = 2.0
"""How long a share that was just granted may wait in silence: files are written within milliseconds, and daemons
restart within a second."""


class Files(Protocol):
    """The permissions to start: see PermissionFiles."""

    written: frozenset[str]
    error: Reason | None


class ShareNews:
    """Of one thread.

    Args:
        held_back: allocations that wait for the processes of a last owner, and why.
    """

    def __init__(
        self,
        reader: Reader,
        files: Files,
        teller: Teller,
        held_back: Callable[[], Mapping[str, Reason]],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader, self._files, self._teller, self._held_back = reader, files, teller, held_back
        self._monotonic = monotonic
        self._known: Mapping[str, Allocation] | None = None
        """None before the first look."""
        self._written: frozenset[str] = frozenset()
        self._since_s: dict[str, float] = {}
        self._said: dict[str, tuple[EventKind, str]] = {}
        """Of allocations that may not start: what was told of that."""

    def look(self) -> None:
        """Tells what changed since the last look."""
        live, written = {a.key: a for a in self._reader.allocations()}, self._files.written
        indices = {gpu.info.uuid: gpu.info.index for gpu in self._reader.node.gpus}
        if self._known is None:
            self._known = {}
            self._teller.settle(EventKind.RELEASED, live.keys())
        elif live.keys() == self._known.keys() and written == self._written and not self._since_s:
            return
        for key, allocation in self._known.items():
            if key not in live:
                self._teller.tell(EventKind.RELEASED, subject_of(allocation, indices))
        for key, allocation in live.items():
            if key not in self._known:
                self._teller.tell(
                    EventKind.GRANTED,
                    subject_of(allocation, indices),
                    detail=_size(allocation),
                    unix_s=allocation.created_unix_s or None,
                )
            if key not in written:
                self._tell_barred(allocation, indices)
            elif key not in self._written:
                self._teller.tell(EventKind.PERMISSION_GIVEN, subject_of(allocation, indices))
        self._since_s = {key: since_s for key, since_s in self._since_s.items() if key in live and key not in written}
        self._said = {key: said for key, said in self._said.items() if key in self._since_s}
        self._known, self._written = live, written

    def _tell_barred(self, allocation: Allocation, indices: Mapping[str, int]) -> None:
        key, now_s = allocation.key, self._monotonic()
        since_s = self._since_s.setdefault(key, now_s)
        had_it = key in self._written or (EventKind.PERMISSION_WITHDRAWN in self._said.get(key, ()))
        if not had_it and now_s - since_s < PATIENCE_S:
            return
        why = self._held_back().get(key) or self._reader.node.waits_for(allocation) or self._files.error
        if why is None:
            return  # its file is being written, or went as it is released
        said = (EventKind.PERMISSION_WITHDRAWN if had_it else EventKind.PERMISSION_DELAYED, why.code)
        if self._said.get(key) != said:
            self._said[key] = said
            self._teller.tell(said[0], subject_of(allocation, indices), why)


def subject_of(allocation: Allocation, indices: Mapping[str, int]) -> Subject:
    """An allocation as what an event is about (pure). Whose a share of the kubelet is comes later."""
    owner = allocation.container
    return Subject(
        key=allocation.key,
        namespace=owner.namespace if owner else "",
        pod=owner.pod if owner else "",
        container=owner.container if owner else "",
        pod_uid=owner.pod_uid if owner else "",
        resource=allocation.resource,
        gpus=allocation.gpus,
        indices=tuple(indices[uuid] for uuid in allocation.gpus if uuid in indices),
    )


def _size(allocation: Allocation) -> str:
    request, limit = format_bytes(allocation.request_bytes), format_bytes(allocation.limit_bytes)
    size = request if request == limit else f"{request} to {limit}"
    return f"{size}, {allocation.mode}{', found without a record' if allocation.adopted else ''}"
