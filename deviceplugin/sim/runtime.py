"""What the stub kubelet's container runtime does: resolve CDI devices, start a process, end it.

A container is one idle process in a session of its own. Its environment is exactly the container's, plus what stands
for the kernel's isolation on a simulated node (GPUFRAC_SIM_*). Everything with that pod's UID in its environment counts
as the container's, as everything in its cgroup would.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cdi.encode import encode_spec
from cdi.errors import CdiError
from cdi.inject import apply, effective_env
from cdi.model import ContainerEdits, Device, DeviceNode, Spec
from cdi.registry import Registry, scan
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.sim.pods import ContainerSpec
from deviceplugin.sim.processes import processes_where
from mpsd.errors import TransientError

NVIDIA_MAJOR, NVIDIA_UVM_MAJOR = 195, 510
NVIDIA_SPEC = "nvidia.com-gpu.json"
TERMINATION_GRACE_S = 2.0
_NONE_VISIBLE = frozenset(("", "void", "none"))


class CreateContainerError(TransientError):
    """A container can't be created now; the kubelet tries again. The text is what the runtime says."""


class State(StrEnum):
    WAITING = "Waiting"
    RUNNING = "Running"
    TERMINATED = "Terminated"


@dataclass(frozen=True, slots=True)
class Edits:
    """What a container gets: its whole env, mounts as (container path, host path, options), and device nodes."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    device_nodes: tuple[Mapping[str, Any], ...] = ()
    cdi_devices: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Container:
    """A container of an admitted pod. `reason` and `message` say why it waits."""

    spec: ContainerSpec
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    state: State = State.WAITING
    reason: str = "ContainerCreating"
    message: str = ""
    edits: Edits | None = None
    process: "subprocess.Popen[bytes] | None" = None
    process_env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    retry_at_s: float = 0.0
    backoff_s: float = 0.0

    @property
    def pid(self) -> int | None:
        """PID of its process, None when there is none or it has ended."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None


def merged_answer(answers: Iterable[pb.ContainerAllocateResponse]) -> pb.ContainerAllocateResponse:
    """Answers of several resources as one: the first writer of an env, mount, device or annotation wins (verified)."""
    merged = pb.ContainerAllocateResponse()
    seen_mounts: set[str] = set()
    seen_devices: set[str] = set()
    seen_names: set[str] = set()
    for answer in answers:
        for name, value in answer.envs.items():
            if name not in merged.envs:
                merged.envs[name] = value
        for name, value in answer.annotations.items():
            if name not in merged.annotations:
                merged.annotations[name] = value
        for mount in answer.mounts:
            if mount.container_path not in seen_mounts:
                seen_mounts.add(mount.container_path)
                merged.mounts.append(mount)
        for device in answer.devices:
            if device.container_path not in seen_devices:
                seen_devices.add(device.container_path)
                merged.devices.append(device)
        for cdi in answer.cdi_devices:
            if cdi.name not in seen_names:
                seen_names.add(cdi.name)
                merged.cdi_devices.append(cdi)
    return merged


def resolve(registry: Registry, answer: pb.ContainerAllocateResponse, pod_env: Mapping[str, str]) -> Edits:
    """What a runtime makes of a plugin's answer: Allocate env, then the pod spec's, then CDI; the last one wins (pure).

    Raises CdiError when a device can't be resolved or injected.
    """
    env = {**dict(answer.envs), **pod_env}
    spec: dict[str, Any] = {
        "process": {"env": [f"{name}={value}" for name, value in env.items()]},
        "mounts": [
            {
                "destination": mount.container_path,
                "source": mount.host_path,
                "type": "bind",
                "options": ["rbind", "rprivate", "ro" if mount.read_only else "rw"],
            }
            for mount in answer.mounts
        ],
        "linux": {"devices": [{"path": device.container_path} for device in answer.devices]},
    }
    names = tuple(device.name for device in answer.cdi_devices)
    applied = apply(registry, names, spec)
    return Edits(
        env=effective_env(applied),
        mounts=tuple((m["destination"], m["source"], tuple(m.get("options") or ())) for m in applied["mounts"]),
        device_nodes=tuple(applied["linux"]["devices"]),
        cdi_devices=names,
        annotations=dict(answer.annotations),
    )


class Runtime:
    """Creates and ends containers. Outlives the stub kubelet's restarts, as a container runtime does.

    Args:
        cdi_directories: lowest priority first.
        gpus: UUIDs by index: `/dev/nvidia<index>` is that GPU.
        nvidia_runtime: whether the nvidia runtime is there as well and makes devices from NVIDIA_VISIBLE_DEVICES.
        simulation_directory: of the simulated driver, for CUDA clients; empty for none.
    """

    def __init__(
        self,
        cdi_directories: Sequence[str],
        gpus: Sequence[str] = (),
        *,
        nvidia_runtime: bool = True,
        simulation_directory: str = "",
    ) -> None:
        self._cdi_directories = tuple(cdi_directories)
        self._gpus = tuple(gpus)
        self._nvidia_runtime = nvidia_runtime
        self._simulation_directory = simulation_directory
        self._sleep = shutil.which("sleep", path="/usr/bin:/bin") or "/bin/sleep"

    def resolve(self, answers: Iterable[pb.ContainerAllocateResponse], pod_env: Mapping[str, str]) -> Edits:
        """Reads the CDI directories now. Raises CreateContainerError."""
        try:
            return resolve(scan(self._cdi_directories), merged_answer(answers), pod_env)
        except CdiError as error:
            raise CreateContainerError(f"CDI device injection failed: {error}") from error

    def start(
        self, pod_uid: str, container: str, edits: Edits, *, to_completion: bool
    ) -> "tuple[subprocess.Popen[bytes], dict[str, str]]":
        """Starts the process of a container; with `to_completion` one that ends by itself at once.

        Raises CreateContainerError.
        """
        env = {**edits.env, **self._isolation(pod_uid, container, edits)}
        try:
            process = subprocess.Popen(
                [self._sleep, "0" if to_completion else "infinity"],
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a NUL in the environment
            raise CreateContainerError(f"failed to create containerd task: {error}") from error
        return process, env

    def _isolation(self, pod_uid: str, container: str, edits: Edits) -> dict[str, str]:
        isolation = {
            "GPUFRAC_SIM_POD_UID": pod_uid,
            "GPUFRAC_SIM_CONTAINER": container,
            "GPUFRAC_SIM_DEVICES": ",".join(self._devices(edits)),
            "GPUFRAC_SIM_MOUNTS": json.dumps({inside: host for inside, host, _ in edits.mounts}),
        }
        if self._simulation_directory:
            isolation["GPUFRAC_SIM_DIRECTORY"] = self._simulation_directory
        return isolation

    def _devices(self, edits: Edits) -> list[str]:
        """The GPUs a container sees: those with device nodes, and those the nvidia runtime would add."""
        paths = {str(node.get("path")) for node in edits.device_nodes}
        given = {uuid for index, uuid in enumerate(self._gpus) if f"/dev/nvidia{index}" in paths}
        visible = edits.env.get("NVIDIA_VISIBLE_DEVICES", "")
        if self._nvidia_runtime and visible not in _NONE_VISIBLE:
            asked = set(visible.split(","))
            given |= {u for i, u in enumerate(self._gpus) if "all" in asked or u in asked or str(i) in asked}
        return [uuid for uuid in self._gpus if uuid in given]


def terminate(processes: "Iterable[subprocess.Popen[bytes]]", pod_uid: str, container: str = "") -> None:
    """Ends a pod's processes (or one container's) and what was started in it: SIGTERM, after a grace SIGKILL."""
    children = list(processes)
    deadline_s = time.monotonic() + TERMINATION_GRACE_S
    number = signal.SIGTERM
    while True:
        alive = [child for child in children if child.poll() is None]
        others = [pid for pid in _processes_of(pod_uid, container) if pid not in {child.pid for child in children}]
        if not alive and not others:
            return
        if time.monotonic() >= deadline_s:
            number = signal.SIGKILL
        for pid in (*(child.pid for child in alive), *others):
            _signal(pid, number)
        for child in alive:
            try:
                child.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        if others:
            _PAUSE.wait(0.02)


_PAUSE = threading.Event()  # never set: a pause between two looks at processes that are not our children


def _processes_of(pod_uid: str, container: str) -> list[int]:
    """Processes that carry the pod's (and container's) marks in their environment."""
    marks = [f"GPUFRAC_SIM_POD_UID={pod_uid}".encode()]
    if container:
        marks.append(f"GPUFRAC_SIM_CONTAINER={container}".encode())
    return processes_where(lambda env: all(mark in env for mark in marks))


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def nvidia_spec(gpus: Sequence[str]) -> Spec:
    """The spec NVIDIA's container toolkit writes for GPUs (UUIDs by index): devices by index, by UUID, and `all`."""

    def nodes(*indices: int) -> ContainerEdits:
        return ContainerEdits(
            device_nodes=tuple(
                DeviceNode(path=f"/dev/nvidia{index}", type="c", major=NVIDIA_MAJOR, minor=index) for index in indices
            )
        )

    devices = [Device(name=str(index), container_edits=nodes(index)) for index in range(len(gpus))]
    devices += [Device(name=uuid, container_edits=nodes(index)) for index, uuid in enumerate(gpus)]
    devices.append(Device(name="all", container_edits=nodes(*range(len(gpus)))))
    return Spec(
        kind="nvidia.com/gpu",
        devices=tuple(devices),
        container_edits=ContainerEdits(
            env=("NVIDIA_VISIBLE_DEVICES=void",),
            device_nodes=(
                DeviceNode(path="/dev/nvidiactl", type="c", major=NVIDIA_MAJOR, minor=255),
                DeviceNode(path="/dev/nvidia-uvm", type="c", major=NVIDIA_UVM_MAJOR),
            ),
        ),
    )


def write_nvidia_spec(directory: str, gpus: Sequence[str]) -> str:
    """Writes that spec into a CDI directory, as a whole; its path. Raises OSError."""
    path = os.path.join(directory, NVIDIA_SPEC)
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(encode_spec(nvidia_spec(gpus)))
    os.replace(temporary, path)
    return path
