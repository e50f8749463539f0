import os
import socket
import stat
from pathlib import Path

import pytest

from mpsd.config.model import MpsConfig
from mpsd.daemon import dirs as directories
from mpsd.daemon.paths import DaemonDirs, daemon_dirs, link_directory, namespace_directory, namespace_socket
from mpsd.errors import TransientError


@pytest.fixture
def dirs(short_tmp: Path) -> DaemonDirs:
    return daemon_dirs(MpsConfig(run_root=f"{short_tmp}/a/run", log_root=f"{short_tmp}/log"), "GPU-1")


def mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_everything_up_to_the_socket_can_be_passed_whatever_the_umask(dirs: DaemonDirs) -> None:
    before = os.umask(0o077)
    try:
        directories.prepare(dirs)
    finally:
        os.umask(before)
    for path in (dirs.run_root, f"{dirs.run_root}/mps", dirs.pipe):
        assert mode(path) == 0o755
    assert os.path.isdir(dirs.log)


def test_an_existing_directory_is_opened_and_kept(dirs: DaemonDirs) -> None:
    os.makedirs(dirs.pipe)
    os.chmod(dirs.pipe, 0o700)
    Path(dirs.pipe, "control").write_text("x")
    inode = os.stat(dirs.pipe).st_ino
    directories.prepare(dirs)
    assert (mode(dirs.pipe), os.stat(dirs.pipe).st_ino) == (0o755, inode)
    assert os.path.exists(dirs.control_socket)


def test_a_closed_parent_outside_our_root_is_named(dirs: DaemonDirs, short_tmp: Path) -> None:
    os.chmod(short_tmp, 0o700)
    assert directories.prepare(dirs) == f"other users can't pass {short_tmp}: chmod o+x it"
    os.chmod(short_tmp, 0o711)
    assert directories.prepare(dirs) == ""
    assert mode(str(short_tmp)) == 0o711


def test_what_cannot_be_made_is_named(dirs: DaemonDirs) -> None:
    os.makedirs(dirs.run_root)
    Path(dirs.run_root, "mps").write_text("in the way")
    with pytest.raises(TransientError, match=r"cannot make the directory .*/mps/GPU-1: Not a directory"):
        directories.prepare(dirs)


def test_stale_files_go_and_only_those(dirs: DaemonDirs) -> None:
    directories.prepare(dirs)
    for path in (dirs.control_socket, dirs.pid_file, f"{dirs.pipe}/log"):
        Path(path).write_text("1")
    directories.clear_stale(dirs)
    directories.clear_stale(dirs)
    assert os.listdir(dirs.pipe) == ["log"]
    directories.remove(dirs)
    assert not os.path.exists(dirs.pipe)
    directories.remove(dirs)


def leave_socket(dirs: DaemonDirs, namespace: str) -> str:
    path = namespace_socket(dirs, namespace)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.mknod(path, stat.S_IFSOCK | 0o666)
    return path


def test_directories_of_namespaces_outlive_their_stale_sockets(dirs: DaemonDirs) -> None:
    directories.prepare(dirs)
    stale = leave_socket(dirs, "a")
    Path(f"{dirs.pipe}/s/log").write_text("")
    inode = os.stat(namespace_directory(dirs, "a")).st_ino
    directories.clear_stale(dirs)
    assert not os.path.lexists(stale)
    assert os.stat(namespace_directory(dirs, "a")).st_ino == inode


def test_removal_takes_namespaces_links_and_config_and_nothing_they_point_at(dirs: DaemonDirs, short_tmp: Path) -> None:
    directories.prepare(dirs)
    leave_socket(dirs, "a")
    directories.link_socket(dirs, "a")
    Path(dirs.config_file).write_text("")
    elsewhere = short_tmp / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("")
    os.symlink(elsewhere / "precious", f"{dirs.pipe}/s/a/link")
    directories.remove(dirs)
    assert os.listdir(f"{dirs.run_root}/mps") == []
    assert os.listdir(elsewhere) == ["precious"]


def test_a_socket_is_linked_again_when_it_is_another_one(dirs: DaemonDirs) -> None:
    directories.prepare(dirs)
    directory, target = link_directory(dirs, "a"), f"{link_directory(dirs, 'a')}/control"
    for _ in range(2):
        source = leave_socket(dirs, "a")
        for _ in range(2):
            directories.link_socket(dirs, "a")
            assert os.path.samefile(source, target)
            assert os.listdir(directory) == ["control"]
        inode = os.stat(directory).st_ino
        os.link(source, f"{target}.new")  # as if we had been killed between link and rename
        os.unlink(source)
    assert os.stat(directory).st_ino == inode
    assert mode(directory) == 0o755
    with pytest.raises(TransientError, match=r"cannot link .*/s/a/control to .*/a/control: No such file"):
        directories.link_socket(dirs, "a")


def test_links_of_namespaces_that_are_no_more_go(dirs: DaemonDirs) -> None:
    directories.prune_links(dirs, ())
    directories.prepare(dirs)
    for name in ("a", "b"):
        leave_socket(dirs, name)
        directories.link_socket(dirs, name)
    directories.prune_links(dirs, ("b",))
    assert os.listdir(dirs.links) == ["b"]


def test_a_socket_is_served_while_somebody_listens(dirs: DaemonDirs) -> None:
    assert not directories.is_served(dirs)
    directories.prepare(dirs)
    assert not directories.is_served(dirs)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(dirs.control_socket)
        assert not directories.is_served(dirs)
        listener.listen(0)
        assert directories.is_served(dirs)
        assert directories.is_served(dirs)  # the first one still waits: a full queue is somebody, too
    assert not directories.is_served(dirs)
