"""The node's word to schedulers: a condition that says whether fractions are enforced here, and the driver's version.

KAI places fractional pods only where the condition is True. It is written when it changes, and every HEARTBEAT_S, which
also brings it back where somebody removed it. When we end it becomes Unknown: containers would start without us.
"""

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from random import random
from typing import Any

import msgspec

from deviceplugin.kubernetes.client import ApiClient, api_path
from deviceplugin.kubernetes.errors import (
    AbortedError,
    ApiError,
    ForbiddenError,
    NotFoundError,
    shown,
)
from deviceplugin.kubernetes.model import NodeReadiness
from mpsd.common.log import get_logger
from mpsd.common.pacing import Backoff, Bucket, Failure
from mpsd.common.threads import GuardedThread

CONDITION = "gpu-fractioning.nvidia.com/Ready"
DRIVER_LABEL = "gpu-fractioning.kai.scheduler/nvidia-driver-version.major"
STOPPED = NodeReadiness("Unknown", "AgentStopped", "gpufrac has stopped on this node")
BROKEN = NodeReadiness("Unknown", "AgentFailed", "gpufrac can't tell whether it is ready; see the log of its plugin")

HEARTBEAT_S = 60.0
GAP_S = 0.5
"""Between two writes, however often something changes."""
CHANGES, CHANGE_EVERY_S = 10, 5.0
"""Changes written at once, and then how often: each write of a node is felt in etcd and by all who watch nodes."""
RETRY_FIRST_S, RETRY_LAST_S = 0.5, 60.0
CLOSE_S = 1.8
"""For the last word: a pod that ends has better to do."""
MAX_MESSAGE = 1024

_OTHER_NODE = "is not allowed to modify node"
"""What a node's own credentials hear about another node (plugin/pkg/admission/noderestriction)."""
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]{0,127}")
_VERSION = re.compile(r"[0-9]{1,10}")

log = get_logger("kubernetes")


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """What of a node's condition matters here."""

    type: str = ""
    status: str = ""
    last_transition_time: str | None = None


class _Metadata(msgspec.Struct, frozen=True):
    labels: dict[str, str] | None = None


class _NodeStatus(msgspec.Struct, frozen=True):
    conditions: tuple[Condition, ...] | None = None


class Node(msgspec.Struct, frozen=True):
    """What is read of a node object."""

    metadata: _Metadata = _Metadata()
    status: _NodeStatus = _NodeStatus()

    @property
    def condition(self) -> Condition | None:
        """Our condition as it is there now."""
        return next((c for c in self.status.conditions or () if c.type == CONDITION), None)

    @property
    def driver_major(self) -> str | None:
        """Our label with the driver's major version as it is there now."""
        return (self.metadata.labels or {}).get(DRIVER_LABEL)


def condition_patch(readiness: NodeReadiness, before: Condition | None, now: str) -> dict[str, Any]:
    """The strategic merge patch of a node's status; the server merges conditions by `type` (pure).

    Args:
        before: the condition as it is now. Its time of transition stays while the status does.
        now: as in `timestamp`.
    """
    since = before.last_transition_time if before is not None and before.status == readiness.status else None
    condition = {
        "type": CONDITION,
        "status": readiness.status,
        "reason": readiness.reason if _WORD.fullmatch(readiness.reason) else "Unspecified",
        "message": shown(readiness.message, MAX_MESSAGE),
        "lastHeartbeatTime": now,
        "lastTransitionTime": since or now,
    }
    return {"status": {"conditions": [condition]}}


def timestamp(unix_s: float) -> str:
    """RFC 3339 in whole seconds: what Kubernetes takes as a time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


class NodeReporter:
    """Keeps condition and label as `readiness` says, until closed. `error` is empty while all is well.

    Args:
        client: for this reporter alone.
        node_name: gives the name of our node; raises AccessError.
        readiness: asked on `wake` and with every heartbeat; it must not block.
    """

    def __init__(
        self,
        client: ApiClient,
        node_name: Callable[[], str],
        readiness: Callable[[], NodeReadiness],
        *,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random,
    ) -> None:
        self._client, self._node_name, self._readiness = client, node_name, readiness
        self._heartbeat_s, self._clock = heartbeat_s, clock
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_LAST_S, jitter)
        self._changes = Bucket(CHANGES, CHANGE_EVERY_S, time.monotonic())
        self.error = ""
        self.last_heartbeat_at: float | None = None
        self._before: Condition | None = None
        self._looked = False
        self._tried: NodeReadiness | None = None
        self._tried_s = float("-inf")
        self._due_s = 0.0  # of the next write where nothing changes
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._aborted = threading.Event()  # the last word comes after the abort, which would end it, too
        self._stopped_s = 0.0
        self._thread = GuardedThread(self._run, "kubernetes-node")

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Readiness may have changed: ask now."""
        self._wake.set()

    def begin_close(self) -> None:
        """Starts to close without waiting."""
        if not self._stop.is_set():
            self._stopped_s = time.monotonic()
            self._stop.set()
            self._wake.set()
            self._client.abort()
            self._aborted.set()

    def close(self) -> None:
        """Says that we have stopped, if that can be said within CLOSE_S, and ends."""
        self.begin_close()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, self._stopped_s + CLOSE_S + 0.1 - time.monotonic()))
        self._client.close()
        if self._thread.ident is not None:
            self._thread.join(0.2)

    def _run(self) -> None:
        while not self._stop.is_set():
            pause_s = self._turn()
            self._wake.wait(pause_s)
            self._stop.wait(max(0.0, self._tried_s + GAP_S - time.monotonic()))
            self._wake.clear()
        self._aborted.wait()
        left_s = self._stopped_s + CLOSE_S - time.monotonic()
        if left_s > 0:
            try:
                self._write(STOPPED, left_s)
            except ApiError as error:
                log.info("the node's condition was not set to Unknown", error=error)
            except Exception:
                log.exception("the node's condition was not set to Unknown")

    def _turn(self) -> float:
        """Writes what is due; how long nothing else is."""
        wanted = self._ask()
        now_s = time.monotonic()
        if wanted == self._tried:
            if now_s < self._due_s:
                return self._due_s - now_s
        elif not self._changes.take(now_s):
            return self._changes.wait_s(now_s)
        try:
            self._write(wanted)
        except ApiError as error:
            pause_s = self._backoff.pause_s(error.retry_after_s, error.failure)
            self._note(_explained(error))
        except Exception as error:
            log.exception("reporting the node's condition failed and goes on")
            pause_s = self._backoff.pause_s(kind=Failure.REFUSED)
            self._note(f"{type(error).__name__}: {error}")
        else:
            self._backoff.reset()
            pause_s = self._heartbeat_s
        self._tried, self._tried_s = wanted, time.monotonic()
        self._due_s = self._tried_s + pause_s
        return pause_s

    def _ask(self) -> NodeReadiness:
        try:
            return self._readiness()
        except Exception:
            log.exception("the node's readiness can't be told")
            return BROKEN

    def _write(self, wanted: NodeReadiness, timeout_s: float | None = None) -> None:
        path = api_path("api", "v1", "nodes", self._node_name())
        if not self._looked and timeout_s is None:
            self._look(path)
        if self._stop.is_set() and timeout_s is None:
            raise AbortedError("cannot write the node's condition: closing")
        at = self._clock()
        patch = condition_patch(wanted, self._before, timestamp(at))
        node = self._client.patch(f"{path}/status", patch, Node, timeout_s=timeout_s)
        self._before, self._looked = node.condition, True
        self.last_heartbeat_at = at
        error = ""
        if _VERSION.fullmatch(wanted.driver_major) and node.driver_major != wanted.driver_major:
            try:
                # Through the status, as kubelets do it: to patch the node itself is a right to taint and cordon it.
                label = {"metadata": {"labels": {DRIVER_LABEL: wanted.driver_major}}}
                self._client.patch(f"{path}/status", label, Node)
            except ForbiddenError as refusal:  # an admission plugin's; the condition matters more, and is written
                error = _explained(refusal)
        self._note(error)

    def _look(self, path: str) -> None:
        """What an earlier instance of ours left: a status that stays keeps its time of transition."""
        with suppress(ForbiddenError):
            self._before = self._client.get(path, Node).condition
            self._looked = True

    def _note(self, error: str) -> None:
        # That nobody answers is in the log once, for all of us.
        if error and error not in (self.error, self._client.health.error) and not self._stop.is_set():
            log.warning("the node's condition or label can't be kept", error=error)
        self.error = error


def _explained(error: ApiError) -> str:
    if isinstance(error, ForbiddenError) and error.lacks_right:
        return f"{error}; grant it as deploy/rbac.yaml does"
    if isinstance(error, NotFoundError) or _OTHER_NODE in str(error):
        return f"{error}; set kubernetes.nodeName to what kubectl get nodes shows"
    return str(error)
