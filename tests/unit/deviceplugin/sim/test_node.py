"""The simulated node's config and directory, and the report; whole nodes are in tests/e2e/test_sim.py."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deviceplugin.sim.kubelet.pod import AdmittedPod, Phase
from deviceplugin.sim.node import report
from deviceplugin.sim.node.children import NodeError
from deviceplugin.sim.node.config import default_config, node_config, takes_cdi
from deviceplugin.sim.node.node import SimulatedNode
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec
from deviceplugin.sim.runtime.container import Container, State
from deviceplugin.sim.runtime.edits import Edits
from deviceplugin.sim.scheduling.placement import Lack, Offer
from mpsd.common.errors import ConfigError
from mpsd.config.load import parse_config
from mpsd.config.model import (
    GIB,
    AnnotationsConfig,
    CdiConfig,
    Delivery,
    Enforcement,
    GpuSelection,
    KubernetesConfig,
    MpsConfig,
    NriConfig,
    SimulatedConfig,
    SimulatedGpu,
    TrustPolicy,
)
from tests import builders

DIRECTORY = "/tmp/gf-test"
ANNOTATIONS = AnnotationsConfig(gpus=GpuSelection(include=(6,)), enforcement=Enforcement.HARD, prefix="my.org/c.")


def test_the_default_config_is_sound() -> None:
    names = [resource.name for resource in default_config().resources]
    assert names == ["gpufrac.dev/gpu-8gi", "gpufrac.dev/gpu-16gi", "gpufrac.dev/memory-gib"]
    annotations = default_config().annotations
    assert annotations is not None
    assert (annotations.gpus, annotations.share, annotations.trust) == (GpuSelection(), True, TrustPolicy.ANY)


def test_a_config_keeps_what_it_offers_and_moves_below_the_directory() -> None:
    given = builders.config(
        builders.resource("a", builders.fixed(8)),
        mps=MpsConfig(protocol="2", binary="/opt/mps", driver_root="/driver", client_limit=7),
        cdi=CdiConfig(directory="/etc/cdi", delivery=Delivery.BOTH),
        memory_reserve_bytes=3 * GIB,
        annotations=ANNOTATIONS,
        nri=NriConfig(socket="/run/elsewhere.sock", name="mine", index="07"),
        kubernetes=KubernetesConfig(access="in-cluster", node_name="n"),
    )
    moved = node_config(given, DIRECTORY)
    assert moved.resources == given.resources
    assert (moved.memory_reserve_bytes, moved.mps.protocol, moved.mps.client_limit) == (3 * GIB, "2", 7)
    assert (moved.backend, moved.metrics_address, moved.cdi.delivery) == ("simulated", "", Delivery.BOTH)
    assert moved.mps.binary == "nvidia-cuda-mps-control", "never the real daemon"
    assert moved.mps.driver_root == "/"
    paths = [moved.mps.run_root, moved.mps.log_root, moved.cdi.directory, moved.kubelet_root, moved.state_root]
    assert all(path.startswith(f"{DIRECTORY}/") for path in paths)
    assert moved.annotations == msgspec.structs.replace(ANNOTATIONS, cri_socket=f"{DIRECTORY}/run/cri.sock")
    assert moved.nri == NriConfig(socket=f"{DIRECTORY}/run/nri.sock", name="mine", index="07")
    assert moved.kubernetes.access == "off"
    assert len(set(paths)) == 5


SIMULATED = SimulatedConfig(
    gpus=(SimulatedGpu(memory_bytes=40 * GIB), SimulatedGpu(memory_bytes=16 * GIB)), driver="550.1"
)


@pytest.mark.parametrize(
    ("simulated", "options", "sizes_gib", "driver"),
    [
        (None, {}, [80], "580.95.05"),
        (None, {"gpus": 2, "gpu_memory_bytes": 24 * GIB, "driver": "615.1"}, [24, 24], "615.1"),
        (SIMULATED, {}, [40, 16], "550.1"),
        (SIMULATED, {"gpus": 3}, [40, 16, 16], "550.1"),
        (SIMULATED, {"gpu_memory_bytes": 8 * GIB, "driver": "600.2"}, [8, 8], "600.2"),
    ],
)
def test_gpus_and_driver(
    simulated: SimulatedConfig | None, options: dict[str, Any], sizes_gib: list[int], driver: str
) -> None:
    given = default_config()
    if simulated is not None:
        given = msgspec.structs.replace(given, backend="simulated", simulated=simulated)
    found = node_config(given, DIRECTORY, **options).simulated
    assert [gpu.memory_bytes // GIB for gpu in found.gpus] == sizes_gib
    assert found.driver == driver


def test_as_many_gpus_as_the_config_names() -> None:
    one = builders.resource("a", builders.fixed(8), gpus=GpuSelection(include=(2,)))
    assert len(node_config(builders.config(one), DIRECTORY).simulated.gpus) == 3
    annotated = builders.config(one, annotations=ANNOTATIONS)
    assert len(node_config(annotated, DIRECTORY).simulated.gpus) == 7
    grouped = builders.config(one, groups=(("pair", (4, 5)),))
    assert len(node_config(grouped, DIRECTORY).simulated.gpus) == 6


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("containerd", "2.1.9+unknown", True),
        ("containerd", "v1.7.24", False),
        ("cri-o", "1.33.1", False),
        ("CRI-O", "1.34.0", True),
        ("other", "0.1", True),
        ("containerd", "main", True),
    ],
)
def test_runtimes_that_take_cdi_devices_from_plugins(name: str, version: str, expected: bool) -> None:
    assert takes_cdi((name, version)) is expected


def test_what_is_written_is_what_was_meant(short_tmp: Path) -> None:
    node = SimulatedNode(str(short_tmp / "n"), gpus=2)
    node._directory.take(node._config_text)
    try:
        assert parse_config(Path(node.config_path).read_bytes(), "x") == node.config
        other = SimulatedNode(str(short_tmp / "n"))
        with pytest.raises(ConfigError, match="a simulated node runs there"):
            other.start()
        other.close()
    finally:
        node.close()


def test_directories_that_cannot_be_used(short_tmp: Path) -> None:
    with pytest.raises(ConfigError, match="path is too long"):
        SimulatedNode(f"{short_tmp}/{'x' * 60}")
    (short_tmp / "file").touch()
    with pytest.raises(ConfigError, match="not empty and was never a simulated node's"):
        SimulatedNode(str(short_tmp)).start()
    with pytest.raises(ConfigError, match="cannot use directory"):
        SimulatedNode(str(short_tmp / "file")).start()
    assert os.listdir(short_tmp) == ["file"]


def test_a_node_that_is_not_up_says_so(short_tmp: Path) -> None:
    node = SimulatedNode(str(short_tmp / "n"))
    with pytest.raises(NodeError, match="it is not up"):
        node.delete("default", "p")
    node.close()


# --- report

ALLOCATION = {
    "key": "k1",
    "resource": "r/a",
    "deviceIDs": ["GPU-0::0"],
    "gpus": ["GPU-0"],
    "requestBytes": 8 * GIB,
    "limitBytes": 16 * GIB,
    "mode": "sm-sharing",
    "enforcement": "cooperative",
    "state": "attached",
    "reasonCode": "",
}
NODE = {
    "driver": "580.1",
    "gpus": [{"uuid": "GPU-0", "index": 0, "memoryBytes": 80 * GIB}],
    "resources": {"r/a": {"capacity": 9, "allocatable": 0, "reason": "full", "reasonCode": "AllTaken"}},
}


ANNOTATED = {
    **ALLOCATION,
    "key": "k3",
    "resource": "annotations",
    "deviceIDs": ["uid/main"],
    "container": "main",
    "podUIDs": ["uid"],
}
KEY = "nvidia.com/container.main"
KEYS = {f"{KEY}.gpu-memory.request": "8Gi", f"{KEY}.gpu-memory.limit": "16Gi", f"{KEY}.gpus.devices": "GPU-0"}


def admitted(edits: Edits | None, spec: ContainerSpec | None = None, **changes: Any) -> AdmittedPod:
    spec = spec or ContainerSpec("main", {"r/a": 1})
    container = Container(spec, {"r/a": ("GPU-0::0",)}, State.RUNNING if edits else State.WAITING, edits=edits)
    if edits is None:
        container.reason, container.message = "CreateContainerError", "unresolvable"
    return AdmittedPod(PodSpec("p", (container.spec,)), "uid", (container,), **changes)


def document(pod: AdmittedPod, *allocations: dict[str, Any]) -> dict[str, Any]:
    return report.document(node=NODE, pods=[pod], allocations=allocations, ours=["r/a"])


def test_a_container_is_matched_with_its_allocation_by_the_marker() -> None:
    edits = Edits(
        env={"GPUFRAC_ALLOCATION": "k1", "B": "2"},
        mounts=(("/in", "/out", ("rbind",)),),
        device_nodes=({"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0},),
        cdi_devices=("a/b=c",),
    )
    found = document(admitted(edits), {**ALLOCATION, "key": "k0"}, ALLOCATION, {**ALLOCATION, "key": "k2"})
    (pod,) = found["pods"]
    (container,) = pod["containers"]
    assert (pod["phase"], pod["namespace"], pod["name"]) == ("Admitted", "default", "p")
    assert container["allocation"] == {
        key: ALLOCATION[key] for key in ("key", "gpus", "requestBytes", "limitBytes", "mode", "enforcement")
    }
    assert (container["resource"], container["deviceIDs"]) == ("r/a", ["GPU-0::0"])
    assert container["mounts"] == [{"containerPath": "/in", "hostPath": "/out", "options": ["rbind"]}]
    assert report.all_well(found)
    text = "\n".join(report.lines(found, ["a note"]))
    for part in (
        "default/p: Admitted",
        "request       8Gi",
        "limit         16Gi",
        "GPU           0 (GPU-0)",
        "/out -> /in (rbind)",
        "/dev/nvidia0 (c 195:0)",
        "note: a note",
        "1 of 1 pods admitted.",
        "r/a: 0 of 9 allocatable: full",
    ):
        assert part in text


def test_a_container_that_is_not_created_is_matched_by_its_shares() -> None:
    found = document(admitted(None), ALLOCATION)
    (container,) = found["pods"][0]["containers"]
    assert container["allocation"]["key"] == "k1"
    assert (container["state"], container["reason"]) == ("Waiting", "CreateContainerError")
    assert not report.all_well(found)
    text = "\n".join(report.lines(found))
    assert "not created   CreateContainerError: unresolvable" in text
    assert text.endswith("\n1 of 1 pods admitted, 0 of 1 containers started.")


def annotated(edits: Edits | None, state: State = State.RUNNING, reason: str = "", message: str = "") -> AdmittedPod:
    container = Container(ContainerSpec("main"), state=state, reason=reason, message=message, edits=edits)
    return AdmittedPod(PodSpec("p", (container.spec,), annotations=KEYS), "uid", (container,))


def test_an_annotated_container_shows_what_it_asked_for_and_got() -> None:
    pod = annotated(Edits(env={"GPUFRAC_ALLOCATION": "k3"}, cdi_devices=("a/b=c",)))
    found = document(pod, ALLOCATION | {"podUIDs": []}, ANNOTATED)
    (container,) = found["pods"][0]["containers"]
    assert (container["resource"], container["allocation"]["key"], container["deviceIDs"]) == ("annotations", "k3", [])
    assert found["pods"][0]["notes"] == []
    assert container["annotations"] == {"request": "8Gi", "limit": "16Gi", "mode": None, "devices": "GPU-0"}
    assert report.all_well(found)
    text = "\n".join(report.lines(found))
    assert "container main: annotations\n    asked for     request 8Gi, limit 16Gi, devices GPU-0\n" in text
    assert "limit         16Gi" in text


def test_an_annotated_container_that_is_refused_shows_why() -> None:
    pod = annotated(None, State.WAITING, "CreateContainerError", "no room on GPU 0")
    found = document(pod)
    (container,) = found["pods"][0]["containers"]
    assert (container["resource"], container["allocation"]) == ("annotations", None)
    assert not report.all_well(found)
    assert "not created   CreateContainerError: no room on GPU 0" in "\n".join(report.lines(found))
    granted = document(pod, ANNOTATED, {**ANNOTATED, "podUIDs": ["other"]}, {**ANNOTATED, "container": "other"})
    assert granted["pods"][0]["containers"][0]["allocation"]["key"] == "k3", "it waits for its permission to start"


@pytest.mark.parametrize(("state", "reason"), [(State.WAITING, "RunContainerError"), (State.TERMINATED, "StartError")])
def test_a_container_that_did_not_start_is_not_well(state: State, reason: str) -> None:
    found = document(annotated(None, state, reason, "no limit"))
    assert not report.all_well(found)
    assert f"not running   {reason}: no limit" in "\n".join(report.lines(found))


@pytest.mark.parametrize("state", [State.RUNNING, State.TERMINATED])
def test_a_container_that_runs_without_the_limit_it_asks_for_is_not_well(state: State) -> None:
    found = document(annotated(Edits(), state), ANNOTATED)
    assert not report.all_well(found)
    text = "\n".join(report.lines(found))
    assert "limit         none, though it asks for one" in text
    assert text.endswith("1 of 1 pods admitted; 1 container runs without the limit it asks for.")


def test_the_summary_of_several_pods() -> None:
    away, refused = annotated(Edits()), annotated(None, State.WAITING, "CreateContainerError", "no room on GPU 0")
    pending = annotated(None, State.WAITING)
    pending.phase = Phase.PENDING
    found = report.document(node=NODE, pods=[away, away, refused, pending], allocations=[], ours=[])
    assert report.lines(found)[-1] == (
        "3 of 4 pods admitted, 2 of 3 containers started; 2 containers run without the limit they ask for."
    )


def test_a_container_that_gets_less_than_it_asks_for_is_noted() -> None:
    pod = annotated(Edits(env={"GPUFRAC_ALLOCATION": "k3"}))
    found = document(pod, {**ANNOTATED, "requestBytes": 7 * GIB})
    why = "its scheduler counts memory that the driver and `memory.reserve` keep back"
    assert found["pods"][0]["notes"] == [f"container main: request 7Gi instead of 8Gi: {why}"]
    assert report.all_well(found), "it has a limit"
    found = document(pod, {**ANNOTATED, "requestBytes": 7 * GIB, "limitBytes": 7 * GIB})
    assert "request 7Gi instead of 8Gi, limit 7Gi instead of 16Gi:" in found["pods"][0]["notes"][0]


def test_a_pending_pod() -> None:
    pod = annotated(None, State.WAITING)
    pod.uid, pod.phase, pod.reason, pod.message = "", Phase.PENDING, "Unschedulable", "no nodes"
    found = document(pod, {**ANNOTATED, "podUIDs": [""]})
    assert found["pods"][0]["phase"] == "Pending"
    assert found["pods"][0]["containers"][0]["allocation"] is None
    assert not report.all_well(found)
    text = "\n".join(report.lines(found))
    assert "default/p: Pending: Unschedulable\n  no nodes\n  container main: annotations\n    asked for" in text
    assert text.endswith("0 of 1 pods admitted.")


def test_gpus_kept_for_fractions_are_shown() -> None:
    shared = {"gpu": "GPU-0", "mode": "sm-sharing", "bookedMiB": 4096, "sizeMiB": 81900}
    found = report.document(node={**NODE, "fractions": [shared]}, pods=[], allocations=[], ours=[])
    assert "  GPU 0 is kept for fractions (sm-sharing): 4096 of 81900 MiB booked by the scheduler" in report.lines(
        found
    )


def test_what_is_refused_or_waits_has_the_code_of_why() -> None:
    def codes(found: dict[str, Any]) -> tuple[str, str]:
        (pod,) = found["pods"]
        return pod["code"], pod["containers"][0]["code"]

    assert codes(document(admitted(Edits()), {**ALLOCATION, "reasonCode": "LimitNotInForce"})) == ("", "")
    assert codes(document(admitted(None), {**ALLOCATION, "reasonCode": "WaitsForDaemon"})) == ("", "WaitsForDaemon")
    failed = admitted(None, phase=Phase.FAILED, message="no", code="MemoryTaken")
    assert codes(document(failed)) == ("MemoryTaken", "")
    lack = Lack("r/a", 1, Offer(capacity=9), offered=True)
    assert codes(document(admitted(None, phase=Phase.PENDING, lacks=(lack,)))) == ("AllTaken", "")
    refusing = [{"namespace": "default", "pod": "p", "container": "main", "reasonCode": "NoGpuNamed"}]
    asks = annotated(None, State.WAITING, "CreateContainerError", "no")
    found = report.document(node=NODE, pods=[asks], allocations=[], ours=[], refusing=refusing)
    assert codes(found) == ("", "NoGpuNamed")


def test_a_refused_pod_shows_what_it_asked_for_and_holds_nothing() -> None:
    found = document(admitted(None, phase=Phase.FAILED, reason="UnexpectedAdmissionError", message="no"), ALLOCATION)
    (container,) = found["pods"][0]["containers"]
    assert (container["resource"], container["deviceIDs"], container["allocation"]) == ("r/a", [], None)
    assert container["state"] == "Refused"
    assert not report.all_well(found)
    assert "default/p: Failed: UnexpectedAdmissionError\n  no" in "\n".join(report.lines(found))


def test_overruled_wishes_are_noted() -> None:
    edits = Edits(env={"A": "ours", "B": "mine"}, mounts=(("/in", "/out", ()),), cdi_devices=("a/b=c",))
    spec = ContainerSpec("main", {"r/a": 1}, env=(("A", "mine"), ("B", "mine")), mount_paths=("/in/", "/other"))
    notes = document(admitted(edits, spec))["pods"][0]["notes"]
    assert notes == [
        "container main: its own A=mine is overridden by 'ours'",
        "container main: its own volume at /in/ is replaced by ours",
    ]


def test_text_of_a_manifest_cannot_break_lines() -> None:
    text = report.lines(document(admitted(Edits(env={"A": "x\nInjected: y\x1b[31m"}))))
    assert not any(line.startswith("Injected") or "\x1b" in line for line in text)


def test_nothing_to_admit() -> None:
    empty = report.document(node=NODE, pods=[], allocations=[], ours=[])
    assert report.all_well(empty)
    assert report.lines(empty)[-1] == "No pods to admit."


def test_a_directory_that_only_looks_like_a_nodes_is_left_alone(short_tmp: Path) -> None:
    (short_tmp / "sim.lock").write_text("somebody else's")
    (short_tmp / "state").mkdir()
    (short_tmp / "state" / "precious").write_text("x")
    node = SimulatedNode(str(short_tmp))
    with pytest.raises(ConfigError, match="never a simulated node's"):
        node.start()
    node.close()
    assert (short_tmp / "state" / "precious").read_text() == "x"
