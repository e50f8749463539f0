"""The stand-in for KAI Scheduler on a simulated node: what `schedule` decides, done through the stub kubelet."""

import uuid
from collections.abc import Callable, Iterable, Sequence

from deviceplugin.annotated.contract import DEVICES
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.sim.kubelet.devicemanager import Held
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from deviceplugin.sim.kubelet.pod import AdmittedPod, Phase
from deviceplugin.sim.objects.annotations import INPUTS, SCHEDULER, is_fractional
from deviceplugin.sim.objects.manifests import LoadedPod
from deviceplugin.sim.objects.pods import NODE_NAME, PodSpec
from deviceplugin.sim.runtime.container import Container, State
from deviceplugin.sim.scheduling import admission, fractions, values
from deviceplugin.sim.scheduling.admission import DeniedError
from deviceplugin.sim.scheduling.fractions import Group, Unschedulable
from deviceplugin.sim.scheduling.placement import Offer, dealt, requests
from mpsd.common.errors import ConfigError

RESERVE_S = 40.0
"""How long a reservation pod may take to start, as with KAI."""
GPU_RESOURCE = values.RESERVED_RESOURCE


class Scheduler:
    """Places fractional pods on the node's GPUs. State: the pods of the kubelet, and nothing else.

    Args:
        gpus: UUIDs of the GPUs that NVIDIA's device plugin would offer.
        gpu_mib: size of each.
        gpu_kind: CDI kind by which devices are named; empty where the runtime goes by NVIDIA_VISIBLE_DEVICES.
    """

    def __init__(
        self,
        kubelet: StubKubelet,
        *,
        gpus: Sequence[str],
        gpu_mib: int,
        prefix: str,
        gpu_kind: str,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self._kubelet, self._gpus, self._gpu_mib = kubelet, tuple(gpus), gpu_mib
        self._prefix, self._gpu_kind, self._new_id = prefix, gpu_kind, new_id

    def takes(self, pod: PodSpec) -> bool:
        """Whether it is this scheduler's by name and asks for a fraction."""
        return pod.scheduler == SCHEDULER and is_fractional(pod, self._prefix)

    def admit(self, pod: PodSpec) -> AdmittedPod:
        """Places and admits a pod; one that fits nowhere has phase Pending, and is not kept.

        Raises DeniedError, and PodError when a pod of that name is there.
        """
        pod = admission.admitted(pod, self._prefix)
        node = self._node()
        placement = fractions.place(pod, node, lambda gpu: self._new_id(), self._prefix)
        if isinstance(placement, Unschedulable):
            return _pending(pod, placement)
        bound = fractions.bound(pod, placement, node, self._prefix, cdi=bool(self._gpu_kind))
        if isinstance(bound, Unschedulable):
            return _pending(pod, bound)
        for group in placement.new:
            if trouble := self._reserve(group):
                self.sync()
                return _pending(pod, Unschedulable(trouble, reason="BindingError"))
        return self._kubelet.admit(bound)

    def whole_offer(self) -> Offer:
        """What NVIDIA's device plugin, which is beside this scheduler, offers of whole GPUs."""
        return Offer(len(self._gpus), len(self._gpus))

    def admit_whole(self, pod: PodSpec) -> AdmittedPod:
        """Admits a pod for which whole GPUs are free, as NVIDIA's device plugin would: it knows of no shares."""
        pods = self._present()
        chosen = self._idle(pods)[: requests(pod)[GPU_RESOURCE]]
        given = {name: {GPU_RESOURCE: self._held(*gpus)} for name, gpus in dealt(pod, GPU_RESOURCE, chosen).items()}
        admitted = self._kubelet.admit(pod, given)
        if shared := [gpu for gpu in chosen if self._used(gpu, pods)]:
            admitted.notes.append(
                f"{', '.join(shared)}: shared by gpufrac, too, which NVIDIA's device plugin does not know of: keep the "
                "GPUs of resources and those of schedulers apart (`annotations.gpus`, without `annotations.share`)"
            )
        return admitted

    def sync(self) -> None:
        """Removes reservation pods that keep a GPU for nobody."""
        pods = {pod.spec.full_name: pod for pod in self._present()}
        for spec in fractions.vacated([pod.spec for pod in pods.values()]):
            self._kubelet.delete(pods[spec.full_name])

    @property
    def groups(self) -> tuple[Group, ...]:
        """The GPUs shared now."""
        return self._node().groups

    @property
    def size_mib(self) -> int:
        """What may be booked on each GPU."""
        return self._node().size_mib

    def _node(self) -> fractions.Node:
        node = fractions.Node(NODE_NAME, self._gpu_mib)
        pods = self._present()
        groups = fractions.groups_of((pod.spec for pod in pods), node, self._prefix)
        return fractions.Node(NODE_NAME, self._gpu_mib, tuple(self._idle(pods)), groups)

    def _idle(self, pods: Sequence[AdmittedPod]) -> list[str]:
        """GPUs that no pod has whole: neither one that asked for it nor one that keeps it for fractions."""
        kept = {gpu for pod in pods for container in pod.containers for gpu in container.devices.get(GPU_RESOURCE, ())}
        return sorted((gpu for gpu in self._gpus if gpu not in kept), key=lambda gpu: self._used(gpu, pods))

    def _held(self, *gpus: str) -> Held:
        answer = pb.ContainerAllocateResponse()
        if self._gpu_kind:
            for gpu in gpus:
                answer.cdi_devices.add(name=f"{self._gpu_kind}={gpu}")
        else:
            answer.envs["NVIDIA_VISIBLE_DEVICES"] = ",".join(gpus)
        return Held({-1: gpus}, answer.SerializeToString())

    def _used(self, gpu: str, pods: Iterable[AdmittedPod]) -> bool:
        """Whether somebody uses it whom the scheduler does not see: such a GPU is chosen last."""
        return any(
            identifier.startswith(gpu)
            for pod in pods
            for container in pod.containers
            for ids in container.devices.values()
            for identifier in ids
        ) or any(gpu in value for pod in pods for key, value in pod.spec.annotations.items() if key.endswith(DEVICES))

    def _present(self) -> list[AdmittedPod]:
        return [pod for pod in self._kubelet.pods() if pod.phase is Phase.ADMITTED]

    def _reserve(self, group: Group) -> str:
        """Has a reservation pod keep a GPU. Why it could not, empty when it does."""
        spec = fractions.reservation(group, NODE_NAME, self._prefix)
        pod = self._kubelet.admit(spec, {fractions.RESERVATION_CONTAINER: {GPU_RESOURCE: self._held(group.gpu)}})
        self._kubelet.wait_settled([pod], RESERVE_S)
        (container,) = pod.containers
        if container.state is not State.RUNNING:
            self._kubelet.delete(pod)
            return f"reservation pod {spec.full_name} did not start: {container.reason}: {container.message}"
        pod.spec = fractions.reserving(pod.spec, group.gpu)
        return ""


def denials(pods: Iterable[LoadedPod], prefix: str) -> list[str]:
    """Why KAI's admission would not take those of these pods that are KAI's, one line each."""
    found: dict[str, None] = {}
    for loaded in pods:
        pod = loaded.pod
        asks = any(key in INPUTS or key.startswith((prefix, values.PORTION_PREFIX)) for key in pod.annotations)
        if asks and pod.scheduler == SCHEDULER:
            try:
                admission.admitted(pod, prefix)
            except DeniedError as error:
                found[f"{loaded.source}: pod {pod.full_name}: KAI's admission denied the request: {error}"] = None
    return list(found)


def check(pods: Iterable[LoadedPod], prefix: str) -> None:
    """Raises ConfigError where KAI's admission would not take some of these pods."""
    if problems := denials(pods, prefix):
        raise ConfigError("\n".join(problems))


def _pending(pod: PodSpec, why: Unschedulable) -> AdmittedPod:
    containers = tuple(Container(container, reason="") for container in pod.containers)
    message = f"{why.message} {why.detail}".strip()
    return AdmittedPod(pod, "", containers, phase=Phase.PENDING, reason=why.reason, message=message)
