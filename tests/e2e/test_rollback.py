"""The release before this one and this one after each other on one node, with shares held: forward, and back.

What the last release wrote is in `tests/recorded`, too, and always tested; here its code runs. It is taken from the
history of the repository, so a checkout without one skips.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.sim.kubelet.pod import AdmittedPod
from mpsd.common.errors import GpufracError
from mpsd.localapi.call import call
from tests.e2e.mpsdnode import DRIVERS, ROOT, end
from tests.e2e.pluginnode import SMALL, UNITS, PluginNode
from tests.waiting import WAIT_S

PREVIOUS = "3bca160"
"""The last commit of the release before. At each release: that of the one that is out by then."""
PACKAGES = ("cdi", "mpsd", "deviceplugin")


def why_not() -> str:
    found = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", PREVIOUS], check=False, capture_output=True)
    return "" if found.returncode == 0 else f"history: commit {PREVIOUS} is not here"


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the code of the release before."""
    if reason := why_not():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("previous")
    archive = subprocess.run(["git", "-C", ROOT, "archive", PREVIOUS, *PACKAGES], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    return str(directory)


class Node(PluginNode):
    """A node that runs either version of each process."""

    def __init__(self, root: Path, protocol: int) -> None:
        super().__init__(root, gpus=1, driver=f'"{DRIVERS[protocol]}"')
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, name: str, code: str) -> None:
        """Replaces a process by one of the code in a directory."""
        if (before := self.running.pop(name, None)) is not None:
            before.send_signal(signal.SIGTERM)
            assert before.wait(WAIT_S) == 0
        self._count += name == "plugin"
        with open(self.root / (f"plugin{self._count}.log" if name == "plugin" else "mpsd0.log"), "ab") as log:
            words = [sys.executable, "-m", "deviceplugin.cli.main", name, "--config", str(self.config)]
            environment = {**os.environ, "PYTHONPATH": code}
            made = subprocess.Popen(words, cwd=code, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.running[name] = made
        self._stack.callback(end, made)
        self.until(lambda: self.is_settled)

    @property
    def is_settled(self) -> bool:
        """mpsd is ready, the plugin is registered, and all that is granted may start."""
        with_plugin = "plugin" in self.running
        try:
            ready = all(
                gpu.daemon is not None and gpu.daemon.state == "ready" for gpu in self.mpsd.client.snapshot().gpus
            )
            found: Any = call(f"{self.root}/run/plugin.sock", "status", {}, object) if with_plugin else {}
        except GpufracError:
            return False
        if not with_plugin:
            return ready
        granted = found.get("allocations", ())
        attached = all(one["state"] == "attached" for one in granted)
        return ready and not found.get("mpsd_error") and attached and self.allocatable(SMALL) > 0

    def daemon(self) -> int | None:
        """Its PID."""
        (gpu,) = self.mpsd.client.snapshot().gpus
        return gpu.daemon.pid if gpu.daemon else None

    def keys(self) -> set[str]:
        """Of what the plugin knows to be granted."""
        found: Any = self.call("status")
        return {one["key"] for one in found.get("allocations", ())}


@pytest.fixture(params=[2, 3], ids=["protocol-2", "protocol-3"])
def node(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Node]:
    made = Node(short_tmp, request.param)
    yield made
    made.close()


def test_shares_are_kept_through_an_upgrade_and_back(node: Node, previous: str) -> None:
    pods: list[AdmittedPod] = []

    def admit(resource: str, count: int = 1) -> None:
        pods.append(node.admit_running(f"pod{len(pods)}", resource, count))
        node.until(lambda: node.is_settled)

    node.kubelet.start()
    node.run("mpsd", previous)
    node.run("plugin", previous)
    admit(SMALL)
    admit(UNITS, 3)
    daemon, first = node.daemon(), node.keys()
    steps = (
        ("mpsd", ROOT),
        ("plugin", ROOT),
        ("mpsd", previous),
        ("plugin", previous),
        ("plugin", ROOT),
        ("mpsd", ROOT),
    )
    for name, code in steps:
        before = node.keys()
        node.run(name, code)
        assert node.daemon() == daemon, (name, code)
        assert node.keys() == before == node.cdi_keys(), (name, code)
        admit(SMALL)
    assert first < node.keys()
    assert len(node.keys()) == len(pods) == 2 + len(steps)
    held = [identifier for record in node.records() for identifier in record.device_ids]
    assert len(held) == len(set(held)), "nothing is granted twice"
