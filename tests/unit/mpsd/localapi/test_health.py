"""A loop that goes round beats; one that does not is named with how long."""

from mpsd.common.pulse import Pulse
from mpsd.common.reason import Reason
from mpsd.localapi.health import Health, stuck
from mpsd.localapi.reasons import HealthCode


def test_a_loop_is_stuck_once_it_began_no_round_for_longer_than_one_may_last() -> None:
    now_s = 100.0
    one, other = Pulse("attacher", 60.0, lambda: now_s), Pulse("observer", 180.0, lambda: now_s)
    assert stuck([one, other]) == ()
    now_s = 160.0
    assert stuck([one, other]) == ()
    now_s = 161.0
    (late,) = stuck([one, other])
    assert late.code == HealthCode.LOOP_STUCK
    assert "`attacher` has not gone round for 61 s" in late.message
    one.beat()
    assert stuck([one, other]) == ()
    now_s = 400.0
    assert len(stuck([one, other])) == 2


def test_what_does_not_live_is_not_ready() -> None:
    why = (Reason(HealthCode.STARTING, "x"),)
    assert Health(pid=1).ready
    assert not Health(pid=1, not_live=why).ready
    assert not Health(pid=1, not_ready=why).ready
