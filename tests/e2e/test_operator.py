"""The operator's commands on a node as it runs: real processes, real CUDA clients, both protocols."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.sim.kubelet.pod import AdmittedPod
from mpsd.config.model import GIB
from tests.cli import gpufrac
from tests.e2e.mpsdnode import ROOT, end, first_line
from tests.e2e.pluginnode import SMALL, PluginNode, plugin_node
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.leaks_ok("gRPC keeps pollers, and channels close late")

PROTOCOLS = {2: "580.95.05", 3: "615.71.09"}


class Operated:
    """A node with one GPU, the operator's shell, and CUDA programs in its containers."""

    def __init__(self, node: PluginNode) -> None:
        self.node = node
        self.programs: list[subprocess.Popen[str]] = []

    def gpufrac(self, *arguments: str, code: int = 0) -> str:
        """Its stdout, and stderr where it is not to end well."""
        done = gpufrac(*arguments, "--run-root", f"{self.node.root}/run")
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout + done.stderr if code else done.stdout

    def use(self, pod: AdmittedPod, *more: str, **environment: str) -> "subprocess.Popen[str]":
        """A program in the pod's container that holds 2 GiB, once it has them. It sets `environment` for itself."""
        program = subprocess.Popen(
            [sys.executable, "-m", "mpsd.sim.cuda", "--allocate", "2Gi", "--hold", *more],
            cwd=ROOT,
            env=dict(pod.container().process_env) | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.programs.append(program)
        assert first_line(program) == str(2 * GIB)
        return program

    def try_past_mps(self, pod: AdmittedPod) -> str:
        """What a program in the pod's container is told that looks for no MPS daemon, and ends."""
        done = subprocess.run(
            [sys.executable, "-m", "mpsd.sim.cuda", "--allocate", "2Gi"],
            cwd=ROOT,
            env=dict(pod.container().process_env) | {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        return done.stdout.strip()

    def daemon_pid(self) -> int | None:
        daemon = self.node.mpsd.client.snapshot().gpus[0].daemon
        return daemon.pid if daemon is not None and daemon.state == "ready" else None

    def close(self) -> None:
        for program in self.programs:
            end(program)


@pytest.fixture(params=PROTOCOLS, ids=lambda protocol: f"v{protocol}")
def operated(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Operated]:
    with plugin_node(short_tmp, 1, driver=PROTOCOLS[request.param]) as node:
        made = Operated(node)
        try:
            node.start(SMALL)
            daemon = node.mpsd.client.snapshot().gpus[0].daemon
            assert daemon is not None
            assert daemon.protocol == request.param
            yield made
        finally:
            made.close()


def test_a_drained_gpu_keeps_its_pods_and_takes_no_new_ones(operated: Operated) -> None:
    node = operated.node
    pod = node.admit_running("a")
    program = operated.use(pod)
    assert "until the pod ends: default/a" in operated.gpufrac("drain", "0", "--reason", "fan fault")
    node.until(lambda: node.allocatable(SMALL) == 1)  # its own
    assert node.admit("b").phase == "Failed"
    assert "fan fault" in operated.gpufrac("status")
    assert "default/a" in operated.gpufrac("drain", "0", "--wait", "--timeout", "0.1", code=1)
    assert program.poll() is None
    node.kubelet.restart_container(pod)
    assert node.kubelet.wait_settled([pod], WAIT_S)
    program = operated.use(pod)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "deviceplugin.cli.main", "drain", "0", "--wait", "--run-root", f"{node.root}/run"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    operated.programs.append(waiting)
    assert "default/a" in first_line(waiting)
    end(program)
    node.kubelet.delete(pod)
    assert waiting.wait(WAIT_S) == 0
    assert node.records() == []
    operated.gpufrac("undrain", "0")
    node.until(lambda: node.allocatable(SMALL) > 1)
    node.admit_running("c")


def test_terminate_ends_one_pods_client_and_leaves_its_neighbour(operated: Operated) -> None:
    node = operated.node
    pods = [node.admit_running(name) for name in "ab"]
    one, other = (operated.use(pod, "--stay") for pod in pods)
    shown = json.loads(operated.gpufrac("clients", "-o", "json"))
    named = {client["pid"]: (client["pod"], client["mps"]) for client in shown[0]["clients"]}
    assert named == {one.pid: ("a", True), other.pid: ("b", True)}
    assert "add --yes" in operated.gpufrac("terminate", "default/a", code=2)
    assert "terminated" in operated.gpufrac("terminate", "a/main", "--yes")
    assert first_line(one) == "CUDA_ERROR_MPS_CLIENT_TERMINATED"
    assert one.poll() is None, "nobody asked for a kill"
    left = json.loads(operated.gpufrac("clients", "-o", "json"))[0]["clients"]
    assert [client["pod"] for client in left if client["mps"]] == ["b"]
    third = operated.use(pods[0], "--stay")
    assert "killed" in operated.gpufrac("terminate", "a", "--kill", "--yes")
    assert third.wait(WAIT_S) == -signal.SIGKILL
    assert other.poll() is None
    operated.gpufrac("terminate", "zz", "--yes", code=1)


def test_a_client_that_mps_does_not_let_go_is_not_killed(operated: Operated) -> None:
    program = operated.use(operated.node.admit_running("a"), "--stay")
    operated.node.mpsd.fault("terminate-fails")
    assert "left" in operated.gpufrac("terminate", "a", "--kill", "--yes", code=1)
    assert program.poll() is None
    assert "killed" in operated.gpufrac("terminate", "a", "--kill", "--force", "--yes")
    assert program.wait(WAIT_S) == -signal.SIGKILL


def test_a_daemon_is_replaced_when_its_last_client_has_ended(operated: Operated) -> None:
    node = operated.node
    before = operated.daemon_pid()
    assert "is being replaced" in operated.gpufrac("mpsd", "replace", "0")
    node.until(lambda: operated.daemon_pid() not in (None, before))
    before = operated.daemon_pid()
    node.until(lambda: node.allocatable(SMALL) > 0)
    pod = node.admit_running("a")
    program = operated.use(pod)
    node.mpsd.until_gpu(lambda gpu: [client.pid for client in gpu.clients] == [program.pid])
    assert f"serves 1 client: pid {program.pid}" in operated.gpufrac("mpsd", "replace", "0")
    draining = node.mpsd.until_gpu(lambda gpu: gpu.daemon is not None and gpu.daemon.state == "draining")
    assert draining.daemon is not None
    assert draining.daemon.pid == before
    assert program.poll() is None
    assert program.communicate("", WAIT_S)[0] == ""
    assert program.returncode == 0
    node.until(lambda: operated.daemon_pid() not in (None, before))
    node.until_status(lambda status: status.allocations[0].state == "attached")
    second = operated.use(pod)
    assert "is being replaced" in operated.gpufrac("mpsd", "replace", "0", "--now", "--yes")
    assert second.wait(WAIT_S) != 0


def test_a_tenant_who_claims_another_pods_share_can_neither_hold_it_nor_hide(operated: Operated) -> None:
    node = operated.node
    victim, tenant = node.admit_running("victim"), node.admit_running("tenant")
    key = node.until_status(lambda s: {a.pod for a in s.allocations} == {"victim", "tenant"}).allocations[0].key
    assert victim.container().process_env["GPUFRAC_ALLOCATION"] == key
    liar = operated.use(tenant, "--stay", GPUFRAC_ALLOCATION=key)
    node.until_status(lambda s: any(a.claimed_by == f"pid {liar.pid} of pod default/tenant" for a in s.allocations))
    assert f"pid {liar.pid} of pod default/tenant claims the allocation of pod default/victim" in operated.gpufrac(
        "status"
    )
    (client,) = json.loads(operated.gpufrac("clients", "-o", "json"))[0]["clients"]
    assert (client["pid"], client["pod"], client["podUID"]) == (liar.pid, "tenant", tenant.uid)
    node.kubelet.delete(victim)
    node.until(lambda: key not in {record.key for record in node.records()})
    assert liar.poll() is None
    assert "killed" in operated.gpufrac("terminate", "tenant", "--kill", "--yes")
    assert liar.wait(WAIT_S) == -signal.SIGKILL


def test_a_process_past_mps_is_told(operated: Operated) -> None:
    """Protocol 3 leaves the GPU open to it; protocol 2 (EXCLUSIVE_PROCESS) does not, as a server is held there."""
    node = operated.node
    pod = node.admit_running("a")
    daemon = node.mpsd.client.snapshot().gpus[0].daemon
    assert daemon is not None
    if daemon.protocol == 2:
        until(lambda: operated.try_past_mps(pod) == "CUDA_ERROR_DEVICE_UNAVAILABLE")
        return
    program = operated.use(pod, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    (found,) = node.until_status(lambda s: s.allocations[0].enforcement == "none").allocations
    assert found.reason == f"pid {program.pid} uses its GPU past MPS: it is not held to the limit"
    assert found.reason in operated.gpufrac("status")
    assert "it is no MPS client: only" in operated.gpufrac("terminate", "a", "--yes", code=1)
    end(program)
    node.until_status(lambda s: s.allocations[0].enforcement == "cooperative")
