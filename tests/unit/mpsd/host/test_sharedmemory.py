"""What the kernel refuses; real mounts are made in tests/e2e/test_outlive.py."""

import errno
import os
from pathlib import Path

import pytest

from mpsd.common.errors import TransientError
from mpsd.host import sharedmemory


@pytest.mark.parametrize(
    ("meminfo", "size_bytes"),
    [
        ("MemTotal:       16384 kB\nMemFree: 1 kB\n", 8 * 1024**2),
        ("MemFree: 1 kB\n", 64 * 1024**2),
        ("MemTotal: lots kB\n", 64 * 1024**2),
    ],
)
def test_it_is_half_of_the_memory(meminfo: str, size_bytes: int) -> None:
    assert sharedmemory.size_bytes(meminfo) == size_bytes


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EPERM, "Operation not permitted: give mpsd CAP_SYS_ADMIN"),
        (errno.ENOSPC, "No space left on device: choose another mps.runRoot"),
    ],
)
def test_a_refused_mount_says_what_to_do(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sharedmemory, "call", refuse)
    with pytest.raises(TransientError, match=f"cannot mount the shared memory of MPS at {short_tmp}/shm: {text}"):
        sharedmemory.mount(f"{short_tmp}/shm")


def test_a_directory_that_was_never_mounted_is_removed(short_tmp: Path) -> None:
    (short_tmp / "shm").mkdir()
    sharedmemory.unmount(f"{short_tmp}/shm")
    sharedmemory.unmount(f"{short_tmp}/shm")
    assert not (short_tmp / "shm").exists()
    (short_tmp / "shm" / "x").mkdir(parents=True)
    with pytest.raises(TransientError, match=r"cannot remove the shared memory of MPS at .*/shm: Directory not empty"):
        sharedmemory.unmount(f"{short_tmp}/shm")
