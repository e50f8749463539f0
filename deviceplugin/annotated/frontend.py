"""The front end of pods described by annotations: what the container runtime asks over NRI -> the broker's answers.

Creations and starts are the points where a container can still be kept from running without its limit: every doubt
refuses, with its reason, and the kubelet tries again. What runs without us (the runtime goes on when we do not answer)
is found when we are told of all containers again; see absence.py.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deviceplugin import render
from deviceplugin.annotated import contract, devices
from deviceplugin.annotated.absence import Absence, Unenforced
from deviceplugin.annotated.adjust import adjustment, cgroup_directory, lowered, starts_wait, takes_cdi
from deviceplugin.annotated.contract import Ask, ContractError, Finding
from deviceplugin.annotated.sandboxes import Sandboxes
from deviceplugin.annotated.status import reduced
from deviceplugin.annotated.trust import distrust
from deviceplugin.broker import Broker
from deviceplugin.kubernetes.model import Events
from deviceplugin.nri.model import Adjustment, Container, Pod, Refused, Runtime
from deviceplugin.plan.model import Allocation, ContainerAsk, ContainerRef, Refusal
from deviceplugin.presence import Holder
from mpsd.config.model import AnnotationsConfig, Enforcement, TrustPolicy
from mpsd.errors import GpufracError
from mpsd.limits.model import same_limit
from mpsd.log import get_logger
from mpsd.quantity import format_bytes
from mpsd.snapshot import LimitReading

log = get_logger("plugin")

ATTACH_S = 0.7
"""How long a creation waits until its container may start. Every container operation of the node waits with it."""
CDI_SETTLE_S = 0.01
"""Between the writing of a CDI file and its use: a runtime has to notice it. Of 100 files each, 25 were not seen in
time after 0 ms, at most 1 after 1 ms and none after 5 ms (containerd 2.1.9)."""
START_S = 0.9
"""How long a start waits for its limit to be in force."""
START_PAUSE_S = 0.05
RESERVED_ENV = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_GPU_MEMORY_", "GPUFRAC_", "CUDA_MPS_")
"""How the names of all variables begin that we set."""
KEPT = 200
"""How many refused containers are remembered for status."""


class Mpsd(Protocol):
    """The one call made to mpsd; raises GpufracError."""

    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading: ...


class Keeper(Protocol):
    """What is asked of the keeper."""

    def recheck(self) -> None: ...
    def wait_attached(self, key: str, timeout_s: float) -> tuple[Allocation, str] | None: ...


@dataclass(frozen=True, slots=True)
class Refusing:
    """A container that was refused and has not been granted since."""

    container: ContainerRef
    text: str
    since_unix_s: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class FrontendReport:
    """What status shows of the front end; replaced whole."""

    runtime: Runtime | None = None
    synchronized: bool = False
    refusing: tuple[Refusing, ...] = ()
    findings: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)
    """Pod -> what is wrong with its keys."""
    unenforced: tuple[Unenforced, ...] = ()
    granted: int = 0
    refused: int = 0
    unguarded: str = ""
    """Why the runtime would make containers while we are away."""


class AnnotatedFrontend:
    """A Handler of an NRI session. Its calls come one at a time; `report` may be read from any thread.

    Args:
        mpsd: answers well within START_S, or fails.
        restart_policy: of a pod by its UID, where that is known.
        unguarded: see required.py.
        running_pods: UIDs of the pods that have processes.
    """

    def __init__(
        self,
        broker: Broker,
        config: AnnotationsConfig,
        keeper: Keeper,
        mpsd: Mpsd,
        events: Events,
        *,
        stop_container: Callable[[str], str],
        restart_policy: Callable[[str], str | None] = lambda uid: None,
        unguarded: Callable[[Runtime], str] = lambda runtime: "",
        running_pods: Callable[[], Collection[str]] = frozenset,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker, self._config, self._keeper, self._mpsd, self._events = broker, config, keeper, mpsd, events
        self._find_unguarded, self._running_pods = unguarded, running_pods
        self._wall, self._monotonic = wall, monotonic
        self._pause = threading.Event()
        self._lock = threading.Lock()
        """Guards what status reads; the rest is the session's worker's."""
        self._absence = Absence(config.when_away, stop_container, restart_policy, events)
        self._runtime: Runtime | None = None
        self._unguarded = ""
        self._by_cdi = False
        self._synchronized = False
        self._sandboxes = Sandboxes()
        self._refusing: dict[ContainerRef, Refusing] = {}
        self._findings: dict[str, tuple[str, tuple[Finding, ...]]] = {}
        """Pod UID -> its full name and what is wrong with its keys."""
        self._granted = self._refused = 0

    # --- what the runtime says -----------------------------------------------------------------------------------

    def concerns(self, pod: Pod, container: Container) -> bool:
        """Whether a creation or start needs us at all; pure and at once."""
        prefix = f"{self._config.prefix}{container.name}."
        return any(key.startswith(prefix) for key in pod.annotations)

    def connected(self, runtime: Runtime) -> None:
        self._by_cdi = takes_cdi(runtime)
        self._broker.set_starts_wait(starts_wait(runtime))
        unguarded = self._find_unguarded(runtime)
        with self._lock:
            self._runtime, self._unguarded = runtime, unguarded
        if unguarded:
            log.warning("containers that are made while gpufrac is away run without limits", reason=unguarded)
        log.info("the container runtime is there", runtime=f"{runtime.name} {runtime.version}", cdi=self._by_cdi)

    def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> None:
        """What is not in it is gone; what runs unenforced is found."""
        self._sandboxes.synchronize(pods, containers)
        uids = self._sandboxes.uids()
        self._broker.observe_pods(uids)
        with self._lock:
            self._findings = {uid: found for uid, found in self._findings.items() if uid in uids}
            self._refusing = {ref: one for ref, one in self._refusing.items() if ref.pod_uid in uids}
            self._synchronized = True
        self._absence.begin()
        for pod in self._sandboxes.pods():
            self._look_at_keys(pod)
        for container in containers:
            owner = self._sandboxes.find(container.pod_id)
            if owner is not None:
                self._take_stock(owner, container)
        self._absence.end()

    def disconnected(self, reason: str) -> None:
        self._broker.observe_pods(None)
        with self._lock:
            self._runtime, self._synchronized = None, False

    def run_pod(self, pod: Pod) -> None:
        self._sandboxes.run(pod)
        self._broker.pod_runs(pod.uid)
        self._look_at_keys(pod)

    def stop_pod(self, pod: Pod) -> None:
        if uid := self._sandboxes.stop(pod):
            self._broker.pod_stopped(uid)
            self._absence.pod_gone(uid)
            with self._lock:
                self._findings.pop(uid, None)
                self._refusing = {ref: one for ref, one in self._refusing.items() if ref.pod_uid != uid}

    def remove_pod(self, pod: Pod) -> None:
        self.stop_pod(pod)

    def remove_container(self, pod: Pod, container: Container) -> None:
        self._absence.forget(container.id)

    def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """Grants what the container's annotations ask for. Raises Refused."""
        ref = reference(pod, container)
        try:
            made = self._create(pod, container, ref)
        except GpufracError as error:
            raise self._refuse(ref, str(error)) from error
        if made is not None:
            self._absence.replaced(ref)
        with self._lock:
            self._refusing.pop(ref, None)
            self._granted += made is not None
        return made or Adjustment()

    def start_container(self, pod: Pod, container: Container) -> None:
        """Sets the container's hard limit on its cgroup and reads it back. Raises Refused."""
        ref = reference(pod, container)
        try:
            if contract.ask_of(pod.annotations, container.name, self._config.prefix) is not None:
                self._start(ref, container)
        except GpufracError as error:
            raise self._refuse(ref, str(error)) from error

    # --- for others ----------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Now and then: looks after sandboxes that ended without a word, and containers that run unenforced. From
        another thread than the session's."""
        for pod in self._sandboxes.vanished(self._running_pods):
            log.info("a sandbox ended without a word of the runtime", pod=pod.full_name)
            self.stop_pod(pod)
        self._absence.tend(self._monotonic())

    @property
    def report(self) -> FrontendReport:
        with self._lock:
            return FrontendReport(
                runtime=self._runtime,
                synchronized=self._synchronized,
                refusing=tuple(self._refusing.values()),
                findings=dict(self._findings.values()),
                unenforced=self._absence.found,
                granted=self._granted,
                refused=self._refused,
                unguarded=self._unguarded,
            )

    # --- creating and starting -----------------------------------------------------------------------------------

    def _create(self, pod: Pod, container: Container, ref: ContainerRef) -> Adjustment | None:
        ask = contract.ask_of(pod.annotations, container.name, self._config.prefix)
        if ask is None:
            return None
        self._check_names(container)
        if share := self._share_of(ref, container):
            return self._lower(pod, ref, ask, share)
        wanted = self._resolved(ref, ask)
        self._check_trust(wanted)
        outcome = self._broker.allocate_container(wanted, by_cdi=self._by_cdi, recheck=self._keeper.recheck)
        if isinstance(outcome, Refusal):
            raise GpufracError(outcome.text)
        if text := reduced(outcome):
            self._events.pod(
                ref.namespace, ref.pod, ref.pod_uid, "Normal", "GpuShareReduced", f"{ref.container}: {text}"
            )
        grant = self._attached(outcome.key)
        return self._adjust(*grant)

    def _check_names(self, container: Container) -> None:
        """A variable that stands twice can't be overridden but by a CDI device: of two, this adjusts the first and the
        last one holds (containerd 2.1.9)."""
        if self._by_cdi:
            return
        names = [entry.partition("=")[0] for entry in container.env]
        twice = sorted({n for n in names if n.startswith(RESERVED_ENV) and names.count(n) > 1})
        if twice:
            raise GpufracError(f"its environment has {', '.join(twice)} twice: set it once, or not at all")

    def _resolved(self, ref: ContainerRef, ask: Ask) -> ContainerAsk:
        if not ask.devices:
            key = f"{self._config.prefix}{ref.container}{contract.DEVICES}"
            raise GpufracError(
                f"it names no GPU: annotation {key} is missing; it is written by the scheduler (such as KAI), so look "
                "whether the pod's schedulerName is right"
            )
        gpus = devices.resolve(ask.devices, [gpu.info for gpu in self._broker.gpus()])
        if isinstance(gpus, str):
            raise GpufracError(gpus)
        return ContainerAsk(
            container=ref,
            request_bytes=ask.request_bytes,
            limit_bytes=ask.limit_bytes,
            mode=ask.mode,
            gpus=gpus,
            thread_percent=ask.thread_percent,
        )

    def _check_trust(self, ask: ContainerAsk) -> None:
        if self._broker.of_container(ask.container) is not None:
            return  # it was believed when it was first made, and the broker judges what it asks for
        reason = distrust(self._config, ask, self._broker.reserved)
        if reason and self._config.trust is TrustPolicy.KAI_RESERVATION:
            self._keeper.recheck()  # its reservation may be younger than our last look
            reason = distrust(self._config, ask, self._broker.reserved)
        if reason:
            raise GpufracError(reason)

    def _attached(self, key: str) -> tuple[Allocation, str]:
        """Waits until what it holds now may start."""
        grant = self._keeper.wait_attached(key, ATTACH_S)
        if grant is None:
            reason = self._broker.waits_for(key) or "its CDI file is being written"
            raise GpufracError(f"it is granted, but may not start yet: {reason}")
        if self._by_cdi:
            self._pause.wait(CDI_SETTLE_S)
        return grant

    def _adjust(self, allocation: Allocation, pipe_directory: str) -> Adjustment:
        mps = self._broker.config.mps
        return adjustment(
            allocation,
            pipe_directory,
            render.shared_memory(allocation, mps),
            writable=mps.writable_mount,
            by_cdi=self._by_cdi,
        )

    def _start(self, ref: ContainerRef, container: Container) -> None:
        allocation = self._broker.of_container(ref) or self._share_of(ref, container)
        key = container.variable(render.MARKER)
        if allocation is None:
            raise GpufracError("it was created while gpufrac was not there, so it has no limit: it must be made again")
        if key != allocation.key:
            # What a runtime does not know of an answer it drops in silence, such as CDI devices (containerd 1.7.24).
            raise GpufracError(
                f"it was created without what gpufrac gave it (its {render.MARKER} is {key or 'not set'}): it must be "
                "made again; if that goes on, the container runtime does not apply it"
            )
        if allocation.enforcement is not Enforcement.HARD:
            return
        directory = cgroup_directory(self._broker.cgroup_root, container.cgroups_path)
        if not directory:
            raise GpufracError(
                f"the runtime names no cgroup of it that is understood: {container.cgroups_path[:200]!r}"
            )
        deadline_s = self._monotonic() + START_S
        for gpu in allocation.gpus:
            self._limit(gpu, directory, allocation, deadline_s)

    def _limit(self, gpu: str, directory: str, allocation: Allocation, deadline_s: float) -> None:
        while True:
            try:
                read = self._mpsd.set_limits(gpu, directory, allocation.soft_bytes, allocation.limit_bytes)
                error = read.error
                if not error and not same_limit(allocation.limit_bytes, read.hard_bytes):
                    hard = "none" if read.hard_bytes is None else format_bytes(read.hard_bytes)
                    error = f"it reads back as {hard}"
            except GpufracError as failed:
                error = str(failed)
            if not error:
                return
            if self._monotonic() >= deadline_s:
                raise GpufracError(
                    f"its memory limit of {format_bytes(allocation.limit_bytes)} can't be put in force on GPU {gpu}: "
                    f"{error}"
                )
            self._pause.wait(START_PAUSE_S)

    # --- shares of the device plugin -----------------------------------------------------------------------------

    def _share_of(self, ref: ContainerRef, container: Container) -> Allocation | None:
        """The share that a container of a device plugin pod holds. Any pod can set our marker, so the kubelet's word
        counts."""
        key = container.variable(render.MARKER)
        if not key or not render.is_key(key) or self._broker.share(key) is None:
            return None
        for looked in (False, True):
            if looked:
                self._keeper.recheck()
            found = self._broker.share(key)
            if found is not None and _holds(found[1], ref):
                return found[0]
        return None

    def _lower(self, pod: Pod, ref: ContainerRef, ask: Ask, share: Allocation) -> Adjustment:
        mode_given = f"{self._config.prefix}{ref.container}{contract.MODE}" in pod.annotations
        named = f"its container holds {share.resource}, and annotations may only lower the limit of a share"
        if ask.limit_bytes > share.limit_bytes or ask.request_bytes > share.request_bytes:
            raise GpufracError(
                f"{named}: the share has {format_bytes(share.request_bytes)} to {format_bytes(share.limit_bytes)}, and "
                f"they ask for {format_bytes(ask.request_bytes)} to {format_bytes(ask.limit_bytes)}"
            )
        if ask.mode is not share.mode and mode_given:
            raise GpufracError(f"{named}: the share is {share.mode}, and they ask for {ask.mode}")
        if ask.devices:
            gpus = devices.resolve(ask.devices, [gpu.info for gpu in self._broker.gpus()])
            if isinstance(gpus, str) or set(gpus) != set(share.gpus):
                raise GpufracError(f"{named}: the share is on {', '.join(share.gpus)}, and they name other GPUs")
        if ask.limit_bytes >= share.limit_bytes:
            return Adjustment()
        self._broker.lower_limit(share.key, ask.limit_bytes)
        return lowered(self._attached(share.key)[0], by_cdi=self._by_cdi)

    # --- what users hear -----------------------------------------------------------------------------------------

    def _refuse(self, ref: ContainerRef, text: str) -> Refused:
        now_s = round(self._wall(), 3)
        with self._lock:
            self._refused += 1
            before = self._refusing.pop(ref, None)
            first = before is None or before.text != text
            since_s, count = (before.since_unix_s, before.count + 1) if before else (now_s, 1)
            self._refusing[ref] = Refusing(ref, text, since_s, count)
            while len(self._refusing) > KEPT:
                del self._refusing[next(iter(self._refusing))]
        if first:
            log.warning("an annotated container is refused", container=str(ref), reason=text)
        self._events.pod(ref.namespace, ref.pod, ref.pod_uid, "Warning", "GpuShareRefused", f"{ref.container}: {text}")
        return Refused(f"gpufrac: container {ref.container!r} of pod {ref.namespace}/{ref.pod}: {text}")

    def _look_at_keys(self, pod: Pod) -> None:
        found = contract.findings(pod.annotations, self._config.prefix)
        with self._lock:
            before = self._findings.pop(pod.uid, (pod.full_name, ()))[1]
            if found and len(self._findings) < KEPT:
                self._findings[pod.uid] = (pod.full_name, found)
        for finding in found if found != before else ():
            log.warning("an annotation has no effect", pod=pod.full_name, reason=str(finding))
            self._events.pod(pod.namespace, pod.name, pod.uid, "Warning", "GpuAnnotationIgnored", str(finding))

    # --- what started without us ---------------------------------------------------------------------------------

    def _take_stock(self, pod: Pod, container: Container) -> None:
        """Looks at one container that is there already."""
        if not self.concerns(pod, container):
            return
        ref = reference(pod, container)
        try:
            ask = contract.ask_of(pod.annotations, container.name, self._config.prefix)
            if ask is None:
                return
            self._absence.judge(self._broker, self._by_cdi, ref, container, lambda: self._resolved(ref, ask))
        except ContractError as error:
            self._absence.note(ref, container, f"it runs without a limit, as its annotations can't be used: {error}")


def _holds(holder: Holder | None, ref: ContainerRef) -> bool:
    if holder is None:
        return False
    named = (holder.namespace, holder.pod, holder.container) == (ref.namespace, ref.pod, ref.container)
    return named and holder.pod_uid in ("", ref.pod_uid)


def reference(pod: Pod, container: Container) -> ContainerRef:
    """A container by its pod."""
    return ContainerRef(namespace=pod.namespace, pod=pod.name, pod_uid=pod.uid, container=container.name)
