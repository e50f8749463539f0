"""Memory limits of cgroups as the simulated driver keeps them: through NVML, and as a CUDA process meets them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.config.model import GIB, SimulatedConfig, SimulatedGpu
from mpsd.gpu.backend import GpuError, GpuNotSupportedError, MemoryLimits, NoLimitError
from mpsd.sim.cgroups import MAX, MIN, Confinement, read_keyed
from mpsd.sim.cuda.client import Cuda
from mpsd.sim.cudaerrors import CudaError
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.gpus import SimulatedBackend
from mpsd.sim.model import PLAIN, gpu_uuid

A, B = gpu_uuid(0), gpu_uuid(1)
REGION = "nvidia/00000000:01:00.0/vidmem"
SHIFTED = "nvidia/00000000:02:00.0/vidmem"
CLIENT = (sys.executable, "-m", "mpsd.sim.cuda")
POD = "kubepods.slice/kubepods-pod1.slice"
LEAF = f"{POD}/cri-containerd-main.scope"


class Node:
    """A driver of r615 with two GPUs of 80 GiB."""

    def __init__(self, directory: Path) -> None:
        config = SimulatedConfig(gpus=(SimulatedGpu(memory_bytes=80 * GIB),) * 2, driver="615.71.09")
        self.driver = SimulatedDriver.create(str(directory), config)
        self.backend = SimulatedBackend(str(directory))
        self.backend.open()
        self.cgroups = self.driver.cgroups

    def path(self, name: str) -> str:
        return f"{self.cgroups.root}/{name}".rstrip("/")

    def value(self, name: str, file: str, region: str = REGION) -> str:
        return read_keyed(f"{self.path(name)}/{file}")[region]

    def get(self, name: str, uuid: str = A) -> MemoryLimits:
        return self.backend.memory_limits(uuid, self.path(name))

    def set(self, name: str, soft: int, hard: int | None, uuid: str = A) -> None:
        """In GiB."""
        hard_bytes = None if hard is None else hard * GIB
        self.backend.set_memory_limits(uuid, self.path(name), soft * GIB, hard_bytes)

    def enter(self, name: str) -> Cuda:
        """This process, in that cgroup, as a CUDA process."""
        self.cgroups.add(self.path(name), os.getpid())
        return Cuda({"GPUFRAC_SIM_DIRECTORY": self.driver.directory, "CUDA_MPS_PIPE_DIRECTORY": "/nowhere"})


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    node = Node(short_tmp)
    yield node
    node.backend.close()


@pytest.fixture
def leaf(node: Node) -> Node:
    node.driver.make_cgroup(LEAF)
    return node


@pytest.fixture(params=["dmem", "misc"])
def either(node: Node, request: pytest.FixtureRequest) -> Node:
    if request.param == "misc":
        node.driver.set_fault("no-dmem")
    node.driver.make_cgroup(LEAF)
    assert node.driver.limits_backend() == request.param
    return node


# Calls


def test_a_limit_reads_back_as_it_was_set(either: Node) -> None:
    either.set(LEAF, 8, 16)
    assert either.get(LEAF) == MemoryLimits(8 * GIB, 16 * GIB, 0)
    either.set(LEAF, 0, 12)
    assert either.get(LEAF) == MemoryLimits(0, 12 * GIB, 0)
    either.set(LEAF, 1, 2, B)
    assert (either.get(LEAF).hard_bytes, either.get(LEAF, B).hard_bytes) == (12 * GIB, 2 * GIB)


def test_a_reserved_limit_is_added_to_every_ancestor_and_taken_away_again(leaf: Node) -> None:
    other = leaf.driver.make_cgroup(f"{POD}/other")
    leaf.set(LEAF, 8, 16)
    leaf.set(f"{POD}/other", 3, 3)
    assert [leaf.value(name, MIN) for name in (LEAF, POD, "kubepods.slice")] == [str(n * GIB) for n in (8, 11, 11)]
    assert leaf.value(LEAF, MIN, SHIFTED) == "0"
    assert (leaf.value(LEAF, MAX), leaf.value(POD, MAX)) == (str(16 * GIB), "max")
    leaf.set(LEAF, 5, 5)
    assert leaf.value("kubepods.slice", MIN) == str(8 * GIB)
    leaf.set(LEAF, 0, None)
    assert (leaf.value(LEAF, MIN), leaf.value("kubepods.slice", MIN)) == ("0", str(3 * GIB))
    leaf.cgroups.remove(other)
    assert leaf.value(POD, MIN) == str(3 * GIB), "it leaks"
    leaf.set(POD, 0, None)
    assert leaf.value("kubepods.slice", MIN) == "0", "given back through the driver"


def test_the_misc_backend_leaves_nothing_behind(leaf: Node) -> None:
    leaf.driver.set_fault("no-dmem")
    leaf.set(LEAF, 8, 16)
    assert not os.path.exists(f"{leaf.path(LEAF)}/{MAX}")
    leaf.cgroups.remove(leaf.path(LEAF))
    leaf.driver.make_cgroup(LEAF)
    with pytest.raises(GpuNotSupportedError) as caught:
        leaf.get(LEAF)
    assert caught.value.code == 3
    leaf.set(POD, 0, 4)
    assert leaf.get(LEAF).hard_bytes == 4 * GIB, "that of the nearest ancestor"
    leaf.set(POD, 0, None)
    with pytest.raises(GpuNotSupportedError):
        leaf.get(POD)


def test_a_cgroup_without_dmem_files(node: Node) -> None:
    node.driver.set_fault("dmem-not-delegated")
    node.driver.make_cgroup(LEAF)  # below the kubelet's own cgroup, which did pass dmem on
    with pytest.raises(NoLimitError) as caught:
        node.set(LEAF, 1, 1)
    assert caught.value.code == 6
    node.set(POD, 0, 4)
    assert node.get(LEAF).hard_bytes == 4 * GIB, "reads fall back to the nearest ancestor with dmem files"
    with pytest.raises(GpuNotSupportedError) as refused:
        node.get("")
    assert refused.value.code == 3
    Path(node.path(POD), "cgroup.subtree_control").write_text("+dmem")
    node.backend.uuids()  # any look of the driver
    node.set(LEAF, 1, 1)


@pytest.mark.parametrize("name", ["kubepods.slice/absent", "..", "../gpus"])
def test_what_is_no_cgroup_is_not_found(leaf: Node, name: str) -> None:
    for call in (lambda: leaf.get(name), lambda: leaf.set(name, 0, None)):
        with pytest.raises(NoLimitError):
            call()


def test_soft_above_hard_is_an_invalid_argument(leaf: Node) -> None:
    with pytest.raises(GpuError) as caught:
        leaf.set(LEAF, 2, 1)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("fault", "text", "code"),
    [
        ("driver-version", "610.1", 13),
        ("cgroup-v1", "", 3),
        ("memacct", "off", 3),
        ("not-supported", "memory_limits set_memory_limits", 3),
        ("no-permission", "memory_limits set_memory_limits", 4),
        ("fail", "memory_limits set_memory_limits", 999),
    ],
)
def test_nodes_without_memory_limits(leaf: Node, fault: str, text: str, code: int) -> None:
    leaf.backend.close()
    leaf.driver.set_fault(fault, text)
    leaf.backend.open()
    for call in (lambda: leaf.get(LEAF), lambda: leaf.set(LEAF, 0, 1)):
        with pytest.raises(GpuError) as caught:
            call()
        assert caught.value.code == code
        assert isinstance(caught.value, GpuNotSupportedError) == (code in (3, 13))


def test_an_older_driver_has_no_region(leaf: Node) -> None:
    leaf.driver.set_fault("driver-version", "580.1")
    leaf.driver.settle_cgroups()
    assert Path(leaf.path(""), "dmem.capacity").read_text() == ""


def test_the_driver_may_be_kept_to_its_own_limits(leaf: Node) -> None:
    leaf.driver.set_fault("memacct", "misc")
    leaf.set(LEAF, 1, 2)
    assert (leaf.get(LEAF).hard_bytes, leaf.value(LEAF, MAX)) == (2 * GIB, "max")


def test_a_limit_that_is_forgotten(leaf: Node) -> None:
    leaf.driver.set_fault("limit-forgotten", uuid=A)
    leaf.set(LEAF, 1, 2)
    leaf.set(LEAF, 1, 2, B)
    assert (leaf.get(LEAF).hard_bytes, leaf.get(LEAF, B).hard_bytes) == (None, 2 * GIB)


@pytest.mark.parametrize(("text", "hard_bytes"), [("", None), ("9G", 9 * GIB)])
def test_a_limit_that_drifts_does_so_once(either: Node, text: str, hard_bytes: int | None) -> None:
    either.set(LEAF, 1, 2)
    either.driver.set_fault("limit-drifts", text)
    assert either.get(LEAF).hard_bytes == hard_bytes
    either.set(LEAF, 1, 2)
    assert either.get(LEAF).hard_bytes == 2 * GIB


# What a process gets


@pytest.fixture
def peer(node: Node) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        yield process
        process.kill()


def fails(cuda: Cuda, size_bytes: int) -> None:
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        cuda.allocate(size_bytes)


def test_all_processes_of_a_cgroup_share_its_limit(either: Node, peer: "subprocess.Popen[bytes]") -> None:
    either.set(LEAF, 0, 8)
    either.cgroups.add(either.path(LEAF), peer.pid)
    either.driver.open_context(A, peer.pid, PLAIN)
    either.driver.allocate(A, peer.pid, 5 * GIB)
    cuda = either.enter(LEAF)
    cuda.open_device()
    assert cuda.memory_info == (3 * GIB, 8 * GIB)
    fails(cuda, 3 * GIB + 1)
    cuda.allocate(3 * GIB)
    assert either.get(LEAF).used_bytes == 8 * GIB
    fails(cuda, 1)
    cuda.close()
    assert either.get(LEAF).used_bytes == 5 * GIB


def test_limits_are_of_one_gpu_each(either: Node) -> None:
    either.set(LEAF, 0, 8)
    either.set(LEAF, 0, 4, B)
    cuda = either.enter(LEAF)
    cuda.open_device(1)
    fails(cuda, 5 * GIB)
    cuda.allocate(4 * GIB)
    cuda.close()


def test_a_parents_limit_bounds_with_dmem_only(either: Node) -> None:
    either.set(POD, 0, 4)
    either.set(LEAF, 0, 8)
    cuda = either.enter(LEAF)
    cuda.open_device()
    if either.driver.limits_backend() == "dmem":
        fails(cuda, 5 * GIB)
    cuda.allocate(4 * GIB)
    assert cuda.memory_info[1] == 8 * GIB
    cuda.close()


def test_a_limit_on_the_parent_alone_holds_and_does_not_show(either: Node) -> None:
    either.set(POD, 0, 4)
    cuda = either.enter(LEAF)
    cuda.open_device()
    assert cuda.memory_info == (4 * GIB, 80 * GIB)
    fails(cuda, 4 * GIB + 1)
    cuda.close()


def test_what_is_used_shows_in_dmem_current(leaf: Node) -> None:
    cuda = leaf.enter(LEAF)
    cuda.open_device(1)
    cuda.allocate(3)
    current = [leaf.value(name, "dmem.current", SHIFTED) for name in (LEAF, POD, "kubepods.slice")]
    assert (current, leaf.value(LEAF, "dmem.current")) == (["3", "3", "3"], "0")
    cuda.close()
    assert leaf.value(POD, "dmem.current", SHIFTED) == "0"


@pytest.mark.parametrize("order", ["0,1", "1,0"])
def test_a_clean_environment_leaves_a_process_where_it_is(leaf: Node, order: str) -> None:
    """A second process with nothing in its environment but the order of devices."""
    leaf.cgroups.confine(leaf.path(LEAF), Confinement([A, B], {}))
    for uuid in (A, B):
        leaf.set(LEAF, 0, 8, uuid)
    leaf.cgroups.add(leaf.path(LEAF), os.getpid())  # it is the nearest ancestor that is listed
    for size, output in (("9Gi", "CUDA_ERROR_OUT_OF_MEMORY"), ("8Gi", str(8 * GIB))):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "mpsd.sim.cuda",
                f"--simulation={leaf.driver.directory}",
                "--info",
                "--allocate",
                size,
            ],
            env={"CUDA_VISIBLE_DEVICES": order, "GPUFRAC_SIM_MOUNTS": "{}", "GPUFRAC_SIM_DEVICES": ""},
            cwd=Path(__file__).parents[4],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        facts, said = done.stdout.splitlines()
        assert (json.loads(facts)["device"], said) == ((A, B)[int(order[0])], output)
        assert (json.loads(facts)["mps"], json.loads(facts)["total_bytes"]) == (False, 8 * GIB)
