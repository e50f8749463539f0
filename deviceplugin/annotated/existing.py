"""Annotated containers that are there already: ours are known or taken in again, others are noted, and what they take
is counted by a record like any other.

The runtime makes containers without a plugin that does not answer in time, and one that is made while we are just being
told of all there are may be in no list (see lost.py).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from deviceplugin.annotated import contract, devices, shares
from deviceplugin.annotated.absence import CREATED_ALONE, STARTED_ALONE, Absence
from deviceplugin.annotated.contract import Ask, ContractError
from deviceplugin.annotated.inventory import isolation_of, reference
from deviceplugin.annotated.lost import lost
from deviceplugin.annotated.reporter import Reporter
from deviceplugin.annotated.shares import FRESH_S
from deviceplugin.annotated.trust import distrust
from deviceplugin.grants.broker import Broker
from deviceplugin.nri.model import Container, ContainerState, Inventory, Pod
from deviceplugin.plan import render
from deviceplugin.plan.allocation import Allocation, ContainerAsk, ContainerRef
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.marker import MARKER
from mpsd.common.processes import PodProcess
from mpsd.common.reason import Reason
from mpsd.config.model import AnnotationsConfig, Enforcement
from mpsd.gpu.model import MIB

log = get_logger("plugin")

RUNS = (ContainerState.CREATED, ContainerState.RUNNING, ContainerState.PAUSED)


class Keeper(Protocol):
    """What is asked of the keeper."""

    def observe(self, newer_than_s: float = 0.0) -> bool: ...
    def containers_of(self, namespace: str, pod: str) -> Collection[str]: ...


class ExistingContainers:
    """Looks at them; what becomes of those that run unenforced is `absence`'s.

    Args:
        running_pods: the pods that have processes, by UID, and these.
        list_all: all pods and containers that the runtime has, by another way than NRI; raises GpufracError.
    """

    def __init__(
        self,
        broker: Broker,
        config: AnnotationsConfig,
        keeper: Keeper,
        reporter: Reporter,
        absence: Absence,
        running_pods: Callable[[], Mapping[str, Sequence[PodProcess]]],
        list_all: Callable[[], Inventory],
    ) -> None:
        self._broker, self._config, self._keeper = broker, config, keeper
        self._reporter, self._absence = reporter, absence
        self._running_pods, self._list_all = running_pods, list_all
        self.uncompared = ""
        """Why what the runtime has can't be compared with what it told, empty when it can."""

    def look_at_all(self, containers: Sequence[tuple[Pod, Container]], *, by_cdi: bool) -> None:
        """At all that concern us; who is not among them is gone."""
        if containers:
            self._keeper.observe(FRESH_S)  # whose shares are whose is the kubelet's to say
        self._absence.begin()
        for pod, container in containers:
            self.look_at(pod, container, by_cdi=by_cdi)
        self._absence.end()

    def look_at(self, pod: Pod, container: Container, *, by_cdi: bool) -> None:
        """At one."""
        ref = reference(pod, container)
        try:
            ask = contract.ask_of(pod.annotations, container.name, self._config.prefix)
        except ContractError as error:
            reason = f"it runs without a limit, as its annotations can't be used: {error}"
            self._absence.note(ref, container, Reason(error.reason.code, reason))
            return
        if ask is None or shares.share_of(self._broker, ref, container) is not None:
            return  # what becomes of shares is the keeper's to look after
        if container.state in RUNS:
            self._judge(ref, ask, container, isolation_of(pod, container), by_cdi=by_cdi)

    def find_lost(self) -> list[tuple[Pod, Container]]:
        """Compares what the runtime has with what it told us: containers of which it told nothing."""
        try:
            listed = self._list_all()
        except GpufracError as error:
            self.uncompared = str(error)
            return []
        self.uncompared = ""
        self._look_at_names(listed)
        found = lost(listed, self._running_pods(), self._asks, self._held)
        if found:
            self._keeper.observe(FRESH_S)  # whose shares are whose is the kubelet's to say
        return found

    def _judge(
        self, ref: ContainerRef, ask: Ask, container: Container, kept_apart: Reason | None, *, by_cdi: bool
    ) -> None:
        """One of ours is known, or taken in again; another is noted, and what it takes is counted."""
        key = container.variable(MARKER)
        known = self._broker.of_container(ref)
        if known is not None and key == known.key and not known.runs_unenforced and _matches_plan(container, known):
            return
        # Any pod can set our marker: what it says is believed where what it is said of can be seen.
        named = key if key and render.is_key(key) and known is None else None
        seen = _mounts_daemon(container, self._broker.node.config.mps.run_root)
        try:
            allocation = self._broker.adopt_container(
                self._wanted(ref, ask, kept_apart), named, trusted=seen, by_cdi=by_cdi
            )
        except GpufracError as error:
            self._absence.note(
                ref, container, STARTED_ALONE.reworded(f"{STARTED_ALONE}; what it takes is not counted: {error}")
            )
            return
        enforced = allocation.enforcement is not Enforcement.NONE
        if allocation.key == key and enforced and _matches_plan(container, allocation):
            log.warning("adopted an annotated container without a record", container=str(ref), key=allocation.key)
            return
        created = container.state is ContainerState.CREATED
        self._absence.note(ref, container, CREATED_ALONE if created else STARTED_ALONE)

    def _wanted(self, ref: ContainerRef, ask: Ask, kept_apart: Reason | None) -> ContainerAsk:
        """What its annotations ask for. Raises GpufracError, also where its list of GPUs is not believed."""
        infos = [gpu.info for gpu in self._broker.node.gpus]
        wanted = devices.container_ask(ref, ask, infos, prefix=self._config.prefix, isolation=kept_apart)
        if reason := distrust(self._config, wanted, self._broker.node.reserved):
            raise GpufracError(reason)
        return wanted

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

    def _held(self, pod: Pod, container: Container) -> Allocation | None:
        """What it was granted."""
        ref = reference(pod, container)
        return self._broker.of_container(ref) or shares.share_of(self._broker, ref, container)


def _mounts_daemon(container: Container, run_root: str) -> bool:
    """Whether a container has what we mount of MPS daemons: no pod can have that by itself, but by our CDI device."""
    return any(
        mount.destination == render.CONTAINER_PIPE_DIRECTORY and mount.source.startswith(f"{run_root}/mps/")
        for mount in container.mounts
    )


def _matches_plan(container: Container, allocation: Allocation) -> bool:
    """Whether a container was started with the limit and mode of its plan. Compared as whole MiB, so that another
    version's spelling is no difference."""
    limit, mode = container.variable("GPUFRAC_MEMORY_LIMIT_BYTES"), container.variable("GPUFRAC_COMPUTE_MODE")
    if limit is None or not (limit.isascii() and limit.isdigit()):
        return False
    return int(limit) // MIB == allocation.limit_bytes // MIB and mode == str(allocation.mode)
