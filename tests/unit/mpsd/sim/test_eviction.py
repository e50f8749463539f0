"""Who has to go when a GPU is full: NVIDIA MPS documentation r615, 'Memory Partitioning', with containers by hand."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.config.model import GIB
from mpsd.sim.cgroups import Confinement
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.model import gpu_uuid
from mpsd.sim.mps.faults import set_fault
from mpsd.sim.switches import set_switch
from tests.contract.mps import DRIVER_3, ClientProcess, Mps, emulator
from tests.waiting import WAIT_S, until

GPU = gpu_uuid(0)
CONFIG = """
[features.context-share]
default_socket = "off"
[servers.s.namespaces.n]
pinned_memory_limit = "75G"
[servers.s.namespaces.m]
"""
NAMESPACE, OTHER, MAIN = ("s", "n"), ("s", "m"), ()
EVICTED, REFUSED = "CUDA_ERROR_MPS_CLIENT_TERMINATED", "CUDA_ERROR_OUT_OF_MEMORY"


class Node(Mps):
    """One GPU with 79 GiB to have, one daemon of protocol 3."""

    @property
    def simulation(self) -> str:
        return str(self.root / "sim")

    def container(self, name: str, soft: int, hard: int) -> str:
        """Its cgroup; limits in GiB."""
        driver = SimulatedDriver(self.simulation)
        cgroup = driver.make_cgroup(f"kubepods.slice/kubepods-podx.slice/{name}")
        driver.cgroups.confine(cgroup, Confinement([GPU], {str(self.pipe): str(self.pipe)}))
        (gpu,) = driver.gpus()
        driver.set_memory_limits(gpu, cgroup, soft * GIB, hard * GIB)
        return cgroup

    def runs(self, cgroup: str, size: int, at: tuple[str, ...]) -> ClientProcess:
        """A client that asked for this many GiB, and its answer in `line`."""
        tree = SimulatedDriver(self.simulation).cgroups
        tree.add(cgroup, os.getpid())  # a child is where its parent is, until it is listed itself
        client = self.hold("--info", "--allocate", f"{size}Gi", at=at, await_line=False)
        try:
            assert json.loads(client.line())["mps"] == bool(at)
        finally:
            tree.add(tree.root, os.getpid())
        return client


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    mps = emulator(short_tmp, gpus=1, driver=DRIVER_3)
    node = Node(mps.root, mps.binary, mps.client, mps.environment)
    node.environment["CUDA_MPS_PROTOCOL_VERSION"] = "3"
    node.start3(CONFIG, "-m")
    node.wait_ready()
    yield node
    node.close()


def granted(client: ClientProcess, size: int) -> bool:
    return client.line() == str(size * GIB)


def counts(node: Node) -> str:
    lines = [line for line in node.control_log().splitlines() if f"[memacct] device {GPU}: " in line]
    return lines[-1].rpartition(f"{GPU}: ")[2] if lines else ""


@pytest.mark.parametrize(
    ("victim", "requester"), [(NAMESPACE, OTHER), (NAMESPACE, NAMESPACE), (MAIN, MAIN), (MAIN, OTHER), (OTHER, MAIN)]
)
def test_who_is_over_its_soft_limit_goes_for_who_is_not(
    node: Node, victim: tuple[str, ...], requester: tuple[str, ...]
) -> None:
    borrower = node.runs(node.container("a", 20, 70), 60, victim)
    assert granted(borrower, 60)
    owner = node.runs(node.container("b", 30, 40), 30, requester)
    assert granted(owner, 30)
    assert borrower.line() == EVICTED
    assert borrower.process.wait(WAIT_S) == 1
    assert counts(node) == "requests 1, evictions 1, no-victim 0"
    owner.end()


def test_hard_limits_are_held_before_anybody_is_evicted(node: Node) -> None:
    borrower = node.runs(node.container("a", 20, 70), 60, MAIN)
    assert granted(borrower, 60)
    assert node.runs(node.container("b", 30, 40), 41, MAIN).line() == REFUSED
    assert counts(node) == ""
    assert borrower.end() == 0


def test_who_would_be_over_its_own_soft_limit_gets_nothing(node: Node) -> None:
    borrower = node.runs(node.container("a", 20, 70), 60, MAIN)
    assert granted(borrower, 60)
    assert node.runs(node.container("b", 30, 40), 31, MAIN).line() == REFUSED
    assert counts(node) == ""
    assert borrower.end() == 0


def test_nobody_within_its_soft_limit_is_evicted(node: Node) -> None:
    holder = node.runs(node.container("a", 60, 70), 60, NAMESPACE)
    assert granted(holder, 60)
    assert node.runs(node.container("b", 30, 40), 30, OTHER).line() == REFUSED
    assert counts(node) == "requests 1, evictions 0, no-victim 1"
    assert holder.end() == 0


@pytest.mark.parametrize(("order", "survivor"), [("most-over", 1), ("newest", 0)])
def test_the_order_of_victims(node: Node, order: str, survivor: int) -> None:
    set_switch(node.simulation, "eviction-order", order)
    clients = [
        node.runs(node.container("a", 10, 70), 40, NAMESPACE),
        node.runs(node.container("c", 10, 70), 30, MAIN),
    ]
    assert [granted(client, size) for client, size in zip(clients, (40, 30), strict=True)] == [True, True]
    owner = node.runs(node.container("b", 20, 40), 20, OTHER)
    assert granted(owner, 20)
    assert clients[1 - survivor].line() == EVICTED
    assert clients[survivor].end() == 0


def test_as_many_go_as_it_takes(node: Node) -> None:
    clients = [node.runs(node.container(name, 5, 70), 25, MAIN) for name in "acd"]
    assert all(granted(client, 25) for client in clients)
    owner = node.runs(node.container("b", 50, 50), 50, OTHER)
    assert granted(owner, 50)
    assert [client.line() for client in clients[1:]] == [EVICTED, EVICTED]
    assert clients[0].end() == 0


@pytest.mark.parametrize("why", ["main socket", "feature", "pid zero"])
def test_who_is_not_registered_neither_asks_nor_goes(node: Node, why: str) -> None:
    if why == "main socket":
        set_switch(node.simulation, "memacct-main-socket", "no")
    elif why == "feature":
        node.tell("feature", "disable", "memacct")
    else:
        set_fault(node.simulation, "pid-zero")
    borrower = node.runs(node.container("a", 20, 70), 60, MAIN)
    assert granted(borrower, 60)
    for at in (MAIN, NAMESPACE):
        assert node.runs(node.container("b", 30, 40), 30, at).line() == REFUSED
    assert ("failed to register client pid 0" in node.control_log()) == (why == "pid zero")
    assert borrower.end() == 0


def test_a_registered_client_goes_on_when_its_daemon_ends(node: Node) -> None:
    client = node.runs(node.container("a", 20, 70), 60, MAIN)
    assert granted(client, 60)
    until(lambda: f"[memacct] registered client pid {client.pid}" in node.control_log(), "the registration")
    assert node.rows("client", "list") == []
    node.tell("-q")
    until(lambda: not (node.pipe / "control").exists(), "the daemon's end")
    assert client.process.poll() is None
    assert client.end() == 0


def test_a_namespaces_limit_and_the_cgroups_both_hold(node: Node) -> None:
    for name, hard, size, line in (("a", 78, 76, REFUSED), ("b", 40, 41, REFUSED), ("c", 40, 40, str(40 * GIB))):
        client = node.runs(node.container(name, 0, hard), size, NAMESPACE)
        assert client.line() == line
        client.end()
