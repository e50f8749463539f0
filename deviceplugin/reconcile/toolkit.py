"""Which container toolkit is on this host? Its nvidia runtime injects the hook that sets memory limits from 1.20.1 on.

In a pod its program is not to be seen, as a rule; then a CDI spec that carries the hook tells the same.
"""

import os
import re
import shutil
import subprocess

SINCE = (1, 20, 1)
"""From which version on every way to a GPU carries the hook, the nvidia runtime's own injection included."""
PLACES = ("/usr/local/nvidia/toolkit/nvidia-ctk",)
"""Beside PATH: where the GPU operator puts it."""
TIMEOUT_S = 2.0
_VERSION = re.compile(r"\bversion v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})")


class Toolkit:
    """Remembers what a program said until it is replaced. For one thread at a time."""

    def __init__(self, program: str = "nvidia-ctk") -> None:
        self._program = program
        self._known: tuple[tuple[str, int, int], tuple[int, ...] | None] | None = None

    def hooks(self) -> bool | None:
        """Whether its nvidia runtime injects the hook; None where that can't be told."""
        path = next(filter(None, map(shutil.which, (self._program, *PLACES))), None)
        if path is None:
            return None
        try:
            found = os.stat(path)
        except OSError:
            return None
        identity = (path, found.st_ino, found.st_mtime_ns)
        if self._known is None or self._known[0] != identity:
            self._known = identity, _version_of(path)
        version = self._known[1]
        return None if version is None else version >= SINCE


def _version_of(path: str) -> tuple[int, ...] | None:
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(said)
    return tuple(int(part) for part in match.groups()) if match else None
