"""A node that had everything, and has nothing of it after an uninstall."""

import signal
from pathlib import Path

from tests.cli import gpufrac
from tests.e2e.pluginnode import SMALL, PluginNode, plugin_node
from tests.waiting import WAIT_S


def listing(node: PluginNode) -> set[str]:
    """All there is, but for what the kubelet and the test write."""
    paths = (path.relative_to(node.root).as_posix() for path in node.root.rglob("*"))
    return {path for path in paths if not path.startswith("kubelet") and not path.endswith(".log")} | {
        path.relative_to(node.root).as_posix()
        for path in node.device_plugins.glob("*")
        if path.name not in ("kubelet.sock", "kubelet_internal_checkpoint")
    }


def uninstall(node: PluginNode) -> tuple[int, str]:
    done = gpufrac("uninstall", "node", "--yes", "--config", str(node.config))
    return done.returncode, done.stdout + done.stderr


def test_a_node_is_as_it_was_found(short_tmp: Path) -> None:
    with plugin_node(short_tmp, gpus=1) as node:
        before = listing(node)
        node.kubelet.start()
        mpsd = node.mpsd.start()
        node.mpsd.until_ready()
        plugin = node.start_plugin()
        node.until(lambda: node.allocatable(SMALL) > 0)
        pod = node.admit_running("holder", SMALL)
        code, said = uninstall(node)
        assert (code, "gpufrac plugin runs" in said) == (1, True)

        plugin.send_signal(signal.SIGTERM)
        assert plugin.wait(WAIT_S) == 0
        code, said = uninstall(node)
        assert (code, "is held: container main of the pod" in said) == (1, True), "a pod keeps what it has"

        node.kubelet.delete(pod)
        code, said = uninstall(node)
        assert (code, "mpsd runs still: stop it" in said) == (1, True)
        assert node.mpsd.mps_processes() == []

        mpsd.send_signal(signal.SIGTERM)
        assert mpsd.wait(WAIT_S) == 0
        code, said = uninstall(node)
        assert (code, "Nothing of gpufrac is left" in said) == (0, True), said
        assert listing(node) == before
