"""The whole plugin at a real containerd: annotated pods get what was promised, or are not made. GPUs are simulated."""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.sim.runtime.nvidia import write_nvidia_spec
from deviceplugin.status.model import PluginStatus
from mpsd.localapi.snapshot import LimitQuery
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.model import gpu_uuid
from tests.e2e.containerd.cri import CriError
from tests.e2e.containerd.node import Containerd, why_not
from tests.e2e.pluginnode import PluginNode, kill
from tests.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(_reason := why_not()), reason=f"containerd: {_reason}"),
]
RESOURCES = "\n  - {name: gpufrac.dev/gpu-8gi, memory: {request: 8Gi}, compute: {mode: sm-sharing}}\n"
ANNOTATED = """
annotations: {{gpus: {{include: all}}, share: true, trust: any}}
nri: {{socket: {socket}}}
"""


class Node:
    """A containerd and a plugin that knows it."""

    def __init__(self, plugin: PluginNode, containerd: Containerd) -> None:
        self.plugin, self.containerd, self.cri = plugin, containerd, containerd.cri
        self.directories: dict[str, Path] = {}
        self.driver = SimulatedDriver(self.plugin.mpsd.simulation)

    def begin(self) -> None:
        write_nvidia_spec(str(self.containerd.cdi_directory), [gpu_uuid(0), gpu_uuid(1)])
        self.process = self.plugin.start("gpufrac.dev/gpu-8gi")
        self.until_registered()

    def until_registered(self) -> PluginStatus:
        return self.plugin.until_status(lambda s: s.annotated is not None and s.annotated.readiness == "True")

    def pod(self, name: str, keys: Mapping[str, str]) -> str:
        """A pod as the kubelet makes it, with the directory it has one in. Its sandbox."""
        annotations = {f"nvidia.com/container.main.{key}": value for key, value in keys.items()}
        pod = self.cri.run_pod(name, uid=f"uid-{name}", annotations=annotations)
        self.directories[pod] = Path(self.plugin.root, "kubelet", "pods", f"uid-{name}")
        self.directories[pod].mkdir(parents=True)
        return pod

    def create(self, pod: str, *args: Any, **more: Any) -> str:
        """Creates its container `main`, and tries until that is allowed, as the kubelet does: a daemon may take longer
        than a runtime waits."""
        said = ""

        def made() -> str:
            nonlocal said
            try:
                return self.cri.create(pod, "main", *args, **more)
            except CriError as error:
                said = str(error)
                return ""

        return until(made, lambda: said)

    def make_cgroup(self, path: str) -> str:
        """A cgroup that the simulated driver can keep limits on, named as a real one."""
        directory = Path(self.driver.make_cgroup(path))
        passed_on = (Path(self.driver.cgroups.root) / "cgroup.subtree_control").read_text()
        for above in (directory.parent.parent, directory.parent):
            (above / "cgroup.subtree_control").write_text(passed_on)
        self.driver.settle_cgroups()
        return str(directory)

    def end(self, pod: str) -> None:
        self.cri.stop_pod(pod)
        self.cri.remove_pod(pod)
        self.directories.pop(pod).rmdir()


def up(driver: str) -> Iterator[Node]:
    directory = Path(tempfile.mkdtemp(prefix="gf-", dir="/tmp"))
    root, other = directory / "n", directory / "c"
    root.mkdir()
    other.mkdir()
    try:
        plugin = PluginNode(root, 2, RESOURCES, ANNOTATED.format(socket=other / "nri.sock"), driver)
        with contextlib.closing(plugin), Containerd(other, root / "cdi") as containerd:
            node = Node(plugin, containerd)
            node.begin()
            yield node
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def node() -> Iterator[Node]:
    yield from up("580.95.05")


@pytest.fixture
def node_615() -> Iterator[Node]:
    yield from up("615.71.09")


KEYS = {"gpu-memory.limit": "8Gi", "gpu-compute.mode": "sm-sharing", "gpus.devices": gpu_uuid(1)}


def test_an_annotated_container_is_made_with_its_gpu_its_daemon_and_its_limit(node: Node) -> None:
    pod = node.pod("trainer", KEYS)
    # The pod's own wishes, twice: of two equal names an adjustment of the environment would change the first only.
    own = [("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=79G"), ("NVIDIA_VISIBLE_DEVICES", "all")]
    container = node.create(pod, [*own, *own])
    node.cri.start(container)
    env = node.containerd.exec_env(container)
    (allocation,) = node.plugin.status().allocations
    assert env["GPUFRAC_ALLOCATION"] == allocation.key
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert node.containerd.inside(container, "/dev/nvidia1").exists()
    assert not node.containerd.inside(container, "/dev/nvidia0").exists()
    assert (node.containerd.inside(container, env["CUDA_MPS_PIPE_DIRECTORY"]) / "control").is_socket()
    assert (allocation.pod, allocation.container, allocation.gpus) == ("trainer", "main", (gpu_uuid(1),))
    node.end(pod)
    node.plugin.until_status(lambda s: not s.allocations)


def test_what_cant_be_kept_is_not_made_and_the_runtime_is_told_why(node: Node) -> None:
    pod = node.pod("greedy", KEYS | {"gpu-memory.limit": "81Gi"})
    with pytest.raises(CriError, match=r"its request of 81Gi is above the 80405Mi usable on GPU 1"):
        node.cri.create(pod, "main")
    other = node.cri.create(pod, "sidecar")  # not described by annotations
    node.cri.start(other)
    sliced = node.pod("sliced", {"gpu-memory.limit": "1Gi", "gpus.devices": "0"})
    with pytest.raises(CriError, match=r"time-slicing .the default., which has a memory limit only with hard"):
        node.cri.create(sliced, "main")
    assert {r.pod for r in node.plugin.status().annotated.refusing} == {"greedy", "sliced"}  # type: ignore[union-attr]
    node.end(pod)
    node.plugin.until_status(lambda s: [r.pod for r in s.annotated.refusing] == ["sliced"])  # type: ignore[union-attr]


def test_a_hard_limit_stands_on_the_cgroup_before_the_program_starts(node_615: Node) -> None:
    node = node_615
    pod = node.pod("hard", {"gpu-memory.limit": "8Gi", "gpu-memory.request": "4Gi", "gpus.devices": "1"})
    container = node.create(pod)
    with pytest.raises(CriError, match="its memory limit of 8Gi can't be put in force"):
        node.cri.start(container)  # the simulated driver knows no such cgroup
    node.cri.remove(container)
    second = node.create(pod)
    path = node.cri.status(second).spec["linux"]["cgroupsPath"]
    cgroup = node.make_cgroup(path)
    node.cri.start(second)
    reading = node.plugin.mpsd.client.limits([LimitQuery(gpu_uuid(1), cgroup)])[0]
    assert (reading.soft_bytes, reading.hard_bytes) == (4 << 30, 8 << 30)


def test_annotations_lower_the_limit_of_a_share(node: Node) -> None:
    """The runtime has applied the share's CDI device before it asks us, and its old limit stands in the environment."""
    held = node.plugin.admit_running("lower", "gpufrac.dev/gpu-8gi")
    edits = held.container("main").edits
    assert edits is not None
    assert edits.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    pod = node.cri.run_pod("lower", uid=held.uid, annotations={"nvidia.com/container.main.gpu-memory.limit": "3Gi"})
    own = [("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=79G")]
    container = node.create(pod, own, cdi_devices=edits.cdi_devices)
    node.cri.start(container)
    env = node.containerd.exec_env(container)
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=3072M"
    assert env["GPUFRAC_MEMORY_LIMIT_BYTES"] == str(3 << 30)
    (allocation,) = node.plugin.status().allocations
    assert (allocation.limit_bytes, allocation.request_bytes) == (3 << 30, 8 << 30)
    assert env["GPUFRAC_ALLOCATION"] == allocation.key
    node.cri.stop_pod(pod)
    node.cri.remove_pod(pod)


def test_a_kill_of_the_plugin_loses_nothing_and_what_was_made_meanwhile_is_told(node: Node) -> None:
    first = node.pod("first", KEYS)
    container = node.create(first)
    node.cri.start(container)
    before = node.plugin.status().allocations[0]
    kill(node.process)
    second = node.pod("second", KEYS)
    alone = node.cri.create(second, "main")  # the runtime goes on without us
    node.cri.start(alone)
    node.process = node.plugin.start_plugin()
    status = node.until_registered()
    status = node.plugin.until_status(lambda s: len(s.allocations) == 2)
    assert [u.pod for u in status.annotated.unenforced] == ["second"]  # type: ignore[union-attr]
    assert {a.pod: a.enforcement for a in status.allocations} == {"first": "cooperative", "second": "none"}
    assert before.key in {a.key for a in status.allocations}
    # Made again, it is as it should be.
    node.cri.stop(alone, 0)
    node.cri.remove(alone)
    again = node.create(second)
    node.cri.start(again)
    status = node.plugin.until_status(lambda s: not s.annotated.unenforced)  # type: ignore[union-attr]
    assert {a.enforcement for a in status.allocations} == {"cooperative"}
    assert os.path.exists(f"/proc/{node.cri.status(container).pid}"), "nobody was touched"


def test_a_restart_of_the_runtime_is_survived(node: Node) -> None:
    pod = node.pod("stays", KEYS)
    container = node.create(pod)
    node.cri.start(container)
    before = node.plugin.status().allocations
    gone = node.pod("goes", KEYS)
    node.cri.start(node.create(gone))
    node.containerd.stop(signal.SIGKILL)
    node.plugin.until_status(lambda s: s.annotated is not None and not s.annotated.runtime)
    node.containerd.start()
    node.until_registered()
    node.end(gone)
    status = node.plugin.until_status(lambda s: len(s.allocations) == 1)
    assert [a.key for a in status.allocations] == [a.key for a in before]
    assert status.annotated is not None
    assert status.annotated.unenforced == ()
