"""Something throws in every long-lived thread of both processes, which both run in this one: a node that works."""

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from deviceplugin import app as plugin_app
from deviceplugin.grants.broker import Broker
from deviceplugin.kubelet.session import Session
from deviceplugin.reconcile.keeper import Keeper
from deviceplugin.status.metricsserver import MetricsServer
from mpsd import app as mpsd_app
from mpsd.common import threads
from mpsd.common.pathhints import PathHints
from mpsd.common.threads import GuardedThread
from mpsd.config.load import load_config
from mpsd.config.watch import ConfigWatcher
from mpsd.daemon.logs.tail import LogTails
from mpsd.events.recorder import Recorder
from mpsd.gpu.prober import Prober
from mpsd.localapi.client import MpsdClient
from mpsd.localapi.server import LocalServer
from mpsd.supervision.loop import Loop
from tests.e2e.pluginnode import RESOURCES, SMALL, PluginNode
from tests.waiting import WAIT_S

LASTING = {
    *("attacher", "observer", "mpsd-watch", "kubelet-watch", "metrics", "config-watch", "localapi"),
    *("supervisor", "exit-watcher", "mps-logs", "gpu-prober", "gpu-xid", "gpu-list"),
    *("kubernetes-pods", "kubernetes-node", "kubernetes-events", "kubernetes-deleting", "endings"),
    *("nri", "nri-worker", "annotated", "events"),
}
"""By name; and those with a name of their own: a session per resource, a lane per daemon and per GPU, a prober's worker
per GPU, a thread per caller."""
MORE = """
annotations: {gpus: {include: [1]}}
nri: {socket: ROOT/nri.sock}
kubernetes: {access: ROOT/kubeconfig, nodeName: node}
"""
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: x
clusters: [{name: x, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: x, user: {token: t}}]
contexts: [{name: x, context: {cluster: x, user: x}}]
"""


class ThrownError(BaseException):
    """Passes every `except Exception`: only the guard of the thread is left."""


@contextmanager
def in_process(root: Path) -> Iterator[PluginNode]:
    """A node whose mpsd and plugin run in threads of this process."""
    (root / "kubeconfig").write_text(KUBECONFIG)
    node = PluginNode(root, 2, RESOURCES, MORE.replace("ROOT", str(root)), runtime_sockets=True)
    text = node.config.read_text().replace('metrics: {address: ""}', 'metrics: {address: "127.0.0.1:0"}')
    node.config.write_text(text)
    stop = threading.Event()
    with ExitStack() as stack:
        stack.callback(node.close)
        node.kubelet.start()
        config = load_config(str(node.config))
        parts = stack.enter_context(ExitStack())
        mpsd_app._start(config, str(node.config), parts)
        plugin = threading.Thread(target=plugin_app.serve, args=(config, str(node.config), stop))
        plugin.start()
        stack.callback(plugin.join)
        stack.callback(stop.set)
        yield node


def works(node: PluginNode, name: str) -> None:
    """A pod gets its share and its container starts, and the status can be had."""
    node.until(lambda: node.allocatable(SMALL) > 0)
    pod = node.admit_running(name)
    node.until_status(lambda s: s.allocations)
    node.kubelet.delete(pod)


def test_what_every_thread_throws_at_its_start_costs_the_node_nothing(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thrown: set[str] = set()
    real = GuardedThread.__init__

    def begin(self: GuardedThread, body: Callable[[], object], name: str) -> None:
        first = [True]

        def throws_first() -> None:
            if first:
                first.clear()
                thrown.add(name)
                raise ThrownError(name)
            body()

        real(self, throws_first, name)

    monkeypatch.setattr(GuardedThread, "__init__", begin)
    with in_process(short_tmp) as node:
        works(node, "a")
        node.until(lambda: thrown >= LASTING)
        for beginning in ("session-", "mps-", "driver-", "gpu-", "localapi-peer"):
            assert any(name.startswith(beginning) for name in thrown), (beginning, thrown)
        assert all(threads.failures()[name] for name in thrown)
        alive = {thread.name for thread in threading.enumerate()}
        assert alive >= LASTING


def test_what_a_thread_throws_in_the_middle_of_its_work_costs_the_node_nothing(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process(short_tmp) as node:
        works(node, "before")
        waits: dict[str, threading.Event] = {}
        for owner, method in (
            (Loop, "_next"),
            (Prober, "_round"),
            (LogTails, "step"),
            (ConfigWatcher, "_look"),
            (LocalServer, "_admit"),
            (MpsdClient, "watch"),
            (Broker, "wait_dirty"),
            (Keeper, "check_limits"),
            (Session, "_why_again"),
            (PathHints, "arm"),
            (MetricsServer, "_accept"),
            (Recorder, "_write"),
        ):
            name = f"{owner.__name__}.{method}"
            waits[name] = threading.Event()
            monkeypatch.setattr(owner, method, _throws_once(getattr(owner, method), name, waits[name]))
        # The listener that throws is closed with what waits on it: that may be before this connection stands.
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", _metrics_port()), timeout=WAIT_S):
            pass
        node.config.touch()
        for name, event in waits.items():
            assert event.wait(WAIT_S), name
        works(node, "after")
        assert {thread.name for thread in threading.enumerate()} >= LASTING


def _throws_once(real: Callable[..., object], name: str, thrown: threading.Event) -> Callable[..., object]:
    def throws(self: object, *arguments: object, **keywords: object) -> object:
        if not thrown.is_set():
            thrown.set()
            raise ThrownError(name)
        return real(self, *arguments, **keywords)

    return throws


def _metrics_port() -> int:
    """Of the one server that runs: the system chose it."""
    (server,) = (one for one in gc.get_objects() if type(one) is MetricsServer and one._thread.is_alive())
    return server.port
