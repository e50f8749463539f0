"""The stand-in for KAI on a stub kubelet: reservation pods come and go with the pods that need them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deviceplugin.annotated.contract import DEVICES, MODE, REQUEST
from deviceplugin.kubelet.podresources import PodResourcesClient
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from deviceplugin.sim.kubelet.pod import AdmittedPod, Phase
from deviceplugin.sim.node.scheduler import Scheduler, check, denials
from deviceplugin.sim.objects.annotations import PREFIX
from deviceplugin.sim.objects.manifests import LoadedPod
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec
from deviceplugin.sim.runtime.nvidia import write_nvidia_spec
from deviceplugin.sim.scheduling.admission import DeniedError
from mpsd.common.errors import ConfigError
from tests.unit.deviceplugin.sim.scriptednri import ScriptedNri

GPUS = ["GPU-0", "GPU-1"]
KIND = "nvidia.com/gpu"
KEEPER = "kai-resource-reservation"


def pod(name: str, size: str = "4Gi", mode: str = "time-slicing", **changes: str) -> PodSpec:
    keys = {f"{PREFIX}main{REQUEST}": size, f"{PREFIX}main{MODE}": mode, **changes}
    return PodSpec(name, (ContainerSpec("main"),), annotations=keys, scheduler="kai-scheduler")


@pytest.fixture
def nri() -> ScriptedNri:
    return ScriptedNri()


@pytest.fixture
def kubelet(short_tmp: Path, nri: ScriptedNri) -> Iterator[StubKubelet]:
    (short_tmp / "cdi").mkdir()
    write_nvidia_spec(str(short_tmp / "cdi"), GPUS)
    cdi = [str(short_tmp / "cdi")]
    with StubKubelet(short_tmp / "k", cdi, gpus=GPUS, rng=random.Random(1), nri=nri.factory) as stub:
        yield stub


@pytest.fixture
def scheduler(kubelet: StubKubelet) -> Scheduler:
    return Scheduler(kubelet, gpus=GPUS, gpu_mib=8192, prefix=PREFIX, gpu_kind=KIND)


def reserved(kubelet: StubKubelet) -> list[tuple[str, ...]]:
    """What PodResources shows of reservation pods."""
    client = PodResourcesClient(kubelet.pod_resources_socket)
    try:
        return sorted(held[KIND] for (namespace, _, _), held in client.list().items() if namespace == KEEPER)
    finally:
        client.close()


def devices(pod: AdmittedPod) -> str:
    return pod.spec.annotations[f"{PREFIX}main{DEVICES}"]


def test_a_gpu_is_kept_while_somebody_shares_it(kubelet: StubKubelet, scheduler: Scheduler) -> None:
    one, two = scheduler.admit(pod("one")), scheduler.admit(pod("two", "3Gi"))
    assert (one.phase, two.phase) == (Phase.ADMITTED, Phase.ADMITTED)
    assert devices(one) == devices(two) == "k8s.device-plugin.nvidia.com/gpu=GPU-0"
    assert reserved(kubelet) == [("GPU-0",)]
    assert [(group.gpu, group.booked_mib, group.pods) for group in scheduler.groups] == [("GPU-0", 7168, 2)]
    kubelet.delete(one)
    scheduler.sync()
    assert reserved(kubelet) == [("GPU-0",)]
    kubelet.delete(two)
    scheduler.sync()
    assert reserved(kubelet) == []
    assert kubelet.pods() == []


def test_a_reservation_pod_runs_with_its_gpu_and_learns_it_there(
    kubelet: StubKubelet, scheduler: Scheduler, nri: ScriptedNri
) -> None:
    scheduler.admit(pod("one", mode="sm-sharing"))
    (keeper,) = (p for p in kubelet.pods() if p.spec.namespace == KEEPER)
    assert keeper.spec.annotations["run.ai/reserve_for_gpu_index"] == "GPU-0"
    assert keeper.container().process_env["GPUFRAC_SIM_DEVICES"] == "GPU-0"
    (sandbox,) = (p for p in nri.inventory()[0] if p.namespace == KEEPER)
    assert sandbox.annotations[f"{PREFIX}resource-reservation{MODE}"] == "sm-sharing"
    assert "run.ai/reserve_for_gpu_index" not in sandbox.annotations, "its sandbox is older"
    assert kubelet.restart() == []
    assert reserved(kubelet) == [("GPU-0",)]


def test_devices_by_env_where_the_runtime_goes_by_that(kubelet: StubKubelet) -> None:
    scheduler = Scheduler(kubelet, gpus=GPUS, gpu_mib=8192, prefix=PREFIX, gpu_kind="")
    assert devices(scheduler.admit(pod("one"))) == "GPU-0"
    (keeper,) = (p for p in kubelet.pods() if p.spec.namespace == KEEPER)
    assert keeper.container().process_env["GPUFRAC_SIM_DEVICES"] == "GPU-0"


def test_what_fits_nowhere_is_pending_and_not_kept(kubelet: StubKubelet, scheduler: Scheduler) -> None:
    for name, mode in (("one", "time-slicing"), ("two", "sm-sharing")):
        scheduler.admit(pod(name, "8000Mi", mode))
    found = scheduler.admit(pod("three"))
    assert (found.phase, found.reason) == (Phase.PENDING, "Unschedulable")
    assert found.message.startswith("no nodes with enough resources were found: 1 node(s) didn't have")
    assert found.settled
    assert found.spec.full_name not in {p.spec.full_name for p in kubelet.pods()}
    assert len(reserved(kubelet)) == 2


def test_a_reservation_pod_that_does_not_start_is_taken_back(
    kubelet: StubKubelet, scheduler: Scheduler, nri: ScriptedNri, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deviceplugin.sim.node.scheduler.RESERVE_S", 0.2)
    nri.refusals["create"] = "not me"
    found = scheduler.admit(pod("one"))
    assert (found.phase, found.reason) == (Phase.PENDING, "BindingError")
    assert f"reservation pod {KEEPER}/gpu-reservation-" in found.message
    assert "not me" in found.message
    assert kubelet.pods() == []


def test_a_gpu_that_others_use_comes_last(kubelet: StubKubelet, scheduler: Scheduler) -> None:
    kubelet.admit(replace(pod("by-hand", **{f"{PREFIX}main{DEVICES}": "GPU-0"}), scheduler=""))
    assert devices(scheduler.admit(pod("one"))).endswith("GPU-1")
    assert devices(scheduler.admit(pod("two", mode="sm-sharing"))).endswith("GPU-0")


def test_it_takes_fractional_pods_with_its_name(scheduler: Scheduler) -> None:
    assert scheduler.takes(pod("p"))
    assert not scheduler.takes(replace(pod("p"), scheduler=""))
    assert not scheduler.takes(replace(pod("p"), scheduler="other"))
    assert not scheduler.takes(replace(pod("p"), annotations={}))


def test_what_admission_denies(scheduler: Scheduler) -> None:
    wrong = pod("p", "4GiB")
    with pytest.raises(DeniedError):
        scheduler.admit(wrong)
    loaded = [
        LoadedPod(wrong, "a.yaml (document 1)"),
        LoadedPod(wrong, "a.yaml (document 1)"),
        LoadedPod(pod("q"), "b.yaml"),
        LoadedPod(PodSpec("r", (ContainerSpec("c"),), annotations={"gpu-fraction-num-devices": "2"}), "c.yaml"),
        LoadedPod(
            PodSpec(
                "s", (ContainerSpec("c"),), annotations={"gpu-fraction-num-devices": "2"}, scheduler="kai-scheduler"
            ),
            "d.yaml",
        ),
        LoadedPod(pod("t", **{f"{PREFIX}main{DEVICES}": "0"}), "e.yaml"),
        LoadedPod(replace(wrong, scheduler=""), "f.yaml"),
    ]
    found = denials(loaded, PREFIX)
    assert [line.partition(":")[0] for line in found] == ["a.yaml (document 1)", "d.yaml", "e.yaml"]
    assert found[0].startswith(
        "a.yaml (document 1): pod default/p: KAI's admission denied the request: nvidia.com/container"
    )
    with pytest.raises(ConfigError):
        check(loaded, PREFIX)
