"""A second instance with a config of its own that shares one directory with the first."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.pluginnode import SMALL, PluginNode
from tests.e2e.test_plugin import key
from tests.waiting import WAIT_S


@pytest.fixture
def node(short_tmp: Path) -> Iterator[PluginNode]:
    made = PluginNode(short_tmp)
    yield made
    made.close()


@pytest.mark.parametrize("shared", ["kubelet", "cdi", "state"])
def test_what_two_plugins_share_admits_one_of_them(node: PluginNode, shared: str) -> None:
    """It registers nothing, and withdraws no file of a pod that runs."""
    node.start()
    pod = node.admit_running("a")
    text = node.config.read_text()
    for name in {"run", "log", "kubelet", "cdi", "state"} - {shared}:
        text = text.replace(f"{node.root}/{name}", f"{node.root}/second/{name}")
    node.config = node.root / "second.yaml"
    node.config.write_text(text)
    second = node.start_plugin()
    node.until(lambda: "another instance runs on this node" in node.log())
    assert f"{node.root}/{shared}" in node.log()
    second.send_signal(signal.SIGTERM)
    assert second.wait(WAIT_S) == 1
    assert "stop it first" in node.log()
    assert node.cdi_keys() == {key(pod)}
    assert node.allocatable(SMALL) > 0
