"""Shares on any two GPUs of a simulated node, through the kubelet: what containers get, and that they keep it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli import gpufrac
from tests.e2e.pluginnode import kill, plugin_node
from tests.e2e.test_sim import GIB, OUT_OF_MEMORY, Up, holding, mentioning, pod, run
from tests.e2e.test_sim_annotated import GPU, NEW, main

CONFIG = str(Path(__file__).parent / "several" / "any-two.yaml")
TWO = "gpufrac.dev/two"
OLD = ("--driver", "580.95.05")
NODE = ("--gpus", "4", "--gpu-memory", "40Gi", "--config", CONFIG)


def indices(container: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(uuid[-2:]) for uuid in container["allocation"]["gpus"])


@pytest.mark.parametrize(
    ("driver", "level", "one_gpu"), [(NEW, "hard", 0), (OLD, "cooperative", 2)], ids=["protocol-3", "protocol-2"]
)
def test_containers_of_two_gpus_beside_those_of_one(driver: tuple[str, str], level: str, one_gpu: int) -> None:
    """Under MPS protocol 2 all containers of a daemon use the same GPUs, so that one GPU alone is another one."""
    text = pod("a", resource=TWO) + pod("one") + pod("b", resource=TWO)
    code, report = run(*driver, *NODE, text=text)
    assert code == 0, report["pods"]
    offered = report["node"]["resources"][TWO]
    assert (offered["allocatable"], offered["capacity"]) == (6, 18), "what can be had side by side, of all sets"
    for name in "ab":
        container = main(report, name)
        assert indices(container) == (0, 1)
        assert {"/dev/nvidia0", "/dev/nvidia1"} <= {node["path"] for node in container["deviceNodes"]}
        allocation = container["allocation"]
        assert (allocation["limitBytes"], allocation["enforcement"]) == (10 * GIB, level)
    assert indices(main(report, "one")) == (one_gpu,)


@pytest.mark.parametrize("driver", [NEW, OLD], ids=["protocol-3", "protocol-2"])
def test_a_share_of_two_gpus_outlives_kubelet_and_plugin(short_tmp: Path, driver: tuple[str, str]) -> None:
    up = Up(short_tmp / "n", *driver, *NODE)
    try:
        assert "is up" in up.first_line, up.stop()[1]
        done = up.sim("admit", "-o", "json", "-", text=pod("a", resource=TWO) + pod("b", resource=TWO))
        assert done.returncode == 0, done.stdout
        before = allocations(up)
        assert {tuple(shown["gpus"]) for shown in before} == {(GPU.format(0), GPU.format(1))}
        with holding(up, "a/main", "--allocate", "9Gi", "--device", "1"):
            assert up.sim("restart-kubelet").returncode == 0
            assert allocations(up) == before
        assert up.sim("client", "b/main", "--allocate", "11Gi").stdout.strip() == OUT_OF_MEMORY
    finally:
        up.stop()
    assert mentioning(up.directory) == []


@pytest.mark.leaks_ok("gRPC keeps pollers, and channels close late")
@pytest.mark.parametrize("driver", [NEW[1], OLD[1]], ids=["protocol-3", "protocol-2"])
@pytest.mark.parametrize("lost", [False, True], ids=["records", "no-records"])
def test_a_plugin_that_is_killed_finds_shares_of_two_gpus_again(short_tmp: Path, driver: str, lost: bool) -> None:
    """Without its records by what the kubelet has: an ID tells of which GPUs a share is."""
    resources = f"\n  - {{name: {TWO}, memory: {{request: 10Gi}}, compute: {{mode: sm-sharing}}, gpus: {{count: 2}}}}\n"
    with plugin_node(short_tmp, 4, resources, driver=driver) as node:
        plugin = node.start(TWO)
        pods = [node.admit_running(name, TWO) for name in "ab"]
        before = {record.key: (record.group, record.gpus, record.limit_bytes) for record in node.records()}
        assert len(before) == len(pods)
        kill(plugin)
        if lost:
            for path in (node.root / "state" / "plugin" / "allocations").glob("*.json"):
                path.unlink()
        node.start_plugin()
        node.until_status(
            lambda s: {a.key for a in s.allocations} == set(before) and {a.state for a in s.allocations} == {"attached"}
        )
        found = {record.key: (record.group, record.gpus, record.limit_bytes) for record in node.records()}
        assert found == before
        assert {pod.container().pid is not None for pod in pods} == {True}


def allocations(up: Up) -> list[dict[str, Any]]:
    done = gpufrac("allocations", "-o", "json", "--run-root", f"{up.directory}/run")
    assert done.returncode == 0, done.stderr
    kept = ("key", "resource", "gpus", "deviceIDs", "device_ids", "state")
    return [{name: shown[name] for name in kept if name in shown} for shown in json.loads(done.stdout)]
