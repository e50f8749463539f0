"""The scene that is recorded of each version and played again by the next: a simulated node with shares held, a GPU
drained and a new config refused, and every JSON that gpufrac gives of it."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deviceplugin.sim.node.node import SimulatedNode
from deviceplugin.sim.objects.manifests import LoadedPod, load_manifests
from mpsd.config.load import load_config
from mpsd.config.model import NodeConfig
from mpsd.localapi.call import call
from mpsd.sim.cuda.program import cuda_command
from tests.lines import next_line
from tests.waiting import WAIT_S, until

RECORDED = Path(__file__).parent
SCENES = ("protocol2", "protocol3")
ROOT = "{root}"
"""Stands for the node's directory in recorded files."""
BOOT = "{boot}"
"""Stands for the boot's ID."""
DRAINED = "1"
"""Index of the GPU that is drained while a share of it is held."""
COMMANDS = ("status", "gpus", "resources", "allocations", "daemons", "clients")


def config_of(scene: str) -> NodeConfig:
    return load_config(str(RECORDED / scene / "config.yaml"))


def pods_of(scene: str) -> list[LoadedPod]:
    return [item for item in load_manifests(str(RECORDED / scene / "pods.yaml")) if isinstance(item, LoadedPod)]


def gpufrac(node: SimulatedNode, *arguments: str) -> Any:
    """What a command prints with `-o json`, asked of a node."""
    command = [sys.executable, "-m", "deviceplugin.cli.main", *arguments, "--run-root", f"{node.directory}/run"]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def refused_config(node: SimulatedNode) -> Iterator[None]:
    """Both processes were given a config that they refuse, and go on with the one before."""
    path = Path(node.config_path)
    text = path.read_text()
    path.write_text("apiVersion: gpufrac.dev/v1\nkind: NodeConfig\nresources: []\nmistyped: 1\n")
    try:
        until(lambda: _answer(node, "mpsd", "snapshot")["config_error"])
        until(lambda: _answer(node, "plugin", "status")["configError"])
        yield
    finally:
        path.write_text(text)


@contextlib.contextmanager
def cuda_process(node: SimulatedNode, pod: str) -> Iterator[None]:
    """A CUDA process runs in container `main` of a pod, and both processes know it."""
    environment = node.client_environment("default", pod, "main")
    command = [*cuda_command(), "--simulation", node.simulation_directory, "--allocate", "1Gi", "--hold"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            next_line(process.stdout, WAIT_S)
            until(lambda: any(gpu["clients"] for gpu in _answer(node, "mpsd", "snapshot")["gpus"]))
            yield
        finally:
            process.kill()


def answers(node: SimulatedNode) -> dict[str, Any]:
    """What the local sockets answer, by process."""
    return {
        "mpsd": {method: _answer(node, "mpsd", method) for method in ("snapshot", "desired", "status")},
        "plugin": {method: _answer(node, "plugin", method) for method in ("status", "allocations", "clients")},
    }


def outputs(node: SimulatedNode) -> dict[str, Any]:
    """What each command prints with `-o json`, by command."""
    return {command: gpufrac(node, command) for command in COMMANDS}


def _answer(node: SimulatedNode, process: str, method: str) -> Any:
    return call(f"{node.directory}/run/{process}.sock", method, {}, object)
