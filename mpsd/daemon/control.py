"""Talks to a control daemon: one command, one front-end process, one deadline.

The daemon's socket protocol is unpublished, so the driver's own front end carries each command over its stdin. Replies
have no framing, hence one command per process; commands of one daemon are sent one after the other.
"""

import threading
import time
from typing import Protocol

from mpsd.config.model import MpsConfig
from mpsd.daemon import process
from mpsd.daemon.paths import DaemonDirs, base_environment, control_binary
from mpsd.daemon.protocol2 import MAX_REPLY_BYTES
from mpsd.errors import TransientError


class ControlClient(Protocol):
    """Sends a command to the daemon of these directories and gives its reply.

    Raises TransientError: no daemon there, no answer in time, or the front end can't be run.
    """

    def ask(self, dirs: DaemonDirs, command: str, timeout_s: float) -> str: ...


class FrontEnd:
    """`ControlClient` over the control binary."""

    def __init__(self, mps: MpsConfig) -> None:
        self._binary = control_binary(mps)
        self._environment = base_environment(mps)
        self._locks: dict[str, threading.Lock] = {}

    def ask(self, dirs: DaemonDirs, command: str, timeout_s: float) -> str:
        """See ControlClient."""
        environment = {
            **dict(self._environment),
            "CUDA_MPS_PIPE_DIRECTORY": dirs.pipe,
            "CUDA_MPS_LOG_DIRECTORY": dirs.log,
        }
        deadline_s = time.monotonic() + timeout_s
        lock = self._locks.setdefault(dirs.pipe, threading.Lock())
        if not lock.acquire(timeout=timeout_s):
            raise TransientError(f"cannot send {command!r}: another command is still without an answer")
        try:
            left_s = max(0.1, deadline_s - time.monotonic())
            done = process.run([self._binary], environment, f"{command}\n".encode(), left_s, MAX_REPLY_BYTES)
        finally:
            lock.release()
        reply = done.output.decode(errors="replace")
        if done.returncode != 0:
            raise TransientError(
                f"cannot talk to the MPS control daemon in {dirs.pipe}: {reply.strip()[:200] or 'no reply'} "
                f"(exit {done.returncode})"
            )
        return reply
