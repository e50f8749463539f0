"""The pods of this node, as the API server has them: what of each matters here, and when one begins to be deleted.

A pod's processes get their signal from the kubelet moments after its deletion was asked for. Whoever has to end their
GPU use before that learns of it here.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from random import random

import msgspec

from deviceplugin.kubernetes.client import ApiClient, Watch, api_path
from deviceplugin.kubernetes.errors import ApiError, ForbiddenError, GoneError, NonsenseError
from deviceplugin.kubernetes.model import PodRef
from mpsd.common.log import get_logger
from mpsd.common.pacing import Backoff, Failure
from mpsd.common.threads import GuardedThread

DEFAULT_GRACE_S = 30.0
MAX_PODS = 2000
"""A kubelet takes 110 unless told otherwise."""
MAX_TOLD = 4000
MAX_CALLS = 1000
RETRY_FIRST_S, RETRY_LAST_S = 0.5, 60.0
WATCH_AGAIN_S = 1.0
"""Between the beginnings of two watches, should the server end each at once."""
WATCH_GOOD_S = 10.0
"""A watch that lasted so long owes no pause for those before it."""
CLOSE_S = 0.5

_LOST_VERSIONS = "Too large resource version"
"""What a server says that is behind what we know (staging/src/k8s.io/apiserver/pkg/storage/errors.go): for a moment, or
for good where its store was put back to an earlier state."""

log = get_logger("kubernetes")


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    restart_policy: str = "Always"


class ApiPod(msgspec.Struct, frozen=True):
    """A pod as the API server shows it; everything else in it is skipped while it is read."""

    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()


class Deleting(msgspec.Struct, frozen=True):
    """A pod that begins to be deleted, or is gone already (`grace_s` 0)."""

    pod: PodRef
    grace_s: float


class _Kept(msgspec.Struct, frozen=True):
    ref: PodRef
    restart_policy: str


class PodTable:
    """The pods there are. One thread changes it, any may read (no I/O in here)."""

    def __init__(self, limit: int = MAX_PODS) -> None:
        self._limit = limit
        self._pods: dict[str, _Kept] = {}
        self._told: OrderedDict[str, None] = OrderedDict()
        self.ignored = 0
        """Pods beyond the limit."""

    def __len__(self) -> int:
        return len(self._pods)

    def get(self, uid: str) -> _Kept | None:
        """What is kept of a pod by its UID."""
        return self._pods.get(uid)

    def show(self, pod: ApiPod) -> Deleting | None:
        """A pod is there, or has changed."""
        uid = pod.metadata.uid
        if uid not in self._pods and len(self._pods) >= self._limit:
            self.ignored += 1
        else:
            self._pods[uid] = _kept(pod)
        if pod.metadata.deletion_timestamp is None:
            return None
        seconds = pod.metadata.deletion_grace_period_seconds
        return self._tell(_ref(pod), DEFAULT_GRACE_S if seconds is None else float(max(seconds, 0)))

    def gone(self, pod: ApiPod) -> Deleting | None:
        """A pod is no more. One that was deleted without grace is first heard of now."""
        self._pods.pop(pod.metadata.uid, None)
        return self._tell(_ref(pod), 0.0)

    def replace(self, pods: Iterable[ApiPod]) -> list[Deleting]:
        """These are all there are."""
        before, self._pods = self._pods, {}
        found = [self.show(pod) for pod in pods]
        found += [self._tell(kept.ref, 0.0) for uid, kept in before.items() if uid not in self._pods]
        return [deleting for deleting in found if deleting is not None]

    def _tell(self, pod: PodRef, grace_s: float) -> Deleting | None:
        """Once per pod. A server that lags behind another may show one anew."""
        if pod.uid in self._told:
            return None
        self._told[pod.uid] = None
        if len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)
        return Deleting(pod, grace_s)


def _ref(pod: ApiPod) -> PodRef:
    return PodRef(pod.metadata.namespace, pod.metadata.name, pod.metadata.uid)


def _kept(pod: ApiPod) -> _Kept:
    return _Kept(_ref(pod), pod.spec.restart_policy)


class PodWatch:
    """Follows the pods of our node until closed. `error` is empty while all is well.

    Args:
        client: for this watch alone.
        node_name: gives the name of our node; raises AccessError.
        on_deleting: called once per pod, in order, from a thread of its own.
    """

    def __init__(
        self,
        client: ApiClient,
        node_name: Callable[[], str],
        on_deleting: Callable[[PodRef, float], None],
        *,
        jitter: Callable[[], float] = random,
    ) -> None:
        self._client, self._node_name = client, node_name
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_LAST_S, jitter)
        self._calls = _Calls(on_deleting)
        self._table = PodTable()
        self.error = ""
        self.synced = False
        """Whether the pods were listed once."""
        self._version = ""  # up to which everything is known
        self._listed_s = float("-inf")
        self._consistent = False  # whether the next list must come from the store, not a cache
        self._stop = threading.Event()
        self._thread = GuardedThread(self._run, "kubernetes-pods")

    def __len__(self) -> int:
        return len(self._table)

    def restart_policy(self, uid: str) -> str | None:
        """Of a pod by its UID; None where it is not known (yet)."""
        kept = self._table.get(uid)
        return None if kept is None else kept.restart_policy

    def start(self) -> None:
        self._calls.start()
        self._thread.start()

    def begin_close(self) -> None:
        """Starts to close without waiting."""
        self._stop.set()
        self._calls.begin_close()
        self._client.close()

    def close(self) -> None:
        """Ends, without waiting long for a call that hangs."""
        self.begin_close()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        self._calls.close()

    def _run(self) -> None:
        listed = False
        while not self._stop.is_set():
            begun_s = time.monotonic()
            pause_s = 0.0
            try:
                if not listed:
                    self._list()
                listed = False  # unless the watch ends well
                self._follow()
                listed = True
            except GoneError:
                # Only a server that finds its own list too old is left in peace.
                just_listed = time.monotonic() < self._listed_s + WATCH_GOOD_S
                pause_s = self._backoff.pause_s() if just_listed else 0.0
            except ApiError as error:
                # Never on with the watch: a server whose store was put back takes any version, and then says nothing
                # until it gets there again. A list no older than that version tells.
                self._consistent = _LOST_VERSIONS in str(error)
                pause_s = self._failed(error, str(error))
            except Exception as error:
                log.exception("watching this node's pods failed and begins again")
                pause_s = self._failed(None, f"{type(error).__name__}: {error}")
            self._stop.wait(max(pause_s, begun_s + WATCH_AGAIN_S - time.monotonic()))

    def _failed(self, error: ApiError | None, text: str) -> float:
        if isinstance(error, ForbiddenError) and error.lacks_right:
            text = f"{text}; grant it as deploy/rbac.yaml does"
        if text not in (self.error, self._client.health.error) and not self._stop.is_set():
            log.warning("this node's pods can't be watched", error=text)
        self.error = text
        after_s = None if error is None else error.retry_after_s
        return self._backoff.pause_s(after_s, Failure.REFUSED if error is None else error.failure)

    def _query(self) -> dict[str, str]:
        return {"fieldSelector": f"spec.nodeName={self._node_name()}"}

    def _list(self) -> None:
        # From the server's cache, which knows pods by node; a list from the store goes through those of the cluster.
        # Never from a cache older than what we know, as another server's may be: pods would seem to be gone.
        query = self._query()
        self._listed_s = time.monotonic()
        if not self._consistent:
            query |= {"resourceVersion": self._version or "0", "resourceVersionMatch": "NotOlderThan"}
        pods, self._version = self._client.list(api_path("api", "v1", "pods"), query, ApiPod)
        self._calls.add(self._table.replace(pods))
        self._consistent = False
        if not self.synced:
            log.info("the pods of this node are known", pods=len(self._table))
        self.synced = True
        self.error = ""

    def _follow(self) -> None:
        watch = self._client.watch(api_path("api", "v1", "pods"), self._query(), self._version)
        begun_s = time.monotonic()
        self.error = ""
        try:
            self._take(watch)
        finally:
            watch.release()
            if time.monotonic() - begun_s > WATCH_GOOD_S:
                self._backoff.reset()

    def _take(self, watch: Watch) -> None:
        decoder = msgspec.json.Decoder(ApiPod)
        for event in watch:
            try:
                pod = decoder.decode(event.object)
            except msgspec.MsgspecError as error:
                raise NonsenseError(f"cannot understand a pod: {error}") from error
            deleting = None
            if event.type == "DELETED":
                deleting = self._table.gone(pod)
            elif event.type in ("ADDED", "MODIFIED"):
                deleting = self._table.show(pod)
            if deleting is not None:
                self._calls.add((deleting,))
            self._version = pod.metadata.resource_version or self._version
            self._backoff.reset()
            if self._stop.is_set():
                return


class _Calls:
    """Calls `on_deleting` for one pod after the other, so that a slow one delays no news."""

    def __init__(self, on_deleting: Callable[[PodRef, float], None]) -> None:
        self._on_deleting = on_deleting
        self._news = threading.Condition()
        self._waiting: deque[Deleting] = deque()
        self._closing = False
        self._thread = GuardedThread(self._run, "kubernetes-deleting")

    def start(self) -> None:
        self._thread.start()

    def add(self, deleting: Iterable[Deleting]) -> None:
        with self._news:
            self._waiting.extend(deleting)
            lost = len(self._waiting) - MAX_CALLS
            for _ in range(lost):
                self._waiting.popleft()
            self._news.notify()
        if lost > 0:
            log.warning("deletions of pods come faster than they are taken; the oldest are left out", lost=lost)

    def begin_close(self) -> None:
        with self._news:
            self._closing = True
            self._news.notify()

    def close(self) -> None:
        self.begin_close()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (deleting := self._next()) is not None:
            try:
                self._on_deleting(deleting.pod, deleting.grace_s)
            except Exception:
                log.exception("what follows from a pod's deletion failed", pod=deleting.pod.uid)

    def _next(self) -> Deleting | None:
        with self._news:
            while not self._waiting and not self._closing:
                self._news.wait()
            return None if self._closing else self._waiting.popleft()
