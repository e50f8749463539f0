"""Fixtures of every suite: short temp directories (socket paths fit in 107 bytes) and leak checks after each test."""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.descriptors import descriptors
from tests.waiting import WAIT_S

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

LONG = ("tests/e2e/test_endurance.py", "tests/property/")
"""Where tests are that take many seconds, the longest first."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first in each worker's part, which pytest-xdist cuts from the list in one piece: a long one that
    is begun last has all other workers wait."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for place in LONG for item in items if item.nodeid.startswith(place)]
    rest = [item for item in items if not item.nodeid.startswith(LONG)]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        first = long[worker::workers]
        room = max(0, (len(items) - len(ordered)) // (workers - worker) - len(first))
        ordered += first + rest[:room]
        rest = rest[room:]
    items[:] = ordered + rest


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A fresh directory with a short path, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="gf-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _open_descriptors() -> set[str]:
    """Without devices, which interpreters and libraries keep for the life of a process."""
    return {f"{fd}:{target}" for fd, target in descriptors().items() if not target.startswith("/dev/")}


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
    deadline_s = time.monotonic() + WAIT_S
    while True:
        leaked = [
            *(f"thread {t.name}" for t in set(threading.enumerate()) - threads if t.is_alive()),
            *(f"descriptor {d}" for d in _open_descriptors() - descriptors),
            *(f"child {c}" for c in _children() - children),
        ]
        if not leaked:
            return
        if time.monotonic() > deadline_s:
            pytest.fail(f"left behind: {', '.join(leaked)}")
        time.sleep(0.02)
