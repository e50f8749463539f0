"""One instance per node, and locks that nobody else can take or turn against us."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mpsd.common.lockfile import LockFileError, open_lock, try_lock
from mpsd.common.processlock import ProcessLock, ProcessLockError


class Never:
    """A stop signal that does not come, and does not wait."""

    def wait(self, timeout_s: float | None = None) -> bool:
        return False

    def is_set(self) -> bool:
        return False


def lock(*paths: Path) -> ProcessLock:
    return ProcessLock("plugin", tuple(str(path) for path in paths), wait_s=0.0, stop=Never())


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_what_two_instances_share_is_locked_wherever_it_is(short_tmp: Path, shared: int) -> None:
    """Another runRoot with the same state, kubelet or CDI directory is a second instance, too."""
    first = [short_tmp / f"a{n}" for n in range(3)]
    second = [short_tmp / (f"a{n}" if n == shared else f"b{n}") for n in range(3)]
    with lock(*first):
        with (
            pytest.raises(
                ProcessLockError, match=rf"pid {os.getpid()}\) .* uses {short_tmp} and holds {first[shared]}"
            ),
            lock(*second),
        ):
            pytest.fail("both run")
        with lock(*(path for path in second if path not in first)):
            pass  # what was taken before is free again
    with lock(*second):
        pass


def test_two_roots_in_one_directory_do_not_wait_for_each_other(short_tmp: Path) -> None:
    (short_tmp / "other").symlink_to(short_tmp)
    with lock(short_tmp / "mpsd.lock", short_tmp / "other" / "mpsd.lock"), pytest.raises(ProcessLockError):
        lock(short_tmp / "mpsd.lock").__enter__()


def test_a_lock_file_is_for_nobody_else_whatever_the_umask_and_an_earlier_mode(short_tmp: Path) -> None:
    path = short_tmp / "plugin.lock"
    path.write_text("123456 and more")
    path.chmod(0o644)
    old = os.umask(0)
    try:
        with lock(path, short_tmp / "new"):
            assert [p.stat().st_mode & 0o777 for p in (path, short_tmp / "new")] == [0o600, 0o600]
            assert path.read_text() == f"{os.getpid()}\n"
    finally:
        os.umask(old)


def link(path: Path) -> None:
    path.symlink_to(path.parent / "precious")


def second_name(path: Path) -> None:
    path.hardlink_to(path.parent / "precious")


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [link, second_name, fifo, Path.mkdir])
def test_what_is_planted_at_its_path_is_named_and_left_alone(short_tmp: Path, plant: Callable[[Path], None]) -> None:
    precious = short_tmp / "precious"
    precious.write_text("precious")
    precious.chmod(0o644)
    plant(short_tmp / "plugin.lock")
    with (
        pytest.raises(LockFileError, match=r"plugin.lock: .* is in the way, .*: remove it"),
        lock(short_tmp / "plugin.lock"),
    ):
        pytest.fail("it was taken")
    assert precious.read_text() == "precious"
    assert precious.stat().st_mode & 0o777 == 0o644


def test_a_full_disk_is_no_reason_not_to_start(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mpsd.common.processlock.os.pwrite", full)
    with lock(short_tmp / "plugin.lock"):
        fd = open_lock(str(short_tmp / "plugin.lock"))
        assert not try_lock(fd)
        os.close(fd)


def test_a_lock_on_the_directory_stops_nobody(short_tmp: Path) -> None:
    """Any user may open a directory of mode 0755, and lock what it opened."""
    fd = os.open(short_tmp, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with lock(short_tmp / "plugin.lock"):
            pass
    finally:
        os.close(fd)


def test_who_waited_for_a_lock_that_was_removed_holds_the_one_that_all_others_see(short_tmp: Path) -> None:
    """A cleanup removes the lock files while a plugin waits for it to end."""
    path = short_tmp / "plugin.lock"
    cleanup = open_lock(str(path))
    assert try_lock(cleanup)

    class EndsMeanwhile(Never):
        def wait(self, timeout_s: float | None = None) -> bool:
            path.unlink(missing_ok=True)
            fcntl.flock(cleanup, fcntl.LOCK_UN)
            return False

    with (
        ProcessLock("plugin", (str(path),), wait_s=60.0, stop=EndsMeanwhile()),
        pytest.raises(ProcessLockError, match=f"pid {os.getpid()}"),
        lock(path),
    ):
        pytest.fail("both run")
    os.close(cleanup)
