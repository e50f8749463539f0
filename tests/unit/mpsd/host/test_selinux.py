import errno
import os
from pathlib import Path

import pytest

from mpsd.host import selinux


class Labels:
    """Takes labels in place of the kernel."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.paths: list[str] = []

    def set(self, path: str, name: str, value: bytes, *, follow_symlinks: bool) -> None:
        assert (name, value) == ("security.selinux", b"system_u:object_r:container_file_t:s0\0")
        assert not follow_symlinks
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self.paths.append(path)


@pytest.fixture
def pipe(short_tmp: Path) -> Path:
    """A pipe directory, and beside it an selinuxfs."""
    (short_tmp / "selinux").mkdir()
    (short_tmp / "selinux" / "enforce").touch()
    (pipe := short_tmp / "pipe").mkdir()
    (pipe / "sub").mkdir()
    (pipe / "sub" / "control").touch()
    (pipe / "out").symlink_to("/etc")
    return pipe


def label(pipe: Path, labels: Labels) -> str:
    return selinux.label(str(pipe), selinux=f"{pipe.parent}/selinux", setxattr=labels.set)


def test_everything_below_is_labelled_and_links_are_not_followed(pipe: Path) -> None:
    labels = Labels()
    assert label(pipe, labels) == ""
    assert sorted(labels.paths) == [str(pipe), *(f"{pipe}/{name}" for name in ("out", "sub", "sub/control"))]


def test_nothing_is_done_without_selinux(pipe: Path) -> None:
    (pipe.parent / "selinux" / "enforce").unlink()
    assert label(pipe, labels := Labels()) == ""
    assert labels.paths == []


def test_a_refusal_is_stated(pipe: Path) -> None:
    text = label(pipe, Labels(errno.ENOTSUP))
    assert text.startswith(f"cannot label {pipe}: {os.strerror(errno.ENOTSUP)} (3 more): confined containers")


def test_what_vanishes_meanwhile_is_no_failure(pipe: Path) -> None:
    assert label(pipe, Labels(errno.ENOENT)) == ""
    assert label(pipe / "gone", Labels(errno.ENOENT)) == ""
