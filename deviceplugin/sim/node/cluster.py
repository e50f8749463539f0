"""The cluster's own scheduler on a simulated node: what `placement` decides, done through the stub kubelet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from deviceplugin.sim.kubelet.kubelet import StubKubelet
from deviceplugin.sim.kubelet.pod import AdmittedPod, Phase
from deviceplugin.sim.objects.pods import PodSpec
from deviceplugin.sim.runtime.container import Container
from deviceplugin.sim.scheduling import placement
from deviceplugin.sim.scheduling.placement import Lack, Offer
from mpsd.config.model import Resource

STALE_S = 30.0
"""How long a list may take to show what was granted last. A real node status lags by up to 10 s on an idle machine."""


class ClusterScheduler:
    """Gives pods to the node that fit on it. State: the pods and lists of the kubelet, and nothing else.

    Args:
        ours: the resources of the plugin under test.
        reasons: why each of them has no more to give, as the plugin's status says.
    """

    def __init__(
        self, kubelet: StubKubelet, ours: Sequence[Resource], reasons: Callable[[], Mapping[str, str]]
    ) -> None:
        self._kubelet, self._ours, self._reasons = kubelet, tuple(ours), reasons

    def admit(
        self, pod: PodSpec, bind: Callable[[PodSpec], AdmittedPod], others: Mapping[str, Offer] | None = None
    ) -> AdmittedPod:
        """Binds a pod that fits; one that does not has phase Pending, and is not kept. A pod with a nodeName was never
        a scheduler's: its kubelet gets it.

        Args:
            bind: has the kubelet admit it, maybe after another scheduler has written its annotations.
            others: what device plugins offer that are not here.
        """
        if pod.node:
            return self._served(bind(pod))
        if (pending := self._pending(pod, others)) is not None:
            return pending
        admitted = bind(pod)
        if not admitted.short:
            return self._served(admitted)
        # Granted a moment ago to the pod before, and not in the list yet.
        self._kubelet.wait_until(lambda: bool(self._lacks(pod, others)), STALE_S)
        if (pending := self._pending(pod, others)) is None:
            return admitted
        self._kubelet.delete(admitted)
        return pending

    def _served(self, pod: AdmittedPod) -> AdmittedPod:
        if pod.phase is Phase.ADMITTED:
            pod.unserved = {
                container.spec.name: unserved
                for container in pod.containers
                if (unserved := tuple(name for name in container.spec.resources if name not in container.devices))
            }
        return pod

    def _lacks(self, pod: PodSpec, others: Mapping[str, Offer] | None) -> tuple[Lack, ...]:
        return placement.lacks(pod, self._offers(others or {}), self._ours)

    def _pending(self, pod: PodSpec, others: Mapping[str, Offer] | None) -> AdmittedPod | None:
        lacks = self._lacks(pod, others)
        if not lacks and not pod.claims:
            return None
        reasons = self._reasons() if lacks else {}
        lacks = tuple(replace(lack, offer=replace(lack.offer, reason=reasons.get(lack.resource, ""))) for lack in lacks)
        return waiting(pod, placement.message(pod, lacks, self._ours), lacks)

    def _offers(self, others: Mapping[str, Offer]) -> dict[str, Offer]:
        taken = placement.requested(pod.spec for pod in self._kubelet.pods() if pod.phase is Phase.ADMITTED)
        shown = {name: Offer(seen.allocatable, seen.capacity) for name, seen in self._kubelet.resources.items()}
        return {name: replace(offer, requested=taken.get(name, 0)) for name, offer in {**others, **shown}.items()}


def waiting(pod: PodSpec, message: str, lacks: Sequence[Lack] = ()) -> AdmittedPod:
    """A pod that no scheduler has given to the node."""
    return AdmittedPod(
        pod,
        "",
        tuple(Container(container, reason="") for container in pod.containers),
        phase=Phase.PENDING,
        reason=placement.UNSCHEDULABLE,
        message=message,
        lacks=tuple(lacks),
    )
