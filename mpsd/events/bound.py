"""How many events may be told one by one (pure): what repeats faster is told together, and counted all the same.

Who runs pods can cause events as fast as they like, and the files are small. Of one kind about one thing a few may come
at once and then one a minute; of one kind at all some hundred and then one in ten seconds, so that ten kinds fill a
file in hours, not in minutes.
"""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import structs

from mpsd.common.pacing import Bucket
from mpsd.events.model import Event, Subject

BURST, EVERY_S = 5, 60.0
KIND_BURST, KIND_EVERY_S = 300, 10.0
MOST = 2000
"""Things that are kept apart; of more the oldest are forgotten."""

_Key = tuple[str, ...]


class RateBound:
    """Of one process. Times are monotonic."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[_Key, Bucket] = OrderedDict()
        self._waiting: dict[_Key, Event] = {}
        """What is to be told together: the last one, with the count of all."""

    def admit(self, event: Event, now_s: float) -> Event | None:
        """What is to be told now of one more event: it, with all that wait like it; None where it waits, too."""
        thing, kind = _thing(event), (event.kind,)
        if self._wait_s(kind, now_s):
            self._wait(kind, _anonymous(event))
            return None
        if self._wait_s(thing, now_s):
            self._wait(thing, event)
            return None
        self._take(kind, thing, now_s)
        waiting = self._waiting.pop(thing, None)
        return event if waiting is None else structs.replace(event, count=event.count + waiting.count)

    def due(self, now_s: float) -> Iterator[Event]:
        """What has waited long enough: each stands for several."""
        for key, event in list(self._waiting.items()):
            kind = (event.kind,)
            if self._wait_s(key, now_s) or self._wait_s(kind, now_s):
                continue
            self._take(kind, key, now_s)
            yield self._waiting.pop(key)

    def rest(self) -> list[Event]:
        """All that waits: nothing comes after it."""
        waiting, self._waiting = list(self._waiting.values()), {}
        return waiting

    def wait_s(self, now_s: float) -> float | None:
        """How long until something is due; None where nothing waits."""
        if not self._waiting:
            return None
        return min(
            max(self._wait_s(key, now_s), self._wait_s((event.kind,), now_s)) for key, event in self._waiting.items()
        )

    def _wait(self, key: _Key, event: Event) -> None:
        if key not in self._waiting and len(self._waiting) >= MOST:
            key, event = (event.kind,), _anonymous(event)
        before = self._waiting.get(key)
        self._waiting[key] = event if before is None else structs.replace(event, count=event.count + before.count)

    def _take(self, kind: _Key, thing: _Key, now_s: float) -> None:
        self._bucket(kind, now_s).take(now_s)
        if thing != kind:
            self._bucket(thing, now_s).take(now_s)

    def _wait_s(self, key: _Key, now_s: float) -> float:
        bucket = self._buckets.get(key)
        return 0.0 if bucket is None else bucket.wait_s(now_s)

    def _bucket(self, key: _Key, now_s: float) -> Bucket:
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            while len(self._buckets) >= MOST:
                self._buckets.popitem(last=False)
            burst, every_s = (KIND_BURST, KIND_EVERY_S) if len(key) == 1 else (BURST, EVERY_S)
            bucket = Bucket(burst, every_s, now_s)
        self._buckets[key] = bucket
        return bucket


def _anonymous(event: Event) -> Event:
    """One of its kind, about nobody."""
    return structs.replace(event, **_NOTHING)


_NOTHING = {**structs.asdict(Subject()), "reason": "", "reason_code": "", "detail": "", "pid": 0, "total": 0}


def _thing(event: Event) -> _Key:
    """What counts as the same: the kind, the reason's code, the detail, and what it is about."""
    about = event.key or event.pod_uid or event.resource
    return event.kind, event.reason_code, event.detail, about, event.container, event.daemon, *event.gpus
