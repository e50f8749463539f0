"""Where a simulated node has its daemons started: right here, with a directory for what a real one mounts."""

import contextlib
import os
from collections.abc import Mapping, Sequence

from mpsd.common.errors import TransientError
from mpsd.daemon.control import as_it_is
from mpsd.daemon.paths import DaemonDirs


class SimulatedPlace:
    """`mpsd.daemon.host.Place`. A plain directory stands for the daemon's shared memory, so that containers of the
    node mount what they would mount."""

    def __init__(self, *, shared_memory: bool = False) -> None:
        self._shared_memory = shared_memory

    def launch(
        self, name: str, dirs: DaemonDirs, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        """See Place."""
        if self._shared_memory:
            try:
                os.makedirs(dirs.shared_memory, exist_ok=True)
            except OSError as error:
                raise TransientError(f"cannot make {dirs.shared_memory}: {error.strerror}") from error
        return arguments, environment

    def explain(self, returncode: int, output: str) -> str:
        """See Place: only the daemon's own words tell."""
        return ""

    reach = staticmethod(as_it_is)

    def leave(self, name: str) -> None:
        """See Place: nothing lies around it."""

    def clear(self) -> tuple[str, ...]:
        """What of it is left on the host: nothing."""
        return ()

    def remove(self, dirs: DaemonDirs) -> None:
        """See Place."""
        with contextlib.suppress(OSError):
            os.rmdir(dirs.shared_memory)
