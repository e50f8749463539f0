"""The front end of pods described by annotations: what the container runtime tells over NRI, and what it is answered.

Creations and starts are the points where a container can still be kept from running without its limit (creating.py,
starting.py). What runs without us, as the runtime goes on when we do not answer, is found when we are told of all
containers again, and now and then (existing.py).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deviceplugin.annotated import contract, creating, existing, inventory, shares
from deviceplugin.annotated.absence import Absence, Unenforced
from deviceplugin.annotated.contract import Finding
from deviceplugin.annotated.creating import Creator
from deviceplugin.annotated.existing import ExistingContainers
from deviceplugin.annotated.inventory import isolation_of, reference, running_of
from deviceplugin.annotated.reporter import Refusing, Reporter, reason_of_error
from deviceplugin.annotated.sandboxes import Sandboxes
from deviceplugin.annotated.starting import Mpsd, Starter
from deviceplugin.grants.broker import Broker
from deviceplugin.grants.holders.turns import Instance
from deviceplugin.kubernetes.model import Events
from deviceplugin.nri.model import Adjustment, Container, Inventory, Pod, Runtime
from deviceplugin.nri.runtimes import Traits, starts_wait, traits
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.processes import PodProcess
from mpsd.config.model import AnnotationsConfig
from mpsd.events.teller import SILENT, Teller

log = get_logger("plugin")

COMPARE_S = 30.0
"""How often what the runtime has is compared with what it told."""


class Keeper(creating.Keeper, existing.Keeper, Protocol):
    """What is asked of the keeper."""


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
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Code -> how many creations and starts were refused for it."""


class AnnotatedFrontend:
    """A Handler of an NRI session, whose calls come one at a time. `tend` and `report` are for other threads.

    Args:
        mpsd: answers well within starting.START_S, or fails.
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
        teller: Teller = SILENT,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._broker, self._config = broker, config
        self._find_unguarded, self._on_change = unguarded, on_change
        self._running_pods, self._monotonic = running_pods, monotonic
        self._reporter = Reporter(events, teller, wall)
        self._absence = Absence(config.when_away, stop_container, restart_policy, events)
        self._creator = Creator(broker, config, keeper, self._reporter.reduced, pause)
        self._starter = Starter(broker, mpsd, keeper.observe, monotonic, pause)
        self._existing = ExistingContainers(
            broker, config, keeper, self._reporter, self._absence, running_pods, list_all
        )
        self._sandboxes = Sandboxes()
        self._coming_and_going = threading.Lock()
        """Sandboxes change and the broker hears of it in one step: two threads see them end."""
        self._runtime = Traits()
        self._synchronized, self._unguarded = False, ""
        self._compared_s = float("-inf")

    # --- what the runtime says -----------------------------------------------------------------------------------

    def concerns(self, pod: Pod, container: Container) -> bool:
        """Whether a creation or start needs us at all; pure and at once."""
        prefix = f"{self._config.prefix}{container.name}."
        annotated = any(key.startswith(prefix) for key in pod.annotations)
        special = self._runtime.pods_win or isolation_of(pod, container) is not None
        return annotated or (special and shares.key_of(container) is not None)

    def brief(self, pods: Sequence[Pod], containers: Sequence[Container]) -> Inventory:
        """Only what is looked at later; pure and at once."""
        return inventory.brief(self._config.prefix, pods, containers)

    def connected(self, runtime: Runtime) -> None:
        """A runtime is connected: what is known of it decides how containers get GPUs and limits."""
        self._runtime = traits(runtime)
        by_cdi = self._runtime.takes_cdi
        self._broker.set_runtime(starts_wait=starts_wait(runtime), takes_cdi=by_cdi)
        self._broker.set_cdi_loses(None)  # as we deliver the environment ourselves
        self._unguarded = self._find_unguarded(runtime)
        if self._unguarded:
            log.warning("containers that are made while gpufrac is away run without limits", reason=self._unguarded)
        log.info("the container runtime is there", runtime=f"{runtime.name} {runtime.version}", cdi=by_cdi)

    def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> None:
        """What is not in it is gone; what runs unenforced is found."""
        with self._coming_and_going:
            pids_tell = self._runtime.has_sandbox_processes
            alive = self._sandboxes.synchronize(pods, containers, pids_tell=pids_tell)
            uids = {pod.uid for pod in alive.values()}
            self._broker.observe_pods(uids)
        self._reporter.keep(uids)
        for pod in alive.values():
            self._reporter.look_at_keys(pod, self._config.prefix)
        self._broker.observe_containers(running_of(alive, containers))
        mine = [(alive[c.pod_id], c) for c in containers if c.pod_id in alive and self.concerns(alive[c.pod_id], c)]
        self._existing.look_at_all(mine, by_cdi=self._runtime.takes_cdi)
        self._synchronized = True
        self._on_change()

    def disconnected(self, reason: str) -> None:
        """The link is gone: nothing more is heard of pods, so none is taken to have ended."""
        self._broker.observe_pods(None)
        self._synchronized = False
        self._on_change()

    def run_pod(self, pod: Pod) -> None:
        """A sandbox was made."""
        with self._coming_and_going:
            self._sandboxes.run(pod)
            self._broker.pod_runs(pod.uid)
        self._reporter.look_at_keys(pod, self._config.prefix)

    def stop_pod(self, pod: Pod) -> None:
        """A sandbox was stopped."""
        self._stopped(pod.id, pod.uid)

    def remove_pod(self, pod: Pod) -> None:
        """A sandbox was removed."""
        self._stopped(pod.id, pod.uid)

    def stop_container(self, pod: Pod, container: Container) -> None:
        """A container has ended: what it holds may pass to another one of its pod."""
        self._broker.run_ended(container.id)

    def remove_container(self, pod: Pod, container: Container) -> None:
        """A container was removed: what was found of it is forgotten."""
        self._broker.run_ended(container.id)
        self._absence.forget(container.id)

    def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """Grants what the container's annotations ask for. Raises Refused."""
        ref = reference(pod, container)
        try:
            made = self._creator.create(ref, pod, container, self._runtime)
        except GpufracError as error:
            raise self._reporter.refuse(ref, reason_of_error(error)) from error
        if made is None:
            return Adjustment()
        self._broker.container_runs(Instance(container.id, ref.id, pod.id))
        self._absence.replaced(ref)
        return made

    def start_container(self, pod: Pod, container: Container) -> None:
        """Sets the container's hard limit on its cgroup and reads it back. Raises Refused."""
        ref = reference(pod, container)
        try:
            asks = contract.ask_of(pod.annotations, container.name, self._config.prefix) is not None
            if asks:
                self._starter.start(ref, container, self._runtime.patience)
        except GpufracError as error:
            raise self._reporter.refuse(ref, reason_of_error(error)) from error
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
        for pod, container in self._existing.find_lost():
            if not self._sandboxes.knows(pod.id):
                self.run_pod(pod)
            self._existing.look_at(pod, container, by_cdi=self._runtime.takes_cdi)

    @property
    def report(self) -> FrontendReport:
        """For status and the node's condition."""
        return FrontendReport(
            synchronized=self._synchronized,
            unguarded=self._unguarded,
            refusing=self._reporter.refusing,
            findings=self._reporter.findings,
            unenforced=self._absence.found,
            uncompared=self._existing.uncompared,
            granted=self._reporter.granted,
            refusals=self._reporter.refusals,
        )

    def _stopped(self, sandbox_id: str, uid: str) -> None:
        self._broker.run_ended(sandbox_id)
        with self._coming_and_going:
            uid = self._sandboxes.stop(sandbox_id, uid)
            if not uid:
                return
            self._broker.pod_stopped(uid)
        self._absence.pod_gone(uid)
        self._reporter.pod_gone(uid)
