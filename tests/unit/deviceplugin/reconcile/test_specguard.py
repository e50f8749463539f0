"""A second definition of a CDI device of ours: set aside where the directory is ours, and never a way to start."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi.encode import encode_spec
from cdi.errors import ForeignFileError
from cdi.model import Spec
from cdi.registry import Found, NotFound
from cdi.scan import scan
from cdi.writer import SpecDirectory
from deviceplugin.plan.render import device_name
from deviceplugin.reconcile import specguard
from deviceplugin.reconcile.specguard import SpecGuard, with_own
from tests.unit.cdi.support import CLASS, VENDOR, allocation_spec

A, B = "a" * 20, "b" * 20


class Node:
    """Three directories that a runtime reads; the middle one is ours."""

    def __init__(self, root: Path) -> None:
        self.low, self.own, self.high = (root / name for name in ("etc", "run", "more"))
        for directory in (self.low, self.own, self.high):
            directory.mkdir()
        self.now_s = 0.0
        self.specs = SpecDirectory(str(self.own), VENDOR, CLASS)
        directories = [str(directory) for directory in (self.low, self.own, self.high)]
        self.directories = directories
        self.guard = SpecGuard(self.specs, directories, device_name, lambda: self.now_s)
        self.guard.apply({key: spec(key) for key in (A, B)})

    def file(self, key: str) -> Path:
        return self.own / self.specs.file_name(key)

    def pass_time(self) -> bool:
        self.now_s += 5
        return self.guard.is_off()

    def starts_by(self, key: str) -> str:
        """The file by which a runtime would start the container, empty where it would not."""
        found = scan(self.directories).resolve(f"{VENDOR}/{CLASS}={device_name(key)}")
        if isinstance(found, NotFound):
            return ""
        assert isinstance(found, Found)
        return found.file.path


def spec(key: str) -> Spec:
    return allocation_spec(key)


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    made = Node(short_tmp)
    yield made
    made.guard.close()


COPIES = [
    "copy.json",
    ".hidden.json",
    "gpufrac.dev-allocation_a.bak.json",
    "x" * 200 + ".json",
    "copy.yaml",
    "link.json",
    "with-byte-order-mark.json",
    "with-comment.json",
]
_BEFORE = {"with-byte-order-mark.json": b"\xef\xbb\xbf", "with-comment.json": b"# before the update\n"}
"""What makes them no JSON, and the library of runtimes reads."""


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_in_our_directory_is_set_aside(node: Node, name: str, caplog: pytest.LogCaptureFixture) -> None:
    copy = node.own / name
    if name == "link.json":
        elsewhere = node.own.parent / "backup.json"
        shutil.copy(node.file(A), elsewhere)
        copy.symlink_to(elsewhere)
    else:
        copy.write_bytes(_BEFORE.get(name, b"") + node.file(A).read_bytes())
    assert node.starts_by(A) == ""
    assert not node.pass_time()
    assert node.starts_by(A) == str(node.file(A))
    assert not os.path.lexists(copy)
    assert len([entry for entry in os.listdir(node.own) if entry.endswith(".set-aside")]) == 1
    assert not node.guard.objections


@pytest.mark.parametrize("by_apply", [False, True])
def test_a_copy_does_not_let_a_container_start_when_ours_is_withdrawn(node: Node, by_apply: bool) -> None:
    shutil.copy(node.file(A), node.own / "copy.json")
    shutil.copy(node.file(B), node.own / "copy2.json")
    node.now_s += 5
    if by_apply:
        node.guard.apply({})
    else:
        node.guard.remove(A)
        node.guard.remove(B)
    assert (node.starts_by(A), node.starts_by(B)) == ("", "")


def test_a_copy_under_the_name_of_another_of_our_files_is_no_way_to_start(node: Node) -> None:
    shutil.copy(node.file(A), node.file("c" * 20))
    assert node.pass_time()
    node.guard.apply({A: spec(A), B: spec(B)})
    assert node.starts_by(A) == str(node.file(A))
    shutil.copy(node.file(A), node.file(B))
    assert node.pass_time()
    node.guard.apply({A: spec(A), B: spec(B)})
    assert (node.starts_by(A), node.starts_by(B)) == (str(node.file(A)), str(node.file(B)))


def test_a_copy_in_a_directory_before_ours_is_named_and_holds_nothing(node: Node) -> None:
    copy = node.low / "copy.json"
    shutil.copy(node.file(A), copy)
    assert not node.pass_time()
    assert len(node.guard.objections) == 1
    assert str(copy) in node.guard.objections[0].message
    assert node.starts_by(A) == str(node.file(A))
    node.guard.remove(A)
    assert node.starts_by(A) == ""
    assert not node.pass_time()
    assert node.guard.put(A, spec(A))
    assert node.starts_by(A) == str(node.file(A))
    node.guard.remove(A)
    copy.unlink()
    assert node.pass_time()  # the bars are to go
    node.guard.apply({B: spec(B)})
    assert sorted(os.listdir(node.own)) == [node.file(B).name]
    assert not node.guard.objections


@pytest.mark.parametrize("twice_before", [False, True])
def test_a_file_that_would_hold_instead_of_ours_lets_nobody_start(node: Node, twice_before: bool) -> None:
    copies = [node.low / "1.json", node.low / "2.json"] if twice_before else [node.high / "copy.json"]
    for copy in copies:
        shutil.copy(node.file(A), copy)
    assert node.pass_time()
    applied = node.guard.apply({A: spec(A), B: spec(B)})
    assert set(applied.errors) == {A}
    assert str(copies[0]) in str(applied.errors[A])
    assert (node.starts_by(A), node.starts_by(B)) == ("", str(node.file(B)))
    node.now_s += 5
    with pytest.raises(ForeignFileError, match="move it away"):
        node.guard.put(A, spec(A))
    for copy in copies:
        copy.unlink()
    node.now_s += 5
    assert node.guard.put(A, spec(A))
    assert node.starts_by(A) == str(node.file(A))


def test_a_copy_that_can_not_be_set_aside_is_named_and_lets_nobody_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = node.own / "copy.json"
    shutil.copy(node.file(A), copy)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr("cdi.atomic.DurableDirectory.rename", refuse)
        node.pass_time()
        assert len(node.guard.objections) == 1
        assert "Operation not permitted" in node.guard.objections[0].message
        assert str(copy) in node.guard.objections[0].message
        node.guard.remove(A)
        assert node.starts_by(A) == ""
    node.pass_time()
    assert not node.guard.objections


def test_files_of_other_kinds_and_of_no_use_are_left_alone(node: Node) -> None:
    nvidia = encode_spec(Spec("nvidia.com/gpu", spec(A).devices))
    (node.own / "nvidia.json").write_bytes(nvidia)
    (node.own / "broken.json").write_text("{")
    (node.own / "copy.json.bak").write_bytes(encode_spec(spec(A)))
    before = sorted(os.listdir(node.own))
    assert not node.pass_time()
    assert sorted(os.listdir(node.own)) == before
    assert not node.guard.objections


def test_bars_of_an_earlier_run_go(node: Node) -> None:
    shutil.copy(node.file(A), node.low / "copy.json")
    node.now_s += 5
    node.guard.remove(A)
    (node.low / "copy.json").unlink()
    again = SpecGuard(node.specs, node.directories, device_name)
    again.apply({B: spec(B)})
    assert sorted(os.listdir(node.own)) == [node.file(B).name]


@pytest.mark.parametrize(
    ("directories", "own", "places"),
    [
        (("/etc/cdi", "/var/run/cdi"), "/var/run/cdi", ["/etc/cdi", "/var/run/cdi"]),
        (("/etc/cdi/", "/var/run/cdi"), "/etc/cdi", ["/etc/cdi", "/var/run/cdi"]),
        (("/etc/cdi", "/var/run/cdi"), "/opt/cdi", ["/etc/cdi", "/var/run/cdi", "/opt/cdi"]),
    ],
)
def test_our_directory_has_its_place(directories: tuple[str, ...], own: str, places: list[str]) -> None:
    assert with_own(directories, own) == places


def test_our_directory_under_another_name_is_still_ours(short_tmp: Path) -> None:
    (short_tmp / "run").mkdir()
    (short_tmp / "link").symlink_to(short_tmp / "run")
    assert with_own((f"{short_tmp}/link",), f"{short_tmp}/run") == [f"{short_tmp}/run"]


@pytest.mark.root
def test_our_directory_mounted_at_another_path_is_still_ours(short_tmp: Path) -> None:
    """The host's directory seen twice: its files would each be a second definition of themselves."""
    for name in ("run", "mounted"):
        (short_tmp / name).mkdir()
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from deviceplugin.reconcile.specguard import with_own; "
        "print(with_own([sys.argv[3]], sys.argv[2]))"
    )
    script = 'mount --bind "$3" "$4" && exec "$0" -c "$1" "$2" "$3" "$4"'
    root = str(Path(specguard.__file__).parents[2])
    own, mounted = f"{short_tmp}/run", f"{short_tmp}/mounted"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, code, root, own, mounted],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"mount namespaces: {done.stderr.strip()}")
    assert done.stdout == f"{[own]}\n", done.stderr
