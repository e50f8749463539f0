"""What the descriptors of this process are."""

import contextlib
import os


def descriptors() -> dict[int, str]:
    """Number -> what it points at. Without pollers: no code of ours makes one, and gRPC, which a test before may have
    used, makes and closes its own when it likes."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if "eventfd" not in target and "eventpoll" not in target:
                found[int(fd)] = target
    return found
