"""mpsd is live while its supervisor turns, and ready while some GPU can be shared."""

import threading

import pytest

from mpsd.common.pulse import Pulse
from mpsd.common.reason import Reason
from mpsd.gpu.model import GpuHealth
from mpsd.gpu.reasons import GpuCode, InventoryCode
from mpsd.localapi.reasons import DaemonCode, HealthCode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuStatus, Snapshot
from mpsd.supervision import health as module
from mpsd.supervision.health import health, not_ready
from tests.builders import info, snapshot, status
from tests.unit.mpsd.supervision.bench import Bench
from tests.waiting import WAIT_S

LOST = {"health": GpuHealth.LOST, "reason": "gone from the bus", "reason_code": GpuCode.LOST}
WEDGED = DaemonStatus(state=DaemonState.READY, wedged=True, reason="3 attempts", reason_code=DaemonCode.WEDGED)
STARTING = DaemonStatus(state=DaemonState.STARTING)


def test_a_supervisor_that_turns_is_live_and_one_that_hangs_is_not(
    calm: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert health(calm.supervisor).not_live == ()
    gate, inside = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert gate.wait(WAIT_S)

    calm.supervisor._post(hang)
    assert inside.wait(WAIT_S)
    with monkeypatch.context() as quick:
        quick.setattr(module, "TURN_S", 0.05)
        (stuck,) = health(calm.supervisor).not_live
    gate.set()
    assert stuck.code == HealthCode.LOOP_STUCK
    assert "`supervisor`" in stuck.message
    assert health(calm.supervisor).not_live == ()


def test_another_loop_that_hangs_makes_it_not_live(calm: Bench) -> None:
    now_s = [0.0]
    pulse = Pulse("gpu-prober", 10.0, lambda: now_s[0])
    assert health(calm.supervisor, [pulse]).not_live == ()
    now_s[0] = 11.0
    assert "`gpu-prober` has not gone round for 11 s" in health(calm.supervisor, [pulse]).not_live[0].message


def test_what_is_to_be_served_follows_from_the_config(calm: Bench) -> None:
    assert calm.supervisor.serves_by_mps


def codes(shown: Snapshot, *, by_mps: bool = True) -> list[str]:
    return [reason.code for reason in not_ready(shown, by_mps=by_mps)]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([status(info(0))], []),
        ([status(info(0), **LOST)], [GpuCode.LOST]),
        ([status(info(0), **LOST), status(info(1))], []),
        ([status(info(0), daemon=WEDGED)], [DaemonCode.WEDGED]),
        ([status(info(0), daemon=STARTING), status(info(1), **LOST)], [HealthCode.GPU_NOT_SERVED, GpuCode.LOST]),
        ([status(info(0), daemon=None)], [HealthCode.GPU_NOT_SERVED]),
        ([status(info(0), not_shared="the config leaves it out", daemon=None)], []),
        ([status(info(0), not_shared="MIG", daemon=None), status(info(1), daemon=WEDGED)], [DaemonCode.WEDGED]),
    ],
)
def test_it_is_ready_while_some_gpu_can_be_shared(gpus: list[GpuStatus], expected: list[str]) -> None:
    assert codes(snapshot(*gpus)) == expected


def test_where_nothing_is_offered_by_mps_no_daemon_is_needed() -> None:
    failed = status(info(0), daemon=DaemonStatus(state=DaemonState.FAILED, reason="no binary"))
    assert codes(snapshot(failed)) != []
    assert codes(snapshot(failed), by_mps=False) == []
    assert codes(snapshot(status(info(0), **LOST)), by_mps=False) == [GpuCode.LOST]


def test_a_node_without_gpus_is_not_ready_and_says_why() -> None:
    failed = Snapshot(instance="i", generation=1, reason="no driver", reason_code=InventoryCode.DRIVER_FAILED)
    assert not_ready(failed, by_mps=True) == (Reason(InventoryCode.DRIVER_FAILED, "no driver"),)
    assert codes(Snapshot(instance="i", generation=1)) == [HealthCode.STARTING]


def test_a_reason_names_the_gpu() -> None:
    text = [str(why) for why in not_ready(snapshot(status(info(3), daemon=WEDGED)), by_mps=True)]
    assert text == ["the MPS daemon of GPU 3 is wedged: 3 attempts"]
