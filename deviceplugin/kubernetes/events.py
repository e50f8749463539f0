"""Events on pods and on our node: what users read in `kubectl describe`.

Whoever records one never waits: a bounded queue, one thread that sends. What repeats is counted in the event that is
there already. Texts come from annotations, which anybody may write.
"""

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from random import random
from typing import Any

import msgspec

from deviceplugin.kubernetes.client import ApiClient, api_path
from deviceplugin.kubernetes.errors import (
    AccessError,
    ApiError,
    BusyError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    ServerError,
    UnauthorizedError,
    UnreachableError,
    shown,
)
from deviceplugin.kubernetes.model import EventType
from deviceplugin.kubernetes.node import timestamp
from mpsd.common.log import get_logger
from mpsd.common.pacing import Backoff, Bucket
from mpsd.common.threads import GuardedThread

COMPONENT = "gpufrac"
NODE_NAMESPACE = "default"
"""Where events of nodes live (legacyValidateEvent in pkg/apis/core/validation/events.go)."""

MAX_QUEUED = 256
MAX_QUEUED_PER_OBJECT = 16
MAX_REMEMBERED = 512
MAX_REFUSALS = 3
"""In a row after which missing rights count as missing: a server that has just started doesn't know them yet."""
MAX_MESSAGE = 1024
BURST, EVERY_S = 5, 10.0
"""Of one object."""
OVERALL_BURST, OVERALL_EVERY_S = 5, 0.2
RETRY_FIRST_S, RETRY_LAST_S = 1.0, 60.0
CLOSE_S = 0.5

_LABEL = re.compile(r"(?=.{1,63}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,127}")
_MAX_NAME_PART = 200
_LEAVING = "because it is being terminated"
"""In the 403 for new content in a namespace that goes away (plugin/pkg/admission/namespace/lifecycle)."""
_TRANSIENT = (AccessError, BusyError, ServerError, UnauthorizedError, UnreachableError)

log = get_logger("kubernetes")


class EventKey(msgspec.Struct, frozen=True):
    """What makes two events the same. `namespace` is empty for a node."""

    namespace: str
    name: str
    uid: str
    kind: EventType
    reason: str
    message: str

    @property
    def subject(self) -> tuple[str, str, str]:
        """Namespace, name and UID of what it is about."""
        return self.namespace, self.name, self.uid

    @property
    def event_namespace(self) -> str:
        """Where the event itself is kept: that of its pod, `default` for a node."""
        return self.namespace or NODE_NAMESPACE

    @property
    def event_name(self) -> str:
        """The same for the same event, also after our restart."""
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
        return f"{self.name[:_MAX_NAME_PART].rstrip('-.')}.{digest}"


class Pending(msgspec.Struct, frozen=True):
    """To be sent: how often it happened since it was sent last, and when (seconds since 1970)."""

    key: EventKey
    count: int
    first_at: float
    last_at: float


class EventQueue:
    """What waits to be sent, and when it may be (no I/O; monotonic seconds from the caller)."""

    def __init__(self, now_s: float) -> None:
        self._pending: OrderedDict[EventKey, Pending] = OrderedDict()
        self._overall = Bucket(OVERALL_BURST, OVERALL_EVERY_S, now_s)
        self._buckets: OrderedDict[tuple[str, str, str], Bucket] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, key: EventKey, at: float) -> None:
        """It happened once more. The oldest goes where there are too many, of the same object first."""
        self._put(Pending(key, 1, at, at))

    def put_back(self, pending: Pending) -> None:
        """It could not be sent now: the next one again."""
        self._put(pending)
        if pending.key in self._pending:
            self._pending.move_to_end(pending.key, last=False)

    def take(self, now_s: float) -> Pending | None:
        """The next one that may be sent."""
        if not self._pending or self._overall.wait_s(now_s):
            return None
        for key, pending in self._pending.items():
            if self._bucket(key, now_s).take(now_s):
                self._overall.take(now_s)
                del self._pending[key]
                return pending
        return None

    def wait_s(self, now_s: float) -> float | None:
        """How long until one may be sent; None while nothing waits."""
        if not self._pending:
            return None
        subjects = {key.subject: key for key in self._pending}
        soonest_s = min(self._bucket(key, now_s).wait_s(now_s) for key in subjects.values())
        return max(soonest_s, self._overall.wait_s(now_s))

    def _put(self, pending: Pending) -> None:
        key = pending.key
        if before := self._pending.get(key):
            self._pending[key] = Pending(
                key,
                before.count + pending.count,
                min(before.first_at, pending.first_at),
                max(before.last_at, pending.last_at),
            )
            return
        same = [other for other in self._pending if other.subject == key.subject]
        if len(same) >= MAX_QUEUED_PER_OBJECT:
            self._drop(same[0])
        elif len(self._pending) >= MAX_QUEUED:
            self._drop(next(iter(self._pending)))
        self._pending[key] = pending

    def _drop(self, key: EventKey) -> None:
        self.dropped += self._pending.pop(key).count

    def _bucket(self, key: EventKey, now_s: float) -> Bucket:
        bucket = self._buckets.get(key.subject)
        if bucket is None:
            bucket = self._buckets[key.subject] = Bucket(BURST, EVERY_S, now_s)
            if len(self._buckets) > MAX_REMEMBERED:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key.subject)
        return bucket


def cleaned(message: str) -> str:
    """One line of printable characters, cut: texts may hold anything, direction marks and lone surrogates too."""
    return shown(message, MAX_MESSAGE)


def event_body(pending: Pending, node: str) -> dict[str, Any]:
    """The core/v1 Event (pure)."""
    key = pending.key
    involved = {"apiVersion": "v1", "kind": "Pod" if key.namespace else "Node", "name": key.name, "uid": key.uid}
    if key.namespace:
        involved["namespace"] = key.namespace
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": key.event_namespace, "name": key.event_name},
        "involvedObject": involved,
        "type": key.kind,
        "reason": key.reason,
        "message": key.message,
        "count": pending.count,
        "firstTimestamp": timestamp(pending.first_at),
        "lastTimestamp": timestamp(pending.last_at),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    }


class _Event(msgspec.Struct, frozen=True):
    count: int | None = None


class EventRecorder:
    """Sends events until closed.

    Args:
        client: for this recorder alone.
        node_name: gives the name of our node; raises AccessError.
    """

    def __init__(
        self,
        client: ApiClient,
        node_name: Callable[[], str],
        *,
        clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random,
    ) -> None:
        self._client, self._node_name, self._clock = client, node_name, clock
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_LAST_S, jitter)
        self.sent = 0
        self.error = ""
        self._refused = 0
        self._refusals = 0  # for want of rights, in a row
        self._news = threading.Condition()
        self._queue = EventQueue(time.monotonic())
        self._counts: OrderedDict[EventKey, int] = OrderedDict()  # of events that the server has
        self._stop = threading.Event()
        self._thread = GuardedThread(self._run, "kubernetes-events")

    @property
    def dropped(self) -> int:
        """Events that nobody will read: too many of them, or refused."""
        return self._queue.dropped + self._refused

    def pod(self, namespace: str, name: str, uid: str, kind: EventType, reason: str, message: str) -> None:
        """Something happened to a pod. Never blocks, never fails; what can't be an event is counted as dropped."""
        if _LABEL.fullmatch(namespace) and _NAME.fullmatch(name):
            self._add(EventKey(namespace, name, cleaned(uid)[:128], kind, reason, cleaned(message)))
        else:
            self._refuse(1, f"cannot name a pod {shown(namespace)!r}/{shown(name)!r} in an event")

    def node(self, kind: EventType, reason: str, message: str) -> None:
        """Something happened to our node."""
        try:
            name = self._node_name()
        except AccessError as error:
            self._refuse(1, str(error))
            return
        # kubectl describe looks for a node's events by its name as UID, as the kubelet writes them.
        self._add(EventKey("", name, name, kind, reason, cleaned(message)))

    def start(self) -> None:
        self._thread.start()

    def begin_close(self) -> None:
        """Starts to close without waiting."""
        self._stop.set()
        with self._news:
            self._news.notify()
        self._client.close()

    def close(self) -> None:
        """Ends; what waits is dropped."""
        self.begin_close()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _add(self, key: EventKey) -> None:
        if not _REASON.fullmatch(key.reason):
            key = msgspec.structs.replace(key, reason="Unspecified")
        at = self._clock()
        with self._news:
            self._queue.add(key, at)
            self._news.notify()

    def _run(self) -> None:
        while (pending := self._next()) is not None:
            try:
                self._send(pending)
            except ApiError as error:
                if isinstance(error, _TRANSIENT) or self._too_early(error):
                    with self._news:
                        self._queue.put_back(pending)
                    self._note(str(error))
                    self._stop.wait(self._backoff.pause_s(error.retry_after_s, error.failure))
                    continue
                # Where an object's namespace goes away, nothing is wrong with us.
                leaving = isinstance(error, NotFoundError) or _LEAVING in str(error)
                self._refuse(pending.count, "" if leaving else str(error))
            except Exception as error:
                log.exception("sending an event failed")
                self._refuse(pending.count, f"{type(error).__name__}: {error}")
            else:
                self._backoff.reset()
                self._refusals = 0
                self.sent += 1
                self.error = ""

    def _too_early(self, error: ApiError) -> bool:
        """Whether a refusal may be that of a server that has just started."""
        if not isinstance(error, ForbiddenError) or not error.lacks_right:
            return False  # such as for a quota of the namespace
        self._refusals += 1
        return self._refusals <= MAX_REFUSALS

    def _next(self) -> Pending | None:
        """The next one, once it may be sent; None when closing."""
        with self._news:
            while not self._stop.is_set():
                now_s = time.monotonic()
                if pending := self._queue.take(now_s):
                    return pending
                self._news.wait(self._queue.wait_s(now_s))
            return None

    def _refuse(self, count: int, error: str) -> None:
        with self._news:
            self._refused += count
        self._note(error)

    def _note(self, error: str) -> None:
        if error and error not in (self.error, self._client.health.error) and not self._stop.is_set():
            log.warning("an event can't be sent", error=error)
        self.error = error

    def _send(self, pending: Pending) -> None:
        count = self._counts.get(pending.key)
        if count is not None and self._patch(pending, count + pending.count):
            return
        path = api_path("api", "v1", "namespaces", pending.key.event_namespace, "events")
        try:
            self._client.post(path, event_body(pending, self._node_name()), _Event)
        except ConflictError:
            # Ours from before a restart: how often it was counted then is in the answer to a change of its time.
            before = self._patch(pending, None)
            if before:
                self._patch(pending, before + pending.count)
            return
        self._remember(pending.key, pending.count)

    def _patch(self, pending: Pending, count: int | None) -> int:
        """Brings the event up to date; its count then, 0 where it is gone."""
        key = pending.key
        path = api_path("api", "v1", "namespaces", key.event_namespace, "events", key.event_name)
        body: dict[str, Any] = {"lastTimestamp": timestamp(pending.last_at)}
        if count is not None:
            body["count"] = count
        try:
            found = self._client.patch(path, body, _Event)
        except NotFoundError:
            self._counts.pop(key, None)
            return 0
        now = count or found.count or 1
        self._remember(key, now)
        return now

    def _remember(self, key: EventKey, count: int) -> None:
        self._counts[key] = count
        self._counts.move_to_end(key)
        if len(self._counts) > MAX_REMEMBERED:
            self._counts.popitem(last=False)
