import threading

from mpsd.localapi.snapshot import Snapshot
from mpsd.supervision.published import Published
from tests.waiting import WAIT_S


def snapshot(reason: str = "") -> Snapshot:
    return Snapshot(instance="i", generation=0, reason=reason)


def test_only_a_change_is_published() -> None:
    published = Published(snapshot())
    assert not published.put(snapshot())
    assert published.put(snapshot("new"))
    assert (published.snapshot.generation, published.snapshot.reason) == (1, "new")
    assert not published.put(snapshot("new"))


def test_a_reader_waits_for_what_it_does_not_know() -> None:
    published = Published(snapshot())
    assert published.wait("", 0, WAIT_S).generation == 0
    assert published.wait("i", 7, WAIT_S).generation == 0
    assert published.wait("i", 0, 0.0).generation == 0
    found: list[Snapshot] = []
    reader = threading.Thread(target=lambda: found.append(published.wait("i", 0, WAIT_S)))
    reader.start()
    published.put(snapshot("new"))
    reader.join(WAIT_S)
    assert [s.generation for s in found] == [1]


def test_close_ends_every_wait() -> None:
    published = Published(snapshot())
    reader = threading.Thread(target=lambda: published.wait("i", 0, 60.0))
    reader.start()
    published.close()
    reader.join(WAIT_S)
    assert not reader.is_alive()
