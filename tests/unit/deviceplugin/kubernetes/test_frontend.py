"""The whole Kubernetes side as the plugin sees it; against a server it is in tests/e2e/test_kubernetes.py."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deviceplugin.kubernetes.frontend import KubernetesApi
from deviceplugin.kubernetes.model import KubernetesState, NodeReadiness, PodRef
from mpsd.config.model import KubernetesConfig
from tests.waiting import WAIT_S

READY = NodeReadiness("True", "AllDaemonsReady", "annotated pods are served", "615")


def ignore(pod: PodRef, grace_s: float) -> None:
    raise AssertionError("nothing is deleted here")


def api(config: KubernetesConfig) -> KubernetesApi:
    return KubernetesApi(config, readiness=lambda: READY, on_deleting=ignore)


def said(lost: KubernetesApi) -> str:
    """The error, once there is one."""
    for _ in range(500):
        if lost.state.error:
            break
        threading.Event().wait(0.01)
    return lost.state.error


def test_off_it_takes_everything_and_does_nothing() -> None:
    off = api(KubernetesConfig())
    threads = threading.active_count()
    off.start()
    off.wake()
    off.events.pod("ns", "p", "u", "Warning", "Refused", "text")
    assert off.pods.restart_policy("u") is None
    assert off.state == KubernetesState()
    assert threading.active_count() == threads
    off.close()


def test_off_nothing_is_imported() -> None:
    program = """
import sys
from deviceplugin.kubernetes.frontend import KubernetesApi
from mpsd.config.model import KubernetesConfig
api = KubernetesApi(KubernetesConfig(), readiness=lambda: None, on_deleting=lambda *_: None)
api.start()
api.close()
print(*sorted(n for n in sys.modules if n in ("ssl", "http.client", "urllib", "email") or ".kubernetes." in n))
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=WAIT_S)
    assert said.stdout.split() == ["deviceplugin.kubernetes.frontend", "deviceplugin.kubernetes.model"]


def test_without_credentials_it_says_so_and_goes_on(short_tmp: Path) -> None:
    lost = api(KubernetesConfig(access=str(short_tmp / "config"), node_name="n1"))
    lost.start()
    lost.events.pod("ns", "p", "u", "Warning", "Refused", "text")
    assert said(lost)
    state = lost.state
    assert (state.node, state.connected, state.last_heartbeat_at) == ("n1", False, None)
    assert state.error == f"cannot read the kubeconfig {short_tmp}/config: No such file or directory"
    lost.close()


def test_closing_before_the_start_and_twice_is_fine(short_tmp: Path) -> None:
    never = api(KubernetesConfig(access=str(short_tmp / "config"), node_name="n1"))
    never.close()
    never.close()


def test_a_node_name_that_is_none_is_in_the_state(monkeypatch: pytest.MonkeyPatch, short_tmp: Path) -> None:
    monkeypatch.setenv("NODE_NAME", "Not A Name")
    lost = api(KubernetesConfig(access=str(short_tmp / "config")))
    lost.start()
    lost.events.pod("ns", "p", "u", "Warning", "Refused", "text")
    assert said(lost)
    state = lost.state
    assert state.node == ""
    assert "NODE_NAME 'Not A Name' as the name of the node" in state.error
    assert (state.events_sent, state.events_dropped) == (0, 0)
    lost.close()
