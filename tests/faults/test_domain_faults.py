"""mpsd and the plugin are killed while MPS daemons make way for one, and while that one makes way for them again.

Nothing granted is lost, and both go on where they were. Real processes.

Crash points are the moments at which something is on disk or runs that was not before: the old daemons are asked to
end; they are gone and the next is not there; the next runs and has no limits yet.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from deviceplugin.nri.model import Container, Pod
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, Snapshot
from mpsd.shares.groups import set_name
from mpsd.sim.model import gpu_uuid
from mpsd.sim.mps.faults import clear_fault, set_fault
from tests.e2e.mpsdnode import cuda_program, end, first_line
from tests.faults.annotatednode import AnnotatedNode

BOTH = (0, 1)


class Point(NamedTuple):
    """A fault that holds everything there, of the next daemon or of the ones before it, and how mpsd shows GPU 0's
    daemon then."""

    name: str
    fault: tuple[str, str]
    of_next: bool
    shown: Callable[[DaemonStatus], bool]


def is_held_up(daemon: DaemonStatus) -> bool:
    return daemon.state is DaemonState.ABSENT and "it takes the place of others" in daemon.reason


END = Point("the old ones end", ("hung-quit", ""), False, is_held_up)
GONE = Point("the old ones are gone", ("refuse-start", "no licence"), True, lambda d: d.state is DaemonState.BACKOFF)
BARE = Point("the next one has no limits", ("wedge", ""), True, lambda d: d.state is DaemonState.CONFIGURING)
KILLS: dict[str, Callable[[AnnotatedNode], None]] = {}


def kill(victim: str) -> Callable[[Callable[[AnnotatedNode], None]], None]:
    return lambda function: KILLS.update({victim: function})


@kill("mpsd")
def _mpsd(node: AnnotatedNode) -> None:
    node.kill_mpsd()
    release(node)
    node.start_mpsd()


@kill("plugin")
def _plugin(node: AnnotatedNode) -> None:
    node.kill_plugin()
    node.start_plugin()
    release(node)


@kill("both")
def _both(node: AnnotatedNode) -> None:
    node.kill_mpsd()
    node.kill_plugin()
    release(node)
    node.start_mpsd_alone()
    node.start_plugin()


def daemons_of(*gpus: int) -> tuple[str, ...]:
    """The names of the daemons of these GPUs, one for all of them."""
    return (set_name([gpu_uuid(gpu) for gpu in gpus]),)


WHOLE, PARTS = daemons_of(*BOTH), daemons_of(0) + daemons_of(1)


def hold(node: AnnotatedNode, point: Point, before: Sequence[str], after: Sequence[str]) -> None:
    for name in after if point.of_next else before:
        set_fault(node.plugin.mpsd.simulation, *point.fault, f"{node.root}/run/mps/{name}")


def release(node: AnnotatedNode) -> None:
    for point in (END, GONE, BARE):
        for name in (*WHOLE, *PARTS):
            clear_fault(node.plugin.mpsd.simulation, point.fault[0], f"{node.root}/run/mps/{name}")


@pytest.fixture
def node(short_tmp: Path) -> Iterator[AnnotatedNode]:
    made = AnnotatedNode(short_tmp)
    try:
        made.start()
        yield made
    finally:
        release(made)
        made.close()


def gpu_daemons(snapshot: Snapshot) -> list[DaemonStatus]:
    return [gpu.daemon for gpu in snapshot.gpus if gpu.daemon is not None]


def until_served(node: AnnotatedNode, count: int) -> Snapshot:
    """Waits until so many daemons serve the two GPUs, and nobody waits for them."""

    def served(snapshot: Snapshot) -> bool:
        daemons = gpu_daemons(snapshot)
        return len({d.name for d in daemons}) == count and all(d.state is DaemonState.READY for d in daemons)

    found = node.plugin.mpsd.until(served)
    node.until(lambda s: not any(a.reason for a in s.allocations))
    return found


def grant(node: AnnotatedNode, pod: Pod, container: Container) -> None:
    """It is granted what it asks for, and waits for its daemon."""
    node.until_refused(pod, container, "it is granted, but may not start yet")


def strike(node: AnnotatedNode, point: Point, victim: str) -> dict[str, str]:
    """Kills at this point, and lets all go on. What was held then."""
    node.plugin.mpsd.until(lambda s: bool(gpu_daemons(s)) and point.shown(gpu_daemons(s)[0]))
    before = node.holders()
    KILLS[victim](node)
    assert node.holders() == before
    return before


CASES = pytest.mark.parametrize(
    ("point", "victim"),
    [
        pytest.param(point, victim, id=f"{point.name}-{victim}".replace(" ", "-"))
        for point, victim in [(END, "mpsd"), (END, "both"), (GONE, "mpsd"), (GONE, "plugin"), (BARE, "mpsd")]
    ],
)


@CASES
def test_while_a_domain_forms(node: AnnotatedNode, point: Point, victim: str) -> None:
    lone = node.make(*node.ask())
    hold(node, point, PARTS, WHOLE)
    pod, container = node.ask(BOTH)
    grant(node, pod, container)
    before = strike(node, point, victim)
    assert set(before) == {lone, pod.name}
    node.make(pod, container)
    assert node.holders() == before
    until_served(node, 1)
    node.make(*node.ask(1))


@CASES
def test_while_a_domain_splits(node: AnnotatedNode, point: Point, victim: str) -> None:
    lone, span = node.make(*node.ask()), node.make(*node.ask(BOTH))
    until_served(node, 1)
    hold(node, point, WHOLE, PARTS)
    node.stop(node.pods.pop(span)[0])
    node.until(lambda s: [a.pod for a in s.allocations] == [lone])
    assert set(strike(node, point, victim)) == {lone}
    until_served(node, 2)
    node.make(*node.ask())
    node.make(*node.ask(1))


def test_a_client_of_a_domain_that_nobody_needs_whole_any_more_notices_nothing(node: AnnotatedNode) -> None:
    lone, span = node.make(*node.ask()), node.make(*node.ask(BOTH))
    daemon = gpu_daemons(until_served(node, 1))[0]
    key = node.holders()[lone]
    variables = {
        "GPUFRAC_SIM_DIRECTORY": node.plugin.mpsd.simulation,
        "GPUFRAC_SIM_DEVICES": gpu_uuid(0),
        "GPUFRAC_ALLOCATION": key,
        "CUDA_MPS_PIPE_DIRECTORY": next(a.pipe_directory for a in daemon.attached if a.key == key),
    }
    client = cuda_program(variables, "--allocate", "1Gi", "--hold")  # it ends when MPS fails it
    with contextlib.ExitStack() as stack:
        stack.callback(end, client)
        assert first_line(client) == str(1 << 30)
        node.plugin.mpsd.until(lambda s: any(c.pid == client.pid and c.mps for c in s.gpus[0].clients))
        node.stop(node.pods.pop(span)[0])
        node.until(lambda s: [a.pod for a in s.allocations] == [lone])
        KILLS["both"](node)
        after = gpu_daemons(until_served(node, 1))[0]
        assert (after.name, after.pid) == (daemon.name, daemon.pid)
        node.make(*node.ask(1))
        assert client.poll() is None
    until_served(node, 2)
