"""Durable records of allocations: one small file each, replaced atomically, so one Allocate costs one durable write.

The ledger holds only what the kubelet does not know: the plan. What the kubelet holds is asked from the kubelet.
"""

import contextlib
import errno
import os

import msgspec
from msgspec import structs

from cdi.atomic import DurableDirectory
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.sound import flaw
from mpsd.common import records
from mpsd.common.errors import TransientError

SUFFIX = ".json"
PROBE_BYTES = 64 * 1024
"""What has to fit before records are written again: a disk with room for one record only would be full at the next."""
_REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EROFS: "mount it writable",
}
_encoder = msgspec.json.Encoder()


class LedgerError(TransientError):
    """A record can't be written or removed (disk full, read-only ...)."""


class Ledger:
    """The record files under one directory (created 0700). One writer; see the process lock."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._failed_bytes = 0
        try:
            self._files = DurableDirectory(directory, mode=0o700, file_mode=0o600)
        except OSError as error:
            raise LedgerError(f"cannot open the ledger {directory}: {_why(error)}") from error

    def load(self) -> tuple[list[Allocation], list[str]]:
        """All records, oldest first, and a sentence for each file that can't be used; those are set aside, not lost.
        What the kubelet holds without a record is adopted later."""
        allocations, problems = [], []
        with contextlib.suppress(OSError):  # on a disk that can't be written they stay
            self._files.collect_temp_files()
        for name in self._files.names():
            if name.endswith(SUFFIX):
                try:
                    allocations.append(self._read(name))
                except records.RecordError as error:
                    path = os.path.join(self.directory, name)
                    kept = records.RecordError("", records.set_aside(path)).kept
                    problems.append(f"cannot use the allocation record {path}: {error}; {kept}")
        return sorted(allocations, key=lambda allocation: allocation.generation), problems

    def _read(self, name: str) -> Allocation:
        try:
            allocation = records.decode(self._files.read(name) or b"", Allocation, flaw)
        except OSError as error:
            raise records.RecordError(str(error.strerror or error)) from error
        if allocation.key + SUFFIX != name:
            raise records.RecordError(f"it is the record of {allocation.key}")
        if allocation.container is not None and allocation.main_socket is None:  # of a version that did not say so
            allocation = structs.replace(allocation, main_socket=allocation.default_socket)
        if allocation.container is None and not allocation.group:
            # Versions without groups of GPUs named none: a GPU alone is its own.
            return structs.replace(allocation, group=allocation.gpus[0])
        return allocation

    def put(self, allocation: Allocation) -> None:
        """Records an allocation durably. Raises LedgerError; then nothing is recorded."""
        data = _encoder.encode(allocation)
        try:
            self._files.put(allocation.key + SUFFIX, data)
        except OSError as error:
            self._failed_bytes = max(self._failed_bytes, len(data))
            raise LedgerError(f"cannot record the allocation in {self.directory}: {_why(error)}") from error

    def remove(self, key: str) -> None:
        """Forgets an allocation; a missing record is no error. Raises LedgerError."""
        try:
            self._files.remove(key + SUFFIX)
        except OSError as error:
            raise LedgerError(f"cannot remove the record {key} in {self.directory}: {_why(error)}") from error

    def probe(self) -> None:
        """Writes a file that is larger than what could not be written, and removes it, to see whether records can be
        written: an empty one fits on a full disk. Raises LedgerError."""
        try:
            self._files.put("probe", bytes(max(PROBE_BYTES, self._failed_bytes)))
            self._files.remove("probe")
        except OSError as error:
            raise LedgerError(f"cannot write records in {self.directory}: {_why(error)}") from error
        self._failed_bytes = 0

    def close(self) -> None:
        self._files.close()


def _why(error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error.strerror or error}{f': {remedy}' if remedy else ''}"
