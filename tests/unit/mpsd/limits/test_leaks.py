"""A reservation that nothing below explains is found where it happened, and given back without touching others."""

from pathlib import Path

import pytest

from mpsd.common.errors import TransientError
from mpsd.gpu.backend import MemoryLimits
from mpsd.gpu.model import MIB
from mpsd.limits import leaks
from mpsd.limits.leaks import Leak, Reserved, find, give_back, reserves, standing
from tests.unit.mpsd.limits.fakes import BURSTABLE, GPU, POD, REGION, Kernel

GIB = 1024 * MIB


def node(name: str, size: int, *below: Reserved, container: bool = False) -> Reserved:
    return Reserved(name, {"r": size}, below, container)


def box(size: int) -> Reserved:
    return node("c", size, container=True)


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (node("k", 0), []),
        (node("k", 5 * GIB, node("p", 5 * GIB, box(2 * GIB), box(3 * GIB))), []),
        (box(GIB), []),
        (node("k", GIB), [Leak("k", "r", GIB, 0)]),
        # The cgroups above have it in both sums: it is named once.
        (node("k", 3 * GIB, node("q", 3 * GIB, node("p", 3 * GIB, box(GIB)))), [Leak("p", "r", 3 * GIB, GIB)]),
        # Its pod is gone, too.
        (node("k", 3 * GIB, node("q", 3 * GIB, node("p", GIB, box(GIB)))), [Leak("q", "r", 3 * GIB, GIB)]),
        (node("k", 4 * GIB, node("q", GIB, node("p", GIB))), [Leak("p", "r", GIB, 0), Leak("k", "r", 4 * GIB, GIB)]),
        (node("k", GIB, node("p", 2 * GIB, box(2 * GIB))), []),  # one that starts is read half
        (node("k", MIB - 1), []),
        (Reserved("k", {}, (box(GIB),)), []),
        (Reserved("k", {"b": GIB, "a": GIB}), [Leak("k", "a", GIB, 0), Leak("k", "b", GIB, 0)]),
    ],
)
def test_leaks_of_a_tree(tree: Reserved, found: list[Leak]) -> None:
    assert list(find(tree)) == found


def test_only_what_was_seen_twice_is_a_leak() -> None:
    first, other = Leak("a", "r", 2, 1), Leak("b", "r", 2, 1)
    assert standing((), (first,)) == ()
    assert standing((first, other), (Leak("a", "r", 3, 1), Leak("a", "s", 2, 1))) == (Leak("a", "r", 3, 1),)


def test_something_is_reserved() -> None:
    assert not reserves(node("k", 0, box(0)))
    assert reserves(node("k", 0, box(1)))


class Node:
    """Two pods with a container each, 1 and 2 GiB guaranteed."""

    def __init__(self, root: Path) -> None:
        self.kernel = Kernel(root, "system.slice/x")
        self.one, self.two = f"{POD}/c1", f"{BURSTABLE}/kubepods-burstable-pod3.slice/c2"
        for count, container in enumerate((self.one, self.two), 1):
            self.kernel.set_memory_limits(GPU, self.kernel.make(container), count * GIB, 8 * GIB)

    def find(self) -> list[Leak]:
        return [leak for tree in leaks.read(self.kernel.cgroup_root) for leak in find(tree)]


def test_a_running_node_has_no_leaks(short_tmp: Path) -> None:
    node = Node(short_tmp)
    assert node.find() == []
    assert node.kernel.minimum("kubepods.slice") == 3 * GIB
    node.kernel.make(f"{node.one}/inner")  # what a container makes is its own affair
    node.kernel.make("kubepods.slice/other.slice")
    assert node.find() == []


@pytest.mark.parametrize("with_pod", [False, True])
def test_what_a_container_leaves_behind_is_given_back(short_tmp: Path, with_pod: bool) -> None:
    node = Node(short_tmp)
    node.kernel.remove(node.one)
    if with_pod:
        node.kernel.remove(POD)
    (leak,) = node.find()
    assert leak.cgroup == node.kernel.path(BURSTABLE if with_pod else POD)
    assert (leak.region, leak.lost_bytes) == (REGION, GIB)
    node.kernel.set_memory_limits(GPU, leak.cgroup, leak.reserved_bytes, 9 * GIB)
    for _ in range(2):
        give_back(node.kernel, GPU, leak)
    assert node.find() == []
    assert node.kernel.memory_limits(GPU, leak.cgroup).hard_bytes == 9 * GIB
    assert [node.kernel.minimum(c) for c in ("kubepods.slice", BURSTABLE, node.two)] == [2 * GIB] * 3


def test_a_container_that_starts_while_a_leak_is_given_back_keeps_its_part(short_tmp: Path) -> None:
    node = Node(short_tmp)
    node.kernel.remove(node.one)
    (leak,) = node.find()
    node.kernel.make(node.one)
    asked = node.kernel.memory_limits

    def start_meanwhile(uuid: str, cgroup: str) -> MemoryLimits:
        node.kernel.memory_limits = asked  # type: ignore[method-assign]
        node.kernel.set_memory_limits(GPU, node.kernel.path(node.one), 4 * GIB, None)
        return asked(uuid, cgroup)

    node.kernel.memory_limits = start_meanwhile  # type: ignore[method-assign]
    give_back(node.kernel, GPU, leak)
    assert node.find() == []
    assert [node.kernel.minimum(c) for c in (POD, BURSTABLE, "kubepods.slice")] == [4 * GIB, 6 * GIB, 6 * GIB]


def test_a_leak_that_stays_or_is_gone(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(short_tmp)
    node.kernel.remove(node.one)
    (leak,) = node.find()
    with monkeypatch.context() as patch:
        patch.setattr(node.kernel, "set_memory_limits", lambda *_: None)
        with pytest.raises(TransientError, match="it reads back as"):
            give_back(node.kernel, GPU, leak)
    node.kernel.remove(POD)
    give_back(node.kernel, GPU, leak)


def test_a_tree_without_end_is_not_read(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "MAX_CGROUPS", 5)
    with pytest.raises(TransientError, match="more than 5 cgroups"):
        Node(short_tmp).find()
