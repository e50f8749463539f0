"""Our files in a directory that is not only ours."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi.encode import encode_spec
from cdi.errors import ForeignFileError, InvalidNameError, InvalidSpecError, SpecFileError
from cdi.model import Device, Spec
from cdi.writer import Applied, SpecDirectory
from tests.unit.cdi.support import CLASS, KIND, VENDOR, allocation_spec, check_file, env_spec

A, B, C = (allocation_spec(key) for key in ("a" * 20, "b" * 20, "c" * 20))


@pytest.fixture
def specs(short_tmp: Path) -> Iterator[SpecDirectory]:
    with SpecDirectory(str(short_tmp / "cdi"), VENDOR, CLASS) as directory:
        yield directory


def _path(specs: SpecDirectory, identifier: str) -> Path:
    return Path(specs.path) / specs.file_name(identifier)


def _names(specs: SpecDirectory) -> list[str]:
    return sorted(os.listdir(specs.path))


def test_put_writes_once(specs: SpecDirectory) -> None:
    assert specs.put("a", A)
    path = _path(specs, "a")
    assert path.name == "gpufrac.dev-allocation_a.json"
    assert check_file(path.read_bytes())["kind"] == KIND
    assert path.stat().st_mode & 0o7777 == 0o644
    assert path.parent.stat().st_mode & 0o7777 == 0o755
    inode = path.stat().st_ino
    assert not specs.put("a", A)
    assert path.stat().st_ino == inode
    assert specs.put("a", B)
    assert path.read_bytes() == encode_spec(B)
    assert specs.ids() == {"a"}
    assert _names(specs) == [path.name]


def test_put_repairs_mode_and_damage(specs: SpecDirectory) -> None:
    specs.put("a", A)
    _path(specs, "a").chmod(0o600)
    assert specs.put("a", A)
    _path(specs, "a").write_bytes(b'{"cdiVersion":')
    assert specs.put("a", A)
    assert _path(specs, "a").read_bytes() == encode_spec(A)


def test_remove(specs: SpecDirectory) -> None:
    specs.put("a", A)
    assert specs.remove("a")
    assert not specs.remove("a")
    assert specs.ids() == set()


@pytest.mark.parametrize("identifier", ["", ".", "..", "a/b", "../a", "a.b", "a\0", "-a", "a_", "a b", "x" * 65, "é"])
def test_bad_ids_are_refused(specs: SpecDirectory, identifier: str) -> None:
    with pytest.raises(InvalidNameError):
        specs.put(identifier, A)
    with pytest.raises(InvalidNameError):
        specs.remove(identifier)
    applied = specs.apply({identifier: A, "good": B})
    assert applied.written == ("good",)
    assert isinstance(applied.errors[identifier], InvalidNameError)
    assert _names(specs) == [specs.file_name("good")]


def test_specs_that_do_not_belong_here_are_refused(specs: SpecDirectory) -> None:
    with pytest.raises(InvalidSpecError, match=r"this directory holds gpufrac\.dev/allocation"):
        specs.put("a", env_spec("nvidia.com/gpu", "d"))
    with pytest.raises(InvalidSpecError, match="must not be empty"):
        specs.put("a", Spec(KIND, (Device("d"),)))
    assert _names(specs) == []


def test_bad_vendor_or_class_is_refused(short_tmp: Path) -> None:
    with pytest.raises(InvalidNameError):
        SpecDirectory(str(short_tmp), "../x", "c")
    with pytest.raises(InvalidNameError):
        SpecDirectory(str(short_tmp), "v", "c/d")


FOREIGN = {
    "nvidia.yaml": b"cdiVersion: 0.5.0\n",
    "gpufrac.dev-allocation.json": encode_spec(A),
    "gpufrac.dev-allocation_x.yaml": encode_spec(A),
    "gpufrac.dev-allocation_x.json.bak": encode_spec(A),
    "gpufrac.dev-allocation_.json": encode_spec(A),
    "gpufrac.dev-allocation_x.y.json": encode_spec(A),
    "gpufrac.dev-allocation2_x.json": encode_spec(A),
    "gpufrac.dev-allocation_other.json": encode_spec(env_spec("gpufrac.dev/other", "d")),
    "gpufrac.dev-allocation_damaged.json": b"{",
    ".spec.123.tmp": b"",
}


def test_files_of_others_are_never_touched(specs: SpecDirectory) -> None:
    for name, data in FOREIGN.items():
        (Path(specs.path) / name).write_bytes(data)
    (Path(specs.path) / specs.file_name("dir")).mkdir()
    (Path(specs.path) / specs.file_name("link")).symlink_to("nvidia.yaml")
    specs.put("a", A)
    assert specs.ids() == {"a"}
    for identifier in ("other", "dir", "link"):
        with pytest.raises(ForeignFileError, match="move it away"):
            specs.put(identifier, A)
        with pytest.raises(ForeignFileError, match="move it away"):
            specs.remove(identifier)
    with pytest.raises(ForeignFileError):
        specs.remove("damaged")
    specs.collect_temp_files()
    assert specs.apply({}) == Applied((), ("a",), {})
    assert {n: (Path(specs.path) / n).read_bytes() for n in FOREIGN} == FOREIGN
    assert len(_names(specs)) == len(FOREIGN) + 2


def test_apply_makes_the_directory_as_desired(specs: SpecDirectory) -> None:
    assert specs.apply({"b": B, "a": A}) == Applied(("a", "b"), (), {})
    assert not specs.apply({"a": A, "b": B}).changed
    assert specs.apply({"a": C, "c": C}) == Applied(("a", "c"), ("b",), {})
    assert specs.ids() == {"a", "c"}
    assert specs.apply({}) == Applied((), ("a", "c"), {})
    assert specs.ids() == set()


def test_apply_flushes_the_directory_once(specs: SpecDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    flushes: list[bool] = []

    def fsync(fd: int) -> None:
        flushes.append(os.path.isdir(f"/proc/self/fd/{fd}"))
        real(fd)

    specs.put("old", A)
    monkeypatch.setattr(os, "fsync", fsync)
    specs.apply({"a": A, "b": B, "c": C})
    assert flushes == [False, False, False, True]
    flushes.clear()
    specs.apply({"a": A, "b": B, "c": C})
    assert flushes == []


def test_apply_goes_on_after_a_file_that_fails(specs: SpecDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def rename(source: str, target: str, **kwargs: Any) -> None:
        if "_b.json" in target:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target, **kwargs)

    specs.put("old", A)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        applied = specs.apply({"a": A, "b": B, "c": C})
    assert (applied.written, applied.removed) == (("a", "c"), ("old",))
    assert set(applied.errors) == {"b"}
    error = applied.errors["b"]
    assert isinstance(error, SpecFileError)
    assert str(error) == f"cannot write CDI spec {_path(specs, 'b')}: No space left on device"
    assert specs.ids() == {"a", "c"}
    assert len(_names(specs)) == 2
    assert specs.apply({"a": A, "b": B, "c": C}) == Applied(("b",), (), {})


def test_a_flush_that_failed_is_made_up_for(specs: SpecDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    flushed: list[int] = []

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            flushed.append(fd)
            if len(flushed) == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SpecFileError, match="Input/output error"):
        specs.put("a", A)
    assert not specs.put("a", A)
    assert len(flushed) == 2


def test_directory_that_vanished_is_made_again(specs: SpecDirectory) -> None:
    specs.put("a", A)
    _path(specs, "a").unlink()
    os.rmdir(specs.path)
    assert specs.ids() == set()
    assert specs.apply({"a": A}).written == ("a",)
    assert _path(specs, "a").exists()


def test_directory_that_cannot_be_made(short_tmp: Path) -> None:
    (short_tmp / "file").write_bytes(b"")
    with pytest.raises(SpecFileError, match="cannot open the directory of CDI spec"):
        SpecDirectory(str(short_tmp / "file" / "cdi"), VENDOR, CLASS)


def test_stale_temporary_files_are_collected(specs: SpecDirectory) -> None:
    ours = ".gpufrac.dev-allocation_a.json.4194305.0a1b2c3d-0.tmp"
    theirs = ".nvidia.com-gpu_a.json.4194305.0a1b2c3d-0.tmp"
    for name in (ours, theirs):
        (Path(specs.path) / name).write_bytes(b"")
    assert specs.collect_temp_files() == [ours]
    assert _names(specs) == [theirs]
