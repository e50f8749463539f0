"""The door to memory limits: only cgroups, no answer later than asked for, and only what reads back is set."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.common.errors import ConfigError, GpufracError, ProtocolError, TransientError
from mpsd.common.reason import Reason
from mpsd.daemon.exits import ExitWatcher
from mpsd.gpu.backend import GpuLostError, GpuNotSupportedError, MemoryLimits, NoLimitError
from mpsd.limits.api import MAX_QUERIES, LimitsApi
from mpsd.localapi.reasons import ConfigCode
from mpsd.localapi.snapshot import CleanedUp, HardLimits, LimitQuery, LimitReading
from mpsd.supervision.methods import methods
from mpsd.supervision.terminate import Terminator
from tests.unit.mpsd.supervision.bench import CALM, ONE, TWO, Bench, inventory, running, state_of
from tests.waiting import WAIT_S, until

GIB = 1 << 30
SHORT_S = 0.01
"""For an answer that never comes."""


class Node:
    def __init__(self, bench: Bench, root: Path) -> None:
        self.bench, self.backend = bench, bench.backend
        self.cgroup = f"{root}/cgroup/pod/c1"
        self.api = LimitsApi(bench.supervisor)

    def read(self, *queries: LimitQuery, timeout_s: float = WAIT_S) -> list[LimitReading]:
        return self.api.read(queries or (LimitQuery(ONE, self.cgroup),), timeout_s)

    def set(self, soft: int, hard: int | None, cgroup: str = "", timeout_s: float = WAIT_S) -> LimitReading:
        return self.api.set(LimitQuery(ONE, cgroup or self.cgroup), soft, hard, timeout_s)


@pytest.fixture
def node(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(ExitWatcher, "watch", lambda _self, _identity: None)  # fake daemons have no process
    bench = Bench(short_tmp, CALM)
    bench.backend.cgroup_root = f"{short_tmp}/cgroup"
    (short_tmp / "cgroup/pod/c1").mkdir(parents=True)
    with running(bench):
        bench.supervisor.inventory_changed(inventory(state_of(ONE), state_of(TWO)))
        bench.until(lambda snapshot: len(snapshot.gpus) == 2)
        yield Node(bench, short_tmp)
        for gate in bench.backend.gates.values():
            gate.set()


def test_limits_are_read_in_the_order_asked(node: Node) -> None:
    node.backend.limits[ONE, node.cgroup] = MemoryLimits(1, 2, 3)
    node.backend.limits[TWO, node.cgroup] = MemoryLimits(0, None, 4)
    outside = f"{node.cgroup}/../.."
    found = node.read(
        LimitQuery(TWO, node.cgroup), LimitQuery(ONE, outside), LimitQuery("GPU-9", node.cgroup),
        LimitQuery(ONE, node.cgroup),
    )  # fmt: skip
    assert found[0] == LimitReading(used_bytes=4)
    assert found[1].error.startswith(
        f"cannot read the memory limits of {outside} on GPU {ONE}: it must be a normalised"
    )
    assert found[2].error.endswith("mpsd does not know this GPU (yet)")
    assert found[3] == LimitReading(soft_bytes=1, hard_bytes=2, used_bytes=3)
    assert node.api.read((), 0.0) == []
    with pytest.raises(ConfigError, match="more than 512"):
        node.read(*[LimitQuery(ONE, node.cgroup)] * (MAX_QUERIES + 1))
    assert len(node.read(*[LimitQuery(ONE, node.cgroup)] * MAX_QUERIES)) == MAX_QUERIES


@pytest.mark.parametrize(
    ("error", "backend", "told"),
    [
        (NoLimitError("Not Found", 6), "dmem", True),
        (GpuNotSupportedError("Not Supported", 3), "dmem", False),
        (GpuNotSupportedError("Not Supported", 3), "misc", True),
        (GpuNotSupportedError("Function Not Found", 13), "misc", False),
        (GpuLostError("lost", 15), "misc", False),
    ],
)
def test_no_limit_is_told_from_no_answer(node: Node, error: GpufracError, backend: str, told: bool) -> None:
    node.bench.until(lambda snapshot: snapshot.hard_limits != HardLimits())  # the first probe is over
    node.bench.supervisor._hard_limits.found = HardLimits(backend=backend, missing=())
    node.bench.supervisor.config_refused(
        Reason(ConfigCode.REFUSED, "a mark")
    )  # wakes the loop, and gives no reason to probe again
    node.bench.until(lambda snapshot: snapshot.hard_limits.backend == backend)
    node.backend.fail["memory_limits"] = error
    (found,) = node.read()
    assert found == LimitReading() if told else found.error == str(error)


@pytest.mark.parametrize(("soft", "hard"), [(0, None), (0, 0), (GIB, GIB), (5, 7), (GIB, None)])
def test_what_was_set_reads_back(node: Node, soft: int, hard: int | None) -> None:
    assert node.set(soft, hard) == LimitReading(soft_bytes=soft, hard_bytes=hard)
    assert node.backend.limits == {(ONE, node.cgroup): MemoryLimits(soft, hard)}


def test_documented_rounding_is_no_difference_and_any_other_is(node: Node) -> None:
    node.backend.keep = lambda limits: MemoryLimits(limits.soft_bytes >> 20 << 20, (limits.hard_bytes or 0) >> 20 << 20)
    assert node.set(GIB + 1, GIB + 5).hard_bytes == GIB
    node.backend.keep = lambda limits: MemoryLimits(limits.soft_bytes, None)
    with pytest.raises(TransientError, match=f"read back as soft {GIB}, hard None"):
        node.set(GIB, GIB)
    node.backend.keep = lambda limits: MemoryLimits(0, limits.hard_bytes)
    with pytest.raises(TransientError, match=f"read back as soft 0, hard {GIB}"):
        node.set(GIB, GIB)


@pytest.mark.parametrize(("soft", "hard"), [(-1, None), (2, 1), (0, -1), (0, 1 << 63), (1 << 63, None)])
def test_limits_that_make_no_sense_are_refused(node: Node, soft: int, hard: int | None) -> None:
    with pytest.raises(ConfigError, match="soft must be from 0 to hard"):
        node.set(soft, hard)
    assert node.backend.limits == {}


def test_only_cgroups_get_limits(node: Node) -> None:
    with pytest.raises(ConfigError, match="there is no such cgroup"):
        node.set(0, None, f"{node.cgroup}/gone")
    assert node.backend.limits == {}


@pytest.mark.parametrize("call", ["set_memory_limits", "memory_limits"])
def test_a_refusal_of_the_driver_is_passed_on(node: Node, call: str) -> None:
    node.backend.fail[call] = GpuLostError("cannot reach it", 15)
    with pytest.raises(GpufracError, match="cannot reach it"):
        node.set(0, GIB)


def test_a_bug_of_a_call_is_an_answer(node: Node) -> None:
    node.backend.fail["memory_limits"] = ZeroDivisionError("bug")  # type: ignore[assignment]
    assert node.read()[0].error.endswith(": bug")
    with pytest.raises(TransientError, match="bug"):
        node.set(0, GIB)


def test_a_hanging_driver_spoils_no_other_gpu_and_sets_nothing_late(node: Node) -> None:
    node.backend.limits[TWO, node.cgroup] = MemoryLimits(0, 7)
    gate = node.backend.gates[ONE] = threading.Event()

    def other_is_told() -> bool:
        hung, fine = node.read(LimitQuery(ONE, node.cgroup), LimitQuery(TWO, node.cgroup), timeout_s=0.5)
        assert "has not answered in 0.5 s" in hung.error
        return fine.hard_bytes == 7

    until(other_is_told)
    for _ in range(3):
        assert node.read(timeout_s=SHORT_S)[0].error
    with pytest.raises(TransientError, match=r"has not answered in 0\.01 s; look again later"):
        node.set(0, GIB, timeout_s=SHORT_S)
    desk = node.bench.supervisor._node.gpus[ONE].limits
    assert len(desk._waiting) <= 1  # those that gave up went
    gate.set()
    assert node.read()[0] == LimitReading()
    assert (ONE, node.cgroup) not in node.backend.limits


def test_a_guarantee_is_noticed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(node.bench.supervisor, "soft_limit_seen", lambda: seen.append(True))
    node.set(0, GIB)
    node.read()
    assert seen == []
    node.set(1, GIB)
    node.read()
    assert len(seen) == 2


def unasked() -> CleanedUp:
    raise AssertionError


def test_the_methods_of_the_local_api(node: Node) -> None:
    supervisor = node.bench.supervisor
    table = methods(supervisor, Terminator(supervisor), node.api, unasked)
    query = {"gpu": ONE, "cgroup": node.cgroup}
    reading = table["set_limits"]({**query, "soft_bytes": 0, "hard_bytes": GIB})
    assert reading == LimitReading(hard_bytes=GIB)
    assert table["limits"]({"queries": [query]}) == [reading]
    for bad in ({}, {**query, "soft_bytes": 0}, {**query, "soft_bytes": 0, "hard_bytes": "max"}):
        with pytest.raises(ProtocolError):
            table["set_limits"](bad)
    with pytest.raises(ProtocolError):
        table["limits"]({"queries": [{"gpu": ONE}]})
