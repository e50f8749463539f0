import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsd.common.errors import TransientError
from mpsd.config.model import MpsConfig
from mpsd.daemon import dirs as directories
from mpsd.daemon.paths import MAIN, DaemonDirs, daemon_dirs, namespace_directory, namespace_socket
from tests.mpspaths import link_directory, own_link


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
    with pytest.raises(TransientError, match=r"cannot make the directory .*/mps: Not a directory"):
        directories.prepare(dirs)


def test_stale_files_go_and_only_those(dirs: DaemonDirs) -> None:
    directories.prepare(dirs)
    directories.clear_stale(dirs)
    os.mkfifo(f"{dirs.pipe}/log")
    for path in (dirs.control_socket, dirs.pid_file, f"{dirs.pipe}/of others"):
        Path(path).write_text("1")
    directories.clear_stale(dirs)
    directories.clear_stale(dirs)
    assert os.listdir(dirs.pipe) == ["of others"]
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
    directories.link_socket(dirs, own_link(dirs, "a"))
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
            directories.link_socket(dirs, own_link(dirs, "a"))
            assert os.path.samefile(source, target)
            assert os.listdir(directory) == ["control"]
        inode = os.stat(directory).st_ino
        os.link(source, f"{target}.new")  # as if we had been killed between link and rename
        os.unlink(source)
    assert os.stat(directory).st_ino == inode
    assert mode(directory) == 0o755
    with pytest.raises(TransientError, match=r"cannot link .*/s/a/control to .*/a/control: No such file"):
        directories.link_socket(dirs, own_link(dirs, "a"))


def test_the_main_socket_is_linked_beside_namespaces(dirs: DaemonDirs) -> None:
    directories.prepare(dirs)
    os.mknod(dirs.control_socket, stat.S_IFSOCK | 0o666)
    directories.link_socket(dirs, own_link(dirs, MAIN))
    directory = f"{dirs.run_root}/mps/GPU-1.ns/_main"
    assert link_directory(dirs, MAIN) == directory
    assert os.path.samefile(f"{directory}/control", dirs.control_socket)
    for _ in range(2):
        directories.remove_link(own_link(dirs, MAIN))
    assert os.listdir(dirs.links) == []
    assert os.path.exists(dirs.control_socket)


def test_links_of_namespaces_that_are_no_more_go(dirs: DaemonDirs) -> None:
    directories.prune_links(dirs.links, ())
    directories.prepare(dirs)
    for name in ("a", "b"):
        leave_socket(dirs, name)
        directories.link_socket(dirs, own_link(dirs, name))
    directories.prune_links(dirs.links, ("b",))
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


# What a root tenant of a pipe directory can put there. `precious` is a directory with a file `control` and a directory
# `s/a` of the same kind; nothing in it may ever go.


@pytest.fixture
def precious(short_tmp: Path) -> Iterator[Path]:
    path = short_tmp / "precious"
    files = [path / "control", path / "s" / "control", path / "s" / "a" / "control", path / "a" / "control"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("keep me")
    yield path
    assert [file.read_text() for file in files] == ["keep me"] * len(files)


def deep_directory(path: str) -> None:
    """More levels than a process may have descriptors or stack frames."""
    os.mkdir(path)
    here = os.open(path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def directory_with_links(path: str, precious: Path) -> None:
    os.makedirs(f"{path}/d")
    for name in ("x", "d/x"):
        os.symlink(precious, f"{path}/{name}")


Plant = Callable[[str, Path], None]
PLANTS: dict[str, Plant] = {
    "link to a directory": lambda path, precious: os.symlink(precious, path),
    "link to a directory of sockets": lambda path, precious: os.symlink(precious / "s", path),
    "link to a file": lambda path, precious: os.symlink(precious / "control", path),
    "link up": lambda path, _: os.symlink("..", path),
    "link to itself": lambda path, _: os.symlink(os.path.basename(path), path),
    "pipe": lambda path, _: os.mkfifo(path),
    "file": lambda path, _: os.close(os.open(path, os.O_CREAT)),
    "directory": lambda path, _: os.mkdir(path),
    "directory with links": directory_with_links,
    "deep directory": lambda path, _: deep_directory(path),
}
PLACES = ("control", "control_lock", "log", "nvidia-cuda-mps-control.pid", "s", "s/control", "s/a", "s/a/control")


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
@pytest.mark.parametrize("place", PLACES)
def test_whatever_is_planted_is_no_obstacle_and_never_followed(
    dirs: DaemonDirs, precious: Path, place: str, plant: Plant
) -> None:
    directories.prepare(dirs)
    for neighbour in ("control", "s/a/control"):  # of a daemon beside it, where `..` leads
        os.makedirs(os.path.dirname(f"{dirs.run_root}/mps/{neighbour}"), exist_ok=True)
        Path(dirs.run_root, "mps", neighbour).write_text("keep me")
    path = f"{dirs.pipe}/{place}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    plant(path, precious)
    directories.clear_stale(dirs)
    kept = place in ("s", "s/a") and os.path.isdir(path) and not os.path.islink(path)
    assert os.path.lexists(path) is kept
    assert not kept or "directory" in next(name for name, known in PLANTS.items() if known is plant)
    assert not directories.is_served(dirs)
    directories.remove(dirs)
    assert not os.path.lexists(dirs.pipe)
    for neighbour in ("control", "s/a/control"):
        assert Path(dirs.run_root, "mps", neighbour).read_text() == "keep me"


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
@pytest.mark.parametrize("name", ["control", "control.new"])
def test_a_socket_is_linked_over_whatever_is_planted(dirs: DaemonDirs, precious: Path, name: str, plant: Plant) -> None:
    directories.prepare(dirs)
    source = leave_socket(dirs, "a")
    os.makedirs(link_directory(dirs, "a"))
    plant(f"{link_directory(dirs, 'a')}/{name}", precious)
    directories.link_socket(dirs, own_link(dirs, "a"))
    assert os.path.samestat(os.lstat(source), os.lstat(f"{link_directory(dirs, 'a')}/control"))
    assert os.listdir(link_directory(dirs, "a")) == ["control"]
    directories.prune_links(dirs.links, ())
    assert os.listdir(dirs.links) == []


@pytest.mark.parametrize("place", ["s", "s/a", "s/a/control"])
def test_no_socket_is_linked_through_a_link(dirs: DaemonDirs, precious: Path, place: str) -> None:
    directories.prepare(dirs)
    real = leave_socket(dirs, "real")
    path = f"{dirs.pipe}/{place}"
    if place == "s":
        os.rename(path, f"{path}.real")
        os.symlink(precious / "s", path)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(real if place.endswith("control") else os.path.dirname(real), path)
    with pytest.raises(TransientError, match="cannot link "):
        directories.link_socket(dirs, own_link(dirs, "a"))
    assert not directories.is_socket(f"{link_directory(dirs, 'a')}/control")


def test_what_cannot_be_cleared_has_a_reason(dirs: DaemonDirs, precious: Path) -> None:
    os.makedirs(os.path.dirname(dirs.pipe))
    os.symlink(precious, dirs.pipe)
    with pytest.raises(TransientError, match=r"cannot clear .*/GPU-1: .*: look what is in it"):
        directories.clear_stale(dirs)


def test_who_listens_behind_a_link_serves_nothing(dirs: DaemonDirs, short_tmp: Path) -> None:
    directories.prepare(dirs)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{short_tmp}/other")
        listener.listen(0)
        os.symlink(f"{short_tmp}/other", dirs.control_socket)
        assert not directories.is_served(dirs)


def test_only_regular_files_are_read(short_tmp: Path) -> None:
    path = f"{short_tmp}/x"
    Path(path).write_bytes(b"0123456789")
    assert (directories.read_file(path, 4), directories.read_file(path, 4, end=True)) == (b"0123", b"6789")
    os.truncate(path, 1 << 40)
    assert directories.read_file(path, 4) == b"0123"
    os.symlink(path, f"{path}.link")
    os.mkfifo(f"{path}.pipe")
    for name in (f"{path}.link", f"{path}.pipe", "/dev/zero", str(short_tmp), f"{path}.none"):
        with pytest.raises(OSError):
            directories.read_file(name, 4)
