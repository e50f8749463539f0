"""Faults of mpsd's world that take more than one blow: stops, upgrades, groups, clients that won't end, floods."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from mpsd.config.model import GIB, SimulatedConfig, SimulatedGpu
from mpsd.daemon import process
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.localapi.snapshot import DaemonState, GpuClients, GpuStatus, Outcome
from mpsd.sim.driver import SimulatedDriver
from mpsd.supervision.terminate import Terminator
from tests.desired import allocation
from tests.e2e.mpsdnode import DRIVERS, first_line, is_ready
from tests.faults.mpsd.node import LIMIT, Node, daemon_of, opened, pid_of, quick, texts
from tests.waiting import WAIT_S, until

__all__ = ["quick"]
pytestmark = pytest.mark.usefixtures("quick")

Make = Callable[..., Node]
Groups = tuple[tuple[str, tuple[int, ...]], ...]


@pytest.fixture(params=[2, 3])
def make(short_tmp: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes the node of a test, under both protocols."""
    with ExitStack() as stack:
        yield lambda **more: stack.enter_context(opened(Node(short_tmp, request.param, **more)))


@pytest.fixture
def node(make: Make) -> Node:
    node = make()
    node.start()
    node.until_ready()
    return node


def with_client(node: Node) -> int:
    """Has GPU 0 bound and used; the daemon's PID."""
    node.bind()
    node.until(lambda gpu: gpu.mode is Mode.SM_SHARING)
    node.hold()
    return pid_of(node.until(lambda gpu: [client.allocation_key for client in gpu.clients] == ["k0"]))


@pytest.mark.parametrize("fault", ["hung-quit", "wedge"])
def test_a_stop_ends_whatever_the_daemon_does(node: Node, fault: str) -> None:
    supervisor = node.supervisor
    node.fault(fault)
    node.stop()
    assert node.mps_pids() == set()
    assert [daemon_of(gpu).state for gpu in supervisor.snapshot.gpus] == [DaemonState.ABSENT] * 2


# --- a daemon while mpsd is down ------------------------------------------------------------------------------------


def test_a_daemon_that_died_while_mpsd_was_down_leaves_nothing(node: Node) -> None:
    old = with_client(node)
    node.stop()
    survivors = node.mps_pids() - {old}
    assert survivors
    os.kill(old, signal.SIGKILL)
    node.start()
    assert pid_of(node.until(is_ready)) != old
    assert not survivors & node.mps_pids()
    node.until_told()


def test_a_daemon_is_known_without_the_record(node: Node) -> None:
    old = with_client(node)
    node.stop()
    node.state_path.write_text("{")
    node.start()
    gpu = node.until(lambda gpu: is_ready(gpu) and gpu.mode is Mode.SM_SHARING and not texts(gpu))
    assert pid_of(gpu) == old
    assert node.is_untouched()


def test_a_daemon_of_another_driver_is_spoken_to_in_its_protocol_and_replaced_when_unused(node: Node) -> None:
    old, other = with_client(node), 5 - node.protocol
    node.stop()
    SimulatedDriver.create(node.simulation, SimulatedConfig(gpus=(SimulatedGpu(),) * 2, driver=DRIVERS[other]))
    node.start()
    wanted = f"it speaks MPS protocol {node.protocol}, and {other} is wanted"
    gpu = node.until(lambda gpu: wanted in texts(gpu) and gpu.mode is Mode.SM_SHARING)
    assert (daemon_of(gpu).state, daemon_of(gpu).protocol, pid_of(gpu)) == (DaemonState.DRAINING, node.protocol, old)
    assert node.cuda("--allocate", "9Gi").communicate(timeout=WAIT_S)[0].strip() == "CUDA_ERROR_OUT_OF_MEMORY"
    assert node.is_untouched()
    node.end_clients()
    node.control.until_asked(node.dirs, 3)
    assert pid_of(node.gpu) == old  # its allocation lives
    node.mark()
    node.release()
    gpu = node.until(lambda gpu: is_ready(gpu) and daemon_of(gpu).protocol == other)
    assert pid_of(gpu) != old
    assert {daemon_of(gpu).protocol for gpu in node.supervisor.snapshot.gpus} == {other}


# --- clients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["terminate-fails", "terminate-hangs"])
def test_a_client_that_is_not_terminated_is_not_killed_either(node: Node, fault: str) -> None:
    pid = with_client(node)
    terminator = Terminator(node.supervisor)
    node.fault(fault)
    done, errors = terminator.terminate(["k0"], kill=True, force=False, timeout_s=WAIT_S)
    assert [(one.outcome, one.allocation_key, one.pid) for one in done] == [(Outcome.LEFT, "k0", node.held[0].pid)]
    assert done[0].error.endswith(": it was not killed, as that could take its neighbours down")
    assert errors == ()
    assert node.is_untouched()
    done, errors = terminator.terminate(["k0"], kill=True, force=True, timeout_s=WAIT_S)
    assert ([one.outcome for one in done], errors) == ([Outcome.KILLED], ())
    node.clear(fault)
    gpu = node.until(lambda gpu: is_ready(gpu) and not gpu.clients)
    assert pid_of(gpu) == pid


def test_clients_of_a_hung_driver_are_an_error(node: Node) -> None:
    node.driver.set_fault("hang", "processes", uuid=node.uuid)
    assert "no answer in 0.3 s" in node.supervisor.clients([node.uuid], timeout_s=0.3)[node.uuid].error
    node.driver.clear_fault("hang", node.uuid)
    assert node.supervisor.clients([node.uuid]) == {node.uuid: GpuClients()}


def test_clients_of_a_lost_gpu_can_be_told(make: Make) -> None:
    node = make(gpus=1)
    node.start()
    node.until_ready()
    node.driver.set_fault("lost", uuid=node.uuid)
    node.until(lambda gpu: gpu.health is GpuHealth.LOST)
    # With no GPU left the driver is opened again and again; meanwhile "nobody" must be an error, never an answer.

    def told() -> bool:
        found = node.supervisor.clients([node.uuid])[node.uuid]
        assert found.clients == ()
        return not found.error

    until(told, "the clients of a lost GPU were never told")
    node.driver.clear_fault("lost", node.uuid)
    node.until(lambda gpu: gpu.health is GpuHealth.OK)


# --- logs ------------------------------------------------------------------------------------------------------------


def test_a_flood_of_log_lines_is_bounded_on_disk_and_in_our_log(make: Make) -> None:
    node = make()
    node.log_max_bytes = 64 << 10
    node.start()
    pid = pid_of(node.until_ready())
    node.fault("log-flood", "2000")
    node.said.until("control.log was cut: it took more than 65536 bytes")
    node.control.until_asked(node.dirs, 8)  # each command writes about 100 KiB
    node.clear("log-flood")
    cut = len(node.said.lines)
    size_bytes = sum(entry.stat().st_size for entry in os.scandir(node.dirs.log) if entry.is_file())
    assert size_bytes < 400 << 10
    assert node.said.count("was cut") == 1
    assert node.said.count("flood") == 0
    assert cut < 60
    assert (is_ready(node.gpu), pid_of(node.gpu)) == (True, pid)


# --- groups ----------------------------------------------------------------------------------------------------------


def pair(make: Make, *members: int) -> Node:
    """Three GPUs, two of them a group."""
    node = make(gpus=3, groups=(("pair", members or (0, 1)),))
    node.start()
    return node


def both(node: Node) -> list[GpuStatus]:
    return [gpu for gpu in node.supervisor.snapshot.gpus if gpu.info.index < 2]


def bind_pair(node: Node) -> None:
    share = allocation(*node.uuids[:2], group="pair", resource="x/g", key="k0", slot=0, limit_bytes=LIMIT)
    node.bind(share)
    node.until_all(lambda s: all(gpu.mode is Mode.SM_SHARING for gpu in s.gpus[:2]))


def test_the_daemon_of_a_group_is_lost_and_back_for_all_its_gpus(make: Make) -> None:
    node = pair(make)
    node.until_ready()
    (old,) = {pid_of(gpu) for gpu in both(node)}
    os.kill(old, signal.SIGKILL)
    node.until_all(lambda s: all(daemon_of(gpu).state is DaemonState.BACKOFF for gpu in s.gpus[:2]))
    node.until_ready()
    (new,) = {pid_of(gpu) for gpu in both(node)}
    assert new != old
    assert set(node.others) == {node.uuids[2]}


def test_a_lost_gpu_of_a_group_leaves_the_daemon_to_the_others(make: Make) -> None:
    node = pair(make)
    (old,) = {pid_of(gpu) for gpu in (node.until_ready(), both(node)[1])}
    node.driver.set_fault("lost", uuid=node.uuids[1])
    node.until_all(lambda s: s.gpus[1].health is GpuHealth.LOST)
    assert [(is_ready(gpu), pid_of(gpu)) for gpu in both(node)] == [(True, old)] * 2
    node.driver.clear_fault("lost", node.uuids[1])
    node.until_all(lambda s: s.gpus[1].health is GpuHealth.OK)


def test_a_group_with_a_missing_member_is_not_served_until_the_config_is_right(make: Make) -> None:
    node = pair(make, 0, 7)
    gpu = node.until(lambda gpu: bool(gpu.not_shared))
    assert (gpu.not_shared, gpu.daemon) == ("group pair: its GPU 7 is not on this node", None)
    node.until_all(lambda s: all(map(is_ready, s.gpus[1:])))
    node.guarded = False  # GPU 1 goes into the group
    node.supervisor.config_changed(msgspec.structs.replace(node.config, groups=(("pair", (0, 1)),)))
    node.until_all(lambda s: all(map(is_ready, s.gpus)) and {gpu.group for gpu in s.gpus[:2]} == {"pair"})
    assert len({pid_of(gpu) for gpu in both(node)}) == 1
    assert pid_of(node.supervisor.snapshot.gpus[2]) == node.others[node.uuids[2]]


@pytest.mark.parametrize("groups", [(), (("pair", (0, 2)),)], ids=["dissolved", "other members"])
def test_gpus_are_regrouped_when_their_allocations_are_gone(
    make: Make, groups: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    node = pair(make)
    (old,) = {pid_of(gpu) for gpu in (node.until_ready(), both(node)[1])}
    bind_pair(node)
    node.mark()
    node.guarded = not groups
    node.supervisor.config_changed(msgspec.structs.replace(node.config, groups=groups))
    if groups:
        node.until(lambda gpu: "its GPUs changed in the config: it is regrouped once its allocations" in gpu.not_shared)
    node.control.until_asked(node.dirs_of("pair"), 4)
    assert [(is_ready(gpu), pid_of(gpu), gpu.mode) for gpu in both(node)] == [(True, old, Mode.SM_SHARING)] * 2
    node.guarded = False
    node.mark()
    node.release()
    owners = ["pair", node.uuids[1], "pair"] if groups else node.uuids
    node.until_all(lambda s: all(map(is_ready, s.gpus)) and [gpu.group for gpu in s.gpus] == owners)
    pids = [pid_of(gpu) for gpu in node.supervisor.snapshot.gpus]
    assert len(set(pids)) == len(set(owners))
    assert old not in {*pids, *node.mps_pids("pair")}
    assert bool(node.mps_pids("pair")) is bool(groups)


def test_a_client_of_a_group_sees_its_gpus_each_with_the_limit(make: Make) -> None:
    node = pair(make)
    node.until_ready()
    bind_pair(node)
    daemon = daemon_of(node.until(lambda gpu: node.protocol == 2 or bool(daemon_of(gpu).attached)))
    mount = daemon.attached[0].pipe_directory if node.protocol == 3 else daemon.pipe_directory
    for device in ("0", "1"):
        for size, answer in (("8Gi", str(8 * GIB)), ("9Gi", "CUDA_ERROR_OUT_OF_MEMORY")):
            program = node.cuda(
                "--allocate",
                size,
                "--device",
                device,
                CUDA_VISIBLE_DEVICES=",".join(node.uuids[:2]),
                CUDA_MPS_PIPE_DIRECTORY=mount,
            )
            assert first_line(program) == answer


def test_nobody_of_ours_is_found_by_a_name(node: Node) -> None:
    """Two daemons with the same binary: ending one is not the other's end."""
    mine, other = (process.members(uuid, node.dirs_of(uuid).pipe) for uuid in node.uuids)
    assert {member.pid for member in mine}.isdisjoint(member.pid for member in other)
