"""The front end of pods described by annotations: what the container runtime asks over NRI -> the broker's answers.

Creations and starts are the points where a container can still be kept from running without its limit: every doubt
refuses, with its reason, and the kubelet tries again. What runs without us (the runtime goes on when we do not answer)
is found when we are told of all containers again; see absence.py.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs

from deviceplugin.annotated import contract, devices, inventory, shares
from deviceplugin.annotated.absence import Absence, Unenforced
from deviceplugin.annotated.adjust import RESERVED_ENV, adjustment, cgroup_directory, lowered
from deviceplugin.annotated.contract import Ask, ContractError, Finding
from deviceplugin.annotated.lost import lost
from deviceplugin.annotated.reporter import Refusing, Reporter
from deviceplugin.annotated.sandboxes import Sandboxes
from deviceplugin.annotated.status import reduced
from deviceplugin.annotated.trust import distrust
from deviceplugin.grants.broker import Broker
from deviceplugin.kubernetes.model import Events
from deviceplugin.nri.model import Adjustment, Container, Inventory, Pod, Runtime
from deviceplugin.nri.runtimes import cdi_loses, starts_wait, takes_cdi
from deviceplugin.plan import isolation, render
from deviceplugin.plan.model import Allocation, ContainerAsk, ContainerRef, Refusal
from deviceplugin.plan.start import Grant, Way
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.processes import PodProcess
from mpsd.common.quantity import format_bytes
from mpsd.config.model import AnnotationsConfig, Enforcement, TrustPolicy
from mpsd.limits.model import same_limit
from mpsd.localapi.snapshot import LimitReading

log = get_logger("plugin")

PATIENCE_S = 2.0
"""How long a runtime waits for an answer by default; the times below are of that, and shorter where it waits less."""
ATTACH_S = 0.7
"""How long a creation waits until its container may start. Every container operation of the node waits with it."""
RETRY_ATTACH_S = 0.05
"""The same where the last one waited in vain: each is tried again and again, and others wait with it each time."""
FRESH_S = 0.5
"""How old the last look at the kubelet may be where its word decides. Whoever is refused is tried again later, and the
kubelet must not be asked once for each."""
START_S = 0.9
"""How long a start waits for its limit to be in force."""
START_PAUSE_S = 0.05
COMPARE_S = 30.0
"""How often what the runtime has is compared with what it told."""
CDI_SETTLE_S = 0.01
"""Between the writing of a CDI file and its use: a runtime has to notice it. Of 100 files each, 25 were not seen in
time after 0 ms, at most 1 after 1 ms and none after 5 ms (containerd 2.1.9)."""


class Mpsd(Protocol):
    """The one call made to mpsd; raises GpufracError."""

    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading: ...


class Keeper(Protocol):
    """What is asked of the keeper."""

    def observe(self, newer_than_s: float = 0.0) -> bool: ...
    def containers_of(self, namespace: str, pod: str) -> Collection[str]: ...
    def recheck(self) -> None: ...
    def wait_attached(self, key: str, timeout_s: float) -> Grant | None: ...


@dataclass(frozen=True, slots=True)
class FrontendReport:
    """What status shows of the front end. `unguarded`: why the runtime would make containers while we are away;
    `uncompared`: why what it has can't be compared with what it told."""

    synchronized: bool = False
    unguarded: str = ""
    refusing: tuple[Refusing, ...] = ()
    findings: tuple[tuple[str, Finding], ...] = ()
    """(pod, what is wrong with a key of it)."""
    unenforced: tuple[Unenforced, ...] = ()
    uncompared: str = ""
    granted: int = 0
    refused: int = 0


class AnnotatedFrontend:
    """A Handler of an NRI session, whose calls come one at a time. `tend` and `report` are for other threads.

    Args:
        mpsd: answers well within START_S, or fails.
        restart_policy: of a pod by its UID, where that is known.
        unguarded: see required.py.
        running_pods: the pods that have processes, by UID, and these.
        list_all: all pods and containers that the runtime has, by another way than NRI; raises GpufracError.
        on_change: told when a scheduler may have to hear something else of the node.
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
        running_pods: Callable[[], Mapping[str, Sequence[PodProcess]]] = dict,
        list_all: Callable[[], Inventory] = lambda: ((), ()),
        on_change: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._broker, self._config, self._keeper, self._mpsd = broker, config, keeper, mpsd
        self._find_unguarded, self._on_change = unguarded, on_change
        self._running_pods, self._list_all = running_pods, list_all
        self._monotonic, self._pause = monotonic, pause
        self._reporter = Reporter(events, wall)
        self._absence = Absence(config.when_away, stop_container, restart_policy, events)
        self._sandboxes = Sandboxes()
        self._coming_and_going = threading.Lock()
        """Sandboxes change and the broker hears of it in one step: two threads see them end."""
        self._attach_s, self._start_s = ATTACH_S, START_S
        self._in_vain: set[tuple[str, ...]] = set()
        """GPUs on which the last container waited in vain."""
        self._by_cdi, self._pids_tell = False, True
        self._delivers = False
        """Shares, too, get their environment from us: the runtime lets their pod override that of their CDI device."""
        self._synchronized, self._unguarded = False, ""
        self._compared_s, self._uncompared = float("-inf"), ""

    # --- what the runtime says -----------------------------------------------------------------------------------

    def concerns(self, pod: Pod, container: Container) -> bool:
        """Whether a creation or start needs us at all; pure and at once."""
        prefix = f"{self._config.prefix}{container.name}."
        annotated = any(key.startswith(prefix) for key in pod.annotations)
        special = self._delivers or _isolation(pod, container) != isolation.SHARED
        return annotated or (special and shares.key_of(container) is not None)

    def brief(self, pods: Sequence[Pod], containers: Sequence[Container]) -> Inventory:
        """Only what is looked at later; pure and at once."""
        return inventory.brief(self._config.prefix, pods, containers)

    def connected(self, runtime: Runtime) -> None:
        self._by_cdi = takes_cdi(runtime)
        self._pids_tell = runtime.name.lower() == "containerd"  # others may have no process for a sandbox
        self._broker.set_runtime(starts_wait=starts_wait(runtime), takes_cdi=self._by_cdi)
        self._delivers = bool(cdi_loses(runtime))
        self._broker.set_cdi_loses("")
        patience = min(1.0, runtime.request_timeout_s / PATIENCE_S)
        self._attach_s, self._start_s = ATTACH_S * patience, START_S * patience
        self._unguarded = self._find_unguarded(runtime)
        if self._unguarded:
            log.warning("containers that are made while gpufrac is away run without limits", reason=self._unguarded)
        log.info("the container runtime is there", runtime=f"{runtime.name} {runtime.version}", cdi=self._by_cdi)

    def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> None:
        """What is not in it is gone; what runs unenforced is found."""
        with self._coming_and_going:
            alive = self._sandboxes.synchronize(pods, containers, pids_tell=self._pids_tell)
            uids = {pod.uid for pod in alive.values()}
            self._broker.observe_pods(uids)
        self._reporter.keep(uids)
        for pod in alive.values():
            self._reporter.look_at_keys(pod, self._config.prefix)
        mine = [(alive[c.pod_id], c) for c in containers if c.pod_id in alive and self.concerns(alive[c.pod_id], c)]
        if mine:
            self._observe()  # whose shares are whose is the kubelet's to say
        self._absence.begin()
        for pod, container in mine:
            self._take_stock(pod, container)
        self._absence.end()
        self._synchronized = True
        self._on_change()

    def disconnected(self, reason: str) -> None:
        self._broker.observe_pods(None)
        self._synchronized = False
        self._on_change()

    def run_pod(self, pod: Pod) -> None:
        with self._coming_and_going:
            self._sandboxes.run(pod)
            self._broker.pod_runs(pod.uid)
        self._reporter.look_at_keys(pod, self._config.prefix)

    def stop_pod(self, pod: Pod) -> None:
        self._stopped(pod.id, pod.uid)

    def remove_pod(self, pod: Pod) -> None:
        self._stopped(pod.id, pod.uid)

    def remove_container(self, pod: Pod, container: Container) -> None:
        self._absence.forget(container.id)

    def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """Grants what the container's annotations ask for. Raises Refused."""
        ref = reference(pod, container)
        try:
            made = self._create(pod, container, ref)
        except GpufracError as error:
            raise self._reporter.refuse(ref, str(error)) from error
        if made is None:
            return Adjustment()
        self._absence.replaced(ref)
        return made

    def start_container(self, pod: Pod, container: Container) -> None:
        """Sets the container's hard limit on its cgroup and reads it back. Raises Refused."""
        ref = reference(pod, container)
        try:
            asks = contract.ask_of(pod.annotations, container.name, self._config.prefix) is not None
            if asks:
                self._start(ref, container)
        except GpufracError as error:
            raise self._reporter.refuse(ref, str(error)) from error
        self._reporter.started(ref, asks=asks)

    # --- for others ----------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Now and then: looks after sandboxes that ended without a word, and containers that run unenforced."""
        for sandbox in self._sandboxes.vanished(self._running_pods):
            log.info("a sandbox ended without a word of the runtime", pod=sandbox.name)
            self._stopped(sandbox.id, sandbox.uid)
        now_s = self._monotonic()
        if self._synchronized and now_s - self._compared_s >= COMPARE_S:
            self._compared_s = now_s
            self._find_lost()
        self._absence.tend(self._monotonic())

    def _find_lost(self) -> None:
        """Compares what the runtime has with what it told us."""
        try:
            listed = self._list_all()
        except GpufracError as error:
            self._uncompared = str(error)
            return
        self._uncompared = ""
        self._look_at_names(listed)
        found = lost(listed, self._running_pods(), self._asks, self._known)
        if found:
            self._observe()  # whose shares are whose is the kubelet's to say
        for pod, container in found:
            if not self._sandboxes.knows(pod.id):
                self.run_pod(pod)
            self._take_stock(pod, container)

    def _look_at_names(self, listed: Inventory) -> None:
        """Finds keys for containers that their pods don't have. All are known once those are made that the kubelet
        shows: init containers, which it does not show, come first."""
        made: dict[str, set[str]] = {}
        for container in listed[1]:
            made.setdefault(container.pod_id, set()).add(container.name)
        for pod in listed[0]:
            names = made.get(pod.id, set())
            if not any(key.startswith(self._config.prefix) for key in pod.annotations):
                continue
            shown = self._keeper.containers_of(pod.namespace, pod.name)
            if shown and names.issuperset(shown):
                self._reporter.look_at_keys(pod, self._config.prefix, names)

    def _asks(self, pod: Pod, container: Container) -> bool:
        """Whether its annotations ask for a GPU, well or not: then it must not run without us."""
        try:
            return contract.ask_of(pod.annotations, container.name, self._config.prefix) is not None
        except ContractError:
            return True

    def _known(self, pod: Pod, container: Container) -> Allocation | None:
        ref = reference(pod, container)
        return self._broker.of_container(ref) or shares.share_of(self._broker, ref, container)

    @property
    def report(self) -> FrontendReport:
        return FrontendReport(
            synchronized=self._synchronized,
            unguarded=self._unguarded,
            refusing=self._reporter.refusing,
            findings=self._reporter.findings,
            unenforced=self._absence.found,
            uncompared=self._uncompared,
            granted=self._reporter.granted,
            refused=self._reporter.refused,
        )

    def _stopped(self, sandbox_id: str, uid: str) -> None:
        with self._coming_and_going:
            uid = self._sandboxes.stop(sandbox_id, uid)
            if not uid:
                return
            self._broker.pod_stopped(uid)
        self._absence.pod_gone(uid)
        self._reporter.pod_gone(uid)

    def _observe(self, newer_than_s: float = FRESH_S) -> None:
        self._keeper.observe(newer_than_s)

    # --- creating ------------------------------------------------------------------------------------------------

    def _create(self, pod: Pod, container: Container, ref: ContainerRef) -> Adjustment | None:
        ask = contract.ask_of(pod.annotations, container.name, self._config.prefix)
        if ask is None:
            return self._of_share(pod, container, ref)
        self._check_names(container)
        if share := shares.share_of(self._broker, ref, container, self._observe):
            mode_given = f"{self._config.prefix}{ref.container}{contract.MODE}" in pod.annotations
            shares.check_isolation(share, _isolation(pod, container))
            new = shares.lower(self._broker, share, ask, mode_given=mode_given)
            return lowered(self._attached(new)[0], by_cdi=self._by_cdi, settable=self._broker.hard.settable)
        wanted = structs.replace(self._resolved(ref, ask), isolation=_isolation(pod, container))
        if any(self._broker.is_idle(gpu) for gpu in wanted.gpus):
            self._observe()  # it may have been given to somebody else as a whole
        self._check_trust(wanted)
        outcome = self._broker.allocate_container(wanted, by_cdi=self._by_cdi, recheck=self._keeper.recheck)
        if isinstance(outcome, Refusal):
            raise GpufracError(outcome.text)
        if text := reduced(outcome):
            self._reporter.reduced(ref, text)
        return self._adjust(*self._attached(outcome))

    def _of_share(self, pod: Pod, container: Container, ref: ContainerRef) -> Adjustment | None:
        """Where the runtime lets a pod override its CDI device, what that says, once more and last."""
        kept_apart = _isolation(pod, container)
        if not self._delivers and kept_apart == isolation.SHARED:
            return None
        share = shares.share_of(self._broker, ref, container, self._observe)
        if share is None:
            if shares.is_ours(container):
                raise GpufracError("it holds a share, and whose that is can't be told yet")
            return None
        shares.check_isolation(share, kept_apart)
        if not self._delivers:
            return None
        self._check_names(container)
        return lowered(self._attached(share)[0], by_cdi=False, settable=self._broker.hard.settable)

    def _check_names(self, container: Container) -> None:
        """A variable that stands twice can't be overridden but by a CDI device: of two, this adjusts the first and the
        last one holds (containerd 2.1.9)."""
        if self._by_cdi:
            return
        names = Counter(entry.partition("=")[0] for entry in container.env)
        twice = sorted(name for name, count in names.items() if count > 1 and name.startswith(RESERVED_ENV))
        if twice:
            raise GpufracError(f"its environment has {', '.join(twice)[:200]} twice: set it once, or not at all")

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

    def _believed(self, ref: ContainerRef, ask: Ask) -> ContainerAsk:
        """What a container that is there already asks for, if its list of GPUs is believed."""
        wanted = self._resolved(ref, ask)
        if reason := distrust(self._config, wanted, self._broker.reserved):
            raise GpufracError(reason)
        return wanted

    def _check_trust(self, ask: ContainerAsk) -> None:
        held = self._broker.of_container(ask.container)
        if held is not None and not held.adopted and set(held.gpus) == set(ask.gpus):
            return  # believed when it was first made, and its reservation may have been made anew since
        reason = distrust(self._config, ask, self._broker.reserved)
        if reason and self._config.trust is TrustPolicy.KAI_RESERVATION:
            self._observe()  # its reservation may be younger than our last look
            reason = distrust(self._config, ask, self._broker.reserved)
        if reason:
            raise GpufracError(reason)

    def _attached(self, allocation: Allocation) -> Grant:
        """Waits until what it holds now may start."""
        hopeless = self._broker.absence or allocation.gpus in self._in_vain
        grant = self._keeper.wait_attached(allocation.key, RETRY_ATTACH_S if hopeless else self._attach_s)
        if grant is None:
            self._in_vain.add(allocation.gpus)
            reason = self._broker.waits_for(allocation.key) or "its CDI file is being written"
            raise GpufracError(f"it is granted, but may not start yet: {reason}")
        self._in_vain.discard(allocation.gpus)
        if self._by_cdi:
            self._pause(CDI_SETTLE_S)
        return grant

    def _adjust(self, allocation: Allocation, way: Way) -> Adjustment:
        return adjustment(
            allocation,
            *way,
            writable=self._broker.config.mps.writable_mount,
            by_cdi=self._by_cdi,
            settable=self._broker.hard.settable,
        )

    # --- starting ------------------------------------------------------------------------------------------------

    def _start(self, ref: ContainerRef, container: Container) -> None:
        planned = self._broker.of_container(ref)
        planned = planned or shares.share_of(self._broker, ref, container, self._observe)
        key = container.variable(render.MARKER)
        if planned is None or planned.runs_unenforced:
            raise GpufracError("it was created while gpufrac was not there, so it has no limit: it must be made again")
        if key != planned.key:
            # What a runtime does not know of an answer it drops in silence, such as CDI devices (containerd 1.7.24).
            shown = render.is_key(key) if key else False
            raise GpufracError(
                f"it was created without what gpufrac gave it (its {render.MARKER} is {key if shown else 'not ours'}): "
                "it must be made again; if that goes on, the container runtime does not apply it"
            )
        allocation = self._broker.as_started(planned)
        if allocation.enforcement is not Enforcement.HARD:
            return
        directory = cgroup_directory(self._broker.cgroup_root, container.cgroups_path)
        if not directory:
            raise GpufracError(
                f"the runtime names no cgroup of it that is understood: {container.cgroups_path[:200]!r}"
            )
        deadline_s = self._monotonic() + self._start_s
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
            self._pause(START_PAUSE_S)

    # --- what started without us ---------------------------------------------------------------------------------

    def _take_stock(self, pod: Pod, container: Container) -> None:
        """Looks at one container that is there already."""
        ref = reference(pod, container)
        try:
            ask = contract.ask_of(pod.annotations, container.name, self._config.prefix)
            if ask is None or shares.share_of(self._broker, ref, container) is not None:
                return  # what becomes of shares is the keeper's to look after
            kept_apart = _isolation(pod, container)
            self._absence.judge(
                self._broker,
                self._by_cdi,
                ref,
                container,
                lambda: structs.replace(self._believed(ref, ask), isolation=kept_apart),
            )
        except ContractError as error:
            self._absence.note(ref, container, f"it runs without a limit, as its annotations can't be used: {error}")


def _isolation(pod: Pod, container: Container) -> isolation.Isolation:
    return isolation.of_container(pod.runtime_handler, user_namespace=container.user_namespace)


def reference(pod: Pod, container: Container) -> ContainerRef:
    """A container by its pod."""
    return ContainerRef(namespace=pod.namespace, pod=pod.name, pod_uid=pod.uid, container=container.name)
