"""Processes of the simulation, known by marks in their environment."""

import os
from collections.abc import Callable


def processes_where(matches: Callable[[list[bytes]], bool]) -> list[int]:
    """PIDs of all processes but ours whose environment, as `NAME=value` entries, matches. Unreadable ones do not."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue
        if matches(variables):
            found.append(int(entry))
    return found
