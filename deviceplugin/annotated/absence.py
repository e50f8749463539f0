"""Annotated containers that started while we were away: found, told of, counted, and by policy stopped.

The runtime goes on without a plugin that is not there or does not answer in time, so such containers happen. What they
take is counted by a record like any other. Nobody is stopped unheard: there is notice, one container goes at a time,
and one whose pod would not start it again is left to run.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from deviceplugin import render
from deviceplugin.annotated.adjust import means
from deviceplugin.annotated.status import STARTED_ALONE
from deviceplugin.broker import Broker
from deviceplugin.kubernetes.model import Events
from deviceplugin.nri.model import Container, ContainerState
from deviceplugin.plan.model import Allocation, ContainerAsk, ContainerRef
from mpsd.config.model import AwayPolicy
from mpsd.errors import GpufracError
from mpsd.log import get_logger

log = get_logger("plugin")

NOTICE_S = 60.0
"""Between the first word about a container and its end."""
STOP_EVERY_S = 20.0
KEPT = 500
RUNS = (ContainerState.CREATED, ContainerState.RUNNING, ContainerState.PAUSED)


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A container that runs without what its annotations demand. `plan`: what becomes of it."""

    container: ContainerRef
    container_id: str
    reason: str
    plan: str = ""


class Absence:
    """State of two threads: the session's finds, another tends."""

    def __init__(
        self,
        policy: AwayPolicy,
        stop_container: Callable[[str], str],
        restart_policy: Callable[[str], str | None],
        events: Events,
    ) -> None:
        self._policy, self._stop_container, self._restart_policy = policy, stop_container, restart_policy
        self._events = events
        self._lock = threading.Lock()
        self._found: dict[str, Unenforced] = {}
        self._known_s: dict[str, float | None] = {}
        """Container -> since when it is known (monotonic), None until it is tended to first."""
        self._stopped_s = float("-inf")

    @property
    def found(self) -> tuple[Unenforced, ...]:
        with self._lock:
            return tuple(self._found.values())

    def begin(self) -> None:
        """All containers are about to be looked at anew."""
        with self._lock:
            self._found = {}

    def forget(self, container_id: str) -> None:
        """A container is gone."""
        with self._lock:
            self._found.pop(container_id, None)
            self._known_s.pop(container_id, None)

    def judge(
        self,
        broker: Broker,
        by_cdi: bool,
        ref: ContainerRef,
        container: Container,
        resolved: Callable[[], ContainerAsk],
    ) -> None:
        """Looks at an annotated container that is there: one of ours is known, or taken in again; another is noted, and
        what it takes is counted."""
        if container.state not in RUNS:
            return
        key = container.variable(render.MARKER)
        known = broker.of_container(ref)
        if known is not None and key == known.key and not _unlike(container, known):
            return
        if key and broker.share(key) is not None:
            return  # a share of the device plugin, looked after by its keeper
        try:
            ask = resolved()
            ours = bool(key and render.is_key(key)) and known is None
            allocation = broker.adopt_container(ask, key if ours else None, enforced=ours, by_cdi=by_cdi)
            if ours and not _unlike(container, allocation):
                log.warning("adopted an annotated container without a record", container=str(ref), key=allocation.key)
                return
        except GpufracError as error:
            self.note(ref, container, f"it runs without a limit and can't be counted: {error}")
            return
        self.note(ref, container, STARTED_ALONE)

    def note(self, ref: ContainerRef, container: Container, reason: str) -> None:
        """A container that runs unenforced."""
        with self._lock:
            if container.id not in self._found and len(self._found) >= KEPT:
                return
            new = container.id not in self._known_s
            self._found[container.id] = Unenforced(ref, container.id, reason)
            self._known_s.setdefault(container.id, None)
        if new:
            log.error("an annotated container runs unenforced", container=str(ref), reason=reason)
            self._events.pod(
                ref.namespace, ref.pod, ref.pod_uid, "Warning", "GpuLimitNotEnforced", f"{ref.container}: {reason}"
            )

    def tend(self, now_s: float) -> None:
        """Says what becomes of each, and stops one whose time has come."""
        for one in self.found:
            with self._lock:
                since_s = self._known_s.get(one.container_id)
                if one.container_id in self._known_s and since_s is None:
                    since_s = self._known_s[one.container_id] = now_s
            if since_s is None:
                continue
            plan, stop = self._plan(one, since_s, now_s)
            if stop:
                self._stopped_s = now_s
                error = self._stop_container(one.container_id)
                plan = f"it can't be stopped: {error}" if error else "it is being stopped, to be made again"
                log.warning("stopping an unenforced container", container=str(one.container), error=error)
                self._tell(one, plan)
            self._show(one, plan)

    def _plan(self, one: Unenforced, since_s: float, now_s: float) -> tuple[str, bool]:
        if self._policy is AwayPolicy.REPORT:
            return "delete it, or set `annotations.whenAway: stop`", False
        restarts = self._restart_policy(one.container.pod_uid)
        if restarts is None:
            return "it is not stopped: without the Kubernetes API it is not known whether it would start again", False
        if restarts == "Never":
            return "it is not stopped: with restartPolicy Never it would not start again", False
        if now_s - since_s < NOTICE_S:
            text = f"it will be stopped {NOTICE_S:g} s after it was found, to be made again with its limit"
            if not one.plan:
                self._tell(one, text)
            return text, False
        if now_s - self._stopped_s < STOP_EVERY_S:
            return "it is about to be stopped, one container at a time", False
        return "", True

    def _tell(self, one: Unenforced, text: str) -> None:
        ref = one.container
        self._events.pod(
            ref.namespace, ref.pod, ref.pod_uid, "Warning", "GpuLimitNotEnforced", f"{ref.container}: {text}"
        )

    def _show(self, one: Unenforced, plan: str) -> None:
        with self._lock:
            if one.container_id in self._found:
                self._found[one.container_id] = replace(self._found[one.container_id], plan=plan)


def _unlike(container: Container, allocation: Allocation) -> bool:
    """Whether a container runs with other values than its plan."""
    limit, mode = container.variable("GPUFRAC_MEMORY_LIMIT_BYTES"), container.variable("GPUFRAC_COMPUTE_MODE")
    return not means(limit, mode, allocation)
