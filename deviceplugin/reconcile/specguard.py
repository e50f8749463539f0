"""Nobody but us says whether a container may start: other definitions of our CDI devices are found and made harmless.

A copy of one of our files (a backup, an editor's leaving, a restored disk) is a second definition of its device. In the
directory that is ours it makes the device unusable, or lets a container start when our file is withdrawn: it is set
aside under a name that runtimes don't read. In another directory it is not ours to move, and which of the two holds is
a matter of the order of directories. So a device that must not start and that somebody else defines is not left to him
but barred: defined twice in our directory, which makes it unusable wherever else it is defined (cdi/registry.py).
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence

from cdi.definitions import Definition, Definitions
from cdi.errors import CdiError, ForeignFileError
from cdi.model import ContainerEdits, Device, DeviceNode, Spec
from cdi.writer import Applied, SpecDirectory
from deviceplugin.reconcile.reasons import FileCode
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason

log = get_logger("plugin")

BARS = ("barred-1", "barred-2")
"""Ids of the two files that define the barred devices."""
NO_SUCH_NODE = "/dev/gpufrac-may-not-start"
"""A device node that no host has: even a runtime that takes one of two definitions can't inject it."""
FRESH_S = 0.5
"""How old a look at the directories may be for one file: hundreds may be withdrawn at once."""


class SpecGuard:
    """Our CDI files as the keeper wants them (`keeper.SpecFiles`), with that care. Calls come one at a time.

    Args:
        directories: that runtimes read, lowest priority first.
        device_of: the device that the file of an id defines.
    """

    def __init__(
        self,
        specs: SpecDirectory,
        directories: Sequence[str],
        device_of: Callable[[str], str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._specs, self._device_of, self._monotonic = specs, device_of, monotonic
        places = with_own(directories, specs.path)
        self._own = places.index(specs.path)
        self._definitions = Definitions(specs.kind, places)
        self._permitted: set[str] = set()
        self._barred: tuple[str, ...] = ()
        self._looked_s = float("-inf")
        self._files: dict[str, tuple[str, ...]] = {}
        """Id -> the devices that its file defines, as seen last."""
        self._stuck: dict[str, Reason] = {}
        """Device -> a copy in our directory that can't be set aside, and why."""
        self._elsewhere: dict[str, list[Definition]] = {}
        """Device -> the files in other directories that define it."""

    @property
    def objections(self) -> tuple[Reason, ...]:
        """What an operator should do about other definitions, each with its file."""
        paths = {found.path for definitions in self._elsewhere.values() for found in definitions}
        said = [
            Reason(
                FileCode.DEFINED_ELSEWHERE,
                f"CDI file {path} defines devices of ours, which only {self._specs.path} may: move it away, shares may "
                "not start because of it",
            )
            for path in sorted(paths)
        ]
        untold = (
            Reason(FileCode.OTHERS_NOT_READ, f"cannot tell whether others define CDI devices of ours: {why}")
            for why in self._definitions.unread
        )
        return (*said, *dict.fromkeys(self._stuck.values()), *untold)

    def put(self, identifier: str, spec: Spec) -> bool:
        """See SpecDirectory.put. Raises ForeignFileError where another definition would hold instead."""
        self._look(FRESH_S)
        self._refuse_overridden(identifier)
        changed = self._specs.put(identifier, spec)
        self._permitted.add(identifier)
        self._bar()
        return changed

    def remove(self, identifier: str) -> bool:
        """See SpecDirectory.remove. The device can't be used any more, whoever else defines it."""
        self._look(FRESH_S)
        self._permitted.discard(identifier)
        self._bar()  # first
        return self._specs.remove(identifier)

    def apply(self, desired: Mapping[str, Spec]) -> Applied:
        """See SpecDirectory.apply. Ids for which another definition would hold are in the errors."""
        self._look()
        errors: dict[str, CdiError] = {}
        for identifier in desired:
            try:
                self._refuse_overridden(identifier)
            except CdiError as error:
                errors[identifier] = error
        self._permitted = desired.keys() - errors.keys()
        try:
            self._bar()  # first
        except CdiError as error:
            errors[self._specs.path] = error
        bars = {identifier: self._bar_spec() for identifier in BARS if self._barred}
        applied = self._specs.apply({**{i: desired[i] for i in self._permitted}, **bars})
        return Applied(applied.written, applied.removed, {**applied.errors, **errors})

    def is_off(self) -> bool:
        """Looks, sets aside what it may, and says whether the files are not as they were applied last."""
        self._look()
        ours = {identifier: (self._device_of(identifier),) for identifier in self._permitted}
        bars = dict.fromkeys(BARS, self._barred) if self._barred else {}
        overridden = any(self._overriding(identifier) for identifier in self._permitted)
        return self._files != {**ours, **bars} or self._to_bar() != self._barred or overridden

    def close(self) -> None:
        self._specs.close()

    def _look(self, fresh_s: float = 0.0) -> None:
        now_s = self._monotonic()
        if now_s - self._looked_s < fresh_s:
            return
        self._looked_s = now_s
        self._files, self._elsewhere = {}, {}
        stuck: dict[str, Reason] = {}
        for found in self._definitions.find():
            name = os.path.basename(found.path)
            identifier = self._specs.identifier_of(name)
            if found.priority != self._own:
                for device in found.devices:
                    self._elsewhere.setdefault(device, []).append(found)
            elif identifier is not None:
                self._files[identifier] = found.devices
            elif why := self._set_aside(name):
                stuck |= dict.fromkeys(found.devices, why)
        self._stuck = stuck

    def _set_aside(self, name: str) -> Reason | None:
        """Why it could not be, None when it was."""
        try:
            aside = self._specs.set_aside(name)
        except CdiError as error:
            return Reason(FileCode.COPY_STAYS, f"{error}: it defines devices of ours and must go, so move it away")
        log.warning(
            "a file that was no file of ours defined CDI devices of ours; it was set aside",
            directory=self._specs.path,
            file=name,
            aside=aside,
        )
        return None

    def _refuse_overridden(self, identifier: str) -> None:
        if path := self._overriding(identifier):
            reason = f"{path} defines CDI device {self._device_of(identifier)}, too, and would hold: move it away"
            raise ForeignFileError("use", f"{self._specs.path}/{self._specs.file_name(identifier)}", reason)

    def _overriding(self, identifier: str) -> str:
        """A file in another directory that would hold instead of ours: one of a later directory, or one of two in the
        same, which make the device unusable."""
        found = self._elsewhere.get(self._device_of(identifier), ())
        places = [definition.priority for definition in found]
        return next((d.path for d in found if d.priority > self._own or places.count(d.priority) > 1), "")

    def _to_bar(self) -> tuple[str, ...]:
        permitted = {self._device_of(identifier) for identifier in self._permitted}
        return tuple(sorted((self._elsewhere.keys() | self._stuck.keys()) - permitted))

    def _bar(self) -> None:
        """Makes the two files what they should be."""
        wanted = self._to_bar()
        if wanted == self._barred:
            return
        before, self._barred = self._barred, wanted
        try:
            for identifier in BARS:
                if wanted:
                    self._specs.put(identifier, self._bar_spec())
                else:
                    self._specs.remove(identifier)
        except CdiError:
            self._barred = before
            raise

    def _bar_spec(self) -> Spec:
        edits = ContainerEdits(device_nodes=(DeviceNode(path=NO_SUCH_NODE),))
        devices = tuple(Device(name=name, container_edits=edits) for name in self._barred)
        return Spec(kind=self._specs.kind, devices=devices)


def with_own(directories: Sequence[str], own: str) -> list[str]:
    """The directories with ours among them, once, under the name it has for us: at its place, or as the last one."""
    normal = [os.path.normpath(directory) for directory in directories]
    places = [own if _same(directory, own) else directory for directory in normal]
    return [*places, own] if own not in places else list(dict.fromkeys(places))


def _same(one: str, other: str) -> bool:
    """Whether both paths lead to one directory: by name, by links, or by mounts."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one is not there, or can't be looked at
        return os.path.realpath(one) == os.path.realpath(other)
