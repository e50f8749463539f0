"""What is told of GPUs and daemons: what differs from picture to picture, each once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.common.reason import Reason
from mpsd.events.file import read
from mpsd.events.model import Event
from mpsd.events.recorder import Recorder
from mpsd.gpu.model import ComputeMode, GpuHealth
from mpsd.gpu.reasons import NOT_PROBED
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuClient, GpuStatus, Snapshot
from mpsd.supervision.happenings import LATE_S, SETTLE_S, NodeNews, of_daemon
from tests.builders import info, uuid
from tests.heard import Heard

STATE = DaemonState


def daemon(state: DaemonState = STATE.READY, code: str = "", pid: int | None = 7, **more: object) -> DaemonStatus:
    reason = f"for {code}" if code else ""
    fields: dict[str, object] = {"name": uuid(0), "pid": pid, "reason": reason, "reason_code": code}
    return DaemonStatus(state=state, **(fields | more))  # type: ignore[arg-type]


def gpu(index: int = 0, of: DaemonStatus | None = None, **more: object) -> GpuStatus:
    fields: dict[str, object] = {"info": info(index), "group": uuid(index), "daemon": of, "health": GpuHealth.OK}
    return GpuStatus(**(fields | more))  # type: ignore[arg-type]


def lost(code: str = "GpuLost", health: GpuHealth = GpuHealth.LOST, of: DaemonStatus | None = None) -> GpuStatus:
    return gpu(of=of, health=health, reason=f"for {code}", reason_code=code)


class Node:
    """News of pictures, one after the other."""

    def __init__(self) -> None:
        self.heard = Heard()
        self.news = NodeNews(self.heard)
        self.now_s = 100.0

    def see(self, *gpus: GpuStatus, **more: object) -> list[tuple[str, str]]:
        """What is told of one more picture."""
        self.news.observe(Snapshot(instance="i", generation=0, gpus=gpus, **more), self.now_s, 1e9)  # type: ignore[arg-type]
        return self.heard.take()

    def pass_time(self, seconds: float) -> list[tuple[str, str]]:
        self.now_s += seconds
        self.news.tend(self.now_s)
        return self.heard.take()


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (daemon(), ("DaemonReady", 7)),
        (daemon(STATE.READY, "LimitNotProven"), ("DaemonReady", 7)),
        (daemon(STATE.STARTING, "Exited", None), None),
        (daemon(STATE.CONFIGURING), None),
        (daemon(STATE.CONFIGURING, "Exited"), None),
        (daemon(STATE.CONFIGURING, "ServerFault"), ("DaemonTroubled", 7)),
        (daemon(STATE.CONFIGURING, "NoAnswer"), ("DaemonTroubled", 7)),
        (daemon(STATE.CONFIGURING, "Wedged", wedged=True), ("DaemonWedged", 7)),
        (daemon(STATE.DRAINING, "WaitsForClients"), None),
        (daemon(STATE.BACKOFF, "Exited", None), ("DaemonCrashed", 0)),
        (daemon(STATE.BACKOFF, "StartFailed", None), ("DaemonFailed", 0)),
        (daemon(STATE.BACKOFF, "Replaced", None), None),
        (daemon(STATE.FAILED, "CannotBeKilled"), ("DaemonFailed", 7)),
        (daemon(STATE.STOPPING), None),
        (daemon(STATE.STOPPING, "OperatorAsked"), ("DaemonReplaced", 7)),
        (daemon(STATE.KILLING, "Replaced"), ("DaemonReplaced", 7)),
        (daemon(STATE.KILLING, "StartOverdue"), None),
        (daemon(STATE.ABSENT, pid=None), ("DaemonStopped", 0)),
        (None, ("DaemonStopped", 0)),
    ],
)
def test_what_a_daemon_s_state_tells(seen: DaemonStatus | None, told: tuple[str, int] | None) -> None:
    word = of_daemon(seen)
    assert (None if word is None else (str(word[0]), word[2])) == told


def test_a_crash_is_told_from_the_end_to_the_next_that_is_ready(node: Node) -> None:
    assert node.see(gpu(of=daemon()))[-1] == ("DaemonReady", "")
    assert node.see(gpu(of=daemon())) == []
    assert node.see(gpu(of=daemon(STATE.BACKOFF, "Exited", None))) == [("DaemonCrashed", "Exited")]
    assert node.see(gpu(of=daemon(STATE.STARTING, "Exited", None))) == []
    assert node.see(gpu(of=daemon(STATE.CONFIGURING, "Exited", 8))) == []
    assert node.see(gpu(of=daemon(pid=8))) == [("DaemonReady", "")]
    assert node.see(gpu(of=daemon(STATE.BACKOFF, "Exited", None))) == [("DaemonCrashed", "Exited")]


def test_a_wedge_is_told_once_however_its_words_change(node: Node) -> None:
    node.see(gpu(of=daemon()))
    assert node.see(gpu(of=daemon(STATE.CONFIGURING, "NoAnswer"))) == [("DaemonTroubled", "NoAnswer")]
    for words in ("a", "b"):
        wedged = daemon(STATE.CONFIGURING, "Wedged", wedged=True, reason=words)
        assert node.see(gpu(of=wedged)) == ([("DaemonWedged", "Wedged")] if words == "a" else [])
    assert node.see(gpu(of=daemon(STATE.STOPPING, "Replaced"))) == [("DaemonReplaced", "Replaced")]
    assert node.see(gpu(of=daemon(pid=9))) == [("DaemonReady", "")]


def test_a_daemon_of_several_gpus_is_told_once_and_when_it_is_no_more(node: Node) -> None:
    both = [gpu(index, daemon(name="pair"), group="pair") for index in (0, 1)]
    node.see(*both)
    ready = node.heard.settled[-1]
    assert ready == ("DaemonStopped", frozenset({"pair"}))
    assert node.see(gpu(0, daemon()), gpu(1)) == [
        ("DaemonStopped", ""),
        ("DaemonReady", ""),
        ("DaemonStopped", ""),
    ]


def test_health_is_told_with_its_reason_and_when_it_is_another(node: Node) -> None:
    assert node.see(gpu()) == [("GpuBack", ""), ("DaemonStopped", "")], "whoever is told knows that it is no news"
    assert node.see(lost(code="CriticalXid", health=GpuHealth.SICK)) == [("GpuSick", "CriticalXid")]
    assert node.see(lost(code="RecoveryAsked", health=GpuHealth.SICK)) == [("GpuSick", "RecoveryAsked")]
    assert node.see(lost()) == [("GpuLost", "GpuLost")]
    assert node.see(lost()) == []
    assert node.see(lost(code="DriverHangs", health=GpuHealth.UNRESPONSIVE)) == [("GpuSilent", "DriverHangs")]
    assert node.see(gpu()) == [("GpuBack", "")]
    assert node.see(gpu(reason="foreign processes use it", reason_code="ForeignProcesses")) == []


def test_a_compute_mode_that_others_change_is_told_each_time(node: Node) -> None:
    node.see(gpu())
    for changes, times in ((2, 2), (2, 0), (3, 1)):
        seen = gpu(mode_changes=changes, driver_compute_mode=ComputeMode.DEFAULT)
        node.news.observe(Snapshot(instance="i", generation=1, gpus=(seen,)), 0.0, 0.0)
        assert sum(word.times for word in node.heard.words) == times
        assert set(node.heard.take()) <= {("ComputeModeChanged", "ComputeModeContested")}


def test_what_is_wrong_is_told_by_its_code_until_it_is_over(node: Node) -> None:
    young = {"reason": NOT_PROBED.message, "reason_code": NOT_PROBED.code}
    assert node.see(**young) == []
    assert node.heard.settled == [], "it has not looked yet"
    lacks = {"warnings": ("a", "b", "c"), "warning_codes": ("HostFallsShort", "HostFallsShort", "ComputeModeContested")}
    assert node.see(reason="no driver", reason_code="DriverFailed", **lacks) == [
        ("TroubleBegun", "DriverFailed"),
        ("TroubleBegun", "HostFallsShort"),
    ]
    assert node.see(reason="no driver yet", reason_code="DriverFailed", **lacks) == []
    assert node.heard.settled == [("TroubleEnded", frozenset({"DriverFailed", "HostFallsShort"}))]
    assert node.see(**lacks) == []
    assert node.heard.settled[-1] == ("TroubleEnded", frozenset({"HostFallsShort"}))


# --- evictions -------------------------------------------------------------------------------------------------------


def client(pid: int, key: str = "", *, mps: bool = True) -> GpuClient:
    return GpuClient(pid=pid, allocation_key=key or None, command="python", used_bytes=3 << 30, pod_uid="u", mps=mps)


def evicting(count: int, *clients: GpuClient, of: DaemonStatus | None = None) -> GpuStatus:
    return gpu(of=of or daemon(), evictions=count, clients=clients)


A, B, C = client(1, "ka"), client(2, "kb"), client(3, "kc")


def totals(node: Node) -> list[tuple[str, int, int]]:
    return [(word.subject.key, word.total, word.pid) for word in node.heard.words]


def test_who_left_when_one_was_evicted_is_who_it_was(node: Node) -> None:
    node.see(evicting(0, A, B))
    assert node.see(evicting(1, A, B)) == []
    assert node.see(evicting(1, B)) == []
    assert node.news.deadline_s == node.now_s + SETTLE_S
    node.now_s += SETTLE_S
    node.news.tend(node.now_s)
    assert totals(node) == [("ka", 1, 7)]
    (word,) = node.heard.words
    assert word.reason is not None
    assert word.reason.message == (
        "MPS ended pid 1 (python, allocation ka), which held 3Gi, for a client within its request"
    )
    assert (word.unix_s, word.subject.pod_uid) == (1e9, "u")
    assert node.news.deadline_s is None


def test_a_client_that_was_seen_gone_before_the_log_was_read_counts(node: Node) -> None:
    node.see(evicting(0, A, B))
    node.see(evicting(0, B))
    node.now_s += LATE_S
    node.see(evicting(1, B))
    node.now_s += SETTLE_S
    node.news.tend(node.now_s)
    assert totals(node) == [("ka", 1, 7)]


def test_where_more_left_than_were_evicted_all_are_named_and_none_is_blamed(node: Node) -> None:
    node.see(evicting(0, A, B, C))
    node.see(evicting(1, C))
    assert node.pass_time(SETTLE_S) == [("Evicted", "EvictedNotKnown")]
    node.see(evicting(2))
    node.now_s += SETTLE_S
    node.news.tend(node.now_s)
    (word,) = node.heard.words
    assert word.reason is not None
    assert "pid 1" in word.reason.message, "they left lately, too"
    assert (word.subject.key, word.total) == ("", 2)


def test_several_at_once_are_told_one_by_one(node: Node) -> None:
    node.see(evicting(0, A, B, C))
    node.see(evicting(1, A, B, C))
    node.now_s += 1.0
    node.see(evicting(3, C))
    node.now_s += 1.0
    node.news.tend(node.now_s)
    assert totals(node) == [("", 1, 7), ("ka", 2, 7), ("kb", 3, 7)]


def test_one_of_whom_nobody_knows_is_told_as_that(node: Node) -> None:
    node.see(evicting(0, client(4, mps=False)))
    node.see(evicting(1))
    node.now_s += SETTLE_S
    node.news.tend(node.now_s)
    (word,) = node.heard.words
    assert word.reason == Reason("EvictedNotKnown", "its daemon's log counts it, and does not say which client it was")


def test_the_count_of_another_daemon_begins_anew(node: Node) -> None:
    node.see(evicting(5, A))
    node.see(evicting(1, A, of=daemon(pid=8)))
    node.now_s += SETTLE_S
    node.news.tend(node.now_s)
    assert [word for word in totals(node) if word[1]] == [("", 1, 8)]


def test_who_left_long_ago_was_not_evicted(node: Node) -> None:
    node.see(evicting(0, A, B))
    node.see(evicting(0, B))
    node.now_s += LATE_S + 1.0
    node.see(evicting(1, B))
    assert node.pass_time(SETTLE_S) == [("Evicted", "EvictedNotKnown")]


# --- over restarts ---------------------------------------------------------------------------------------------------


class Lives:
    """One mpsd after the other on the same files; none says that it ends."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recorders: list[Recorder] = []

    def begin(self) -> None:
        self.recorders.append(Recorder(str(self.root), "mpsd"))
        self.news, self.now_s = NodeNews(self.recorders[-1]), 0.0

    def see(self, *gpus: GpuStatus) -> None:
        self.now_s += SETTLE_S
        self.news.observe(Snapshot(instance="i", generation=0, gpus=gpus), self.now_s, 1e9)
        self.news.tend(self.now_s)
        self.recorders[-1].work()

    @property
    def told(self) -> list[tuple[str, int, int]]:
        lines = (line for line in read(str(self.root), "mpsd") if isinstance(line, Event))
        return [(line.kind, line.pid, line.count) for line in lines]


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    made = Lives(tmp_path)
    yield made
    for recorder in made.recorders:
        recorder.close()


def test_an_mpsd_that_was_killed_repeats_nothing_and_tells_what_it_missed(lives: Lives) -> None:
    lives.begin()
    lives.see(gpu(of=daemon()))
    lives.see(lost(of=daemon()), gpu(1, of=daemon(name=uuid(1))))
    lives.begin()
    lives.see(lost(of=daemon()), gpu(1, of=daemon(name=uuid(1))))
    lives.begin()
    lives.see(gpu(of=daemon(pid=8)), gpu(1, of=daemon(name=uuid(1), pid=9)))
    assert lives.told == [
        ("DaemonReady", 7, 1),
        ("GpuLost", 0, 1),
        ("DaemonReady", 7, 1),
        ("GpuBack", 0, 1),
        ("DaemonCrashed", 7, 1),
        ("DaemonReady", 8, 1),
        ("DaemonCrashed", 7, 1),
        ("DaemonReady", 9, 1),
    ]


def test_evictions_that_nobody_saw_are_counted_by_the_next_mpsd(lives: Lives) -> None:
    lives.begin()
    lives.see(evicting(0, A))
    lives.see(evicting(2, A))
    lives.see(evicting(2, A))
    lives.begin()
    lives.see(evicting(0, A))  # it has not read the log that far
    lives.see(evicting(5, A))
    lives.see(evicting(5, A))
    assert [told for told in lives.told if told[0] == "Evicted"] == [("Evicted", 7, 2), ("Evicted", 7, 3)]
