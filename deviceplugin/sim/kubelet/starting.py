"""How the stub kubelet has a pod's containers made and started, and when it tries again."""

import os
import random
from collections.abc import Callable, Mapping

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.sim.kubelet.devicemanager import DeviceManager, Held, PluginError
from deviceplugin.sim.kubelet.pod import START_ERROR, AdmittedPod, Phase
from deviceplugin.sim.objects.pods import Role
from deviceplugin.sim.runtime.container import Container, CreateContainerError, StartContainerError, State
from deviceplugin.sim.runtime.runtime import Runtime

BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.05, 1.0
"""Pauses between tries to create a container. A real kubelet's last one is longer (6 s were seen)."""


class Starter:
    """Starts what may start.

    Args:
        pods_directory: a directory for each pod is made below it.
        rng: decides what a real kubelet leaves to chance.
    """

    def __init__(
        self, runtime: Runtime, pods_directory: str, rng: random.Random, monotonic: Callable[[], float]
    ) -> None:
        self._runtime, self._rng, self._monotonic = runtime, rng, monotonic
        self._pods_directory = pods_directory

    def advance(self, devices: DeviceManager, pod: AdmittedPod) -> float | None:
        """Starts what may start. Seconds until it is worth trying again, None when all run."""
        with pod.lock:
            if pod.phase is not Phase.ADMITTED:
                return None
            waits: list[float] = []
            for container in pod.containers:
                if container.state is State.WAITING:
                    wait_s = self._try(devices, pod, container)
                    if wait_s is not None:
                        waits.append(wait_s)
                        if container.spec.role is not Role.APP:
                            break  # what comes after has to wait for it
                if pod.stuck:
                    break
            return min(waits, default=None)

    def _try(self, devices: DeviceManager, pod: AdmittedPod, container: Container) -> float | None:
        now_s = self._monotonic()
        if now_s < container.retry_at_s:
            return container.retry_at_s - now_s
        held = devices.held(pod.uid, container.spec.name)
        # Made before each creation, for the termination message.
        os.makedirs(os.path.join(self._pods_directory, pod.uid, "containers", container.spec.name), exist_ok=True)
        try:
            self._runtime.run_sandbox(pod.spec, pod.uid)
            _pre_start(devices, held)
            answers = [pb.ContainerAllocateResponse.FromString(slot.answer) for slot in held.values()]
            self._rng.shuffle(answers)
            created = self._runtime.create(pod.spec, pod.uid, container.spec, answers)
            container.id = created.id
            to_completion = container.spec.role is Role.INIT
            process, env = self._runtime.start(created, to_completion=to_completion)
        except CreateContainerError as error:
            return self._failed(pod, container, error, now_s)
        container.process, container.process_env, container.edits = process, env, created.edits
        container.reason = container.message = ""
        container.refused_since_s = None
        container.state = State.RUNNING
        if to_completion:
            process.wait()
            self._runtime.end((), pod.uid, container.spec.name)
            container.state, container.reason = State.TERMINATED, "Completed"
        return None

    def _failed(
        self, pod: AdmittedPod, container: Container, error: CreateContainerError, now_s: float
    ) -> float | None:
        """A container could not be created or started. Seconds until it is tried again, None for never."""
        same = (container.reason, container.message)
        container.message = str(error)
        if isinstance(error, StartContainerError):
            container.reason = "RunContainerError"
            if pod.spec.restart_policy == "Never":
                container.state, container.reason = State.TERMINATED, START_ERROR
                return None
        else:
            container.reason = "CreateContainerError"
        if not error.refused:
            container.refused_since_s = None
        elif container.refused_since_s is None or same != (container.reason, container.message):
            container.refused_since_s = now_s
        container.backoff_s = min(BACKOFF_LAST_S, container.backoff_s * 1.5 or BACKOFF_FIRST_S)
        container.retry_at_s = now_s + container.backoff_s
        return container.backoff_s


def again(container: Container) -> None:
    """A container whose process has ended is to be made anew."""
    container.state, container.reason, container.message = State.WAITING, "ContainerCreating", ""
    container.restarts += 1
    container.retry_at_s = container.backoff_s = 0.0
    container.refused_since_s = None


def _pre_start(devices: DeviceManager, held: Mapping[str, Held]) -> None:
    for resource, slot in held.items():
        endpoint = devices.endpoint(resource)
        if endpoint is None or not endpoint.options.pre_start_required:
            continue
        try:
            endpoint.pre_start(sorted(slot.ids))
        except PluginError as error:
            raise CreateContainerError(f"device plugin PreStartContainer rpc failed with err: {error}") from error
