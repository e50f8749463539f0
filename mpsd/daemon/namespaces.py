"""Namespaces of MPS protocol 3 on one daemon: their names, limits and directories (pure).

A namespace pins limits for whoever connects through its socket. Fixed shares have theirs in the daemon's config file,
so that a restart restores them; units get one per allocation.
"""

import zlib
from dataclasses import dataclass

SERVER = "s"
"""The one server of each daemon. Short: it is part of socket paths."""

DEFAULT_LIMIT_BYTES = 64 << 20
DEFAULT_THREAD_PERCENT = 1
"""Limits of namespace `default`, which nobody is sent to: named namespaces are not capped by it (measured, r615)."""

MAX_NAME = 23
"""With the default run root a leaf directory has 83 bytes, the most that other agents on MPS v3 take, too."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """`thread_percent` is a ceiling; None: none. The limit is per GPU."""

    name: str
    limit_bytes: int
    thread_percent: int | None = None


def share_name(resource: str, slot: int) -> str:
    """The namespace of a fixed share: at most MAX_NAME of `[a-z0-9_]`, all that MPS takes, and its resource's own."""
    base = resource.rpartition("/")[2].lower()
    readable = "".join(c if c.isascii() and c.isalnum() else "_" for c in base)[:11].strip("_")
    # zlib, as hashlib loads OpenSSL: 4 MiB that mpsd has no other use for
    return f"{readable}_{zlib.crc32(resource.encode()):08x}_{slot}"


def units_name(key: str) -> str:
    """The namespace of an allocation of units."""
    return f"u_{key}"


def is_ours(name: str) -> bool:
    """Whether a namespace of server SERVER may be removed when nothing wants it: all but the daemon's own."""
    return name != "default"
