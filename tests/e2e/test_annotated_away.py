"""Annotated containers that start while the plugin is away: told of, counted, and stopped through the container runtime
where their pod makes them again (`annotations.whenAway: stop`)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.annotated.absence import STARTED_ALONE
from deviceplugin.sim.kubelet.pod import AdmittedPod
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec
from deviceplugin.sim.runtime.container import State
from deviceplugin.sim.runtime.nvidia import write_nvidia_spec
from deviceplugin.status.model import PluginStatus
from mpsd.sim.model import gpu_uuid
from tests.apiserver import StubApiServer
from tests.e2e.pluginnode import PluginNode, kill
from tests.waiting import WAIT_S

SHARE = "gpufrac.dev/gpu-8gi"
SHARES = f"\n  - {{name: {SHARE}, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}}}\n"
MORE = """
annotations: {{gpus: {{include: all}}, share: true, trust: any, whenAway: stop, criSocket: {root}/cri.sock}}
nri: {{socket: {root}/nri.sock}}
kubernetes: {{access: {root}/kubeconfig, nodeName: n1}}
"""
AWAY, SERVICE = "deviceplugin.annotated.absence", "deviceplugin.annotated.service"
CONSTANTS = {f"{AWAY}.NOTICE_S": 2.0, f"{AWAY}.STOP_EVERY_S": 0.3, f"{SERVICE}.TEND_S": 0.1}
KEYS = {
    "nvidia.com/container.main.gpu-memory.limit": "4Gi",
    "nvidia.com/container.main.gpus.devices": gpu_uuid(0),
}
LIMIT_BYTES = 4 << 30


class Node:
    """One GPU with driver r615, and the API server that knows its pods."""

    def __init__(self, root: Path) -> None:
        self.server = StubApiServer(["n1"])
        self.plugin = PluginNode(
            root, 1, SHARES, MORE.format(root=root), "615.71.09", runtime_sockets=True, constants=CONSTANTS
        )
        self.kubelet = self.plugin.kubelet
        self.server.start()
        (root / "kubeconfig").write_text(self.server.kubeconfig())
        for hooked in (False, True):
            write_nvidia_spec(str(root / "cdi"), [gpu_uuid(0)], memory_hook=hooked)

    def admit(self, name: str, restart_policy: str) -> AdmittedPod:
        """A pod that runs, though nobody sees to its annotations."""
        spec = PodSpec(name, (ContainerSpec("main"),), annotations=KEYS, restart_policy=restart_policy)
        pod = self.kubelet.admit(spec)
        self.server.add_pod("default", name, node="n1", uid=pod.uid, restart_policy=restart_policy)
        assert self.kubelet.wait_settled([pod], WAIT_S), pod.container().message
        assert "GPUFRAC_ALLOCATION" not in pod.container().process_env
        return pod

    def delete(self, pod: AdmittedPod) -> None:
        self.kubelet.delete(pod)
        self.server.remove_pod("default", pod.spec.name)

    def said(self, pod: AdmittedPod) -> set[str]:
        """Messages of the events of a pod."""
        events = [event for event in self.server.events() if event["involvedObject"]["uid"] == pod.uid]
        assert {(event["type"], event["reason"]) for event in events} <= {("Warning", "GpuLimitNotEnforced")}
        return {event["message"] for event in events}

    def close(self) -> None:
        self.plugin.close()
        self.server.close()


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    made = Node(short_tmp)
    yield made
    made.close()


def plans(status: PluginStatus) -> dict[str, str]:
    """Pod -> what becomes of its container that runs unenforced."""
    assert status.annotated is not None
    assert {one.reason for one in status.annotated.unenforced} <= {STARTED_ALONE.message}
    return {one.pod: one.plan for one in status.annotated.unenforced}


def held(status: PluginStatus) -> dict[str, tuple[str, int]]:
    """Pod -> the level of what it holds, and how much that is."""
    return {a.pod: (a.enforcement, a.limit_bytes) for a in status.allocations}


def test_what_started_while_the_plugin_was_away_is_stopped_where_it_comes_again(node: Node) -> None:
    process = node.plugin.start(SHARE)
    node.plugin.until_status(lambda s: s.annotated is not None and s.annotated.readiness == "True")
    kill(process)
    comes_again, stays = node.admit("again", "Always"), node.admit("never", "Never")
    container, last = comes_again.container(), stays.container()
    before, pid = container.id, last.pid

    node.plugin.start_plugin()
    found = node.plugin.until_status(lambda s: "it will be stopped" in plans(s).get("again", ""))
    assert (container.id, container.state) == (before, State.RUNNING), "there is notice"
    assert held(found) == dict.fromkeys(("again", "never"), ("none", LIMIT_BYTES))
    assert node.server.wait(lambda: f"main: {STARTED_ALONE}" in node.said(comes_again) & node.said(stays), WAIT_S)

    assert node.server.wait(lambda: any("it will be stopped in" in text for text in node.said(comes_again)), WAIT_S)
    node.plugin.until(lambda: container.id != before and container.state is State.RUNNING)
    assert container.restarts == 1
    assert container.process_env["GPUFRAC_MEMORY_LIMIT_BYTES"] == str(LIMIT_BYTES)
    assert container.process_env["GPUFRAC_ALLOCATION"]
    assert node.server.wait(
        lambda: "main: it was stopped, to be made again with its limit" in node.said(comes_again), WAIT_S
    )
    after = {"again": ("hard", LIMIT_BYTES), "never": ("none", LIMIT_BYTES)}
    now = node.plugin.until_status(lambda s: "again" not in plans(s) and held(s) == after)
    assert plans(now) == {"never": "it is not stopped: with restartPolicy Never it might not start again"}
    assert (last.state, last.pid, last.restarts) == (State.RUNNING, pid, 0)
    assert node.said(stays) == {f"main: {STARTED_ALONE}"}

    node.delete(stays)
    assert plans(node.plugin.until_status(lambda s: "never" not in plans(s))) == {}
    assert container.restarts == 1, "it is stopped once"
