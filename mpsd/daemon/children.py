"""Our child processes: those we started and wait for, and those that became ours when their parent died.

Where mpsd is the first process of a PID namespace (a pod without hostPID) daemons and servers whose parent is gone are
its children, and stay zombies until it waits for them.
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from mpsd.common import processes

_lock = threading.Lock()
_started: set[int] = set()
"""PIDs that `started` waits for. Whoever else waited for one would take its exit status away."""


@contextlib.contextmanager
def started(arguments: Any, **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A child of ours, to be waited for in the body. Raises OSError."""
    with _lock:
        child = subprocess.Popen(arguments, **options)
        _started.add(child.pid)
    try:
        yield child
    finally:
        with _lock:
            _started.discard(child.pid)


def inherits() -> bool:
    """Whether orphans become our children, so that nobody else waits for them."""
    return os.getpid() == 1


def reap() -> list[int]:
    """Waits for dead children that we inherited, without blocking; their PIDs."""
    own, reaped = os.getpid(), list[int]()
    if not inherits():
        return reaped
    with _lock:
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or processes.parent(int(entry)) != own or int(entry) in _started:
                continue
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(int(entry), os.WNOHANG)[0]:
                    reaped.append(int(entry))
    return reaped
