"""Is an annotated pod still there: by what is told of sandboxes, their processes and the kubelet's directories."""

import os

from deviceplugin.annotated.sandboxes import Sandboxes, holder, is_alive
from deviceplugin.grants.holders.pods import GONE_S, PodHolders
from deviceplugin.nri.model import Container, Pod
from mpsd.common.processes import start_time


def heard() -> PodHolders:
    holders = PodHolders()
    holders.synchronized({"a", "b"}, {"a", "b"}, 0)
    return holders


def test_a_stopped_pod_is_released_after_its_grace_or_when_somebody_needs_it() -> None:
    holders = heard()
    holders.stopped("a", 10)
    assert set(holders.gone()) == {"a"}
    assert holders.releasable(10 + GONE_S - 1) == set()
    assert holders.releasable(10, pressed=True) == {"a"}
    assert holders.releasable(10 + GONE_S) == {"a"}
    holders.runs("a")
    assert holders.releasable(10 + GONE_S) == set()


def test_silence_releases_nobody() -> None:
    holders = heard()
    holders.stopped("a", 10)
    holders.unheard()
    assert holders.releasable(1000, pressed=True) == set()
    holders.synchronized({"a", "b"}, {"b"}, 1000)
    assert holders.releasable(1000) == {"a"}, "gone since before"
    holders.synchronized({"a", "b"}, {"a"}, 1001)
    assert holders.releasable(1001, pressed=True) == {"b"}


def test_a_directory_that_was_there_and_is_removed_counts_whatever_the_runtime_says() -> None:
    holders = heard()
    holders.directories((), {"a", "b"}, 0)
    assert holders.gone() == set(), "pods of a runtime without a kubelet"
    holders.directories({"a"}, {"b"}, 1)
    holders.directories((), {"a", "b"}, 2)
    assert set(holders.gone()) == {"a"}
    assert holders.releasable(2) == {"a"}, "nothing is made anew of it"
    holders.keep({"b"})
    assert holders.gone() == set()


def test_without_a_runtime_a_missing_directory_is_enough() -> None:
    holders = PodHolders()
    holders.directories({"b"}, {"a"}, 0)
    assert holders.releasable(GONE_S) == {"a"}


def pod(name: str, uid: str = "u", pid: int = 5) -> Pod:
    return Pod(id=name, name=name, uid=uid, namespace="ns", pid=pid)


def test_of_several_sandboxes_the_last_one_counts() -> None:
    sandboxes = Sandboxes()
    sandboxes.run(pod("1"))
    sandboxes.run(pod("2"))
    assert sandboxes.stop("1", "u") == ""
    assert sandboxes.stop("1", "u") == ""
    assert sandboxes.stop("2", "u") == "u"
    assert sandboxes.stop("of a time before us", "v") == "v"


def test_stopped_sandboxes_that_a_runtime_shows_are_none() -> None:
    sandboxes = Sandboxes()
    container = Container(id="c", pod_id="without", name="c")
    alive = sandboxes.synchronize([pod("with"), pod("without", "v", 0), pod("stopped", "w", 0)], [container])
    assert set(alive) == {"with", "without"}


def test_a_sandbox_whose_process_ended_has_vanished_unless_something_of_its_pod_runs() -> None:
    alive = {(5, 1), (6, 1)}
    sandboxes = Sandboxes(lambda pod: (pod.pid, 1) if pod.pid != 7 else None, lambda process: process in alive)
    sandboxes.synchronize([pod("a", "a", 5), pod("b", "b", 6), pod("c", "c", 7)], [])

    def running() -> set[str]:
        return {"b"}

    assert sandboxes.vanished(running) == []
    alive.clear()
    assert [one.uid for one in sandboxes.vanished(running)] == ["a"], "c was never known by a process"


def test_only_a_process_of_the_pod_is_watched() -> None:
    """Without the host's PID namespace the number is somebody else's."""
    assert holder(pod("a", pid=os.getpid())) is None
    assert holder(pod("a", pid=0)) is None
    started = start_time(os.getpid())
    assert started is not None
    assert is_alive((os.getpid(), started))
    assert not is_alive((os.getpid(), started + 1))
