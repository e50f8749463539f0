"""What mpsd must remember over its own restart, on disk: daemons, compute modes found, the desired state last applied.

Every change is one atomic, durable replace, made before the effect it allows. A record of an earlier boot is void: its
daemons are gone and compute modes are back at the driver's default.
"""

import threading
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from mpsd.common import records
from mpsd.common.errors import TransientError
from mpsd.common.log import get_logger
from mpsd.common.ranges import Count, Line, MpsProtocol, Name
from mpsd.common.reason import Reason
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.gpu.model import ComputeMode
from mpsd.localapi.reasons import WarningCode
from mpsd.localapi.snapshot import Desired

log = get_logger("mpsd")
V = TypeVar("V")


VERSION = 1


class ChosenProtocol(msgspec.Struct, frozen=True, kw_only=True):
    """The MPS protocol that daemons were last started with, and the driver it was chosen for."""

    driver_version: Line
    protocol: MpsProtocol


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The file. Keys are GPU UUIDs; `compute_modes` holds the mode found before ours was set, `numbering` the
    index that means each GPU in the config."""

    version: int = VERSION
    boot_id: str
    daemons: dict[Name, DaemonIdentity] = {}
    compute_modes: dict[Name, ComputeMode] = {}
    desired: Desired = Desired()
    protocol: ChosenProtocol | None = None
    numbering: dict[Name, Count] = {}


class StateFile:
    """Loads once, then each method writes through. Safe from several threads.

    Args:
        copy: a second file, on another file system, that counts for this boot where the first one is lost: what it says
            of compute modes is nowhere else, and a GPU would stay in ours in silence. Empty: none.
    """

    def __init__(self, path: str, boot_id: str, copy: str = "") -> None:
        self._path, self._copy = path, copy
        self._lock = threading.Lock()
        found = _load(path) or (_load(copy) if copy else None)
        self.begins_anew = found is None
        """Whether nothing of an earlier mpsd was found."""
        self._saved = Saved(boot_id=boot_id) if found is None else _of_boot(found, boot_id)
        self.problem: Reason | None = None
        """Why the last change could not be written, None when it was."""

    @property
    def saved(self) -> Saved:
        return self._saved

    def record_daemon(self, uuid: str, identity: DaemonIdentity | None) -> None:
        """Remembers a running daemon, or forgets it. Raises TransientError."""
        with self._lock:
            self._write(daemons=_with(self._saved.daemons, uuid, identity))

    def record_compute_mode(self, uuid: str, mode: ComputeMode | None) -> None:
        """Remembers the mode found before ours, or forgets it once restored. Raises TransientError."""
        with self._lock:
            self._write(compute_modes=_with(self._saved.compute_modes, uuid, mode))

    def record_desired(self, desired: Desired) -> None:
        """Raises TransientError."""
        with self._lock:
            self._write(desired=desired)

    def record_numbering(self, numbering: Mapping[str, int]) -> None:
        """Remembers which GPU each index means over reboots, too. Raises TransientError."""
        with self._lock:
            self._write(numbering=dict(numbering))

    def record_protocol(self, chosen: ChosenProtocol) -> None:
        """Remembers it over reboots, too. Raises TransientError."""
        with self._lock:
            self._write(protocol=chosen)

    def _write(self, **changes: object) -> None:
        saved = msgspec.structs.replace(self._saved, **changes)
        if saved == self._saved:
            return
        try:
            records.write(self._path, saved)
        except OSError as error:
            text = f"cannot write {self._path}: {error.strerror}"
            self.problem = Reason(WarningCode.STATE_NOT_SAVED, text)
            raise TransientError(text) from error
        self._saved, self.problem = saved, None
        if self._copy:
            try:
                records.write(self._copy, saved)
            except OSError as error:
                log.warning("what mpsd remembers has no copy", path=self._copy, error=str(error.strerror))


def _with(mapping: dict[str, V], key: str, value: V | None) -> dict[str, V]:
    rest = {k: v for k, v in mapping.items() if k != key}
    return rest if value is None else {**rest, key: value}


def _load(path: str) -> Saved | None:
    try:
        return records.take(path, Saved, _flaw)
    except records.RecordError as error:  # the compute modes found may still be read by a person
        reason = f"{error}; {error.kept}"
        log.warning("cannot use what an earlier mpsd recorded; starting without", path=path, error=reason)
        return None


def _of_boot(saved: Saved, boot_id: str) -> Saved:
    if saved.boot_id == boot_id:
        return saved
    return Saved(boot_id=boot_id, desired=saved.desired, protocol=saved.protocol, numbering=saved.numbering)


def _flaw(saved: Saved) -> str:
    if saved.version != VERSION:
        return f"it has version {saved.version}, and this mpsd knows version {VERSION}"
    if ComputeMode.UNKNOWN in saved.compute_modes.values():
        return "it has a compute mode that no GPU can be in"
    if len(set(saved.numbering.values())) < len(saved.numbering):
        return "it has two GPUs of one index"
    return ""
