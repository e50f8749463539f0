"""The mark that something changed."""

import threading

from deviceplugin.grants.changes import Changes
from tests.waiting import WAIT_S


def test_it_is_marked_at_the_start_and_cleared_by_who_waited() -> None:
    changes = Changes(threading.Lock())
    assert changes.wait(0)
    assert not changes.wait(0)


def test_a_change_wakes_who_waits_and_counts() -> None:
    lock = threading.Lock()
    changes = Changes(lock)
    changes.wait(0)
    before, woken = changes.version, []
    waiter = threading.Thread(target=lambda: woken.append(changes.wait(WAIT_S)))
    waiter.start()
    with lock:
        changes.mark()
    waiter.join(WAIT_S)
    assert woken == [True]
    assert changes.version == before + 1


def test_grants_alone_are_told_after_a_rest_once() -> None:
    lock = threading.Lock()
    changes = Changes(lock)
    changes.wait(0)
    with lock:
        for _ in range(3):
            changes.mark(urgent=False)
    assert changes.wait(WAIT_S)
    assert not changes.wait(0)
