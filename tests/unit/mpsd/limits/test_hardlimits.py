"""When the node is probed and looked at for leaks, and what becomes of it."""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsd.config.model import LeakPolicy
from mpsd.gpu.backend import GpuError
from mpsd.gpu.model import GpuHealth, GpuInfo, GpuState
from mpsd.limits.hardlimits import HardLimitsKeeper
from mpsd.localapi.snapshot import HardLimits
from tests.unit.mpsd.limits.fakes import BUS_ID, GPU, POD, Kernel
from tests.waiting import WAIT_S

GIB = 1 << 30
AGAIN_S = 60.0
CONTAINER = f"{POD}/c1"


def gpu(uuid: str = GPU, health: GpuHealth = GpuHealth.OK, *, mig: bool = False) -> GpuState:
    info = GpuInfo(uuid=uuid, index=0, name="", memory_total_bytes=80 * GIB, pci_bus_id=BUS_ID, mig_enabled=mig)
    return GpuState(info=info, health=health)


class Rig:
    """A keeper whose messages are handled when the test says so."""

    def __init__(self, root: Path) -> None:
        self.kernel = Kernel(root, CONTAINER)
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.keeper = HardLimitsKeeper(self.kernel, self.inbox.put, AGAIN_S)
        self.probes: list[str] = []
        asked = self.kernel.memory_limits

        def count(uuid: str, cgroup: str) -> object:
            self.probes.append(uuid)
            return asked(uuid, cgroup)

        self.kernel.memory_limits = count  # type: ignore[method-assign, assignment]

    def observe(
        self, *gpus: GpuState, driver: str | None = "615.71.09", dmem: bool = False, repair: bool = False
    ) -> None:
        policy = LeakPolicy.REPAIR if repair else LeakPolicy.REPORT
        self.keeper.observe(driver, gpus or (gpu(),), enable_dmem=dmem, policy=policy)

    def drain(self) -> None:
        """Handles messages until no job is under way."""
        while self.keeper._busy:
            self.inbox.get(timeout=WAIT_S)()

    def next(self) -> None:
        """Lets the time of the next job come, and it be done."""
        deadline_s = self.keeper.deadline_s
        assert deadline_s is not None
        assert deadline_s <= time.monotonic() + AGAIN_S
        self.keeper.pass_deadline(deadline_s - 0.001)
        self.drain()
        self.keeper.pass_deadline(deadline_s)
        self.drain()

    def probed(self) -> HardLimits:
        self.observe()
        self.drain()
        return self.keeper.found


@pytest.fixture
def rig(short_tmp: Path) -> Iterator[Rig]:
    rig = Rig(short_tmp)
    yield rig
    assert rig.keeper.lane.join(WAIT_S)


def test_a_node_is_probed_once_and_again_when_it_changes(rig: Rig) -> None:
    assert rig.keeper.found == HardLimits()
    rig.observe(driver=None)
    assert rig.keeper.deadline_s is None
    assert rig.probed() == HardLimits(backend="dmem", missing=())
    rig.probed()
    assert (len(rig.probes), rig.keeper.deadline_s) == (1, None)
    rig.observe(gpu(), gpu("GPU-2"), gpu("GPU-3", mig=True), gpu("GPU-4", GpuHealth.UNRESPONSIVE))
    rig.drain()
    assert rig.probes == [GPU, GPU, "GPU-2"]
    rig.observe(driver="580.1")
    assert rig.keeper.found == HardLimits()
    rig.drain()
    assert "driver 580.1" in rig.keeper.found.missing[0]
    assert rig.probed().missing == ()


def test_what_was_found_stands_while_nobody_can_be_asked(rig: Rig) -> None:
    rig.probed()
    for driver in (None, "615.71.09"):
        rig.observe(gpu(health=GpuHealth.UNRESPONSIVE), driver=driver)
        rig.drain()
        assert rig.keeper.found.missing == ()


def test_what_is_missing_is_looked_for_again_until_it_is_there(rig: Rig) -> None:
    rig.kernel.fail["memory_limits"] = GpuError("cannot: Insufficient Permissions", 4)
    assert len(rig.probed().missing) == 1
    rig.next()
    assert len(rig.keeper.found.missing) == 1
    rig.kernel.fail.clear()
    rig.next()
    assert (rig.keeper.found, rig.keeper.deadline_s) == (HardLimits(backend="dmem", missing=()), None)


def test_a_node_without_pods_is_looked_at_again(short_tmp: Path) -> None:
    rig = Rig(short_tmp)
    rig.kernel.remove(CONTAINER)
    rig.kernel.remove(POD)
    assert rig.probed().missing == ()
    rig.kernel.make(POD)
    os.unlink(f"{rig.kernel.path(POD)}/dmem.max")
    rig.kernel.settle = lambda: None  # type: ignore[method-assign]
    rig.next()
    assert len(rig.keeper.found.missing) == 1


def test_the_switch_for_dmem_takes_effect_at_once(rig: Rig) -> None:
    rig.kernel.write(POD, "cgroup.subtree_control", "")
    os.unlink(f"{rig.kernel.path(CONTAINER)}/dmem.max")
    assert len(rig.probed().missing) == 1
    rig.observe(dmem=True)
    rig.drain()
    assert rig.keeper.found.missing == ()


def test_one_job_at_a_time_and_none_piles_up_while_the_driver_hangs(rig: Rig) -> None:
    gate = rig.kernel.gates[GPU] = threading.Event()
    for number in range(20):
        rig.observe(gpu(), gpu(f"GPU-{number}"))
        rig.keeper.pass_deadline(time.monotonic())
    assert rig.keeper.deadline_s is None
    gate.set()
    rig.drain()
    assert rig.probes == [GPU, "GPU-0", GPU, "GPU-19"]


def leak(rig: Rig) -> None:
    rig.kernel.set_memory_limits(GPU, rig.kernel.path(CONTAINER), 2 * GIB, None)
    rig.kernel.remove(CONTAINER)


def test_a_leak_is_reported_once_it_was_seen_twice(rig: Rig) -> None:
    leak(rig)
    rig.probed()
    assert not rig.keeper.warnings
    rig.next()
    where = rig.kernel.path(POD)
    said = f"2Gi on GPU {GPU} stays reserved on cgroup {where} for containers that are gone: "
    assert str(rig.keeper.warnings[0]).startswith(f"{said}set enforcement.leaks: repair")
    rig.kernel.set_memory_limits(GPU, where, 0, None)
    rig.next()
    assert (rig.keeper.warnings, rig.keeper.deadline_s) == ((), None)


def test_a_leak_is_given_back_once_it_was_seen_twice(rig: Rig) -> None:
    leak(rig)
    rig.observe(repair=True)
    rig.drain()
    assert rig.kernel.minimum(POD) == 2 * GIB
    rig.next()
    assert (rig.keeper.warnings, rig.keeper.deadline_s) == ((), None)
    assert rig.kernel.minimum(POD) == 0


def test_a_leak_that_cannot_be_given_back_says_why(rig: Rig) -> None:
    leak(rig)
    rig.kernel.fail["set_memory_limits"] = GpuError("cannot set: Insufficient Permissions", 4)
    rig.observe(repair=True)
    rig.drain()
    rig.next()
    assert str(rig.keeper.warnings[0]).endswith("cannot be given back: cannot set: Insufficient Permissions")
    rig.kernel.fail.clear()
    rig.next()
    assert rig.keeper.warnings == ()


def test_leaks_are_looked_for_only_while_something_may_leak(rig: Rig) -> None:
    rig.keeper.soft_limit_seen()
    assert rig.keeper.deadline_s is None  # limits are not known to be in the kernel
    rig.probed()
    assert rig.keeper.deadline_s is None
    rig.kernel.set_memory_limits(GPU, rig.kernel.path(CONTAINER), 2 * GIB, None)
    rig.keeper.soft_limit_seen()
    rig.next()
    rig.next()
    assert rig.keeper.warnings == ()
    rig.kernel.set_memory_limits(GPU, rig.kernel.path(CONTAINER), 0, None)
    rig.next()
    assert rig.keeper.deadline_s is None


def test_a_driver_that_keeps_limits_in_itself_leaks_nothing(short_tmp: Path) -> None:
    rig = Rig(short_tmp)
    rig.kernel.mode = "misc"
    assert rig.probed().backend == "misc"
    rig.keeper.soft_limit_seen()
    assert rig.keeper.deadline_s is None


def test_what_nobody_foresaw_is_told_and_tried_again(rig: Rig) -> None:
    rig.kernel.fail["memory_limits"] = ZeroDivisionError("bug")  # type: ignore[assignment]
    rig.probed()
    (said,) = rig.keeper.warnings
    assert said.message == "cannot look after hard memory limits: bug"
    rig.kernel.fail.clear()
    rig.next()
    assert rig.keeper.found.missing == ()
