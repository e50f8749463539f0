"""Fixtures of every suite: short temp directories (socket paths fit in 107 bytes) and leak checks after each test."""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A fresh directory with a short path, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="gf-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _open_descriptors() -> set[str]:
    """What our descriptors point at, without what interpreters and libraries keep for the life of a process."""
    targets = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("/dev/") or "eventfd" in target or "eventpoll" in target:
            continue  # gRPC keeps its pollers
        targets.add(f"{fd}:{target}")
    return targets


def _children() -> set[str]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return set(file.read().split())
    except OSError:
        return set()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, a child or a descriptor behind; `leaks_ok(reason)` where a library must."""
    threads, descriptors, children = set(threading.enumerate()), _open_descriptors(), _children()
    yield
    if request.node.get_closest_marker("leaks_ok"):
        return
    deadline = time.monotonic() + 3.0
    while True:
        leaked = [
            *(f"thread {t.name}" for t in set(threading.enumerate()) - threads if t.is_alive()),
            *(f"descriptor {d}" for d in _open_descriptors() - descriptors),
            *(f"child {c}" for c in _children() - children),
        ]
        if not leaked:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(leaked)}")
        time.sleep(0.02)
