"""Annotated containers that started while we were away: told of, and by policy stopped.

The runtime goes on without a plugin that is not there or does not answer in time, so such containers happen (found by
existing.py). Nobody is stopped unheard: there is notice, one container goes at a time, and one whose pod would not
start it again is left to run.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from deviceplugin.annotated.reasons import ServingCode
from deviceplugin.kubernetes.model import Events
from deviceplugin.nri.model import Container
from deviceplugin.plan.allocation import ContainerRef
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.config.model import AwayPolicy

log = get_logger("plugin")

NOTICE_S = 60.0
"""Between the first word about a container and its end."""
STOP_EVERY_S = 20.0
KEPT = 500
TO_DO = "delete the pod, so that it is made again with its limit, or set `annotations.whenAway: stop`"
STARTED_ALONE = Reason(
    ServingCode.STARTED_ALONE, "it was started while gpufrac was not there, and runs without its limit"
)
CREATED_ALONE = Reason(
    ServingCode.CREATED_ALONE,
    "it was created while gpufrac was not there, so its start will be refused, and it will be made again",
)


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A container that runs without what its annotations demand. `plan`: what becomes of it, empty while
    that is not known. `noticed_s`: when it was told that it will be stopped (monotonic)."""

    container: ContainerRef
    container_id: str
    reason: Reason
    plan: str = ""
    noticed_s: float | None = None


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
        """By the container's ID."""
        self._stale: set[str] = set()
        self._stopped_s = float("-inf")

    @property
    def found(self) -> tuple[Unenforced, ...]:
        """Containers that run without what they were granted, as found last."""
        with self._lock:
            return tuple(self._found.values())

    def begin(self) -> None:
        """All containers are about to be looked at anew: who is not found again by `end` is gone."""
        with self._lock:
            self._stale = set(self._found)

    def end(self) -> None:
        """All were looked at."""
        with self._lock:
            for container_id in self._stale:
                self._found.pop(container_id, None)

    def forget(self, container_id: str) -> None:
        """A container is gone."""
        with self._lock:
            self._found.pop(container_id, None)

    def replaced(self, container: ContainerRef) -> None:
        """A container was made again, by us."""
        self._drop(lambda one: one.container == container)

    def pod_gone(self, pod_uid: str) -> None:
        """A pod has no sandbox any more."""
        self._drop(lambda one: one.container.pod_uid == pod_uid)

    def _drop(self, gone: Callable[[Unenforced], bool]) -> None:
        with self._lock:
            self._found = {container_id: one for container_id, one in self._found.items() if not gone(one)}

    def note(self, ref: ContainerRef, container: Container, reason: Reason) -> None:
        """A container that runs unenforced."""
        with self._lock:
            self._stale.discard(container.id)
            before = self._found.get(container.id)
            if before is not None:
                self._found[container.id] = replace(before, reason=reason)
            elif len(self._found) >= KEPT:
                return
            else:
                plan = TO_DO if self._policy is AwayPolicy.REPORT else ""  # the others' is for `tend` to find out
                self._found[container.id] = Unenforced(ref, container.id, reason, plan)
        if before is None:
            log.error(
                "an annotated container runs unenforced", container=str(ref), code=reason.code, reason=reason.message
            )
            self._tell(ref, reason.message)

    def tend(self, now_s: float) -> None:
        """Says what becomes of each, and stops one whose time has come."""
        for one in self.found:
            plan, noticed_s = self._plan(one, now_s)
            if plan is None:
                self._stopped_s = now_s
                self._stop(one)
                continue
            if noticed_s is not None and one.noticed_s is None:
                self._tell(one.container, plan)
            self._show(one, plan, noticed_s)

    def _plan(self, one: Unenforced, now_s: float) -> tuple[str | None, float | None]:
        """What becomes of it, None for being stopped now; and since when it knows that it will be, if it will."""
        if self._policy is AwayPolicy.REPORT:
            return TO_DO, None
        restarts = self._restart_policy(one.container.pod_uid)
        if restarts is None:
            return "it is not stopped: without the Kubernetes API it is not known whether it would start again", None
        if restarts != "Always":
            # With OnFailure a program that ends in order when it is told to would count as done.
            return f"it is not stopped: with restartPolicy {restarts} it might not start again", None
        noticed_s = now_s if one.noticed_s is None else one.noticed_s
        if now_s - noticed_s < NOTICE_S:
            return f"it will be stopped in {NOTICE_S:g} s, to be made again with its limit", noticed_s
        if now_s - self._stopped_s < STOP_EVERY_S:
            return "it is about to be stopped, one container at a time", noticed_s
        return None, noticed_s

    def _stop(self, one: Unenforced) -> None:
        error = self._stop_container(one.container_id)
        log.warning("stopping an unenforced container", container=str(one.container), error=error)
        plan = f"it can't be stopped: {error}" if error else "it was stopped, to be made again with its limit"
        self._tell(one.container, plan)
        if error:
            self._show(one, plan, one.noticed_s)
            with self._lock:  # others first
                if (known := self._found.pop(one.container_id, None)) is not None:
                    self._found[one.container_id] = known
        else:
            self.forget(one.container_id)  # the runtime answers once it has ended

    def _tell(self, ref: ContainerRef, text: str) -> None:
        self._events.pod(
            ref.namespace, ref.pod, ref.pod_uid, "Warning", "GpuLimitNotEnforced", f"{ref.container}: {text}"
        )

    def _show(self, one: Unenforced, plan: str, noticed_s: float | None) -> None:
        with self._lock:
            if (known := self._found.get(one.container_id)) is not None:
                self._found[one.container_id] = replace(known, plan=plan, noticed_s=noticed_s)
