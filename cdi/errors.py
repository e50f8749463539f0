"""The error family of `cdi`. The class says whose fault it is and what a caller can do; texts open with "cannot"."""

from collections.abc import Mapping, Sequence

_MAX_VALUE = 80


def shorten(value: str) -> str:
    """A value from outside, quoted and cut to a length that keeps messages readable."""
    return repr(value if len(value) <= _MAX_VALUE else value[: _MAX_VALUE - 3] + "...")


class CdiError(Exception):
    """Base of every error this package raises on purpose, `OSError` of `cdi.atomic` aside."""


class InvalidNameError(CdiError):
    """A vendor, class, device, qualified name, id or file name breaks its grammar: fix the caller or its input."""

    def __init__(self, what: str, value: str, rule: str) -> None:
        super().__init__(f"cannot use {shorten(value)} as {what}: {rule}")
        self.what = what
        self.value = value
        self.rule = rule


class InvalidSpecError(CdiError):
    """A spec we were asked to write breaks a rule: nothing was written. `faults` name the field and the rule."""

    def __init__(self, kind: str, faults: Sequence[str]) -> None:
        super().__init__(f"cannot write CDI spec of kind {shorten(kind)}: {'; '.join(faults)}")
        self.kind = kind
        self.faults = tuple(faults)


class MalformedSpecError(CdiError):
    """A spec file that someone wrote is not one a runtime would accept: report it, go on with the others."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__(f"cannot read CDI spec: {'; '.join(faults)}")
        self.faults = tuple(faults)


class SpecFileError(CdiError):
    """Reading, writing or removing one spec file failed: retry later. The OSError is the cause."""

    def __init__(self, action: str, path: str, reason: str) -> None:
        super().__init__(f"cannot {action} CDI spec {path}: {reason}")
        self.action = action
        self.path = path
        self.reason = reason


class ForeignFileError(SpecFileError):
    """A file of someone else stands under a name of ours: it is left alone. Remove it by hand."""


class UnresolvableError(CdiError):
    """Devices that no usable spec file defines. The text is the one runtimes give; `reasons` says why, by name."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(f"unresolvable CDI devices {', '.join(reasons)}")
        self.names = tuple(reasons)
        self.reasons = dict(reasons)


class DeviceNodeError(CdiError):
    """A device node has no numbers in the spec and none on the host: the runtime would fail the container."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot inject device node {shorten(path)}: {reason}")
        self.path = path
        self.reason = reason
