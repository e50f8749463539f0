"""Talks to a control daemon: one command, one front-end process, one deadline.

The daemon's socket protocol is unpublished, so the driver's own front end carries each command: over its stdin under
protocol 2, as arguments under protocol 3. Replies have no framing, hence one command per process; commands of one
daemon are sent one after the other.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mpsd.common.errors import TransientError
from mpsd.config.model import MpsConfig
from mpsd.daemon import process
from mpsd.daemon.paths import DaemonDirs, base_environment, control_binary

MAX_REPLY_BYTES = 1 << 20
"""Longest reply taken: thousands of namespaces or clients are far below it."""


class CommandFailedError(TransientError):
    """The front end ended with a failure: no daemon there or, under protocol 3, a refusal. `said` is its text."""

    def __init__(self, text: str, said: str = "") -> None:
        super().__init__(text)
        self.said = said


class ControlClient(Protocol):
    """Sends a command to the daemon of these directories and gives its reply.

    Raises TransientError: no answer in time, or the front end can't be run. CommandFailedError: it failed.
    """

    def ask(self, dirs: DaemonDirs, command: str, timeout_s: float) -> str:
        """Protocol 2."""
        ...

    def call(self, dirs: DaemonDirs, arguments: Sequence[str], timeout_s: float) -> str:
        """Protocol 3."""
        ...


Reach = Callable[[Sequence[str], Mapping[str, str]], tuple[Sequence[str], Mapping[str, str]]]
"""From arguments and environment of a program of the driver's to those of a process that becomes it."""


def as_it_is(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """`Reach` where the driver's programs are at hand."""
    return arguments, environment


class FrontEnd:
    """`ControlClient` over the control binary.

    Args:
        reach: how the binary is come by, where it may not be in our mount namespace.
    """

    def __init__(self, mps: MpsConfig, reach: Reach = as_it_is) -> None:
        self._reach = reach
        self._binary = control_binary(mps)
        self._environment = base_environment(mps)
        self._locks: dict[str, threading.Lock] = {}

    def ask(self, dirs: DaemonDirs, command: str, timeout_s: float) -> str:
        """See ControlClient. A daemon exits with success also where it refused: only the reply tells."""
        returncode, reply = self._run(dirs, 2, (), command, timeout_s)
        if returncode != 0:
            said = reply.strip()[:200] or "no reply"
            text = f"cannot talk to the MPS control daemon in {dirs.pipe}: {said} (exit {returncode})"
            raise CommandFailedError(text, said)
        return reply

    def call(self, dirs: DaemonDirs, arguments: Sequence[str], timeout_s: float) -> str:
        """See ControlClient."""
        returncode, reply = self._run(dirs, 3, arguments, "", timeout_s)
        if returncode != 0:
            said = reply.strip()[:200] or "no reply"
            text = f"cannot have the MPS control daemon in {dirs.pipe} do {' '.join(arguments)!r}: {said}"
            raise CommandFailedError(f"{text} (exit {returncode})", said)
        return reply

    def _run(
        self, dirs: DaemonDirs, protocol: int, arguments: Sequence[str], command: str, timeout_s: float
    ) -> tuple[int, str]:
        environment = {
            **dict(self._environment),
            "CUDA_MPS_PIPE_DIRECTORY": dirs.pipe,
            "CUDA_MPS_LOG_DIRECTORY": dirs.log,
            "CUDA_MPS_PROTOCOL_VERSION": str(protocol),
        }
        deadline_s = time.monotonic() + timeout_s
        lock = self._locks.setdefault(dirs.pipe, threading.Lock())
        if not lock.acquire(timeout=timeout_s):
            asked = command or " ".join(arguments)
            raise TransientError(f"cannot send {asked!r}: another command is still without an answer")
        try:
            left_s = max(0.1, deadline_s - time.monotonic())
            text = f"{command}\n".encode() if command else b""
            words, variables = self._reach([self._binary, *arguments], environment)
            done = process.run(words, variables, text, left_s, MAX_REPLY_BYTES)
        finally:
            lock.release()
        return done.returncode, done.output.decode(errors="replace")
