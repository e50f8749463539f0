"""Domains that form and split by themselves: which daemons there are follows what is granted, and who uses them."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsd.config.model import MpsConfig, NamespaceMount, NodeConfig
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.controller import MpsClients
from mpsd.daemon.host import ProtocolChoice
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.state import StateFile
from mpsd.gpu.model import GpuProcess, Mode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, Desired, DesiredAllocation, GpuStatus, Snapshot
from mpsd.shares.groups import set_name
from tests.desired import allocation
from tests.unit.mpsd.supervision.bench import FAST, ONE, TWO, Bench, gpu_user, inventory, resource, running, state_of
from tests.waiting import WAIT_S

BOTH = set_name((ONE, TWO))
READY, DRAINING = DaemonState.READY, DaemonState.DRAINING
LONE = allocation(ONE, key="lone", slot=None)
SLICED = allocation(ONE, key="lone", slot=None, mode=Mode.TIME_SLICING, default_socket=True)
UNREACHING = allocation(ONE, key="lone", group="", slot=None, mode=Mode.TIME_SLICING)


def beside(lone: DesiredAllocation) -> DesiredAllocation:
    """One on both GPUs, of the same mode."""
    mode, by_main_socket = lone.mode, lone.default_socket
    return allocation(ONE, TWO, key="span", group=BOTH, slot=None, mode=mode, default_socket=by_main_socket)


SPAN = beside(LONE)
Open = Callable[..., contextlib.AbstractContextManager[Bench]]


@pytest.fixture
def opened(short_tmp: Path, watchless: None) -> Open:
    """Two GPUs. Daemons end when they are asked to, unless a test keeps them.

    Args of what it gives:
        earlier: daemons that an earlier mpsd recorded and that run still.
        desired: what that one was told last.
    """

    @contextlib.contextmanager
    def node(
        *earlier: str,
        desired: Desired | None = None,
        protocol: int = 3,
        mount: NamespaceMount = NamespaceMount.LINKED,
    ) -> Iterator[Bench]:
        if desired is not None:
            StateFile(f"{short_tmp}/state/mpsd.json", "boot").record_desired(desired)
        mps = MpsConfig(run_root=f"{short_tmp}/run", namespace_mount=mount)
        bench = Bench(short_tmp, FAST, NodeConfig(resources=(resource(),), mps=mps))
        bench.host.choice = ProtocolChoice(protocol)
        bench.host.on_quit = lambda name: ends(bench, name)
        for name in earlier:
            gpus = (ONE, TWO) if name == BOTH else (name,)
            identity = DaemonIdentity(
                boot_id="boot",
                pid=2**22 + 3,
                start_time=len(bench.host.adoptable),
                process_group=0,
                pipe_directory=daemon_dirs(mps, name).pipe,
                protocol=protocol,
                gpus=gpus,
            )
            bench.state.record_daemon(name, identity)
            bench.host.adoptable[name] = identity
        with running(bench):
            bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
            yield bench

    return node


def ends(bench: Bench, name: str) -> None:
    bench.host.adoptable.pop(name, None)
    bench.exits(name)


def want(bench: Bench, *allocations: DesiredAllocation) -> None:
    bench.supervisor.apply(Desired(allocations=allocations))


def daemon_of(snapshot: Snapshot, uuid: str) -> DaemonStatus | None:
    return next((gpu.daemon for gpu in snapshot.gpus if gpu.info.uuid == uuid), None)


def until_served(bench: Bench, one: str, two: str, *keys: str) -> Snapshot:
    """Waits until the GPUs have these daemons, and these allocations, no others, reach them."""

    def served(snapshot: Snapshot) -> bool:
        daemons = [daemon for uuid in (ONE, TWO) if (daemon := daemon_of(snapshot, uuid)) is not None]
        reach = {attached.key for daemon in daemons for attached in daemon.attached if not attached.objection}
        return [d.name for d in daemons if d.state is READY] == [one, two] and reach == set(keys)

    return bench.until(served)


def mounts(snapshot: Snapshot, uuid: str) -> dict[str, str]:
    """What containers of allocations mount to reach the GPU's daemon."""
    daemon = daemon_of(snapshot, uuid)
    assert daemon is not None
    return {attached.key: attached.pipe_directory for attached in daemon.attached}


def is_client(bench: Bench, pid: int, *daemons: str) -> None:
    """A process is a client of these daemons, of those that run, on GPU ONE."""
    for name in daemons:
        bench.host.connected[name] = MpsClients(clients=(pid,))
    bench.backend.running[ONE] = (GpuProcess(pid=pid),)
    bench.supervisor.inventory_changed(
        inventory(state_of(ONE, processes=(GpuProcess(pid=pid),)), state_of(TWO, processes=()))
    )


def is_gone(bench: Bench) -> None:
    bench.host.connected.clear()
    bench.backend.running.clear()
    bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))


def looks(bench: Bench, times: int = 3) -> None:
    """Waits until it was looked so often again who uses GPU ONE."""
    while not bench.backend_looked.empty():
        bench.backend_looked.get_nowait()
    for _ in range(times):
        while bench.backend_looked.get(timeout=WAIT_S) != ONE:
            pass


def quits(bench: Bench) -> list[str]:
    return [name for verb, name in bench.host.calls if verb == "quit"]


def has_client(gpu: GpuStatus) -> bool:
    return bool(gpu.clients)


# Forming


@pytest.mark.parametrize("lone", [LONE, SLICED], ids=["sm-sharing", "time-slicing"])
def test_idle_daemons_make_way_for_one_and_who_was_there_reaches_it_by_the_same_directory(
    opened: Open, lone: DesiredAllocation
) -> None:
    with opened() as bench:
        want(bench, lone)
        before = mounts(until_served(bench, ONE, TWO, "lone"), ONE)
        want(bench, lone, beside(lone))
        after = until_served(bench, BOTH, BOTH, "lone", "span")
        assert mounts(after, ONE) == mounts(after, TWO)
        assert mounts(after, ONE).keys() == {"lone", "span"}
        assert mounts(after, ONE)["lone"] == before["lone"]
        assert sorted(quits(bench)) == [ONE, TWO]
        spawned = bench.host.calls.index(("spawn", BOTH))
        assert all(bench.host.calls.index(("kill", uuid)) < spawned for uuid in (ONE, TWO))


def test_it_waits_for_a_client_and_says_whose_daemon_is_in_the_way(opened: Open) -> None:
    with opened() as bench, gpu_user("lone") as pid:
        want(bench, LONE)
        until_served(bench, ONE, TWO, "lone")
        is_client(bench, pid, ONE)
        bench.until_gpu(ONE, has_client)
        want(bench, LONE, SPAN)
        gpu = bench.until_gpu(ONE, lambda g: g.daemon is not None and "GPU 1 (draining)" in g.daemon.reason)
        assert gpu.daemon is not None
        assert (gpu.daemon.name, gpu.daemon.state) == (BOTH, DaemonState.ABSENT)
        bench.host.await_call("quit", TWO)
        looks(bench)
        assert ONE not in quits(bench)
        assert ("spawn", BOTH) not in bench.host.calls
        is_gone(bench)
        until_served(bench, BOTH, BOTH, "lone", "span")


def test_who_needs_no_daemon_keeps_none(opened: Open) -> None:
    with opened() as bench, gpu_user("lone") as pid:
        want(bench, UNREACHING)
        until_served(bench, ONE, TWO)
        is_client(bench, pid)
        bench.until_gpu(ONE, has_client)
        want(bench, UNREACHING, beside(SLICED))
        assert mounts(until_served(bench, BOTH, BOTH, "span"), ONE).keys() == {"span"}


def test_one_that_is_not_needed_after_all_gives_the_gpus_back(opened: Open) -> None:
    """The span went before the old daemons did."""
    with opened() as bench, gpu_user("lone") as pid:
        want(bench, LONE)
        until_served(bench, ONE, TWO, "lone")
        is_client(bench, pid, ONE)
        bench.until_gpu(ONE, has_client)
        want(bench, LONE, SPAN)
        bench.host.await_call("quit", TWO)
        want(bench, LONE)
        until_served(bench, ONE, TWO, "lone")
        assert ONE not in quits(bench)
        assert ("spawn", BOTH) not in bench.host.calls


# Splitting


@pytest.mark.parametrize("lone", [LONE, SLICED], ids=["sm-sharing", "time-slicing"])
def test_it_splits_when_nobody_needs_it_whole_and_nobody_is_its_client(opened: Open, lone: DesiredAllocation) -> None:
    with opened() as bench:
        want(bench, lone, beside(lone))
        before = mounts(until_served(bench, BOTH, BOTH, "lone", "span"), ONE)
        want(bench, lone)
        after = until_served(bench, ONE, TWO, "lone")
        assert mounts(after, ONE) == {"lone": before["lone"]}
        assert mounts(after, TWO) == {}
        assert bench.host.calls.index(("kill", BOTH)) < bench.host.calls.index(("spawn", ONE))


def test_it_stays_while_somebody_is_its_client(opened: Open) -> None:
    with opened() as bench, gpu_user("lone") as pid:
        want(bench, LONE, SPAN)
        until_served(bench, BOTH, BOTH, "lone", "span")
        is_client(bench, pid, BOTH)
        bench.until_gpu(ONE, has_client)
        want(bench, LONE)
        bench.supervisor.clients([ONE, TWO])
        more = allocation(TWO, key="more", slot=None)
        want(bench, LONE, more)
        assert mounts(until_served(bench, BOTH, BOTH, "lone", "more"), TWO).keys() == {"lone", "more"}, (
            "others come to it, too"
        )
        assert BOTH not in quits(bench)
        is_gone(bench)
        after = until_served(bench, ONE, TWO, "lone", "more")
        assert (set(mounts(after, ONE)), set(mounts(after, TWO))) == ({"lone"}, {"more"})


def test_a_client_that_comes_while_it_is_about_to_split_has_it_back(opened: Open) -> None:
    with opened() as bench, gpu_user("lone") as pid:
        want(bench, LONE, SPAN)
        until_served(bench, BOTH, BOTH, "lone", "span")
        gate = bench.host.gates["probe"] = threading.Event()
        want(bench, LONE)
        bench.until_gpu(ONE, lambda g: g.group == ONE)
        bench.host.connected[BOTH] = MpsClients(clients=(pid,))
        bench.backend.running[ONE] = (GpuProcess(pid=pid),)
        del bench.host.gates["probe"]
        gate.set()
        until_served(bench, BOTH, BOTH, "lone")
        assert BOTH not in quits(bench)
        is_gone(bench)
        until_served(bench, ONE, TWO, "lone")


# Restarts of mpsd


def test_a_domain_that_had_formed_is_taken_over(opened: Open) -> None:
    with opened(BOTH, desired=Desired(allocations=(LONE, SPAN))) as bench:
        assert mounts(until_served(bench, BOTH, BOTH, "lone", "span"), ONE).keys() == {"lone", "span"}
        assert {name for _, name in bench.host.calls} == {BOTH}
        assert quits(bench) == []


@pytest.mark.parametrize("left", [(), (ONE,), (TWO,), (ONE, TWO)], ids=["none", "one", "two", "both"])
def test_a_domain_that_had_half_formed_forms(opened: Open, left: tuple[str, ...]) -> None:
    with opened(*left, desired=Desired(allocations=(LONE, SPAN))) as bench:
        until_served(bench, BOTH, BOTH, "lone", "span")
        assert sorted(quits(bench)) == sorted(left)


@pytest.mark.parametrize("left", [(BOTH,), (), (ONE,), (TWO,)], ids=["whole", "none", "one", "two"])
def test_a_domain_that_had_half_split_splits(opened: Open, left: tuple[str, ...]) -> None:
    with opened(*left, desired=Desired(allocations=(LONE,))) as bench:
        assert mounts(until_served(bench, ONE, TWO, "lone"), ONE).keys() == {"lone"}
        assert quits(bench) == [name for name in left if name == BOTH]


def test_a_domain_that_is_in_use_is_kept_though_nobody_needs_it_whole(opened: Open) -> None:
    with gpu_user("lone") as pid, opened(BOTH, desired=Desired(allocations=(LONE,))) as bench:
        bench.host.connected[BOTH] = MpsClients(clients=(pid,))
        is_client(bench, pid, BOTH)
        assert mounts(until_served(bench, BOTH, BOTH, "lone"), ONE).keys() == {"lone"}
        assert quits(bench) == []
        is_gone(bench)
        until_served(bench, ONE, TWO, "lone")


# Who can't move


CANNOT_MOVE = pytest.mark.parametrize(
    ("protocol", "mount"), [(2, NamespaceMount.LINKED), (3, NamespaceMount.DAEMON)], ids=["protocol-2", "daemon-mount"]
)


def reaching(protocol: int, *keys: str) -> tuple[str, ...]:
    """Of which it is told how they reach the daemon: under protocol 2 all do the same way."""
    return keys if protocol == 3 else ()


@CANNOT_MOVE
def test_daemons_make_way_for_who_will_not_move_either(opened: Open, protocol: int, mount: NamespaceMount) -> None:
    with opened(protocol=protocol, mount=mount) as bench:
        until_served(bench, ONE, TWO)
        want(bench, SPAN)
        until_served(bench, BOTH, BOTH, *reaching(protocol, "span"))
        want(bench)
        until_served(bench, ONE, TWO)


@CANNOT_MOVE
def test_who_cannot_move_keeps_its_daemon_from_making_way(opened: Open, protocol: int, mount: NamespaceMount) -> None:
    with opened(protocol=protocol, mount=mount) as bench:
        want(bench, LONE)
        until_served(bench, ONE, TWO, *reaching(protocol, "lone"))
        want(bench, LONE, SPAN)
        bench.host.await_call("quit", TWO)
        looks(bench)
        assert ONE not in quits(bench)
        want(bench, SPAN)
        until_served(bench, BOTH, BOTH, *reaching(protocol, "span"))


@CANNOT_MOVE
def test_who_cannot_move_keeps_its_daemon_from_splitting(opened: Open, protocol: int, mount: NamespaceMount) -> None:
    with opened(protocol=protocol, mount=mount) as bench:
        want(bench, LONE, SPAN)
        before = mounts(until_served(bench, BOTH, BOTH, *reaching(protocol, "lone", "span")), ONE)
        want(bench, LONE)
        bench.until(lambda snapshot: daemon_of(snapshot, ONE) is not None)
        bench.supervisor.clients([ONE, TWO])
        snapshot = until_served(bench, BOTH, BOTH, *reaching(protocol, "lone"))
        assert mounts(snapshot, ONE).get("lone") == before.get("lone")
        assert BOTH not in quits(bench)
        want(bench)
        until_served(bench, ONE, TWO)
