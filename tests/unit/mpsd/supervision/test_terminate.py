"""Ending the clients of allocations: contexts first, processes after."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.daemon.controller import MpsClients
from mpsd.errors import TransientError
from mpsd.gpu.model import GpuProcess
from mpsd.snapshot import DaemonState, Desired, Outcome
from mpsd.supervision.terminate import Terminator
from tests.desired import allocation
from tests.unit.mpsd.supervision.test_supervisor import (
    CALM,
    ONE,
    Bench,
    gpu_user,
    inventory,
    running,
    state_of,
    watchless,
)

__all__ = ["watchless"]


@pytest.fixture
def bench(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    with running(Bench(short_tmp, CALM)) as bench:
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.READY)
        bench.supervisor.apply(Desired(allocations=(allocation(ONE, key="k1"), allocation(ONE, key="k2", slot=1))))
        yield bench


def use(bench: Bench, *pids: int, mps: tuple[int, ...]) -> Terminator:
    bench.backend.running[ONE] = tuple(GpuProcess(pid=pid) for pid in pids)
    bench.host.connected[ONE] = MpsClients((), mps)
    return Terminator(bench.supervisor)


def test_only_the_clients_of_the_allocation_lose_their_contexts(bench: Bench) -> None:
    with gpu_user("k1") as mine, gpu_user("k2") as other:
        terminator = use(bench, mine, other, mps=(mine, other))
        done, errors = terminator.terminate(["k1"], kill=False, force=False, timeout_s=10.0)
        assert ([(t.pid, t.outcome, t.error) for t in done], errors) == ([(mine, Outcome.TERMINATED, "")], ())
        assert bench.host.terminated == [mine]
        os.kill(mine, 0)


def test_killed_only_after_the_daemon_confirmed(bench: Bench) -> None:
    with gpu_user("k1") as pid:
        terminator = use(bench, pid, mps=(pid,))
        bench.host.fail["terminate client"] = TransientError("cannot terminate: no answer")
        (one,), _ = terminator.terminate(["k1"], kill=True, force=False, timeout_s=10.0)
        assert one.outcome is Outcome.LEFT
        assert one.error == "cannot terminate: no answer: it was not killed, as that could take its neighbours down"
        os.kill(pid, 0)
        bench.host.fail.clear()
        (one,), _ = terminator.terminate(["k1"], kill=True, force=False, timeout_s=10.0)
        assert (one.outcome, one.error) == (Outcome.KILLED, "")


def test_force_kills_without_the_daemons_word(bench: Bench) -> None:
    with gpu_user("k1") as pid:
        terminator = use(bench, pid, mps=(pid,))
        bench.host.fail["terminate client"] = TransientError("cannot terminate: no answer")
        (one,), _ = terminator.terminate(["k1"], kill=True, force=True, timeout_s=10.0)
        assert one.outcome is Outcome.KILLED


def test_a_process_without_mps_can_only_be_killed(bench: Bench) -> None:
    with gpu_user("k1") as pid:
        terminator = use(bench, pid, mps=())
        (one,), _ = terminator.terminate(["k1"], kill=False, force=False, timeout_s=10.0)
        assert (one.outcome, bench.host.terminated) == (Outcome.LEFT, [])
        assert one.error == "it is no MPS client: only killing its process ends it"
        (one,), _ = terminator.terminate(["k1"], kill=True, force=False, timeout_s=10.0)
        assert one.outcome is Outcome.KILLED


def test_what_cannot_be_told_is_an_error(bench: Bench) -> None:
    terminator = use(bench, mps=())
    bench.host.fail["clients"] = TransientError("cannot get an answer")
    assert terminator.terminate(["other"], kill=False, force=False, timeout_s=10.0) == ((), ())
    done, errors = terminator.terminate(["k1"], kill=False, force=False, timeout_s=10.0)
    assert (done, errors) == ((), (f"cannot list the clients of GPU {ONE}: cannot get an answer",))
    bench.host.fail.clear()
