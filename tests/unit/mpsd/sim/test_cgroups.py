"""The simulated cgroup tree: files that follow from each other, and who belongs where."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.sim.cgroups import MAX, MIN, CgroupTree, Confinement, memparse, read_bytes, read_keyed, write_value

REGIONS = {"nvidia/00000000:01:00.0/vidmem": 100, "nvidia/00000000:02:00.0/vidmem": 200}
ONE, TWO = REGIONS


@pytest.fixture
def tree(short_tmp: Path) -> CgroupTree:
    tree = CgroupTree(str(short_tmp))
    tree.settle(REGIONS)
    return tree


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A shell with a child."""
    with subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        yield process
        os.killpg(process.pid, 9)


def text(directory: str, name: str) -> str:
    return Path(directory, name).read_text()


def test_the_root_names_controllers_and_capacity(tree: CgroupTree) -> None:
    assert text(tree.root, "cgroup.controllers").split() == ["cpu", "memory", "pids", "dmem", "misc"]
    assert text(tree.root, "dmem.capacity") == f"{ONE} 100\n{TWO} 200\n"
    assert not os.path.exists(f"{tree.root}/dmem.max")
    assert tree.is_v2()
    assert tree.has_dmem()


def test_without_the_controller_and_without_cgroup_v2(tree: CgroupTree) -> None:
    directory = tree.make("a.slice/b", delegate_dmem=True)
    tree.settle(REGIONS)
    assert os.path.exists(f"{directory}/dmem.max")
    tree.settle(REGIONS, dmem=False)
    assert (tree.has_dmem(), tree.is_v2()) == (False, True)
    assert not os.path.exists(f"{directory}/dmem.max")
    assert not os.path.exists(f"{tree.root}/dmem.capacity")
    tree.settle(REGIONS, v2=False)
    assert not tree.is_v2()


@pytest.mark.parametrize("enabled", [(), ("",), ("", "a"), ("a",)])
def test_dmem_files_follow_from_every_parent(tree: CgroupTree, enabled: tuple[str, ...]) -> None:
    tree.make("a/b", delegate_dmem=False)
    tree.settle(REGIONS)
    for name in enabled:
        Path(tree.root, name, "cgroup.subtree_control").write_text("+dmem")
    tree.settle(REGIONS)
    having = [name for name in ("a", "a/b") if os.path.exists(f"{tree.root}/{name}/dmem.max")]
    assert having == {(): [], ("",): ["a"], ("", "a"): ["a", "a/b"], ("a",): []}[enabled]


def test_switching_off_removes_what_was_set(tree: CgroupTree) -> None:
    directory = tree.make("a", delegate_dmem=True)
    tree.settle(REGIONS)
    assert {name: text(directory, f"dmem.{name}") for name in ("min", "low", "current")} == dict.fromkeys(
        ("min", "low", "current"), f"{ONE} 0\n{TWO} 0\n"
    )
    assert text(directory, MAX) == f"{ONE} max\n{TWO} max\n"
    write_value(f"{directory}/{MAX}", TWO, 7)
    tree.settle(REGIONS)
    assert (read_bytes(f"{directory}/{MAX}", ONE), read_bytes(f"{directory}/{MAX}", TWO)) == (None, 7)
    Path(tree.root, "cgroup.subtree_control").write_text("-dmem")
    tree.settle(REGIONS)
    assert not os.path.exists(f"{directory}/{MIN}")


@pytest.mark.parametrize(
    ("value", "size"), [("1048576", 1 << 20), ("9G", 9 << 30), ("4K", 4096), ("2M", 2 << 20), ("max", None), ("", None)]
)
def test_values_are_read_as_the_kernel_reads_them(tree: CgroupTree, value: str, size: int | None) -> None:
    path = f"{tree.make('a', delegate_dmem=False)}/{MAX}"
    Path(path).write_text(f"{ONE} {value}\n")
    assert memparse(value) == size
    assert read_bytes(path, ONE) == size
    assert read_keyed(f"{path}.absent") == {}


def test_a_process_is_where_it_or_its_nearest_ancestor_is_listed(
    tree: CgroupTree, sleeper: "subprocess.Popen[bytes]"
) -> None:
    outer, inner = tree.make("a", delegate_dmem=False), tree.make("a/b", delegate_dmem=False)
    assert sleeper.stdout is not None
    child = int(sleeper.stdout.readline())
    assert tree.cgroups_of((child, os.getpid())) == {child: tree.root, os.getpid(): tree.root}
    tree.add(outer, sleeper.pid)
    assert (tree.cgroup_of(child), tree.members(outer)) == (outer, sorted((sleeper.pid, child)))
    tree.add(inner, child)
    assert (tree.cgroup_of(child), tree.cgroup_of(sleeper.pid)) == (inner, outer)
    assert (tree.members(inner), tree.members(outer)) == ([child], sorted((sleeper.pid, child)))
    tree.add(inner, sleeper.pid)
    tree.add(outer, child)
    assert (text(outer, "cgroup.procs"), text(inner, "cgroup.procs")) == (f"{child}\n", f"{sleeper.pid}\n")


def test_a_number_that_is_used_again_is_another_process(tree: CgroupTree) -> None:
    directory = tree.make("a", delegate_dmem=False)
    tree.add(directory, os.getpid())
    assert tree.cgroup_of(os.getpid()) == directory
    Path(directory, "sim.procs").write_text(f"{os.getpid()} 1\n")
    assert tree.cgroup_of(os.getpid()) == tree.root


def test_a_removed_cgroup_takes_those_below_with_it(tree: CgroupTree) -> None:
    directory = tree.make("a/b", delegate_dmem=True)
    tree.remove(f"{tree.root}/a")
    assert not os.path.exists(directory)
    tree.remove(directory)
    tree.remove(tree.root)
    assert tree.is_v2()
    with pytest.raises(FileNotFoundError, match=r"^cannot enter the cgroup"):
        tree.add(directory, os.getpid())


def test_confinement_is_inherited(tree: CgroupTree) -> None:
    outer, inner = tree.make("a", delegate_dmem=False), tree.make("a/b", delegate_dmem=False)
    assert tree.confinement_of(os.getpid()) is None
    tree.add(inner, os.getpid())
    assert tree.confinement_of(os.getpid()) is None
    tree.confine(outer, Confinement(["GPU-1"], {"/in": "/out"}))
    found = tree.confinement_of(os.getpid())
    assert found is not None
    assert (found.devices, found.mounts) == (["GPU-1"], {"/in": "/out"})
