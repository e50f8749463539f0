"""The last published snapshot, and waiting for the next one."""

import threading
import time

import msgspec

from mpsd.localapi.snapshot import Snapshot


class Published:
    """One writer, any number of readers; a reader's cursor is (instance, generation)."""

    def __init__(self, first: Snapshot) -> None:
        self._condition = threading.Condition()
        self._snapshot = first
        self._closed = False

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def put(self, snapshot: Snapshot) -> bool:
        """Publishes with the next generation when anything but the generation differs; True when it did."""
        now = msgspec.structs.replace(snapshot, generation=self._snapshot.generation)
        if now == self._snapshot:
            return False
        with self._condition:
            self._snapshot = msgspec.structs.replace(now, generation=now.generation + 1)
            self._condition.notify_all()
        return True

    def wait(self, instance: str, generation: int, timeout_s: float) -> Snapshot:
        """The first snapshot that is not the one of this cursor; the same again when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            while (self._snapshot.instance, self._snapshot.generation) == (instance, generation) and not self._closed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._condition.wait(left_s):
                    break
            return self._snapshot

    def close(self) -> None:
        """Ends every wait."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
