"""Ending the clients of allocations: contexts first, processes after."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.common.errors import TransientError
from mpsd.config.model import MpsConfig, NodeConfig
from mpsd.daemon.controller import MpsClients
from mpsd.daemon.logs.parse import FaultBegun
from mpsd.gpu.model import GpuProcess, Mode
from mpsd.localapi.reasons import ClientsCode
from mpsd.localapi.snapshot import DaemonState, Desired, Outcome
from mpsd.supervision.terminate import Terminator
from tests.desired import allocation
from tests.unit.mpsd.supervision.bench import CALM, ONE, Bench, gpu_user, inventory, resource, running, state_of
from tests.waiting import WAIT_S


def bind_both(bench: Bench, mode: Mode) -> None:
    both = (allocation(ONE, key="k1", mode=mode), allocation(ONE, key="k2", slot=1, mode=mode))
    bench.supervisor.apply(Desired(allocations=both))
    bench.until_gpu(ONE, lambda gpu: gpu.mode is mode)


@pytest.fixture
def bench(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    mps = MpsConfig(run_root=f"{short_tmp}/run")
    config = NodeConfig(resources=(resource(),), mps=mps, backend="simulated")
    with running(Bench(short_tmp, CALM, config)) as bench:
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.READY)
        bind_both(bench, Mode.SM_SHARING)
        yield bench


def use(bench: Bench, *pids: int, mps: tuple[int, ...]) -> Terminator:
    bench.backend.running[ONE] = tuple(GpuProcess(pid=pid) for pid in pids)
    bench.host.connected[ONE] = MpsClients((), mps)
    return Terminator(bench.supervisor)


def test_only_the_clients_of_the_allocation_lose_their_contexts(bench: Bench) -> None:
    with gpu_user("k1") as mine, gpu_user("k2") as other:
        terminator = use(bench, mine, other, mps=(mine, other))
        done, errors = terminator.terminate(["k1"], kill=False, force=False, timeout_s=WAIT_S)
        assert ([(t.pid, t.outcome, t.error) for t in done], errors) == ([(mine, Outcome.TERMINATED, "")], ())
        assert bench.host.terminated == [mine]
        os.kill(mine, 0)


def test_killed_only_after_the_daemon_confirmed(bench: Bench) -> None:
    with gpu_user("k1") as pid:
        terminator = use(bench, pid, mps=(pid,))
        bench.host.fail["terminate client"] = TransientError("cannot terminate: no answer")
        (one,), _ = terminator.terminate(["k1"], kill=True, force=False, timeout_s=WAIT_S)
        assert one.outcome is Outcome.LEFT
        assert one.error == "cannot terminate: no answer: it was not killed, as that could take its neighbours down"
        os.kill(pid, 0)
        bench.host.fail.clear()
        (one,), _ = terminator.terminate(["k1"], kill=True, force=False, timeout_s=WAIT_S)
        assert (one.outcome, one.error) == (Outcome.KILLED, "")


def test_force_kills_without_the_daemons_word(bench: Bench) -> None:
    with gpu_user("k1") as pid:
        terminator = use(bench, pid, mps=(pid,))
        bench.host.fail["terminate client"] = TransientError("cannot terminate: no answer")
        (one,), _ = terminator.terminate(["k1"], kill=True, force=True, timeout_s=WAIT_S)
        assert one.outcome is Outcome.KILLED


def test_a_process_without_mps_can_only_be_killed(bench: Bench) -> None:
    with gpu_user("k1") as pid:
        terminator = use(bench, pid, mps=())
        (one,), _ = terminator.terminate(["k1"], kill=False, force=False, timeout_s=WAIT_S)
        assert (one.outcome, bench.host.terminated) == (Outcome.LEFT, [])
        assert one.error == "it is no MPS client: only killing its process ends it"
        (one,), _ = terminator.terminate(["k1"], kill=True, force=False, timeout_s=WAIT_S)
        assert one.outcome is Outcome.KILLED


def test_who_joined_while_the_daemon_did_not_answer_is_not_killed_unconfirmed(bench: Bench) -> None:
    with gpu_user("k1") as pid:
        terminator = use(bench, mps=())
        for verb in ("probe", "probe servers", "configure", "clients", "terminate client"):
            bench.host.fail[verb] = TransientError("cannot get an answer")
        bench.supervisor.log_event(ONE, FaultBegun(9))
        bench.until_daemon(ONE, DaemonState.CONFIGURING)
        bench.backend.running[ONE] = (GpuProcess(pid=pid),)
        for kill in (False, True):
            (one,), errors = terminator.terminate(["k1"], kill=kill, force=False, timeout_s=WAIT_S)
            assert (one.outcome, errors) == (Outcome.LEFT, ())
            assert one.error.startswith("cannot get an answer")
        os.kill(pid, 0)
        bench.host.fail.clear()
        bench.backend.running.clear()


def test_under_time_slicing_no_daemon_is_asked_about_who_is_no_client(bench: Bench) -> None:
    bind_both(bench, Mode.TIME_SLICING)
    with gpu_user("k1") as pid:
        terminator = use(bench, pid, mps=())
        bench.host.fail["terminate client"] = TransientError("cannot get an answer")
        (one,), _ = terminator.terminate(["k1"], kill=True, force=False, timeout_s=WAIT_S)
        assert (one.outcome, one.error) == (Outcome.KILLED, "")


def test_no_answer_in_time_is_said_in_round_figures(bench: Bench) -> None:
    gate = bench.host.gates["terminate client"] = threading.Event()
    with pytest.raises(TransientError, match=r"cannot terminate MPS client 7: no answer in 0\.1 s"):
        bench.supervisor.terminate_client(ONE, 7, 0.1234567)
    gate.set()


def test_clients_in_a_pod_are_ended_whatever_their_environment_names(bench: Bench) -> None:
    pod = {"GPUFRAC_SIM_POD_UID": "uid-1"}
    with gpu_user("k2", **pod) as lying, gpu_user(None, **pod) as silent, gpu_user("k2") as other:
        terminator = use(bench, lying, silent, other, mps=(lying, silent, other))
        done, errors = terminator.terminate(["k1"], ["uid-1"], kill=True, force=False, timeout_s=WAIT_S)
        ended = {(t.pid, t.outcome, t.allocation_key) for t in done}
        assert (ended, errors) == ({(lying, Outcome.KILLED, "k2"), (silent, Outcome.KILLED, "")}, ())
        os.kill(other, 0)
        bench.backend.running.clear()
        bench.host.connected.clear()


def test_what_cannot_be_told_is_an_error(bench: Bench) -> None:
    terminator = use(bench, mps=())
    bench.host.fail["clients"] = TransientError("cannot get an answer")
    assert terminator.terminate(["other"], kill=False, force=False, timeout_s=WAIT_S) == ((), ())
    done, errors = terminator.terminate(["k1"], kill=False, force=False, timeout_s=WAIT_S)
    assert (done, [str(error) for error in errors]) == (
        (),
        [f"cannot list the clients of GPU {ONE}: cannot get an answer"],
    )
    assert [error.code for error in errors] == [ClientsCode.FAILED]
    bench.host.fail.clear()
