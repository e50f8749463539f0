"""CDI names: vendor, class, kind `vendor/class`, device, and the qualified name `vendor/class=device` (pure).

Grammar as the CDI library 1.1.0 checks it (verified): vendor and class start with a letter, go on with letters, digits,
`_`, `-`, `.`, and end with a letter or digit; a device starts and ends with a letter or digit and may also hold `:`. A
vendor or class of one character crashes readers (verified with podman 4.3.1; the library's code is the same since),
so here it is no name at all.
"""

import re
from typing import NamedTuple

from cdi.errors import InvalidNameError

_QUALIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]")
_DEVICE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_QUALIFIER_RULE = (
    "it needs a letter, then letters, digits, '_', '-', '.', and a letter or digit at the end; "
    "one character alone crashes container runtimes"
)
_DEVICE_RULE = "it must start and end with a letter or digit and hold only letters, digits, '_', '-', '.', ':'"


class QualifiedName(NamedTuple):
    """A device name in full. `str()` gives `vendor/class=device`."""

    vendor: str
    class_name: str
    device: str

    @property
    def kind(self) -> str:
        """`vendor/class`."""
        return f"{self.vendor}/{self.class_name}"

    def __str__(self) -> str:
        return f"{self.kind}={self.device}"


def check_vendor(vendor: str) -> str:
    """The vendor itself. Raises InvalidNameError."""
    if not _QUALIFIER.fullmatch(vendor):
        raise InvalidNameError("CDI vendor", vendor, _QUALIFIER_RULE)
    return vendor


def check_class(class_name: str) -> str:
    """The class itself. Raises InvalidNameError."""
    if not _QUALIFIER.fullmatch(class_name):
        raise InvalidNameError("CDI class", class_name, _QUALIFIER_RULE)
    return class_name


def check_device(device: str) -> str:
    """The device name itself. Raises InvalidNameError."""
    if not _DEVICE.fullmatch(device):
        raise InvalidNameError("CDI device name", device, _DEVICE_RULE)
    return device


def parse_kind(kind: str) -> tuple[str, str]:
    """Vendor and class of a kind. Raises InvalidNameError."""
    vendor, separator, class_name = kind.partition("/")
    if not separator:
        raise InvalidNameError("CDI kind", kind, "expected vendor/class")
    return check_vendor(vendor), check_class(class_name)


def format_kind(vendor: str, class_name: str) -> str:
    """`vendor/class`. Raises InvalidNameError."""
    return f"{check_vendor(vendor)}/{check_class(class_name)}"


def parse_qualified(text: str) -> QualifiedName:
    """The parts of `vendor/class=device`. Raises InvalidNameError."""
    kind, separator, device = text.partition("=")
    if not separator or "/" not in kind:
        raise InvalidNameError("CDI device", text, "expected vendor/class=device")
    vendor, class_name = parse_kind(kind)
    return QualifiedName(vendor, class_name, check_device(device))


def format_qualified(vendor: str, class_name: str, device: str) -> str:
    """`vendor/class=device`. Raises InvalidNameError."""
    return str(QualifiedName(check_vendor(vendor), check_class(class_name), check_device(device)))


def is_qualified(text: str) -> bool:
    """Whether `text` is a well-formed qualified name."""
    try:
        parse_qualified(text)
    except InvalidNameError:
        return False
    return True
