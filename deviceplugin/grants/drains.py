"""GPUs that an operator drained: a small durable file, so that a drain outlives restarts, reboots and reloads.

A file that can't be read drains nothing: the other way round one bad file would close the whole node, and which GPU was
meant is lost either way. It is set aside, and status says so until the next start of the plugin.
"""

import time
from collections.abc import Mapping, Sequence

import msgspec

from mpsd.common import records
from mpsd.common.errors import ConfigError, GpufracError, TransientError
from mpsd.common.ranges import Line, Name, UnixSeconds
from mpsd.gpu.model import GpuInfo

VERSION = 1
MAX_REASON = 200


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """One drained GPU, by UUID."""

    gpu: Name
    reason: Line = ""
    at_unix_s: UnixSeconds

    @property
    def text(self) -> str:
        """What is said wherever the GPU is refused."""
        at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(self.at_unix_s))
        return f"drained by an operator at {at}" + (f": {self.reason}" if self.reason else "")


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    drained: tuple[Drain, ...]


class Drains:
    """The file at `path`. One owner, which takes its own lock."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.by_gpu: Mapping[str, Drain] = {}
        self.problem = ""
        """Why the file was not usable, empty when it was."""
        try:
            found = records.take(path, _File, _flaw)
        except records.RecordError as error:
            self.problem = (
                f"cannot read which GPUs are drained from {path}: {error}; none counts as drained: drain them again "
                f"(`gpufrac drain`); {error.kept}"
            )
            return
        self.by_gpu = {drain.gpu: drain for drain in found.drained} if found is not None else {}

    def drain(self, gpu: str, reason: str, known: Sequence[GpuInfo], now_unix_s: float) -> Drain:
        """Drains one of the known GPUs. Again with the same reason, nothing changes. A drained member drains its group.

        Raises:
            GpufracError: no such GPU is known, or the drain can't be recorded: then nothing changed.
            ConfigError: the reason is no short plain text.
        """
        reason = checked_reason(reason)
        if gpu not in {info.uuid for info in known}:
            names = ", ".join(f"{info.uuid} (GPU {info.index})" for info in known) or "none"
            raise GpufracError(f"cannot drain GPU {gpu[:80]!r}: it is not known: known are {names}")
        before = self.by_gpu.get(gpu)
        if before is not None and before.reason == reason:
            return before
        drain = Drain(gpu=gpu, reason=reason, at_unix_s=round(now_unix_s, 3))
        self.put(drain)
        return drain

    def undrain(self, gpu: str, known: Sequence[GpuInfo]) -> None:
        """Ends a drain. One that is over, or of a GPU that is gone, is no error.

        Raises:
            GpufracError: no such GPU is known or drained, or it can't be recorded: then the drain goes on.
        """
        names = {info.uuid for info in known} | self.by_gpu.keys()
        if gpu not in names:
            raise GpufracError(
                f"cannot undrain GPU {gpu[:80]!r}: it is not known: known are {', '.join(sorted(names)) or 'none'}"
            )
        self.remove(gpu)

    def put(self, drain: Drain) -> None:
        """Records a drain durably. Raises TransientError; then nothing changed."""
        self._store({**self.by_gpu, drain.gpu: drain})

    def remove(self, gpu: str) -> None:
        """Ends a drain durably; one that is not there is no error. Raises TransientError; then nothing changed."""
        if gpu in self.by_gpu:
            self._store({uuid: drain for uuid, drain in self.by_gpu.items() if uuid != gpu})

    def _store(self, by_gpu: Mapping[str, Drain]) -> None:
        try:
            records.write(self._path, _File(version=VERSION, drained=tuple(by_gpu.values())))
        except OSError as error:
            why = error.strerror or error
            raise TransientError(f"cannot record which GPUs are drained in {self._path}: {why}") from error
        self.by_gpu = by_gpu


def _flaw(found: _File) -> str:
    if found.version != VERSION:
        return f"it has version {found.version}, and this plugin knows version {VERSION}"
    return ""


def checked_reason(text: str) -> str:
    """The operator's reason on one line. Raises ConfigError for one that is no short plain text."""
    reason = text.strip()
    if len(reason) > MAX_REASON or not reason.isprintable():
        raise ConfigError(f"cannot take this reason: use at most {MAX_REASON} printable characters on one line")
    return reason
