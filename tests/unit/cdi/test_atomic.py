"""Durable writes, and what each failing system call leaves behind."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdi.atomic import (
    MAX_FILE_BYTES,
    DurableDirectory,
    collect_temp_files,
    make_directory,
    read_regular,
    remove_file,
    replace_file,
)
from cdi.errors import InvalidNameError
from tests.waiting import WAIT_S


def _names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def tight_umask() -> Any:
    old = os.umask(0o077)
    yield
    os.umask(old)


@pytest.mark.usefixtures("tight_umask")
def test_replace_file_sets_content_and_mode_whatever_the_umask(short_tmp: Path) -> None:
    path = short_tmp / "a.json"
    replace_file(str(path), b"one")
    assert (path.read_bytes(), _mode(path)) == (b"one", 0o644)
    replace_file(str(path), b"", mode=0o600)
    assert (path.read_bytes(), _mode(path)) == (b"", 0o600)
    assert _names(short_tmp) == ["a.json"]


def test_replace_file_replaces_a_link_and_not_its_target(short_tmp: Path) -> None:
    target = short_tmp / "target"
    target.write_bytes(b"kept")
    (short_tmp / "a.json").symlink_to(target)
    replace_file(str(short_tmp / "a.json"), b"new")
    assert not (short_tmp / "a.json").is_symlink()
    assert target.read_bytes() == b"kept"


def test_readers_see_the_old_file_or_the_new_one_never_a_part(short_tmp: Path) -> None:
    path = short_tmp / "a.json"
    contents = [bytes([65 + n]) * 200_000 for n in range(2)]
    replace_file(str(path), contents[0])
    done = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        while not done.is_set():
            seen.append(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(40):
            replace_file(str(path), contents[turn % 2])
    finally:
        done.set()
        reader.join()
    assert seen
    assert all(content in contents for content in seen)


def test_order_of_the_calls_that_make_it_durable(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        calls.append("fsync directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
        real_fsync(fd)

    def rename(*args: Any, **kwargs: Any) -> None:
        calls.append("rename")
        real_rename(*args, **kwargs)

    directory = DurableDirectory(str(short_tmp))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    replace_file(str(short_tmp / "a"), b"x")
    directory.put("b", b"x")
    directory.put("c", b"x", sync=False)
    directory.put("d", b"x", sync=False)
    directory.sync()
    directory.sync()
    directory.remove("b")
    directory.remove("b")
    directory.close()
    one = ["fsync file", "rename", "fsync directory"]
    assert calls == [*one, *one, "fsync file", "rename", "fsync file", "rename", "fsync directory", "fsync directory"]


@pytest.mark.parametrize("call", ["write", "fchmod", "fsync", "rename"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = short_tmp / "a.json"
    replace_file(str(path), b"old")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with DurableDirectory(str(short_tmp)) as directory:
        attempts: list[Callable[[], None]] = [
            lambda: replace_file(str(path), b"new"),
            lambda: directory.put("a.json", b"new"),
        ]
        for attempt in attempts:
            with monkeypatch.context() as patch:
                patch.setattr(os, call, fail)
                with pytest.raises(OSError, match="No space left") as caught:
                    attempt()
            assert caught.value.filename == str(path)
            assert path.read_bytes() == b"old"
            assert _names(short_tmp) == ["a.json"]
        directory.put("a.json", b"new")
    assert path.read_bytes() == b"new"


def test_short_writes_are_continued(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    replace_file(str(short_tmp / "a"), b"0123456789")
    assert (short_tmp / "a").read_bytes() == b"0123456789"


def test_a_failed_flush_of_the_directory_is_owed(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    flushed: list[int] = []
    broken = True

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            if broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            flushed.append(fd)
        real(fd)

    with DurableDirectory(str(short_tmp)) as directory:
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output"):
            directory.put("a", b"x")
        broken = False
        assert not directory.remove("never was")
        assert len(flushed) == 1


@pytest.mark.parametrize("umask", [0, 0o077])
def test_every_directory_on_the_way_has_its_mode_whatever_the_umask(short_tmp: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        assert make_directory(f"{short_tmp}/a/b/c/", 0o700)
        DurableDirectory(f"{short_tmp}/d/e", mode=0o750).close()
        assert not make_directory(f"{short_tmp}/a", 0o700), "what is there is left alone"
    finally:
        os.umask(old)
    modes = {path: (short_tmp / path).stat().st_mode & 0o7777 for path in ("a", "a/b", "a/b/c", "d", "d/e")}
    assert modes == {"a": 0o755, "a/b": 0o755, "a/b/c": 0o700, "d": 0o755, "d/e": 0o750}
    (short_tmp / "file").touch()
    for taken in ("file", "file/below"):
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            make_directory(str(short_tmp / taken), 0o700)


def test_an_error_names_the_path_and_nothing_else(short_tmp: Path) -> None:
    directory = DurableDirectory(str(short_tmp))
    (short_tmp / "taken").mkdir()
    with pytest.raises(OSError, match=rf"^\[Errno \d+\] [A-Za-z ]+: '{short_tmp}/taken'$"):
        directory.put("taken", b"")
    directory.close()


def test_directory_is_made_with_its_mode(short_tmp: Path, tight_umask: None) -> None:
    path = short_tmp / "x" / "cdi"
    with DurableDirectory(str(path), mode=0o755, file_mode=0o600) as directory:
        directory.put("a", b"1")
        assert (_mode(path), _mode(path / "a")) == (0o755, 0o600)
        assert directory.names() == ["a"]
    path.chmod(0o700)
    with DurableDirectory(str(path)):
        assert _mode(path) == 0o700


def test_directory_operations(short_tmp: Path) -> None:
    with DurableDirectory(str(short_tmp)) as directory:
        assert directory.read("a") is None
        assert not directory.holds("a", b"1")
        directory.put("a", b"1")
        directory.put("b", b"2")
        assert directory.names() == ["a", "b"]
        assert directory.read("a") == b"1"
        assert directory.holds("a", b"1")
        assert not directory.holds("a", b"2")
        (short_tmp / "a").chmod(0o666)
        assert not directory.holds("a", b"1")
        assert directory.remove("a")
        assert not directory.remove("a")
        assert directory.names() == ["b"]


def test_directory_that_was_replaced_is_found_again(short_tmp: Path) -> None:
    path = short_tmp / "cdi"
    with DurableDirectory(str(path)) as directory:
        directory.put("a", b"1")
        path.rename(short_tmp / "aside")
        directory.put("b", b"2")
        assert (path / "b").read_bytes() == b"2"
        assert _names(short_tmp / "aside") == ["a"]
        (path / "b").unlink()
        path.rmdir()
        assert directory.names() == []
        directory.put("c", b"3")
        assert _names(path) == ["c"]


def test_closed_directory_opens_again(short_tmp: Path) -> None:
    directory = DurableDirectory(str(short_tmp))
    directory.close()
    directory.close()
    directory.put("a", b"1")
    directory.close()
    assert (short_tmp / "a").read_bytes() == b"1"


def test_a_file_in_the_place_of_the_directory(short_tmp: Path) -> None:
    (short_tmp / "cdi").write_bytes(b"")
    with pytest.raises(OSError, match="cdi"):
        DurableDirectory(str(short_tmp / "cdi"))


def test_threads_do_not_disturb_each_other(short_tmp: Path) -> None:
    with DurableDirectory(str(short_tmp)) as directory:

        def work(worker: int) -> None:
            for turn in range(20):
                directory.put("shared", b"%d" % worker * 1000)
                directory.put(f"own-{worker}", b"%d" % turn)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert directory.names() == ["own-0", "own-1", "own-2", "own-3", "shared"]
        assert directory.read("shared") in [b"%d" % n * 1000 for n in range(4)]
        assert _names(short_tmp) == directory.names()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\0", "x" * 201, ".a.json.12.0a1b2c3d-7.tmp"])
def test_names_that_are_no_plain_file_names(short_tmp: Path, name: str) -> None:
    with DurableDirectory(str(short_tmp)) as directory:
        operations: list[Callable[[], object]] = [
            lambda: directory.put(name, b""),
            lambda: directory.remove(name),
            lambda: directory.read(name),
            lambda: directory.holds(name, b""),
        ]
        for operation in operations:
            with pytest.raises(InvalidNameError):
                operation()
    assert _names(short_tmp) == []


def test_longest_name_fits(short_tmp: Path) -> None:
    replace_file(str(short_tmp / ("x" * 200)), b"1")
    assert _names(short_tmp) == ["x" * 200]


def test_remove_file(short_tmp: Path) -> None:
    path = short_tmp / "a"
    path.write_bytes(b"")
    assert remove_file(str(path))
    assert not remove_file(str(path))
    assert not remove_file(str(short_tmp / "missing" / "a"))
    with pytest.raises(OSError, match="missing/a"):
        replace_file(str(short_tmp / "missing" / "a"), b"")


def test_what_is_no_regular_file_is_not_read(short_tmp: Path) -> None:
    os.mkfifo(short_tmp / "fifo")
    (short_tmp / "link").symlink_to("/etc/hostname")
    (short_tmp / "dir").mkdir()
    with DurableDirectory(str(short_tmp)) as directory:
        for name in ("fifo", "link", "dir"):
            with pytest.raises(OSError, match=name):
                directory.read(name)
            assert not directory.holds(name, b"")


def test_huge_files_are_not_read(short_tmp: Path) -> None:
    path = short_tmp / "a"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(OSError, match="larger than"):
        read_regular(str(path))
    assert read_regular(str(path), max_bytes=MAX_FILE_BYTES + 1)[0] == bytes(MAX_FILE_BYTES + 1)


_KILLED = """
import os, signal, sys
from cdi.atomic import DurableDirectory
directory = DurableDirectory(sys.argv[1])
directory.put("gpufrac_1.json", b"old")
os.rename = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
directory.put("gpufrac_1.json", b"new")
"""


def test_temp_file_of_a_killed_process_is_skipped_and_collected(short_tmp: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(short_tmp)], check=False, timeout=WAIT_S)
    assert killed.returncode == -signal.SIGKILL
    temp, kept = _names(short_tmp)
    assert kept == "gpufrac_1.json"
    assert (short_tmp / kept).read_bytes() == b"old"
    assert not temp.endswith((".json", ".yaml"))
    with DurableDirectory(str(short_tmp)) as directory:
        assert directory.names() == ["gpufrac_1.json"]
        assert directory.collect_temp_files("other_") == []
        assert directory.collect_temp_files("gpufrac_") == [temp]
    assert _names(short_tmp) == ["gpufrac_1.json"]


def test_what_collecting_leaves_alone(short_tmp: Path) -> None:
    dead, alive = 2**22 + 1, os.getppid()  # beyond the highest pid there is; our parent
    young = f".a.json.{alive}.0a1b2c3d-1.tmp"
    kept = [young, "a.json", ".a.json.tmp", ".a.json.12.tmp", "spec.123.tmp", f"a.json.{dead}.0a1b2c3d-1.tmp"]
    stale = [
        f".a.json.{dead}.0a1b2c3d-1.tmp",
        f".a.json.{os.getpid()}.0a1b2c3d-2.tmp",
        f".a.json.{alive}.0a1b2c3d-3.tmp",
    ]
    for name in (*kept, *stale):
        (short_tmp / name).write_bytes(b"")
    os.utime(short_tmp / stale[2], (1, 1))
    assert collect_temp_files(str(short_tmp)) == sorted(stale)
    assert _names(short_tmp) == sorted(kept)
    assert collect_temp_files(str(short_tmp / "missing")) == []


def test_own_write_in_progress_is_not_collected(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def rename(*args: Any, **kwargs: Any) -> None:
        assert collect_temp_files(str(short_tmp)) == []
        real(*args, **kwargs)

    monkeypatch.setattr(os, "rename", rename)
    replace_file(str(short_tmp / "a"), b"1")
    assert (short_tmp / "a").read_bytes() == b"1"
