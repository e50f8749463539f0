"""Annotated pods on simulated nodes: scheduled by the stand-in for KAI or by hand, and held to their limits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.sim.kubelet.pod import AdmittedPod
from deviceplugin.sim.node.node import SimulatedNode
from deviceplugin.sim.objects.manifests import LoadedPod, parse_manifests
from mpsd.config.load import parse_config
from mpsd.gpu.model import MIB
from tests.cli import gpufrac
from tests.e2e.test_sim import GIB, OUT_OF_MEMORY, RESOURCE, Up, holding, mentioning, run
from tests.e2e.test_sim import pod as share
from tests.waiting import WAIT_S

NEW = ("--driver", "615.71.09")
EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "nvidia.com/container.main"
GPU = "GPU-51000000-0000-4000-8000-00000000000{}"

KAI_ONLY = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources: []
annotations: {gpus: {include: all}}
"""


def pod(name: str, *, scheduler: str = "kai-scheduler", **annotations: str) -> str:
    """`request`, `limit`, `mode`, `devices` are keys of container main; `fraction`, `memory`, `count` of the pod."""
    names = {
        "request": f"{KEY}.gpu-memory.request",
        "limit": f"{KEY}.gpu-memory.limit",
        "mode": f"{KEY}.gpu-compute.mode",
        "devices": f"{KEY}.gpus.devices",
        "fraction": "gpu-fraction",
        "memory": "gpu-memory",
        "count": "gpu-fraction-num-devices",
    }
    keys = {names[key]: value for key, value in annotations.items()}
    return (
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, annotations: {json.dumps(keys)}}}\n"
        f"spec: {{schedulerName: {scheduler}, containers: [{{name: main, image: x}}]}}\n---\n"
    )


def main(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Container main of a pod in a report."""
    (found,) = (shown for shown in report["pods"] if shown["name"] == name)
    (container,) = (entry for entry in found["containers"] if entry["name"] == "main")
    return dict(container)


# --- one run


def test_the_examples_run_as_they_say() -> None:
    done = gpufrac("sim", "run", "-o", "json", *NEW, "--gpus", "3", "--schedule", str(EXAMPLES / "annotated-pods.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    got = {
        (shown["name"], entry["name"]): entry["allocation"]
        for shown in report["pods"]
        for entry in shown["containers"]
        if entry["allocation"]
    }
    assert {names: (a["requestBytes"], a["limitBytes"], a["mode"], a["enforcement"]) for names, a in got.items()} == {
        ("notebook", "notebook"): (32162 * MIB, 32162 * MIB, "time-slicing", "hard"),  # 0.4 of what is usable
        ("report", "report"): (4 * GIB, 4 * GIB, "time-slicing", "hard"),
        ("server", "server"): (8 * GIB, 16 * GIB, "sm-sharing", "hard"),
        ("index", "build"): (8040 * MIB, 8040 * MIB, "time-slicing", "hard"),
    }
    assert {shown["gpu"]: shown["mode"] for shown in report["node"]["fractions"]} == {
        GPU.format(0): "time-slicing",
        GPU.format(1): "sm-sharing",
    }
    parts = {"notebook", "index"}
    assert {shown["name"] for shown in report["pods"] if shown["notes"]} == parts
    assert all("keep back" in note for shown in report["pods"] for note in shown["notes"])
    assert mentioning(report["node"]["directory"]) == []


def test_gpus_for_a_scheduler_beside_gpus_for_resources() -> None:
    config, pods = EXAMPLES / "config-annotated.yaml", EXAMPLES / "annotated-pods.yaml"
    code, report = run(*NEW, "--config", str(config), "--schedule", str(pods), text=share("a-share"))
    assert code == 0, report["pods"]
    got = {
        shown["name"]: entry["allocation"]["gpus"]
        for shown in report["pods"]
        for entry in shown["containers"]
        if entry["allocation"]
    }
    assert got["a-share"][0] in (GPU.format(0), GPU.format(1))
    del got["a-share"]
    assert got == {
        "notebook": [GPU.format(2)],
        "report": [GPU.format(2)],
        "index": [GPU.format(2)],
        "server": [GPU.format(3)],
    }


def test_the_node_with_annotated_pods_only_takes_what_kai_placed(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(KAI_ONLY)
    text = pod("placed", request="4Gi") + pod("forged", scheduler="other", request="4Gi", devices=GPU.format(1))
    code, report = run(*NEW, "--gpus", "2", "--config", str(config), "--schedule", text=text)
    assert code == 1
    placed, forged = main(report, "placed"), main(report, "forged")
    assert placed["allocation"]["gpus"] == [GPU.format(0)]
    assert (forged["state"], forged["reason"], forged["allocation"]) == ("Waiting", "CreateContainerError", None)
    assert "no reservation pod in namespace kai-resource-reservation holds GPU" in forged["message"]
    assert forged["code"] == "NotTrusted"


def test_what_the_scheduler_cannot_place_is_pending() -> None:
    text = pod("a", fraction="0.6") + pod("b", fraction="0.6") + pod("c", memory="1024", mode="sm-sharing")
    done = gpufrac("sim", "run", *NEW, "--schedule", "-", text=text)
    assert done.returncode == 1
    assert "default/a: Admitted" in done.stdout
    for name in "bc":
        assert (
            f"default/{name}: Pending: Unschedulable\n  no nodes with enough resources were found: 1 node(s) "
            in done.stdout
        )
    assert done.stdout.count("didn't have enough resources: GPUs. requested:") == 2
    assert done.stdout.endswith("1 of 3 pods admitted.\n")


def test_a_whole_gpu_is_waited_for_where_it_is_taken() -> None:
    whole = share("whole", resource="nvidia.com/gpu"), share("more", resource="nvidia.com/gpu")
    code, report = run(*NEW, "--gpus", "2", "--schedule", text=pod("a", fraction="0.5") + "".join(whole))
    assert code == 1
    a, whole_gpu, more = report["pods"]
    assert [shown["phase"] for shown in (a, whole_gpu, more)] == ["Admitted", "Admitted", "Pending"]
    assert main(report, "whole")["resources"] == {"nvidia.com/gpu": [GPU.format(1)]}
    assert "Asked for 1 nvidia.com/gpu, free 0 (2 of 2 allocatable, 2 held by pods)" in more["message"]
    code, report = run(*NEW, "--schedule", text=whole[0] + pod("a", fraction="0.5"))
    assert [shown["phase"] for shown in report["pods"]] == ["Admitted", "Pending"], "nor is it shared out in fractions"


def test_the_scheduler_leaves_pods_alone_that_are_not_its_own() -> None:
    text = pod("a", request="1Gi") + pod("b", scheduler="default-scheduler", request="1Gi")
    code, report = run(*NEW, "--schedule", text=text)
    assert code == 1
    assert main(report, "a")["allocation"]["gpus"] == [GPU.format(0)]
    assert "it names no GPU" in main(report, "b")["message"]
    (note,) = report["pods"][1]["notes"]
    assert "for pods with schedulerName: kai-scheduler" in note


def test_what_kais_admission_denies_is_said_before_anything_is_started() -> None:
    text = pod("a", fraction="0.5") + pod("b", fraction="1.5") + pod("c", request="2Gi", limit="1Gi")
    done = gpufrac("sim", "run", *NEW, "--schedule", "-", text=text)
    assert (done.returncode, done.stdout) == (2, "")
    b, c = done.stderr.splitlines()
    assert "(document 2): pod default/b: KAI's admission denied the request: gpu-fraction annotation value must" in b
    assert "request is greater than limit" in c


def test_two_halves_are_equal_though_the_scheduler_counts_what_the_node_keeps_back() -> None:
    """KAI books a GPU to the last MiB; the driver and the node's reserve need some."""
    code, report = run(*NEW, "--schedule", text=pod("a", fraction="0.5") + pod("b", fraction="0.5"))
    assert code == 0
    first, second = (main(report, name)["allocation"]["requestBytes"] for name in "ab")
    assert 40 * GIB > first == second > 39 * GIB
    assert main(report, "b")["annotations"]["request"] == "40960Mi"
    assert [len(shown["notes"]) for shown in report["pods"]] == [1, 1]
    assert all("instead of 40Gi" in shown["notes"][0] for shown in report["pods"])


def test_an_init_container_and_the_next_take_turns_on_more_than_half_of_a_gpu() -> None:
    """What the pod holds is what the larger of both asks for: there is room beside it."""
    key = "nvidia.com/container"
    keys = {f"{key}.{name}.gpu-memory.limit": "48Gi" for name in ("fetch", "main")}
    keys |= {f"{key}.{name}.gpus.devices": "0" for name in ("fetch", "main")}
    text = (
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: a, annotations: {json.dumps(keys)}}}\n"
        "spec: {initContainers: [{name: fetch, image: x}], containers: [{name: main, image: x}]}\n---\n"
    )
    beside = pod("b", scheduler="default-scheduler", limit="30Gi", devices="0")
    code, report = run(*NEW, "--gpus", "1", text=text + beside)
    assert code == 0, report
    given = {entry["name"]: entry["allocation"] for entry in report["pods"][0]["containers"]}
    assert [given[name]["limitBytes"] for name in ("fetch", "main")] == [48 * GIB, 48 * GIB]
    assert given["fetch"]["key"] != given["main"]["key"]
    assert main(report, "b")["allocation"]["limitBytes"] == 30 * GIB


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (pod("a", fraction="0.5"), "gpu-fraction: for a scheduler"),
        (pod("a", memory="1024", count="2"), "gpu-memory, gpu-fraction-num-devices: for a scheduler"),
    ],
)
def test_without_a_scheduler_its_inputs_have_no_effect(text: str, note: str) -> None:
    code, report = run(*NEW, text=text)
    assert code == 1
    assert report["pods"][0]["phase"] == "Pending"
    assert "--schedule brings a stand-in" in report["pods"][0]["message"]
    (found,) = report["pods"][0]["notes"]
    assert found.startswith(note)
    assert "--schedule" in found
    assert main(report, "a")["env"] == {}


def test_inputs_of_a_scheduler_that_does_not_get_the_pod_limit_nothing() -> None:
    code, report = run(*NEW, text=pod("a", scheduler="default-scheduler", fraction="0.5"))
    assert code == 1, "it runs without the limit it asks for"
    assert (report["pods"][0]["phase"], main(report, "a")["unlimited"]) == ("Admitted", True)


def test_keys_are_taken_as_they_are() -> None:
    text = (
        pod("by-index", request="2Gi", devices="0", mode="sm-sharing")
        + pod("by-name", limit="3Gi", devices=f"k8s.device-plugin.nvidia.com/gpu={GPU.format(1)}")
        + pod("nowhere", request="1Gi")
        + pod("typo", request="1GB", devices="0")
        + share("a-share")
    )
    code, report = run(*NEW, "--gpus", "3", text=text)
    assert code == 1
    assert main(report, "by-index")["allocation"]["gpus"] == [GPU.format(0)]
    by_name = main(report, "by-name")["allocation"]
    assert (by_name["gpus"], by_name["requestBytes"], by_name["mode"]) == ([GPU.format(1)], 3 * GIB, "time-slicing")
    assert "it names no GPU" in main(report, "nowhere")["message"]
    assert "1GB" in main(report, "typo")["message"]
    assert main(report, "a-share")["resource"] == RESOURCE


@pytest.mark.parametrize(
    ("options", "mode", "enforcement", "visible"),
    [
        (NEW, "sm-sharing", "hard", "void"),
        ((*NEW, "--no-dmem"), "time-slicing", "hard", "void"),
        ((*NEW, "--nri-runtime", "containerd:1.7.24"), "time-slicing", "hard", GPU.format(0)),
        ((*NEW, "--no-memory-hook"), "time-slicing", "hard", "void"),
        ((), "sm-sharing", "cooperative", "void"),
    ],
)
def test_the_level_of_a_node(options: tuple[str, ...], mode: str, enforcement: str, visible: str) -> None:
    code, report = run(*options, "--schedule", text=pod("one", request="8Gi", mode=mode))
    assert code == 0, report["pods"]
    container = main(report, "one")
    assert container["allocation"]["enforcement"] == enforcement
    assert container["env"]["NVIDIA_VISIBLE_DEVICES"] == visible
    assert container["env"]["GPUFRAC_MEMORY_LIMIT_BYTES"] == str(8 * GIB)


def test_a_runtime_without_nri_lets_everything_through() -> None:
    code, report = run(*NEW, "--no-nri", text=pod("one", request="8Gi", devices="0") + share("two"))
    assert code == 1, "it runs without the limit it asks for"
    assert report["pods"][0]["notes"] == ["nothing acts on its annotations: this node has no NRI"]
    assert (main(report, "one")["state"], main(report, "one")["env"]) == ("Running", {})
    assert main(report, "two")["allocation"]["enforcement"] == "hard"


# --- a node that stays up


@pytest.fixture
def up(short_tmp: Path) -> Iterator[Up]:
    node = Up(short_tmp / "n", *NEW, "--gpus", "2", "--gpu-memory", "40Gi")
    try:
        assert "is up" in node.first_line, node.stop()[1]
        yield node
    finally:
        node.stop()


def test_annotated_pods_are_held_to_their_limits(up: Up) -> None:
    text = pod("sliced", request="4Gi", limit="6Gi") + pod("shared", memory="8192", mode="sm-sharing")
    admitted = up.sim("admit", "-o", "json", "--schedule", "-", text=text)
    assert admitted.returncode == 0, admitted.stdout

    def allocate(target: str, size: str, *options: str) -> str:
        return up.sim("client", f"{target}/main", "--allocate", size, *options).stdout.strip()

    without_mps = ("--env", "CUDA_MPS_PIPE_DIRECTORY=/nowhere")
    for escape in ((), ("-i",), without_mps, ("-i", *without_mps)):
        assert allocate("sliced", "6145Mi", *escape) == OUT_OF_MEMORY, escape
        assert allocate("sliced", "6Gi", *escape) == str(6 * GIB), escape
        assert allocate("shared", "8193Mi", *escape) == OUT_OF_MEMORY, escape
    assert allocate("shared", "8Gi") == str(8 * GIB)
    with holding(up, "sliced/main", "--allocate", "4Gi"):
        assert allocate("sliced", "3Gi", "-i") == OUT_OF_MEMORY, "a second process"
    info = json.loads(up.sim("client", "sliced/main", "--info", "-i").stdout.splitlines()[0])
    assert [device["uuid"] if isinstance(device, dict) else device for device in info["devices"]] == [GPU.format(0)]


def test_a_gpu_is_free_again_when_its_pods_are_gone(up: Up) -> None:
    assert up.sim("admit", "--schedule", "-", text=pod("a", request="30Gi") + pod("b", request="30Gi")).returncode == 0
    refused = up.sim("admit", "--schedule", "-", text=pod("c", request="30Gi", mode="sm-sharing"))
    assert refused.returncode == 1
    assert "default/c: Pending: Unschedulable" in refused.stdout
    assert up.sim("delete", "a").returncode == 0
    # The scheduler sees the GPU free at once; the node may need a moment.
    again = up.sim("admit", "-o", "json", "--schedule", "-", text=pod("c", request="30Gi", mode="sm-sharing"))
    assert again.returncode == 0, again.stdout
    report = json.loads(again.stdout)
    assert main(report, "c")["allocation"]["mode"] == "sm-sharing"
    assert [(shown["gpu"], shown["mode"]) for shown in report["node"]["fractions"]] == [
        (GPU.format(1), "time-slicing"),
        (GPU.format(0), "sm-sharing"),
    ]
    denied = up.sim("admit", "--schedule", "-", text=pod("d", fraction="2"))
    assert (denied.returncode, denied.stdout) == (2, "")
    assert "KAI's admission denied the request" in denied.stderr


# --- processes that come and go


@pytest.fixture
def node(short_tmp: Path) -> Iterator[SimulatedNode]:
    config = parse_config(KAI_ONLY.encode(), "config.yaml")
    with SimulatedNode(str(short_tmp / "n"), config, gpus=1, driver="615.71.09") as up:
        yield up


def loaded(text: str) -> list[LoadedPod]:
    return [item for item in parse_manifests(text.encode(), "x") if isinstance(item, LoadedPod)]


def key_of(pod: AdmittedPod) -> str:
    return pod.container().process_env["GPUFRAC_ALLOCATION"]


def test_a_container_that_restarts_keeps_its_allocation(node: SimulatedNode) -> None:
    report = node.admit(loaded(pod("a", fraction="0.9")), schedule=True)
    assert main(report, "a")["state"] == "Running", report
    pod_a = node.kubelet.pod("a")
    before, identifier = key_of(pod_a), pod_a.container().id
    for _ in range(3):
        node.kubelet.restart_container(pod_a)
        assert node.kubelet.wait_settled([pod_a], WAIT_S), pod_a.container().message
    assert (key_of(pod_a), pod_a.container().restarts) == (before, 3)
    assert pod_a.container().id != identifier


def test_a_plugin_that_was_away_finds_what_it_granted(node: SimulatedNode) -> None:
    node.admit(loaded(pod("a", fraction="0.4")), schedule=True)
    pod_a = node.kubelet.pod("a")
    before = key_of(pod_a)
    node.processes.restart("plugin")
    node.wait_ready()
    report = node.report([pod_a])
    assert main(report, "a")["allocation"]["key"] == before
    node.kubelet.restart_container(pod_a)
    assert node.kubelet.wait_settled([pod_a], WAIT_S), pod_a.container().message
    assert key_of(pod_a) == before


def test_containers_that_start_while_the_plugin_is_away_run_without_it(node: SimulatedNode) -> None:
    node.processes.stop("plugin")
    pod_a = node.scheduler.admit(loaded(pod("a", fraction="0.4"))[0].pod)
    assert node.kubelet.wait_settled([pod_a], WAIT_S)
    assert "GPUFRAC_ALLOCATION" not in pod_a.container().process_env, "the runtime goes on without it"
    node.processes.start("plugin")
    node.wait_ready()
    shown = gpufrac("status", "--run-root", f"{node.directory}/run")
    assert "default/a/main" in shown.stdout, shown.stdout + shown.stderr
    node.kubelet.restart_container(pod_a)
    assert node.kubelet.wait_settled([pod_a], WAIT_S), pod_a.container().message
    assert key_of(pod_a)


def test_a_kubelet_that_restarts_disturbs_nobody(node: SimulatedNode) -> None:
    node.admit(loaded(pod("a", fraction="0.4")), schedule=True)
    pod_a = node.kubelet.pod("a")
    pid = pod_a.container().pid
    assert node.restart_kubelet() == []
    assert pod_a.container().pid == pid
    (group,) = node.scheduler.groups
    assert group.pods == 1
