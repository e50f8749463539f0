"""What happened on a node, told once each: through a refusal, an eviction, a crash, a lost GPU, and both processes
killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.sim.kubelet.pod import AdmittedPod
from deviceplugin.sim.runtime.nvidia import write_nvidia_spec
from mpsd.config.model import GIB
from mpsd.sim.model import gpu_uuid
from tests.cli import gpufrac
from tests.e2e.mpsdnode import ROOT, end, first_line
from tests.e2e.pluginnode import PluginNode, kill, plugin_node
from tests.waiting import until

BURST = "gpufrac.dev/burst"
RESOURCES = f"""
  - {{name: {BURST}, memory: {{request: 20Gi, limit: 70Gi}}, compute: {{mode: sm-sharing}}, gpus: {{include: [0]}}}}
"""
START = 'read -r go; exec "$0" -m mpsd.sim.cuda "$@"'


@pytest.fixture
def node(short_tmp: Path) -> Iterator[PluginNode]:
    with plugin_node(short_tmp, 2, RESOURCES, "", "615.71.09") as made:
        for hook in (False, True):
            write_nvidia_spec(str(short_tmp / "cdi"), [gpu_uuid(0), gpu_uuid(1)], memory_hook=hook)
        yield made


@contextlib.contextmanager
def cuda(node: PluginNode, pod: AdmittedPod, size_bytes: int) -> "Iterator[subprocess.Popen[str]]":
    """A CUDA program in a pod's container that holds so much memory."""
    environment = node.kubelet.exec_environment(pod, pod.container())
    program = subprocess.Popen(
        ["/bin/sh", "-c", START, sys.executable, "--allocate", str(size_bytes), "--hold"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        node.kubelet.exec_environment(pod, pod.container(), program.pid)
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
        yield program
    finally:
        end(program)


def events(node: PluginNode, *options: str) -> list[dict[str, Any]]:
    done = gpufrac("events", "--config", str(node.config), "-o", "json", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def kinds(node: PluginNode, *options: str) -> Counter[str]:
    return Counter(event["kind"] for event in events(node, *options))


def daemon_pid(node: PluginNode, index: int) -> int:
    daemon = node.mpsd.until_ready().gpus[index].daemon
    assert daemon is not None
    assert daemon.pid is not None
    return daemon.pid


def until_told(node: PluginNode, **counts: int) -> None:
    """Waits until so many of these kinds were told."""

    def told() -> bool:
        found = kinds(node)
        return all(found[kind] >= count for kind, count in counts.items())

    until(lambda: told() or None, lambda: listing(node))


def listing(node: PluginNode) -> str:
    return "\n".join(f"{e['time']} {e['kind']} {e['pod']} {e['reasonCode']}: {e['reason']}" for e in events(node))


def test_each_thing_that_happens_is_told_once_also_over_two_kills(node: PluginNode) -> None:
    plugin = node.start(BURST)
    node.until_status(lambda status: status.hard_limits.startswith("yes"))
    assert node.admit("greedy", BURST, 2).phase == "Failed"
    borrower, entitled = node.admit_running("a", BURST), node.admit_running("b", BURST)
    until_told(node, PodKnown=2)

    with cuda(node, borrower, 65 * GIB) as over:
        assert first_line(over).strip() == str(65 * GIB)
        node.mpsd.until_gpu(lambda gpu: [client.used_bytes for client in gpu.clients] == [65 * GIB])
        with cuda(node, entitled, 20 * GIB) as within:
            assert first_line(within).strip() == str(20 * GIB)
            until_told(node, Evicted=1)
    os.kill(daemon_pid(node, 1), signal.SIGKILL)
    until_told(node, DaemonReady=3)
    node.mpsd.driver.set_fault("lost", uuid=gpu_uuid(1))
    until_told(node, GpuLost=1)

    (evicted,) = (event for event in events(node, "--pod", "default/a") if event["kind"] == "Evicted")
    assert (evicted["count"], evicted["reasonCode"], evicted["process"]) == (1, "AboveRequest", "mpsd")
    assert "which held 65Gi" in evicted["reason"]
    assert set(kinds(node, "--gpu", "1")) >= {"DaemonCrashed", "GpuLost"}

    kill(plugin)  # first, or it would tell that mpsd is away
    os.kill(node.mpsd.call("status")["pid"], signal.SIGKILL)
    before = kinds(node)
    assert before == {
        "Started": 2,
        "Refused": 1,
        "Granted": 2,
        "PodKnown": 2,
        "PermissionGiven": 2,
        "Evicted": 1,
        "DaemonCrashed": 1,
        "DaemonReady": 3,
        "GpuLost": 1,
    }, listing(node)
    node.mpsd.start()
    node.start_plugin()
    until_told(node, Started=4)
    node.admit_running("c", BURST)
    until_told(node, PermissionGiven=3, PodKnown=3)
    ours = {"Started": 2, "Granted": 1, "PodKnown": 1, "PermissionGiven": 1}
    # A GPU that was lost before mpsd started is none that the driver names.
    of_lost = {"DaemonStopped", "TroubleBegun", "TroubleEnded"}
    new = kinds(node) - before
    assert {kind: count for kind, count in new.items() if kind not in of_lost} == ours, listing(node)
    silent = [event["reasonCode"] for event in events(node) if event["kind"] == "Started"]
    assert silent == ["", "", "EndedInSilence", "EndedInSilence"]
