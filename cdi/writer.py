"""The spec files we own in a directory that others write to as well.

One file per id: `<vendor>-<class>_<id>.json`, the usual name of a transient spec. Ours is a file of exactly that name
whose content is of our kind. Files of others are never replaced and never removed.
"""

import os
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import msgspec

from cdi import names
from cdi.atomic import MAX_NAME_BYTES, DurableDirectory
from cdi.encode import encode_spec
from cdi.errors import CdiError, ForeignFileError, InvalidNameError, InvalidSpecError, SpecFileError
from cdi.model import Spec

ASIDE = ".set-aside"
"""Ends the name of a file that runtimes are to take no more."""
_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?")


class Applied(msgspec.Struct, frozen=True):
    """What `SpecDirectory.apply` did, as ids in order. `errors`: id (or directory path) -> what failed; retry those."""

    written: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    errors: Mapping[str, CdiError] = msgspec.field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether any file is another now."""
        return bool(self.written or self.removed)


class _Content(msgspec.Struct):
    kind: str


class SpecDirectory:
    """Our spec files of one kind, mode 0644, in a directory that is made (0755) when missing.

    Every change is on disk when the call returns. Operations raise SpecFileError (retry later), ForeignFileError
    (someone else's file has our name), InvalidNameError for an id that can't be part of a file name, and
    InvalidSpecError for a spec that runtimes would not take or would misread; nothing is half-written in any case.
    One process owns the files of a kind.
    """

    def __init__(self, path: str, vendor: str, class_name: str) -> None:
        self.kind = names.format_kind(vendor, class_name)
        self._stem = f"{vendor}-{class_name}_"
        try:
            self._files = DurableDirectory(path)
        except OSError as exc:
            raise SpecFileError("open the directory of", path, _reason(exc)) from exc

    @property
    def path(self) -> str:
        """The directory, as configured."""
        return self._files.path

    def file_name(self, identifier: str) -> str:
        """The name of the file for an id. Raises InvalidNameError."""
        if not _ID.fullmatch(identifier):
            rule = "expected 1 to 64 letters, digits, '_', '-', starting and ending with a letter or digit"
            raise InvalidNameError("id of a CDI spec file", identifier, rule)
        return f"{self._stem}{identifier}.json"

    def put(self, identifier: str, spec: Spec) -> bool:
        """Writes the file of an id. False when it already had these bytes and was left alone."""
        changed = self._put(identifier, spec)
        self._sync()
        return changed

    def remove(self, identifier: str) -> bool:
        """Removes the file of an id. False when it was not there."""
        removed = self._remove(identifier)
        self._sync()
        return removed

    def ids(self) -> set[str]:
        """Ids of the files that are ours."""
        return {identifier for identifier in self._named_ids() if self._owner(identifier) == "ours"}

    def apply(self, desired: Mapping[str, Spec]) -> Applied:
        """Makes our files exactly `desired`, with one flush of the directory; one failure does not stop the others.

        Removals come first: withdrawing a file matters more than adding one. Raises SpecFileError when the directory
        can't be listed.
        """
        written: list[str] = []
        removed: list[str] = []
        errors: dict[str, CdiError] = {}
        for identifier in sorted(self.ids() - desired.keys()):
            try:
                if self._remove(identifier):
                    removed.append(identifier)
            except CdiError as exc:
                errors[identifier] = exc
        for identifier, spec in sorted(desired.items()):
            try:
                if self._put(identifier, spec):
                    written.append(identifier)
            except CdiError as exc:
                errors[identifier] = exc
        try:
            self._sync()
        except SpecFileError as exc:
            errors[self.path] = exc
        return Applied(tuple(written), tuple(removed), errors)

    def identifier_of(self, name: str) -> str | None:
        """The id whose file has that name, None for a name that is none of ours."""
        if not (name.startswith(self._stem) and name.endswith(".json")):
            return None
        identifier = name.removeprefix(self._stem).removesuffix(".json")
        return identifier if _ID.fullmatch(identifier) else None

    def set_aside(self, name: str) -> str:
        """Renames an entry of any name so that no reader of CDI specs takes it; the new name."""
        aside = f"{os.fsencode(name)[: MAX_NAME_BYTES - len(ASIDE)].decode(errors='ignore')}{ASIDE}"
        try:
            self._files.rename(name, aside)
        except OSError as exc:
            raise SpecFileError("set aside", f"{self.path}/{name}", _reason(exc)) from exc
        return aside

    def collect_temp_files(self) -> list[str]:
        """Removes temporary files that a killed process of ours left; gives their names. Call it once at start."""
        try:
            return self._files.collect_temp_files(self._stem)
        except OSError as exc:
            raise SpecFileError("collect temporary files of", self.path, _reason(exc)) from exc

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, identifier: str, spec: Spec) -> bool:
        name = self.file_name(identifier)
        if spec.kind != self.kind:
            raise InvalidSpecError(spec.kind, [f"kind: this directory holds {self.kind}"])
        data = encode_spec(spec)
        if self._files.holds(name, data):
            return False
        self._refuse_foreign("replace", identifier)
        try:
            self._files.put(name, data, sync=False)
        except OSError as exc:
            raise SpecFileError("write", f"{self.path}/{name}", _reason(exc)) from exc
        return True

    def _remove(self, identifier: str) -> bool:
        name = self.file_name(identifier)
        self._refuse_foreign("remove", identifier)
        try:
            return self._files.remove(name, sync=False)
        except OSError as exc:
            raise SpecFileError("remove", f"{self.path}/{name}", _reason(exc)) from exc

    def _sync(self) -> None:
        try:
            self._files.sync()
        except OSError as exc:
            raise SpecFileError("flush the directory of", self.path, _reason(exc)) from exc

    def _named_ids(self) -> list[str]:
        try:
            found = self._files.names()
        except OSError as exc:
            raise SpecFileError("list the directory of", self.path, _reason(exc)) from exc
        return [identifier for name in found if (identifier := self.identifier_of(name)) is not None]

    def _owner(self, identifier: str) -> str:
        """`ours`, `foreign`, `damaged` (no spec at all in it: replaced by a put, else left for people) or `nobody`."""
        try:
            data = self._files.read(self.file_name(identifier))
        except OSError:
            return "foreign"
        if data is None:
            return "nobody"
        try:
            return "ours" if msgspec.json.decode(data, type=_Content).kind == self.kind else "foreign"
        except msgspec.DecodeError:
            return "damaged"

    def _refuse_foreign(self, action: str, identifier: str) -> None:
        owner = self._owner(identifier)
        if owner == "foreign" or (owner == "damaged" and action == "remove"):
            reason = f"it is not a spec of kind {self.kind}; move it away"
            raise ForeignFileError(action, f"{self.path}/{self.file_name(identifier)}", reason)


def _reason(exc: OSError) -> str:
    return exc.strerror or str(exc)
