"""What users and operators hear of annotated containers: refusals, keys without effect, counts. Thread-safe."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from deviceplugin.annotated.contract import Finding, findings
from deviceplugin.annotated.reasons import AnnotationCode, RefusedError
from deviceplugin.grants.ledger import LedgerError
from deviceplugin.kubernetes.model import Events, EventType
from deviceplugin.nri.model import Pod, Refused
from deviceplugin.plan.allocation import ContainerRef
from deviceplugin.plan.reasons import OfferCode
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.events.kinds import EventKind
from mpsd.events.model import Subject
from mpsd.events.teller import SILENT, Teller

log = get_logger("plugin")

KEPT = 200
"""How many refused containers, and how many pods with odd keys, are remembered for status."""


@dataclass(frozen=True, slots=True)
class Refusing:
    """A container that was refused and has not been started since."""

    container: ContainerRef
    reason: Reason
    since_unix_s: float
    count: int = 1


class Reporter:
    """Each word is told and sent as an event each time: whoever takes them counts repeats."""

    def __init__(self, events: Events, teller: Teller = SILENT, wall: Callable[[], float] = time.time) -> None:
        self._events, self._teller, self._wall = events, teller, wall
        self._lock = threading.Lock()
        self._refusing: dict[ContainerRef, Refusing] = {}
        self._findings: dict[str, tuple[str, tuple[Finding, ...]]] = {}
        """Pod UID -> its full name and what is wrong with its keys."""
        self._containers: dict[str, frozenset[str]] = {}
        """Pod UID -> names of all its containers, of pods with keys for a container that they don't have."""
        self._refusals: Counter[str] = Counter()
        self.granted = 0
        """Containers that were started with what they ask for."""

    def refuse(self, ref: ContainerRef, reason: Reason) -> Refused:
        """A creation or a start is refused; what to raise."""
        now_s = round(self._wall(), 3)
        with self._lock:
            self._refusals[str(reason.code)] += 1
            before = self._refusing.pop(ref, None)
            since_s, count = (before.since_unix_s, before.count + 1) if before else (now_s, 1)
            self._refusing[ref] = Refusing(ref, reason, since_s, count)
            while len(self._refusing) > KEPT:
                del self._refusing[next(iter(self._refusing))]
        text = reason.message
        subject = Subject(namespace=ref.namespace, pod=ref.pod, container=ref.container, pod_uid=ref.pod_uid)
        self._teller.tell(EventKind.REFUSED, subject, reason)
        self._send(ref, "Warning", "GpuShareRefused", text)
        return Refused(f"gpufrac: container {ref.container!r} of pod {ref.namespace}/{ref.pod}: {text}")

    def started(self, ref: ContainerRef, *, asks: bool) -> None:
        """It starts, with what its annotations ask for where it `asks`: others were refused for a share they hold."""
        with self._lock:
            self.granted += asks
            self._refusing.pop(ref, None)

    def reduced(self, ref: ContainerRef, text: str) -> None:
        """It gets less than it asks for."""
        self._send(ref, "Normal", "GpuShareReduced", text)

    def look_at_keys(self, pod: Pod, prefix: str, containers: Collection[str] | None = None) -> None:
        """Finds keys that don't do what their author meant.

        Args:
            containers: names of all containers of the pod, once they are known.
        """
        with self._lock:
            containers = self._containers.get(pod.uid) if containers is None else frozenset(containers)
        found = findings(pod.annotations, prefix, containers)
        with self._lock:
            if found and containers is not None:
                self._containers[pod.uid] = frozenset(containers)
            before = self._findings.pop(pod.uid, (pod.full_name, ()))[1]
            if found and len(self._findings) >= KEPT:
                self._containers.pop(pod.uid, None)
                return
            if found:
                self._findings[pod.uid] = (pod.full_name, found)
        for finding in found:
            if finding in before:
                continue
            log.warning("an annotation has no effect", pod=pod.full_name, reason=str(finding))
            self._events.pod(pod.namespace, pod.name, pod.uid, "Warning", "GpuAnnotationIgnored", str(finding))

    def keep(self, pod_uids: Collection[str]) -> None:
        """Forgets all pods but these."""
        self._forget(lambda uid: uid not in pod_uids)

    def pod_gone(self, pod_uid: str) -> None:
        """Forgets what was said of a pod."""
        self._forget(lambda uid: uid == pod_uid)

    @property
    def refusing(self) -> tuple[Refusing, ...]:
        """Containers that were refused and have not been started since."""
        with self._lock:
            return tuple(self._refusing.values())

    @property
    def refusals(self) -> dict[str, int]:
        """Code -> how many creations and starts were refused for it."""
        with self._lock:
            return dict(sorted(self._refusals.items()))

    @property
    def findings(self) -> tuple[tuple[str, Finding], ...]:
        """(pod, what is wrong with a key of it)."""
        with self._lock:
            return tuple((pod, finding) for pod, found in self._findings.values() for finding in found)

    def _forget(self, gone: Callable[[str], bool]) -> None:
        with self._lock:
            self._containers = {uid: names for uid, names in self._containers.items() if not gone(uid)}
            self._findings = {uid: found for uid, found in self._findings.items() if not gone(uid)}
            self._refusing = {ref: one for ref, one in self._refusing.items() if not gone(ref.pod_uid)}

    def _send(self, ref: ContainerRef, kind: EventType, reason: str, text: str) -> None:
        self._events.pod(ref.namespace, ref.pod, ref.pod_uid, kind, reason, f"{ref.container}: {text}")


def reason_of_error(error: GpufracError) -> Reason:
    """Why what raised this did not come about."""
    if isinstance(error, RefusedError):
        return error.reason
    return Reason(OfferCode.NO_RECORDS if isinstance(error, LedgerError) else AnnotationCode.FAILED, str(error))
