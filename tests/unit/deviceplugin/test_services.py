"""What runs beside the kubelet's servicer starts in order, ends in the reverse order, and leaves nothing behind."""

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdi.scan import scan
from deviceplugin.grants import lastknown
from deviceplugin.grants.broker import Broker
from deviceplugin.grants.drains import Drains
from deviceplugin.grants.ledger import Ledger
from deviceplugin.kubelet.places import kubelet_places
from deviceplugin.kubelet.sessions import Sessions
from deviceplugin.kubelet.watch import DirectoryWatch
from deviceplugin.kubernetes.frontend import KubernetesApi
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.reconcile.attacher import Attacher
from deviceplugin.reconcile.gpudevices import Choice, DeviceChooser
from deviceplugin.reconcile.keeper import Keeper
from deviceplugin.reconcile.mpsdwatch import MpsdWatch
from deviceplugin.services import Services
from deviceplugin.status.metricsserver import MetricsServer
from mpsd.common.errors import GpufracError
from mpsd.config.load import load_config
from mpsd.config.watch import ConfigWatcher
from mpsd.events.recorder import Recorder
from mpsd.localapi.call import call
from mpsd.localapi.health import Health
from mpsd.localapi.reasons import HealthCode
from mpsd.localapi.server import LocalServer
from tests.waiting import WAIT_S, until

CONFIG = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
backend: simulated
resources: [{name: gpufrac.dev/gpu-8gi, memory: {request: 8Gi}, compute: {mode: sm-sharing}}]
mps: {runRoot: ROOT/run, logRoot: ROOT/log}
cdi: {directory: ROOT/cdi}
kubelet: {root: ROOT/kubelet, devicePlugins: ROOT/plugins}
stateRoot: ROOT/state
metrics: {address: "127.0.0.1:0"}
"""
PARTS = (MpsdWatch, Keeper, LocalServer, DirectoryWatch, ConfigWatcher, KubernetesApi, MetricsServer)
"""In the order they start."""


class Node:
    """The services of a plugin whose mpsd and kubelet are away."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("run", "cdi", "plugins", "kubelet/pods", "state/plugin"):
            (root / name).mkdir(parents=True)
        path = root / "config.yaml"
        path.write_text(CONFIG.replace("ROOT", str(root)))
        config = load_config(str(path))
        self.socket = config.plugin_socket
        self.ledger = Ledger(str(root / "state/plugin/allocations"))
        self.broker = Broker(config, self.ledger, Drains(str(root / "drains.json")))
        self.sessions = Sessions(kubelet_places(config), self.broker, lambda *, release=True: None)
        self.recorder = Recorder(str(root / "state"), "plugin")
        devices = DeviceChooser(self.broker, scan, Choice(""), lambda: None)
        self.said: list[tuple[str, str]] = []
        for part in PARTS:
            for verb in ("start", "close"):
                monkeypatch.setattr(part, verb, self._noted(part, verb, getattr(part, verb)))
        self.services = Services(
            str(path),
            self.broker,
            self.sessions,
            devices,
            str(root / "node.json"),
            lastknown.LastKnown(),
            self.recorder,
        )

    def _noted(self, part: type, verb: str, real: Callable[[object], None]) -> Callable[[object], None]:
        def call(this: object) -> None:
            self.said.append((verb, part.__name__))
            real(this)

        return call

    def of(self, verb: str) -> list[str]:
        return [name for said, name in self.said if said == verb]

    def close(self) -> None:
        self.services.close()
        self.sessions.close()
        self.broker.close()
        self.recorder.close()
        self.ledger.close()


@pytest.fixture
def node(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(short_tmp, monkeypatch)
    yield made
    made.close()


def test_parts_start_in_order_and_end_in_the_reverse_order(node: Node) -> None:
    node.services.start()
    assert node.of("start") == [part.__name__ for part in PARTS]
    status = call(node.socket, "status", {}, dict)
    assert status["kubeletError"]
    node.services.close()
    first, *others = node.of("close")
    assert first == MpsdWatch.__name__, "it ends with its call, so it is told first"
    assert others == [part.__name__ for part in reversed(PARTS)]
    with pytest.raises(GpufracError):
        call(node.socket, "status", {}, dict)
    node.said.clear()


def test_health_is_told_over_the_socket_and_over_http(node: Node) -> None:
    """The keeper's threads go round, and what is away keeps it from serving."""
    node.services.start()
    health = call(node.socket, "health", {}, Health)
    assert not health.not_live
    assert OfferCode.MPSD_AWAY in {why.code for why in health.not_ready}
    server = node.services._metrics
    assert server is not None
    until(lambda: server.port)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz") as answer:
        assert answer.read() == b"ok\n"
    with pytest.raises(urllib.error.HTTPError) as unready:
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/readyz")
    with unready.value as answer:
        assert answer.code == 503
        assert b"MpsdAway: " in answer.read()


def test_a_keeper_that_hangs_is_not_live(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, inside = threading.Event(), threading.Event()

    def hang(_: object) -> float:
        inside.set()
        assert gate.wait(WAIT_S)
        return 0.01

    monkeypatch.setattr(Attacher, "round", hang)
    node.services.start()
    assert inside.wait(WAIT_S)
    attaching, _ = node.services._keeper.pulses
    attaching.most_s = 0.01
    stuck = until(lambda: call(node.socket, "health", {}, Health).not_live)
    attaching.most_s = WAIT_S
    assert [why.code for why in stuck] == [HealthCode.LOOP_STUCK]
    assert "`attacher`" in stuck[0].message
    before_s = attaching._beat_s
    gate.set()
    until(lambda: attaching._beat_s > before_s)


def test_the_observer_beats_with_each_round(node: Node) -> None:
    node.services.start()
    _, observing = node.services._keeper.pulses
    before_s = observing._beat_s
    node.services._keeper.look()
    until(lambda: observing._beat_s > before_s)


def test_what_had_started_ends_when_a_part_can_not_start(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object) -> None:
        raise OSError("no more watches")

    monkeypatch.setattr(DirectoryWatch, "start", fails)
    with pytest.raises(OSError, match="no more watches"):
        node.services.start()
    assert node.of("start") == ["MpsdWatch", "Keeper", "LocalServer"]
    node.services.close()
    assert node.of("close") == ["MpsdWatch", "DirectoryWatch", "LocalServer", "Keeper", "MpsdWatch"]
