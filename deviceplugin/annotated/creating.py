"""A container that is being created: what its annotations ask for is granted, and put into it.

Here it can still be kept from being made without its limit: every doubt refuses, with its reason, and the kubelet tries
again.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Protocol

from deviceplugin.annotated import contract, devices, shares
from deviceplugin.annotated.adjust import RESERVED_ENV, adjustment, lowered
from deviceplugin.annotated.contract import Ask
from deviceplugin.annotated.inventory import isolation_of
from deviceplugin.annotated.reasons import AnnotationCode, RefusedError
from deviceplugin.annotated.shares import FRESH_S
from deviceplugin.annotated.trust import distrust
from deviceplugin.grants.broker import Broker
from deviceplugin.nri.model import Adjustment, Container, Pod
from deviceplugin.nri.runtimes import Traits
from deviceplugin.plan.allocation import Allocation, ContainerAsk, ContainerRef, Refusal
from deviceplugin.plan.annotated import shortfall
from deviceplugin.plan.start import Grant
from mpsd.common.reason import Reason
from mpsd.config.model import AnnotationsConfig, TrustPolicy

ATTACH_S = 0.7
"""How long a creation waits until its container may start, where the runtime has its default patience. Every container
operation of the node waits with it."""
RETRY_ATTACH_S = 0.05
"""The same where the last one waited in vain: each is tried again and again, and others wait with it each time."""
CDI_SETTLE_S = 0.01
"""Between the writing of a CDI file and its use: a runtime has to notice it. Of 100 files each, 25 were not seen in
time after 0 ms, at most 1 after 1 ms and none after 5 ms (containerd 2.1.9)."""


class Keeper(Protocol):
    """What is asked of the keeper."""

    def observe(self, newer_than_s: float = 0.0) -> bool: ...
    def recheck(self, *, release: bool = True) -> None: ...
    def wait_attached(self, key: str, timeout_s: float) -> Grant | None: ...
    def held_back(self, key: str) -> Reason | None: ...
    def containers_of(self, namespace: str, pod: str) -> Collection[str]: ...


class Creator:
    """Calls come one at a time.

    Args:
        on_shortfall: told of a container that gets less than it asks for, and why.
    """

    def __init__(
        self,
        broker: Broker,
        config: AnnotationsConfig,
        keeper: Keeper,
        on_shortfall: Callable[[ContainerRef, str], None],
        pause: Callable[[float], object],
    ) -> None:
        self._broker, self._config, self._keeper = broker, config, keeper
        self._on_shortfall, self._pause = on_shortfall, pause
        self._in_vain: set[tuple[str, ...]] = set()
        """GPUs on which the last container waited in vain."""

    def create(self, ref: ContainerRef, pod: Pod, container: Container, runtime: Traits) -> Adjustment | None:
        """What changes in the container, None where nothing does. Raises GpufracError where it must not be made now."""
        ask = contract.ask_of(pod.annotations, container.name, self._config.prefix)
        if ask is None:
            return self._of_share(ref, pod, container, runtime)
        _check_names(container, runtime)
        share = shares.share_of(self._broker, ref, container, self._keeper.observe)
        if share is not None:
            return self._of_lowered_share(ref, pod, container, runtime, share, ask)
        infos, kept_apart = [gpu.info for gpu in self._broker.node.gpus], isolation_of(pod, container)
        wanted = devices.container_ask(ref, ask, infos, prefix=self._config.prefix, isolation=kept_apart)
        if any(self._broker.is_idle(gpu) for gpu in wanted.gpus):
            self._keeper.observe(FRESH_S)  # it may have been given to somebody else as a whole
        self._check_trust(wanted)
        outcome = self._broker.allocate_container(
            wanted, by_cdi=runtime.takes_cdi, lasting=self._lasting(ref), recheck=self._keeper.recheck
        )
        if isinstance(outcome, Refusal):
            raise RefusedError(outcome.code, outcome.message)
        if text := shortfall(outcome):
            self._on_shortfall(ref, text)
        allocation, way = self._attached(outcome, runtime)
        return adjustment(
            allocation,
            *way,
            writable=self._broker.node.config.mps.writable_mount,
            by_cdi=runtime.takes_cdi,
            settable=self._broker.node.hard.settable,
        )

    def _lasting(self, ref: ContainerRef) -> Collection[str]:
        """Its pod's containers but for plain init containers, where that matters and the kubelet tells."""
        if not self._broker.has_turns_over(ref):
            return ()
        if not (shown := self._keeper.containers_of(ref.namespace, ref.pod)):
            self._keeper.observe()  # the pod may be younger than the last look
            shown = self._keeper.containers_of(ref.namespace, ref.pod)
        return shown

    def _of_lowered_share(
        self, ref: ContainerRef, pod: Pod, container: Container, runtime: Traits, share: Allocation, ask: Ask
    ) -> Adjustment:
        """Annotations on a container that holds a share: they may lower its limit."""
        mode_given = f"{self._config.prefix}{ref.container}{contract.MODE}" in pod.annotations
        shares.check_isolation(share, isolation_of(pod, container))
        new = shares.lower(self._broker, share, ask, mode_given=mode_given)
        allocation, _ = self._attached(new, runtime)
        return lowered(allocation, by_cdi=runtime.takes_cdi, settable=self._broker.node.hard.settable)

    def _of_share(self, ref: ContainerRef, pod: Pod, container: Container, runtime: Traits) -> Adjustment | None:
        """Where the runtime lets a pod override its CDI device, what that says, once more and last."""
        kept_apart = isolation_of(pod, container)
        if not runtime.pods_win and kept_apart is None:
            return None
        share = shares.share_of(self._broker, ref, container, self._keeper.observe)
        if share is None:
            if shares.is_ours(container):
                text = "it holds a share, and whose that is can't be told yet"
                raise RefusedError(AnnotationCode.SHARE_NOT_KNOWN, text)
            return None
        shares.check_isolation(share, kept_apart)
        if not runtime.pods_win:
            return None
        _check_names(container, runtime)
        allocation, _ = self._attached(share, runtime)
        return lowered(allocation, by_cdi=False, settable=self._broker.node.hard.settable)

    def _check_trust(self, ask: ContainerAsk) -> None:
        held = self._broker.of_container(ask.container)
        if held is not None and not held.adopted and set(held.gpus) == set(ask.gpus):
            return  # believed when it was first made, and its reservation may have been made anew since
        reason = distrust(self._config, ask, self._broker.node.reserved)
        if reason and self._config.trust is TrustPolicy.KAI_RESERVATION:
            self._keeper.observe(FRESH_S)  # its reservation may be younger than our last look
            reason = distrust(self._config, ask, self._broker.node.reserved)
        if reason:
            raise RefusedError(AnnotationCode.NOT_TRUSTED, reason)

    def _attached(self, allocation: Allocation, runtime: Traits) -> Grant:
        """Waits until what it holds now may start."""
        hopeless = self._broker.node.absence or allocation.gpus in self._in_vain
        timeout_s = RETRY_ATTACH_S if hopeless else ATTACH_S * runtime.patience
        grant = self._keeper.wait_attached(allocation.key, timeout_s)
        if grant is None:
            self._in_vain.add(allocation.gpus)
            waits = self._broker.waits_for(allocation.key) or self._keeper.held_back(allocation.key)
            reason = waits or "its CDI file is being written"
            text = f"it is granted, but may not start yet: {reason}"
            raise RefusedError(AnnotationCode.NOT_ATTACHED, text)
        self._in_vain.discard(allocation.gpus)
        if runtime.takes_cdi:
            self._pause(CDI_SETTLE_S)
        return grant


def _check_names(container: Container, runtime: Traits) -> None:
    """A variable that stands twice can't be overridden but by a CDI device: of two, this adjusts the first and the last
    one holds (containerd 2.1.9)."""
    if runtime.takes_cdi:
        return
    names = Counter(entry.partition("=")[0] for entry in container.env)
    twice = sorted(name for name, count in names.items() if count > 1 and name.startswith(RESERVED_ENV))
    if twice:
        text = f"its environment has {', '.join(twice)[:200]} twice: set it once, or not at all"
        raise RefusedError(AnnotationCode.VARIABLE_TWICE, text)
