import os
import stat
from pathlib import Path

import pytest

from mpsd.config.model import MpsConfig
from mpsd.daemon import dirs as directories
from mpsd.daemon.paths import DaemonDirs, daemon_dirs
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
