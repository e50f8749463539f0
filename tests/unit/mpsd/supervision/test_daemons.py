"""Which daemons run: groups, reloads, earlier runs, replacements, over fakes."""

from pathlib import Path

import msgspec
import pytest

from mpsd.common.errors import ConfigError, TransientError
from mpsd.config.model import GIB, GpuSelection, MpsConfig, NodeConfig
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.host import ProtocolChoice
from mpsd.daemon.state import StateFile
from mpsd.gpu.model import GpuProcess, Mode
from mpsd.localapi.snapshot import DaemonState, Desired
from tests.desired import bind
from tests.unit.mpsd.supervision.bench import (
    CALM,
    FAST,
    ONE,
    PAIR,
    TWO,
    Bench,
    gpu_user,
    inventory,
    resource,
    running,
    state_of,
)
from tests.waiting import WAIT_S


def test_a_reload_does_not_put_the_limit_below_a_live_allocation(calm: Bench) -> None:
    calm.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    calm.supervisor.apply(bind(ONE, Mode.SM_SHARING, 40 * GIB))
    calm.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 40 * GIB)
    calm.supervisor.config_changed(msgspec.structs.replace(calm.config, resources=(resource(4),)))
    calm.until_gpu(TWO, lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 4 * GIB)
    assert calm.host.limits[ONE] == 40 * GIB
    calm.supervisor.apply(bind(ONE, None))
    calm.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.pinned_limit_bytes == 4 * GIB)
    assert calm.host.verbs(ONE).count("spawn") == 1


def test_the_limit_of_live_allocations_outlives_mpsd(short_tmp: Path, watchless: None) -> None:
    StateFile(f"{short_tmp}/state/mpsd.json", "boot").record_desired(bind(ONE, Mode.SM_SHARING, 40 * GIB))
    with running(Bench(short_tmp, CALM)) as again:
        again.supervisor.inventory_changed(inventory(state_of(ONE)))
        gpu = again.until_daemon(ONE, DaemonState.READY)
        assert gpu.daemon is not None
        assert gpu.daemon.pinned_limit_bytes == 40 * GIB
        assert again.host.verbs(ONE).count("configure") == 1


def test_a_gpu_excluded_by_a_reload_keeps_its_daemon_while_it_is_bound(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.supervisor.apply(bind(ONE, Mode.SM_SHARING, 8 * GIB))
    fast.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    fast.until_daemon(ONE, DaemonState.READY)
    fast.supervisor.config_changed(msgspec.structs.replace(fast.config, gpus=GpuSelection(exclude=(ONE,))))
    gpu = fast.until_gpu(ONE, lambda g: g.not_shared == "it is excluded by the config")
    assert gpu.mode is Mode.SM_SHARING
    gpu = fast.until_daemon(ONE, DaemonState.READY)
    fast.exits(ONE)
    gpu = fast.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.restarts == 1 and g.daemon.state == "ready")
    assert gpu.daemon is not None
    assert gpu.daemon.pinned_limit_bytes is not None
    assert gpu.daemon.pinned_limit_bytes >= 8 * GIB
    assert "quit" not in fast.host.verbs(ONE)
    fast.supervisor.apply(Desired())
    fast.until_daemon(ONE, DaemonState.STOPPING)
    fast.exits(ONE)
    fast.until_gpu(ONE, lambda g: g.daemon is None)


def test_an_excluded_gpu_that_is_bound_gets_its_daemon_from_a_new_mpsd(short_tmp: Path, watchless: None) -> None:
    config = NodeConfig(resources=(), gpus=GpuSelection(exclude=(ONE,)), mps=MpsConfig(run_root=f"{short_tmp}/run"))
    StateFile(f"{short_tmp}/state/mpsd.json", "boot").record_desired(bind(ONE, Mode.SM_SHARING, 8 * GIB))
    with running(Bench(short_tmp, CALM, config)) as bench:
        bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
        gpu = bench.until_daemon(ONE, DaemonState.READY)
        assert gpu.not_shared == "it is excluded by the config"


def test_a_recorded_daemon_of_an_unshared_gpu_is_found_and_ended(short_tmp: Path, watchless: None) -> None:
    config = NodeConfig(resources=(), gpus=GpuSelection(exclude=(ONE,)), mps=MpsConfig(run_root=f"{short_tmp}/run"))
    bench = Bench(short_tmp, FAST, config)
    identity = DaemonIdentity(boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p")
    bench.state.record_daemon(ONE, identity)
    bench.host.adoptable[ONE] = identity
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.STOPPING)
        bench.exits(ONE)
        bench.until_gpu(ONE, lambda g: g.daemon is None)


def test_a_group_has_one_daemon_that_each_of_its_gpus_shows(pair: Bench) -> None:
    pair.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    one, two = (pair.until_daemon(uuid, DaemonState.READY) for uuid in (ONE, TWO))
    assert one.daemon == two.daemon
    assert one.daemon is not None
    assert (one.group, two.group, one.daemon.name) == ("pair", "pair", "pair")
    assert {name for _, name in pair.host.calls} == {"pair"}


def test_regrouped_gpus_get_their_new_daemon_when_the_old_ones_are_gone(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    fast.until_daemon(ONE, DaemonState.READY)
    fast.until_daemon(TWO, DaemonState.READY)
    fast.supervisor.config_changed(msgspec.structs.replace(PAIR, mps=fast.config.mps))
    gpu = fast.until_gpu(ONE, lambda g: g.group == "pair" and g.daemon is not None and bool(g.daemon.reason))
    assert gpu.daemon is not None
    assert gpu.daemon.reason.startswith("it takes the place of others, which end when unused: ")
    assert gpu.not_shared == "", "nothing that was asked for meanwhile is refused for good"
    assert "pair" not in {name for _, name in fast.host.calls}
    for uuid in (ONE, TWO):
        fast.host.await_call("quit", uuid)
        fast.exits(uuid)
    gpu = fast.until_daemon(ONE, DaemonState.READY)
    assert (gpu.not_shared, gpu.daemon and gpu.daemon.name) == ("", "pair")


def test_a_regrouping_waits_for_allocations(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
    fast.supervisor.apply(bind(ONE))
    fast.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    fast.supervisor.config_changed(msgspec.structs.replace(PAIR, mps=fast.config.mps))
    fast.until_gpu(TWO, lambda g: f"allocations granted on {ONE} must end first" in g.not_shared)
    gpu = fast.until_daemon(ONE, DaemonState.READY)
    assert (gpu.group, gpu.mode) == (ONE, Mode.SM_SHARING)
    fast.host.await_call("quit", TWO)
    fast.exits(TWO)
    fast.supervisor.apply(Desired())
    fast.host.await_call("quit", ONE)
    fast.exits(ONE)
    fast.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.name == "pair" and g.daemon.state == "ready")


def test_a_daemon_of_a_group_that_is_no_more_ends_before_its_gpus_are_served(short_tmp: Path, watchless: None) -> None:
    bench = Bench(short_tmp, FAST)
    old = DaemonIdentity(
        boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", gpus=(ONE, TWO)
    )
    bench.state.record_daemon("old", old)
    bench.host.adoptable["old"] = old
    bench.host.on_quit = bench.exits
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
        bench.until_daemon(ONE, DaemonState.READY)
        bench.until_daemon(TWO, DaemonState.READY)
        assert bench.host.calls.index(("kill", "old")) < bench.host.calls.index(("spawn", ONE))


def test_an_outdated_daemon_serves_in_its_own_protocol_and_is_replaced_when_unused(
    short_tmp: Path, watchless: None
) -> None:
    bench = Bench(short_tmp, FAST)
    bench.host.choice = ProtocolChoice(3)
    bench.host.adoptable[ONE] = DaemonIdentity(
        boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", protocol=2, gpus=(ONE,)
    )
    with running(bench):
        bench.supervisor.apply(bind(ONE, limit_bytes=8 * GIB))
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        gpu = bench.until_daemon(ONE, DaemonState.DRAINING)
        assert gpu.daemon is not None
        assert (gpu.daemon.protocol, gpu.daemon.pinned_limit_bytes) == (2, 8 * GIB)
        assert "it speaks MPS protocol 2, and 3 is wanted" in gpu.daemon.reason
        for _ in range(3):  # held: it is not ended however often it is looked at
            bench.backend_looked.get(timeout=WAIT_S)
        assert "quit" not in bench.host.verbs(ONE)
        bench.host.adoptable.clear()
        bench.host.on_quit = bench.exits
        bench.supervisor.apply(Desired())
        bench.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.protocol == 3 and g.daemon.state == "ready")


# Wedges, replacement, trouble in logs
def test_a_wedged_daemon_is_left_to_its_clients_and_replaced_when_they_are_gone(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.until_daemon(ONE, DaemonState.READY)
    fast.logs.lines[ONE] = ("the last line",)
    with gpu_user("k1") as pid:
        fast.backend.running[ONE] = (GpuProcess(pid=pid),)
        fast.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        fast.until_gpu(ONE, lambda g: bool(g.clients))
        for verb in ("configure", "probe", "probe servers", "clients"):
            fast.host.fail[verb] = TransientError("cannot get an answer")
        gpu = fast.until_gpu(ONE, lambda g: g.daemon is not None and g.daemon.wedged)
        assert gpu.daemon is not None
        assert gpu.daemon.pinned_limit_bytes is None
        assert gpu.daemon.last_log == ("the last line",)
        for _ in range(3):
            fast.backend_looked.get(timeout=WAIT_S)
        assert "quit" not in fast.host.verbs(ONE)
    fast.backend.running.clear()
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    gpu = fast.until_daemon(ONE, DaemonState.STOPPING)
    fast.host.fail.clear()
    fast.exits(ONE)
    fast.until_daemon(ONE, DaemonState.READY)


def test_a_daemon_is_replaced_on_request_when_its_clients_are_gone_and_at_once_with_now(fast: Bench) -> None:
    fast.supervisor.inventory_changed(inventory(state_of(ONE)))
    fast.supervisor.apply(bind(ONE, limit_bytes=8 * GIB))
    fast.until_gpu(ONE, lambda g: g.mode is Mode.SM_SHARING)
    fast.until_daemon(ONE, DaemonState.READY)
    with gpu_user("k1") as pid:
        fast.backend.running[ONE] = (GpuProcess(pid=pid),)
        fast.supervisor.inventory_changed(inventory(state_of(ONE, processes=(GpuProcess(pid=pid),))))
        fast.until_gpu(ONE, lambda g: bool(g.clients))
        fast.supervisor.replace(ONE, "new binary", now=False)
        gpu = fast.until_daemon(ONE, DaemonState.DRAINING)
        assert gpu.daemon is not None
        assert (gpu.daemon.pinned_limit_bytes, "new binary" in gpu.daemon.reason) == (8 * GIB, True)
        fast.supervisor.replace(ONE, "no patience", now=True)
        fast.until_daemon(ONE, DaemonState.STOPPING)
        fast.exits(ONE)
    fast.until_daemon(ONE, DaemonState.READY)
    with pytest.raises(ConfigError, match="cannot replace the MPS daemon of GPU-x: there is none"):
        fast.supervisor.replace("GPU-x", "", now=True)


def test_a_daemon_whose_gpus_are_gone_ends_with_what_was_granted_there_and_nothing_else_does(
    short_tmp: Path, watchless: None
) -> None:
    old = DaemonIdentity(boot_id="boot", pid=2**22 + 3, start_time=1, process_group=0, pipe_directory="/p", gpus=(TWO,))
    state = StateFile(f"{short_tmp}/state/mpsd.json", "boot")
    state.record_daemon(TWO, old)
    state.record_desired(bind(TWO))
    bench = Bench(short_tmp, FAST)
    bench.host.adoptable[TWO] = old
    bench.host.on_quit = bench.exits
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE)))
        bench.until_daemon(ONE, DaemonState.READY)
        (said,) = bench.until(lambda s: bool(s.warnings)).warnings
        assert said == (
            f"the MPS daemon of {TWO} runs (pid {old.pid}), and none of its GPUs is on this node: it ends by "
            "itself once nothing granted on them is left: delete the pods that `gpufrac allocations` names for it"
        )
        bench.supervisor.apply(Desired())
        bench.host.await_call("kill", TWO)
        bench.until(lambda s: not s.warnings)
        assert "quit" not in bench.host.verbs(ONE)
