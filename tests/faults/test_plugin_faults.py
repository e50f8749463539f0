"""One table: a fault on the node -> what becomes of an allocation, of the list, of the metrics, and what is said.

In every row one pod runs on GPU 0 before the fault. Steps, not seconds: the clock is set by hand.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from deviceplugin.grants.nodeview import DAEMON_GRACE_S
from deviceplugin.plan.advertise import Advertisement
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.reconcile.hardlimits import VERIFIED_S
from deviceplugin.status import metrics
from mpsd.common.reason import Reason
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuClient
from tests.builders import CAN, CANNOT, HOOKED_KIND, info, ready, snapshot, status, uuid
from tests.world import SHARE, World


class Fault(NamedTuple):
    """`attached`: whether the running pod's container could be restarted. `free`: Healthy free shares of its resource.
    `said`: part of a text of the status. `metric`: a line of the exposition."""

    name: str
    strike: Callable[[World], None]
    attached: bool
    free: int
    said: str
    metric: str


def tell(world: World, **changes: object) -> None:
    """mpsd reports GPU 0 changed, GPU 1 well, and a while passes."""
    first = status(info(0), **({"mode": mode_of(world, uuid(0))} | changes))
    world.broker.observe_snapshot(snapshot(first, status(info(1))))
    wait(world)


def mode_of(world: World, gpu: str) -> Mode | None:
    """The mode the broker wants of a GPU."""
    return next((a.mode for a in world.broker.desired().allocations if gpu in a.gpus), None)


def wait(world: World) -> None:
    world.broker.publish()
    world.now_s += DAEMON_GRACE_S
    world.broker.publish()
    world.keeper.attach()
    world.keeper.observe()
    world.broker.publish()


def reported(**changes: object) -> Callable[[World], None]:
    """mpsd reports GPU 0 with these changes."""
    return lambda world: tell(world, **changes)


def mpsd_gone(world: World) -> None:
    world.broker.observe_snapshot(None)
    wait(world)


def no_gpus(world: World) -> None:
    world.broker.observe_snapshot(structs.replace(snapshot(), reason="driver not loaded"))
    wait(world)


def gpu_vanished(world: World) -> None:
    world.broker.observe_snapshot(snapshot(status(info(1))))
    wait(world)


def disk_full(world: World) -> None:
    world.specs.full = True
    world.specs.files.clear()
    world.now_s += 31
    wait(world)


def kubelet_gone(world: World) -> None:
    world.kubelet.down = True
    wait(world)


def checkpoint_gone(world: World) -> None:
    os.unlink(world.root / "device-plugins" / "kubelet_internal_checkpoint")
    wait(world)


def foreign_holder(world: World) -> None:
    world.kubelet.containers["ns", "other", "c"] = {"nvidia.com/gpu": (uuid(1),)}
    world.keeper.observe()
    wait(world)


def foreign_process(world: World) -> None:
    second = status(info(1), clients=(GpuClient(pid=77),))
    world.broker.observe_snapshot(snapshot(status(info(0), mode=mode_of(world, uuid(0))), second))
    wait(world)


def no_device_nodes(world: World) -> None:
    unnamed = Reason(OfferCode.NO_CDI_DEVICE, "kind nvidia.com/gpu names devices by index only")
    world.broker.set_gpu_kind("nvidia.com/gpu", {uuid(1): unnamed})
    wait(world)


def two_resources(world: World) -> None:
    world.kubelet.containers["ns", "pod", "c"]["gpufrac.dev/b"] = (f"{uuid(1)}::0",)
    world.keeper.observe()
    world.keeper.check_markers()


def drained(world: World) -> None:
    world.broker.drain(uuid(0), "fan noise")
    wait(world)


WAITING = 'gpufrac_allocations{state="waiting"} 1'
BLOCKED_0, BLOCKED_1 = (f'gpufrac_gpu_blocked{{gpu_uuid="{uuid(index)}"}} 1' for index in (0, 1))

FAULTS = (
    Fault("nothing", tell, True, 17, "", "gpufrac_mpsd_up 1"),
    Fault("mpsd is gone", mpsd_gone, False, 0, "mpsd does not answer", "gpufrac_mpsd_up 0"),
    Fault("mpsd sees no GPU", no_gpus, False, 0, "mpsd sees no GPU: driver not loaded", "gpufrac_mpsd_up 0"),
    Fault(
        "daemon died",
        reported(daemon=DaemonStatus(state=DaemonState.BACKOFF, reason="exited")),
        False,
        9,
        "MPS daemon is backoff: exited",
        BLOCKED_0,
    ),
    Fault(
        "daemon configuring",
        reported(daemon=DaemonStatus(state=DaemonState.CONFIGURING, reason="")),
        False,
        9,
        "MPS daemon is configuring",
        WAITING,
    ),
    Fault(
        "daemon failed",
        reported(daemon=DaemonStatus(state=DaemonState.FAILED, reason="path too long")),
        False,
        9,
        "path too long",
        WAITING,
    ),
    Fault("no daemon", reported(daemon=None), False, 9, "has not been started", WAITING),
    Fault("limit too low", reported(daemon=ready(1)), False, 17, "is below", WAITING),
    Fault(
        "mode not applied",
        reported(mode=None, reason="permission denied"),
        False,
        17,
        "not in sm-sharing yet: permission denied",
        WAITING,
    ),
    Fault("other mode applied", reported(mode=Mode.TIME_SLICING), False, 17, "not in sm-sharing yet", WAITING),
    Fault("GPU lost", reported(health=GpuHealth.LOST, reason="off the bus"), False, 9, "off the bus", BLOCKED_0),
    Fault("GPU vanished", gpu_vanished, False, 9, "no longer reported", BLOCKED_0),
    Fault("GPU sick", reported(health=GpuHealth.SICK, reason="XID 48"), True, 9, "XID 48", BLOCKED_0),
    Fault("GPU hangs", reported(health=GpuHealth.UNRESPONSIVE, reason="calls hang"), True, 9, "calls hang", BLOCKED_0),
    Fault("other plugin", foreign_holder, True, 8, "pod ns/other holds it through nvidia.com/gpu", BLOCKED_1),
    Fault("foreign process", foreign_process, True, 8, "foreign processes use it (pid 77)", BLOCKED_1),
    Fault("no device nodes", no_device_nodes, True, 8, "by index only", BLOCKED_1),
    Fault(
        "drained",
        drained,
        True,
        9,
        "drained by an operator at 1970-01-01 00:01:40Z: fan noise",
        f'gpufrac_gpu_drained{{gpu_uuid="{uuid(0)}"}} 1',
    ),
    Fault(
        "daemon drains",
        reported(daemon=structs.replace(ready(), state=DaemonState.DRAINING, reason="to be replaced")),
        True,
        9,
        "MPS daemon is draining: to be replaced",
        BLOCKED_0,
    ),
    Fault(
        "daemon wedged",
        reported(daemon=structs.replace(ready(), wedged=True, reason="queries hang")),
        False,
        9,
        "MPS daemon is wedged: queries hang",
        WAITING,
    ),
    Fault(
        "no namespace",
        reported(daemon=structs.replace(ready(), protocol=3)),
        False,
        17,
        "no MPS namespace yet",
        WAITING,
    ),
    Fault("CDI disk full", disk_full, False, 17, "No space left on device", "gpufrac_cdi_ok 0"),
    Fault("kubelet gone", kubelet_gone, True, 17, "connection refused", "gpufrac_kubelet_up 0"),
    Fault("checkpoint gone", checkpoint_gone, True, 17, "cannot read the kubelet's checkpoint", "gpufrac_kubelet_up 1"),
    Fault(
        "two resources", two_resources, True, 17, "only one of them takes effect", "gpufrac_allocations_unenforced 1"
    ),
)


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    made.run(made.grant())
    made.keeper.observe()
    made.broker.publish()
    yield made
    made.ledger.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_fault(world: World, fault: Fault) -> None:
    (allocation,) = world.broker.allocations()
    fault.strike(world)
    seen = world.picture()
    listed = advertised(world)
    lost = fault.name in ("GPU lost", "GPU vanished")
    assert (allocation.key in world.specs.files) is fault.attached
    assert sum(device.healthy for device in listed.devices if device.id != SHARE) == fault.free
    assert next(device.healthy for device in listed.devices if device.id == SHARE) is not lost, "a held share"
    assert len(listed.devices) == 18, "listed IDs are fixed"
    assert fault.said in str(seen)
    assert fault.metric in metrics.render(seen).splitlines()
    assert allocation.key in {a.key for a in world.broker.allocations()}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_everything_is_as_before_when_the_fault_is_over(world: World, fault: Fault) -> None:
    before = advertised(world), dict(world.specs.files)
    fault.strike(world)
    world.specs.full = world.kubelet.down = False
    world.kubelet.containers = {("ns", "pod", "c"): {"gpufrac.dev/a": (SHARE,)}}
    world.write_checkpoint([])
    world.broker.set_gpu_kind("", {})
    world.broker.undrain(uuid(0))
    world.now_s += 31
    tell(world)
    world.pass_time(40)  # what was adopted meanwhile is released again
    world.keeper.check_markers()
    world.broker.publish()
    assert advertised(world).devices == before[0].devices
    assert world.specs.files == before[1]
    assert world.keeper.report.unenforced == {}


# --- hard limits: in every row the pod runs, its limit read back as in force


def drift(**changes: object) -> Callable[[World], None]:
    """The driver has other limits on the pod's cgroup, and they can't be set."""

    def strike(world: World) -> None:
        (place,) = world.mpsd.limits_of
        world.mpsd.limits_of[place] = structs.replace(world.mpsd.limits_of[place], **changes)
        world.mpsd.refuses = "Insufficient Permissions"
        look_at_limits(world)

    return strike


def mpsd_silent(world: World) -> None:
    world.mpsd.down = True
    look_at_limits(world)


def downgraded(world: World) -> None:
    world.hard_limits = CANNOT
    look_at_limits(world)


def hook_lost(world: World) -> None:
    world.broker.set_gpu_kind(HOOKED_KIND, {}, frozenset())
    look_at_limits(world)


def look_at_limits(world: World) -> None:
    world.tell()
    wait(world)
    world.now_s += VERIFIED_S
    world.keeper.check_limits()


LESSER, FULL = (f"gpufrac_allocations_unenforced {count}" for count in (1, 0))
HARD_FAULTS = (
    Fault("nothing", look_at_limits, True, 17, "yes (dmem, set by k8s.device-plugin.nvidia.com/gpu)", FULL),
    Fault("limit forgotten", drift(hard_bytes=None), True, 17, "reads back no limit instead of 8Gi", LESSER),
    Fault("limit drifted", drift(hard_bytes=9 << 30), True, 17, "reads back a limit of 9Gi", LESSER),
    Fault("limit not settable", drift(hard_bytes=None), True, 17, "set again: Insufficient Permissions", LESSER),
    Fault("mpsd silent", mpsd_silent, True, 17, "is in force can't be told: cannot reach mpsd", FULL),
    Fault("driver downgraded", downgraded, True, 17, "cooperative on this node by now: driver 580", LESSER),
    Fault("hook lost", hook_lost, False, 17, "has no hook `apply-cuda-memory-limits`", FULL),
)


@pytest.fixture
def hard_world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    made.hard_limits = CAN
    made.broker.set_gpu_kind(HOOKED_KIND, {}, frozenset({HOOKED_KIND}))
    made.tell()
    made.run(made.grant())
    made.start(made.broker.allocations()[0])
    made.keeper.observe()
    made.keeper.check_limits()
    made.broker.publish()
    yield made
    made.ledger.close()


@pytest.mark.parametrize("fault", HARD_FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_fault_of_a_hard_limit_and_its_end(hard_world: World, fault: Fault) -> None:
    world = hard_world
    before = advertised(world).devices, dict(world.specs.files)
    (allocation,) = world.broker.allocations()
    fault.strike(world)
    seen = world.picture()
    assert (allocation.key in world.specs.files) is fault.attached
    assert sum(device.healthy for device in advertised(world).devices if device.id != SHARE) == fault.free
    assert fault.said in str(seen)
    assert fault.metric in metrics.render(seen).splitlines()
    assert [a.granted_enforcement for a in seen.allocations] == ["hard"]
    world.mpsd.down, world.mpsd.refuses, world.hard_limits = False, "", CAN
    world.broker.set_gpu_kind(HOOKED_KIND, {}, frozenset({HOOKED_KIND}))
    look_at_limits(world)
    look_at_limits(world)
    (healed,) = world.picture().allocations
    assert (healed.enforcement, healed.state, healed.reason) == ("hard", "attached", "")
    assert (advertised(world).devices, world.specs.files) == before


def advertised(world: World) -> Advertisement:
    published = world.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    assert published is not None
    return published.advertisement
