"""What the runtime remembers and tells NRI plugins, over the life of containers."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.nri.model import Adjustment, ContainerState, Mount
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec
from deviceplugin.sim.runtime.container import CreateContainerError, Created, StartContainerError
from deviceplugin.sim.runtime.nvidia import write_nvidia_spec
from deviceplugin.sim.runtime.runtime import Runtime
from deviceplugin.sim.runtime.sandboxes import sandbox_id
from mpsd.config.model import GIB, SimulatedConfig, SimulatedGpu
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.model import gpu_uuid
from tests.unit.deviceplugin.sim.scriptednri import ScriptedNri
from tests.waiting import WAIT_S

UID = "0a1b-2c3d"
POD = PodSpec(
    "p", (ContainerSpec("c", env=(("A", "pod"),)), ContainerSpec("d")), annotations={"k": "v"}, labels={"l": "1"}
)
MAIN = POD.containers[0]


class Node:
    def __init__(self, directory: Path) -> None:
        config = SimulatedConfig(gpus=(SimulatedGpu(memory_bytes=80 * GIB),), driver="615.71.09")
        self.driver = SimulatedDriver.create(str(directory / "sim"), config)
        (directory / "cdi").mkdir()
        write_nvidia_spec(str(directory / "cdi"), [gpu_uuid(0)], memory_hook=True)
        self.nri = ScriptedNri()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.runtime = Runtime(
            [str(directory / "cdi")],
            [gpu_uuid(0)],
            nvidia_runtime=False,
            simulation_directory=self.driver.directory,
            nri=self.nri.factory,
        )

    def run(self, container: ContainerSpec = MAIN, *, to_completion: bool = False) -> Created:
        created = self.runtime.create(POD, UID, container)
        process, _ = self.runtime.start(created, to_completion=to_completion)
        self.processes.append(process)
        return created

    def end(self, container: str = "") -> None:
        self.runtime.end(self.processes, UID, container)

    def states(self) -> dict[str, ContainerState]:
        return {container.id: container.state for container in self.nri.inventory()[1]}


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    node = Node(short_tmp)
    yield node
    node.end()
    node.runtime.remove(UID)


def test_the_life_of_a_pod(node: Node) -> None:
    first = node.run()
    node.run(POD.containers[1])
    assert node.nri.asked == ["run p", "create c", "start c", "create d", "start d"]
    assert node.states()[first.id] is ContainerState.RUNNING
    node.end()
    assert node.states() == {}, "what has ended is not shown"
    node.runtime.remove(UID)
    assert node.nri.asked[5:] == [
        "stop-container c",
        "stop-container d",
        "stop p",
        "remove c",
        "remove d",
        "remove-pod p",
    ]
    assert node.nri.inventory() == ((), ())
    node.runtime.remove(UID)
    assert len(node.nri.calls) == 11, "it is gone, and nothing more is said of it"


def test_what_plugins_are_told_of_a_pod_and_a_container(node: Node) -> None:
    created = node.run()
    ((pod, container),) = node.nri.created
    assert (pod.name, pod.namespace, pod.uid, pod.id) == ("p", "default", UID, sandbox_id(UID))
    assert pod.annotations["k"] == "v"
    assert pod.annotations["io.kubernetes.cri.container-type"] == "sandbox"
    assert pod.labels["l"] == "1"
    assert pod.pid
    assert pod.cgroup_parent == "/kubepods.slice/kubepods-pod0a1b_2c3d.slice"
    assert (container.id, container.pod_id, container.state, container.pid) == (created.id, pod.id, 0, 0)
    assert len(created.id) == 64
    assert int(created.id, 16)
    assert container.variable("A") == "pod"
    assert container.cgroups_path == f"kubepods-pod0a1b_2c3d.slice:cri-containerd:{created.id}"
    assert container.cdi_devices == ()
    ((shown,), (running,)) = node.nri.inventory()
    assert shown == pod
    assert (running.id, running.state, running.pid) == (created.id, ContainerState.RUNNING, node.processes[0].pid)


def test_the_cgroup_is_there_at_the_start_and_the_process_is_not(node: Node) -> None:
    seen: list[tuple[bool, str]] = []

    def look(container: object) -> None:
        identifier = node.nri.starting[-1].id
        directory = Path(node.driver.cgroups.root, "kubepods.slice/kubepods-pod0a1b_2c3d.slice")
        procs = directory / f"cri-containerd-{identifier}.scope" / "cgroup.procs"
        seen.append((procs.exists(), procs.read_text()))

    node.nri.on_start = look
    node.run()
    assert seen == [(True, "")]
    assert node.nri.starting[0].state is ContainerState.CREATED


def test_an_adjustment_is_in_force_and_shown_from_then_on(node: Node) -> None:
    node.nri.adjustment = Adjustment(
        env=(("A", "plugin"),), cdi_devices=(f"k8s.device-plugin.nvidia.com/gpu={gpu_uuid(0)}",)
    )
    created = node.run()
    assert created.edits.env == {"A": "plugin", "NVIDIA_VISIBLE_DEVICES": "void"}
    assert created.edits.cdi_devices == node.nri.adjustment.cdi_devices
    assert "/dev/nvidia0" in {str(device["path"]) for device in created.edits.device_nodes}
    assert len(created.edits.hooks) == 1
    assert node.nri.starting[0].variable("A") == "plugin"
    assert node.nri.inventory()[1][0].variable("A") == "plugin"


def test_the_memory_hook_of_an_adjustments_device_runs_before_the_plugin_is_asked(node: Node) -> None:
    limits: list[str] = []
    node.nri.adjustment = Adjustment(
        env=(("NVIDIA_GPU_MEMORY_LIMIT", "8192"),), cdi_devices=(f"k8s.device-plugin.nvidia.com/gpu={gpu_uuid(0)}",)
    )
    node.nri.on_start = lambda container: limits.append(
        Path(
            node.driver.cgroups.root,
            f"kubepods.slice/kubepods-pod0a1b_2c3d.slice/cri-containerd-{container.id}.scope/dmem.max",
        ).read_text()
    )
    node.run()
    assert limits[0].split()[1] == str(8192 << 20)


def test_a_mount_of_what_is_not_there_fails_the_start(node: Node, tmp_path: Path) -> None:
    node.nri.adjustment = Adjustment(mounts=(Mount("/in", f"{tmp_path}/none", options=("rbind", "ro")),))
    with pytest.raises(StartContainerError, match=r"error mounting .* no such file or directory"):
        node.run()
    (tmp_path / "none").mkdir()
    assert node.run().edits.mounts == (("/in", f"{tmp_path}/none", ("rbind", "ro")),)


@pytest.mark.parametrize("by_undo", [False, True])
def test_a_container_that_is_refused_has_never_been(node: Node, by_undo: bool) -> None:
    if by_undo:
        node.nri.adjustment = Adjustment(cdi_devices=("no.such/device=x",))
        text = (
            "failed to create container: failed to NRI-adjust container Spec: CDI device injection failed: "
            "unresolvable CDI devices no.such/device=x"
        )
    else:
        node.nri.refusals["create"] = "not today"
        text = (
            "failed to create container: failed to get NRI adjustment for container: "
            "rpc error: code = Unknown desc = not today"
        )
    with pytest.raises(CreateContainerError) as caught:
        node.run()
    assert str(caught.value).startswith(text)
    assert caught.value.refused is not by_undo
    assert not isinstance(caught.value, StartContainerError)
    assert node.nri.asked == ["run p", "create c", "remove c"], "undone, whoever it was that refused"
    assert node.states() == {}
    node.nri.refusals, node.nri.adjustment = {}, Adjustment()
    again = node.run()
    assert again.id != node.nri.created[0][1].id


def test_a_container_whose_start_is_refused_has_ended(node: Node) -> None:
    node.nri.refusals["start"] = "no limit"
    with pytest.raises(StartContainerError) as caught:
        node.run()
    assert str(caught.value) == "NRI container start failed: rpc error: code = Unknown desc = no limit"
    assert caught.value.refused
    assert node.states() == {}
    ended = ["run p", "create c", "start c", "stop-container c"]
    assert node.nri.asked == ended, "it is there, though it never ran"
    scopes = Path(node.driver.cgroups.root, "kubepods.slice/kubepods-pod0a1b_2c3d.slice").glob("*.scope")
    assert list(scopes) == []


def test_of_those_that_ended_the_last_is_kept(node: Node) -> None:
    ids = []
    for _ in range(3):
        ids.append(node.run().id)
        node.end("c")
    ids.append(node.run().id)
    assert node.states() == {ids[3]: ContainerState.RUNNING}
    assert [i for what, _, i in node.nri.calls if what == "remove"] == ids[:2]
    assert len(set(ids)) == 4
    assert [what for what, _, _ in node.nri.calls].count("run") == 1


def test_a_process_that_ended_by_itself_is_not_shown(node: Node) -> None:
    node.run(to_completion=True)
    assert node.processes[0].wait(WAIT_S) == 0
    assert node.states() == {}


def test_annotations_are_those_of_when_the_sandbox_was_made(node: Node) -> None:
    node.run()
    edited = PodSpec("p", POD.containers, annotations={"k": "other"})
    node.runtime.create(edited, UID, POD.containers[1])
    assert [pod.annotations["k"] for pod, _ in node.nri.created] == ["v", "v"]


def test_a_refused_sandbox_is_made_again(node: Node) -> None:
    node.nri.refusals["run"] = "wait"
    with pytest.raises(CreateContainerError, match="NRI RunPodSandbox failed: rpc error: code = Unknown desc = wait"):
        node.run()
    assert node.nri.inventory() == ((), ())
    node.nri.refusals = {}
    node.run()
    assert node.nri.asked == ["run p", "stop p", "remove-pod p", "run p", "create c", "start c"]


def test_no_plugin_can_keep_a_pod_from_going(node: Node) -> None:
    node.run()
    node.nri.refusals = dict.fromkeys(("stop", "remove", "remove-pod"), "never")
    node.end()
    node.runtime.remove(UID)
    assert node.nri.inventory() == ((), ())


def test_a_plugin_that_comes_while_a_container_is_created_is_told_of_it(node: Node) -> None:
    """It is not asked, since it came just after: so it has to find the container in what there is."""
    shown: list[set[str]] = []
    asking = threading.Event()

    class Slow(dict[str, str]):
        def __contains__(self, what: object) -> bool:
            if what == "create":
                asking.set()
            return super().__contains__(what)

    node.nri.refusals = Slow()

    def synchronize() -> None:
        asking.wait(WAIT_S)
        shown.append({container.name for container in node.nri.inventory()[1]})

    synchronizing = threading.Thread(target=synchronize)
    synchronizing.start()
    node.run()
    synchronizing.join()
    assert shown == [{"c"}]
