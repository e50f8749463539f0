"""Which MPS protocol daemons speak, and while that is not known, over fakes."""

from pathlib import Path

import pytest

from mpsd.common.errors import TransientError
from mpsd.config.model import GIB
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.host import ProtocolChoice
from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import DaemonState
from tests.desired import bind
from tests.reasons import because
from tests.unit.mpsd.supervision.bench import CALM, FAST, ONE, Bench, inventory, running, state_of


def test_a_node_that_cannot_speak_the_protocol_starts_no_daemon_and_says_why(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, CALM)
    bench.host.choice = ProtocolChoice(3, objection=because("cannot speak MPS protocol 3: the driver is too old"))
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        gpu = bench.until_daemon(ONE, DaemonState.FAILED)
        assert gpu.daemon is not None
        assert gpu.daemon.reason == "cannot speak MPS protocol 3: the driver is too old"
        assert bench.host.verbs(ONE) == ["find"]
        bench.supervisor.apply(bind(ONE, Mode.TIME_SLICING))  # what needs no daemon is served all the same
        gpu = bench.until_gpu(ONE, lambda g: g.mode is Mode.TIME_SLICING)
        assert gpu.not_shared == ""


def test_a_control_binary_that_cannot_be_run_for_a_moment_outdates_no_daemon(
    short_tmp: Path, watchless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpsd.supervision.protocol.RETRY_S", 0.01)
    bench = Bench(short_tmp, FAST)
    bench.host.choice = ProtocolChoice(3)
    bench.host.fail["protocol"] = TransientError("cannot run it")
    bench.host.adoptable[ONE] = DaemonIdentity(
        boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", protocol=3, gpus=(ONE,)
    )
    with running(bench):
        bench.supervisor.apply(bind(ONE, limit_bytes=8 * GIB))
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.READY)
        bench.host.fail.clear()
        bench.until_gpu(ONE, lambda g: not g.not_shared)
        bench.host.await_call("probe", ONE)
        gpu = bench.until_daemon(ONE, DaemonState.READY)
        assert gpu.daemon is not None
        assert (gpu.daemon.protocol, gpu.daemon.reason) == (3, "")
        bench.host.adoptable.clear()


def test_while_it_is_not_known_what_daemons_shall_speak_none_is_started_not_even_for_allocations(
    short_tmp: Path, watchless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpsd.supervision.protocol.RETRY_S", 0.01)
    bench = Bench(short_tmp, FAST)
    bench.host.fail["protocol"] = TransientError("it is slow")
    with running(bench):
        bench.supervisor.apply(bind(ONE))
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_gpu(ONE, lambda gpu: gpu.daemon is not None and "it is slow" in gpu.daemon.reason)
        assert "spawn" not in bench.host.verbs(ONE)
        bench.host.choice = ProtocolChoice(3)
        bench.host.fail.clear()
        gpu = bench.until_daemon(ONE, DaemonState.READY)
        assert gpu.daemon is not None
        assert gpu.daemon.protocol == 3


def test_what_was_chosen_before_is_used_and_asked_about_again(
    short_tmp: Path, watchless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpsd.supervision.protocol.RETRY_S", 0.01)
    bench = Bench(short_tmp, FAST)
    bench.host.choice = ProtocolChoice(3, unsure=because("it is slow"))
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        gpu = bench.until_daemon(ONE, DaemonState.READY)
        assert gpu.daemon is not None
        assert (gpu.daemon.protocol, gpu.not_shared) == (3, "")
        bench.host.on_quit = bench.exits
        bench.host.choice = ProtocolChoice(2)
        bench.host.await_call("quit", ONE)  # another is to take its place
