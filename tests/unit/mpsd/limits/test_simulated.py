"""The probe and the repair over the simulated driver and its cgroups: each thing missing, one by one."""

import os
from pathlib import Path

import pytest

from mpsd.config.model import SimulatedConfig
from mpsd.gpu.model import MIB
from mpsd.limits import leaks
from mpsd.limits.probe import Probed, probe
from mpsd.localapi.snapshot import HardLimits
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.gpus import SimulatedBackend
from mpsd.sim.model import gpu_uuid

POD = "kubepods.slice/kubepods-pod1_2.slice"
GPU = gpu_uuid(0)


class Node:
    def __init__(self, root: Path, driver: str = "615.71.09", **faults: str) -> None:
        self.directory, self.version = root, driver
        (root / "faults").mkdir()
        for name, text in faults.items():
            (root / "faults" / name.replace("_", "-")).write_text(text)
        self.driver = SimulatedDriver.create(str(root), SimulatedConfig(driver=driver))
        self.backend = SimulatedBackend(str(root))
        self.backend.open()

    def probe(self, *, enable_dmem: bool = False) -> Probed:
        return probe(self.backend, self.version, self.backend.uuids(), enable_dmem=enable_dmem)


@pytest.mark.parametrize("pods", [False, True])
@pytest.mark.parametrize(
    ("faults", "backend"), [({}, "dmem"), ({"no_dmem": ""}, "misc"), ({"memacct": "misc"}, "misc")]
)
def test_hard_limits_are_there(short_tmp: Path, pods: bool, faults: dict[str, str], backend: str) -> None:
    node = Node(short_tmp, **faults)
    if pods:
        node.driver.make_cgroup(f"{POD}/c1.scope")
    probed = node.probe()
    assert (probed.limits, probed.final) == (HardLimits(backend=backend, missing=()), pods)


@pytest.mark.parametrize(
    ("driver", "faults", "words"),
    [
        ("580.95.05", {}, "install 615"),
        ("615.71.09", {"cgroup_v1": ""}, "no cgroup v2"),
        ("615.71.09", {"dmem_not_delegated": ""}, "set enforcement.enableDmem: true"),
        ("615.71.09", {"no_permission": "memory_limits"}, "run as root"),
        ("615.71.09", {"not_supported": "memory_limits\nset_memory_limits"}, "Not Supported"),
        ("615.71.09", {"memacct": "off", "no_dmem": ""}, "Not Supported"),
    ],
)
def test_one_thing_is_missing(short_tmp: Path, driver: str, faults: dict[str, str], words: str) -> None:
    node = Node(short_tmp, driver, **faults)
    node.driver.make_cgroup(f"{POD}/c1.scope")
    (reason,) = node.probe().limits.missing
    assert words in reason


def test_dmem_is_switched_on_down_to_containers(short_tmp: Path) -> None:
    node = Node(short_tmp, dmem_not_delegated="")
    container = node.driver.make_cgroup(f"{POD}/c1.scope")
    assert node.probe(enable_dmem=True).limits.missing == ()
    assert os.path.exists(f"{container}/dmem.max")


def test_what_a_container_leaves_behind_is_given_back(short_tmp: Path) -> None:
    node = Node(short_tmp)
    ended, running = (node.driver.make_cgroup(f"{POD}/c{n}.scope") for n in (1, 2))
    for container in (ended, running):
        node.backend.set_memory_limits(GPU, container, 1024 * MIB, 2048 * MIB)
    node.driver.cgroups.remove(ended)
    (leak,) = [leak for tree in leaks.read(node.backend.cgroup_root) for leak in leaks.find(tree)]
    assert (os.path.relpath(leak.cgroup, node.backend.cgroup_root), leak.lost_bytes) == (POD, 1024 * MIB)
    leaks.give_back(node.backend, GPU, leak)
    assert [leak for tree in leaks.read(node.backend.cgroup_root) for leak in leaks.find(tree)] == []
    assert node.backend.memory_limits(GPU, running).soft_bytes == 1024 * MIB
