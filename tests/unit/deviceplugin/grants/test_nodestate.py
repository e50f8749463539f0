"""What is known of the node: each thing heard makes a new value, and the old one stays as it was."""

import pytest
from msgspec import structs

from deviceplugin.grants.nodestate import NodeState
from mpsd.config.model import MpsConfig
from mpsd.gpu.model import GpuHealth
from tests.builders import CAN, CANNOT, allocation, config, info, ready, snapshot, status, uuid

EMPTY = NodeState(config=config())
BOTH = EMPTY.observed(snapshot(status(info(0)), status(info(1))), 5.0)


def test_a_snapshot_is_taken_in_whole() -> None:
    assert (BOTH.mpsd_seen, BOTH.complete, BOTH.driver_version) == (True, True, "580.95.05")
    assert BOTH.hard.limits == CANNOT
    assert not BOTH.absence
    assert EMPTY.gpus == ()
    assert EMPTY.absence


def test_silence_keeps_what_was_known_and_when_that_was() -> None:
    silent = BOTH.observed(None, 7.0)
    assert silent.absence
    assert (silent.gpus, silent.heard_unix_s) == (BOTH.gpus, 7.0)
    assert silent.observed(None, 9.0).heard_unix_s == 7.0
    assert EMPTY.observed(None, 9.0).heard_unix_s is None, "it could never be relied on"


def test_no_gpus_at_all_are_not_believed() -> None:
    none = BOTH.observed(snapshot(), 7.0)
    assert none.gpus == BOTH.gpus
    assert none.absence


@pytest.mark.parametrize(("partial", "health"), [(False, GpuHealth.LOST), (True, GpuHealth.UNRESPONSIVE)])
def test_a_gpu_that_vanishes_from_the_report_does_not_vanish(partial: bool, health: GpuHealth) -> None:
    shown = snapshot(status(info(1)))
    now = BOTH.observed(structs.replace(shown, reason="GPU 0 has not been read") if partial else shown, 7.0)
    assert [(gpu.info.uuid, gpu.health) for gpu in now.gpus] == [(uuid(0), health), (uuid(1), GpuHealth.OK)]
    assert now.lost([uuid(0), uuid(1)]) == (set() if partial else {uuid(0)})


def test_a_gpu_that_was_never_shown_is_lost_once_all_were() -> None:
    assert EMPTY.lost([uuid(7)]) == set()
    assert BOTH.lost([uuid(7)]) == {uuid(7)}


def test_a_daemons_protocol_is_remembered_until_it_speaks_another() -> None:
    spoke = EMPTY.observed(snapshot(status(info(0), daemon=structs.replace(ready(), protocol=3))), 5.0)
    assert (EMPTY.protocol(uuid(0)), spoke.protocol(uuid(0))) == (2, 3)
    assert spoke.observed(snapshot(status(info(0), daemon=None)), 6.0).protocol(uuid(0)) == 3
    configured = structs.replace(EMPTY, config=config(mps=MpsConfig(protocol="3")))
    assert configured.protocol(uuid(0)) == 3


def test_what_an_earlier_run_knew_is_not_mpsds_word() -> None:
    restored = EMPTY.restored(BOTH.gpus, CAN)
    assert (restored.gpus, restored.hard.limits) == (BOTH.gpus, CAN)
    assert restored.absence
    assert not restored.complete


def test_nothing_may_start_while_mpsd_is_away() -> None:
    granted = allocation("a", f"{uuid(0)}::0")
    waiting = EMPTY.observed(snapshot(status(info(0))), 5.0)
    assert waiting.permitted([granted]) == {}
    assert waiting.waits_for(granted)
    gpu = status(info(0), mode=granted.mode, daemon=ready(8))
    done = EMPTY.observed(snapshot(gpu), 5.0)
    assert done.permitted([granted]).keys() == {granted.key}
    assert not done.waits_for(granted)
    silent = done.observed(None, 6.0)
    assert silent.permitted([granted]) == {}
    assert silent.waits_for(granted) == silent.absence
