"""A new socket is told from an old one by what a bind changes, and by nothing else."""

import os
import socket
import stat
from pathlib import Path

import pytest

from mpsd.common.socketfile import SocketFile


def bind(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.mark.parametrize("file_system", ["", "/dev/shm"])
def test_every_rebind_is_seen_also_where_inode_numbers_are_used_again(file_system: str, short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    if file_system:
        if not os.access(file_system, os.W_OK):
            pytest.skip(f"no {file_system} here")
        path = Path(file_system, f"gf-{os.getpid()}.sock")
    file = SocketFile(str(path))
    try:
        seen = []
        for _ in range(100):
            with bind(path):
                seen.append(file.look())
                assert file.look() == seen[-1]
        assert len(set(seen)) == 100
    finally:
        file.close()
        path.unlink(missing_ok=True)


def test_mode_owner_and_times_make_no_new_socket(short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    file = SocketFile(str(path))
    with bind(path):
        first = file.look()
        born = file.born_unix_s
        for mode in (0o600, 0o777, 0o000):
            path.chmod(mode)
            assert file.look() == first
        os.chown(path, os.getuid(), os.getgid())
        os.utime(path, (1, 1))
        os.link(path, short_tmp / "other")
        assert file.look() == first
        assert file.born_unix_s == born
        assert stat.S_ISSOCK(path.stat().st_mode)
    file.close()


def test_a_missing_socket_is_none_and_the_next_one_is_new(short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    file = SocketFile(str(path))
    assert file.look() is None
    with bind(path):
        first = file.look()
    path.unlink()
    assert file.look() is None
    with bind(path):
        assert file.look() not in (None, first)
    file.close()


def test_a_socket_moved_into_place_is_new(short_tmp: Path) -> None:
    path, other = short_tmp / "kubelet.sock", short_tmp / "new.sock"
    file = SocketFile(str(path))
    with bind(path):
        first = file.look()
        with bind(other):
            other.rename(path)
            assert file.look() not in (None, first)
    file.close()


def test_without_descriptors_its_number_must_do(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = short_tmp / "kubelet.sock"
    file = SocketFile(str(path))

    def refuse(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    with bind(path), monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        first = file.look()
        assert first is not None
        assert file.look() == first
    with bind(short_tmp / "other"):
        (short_tmp / "other").rename(path)
        assert file.look() not in (None, first)
    file.close()
