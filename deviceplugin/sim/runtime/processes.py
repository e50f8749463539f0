"""Processes of the simulation, known by marks in their environment."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable

TERMINATION_GRACE_S = 2.0


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


def terminate(
    processes: "Iterable[subprocess.Popen[bytes]]",
    pod_uid: str,
    container: str = "",
    members: Callable[[], Iterable[int]] = tuple,
) -> None:
    """Ends a pod's processes (or one container's) and what was started in it: SIGTERM, after a grace SIGKILL.

    Args:
        members: those in its cgroup now.
    """
    children = list(processes)
    deadline_s = time.monotonic() + TERMINATION_GRACE_S
    number = signal.SIGTERM
    while True:
        alive = [child for child in children if child.poll() is None]
        known = {child.pid for child in children} | {os.getpid()}
        others = {*_processes_of(pod_uid, container), *members()} - known
        if not alive and not others:
            return
        if time.monotonic() >= deadline_s:
            number = signal.SIGKILL
        for pid in (*(child.pid for child in alive), *others):
            _signal(pid, number)
        for child in alive:
            try:
                child.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        if others:
            _PAUSE.wait(0.02)


_PAUSE = threading.Event()  # never set: a pause between two looks at processes that are not our children


def _processes_of(pod_uid: str, container: str) -> list[int]:
    """Processes that carry the pod's (and container's) marks in their environment."""
    marks = [f"GPUFRAC_SIM_POD_UID={pod_uid}".encode()]
    if container:
        marks.append(f"GPUFRAC_SIM_CONTAINER={container}".encode())
    return processes_where(lambda env: all(mark in env for mark in marks))


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
