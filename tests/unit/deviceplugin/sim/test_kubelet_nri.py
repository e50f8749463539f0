"""What the stub kubelet makes of an NRI plugin's refusals and of stopped containers; and devices of other plugins."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deviceplugin.kubelet import checkpoint as plugin_checkpoint
from deviceplugin.kubelet.cri import stop_container
from deviceplugin.kubelet.podresources import PodResourcesClient
from deviceplugin.nri.model import Adjustment, ContainerState
from deviceplugin.sim.kubelet.devicemanager import Held
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from deviceplugin.sim.kubelet.pod import AdmittedPod, Phase
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec, Role
from deviceplugin.sim.runtime.container import State
from deviceplugin.sim.runtime.nri import NriRuntime
from tests.unit.deviceplugin.sim.scriptednri import ScriptedNri
from tests.unit.deviceplugin.sim.tinyplugin import RESOURCE, TinyPlugin
from tests.waiting import WAIT_S

POD = PodSpec("p", (ContainerSpec("c"),))


@pytest.fixture
def nri() -> ScriptedNri:
    return ScriptedNri()


@pytest.fixture
def kubelet(short_tmp: Path, nri: ScriptedNri) -> Iterator[StubKubelet]:
    (short_tmp / "cdi").mkdir()
    with StubKubelet(short_tmp / "k", [str(short_tmp / "cdi")], rng=random.Random(1), nri=nri.factory) as stub:
        yield stub
    assert not nri.serving


def wait_until(kubelet: StubKubelet, condition: object) -> None:
    assert callable(condition)
    with kubelet._changed:
        assert kubelet._changed.wait_for(condition, WAIT_S)


def running(kubelet: StubKubelet, spec: PodSpec = POD) -> AdmittedPod:
    pod = kubelet.admit(spec)
    assert kubelet.wait_settled([pod], WAIT_S), [c.message for c in pod.containers]
    return pod


def test_nri_is_the_runtimes_and_outlives_the_kubelet(kubelet: StubKubelet, nri: ScriptedNri) -> None:
    assert kubelet.nri is nri
    pod = running(kubelet)
    kubelet.stop()
    assert nri.serving
    kubelet.start()
    kubelet.delete(pod)
    assert nri.asked == ["run p", "create c", "start c", "stop-container c", "stop p", "remove c", "remove-pod p"]


def test_a_refused_creation_is_tried_again(kubelet: StubKubelet, nri: ScriptedNri) -> None:
    nri.refusals["create"] = "no room"
    pod = kubelet.admit(POD)
    assert not kubelet.wait_settled([pod], WAIT_S, refused_s=0.2), "it gives up on what is always the same"
    container = pod.container()
    assert (container.state, container.reason) == (State.WAITING, "CreateContainerError")
    assert container.message.endswith("rpc error: code = Unknown desc = no room")
    assert len({c.id for _, c in nri.created}) == len(nri.created) > 1, "each time it is another container"
    nri.refusals = {}
    assert kubelet.wait_settled([pod], WAIT_S, refused_s=60)
    assert (container.state, container.message, container.refused_since_s) == (State.RUNNING, "", None)


def test_a_refused_start_is_made_anew(kubelet: StubKubelet, nri: ScriptedNri) -> None:
    nri.refusals["start"] = "no limit"
    pod = kubelet.admit(POD)
    container = pod.container()
    wait_until(kubelet, lambda: len(nri.starting) >= 2)
    assert (container.state, container.reason) == (State.WAITING, "RunContainerError")
    assert container.message == "NRI container start failed: rpc error: code = Unknown desc = no limit"
    nri.refusals = {}
    assert kubelet.wait_settled([pod], WAIT_S)
    assert container.id == nri.starting[-1].id


def test_with_restart_policy_never_a_refused_start_is_the_end(kubelet: StubKubelet, nri: ScriptedNri) -> None:
    nri.refusals["start"] = "no limit"
    pod = kubelet.admit(replace(POD, restart_policy="Never"))
    assert kubelet.wait_settled([pod], WAIT_S)
    container = pod.container()
    assert (container.state, container.reason) == (State.TERMINATED, "StartError")
    assert container.message.endswith("no limit")
    assert len(nri.starting) == 1
    assert nri.inventory()[1] == ()


def test_nothing_comes_after_an_init_container_that_failed(kubelet: StubKubelet, nri: ScriptedNri) -> None:
    nri.refusals["start"] = "no limit"
    containers = (ContainerSpec("i", role=Role.INIT), ContainerSpec("c"))
    pod = kubelet.admit(PodSpec("p", containers, restart_policy="Never"))
    assert kubelet.wait_settled([pod], WAIT_S)
    assert [(c.state, c.reason) for c in pod.containers] == [
        (State.TERMINATED, "StartError"),
        (State.WAITING, "ContainerCreating"),
    ]
    assert nri.asked == ["run p", "create i", "start i", "stop-container i"]


def test_without_a_plugin_containers_are_created_as_they_are(short_tmp: Path) -> None:
    path = str(short_tmp / "nri.sock")
    with StubKubelet(short_tmp / "k", [], nri=lambda inventory: NriRuntime(path, inventory=inventory)) as kubelet:
        assert os.path.exists(path)
        assert kubelet.nri is not None
        assert kubelet.nri.plugins == ()
        running(kubelet)
    assert not os.path.exists(path)


def test_an_adjusted_container_is_shown_with_what_it_got(kubelet: StubKubelet, nri: ScriptedNri) -> None:
    nri.adjustment = Adjustment(env=(("A", "1"),))
    pod = running(kubelet)
    edits = pod.container().edits
    assert edits is not None
    assert edits.env == {"A": "1"}
    assert pod.container().process_env["A"] == "1"


# --- containers that end, and come again


def test_a_container_that_restarts_is_another_one_in_the_same_sandbox(kubelet: StubKubelet, nri: ScriptedNri) -> None:
    pod = running(kubelet)
    before = pod.container().id
    kubelet.restart_container(pod)
    assert kubelet.wait_settled([pod], WAIT_S)
    assert pod.container().id != before
    twice = ["run p", "create c", "start c", "stop-container c", "create c", "start c"]
    assert nri.asked == twice, "the old one is kept for a while"
    assert [(c.id, c.state) for c in nri.inventory()[1]] == [(pod.container().id, ContainerState.RUNNING)]


def test_a_container_is_stopped_through_the_cri_socket(short_tmp: Path) -> None:
    cri = str(short_tmp / "cri.sock")
    with StubKubelet(short_tmp / "k", [], cri_socket=cri) as kubelet:
        pod, last = running(kubelet), running(kubelet, replace(POD, name="q", restart_policy="Never"))
        container = pod.container()
        before, process = container.id, container.process
        assert process is not None
        assert stop_container(cri, before) == ""
        assert process.poll() is not None, "it has stopped when the call returns"
        wait_until(kubelet, lambda: container.id != before and container.state is State.RUNNING)
        assert stop_container(cri, before) == "", "it is gone already"
        assert stop_container(cri, last.container().id) == ""
        assert (last.container().state, last.container().reason) == (State.TERMINATED, "Error")
    assert stop_container(cri, before).startswith("the container runtime does not stop it")


def test_a_container_is_stopped_while_the_kubelet_is_away(short_tmp: Path, nri: ScriptedNri) -> None:
    cri = str(short_tmp / "cri.sock")
    with StubKubelet(short_tmp / "k", [], nri=nri.factory, cri_socket=cri) as kubelet:
        pod = running(kubelet)
        container = pod.container()
        before = container.id
        kubelet.stop()
        assert stop_container(cri, before) == ""
        assert (container.pid, nri.inventory()[1]) == (None, ())
        assert kubelet.restart(readmit_after_s=0.0) == []
        assert kubelet.wait_settled([pod], WAIT_S)
        assert (container.id != before, container.restarts) == (True, 1)
        kubelet.delete(pod)
        assert stop_container(cri, container.id) == ""
    assert nri.asked[:6] == ["run p", "create c", "start c", "stop-container c", "create c", "start c"]


# --- devices of other plugins

GIVEN = {"c": {"nvidia.com/gpu": Held({-1: ("GPU-0",)}, b"")}}
WHOLE = PodSpec("whole", (ContainerSpec("c", {"nvidia.com/gpu": 1}),))


def listed(kubelet: StubKubelet) -> dict[str, dict[str, tuple[str, ...]]]:
    client = PodResourcesClient(kubelet.pod_resources_socket)
    try:
        return {pod: held for (_, pod, _), held in client.list().items()}
    finally:
        client.close()


def test_a_pod_may_hold_devices_of_a_plugin_that_is_not_here(kubelet: StubKubelet) -> None:
    pod = kubelet.admit(WHOLE, GIVEN)
    assert kubelet.wait_settled([pod], WAIT_S)
    assert pod.container().devices == {"nvidia.com/gpu": ("GPU-0",)}
    assert listed(kubelet) == {"whole": {"nvidia.com/gpu": ("GPU-0",)}}
    (entry,) = plugin_checkpoint.read(kubelet.device_plugins)
    assert (entry.resource, entry.pod_uid) == ("nvidia.com/gpu", pod.uid)
    assert not kubelet.serves("nvidia.com/gpu"), "others get none of it"
    other = kubelet.admit(replace(WHOLE, name="other"))
    assert (other.phase, other.container().devices) == (Phase.ADMITTED, {})
    assert kubelet.restart() == []
    assert listed(kubelet)["whole"] == {"nvidia.com/gpu": ("GPU-0",)}
    kubelet.delete(pod)
    assert listed(kubelet) == {"other": {}}


def test_devices_given_and_devices_asked_for_live_side_by_side(kubelet: StubKubelet) -> None:
    with TinyPlugin(kubelet.device_plugins, ["a", "b"]):
        assert kubelet.wait_for(RESOURCE, 2, WAIT_S)
        mixed = PodSpec("mixed", (ContainerSpec("c", {"nvidia.com/gpu": 1, RESOURCE: 2}),))
        pod = kubelet.admit(mixed, GIVEN)
        assert pod.container().devices == {"nvidia.com/gpu": ("GPU-0",), RESOURCE: ("a", "b")}
