"""The host against a control daemon that answers: the emulator in both protocols, one daemon with two GPUs."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mpsd.common import processes
from mpsd.common.errors import TransientError
from mpsd.config.model import GIB, MpsConfig, NamespaceMount
from mpsd.daemon.host import LocalHost, ProtocolChoice
from mpsd.daemon.namespaces import Namespace
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.plan import DAEMON_MARKER, DaemonSpec
from mpsd.daemon.state import StateFile
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.mps.faults import set_fault
from mpsd.sim.switches import set_switch
from tests.contract.mps import ClientProcess, alive, emulator
from tests.mpspaths import mount_directory, own_link
from tests.reasons import messages
from tests.waiting import until

DRIVERS = {2: "580.95.05", 3: "615.71.09"}
A, B = Namespace("a", 8 * GIB, 50), Namespace("b", 8 * GIB + GIB // 2)


OTHERWISE = {
    "error-stream": "stdout",
    "pid-file-3": "no",
    "limit-display": "as-set",
    "namespace-columns": "7",
    "client-list-layout": "documented",
    "csv-quotes": "no",
    "server-start": "first-client",
    "quit-blocks": "yes",
    "quit-with-clients": "force",
    "directories-at-exit": "stay",
    "without-context-sharing": "refuse",
}
"""What is unknown of protocol 3, the other way round from the emulator's choice."""


class Node:
    """`spec` is that of a daemon which owns both GPUs, the second one first."""

    def __init__(self, root: Path, protocol: int, mount: NamespaceMount = NamespaceMount.DAEMON) -> None:
        self.mps = emulator(root, driver=DRIVERS[protocol])
        config = MpsConfig(
            binary=self.mps.binary, run_root=f"{root}/run", log_root=f"{root}/log", namespace_mount=mount
        )
        self.dirs = daemon_dirs(config, "pair0")
        gpus = tuple(gpu.uuid for gpu in reversed(SimulatedDriver(f"{root}/sim").gpus()))
        environment = {
            "PATH": "/usr/bin:/bin",
            "CUDA_MPS_PIPE_DIRECTORY": self.dirs.pipe,
            "CUDA_MPS_LOG_DIRECTORY": self.dirs.log,
            "CUDA_MPS_PROTOCOL_VERSION": str(protocol),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            DAEMON_MARKER: "pair0",
        }
        namespaces = (A,) if protocol == 3 else ()
        self.spec = DaemonSpec("pair0", gpus, protocol, 8 * GIB, self.dirs, tuple(environment.items()))
        self.spec = self.wanting(*namespaces)
        self.host = LocalHost(config, StateFile(f"{root}/mpsd.json", processes.boot_id()))
        self.driver = DRIVERS[protocol]

    def wanting(self, *namespaces: Namespace) -> DaemonSpec:
        """Its spec with these, as a plan would have it."""
        links = tuple(own_link(self.dirs, n.name) for n in namespaces) if self.dirs.linked else ()
        return replace(self.spec, namespaces=namespaces, links=links, homes=(self.dirs.links,))

    def attached(self, names: set[str]) -> set[str]:
        """What is attached where these are."""
        return names | {own_link(self.dirs, name).directory for name in names if self.dirs.linked}

    def pipe(self, namespace: Namespace) -> str:
        """What a client of the allocation mounts."""
        return mount_directory(self.dirs, namespace.name) if self.spec.protocol == 3 else self.dirs.pipe

    def allocate(self, size: str, gpu: int = 0, namespace: Namespace = A) -> str:
        return self.mps.allocate(size, CUDA_MPS_PIPE_DIRECTORY=self.pipe(namespace), CUDA_VISIBLE_DEVICES=str(gpu))

    def hold(self, namespace: Namespace = A) -> ClientProcess:
        return self.mps.hold("--allocate", "1Gi", CUDA_MPS_PIPE_DIRECTORY=self.pipe(namespace))

    def fault(self, name: str, value: str = "") -> None:
        set_fault(f"{self.mps.root}/sim", name, value, self.dirs.pipe)

    def probe_error(self) -> str:
        try:
            self.host.probe(self.spec, servers=True)
        except TransientError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self.mps.close()
        self.host.kill(self.spec, None, ())


@pytest.fixture(params=[2, 3])
def node(short_tmp: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    node = Node(short_tmp, request.param)
    yield node
    node.close()


@pytest.fixture(params=list(NamespaceMount))
def node3(short_tmp: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    node = Node(short_tmp, 3, request.param)
    yield node
    node.close()


def test_a_limit_holds_on_each_gpu(node: Node) -> None:
    assert node.host.protocol(node.driver) == ProtocolChoice(node.spec.protocol)
    identity = node.host.spawn(node.spec).identity
    assert (identity.protocol, identity.gpus) == (node.spec.protocol, node.spec.gpus)
    for _ in range(2):  # before and while a server runs
        configured = node.host.configure(node.spec)
        assert (configured.note, configured.refused) == (None, {})
        node.host.probe(node.spec, servers=True)
        for gpu in range(2):
            assert node.allocate("8Gi", gpu) == str(8 * GIB)
            assert node.allocate("9Gi", gpu) == "CUDA_ERROR_OUT_OF_MEMORY"
    adopted = node.host.spawn(node.spec)
    assert (adopted.identity, adopted.adopted) == (identity, True)


def test_a_probe_sees_a_fault(node: Node) -> None:
    node.host.spawn(node.spec)
    node.host.configure(node.spec)
    client = node.hold()
    node.host.probe(node.spec, servers=True)
    os.kill(client.pid, signal.SIGSTOP)  # one that does not leave when it sees the error
    node.fault("fault-state")
    until(node.probe_error, "the fault")
    assert "a client's fault keeps new ones out" in node.probe_error()
    client.close()
    until(lambda: not node.probe_error(), "the server to be well again")


def test_a_client_is_terminated_and_its_neighbour_is_not(node: Node) -> None:
    node.host.spawn(node.spec)
    node.host.configure(node.spec)
    one, other = node.hold(), node.hold()
    assert set(node.host.clients(node.spec).clients) == {one.pid, other.pid}
    node.host.terminate_client(node.spec, one.pid)
    assert one.line() == "CUDA_ERROR_MPS_CLIENT_TERMINATED"
    assert other.end() == 0
    with pytest.raises(TransientError):
        node.host.terminate_client(node.spec, other.pid)


def test_quit_ends_daemon_and_servers_and_kill_what_is_left(node: Node) -> None:
    for _ in range(2):
        identity = node.host.spawn(node.spec).identity
        node.host.configure(node.spec)
        assert node.allocate("1Gi") == str(GIB)
        (server,) = node.host.clients(node.spec).servers
        node.host.quit(node.spec, 10.0)
        until(lambda: not alive(identity.pid) and not alive(server), "the end")  # noqa: B023
        assert node.host.find(node.spec) is None
        with pytest.raises(TransientError, match="MPS control daemon"):
            node.host.clients(node.spec)
    identity = node.host.spawn(node.spec).identity
    node.host.configure(node.spec)
    assert node.allocate("1Gi") == str(GIB)
    (server,) = node.host.clients(node.spec).servers
    node.host.kill(node.spec, identity, ())
    assert not alive(identity.pid)
    assert not alive(server)


def test_namespaces_follow_what_is_wanted_and_never_under_a_client(node3: Node) -> None:
    node3.host.spawn(node3.spec)
    both = node3.wanting(A, B)
    assert node3.host.configure(node3.spec).attached == node3.attached({"a"})
    assert node3.host.configure(both).attached == node3.attached({"a", "b"})
    assert node3.allocate("9Gi", namespace=B) == "CUDA_ERROR_OUT_OF_MEMORY"
    client = node3.hold(B)
    smaller = node3.wanting(A, replace(B, limit_bytes=GIB))
    configured = node3.host.configure(smaller)
    assert configured.attached == node3.attached({"a"})
    assert "can't be changed, as a rule because a client of it lives" in configured.refused["b"].message
    node3.host.configure(node3.spec)  # unwanted, and a client is in it
    assert client.end() == 0
    until(lambda: node3.host.configure(smaller).attached == node3.attached({"a", "b"}), "the smaller limit")
    assert node3.allocate("2Gi", namespace=B) == "CUDA_ERROR_OUT_OF_MEMORY"
    node3.host.configure(node3.spec)
    assert messages(node3.host.probe(smaller, servers=False)) == {"b": "it is not there"}


def test_namespaces_come_back_with_another_daemon(node3: Node) -> None:
    both = node3.wanting(A, B)
    directory = None
    for _ in range(2):
        identity = node3.host.spawn(both).identity
        assert node3.host.configure(both).attached == node3.attached({"a", "b"})
        assert node3.host.probe(both, servers=False) == {}
        assert node3.allocate("8Gi") == str(8 * GIB)
        mounted = os.stat(mount_directory(node3.dirs, "a")).st_ino
        if node3.dirs.linked:
            assert mounted == (directory or mounted)
        directory = mounted
        node3.host.kill(both, identity, ())


def test_every_unknown_may_be_the_other_way_round(node3: Node) -> None:
    for name, value in OTHERWISE.items():
        set_switch(f"{node3.mps.root}/sim", name, value)
    both = node3.wanting(A, B)
    for _ in range(2):
        identity = node3.host.spawn(node3.spec).identity
        found = node3.host.find(node3.spec)
        assert found is not None
        assert found.identity == identity
        assert node3.host.configure(both).attached == node3.attached({"a", "b"})
        one, other = node3.hold(), node3.hold(B)
        node3.host.probe(both, servers=True)
        assert set(node3.host.clients(both).clients) == {one.pid, other.pid}
        assert node3.allocate("9Gi", namespace=B) == "CUDA_ERROR_OUT_OF_MEMORY"
        smaller = node3.wanting(replace(A, limit_bytes=GIB), B)
        assert "can't be changed" in node3.host.configure(smaller).refused["a"].message
        node3.host.terminate_client(both, one.pid)
        node3.host.quit(both, 10.0)
        until(lambda: not alive(identity.pid), "the end")  # noqa: B023


def test_a_server_that_vanished_is_told(node3: Node) -> None:
    node3.host.spawn(node3.spec)
    node3.host.configure(node3.spec)
    node3.fault("server-vanishes")
    until(node3.probe_error, "the loss")
    assert node3.probe_error() == "its MPS server is gone"
    with pytest.raises(TransientError):
        node3.host.configure(node3.spec)
