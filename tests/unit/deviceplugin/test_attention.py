"""One cause is one line, however many it hits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.attention import attention
from mpsd.snapshot import DaemonState, DaemonStatus
from tests.builders import config, fixed, reported, resource, snapshot, uuid
from tests.world import World


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    cfg = config(resource("a", fixed(8)), resource("p", fixed(8), groups=("pair0",)), groups=(("pair0", (0, 1)),))
    made = World(short_tmp, cfg, gpus=3)
    for n in range(5):
        made.run(made.grant("a", f"{uuid(2)}::{n}"), pod=f"p{n}")
    made.run(made.grant("p", "pair0::0"), pod="q")
    made.keeper.observe()
    yield made
    made.ledger.close()


def test_a_dead_daemon_is_told_once_for_all_its_allocations_and_gpus(world: World) -> None:
    world.daemon = DaemonStatus(state=DaemonState.BACKOFF, reason="it died")
    world.tell()
    world.keeper.attach()
    gpus = reported(world.broker.config, world.infos, world.broker.desired(), world.daemon)
    lines = attention(snapshot(*gpus), world.picture())
    (daemons,) = [line for line in lines if "is backoff" in line and "waiting" not in line]
    assert daemons == "group pair0, GPU 2: its MPS daemon is backoff: it died"
    (waiting,) = [line for line in lines if "waiting" in line and "GPU 0" not in line]
    assert waiting.startswith("ns/p0/c, ns/p1/c, ns/p2/c and 2 more: waiting: ")
    assert len(lines) == 4, lines


def test_warnings_of_mpsd_are_passed_on(world: World) -> None:
    warned = structs.replace(snapshot(), warnings=("daemons end with mpsd: use hostPID",))
    assert "daemons end with mpsd: use hostPID" in attention(warned, None)


def test_a_cause_that_hits_one_names_it(world: World) -> None:
    world.broker.drain(uuid(2), "r")
    lines = attention(None, world.picture(), ["cannot reach `gpufrac mpsd`", ""])
    assert lines[0] == "cannot reach `gpufrac mpsd`"
    assert [line for line in lines if line.startswith("GPU 2: drained by an operator at ")] == lines[2:], lines
