"""Containers of which no message of the runtime reached us."""

from pathlib import Path

import pytest

from deviceplugin.annotated.absence import STARTED_ALONE
from deviceplugin.annotated.frontend import COMPARE_S
from deviceplugin.kubelet import cri
from deviceplugin.nri.model import Container, ContainerState, Pod
from deviceplugin.sim.runtime.cri import CriServer
from mpsd.common.errors import TransientError
from mpsd.common.processes import PodProcess
from mpsd.common.reason import Reason
from tests.unit.deviceplugin.annotated.frontendnode import PREFIX, Node, container, env_of, keys, pod

ASK = pod(keys(limit="8Gi"))
SCOPE = "cri-containerd-id-main.scope"


def compared(node: Node, *processes: PodProcess, of: Pod = ASK, name: str = "main") -> list[Reason]:
    """Why containers run unenforced, after one comparison with a runtime that has a container of a pod running."""
    node.listed = [of], [container(name, id="id-main", pod_id=of.id, state=ContainerState.RUNNING)]
    node.processes = {of.uid: list(processes)}
    node.now_s += COMPARE_S
    node.frontend.tend()
    return [one.reason for one in node.frontend.report.unenforced]


def test_a_container_that_was_made_while_we_were_being_told_of_all_is_found(node: Node) -> None:
    assert compared(node, PodProcess(7, SCOPE, None)) == [STARTED_ALONE]
    (counted,) = node.broker.allocations()
    assert counted.runs_unenforced, "what it takes counts"
    assert len(node.frontend.report.unenforced) == 1
    assert compared(node, PodProcess(7, SCOPE, None)) == [STARTED_ALONE], "once"
    assert len(node.broker.allocations()) == 1
    node.frontend.stop_pod(ASK)
    assert compared(node) == []


def test_a_container_that_was_made_again_without_a_word_is_found(node: Node) -> None:
    key = env_of(node.create(ASK, container()))["GPUFRAC_ALLOCATION"]
    assert compared(node, PodProcess(7, SCOPE, key)) == []
    assert compared(node, PodProcess(8, SCOPE, None)) == [STARTED_ALONE]


@pytest.mark.parametrize(
    "processes",
    [
        (),  # it has ended, or is not there yet
        (PodProcess(7, SCOPE, None, unreadable=True),),
        (PodProcess(7, "cri-containerd-other.scope", None),),  # of another container of the pod
    ],
)
def test_nobody_is_accused_without_proof(node: Node, processes: tuple[PodProcess, ...]) -> None:
    assert compared(node, *processes) == []


def test_containers_without_annotations_are_no_business_of_ours(node: Node) -> None:
    assert compared(node, PodProcess(7, SCOPE, None), name="sidecar") == []
    assert compared(node, PodProcess(7, SCOPE, None), of=pod({}, "q")) == []
    mode_alone = pod({f"{PREFIX}main.gpu-compute.mode": "sm-sharing"}, "q")
    assert compared(node, PodProcess(7, SCOPE, None), of=mode_alone) == []
    assert node.holds_nothing()


def test_that_nothing_can_be_compared_is_reporter(node: Node) -> None:
    node.listed = TransientError("cannot connect")
    node.now_s += COMPARE_S
    node.frontend.tend()
    assert node.frontend.report.uncompared == "cannot connect"
    compared(node)
    assert node.frontend.report.uncompared == ""


def test_what_a_runtime_has_is_read_over_cri(short_tmp: Path) -> None:
    path = str(short_tmp / "cri.sock")
    running = container("main", pod_id=ASK.id, state=ContainerState.RUNNING, annotations={"k": "v"})
    made = container("next", pod_id=ASK.id, state=ContainerState.CREATED)
    server = CriServer(path, lambda _: None, ("containerd", "2.1.9"), lambda: ([ASK], [running, made]))
    server.start()
    try:
        pods, containers = cri.inventory(path)
    finally:
        server.close()
    assert [one.state for one in containers] == [ContainerState.RUNNING, ContainerState.CREATED]
    ((got,), (one, _)) = (pods, containers)
    assert (got.id, got.uid, got.full_name, got.annotations) == (ASK.id, ASK.uid, ASK.full_name, ASK.annotations)
    assert one == Container(
        id=running.id, pod_id=ASK.id, name="main", state=ContainerState.RUNNING, annotations={"k": "v"}
    )
    with pytest.raises(cri.CriError):
        cri.inventory(path)


def test_a_key_for_a_container_that_the_pod_does_not_have_is_told_once_all_are_made(node: Node) -> None:
    odd = pod(keys("trianer", limit="8Gi"))
    node.frontend.run_pod(odd)
    node.kubelet.containers |= {("ns", "p", "trainer"): {}, ("ns", "p", "proxy"): {}}
    node.keeper.observe()
    made = [container(name, pod_id=odd.id, state=ContainerState.RUNNING) for name in ("setup", "trainer")]
    for listed, told in ((made, False), ([*made, container("proxy", pod_id=odd.id)], True)):
        node.listed = [odd], listed
        node.now_s += COMPARE_S
        node.frontend.tend()
        assert bool(node.frontend.report.findings) is told
    ((_, finding),) = node.frontend.report.findings[:1]
    assert "the pod has no container trianer; did you mean nvidia.com/container.trainer.gpu-memory.limit?" in str(
        finding
    )
    events = len(node.said.events)
    node.now_s += COMPARE_S
    node.frontend.tend()
    node.frontend.synchronize([odd], [])
    assert len(node.frontend.report.findings) == 2, "its limit and its devices"
    assert len(node.said.events) == events, "told once"
