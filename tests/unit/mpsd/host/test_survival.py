"""Decisions on a made-up /proc; with the real one in tests/e2e/test_outlive.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from mpsd.host import launcher
from mpsd.host.survival import INITIAL_CGROUP, INITIAL_MOUNT, INITIAL_PID, Survival, host_mount_needed, probe

POD_MOUNT, HOST_MOUNT, POD_CGROUP, POD_PID = "mnt:[4026532501]", "mnt:[4026531841]", "cgroup:[4026532502]", "pid:[9]"


class Ended(NamedTuple):
    returncode: int = 0
    output: bytes = b""


class Node:
    """A /proc with mpsd and init, a cgroup v2 tree that the host and (at `view`) mpsd see."""

    def __init__(self, root: Path) -> None:
        self.root, self.proc, self.tree = root, root / "proc", root / "tree"
        self.ended = Ended()
        self.ran: list[Sequence[str]] = []
        self.tree.mkdir(parents=True)
        for pid in ("self", "1"):
            (self.proc / pid / "ns").mkdir(parents=True)
        (self.proc / "1" / "root").symlink_to("/")
        self.init(HOST_MOUNT)
        self.mpsd(HOST_MOUNT)

    def init(self, mount: str) -> None:
        (self.proc / "1" / "ns" / "mnt").symlink_to(mount)
        (self.proc / "1" / "mountinfo").write_text(f"1 2 0:1 / {self.tree} rw - cgroup2 cgroup2 rw\n")

    def mpsd(self, mount: str, cgroup: str = INITIAL_CGROUP, pid: str = INITIAL_PID, path: str = "/kubepods/x") -> None:
        for name, link in (("mnt", mount), ("cgroup", cgroup), ("pid", pid)):
            (self.proc / "self" / "ns" / name).unlink(missing_ok=True)
            (self.proc / "self" / "ns" / name).symlink_to(link)
        (self.proc / "self" / "cgroup").write_text(f"0::{path}\n")
        (self.proc / "self" / "mountinfo").write_text(f"1 2 0:1 / {self.tree} rw - cgroup2 cgroup2 rw\n")

    def probe(self, *directories: str) -> Survival:
        return probe(self._run, directories, proc=str(self.proc))

    def _run(self, arguments: Sequence[str]) -> Ended:
        self.ran.append(arguments)
        return self.ended


@pytest.fixture
def node(short_tmp: Path) -> Node:
    return Node(short_tmp)


@pytest.mark.parametrize(
    ("self_ns", "init_ns", "init_is_host", "needed"),
    [
        (HOST_MOUNT, HOST_MOUNT, True, False),
        (POD_MOUNT, HOST_MOUNT, True, True),
        (POD_MOUNT, POD_MOUNT, False, True),  # PID 1 is of our own container
        (POD_MOUNT, "", True, True),
        ("", "", True, True),
        (INITIAL_MOUNT, "", True, False),
    ],
)
def test_whether_the_hosts_mount_namespace_has_to_be_entered(
    self_ns: str, init_ns: str, init_is_host: bool, needed: bool
) -> None:
    assert host_mount_needed(self_ns, init_ns, init_is_host) == needed


def test_a_unit_on_the_host_needs_cgroups_only(node: Node) -> None:
    assert node.probe() == Survival(places=(f"{node.tree}/gpufrac",))
    assert any(word.startswith(f"{node.tree}/gpufrac/probe-") for word in node.ran[0])


def test_in_the_top_cgroup_of_the_host_nothing_is_needed(node: Node) -> None:
    node.mpsd(HOST_MOUNT, path="/")
    assert node.probe() == Survival()


def test_a_pod_goes_through_the_hosts_view_and_namespaces(node: Node) -> None:
    node.mpsd(POD_MOUNT, POD_CGROUP, path="/")
    (node.proc / "self" / "mountinfo").write_text("")
    init = f"{node.proc}/1"
    assert node.probe(str(node.root)) == Survival(
        places=(f"{init}/root{node.tree}/gpufrac",),
        namespaces=(f"{init}/ns/cgroup", f"{init}/ns/mnt"),
        host_root=f"{init}/root",
    )


def not_hosts_directory(node: Node) -> str:
    node.mpsd(POD_MOUNT)
    (node.proc / "1" / "root").unlink()
    (node.proc / "1" / "root").symlink_to(node.proc)
    return str(node.root)


def own_pid_namespace(node: Node) -> str:
    node.mpsd(POD_MOUNT, pid=POD_PID)
    return ""


def private_tree(node: Node) -> str:
    node.mpsd(HOST_MOUNT, POD_CGROUP)
    return ""


def tree_in_the_way(node: Node) -> str:
    (node.tree / "gpufrac").write_text("")
    return ""


def unreadable(node: Node) -> str:
    (node.proc / "self" / "cgroup").unlink()
    return ""


def launcher_refused(node: Node) -> str:
    node.ended = Ended(launcher.JOIN, b"cannot join the cgroup /x: Operation not permitted\n")
    return ""


def launcher_died(node: Node) -> str:
    node.ended = Ended(-9, b"")
    return ""


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (not_hosts_directory, "cannot start daemons on the host: {root} in mpsd's container is not the host's: "),
        (own_pid_namespace, "cannot reach the host from mpsd's container: it has a PID namespace of its own: "),
        (private_tree, "cannot create cgroups outside of mpsd's own: {root}/tree does not show the top of its cgroup"),
        (tree_in_the_way, "cannot create the cgroup {root}/tree/gpufrac/probe-"),
        (unreadable, "cannot read {root}/proc/self/cgroup: No such file or directory: run mpsd as root"),
        (launcher_refused, "cannot join the cgroup /x: Operation not permitted: run mpsd as root"),
        (launcher_died, "cannot leave mpsd's cgroups: exit -9"),
    ],
)
def test_what_is_missing_is_stated_and_nothing_is_left(node: Node, fault, text: str) -> None:  # type: ignore[no-untyped-def]
    directory = fault(node)
    found = node.probe(*([directory] if directory else []))
    assert found.reason.startswith(text.format(root=node.root))
    assert found.reason.endswith("; until then its daemons end with it")
    assert found == Survival(found.reason)
    assert fault is tree_in_the_way or not (node.tree / "gpufrac").exists()
