"""The runtime's part: merging answers, CDI edits, the devices a container sees, processes."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cdi.encode import encode_spec
from cdi.model import ContainerEdits, Device, Hook, Spec
from cdi.registry import Registry, find_gpu_kind
from cdi.scan import scan
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec
from deviceplugin.sim.runtime import hooks
from deviceplugin.sim.runtime.container import CreateContainerError, Created, StartContainerError
from deviceplugin.sim.runtime.edits import Edits, edits_of, merged_answer, oci_spec
from deviceplugin.sim.runtime.nvidia import DEVICE_PLUGIN_KIND, write_nvidia_spec
from deviceplugin.sim.runtime.processes import terminate
from deviceplugin.sim.runtime.runtime import Runtime
from mpsd.config.model import GIB, SimulatedConfig, SimulatedGpu
from mpsd.gpu.model import MIB
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.gpus import SimulatedBackend
from mpsd.sim.model import gpu_uuid
from tests.waiting import WAIT_S

GPUS = ("GPU-0", "GPU-1", "GPU-2")


def answer(*names: str, **envs: str) -> pb.ContainerAllocateResponse:
    return pb.ContainerAllocateResponse(envs=envs, cdi_devices=[pb.CDIDevice(name=name) for name in names])


def resolve(registry: Registry, given: pb.ContainerAllocateResponse, pod_env: dict[str, str]) -> Edits:
    return edits_of(*oci_spec(registry, given, pod_env))


def created(edits: Edits, uid: str = "uid") -> Created:
    return Created("0123", uid, "c", edits)


def pod(env: dict[str, str] | None = None) -> PodSpec:
    return PodSpec("p", (ContainerSpec("c", env=tuple((env or {}).items())),))


def test_of_several_answers_the_first_writer_wins_and_names_count_once() -> None:
    one = answer("a/b=c", X="1")
    one.mounts.add(container_path="/m", host_path="/1")
    one.devices.add(container_path="/d", host_path="/1", permissions="rw")
    two = answer("a/b=c", "a/b=d", X="2", Y="2")
    two.mounts.add(container_path="/m", host_path="/2")
    two.devices.add(container_path="/d", host_path="/2", permissions="r")
    merged = merged_answer([one, two])
    assert dict(merged.envs) == {"X": "1", "Y": "2"}
    assert [m.host_path for m in merged.mounts] == ["/1"]
    assert [d.host_path for d in merged.devices] == ["/1"]
    assert [d.name for d in merged.cdi_devices] == ["a/b=c", "a/b=d"]


@pytest.mark.parametrize(("cdi_wins", "expected"), [(True, "cdi"), (False, "pod")])
def test_a_runtime_lets_cdi_devices_or_the_pod_win(tmp_path: Path, cdi_wins: bool, expected: str) -> None:
    edits = ContainerEdits(env=("A=cdi", "B=cdi"))
    spec = Spec(kind="ab.example/cd", devices=(Device(name="dd", container_edits=edits),))
    (tmp_path / "x.json").write_bytes(encode_spec(spec))
    own = {"A": "pod", "C": "pod"}
    env = edits_of(
        *oci_spec(scan((str(tmp_path),)), answer("ab.example/cd=dd", D="answer"), own, cdi_wins=cdi_wins)
    ).env
    assert env == {"A": expected, "B": "cdi", "C": "pod", "D": "answer"}


def test_allocate_mounts_are_bind_mounts() -> None:
    given = answer()
    given.mounts.add(container_path="/m", host_path="/h", read_only=True)
    assert resolve(scan(()), given, {}).mounts == (("/m", "/h", ("rbind", "rprivate", "ro")),)


@pytest.mark.parametrize(("name", "minors"), [("1", [1]), ("GPU-2", [2]), ("all", [0, 1, 2])])
def test_the_nvidia_spec_is_usable(tmp_path: Path, name: str, minors: list[int]) -> None:
    write_nvidia_spec(str(tmp_path), GPUS)
    registry = scan((str(tmp_path),))
    assert registry.errors == {}
    edits = resolve(registry, answer(f"nvidia.com/gpu={name}"), {"NVIDIA_VISIBLE_DEVICES": "all"})
    assert edits.env["NVIDIA_VISIBLE_DEVICES"] == "void"
    nodes = {node["path"]: (node["type"], node["major"], node["minor"]) for node in edits.device_nodes}
    assert nodes == {
        "/dev/nvidiactl": ("c", 195, 255),
        "/dev/nvidia-uvm": ("c", 510, 0),
        **{f"/dev/nvidia{minor}": ("c", 195, minor) for minor in minors},
    }


@pytest.mark.parametrize(
    ("visible", "nvidia_runtime", "expected"),
    [
        ("void", True, "GPU-1"),
        ("GPU-2", True, "GPU-1,GPU-2"),
        ("GPU-2", False, "GPU-1"),
        ("all", True, "GPU-0,GPU-1,GPU-2"),
        ("0", True, "GPU-0,GPU-1"),
        ("none", True, "GPU-1"),
        ("", True, "GPU-1"),
    ],
)
def test_a_container_sees_gpus_by_device_node_or_by_env(visible: str, nvidia_runtime: bool, expected: str) -> None:
    runtime = Runtime((), GPUS, nvidia_runtime=nvidia_runtime)
    edits = Edits(env={"NVIDIA_VISIBLE_DEVICES": visible}, device_nodes=({"path": "/dev/nvidia1"},))
    process, env = runtime.start(created(edits), to_completion=True)
    assert process.wait() == 0
    assert env["GPUFRAC_SIM_DEVICES"] == expected


def test_unresolvable_devices_are_named(tmp_path: Path) -> None:
    with pytest.raises(CreateContainerError, match="CDI device injection failed: unresolvable CDI devices x/y=z"):
        Runtime((str(tmp_path),)).create(pod(), "uid", pod().containers[0], [answer("x/y=z")])


def test_an_environment_no_process_can_have_is_an_error_of_the_start() -> None:
    with pytest.raises(StartContainerError, match="failed to create"):
        Runtime(()).start(created(Edits(env={"A": "\0"})), to_completion=True)


def test_terminate_ends_the_process_and_what_was_started_in_the_container() -> None:
    runtime = Runtime(())
    # Whose a process is its environment says, on the whole machine: another test's pods have other UIDs.
    mine, others = f"uid-{os.getpid()}-1", f"uid-{os.getpid()}-2"
    process, env = runtime.start(created(Edits(), mine), to_completion=False)
    other, _ = runtime.start(created(Edits(), others), to_completion=False)
    stubborn = subprocess.Popen(
        ["/bin/sh", "-c", "trap '' TERM; echo up; while :; do /bin/sleep 0.1; done"], env=env, stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None
    assert stubborn.stdout.readline() == b"up\n"
    try:
        terminate([process], mine)
        assert process.poll() is not None
        assert stubborn.wait(WAIT_S) == -9
        assert os.path.exists(f"/proc/{other.pid}"), "another pod's process is left alone"
    finally:
        stubborn.stdout.close()
        terminate([other], others)


# --- memory limits

UUIDS = (gpu_uuid(0), gpu_uuid(1))
REQUEST, LIMIT = "NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT"


class Node:
    """A runtime on a simulated driver r615, whose NVIDIA specs carry the memory hook."""

    def __init__(self, directory: Path) -> None:
        config = SimulatedConfig(gpus=(SimulatedGpu(memory_bytes=80 * GIB),) * 2, driver="615.71.09")
        self.driver = SimulatedDriver.create(str(directory / "sim"), config)
        self.cdi = directory / "cdi"
        self.cdi.mkdir()
        write_nvidia_spec(str(self.cdi), UUIDS)
        write_nvidia_spec(str(self.cdi), UUIDS, memory_hook=True)
        self.runtime = Runtime([str(self.cdi)], UUIDS, simulation_directory=self.driver.directory)
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def cgroup(self) -> str:
        """Of the newest container."""
        slices = f"{self.driver.cgroups.root}/kubepods.slice/kubepods-podu_1.slice"
        return f"{slices}/cri-containerd-{self.runtime.sandboxes.newest('u-1', 'c')}.scope"

    def create(self, *uuids: str, kind: str = DEVICE_PLUGIN_KIND, **env: str) -> Created:
        answers = [answer(*(f"{kind}={uuid}" for uuid in uuids))]
        return self.runtime.create(pod(env), "u-1", ContainerSpec("c", env=tuple(env.items())), answers)

    def start(self, created: Created) -> "subprocess.Popen[bytes]":
        process, _ = self.runtime.start(created, to_completion=False)
        self.processes.append(process)
        return process

    def limits(self, uuid: str = UUIDS[0]) -> tuple[int, int | None]:
        """Soft and hard of the container, in MiB."""
        backend = SimulatedBackend(self.driver.directory)
        backend.open()
        soft_bytes, hard_bytes, _ = backend.memory_limits(uuid, self.cgroup)
        return soft_bytes // MIB, None if hard_bytes is None else hard_bytes // MIB

    def reserved(self, cgroup: str) -> str:
        return Path(cgroup, "dmem.min").read_text().split()[1]


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    node = Node(short_tmp)
    yield node
    node.runtime.end(node.processes, "u-1")


def test_a_container_has_a_cgroup_and_is_confined_there(node: Node) -> None:
    process = node.start(node.create(UUIDS[1]))
    tree = node.driver.cgroups
    assert (tree.cgroup_of(process.pid), Path(node.cgroup, "cgroup.procs").read_text()) == (
        node.cgroup,
        f"{process.pid}\n",
    )
    confinement = tree.confinement_of(process.pid)
    assert confinement is not None
    assert (confinement.devices, confinement.mounts) == ([UUIDS[1]], {})


def test_the_device_plugins_kind_alone_carries_the_hook(node: Node) -> None:
    registry = scan([str(node.cdi)])
    assert registry.errors == {}
    assert find_gpu_kind(registry, UUIDS).hooked == {DEVICE_PLUGIN_KIND}
    hooks = node.create("all").edits.hooks
    assert [hook["args"][-2:] for hook in hooks] == [["--gpu-id", uuid] for uuid in UUIDS]
    assert node.create(UUIDS[0], kind="nvidia.com/gpu").edits.hooks == ()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (0, None)),
        ({REQUEST: "0", LIMIT: "8192"}, (0, 8192)),
        ({REQUEST: "4096", LIMIT: "8192"}, (4096, 8192)),
        ({LIMIT: "8192"}, (8192, 8192)),
        ({REQUEST: "4096"}, (4096, None)),
        ({REQUEST: "4097", LIMIT: "4096"}, "memory request (4097 MiB) exceeds memory limit (4096 MiB)"),
        ({REQUEST: "1", LIMIT: "8Gi"}, f"failed to parse {LIMIT}: "),
        ({REQUEST: "-1", LIMIT: "8"}, f"failed to parse {REQUEST}: "),
        ({REQUEST: "", LIMIT: "8"}, f"failed to parse {REQUEST}: "),
        ({LIMIT: str(1 << 44)}, f"failed to parse {LIMIT}: "),
    ],
)
def test_what_the_hook_makes_of_an_environment(
    node: Node, env: dict[str, str], expected: tuple[int, int | None] | str
) -> None:
    container = node.create(*UUIDS, **env)
    if isinstance(expected, str):
        with pytest.raises(StartContainerError) as caught:
            node.start(container)
        assert f"error running createRuntime hook #0: exit status 1, stdout: , stderr: {expected}" in str(caught.value)
        assert not os.path.exists(node.cgroup)
        return
    node.start(container)
    assert [node.limits(uuid) for uuid in UUIDS] == [expected, expected]


@pytest.mark.parametrize(
    ("fault", "text", "expected"),
    [
        ("cgroup-v1", "", "setting GPU memory limits is only supported in cgroup v2"),
        ("no-permission", "set_memory_limits", f'failed to set memory limits for gpu "{UUIDS[0]}": '),
        ("dmem-not-delegated", "", "Not Found"),
        ("memacct", "off", "Not Supported"),
        ("hang", "set_memory_limits", "cannot finish set_memory_limits"),
        ("driver-version", "580.1", "Function Not Found"),
    ],
)
def test_a_hook_that_fails_fails_the_start(
    node: Node, monkeypatch: pytest.MonkeyPatch, fault: str, text: str, expected: str
) -> None:
    monkeypatch.setattr(hooks, "HOOK_TIMEOUT_S", 0.05)
    node.driver.set_fault(fault, text)
    with pytest.raises(StartContainerError) as caught:
        node.start(node.create(UUIDS[0], **{LIMIT: "1"}))
    assert expected in str(caught.value)
    node.driver.clear_fault(fault)
    node.start(node.create(UUIDS[0], **{LIMIT: "1"}))


def test_other_hooks_are_left_alone(node: Node) -> None:
    hook = Hook(hook_name="createRuntime", path="/no/such", args=("x", "hook", "update-ldcache"))
    container = node.create()
    edits = Edits(env={LIMIT: "1"}, hooks=({"path": hook.path, "args": list(hook.args)},))
    node.start(replace(container, edits=edits))
    assert node.limits() == (0, None)


def test_the_end_of_a_container_takes_all_its_processes_and_clears_nothing(node: Node) -> None:
    node.start(node.create(UUIDS[0], **{REQUEST: "4096", LIMIT: "8192"}))
    with subprocess.Popen(["/usr/bin/env", "-i", "/bin/sleep", "60"]) as clean:
        node.runtime.enter("u-1", "c", clean.pid)
        above = os.path.dirname(node.cgroup)
        node.runtime.end(node.processes, "u-1", "c")
        assert clean.wait(WAIT_S) != 0
    assert not os.path.exists(node.cgroup)
    assert os.path.isdir(above)
    assert node.reserved(above) == str(4 * GIB), "what was reserved leaks"
    node.runtime.end((), "u-1")
    assert not os.path.exists(above)
    assert node.reserved(os.path.dirname(above)) == str(4 * GIB)
    with pytest.raises(FileNotFoundError):
        node.runtime.enter("u-1", "c", os.getpid())


def test_a_container_that_starts_again_begins_without_limits(node: Node) -> None:
    node.start(node.create(UUIDS[0], **{LIMIT: "8192"}))
    node.start(node.create(UUIDS[0]))
    assert node.limits() == (0, None)
