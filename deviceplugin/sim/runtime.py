"""What the stub kubelet's container runtime does: resolve CDI devices, ask NRI plugins, start a process, end it.

A container is one idle process in a session of its own. Its environment is exactly the container's, plus what stands
for the kernel's isolation on a simulated node (GPUFRAC_SIM_*). With a simulated driver it is also in a cgroup of its
own there, which holds whatever becomes of its environment. Everything in that, or with the pod's UID in its
environment, counts as the container's.

Of OCI hooks one is acted on: the container toolkit's `apply-cuda-memory-limits` (see `apply_memory_limits`).

Creation and start are two steps, as in CRI. What kubelet and runtime say when one fails is spelled as kubelet 1.36.2
with containerd 2.1.9 was seen to, but without the runtime's name: it may stand for another one.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from cdi.encode import encode_spec
from cdi.errors import CdiError
from cdi.inject import OciSpec, apply, effective_env
from cdi.model import ContainerEdits, Device, DeviceNode, Hook, Spec
from cdi.registry import MEMORY_HOOK, Registry
from cdi.scan import scan
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.nri import model as nri
from deviceplugin.sim.adjust import ConflictError, adjusted
from deviceplugin.sim.nri import NriError
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec, environment
from deviceplugin.sim.processes import processes_where
from deviceplugin.sim.sandboxes import NriFactory, Sandboxes, container_keys
from mpsd.common.errors import TransientError
from mpsd.gpu.backend import GpuError
from mpsd.gpu.model import MIB
from mpsd.sim.cgroups import Confinement
from mpsd.sim.driver import KUBEPODS, SimulatedDriver
from mpsd.sim.gpus import SimulatedBackend

NVIDIA_MAJOR, NVIDIA_UVM_MAJOR = 195, 510
NVIDIA_KIND, DEVICE_PLUGIN_KIND = "nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu"
"""Kinds of whole GPUs: the container toolkit's, and the device plugin's, which alone carries the memory hook."""
MEMORY_REQUEST, MEMORY_LIMIT = "NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT"
"""MiB, whole numbers: what the memory hook reads."""
TERMINATION_GRACE_S = 2.0
HOOK_TIMEOUT_S = 10.0
"""Ends a hook whose driver call hangs. The real one has no timeout."""

_TOOLKIT = "/usr/bin/nvidia-ctk"
_SCOPE_PREFIX = "cri-containerd"
_NOT_CREATED = "failed to create container"
_NO_TASK = "failed to create task: failed to create shim task: OCI runtime create failed"
_MAX_MIB = (1 << 64) // MIB - 1
_NONE_VISIBLE = frozenset(("", "void", "none"))


class CreateContainerError(TransientError):
    """A container can't be created now; the kubelet tries again. The text is what the runtime says.

    `refused`: an NRI plugin refused it.
    """

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class StartContainerError(CreateContainerError):
    """A container was created and can't be started: it has ended. The kubelet makes another one by restartPolicy."""


class State(StrEnum):
    WAITING = "Waiting"
    RUNNING = "Running"
    TERMINATED = "Terminated"


@dataclass(frozen=True, slots=True)
class Edits:
    """What a container gets: its whole env, mounts as (container path, host path, options), device nodes, and the hooks
    that run before its process starts."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    device_nodes: tuple[Mapping[str, Any], ...] = ()
    cdi_devices: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Created:
    """A container that was created and not started yet."""

    id: str
    pod_uid: str
    name: str
    edits: Edits


@dataclass(slots=True, eq=False)
class Container:
    """A container of an admitted pod. `reason` and `message` say why it waits; `refused_since_s` since when an NRI
    plugin has said so, in the same words."""

    spec: ContainerSpec
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    state: State = State.WAITING
    reason: str = "ContainerCreating"
    message: str = ""
    refused_since_s: float | None = None
    id: str = ""
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


def oci_spec(
    registry: Registry, answer: pb.ContainerAllocateResponse, pod_env: Mapping[str, str], *, cdi_wins: bool = True
) -> tuple[OciSpec, tuple[str, ...]]:
    """What a runtime makes of a plugin's answer, and the CDI devices in it (pure). Environment: Allocate's, then the
    pod spec's, then CDI's; a name may be there several times, and the last one wins.

    Args:
        cdi_wins: False: CDI's goes first, and each name is there once, as with CRI-O before 1.34.

    Raises CdiError when a device can't be resolved or injected.
    """
    own = {**answer.envs, **pod_env}
    spec: OciSpec = {
        "process": {
            "env": [f"{name}={value}" for env in (dict(answer.envs), pod_env) for name, value in env.items()]
            if cdi_wins
            else []
        },
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
        "annotations": dict(answer.annotations),
    }
    names = tuple(device.name for device in answer.cdi_devices)
    made = apply(registry, names, spec)
    if not cdi_wins:
        made["process"]["env"] = [f"{name}={value}" for name, value in {**effective_env(made), **own}.items()]
    return made, names


def edits_of(spec: OciSpec, cdi_devices: Iterable[str]) -> Edits:
    """What a container gets by its OCI spec (pure)."""
    return Edits(
        env=effective_env(spec),
        mounts=tuple((m["destination"], m["source"], tuple(m.get("options") or ())) for m in spec["mounts"]),
        device_nodes=tuple(spec["linux"]["devices"]),
        cdi_devices=tuple(cdi_devices),
        annotations=dict(spec["annotations"]),
        hooks=tuple((spec.get("hooks") or {}).get("createRuntime") or ()),
    )


class Runtime:
    """Creates and ends containers. Outlives the stub kubelet's restarts, as a container runtime does.

    Args:
        cdi_directories: lowest priority first.
        gpus: UUIDs by index: `/dev/nvidia<index>` is that GPU.
        nvidia_runtime: whether the nvidia runtime is there as well and makes devices from NVIDIA_VISIBLE_DEVICES.
        nvidia_hook: whether with these it injects the memory hook, as from container toolkit 1.20.1 on.
        simulation_directory: of the simulated driver, for CUDA clients; empty for none.
        nri: makes its side of NRI; None: it has none.
        nri_cdi: whether it knows the CDI devices of NRI adjustments; an older one drops them in silence.
        cdi_wins: whether the environment of a CDI device stands against the pod's.
    """

    def __init__(
        self,
        cdi_directories: Sequence[str],
        gpus: Sequence[str] = (),
        *,
        nvidia_runtime: bool = True,
        nvidia_hook: bool = False,
        simulation_directory: str = "",
        nri: NriFactory | None = None,
        nri_cdi: bool = True,
        cdi_wins: bool = True,
    ) -> None:
        self._cdi_wins, self._nvidia_hook = cdi_wins, nvidia_hook
        self._cdi_directories = tuple(cdi_directories)
        self._gpus = tuple(gpus)
        self._nvidia_runtime = nvidia_runtime
        self._simulation_directory = simulation_directory
        self._nri_cdi = nri_cdi
        self._sleep = shutil.which("sleep", path="/usr/bin:/bin") or "/bin/sleep"
        self.sandboxes = Sandboxes(nri)

    def run_sandbox(self, pod: PodSpec, uid: str) -> nri.Pod:
        """A pod's sandbox, made where it has none. Raises CreateContainerError."""
        try:
            return self.sandboxes.run(pod, uid, f"/{_cgroup_path(uid)}")
        except NriError as error:
            raise CreateContainerError(f"NRI RunPodSandbox failed: {_rpc(error)}", refused=True) from error

    def create(
        self, pod: PodSpec, uid: str, container: ContainerSpec, answers: Iterable[pb.ContainerAllocateResponse] = ()
    ) -> Created:
        """Creates a container, and its pod's sandbox where there is none. The CDI directories are read now.

        Raises CreateContainerError.
        """
        sandbox = self.run_sandbox(pod, uid)
        registry = scan(self._cdi_directories)
        try:
            own = environment(pod, container, uid)
            spec, names = oci_spec(registry, merged_answer(answers), own, cdi_wins=self._cdi_wins)
        except CdiError as error:
            raise CreateContainerError(f"CDI device injection failed: {error}") from error
        identifier = self.sandboxes.new_id(uid, container.name)
        asked = self._as_told(sandbox, container, spec, identifier, user_namespace=not pod.host_users)
        with self.sandboxes.creating():
            try:
                adjustment = self.sandboxes.create(asked)
                if not self._nri_cdi:
                    adjustment = msgspec.structs.replace(adjustment, cdi_devices=())
                spec = adjusted(spec, adjustment, registry)
            except (NriError, ConflictError, CdiError) as error:
                self.sandboxes.undo(asked)
                if isinstance(error, CdiError):
                    text = f"failed to NRI-adjust container Spec: CDI device injection failed: {error}"
                else:
                    said = _rpc(error) if isinstance(error, NriError) else error
                    text = f"failed to get NRI adjustment for container: {said}"
                raise CreateContainerError(f"{_NOT_CREATED}: {text}", refused=isinstance(error, NriError)) from error
            told = self._as_told(sandbox, container, spec, asked.id, user_namespace=not pod.host_users)
            self.sandboxes.created(told)
        return Created(asked.id, uid, container.name, edits_of(spec, (*names, *adjustment.cdi_devices)))

    def start(self, created: Created, *, to_completion: bool) -> "tuple[subprocess.Popen[bytes], dict[str, str]]":
        """Starts the process of a container in a cgroup of its own; with `to_completion` one that ends by itself.

        Raises StartContainerError.
        """
        edits, where = created.edits, (created.pod_uid, created.id)
        try:
            cgroup = self._make_cgroup(*where, edits)
            try:
                for number, hook in enumerate((*edits.hooks, *self._injected_hooks(edits))):
                    self._run_hook(number, hook, edits.env, cgroup)
                self._ask_start(created.id)
                process, env = self._spawn(created, to_completion=to_completion)
            except StartContainerError:
                self._remove_cgroup(*where)
                raise
        except StartContainerError:
            self.sandboxes.stopped(created.pod_uid, created.name)
            raise
        if cgroup:
            self._driver.cgroups.add(cgroup, process.pid)
        self.sandboxes.started(created.id, process)
        return process, env

    def end(self, processes: "Iterable[subprocess.Popen[bytes]]", uid: str, container: str = "") -> None:
        """Ends a pod's processes (or one container's) and removes their cgroups. As with a real runtime, no limit is
        cleared before."""
        identifier = self.sandboxes.newest(uid, container) if container else ""
        cgroup = self._cgroup(uid, identifier) if identifier or not container else ""
        terminate(processes, uid, container, lambda: self._driver.cgroups.members(cgroup) if cgroup else [])
        if cgroup:
            self._driver.cgroups.remove(cgroup)
        self.sandboxes.stopped(uid, container)

    def remove(self, uid: str) -> None:
        """Forgets a pod whose processes have ended."""
        self.sandboxes.remove(uid)

    def enter(self, uid: str, container: str, pid: int) -> None:
        """Makes a process one of a container's, as `kubectl exec` does. Raises FileNotFoundError where that is gone."""
        if not self._simulation_directory:
            return
        identifier = self.sandboxes.newest(uid, container)
        if not identifier:
            raise FileNotFoundError("there is no such container")
        self._driver.cgroups.add(self._cgroup(uid, identifier), pid)

    def _as_told(
        self, pod: nri.Pod, container: ContainerSpec, spec: OciSpec, identifier: str, *, user_namespace: bool
    ) -> nri.Container:
        """A container as plugins are told of it. CDI devices of the kubelet's are not named (containerd 2.1.9)."""
        labels, annotations = container_keys(pod, container.name, identifier)
        return nri.Container(
            id=identifier,
            pod_id=pod.id,
            name=container.name,
            labels=labels,
            annotations={**spec["annotations"], **annotations},
            args=(self._sleep, "infinity"),
            env=tuple(spec["process"]["env"]),
            mounts=tuple(
                nri.Mount(m["destination"], m["source"], m.get("type") or "", tuple(m.get("options") or ()))
                for m in spec["mounts"]
            ),
            cgroups_path=f"{_slice(pod.uid)}:{_SCOPE_PREFIX}:{identifier}",
            user_namespace=user_namespace,
        )

    def _ask_start(self, identifier: str) -> None:
        try:
            self.sandboxes.starting(identifier)
        except NriError as error:
            raise StartContainerError(f"NRI container start failed: {_rpc(error)}", refused=True) from error

    @property
    def _driver(self) -> SimulatedDriver:
        return SimulatedDriver(self._simulation_directory)

    def _cgroup(self, uid: str, identifier: str) -> str:
        """Directory of a container's cgroup, or its pod's; empty without a simulated driver."""
        if not self._simulation_directory:
            return ""
        return os.path.join(self._driver.cgroups.root, _cgroup_path(uid, identifier))

    def _make_cgroup(self, uid: str, identifier: str, edits: Edits) -> str:
        if not self._simulation_directory:
            return ""
        try:
            cgroup = self._driver.make_cgroup(_cgroup_path(uid, identifier))
        except OSError as error:
            raise StartContainerError(f"failed to create task: cannot make its cgroup: {error}") from error
        mounts = {inside: host for inside, host, _ in edits.mounts}
        for inside, host in mounts.items():
            if not os.path.exists(host):
                self._driver.cgroups.remove(cgroup)
                raise StartContainerError(
                    f"{_NO_TASK}: runc create failed: unable to start container process: error during container init: "
                    f'error mounting "{host}" to rootfs at "{inside}": stat {host}: no such file or directory'
                )
        self._driver.cgroups.confine(cgroup, Confinement(self._devices(edits), mounts))
        return cgroup

    def _remove_cgroup(self, uid: str, identifier: str) -> None:
        if cgroup := self._cgroup(uid, identifier):
            self._driver.cgroups.remove(cgroup)

    def _run_hook(self, number: int, hook: Mapping[str, Any], env: Mapping[str, str], cgroup: str) -> None:
        """Raises StartContainerError in runc's words."""
        arguments = list(hook.get("args") or ())
        if MEMORY_HOOK not in arguments or not cgroup:
            return
        try:
            apply_memory_limits(self._simulation_directory, _option(arguments, "--gpu-id"), env, cgroup)
        except HookError as error:
            raise StartContainerError(
                f"{_NO_TASK}: runc create failed: error running createRuntime hook #{number}: exit status 1, stdout: , "
                f"stderr: {error}"
            ) from error

    def _injected_hooks(self, edits: Edits) -> list[Mapping[str, Any]]:
        """Those that the nvidia runtime adds for the GPUs it makes itself."""
        uuids = self._made_by_nvidia_runtime(edits) if self._nvidia_hook else ()
        return [{"args": list(_memory_hook(uuid).args)} for uuid in uuids]

    def _spawn(self, created: Created, *, to_completion: bool) -> "tuple[subprocess.Popen[bytes], dict[str, str]]":
        env = {**created.edits.env, **self._isolation(created)}
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
            raise StartContainerError(f"failed to create task: {error}") from error
        return process, env

    def _isolation(self, created: Created) -> dict[str, str]:
        isolation = {
            "GPUFRAC_SIM_POD_UID": created.pod_uid,
            "GPUFRAC_SIM_CONTAINER": created.name,
            "GPUFRAC_SIM_DEVICES": ",".join(self._devices(created.edits)),
            "GPUFRAC_SIM_MOUNTS": json.dumps({inside: host for inside, host, _ in created.edits.mounts}),
        }
        if self._simulation_directory:
            isolation["GPUFRAC_SIM_DIRECTORY"] = self._simulation_directory
        return isolation

    def _devices(self, edits: Edits) -> list[str]:
        """The GPUs a container sees: those with device nodes, and those the nvidia runtime would add."""
        paths = {str(node.get("path")) for node in edits.device_nodes}
        given = {uuid for index, uuid in enumerate(self._gpus) if f"/dev/nvidia{index}" in paths}
        given.update(self._made_by_nvidia_runtime(edits))
        return [uuid for uuid in self._gpus if uuid in given]

    def _made_by_nvidia_runtime(self, edits: Edits) -> list[str]:
        visible = edits.env.get("NVIDIA_VISIBLE_DEVICES", "")
        if not self._nvidia_runtime or visible in _NONE_VISIBLE:
            return []
        asked = set(visible.split(","))
        return [u for i, u in enumerate(self._gpus) if "all" in asked or u in asked or str(i) in asked]


def _rpc(error: NriError) -> str:
    """As Go prints what a plugin answered."""
    return f"rpc error: code = Unknown desc = {error}"


class HookError(Exception):
    """A hook failed; the text is what it writes to stderr."""


def apply_memory_limits(simulation_directory: str, gpu: str, env: Mapping[str, str], cgroup: str) -> None:
    """What the container toolkit's hook does for one GPU: limits from the container's environment onto its cgroup.

    Without both variables it does nothing; without a request that equals the limit, without a limit there is none
    (container toolkit 1.20). Raises HookError.
    """
    if MEMORY_REQUEST not in env and MEMORY_LIMIT not in env:
        return
    if not SimulatedDriver(simulation_directory).cgroups.is_v2():
        raise HookError("setting GPU memory limits is only supported in cgroup v2")
    limit_mib = _mib(env, MEMORY_LIMIT)
    request_mib = _mib(env, MEMORY_REQUEST) if MEMORY_REQUEST in env else limit_mib
    if request_mib is None:
        request_mib = 0
    if limit_mib is not None and request_mib > limit_mib:
        raise HookError(f"memory request ({request_mib} MiB) exceeds memory limit ({limit_mib} MiB)")
    backend = SimulatedBackend(simulation_directory)
    watchdog = threading.Timer(HOOK_TIMEOUT_S, backend.close)
    watchdog.daemon = True
    watchdog.start()
    try:
        backend.open()
        hard_bytes = None if limit_mib is None else limit_mib * MIB
        backend.set_memory_limits(gpu, cgroup, request_mib * MIB, hard_bytes)
    except GpuError as error:
        raise HookError(f'failed to set memory limits for gpu "{gpu}": {error}') from error
    finally:
        watchdog.cancel()
        backend.close()


def _mib(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise HookError(f'failed to parse {name}: strconv.ParseUint: parsing "{text}": invalid syntax')
    if int(text) > _MAX_MIB:
        raise HookError(f"failed to parse {name}: value {text} exceeds the maximum of {_MAX_MIB} MiB")
    return int(text)


def _option(arguments: Sequence[str], name: str) -> str:
    """Value of `--name value` or `--name=value`, empty where it is missing."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if before == name:
            return argument
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return ""


def _slice(uid: str) -> str:
    """The slice of a pod, as the systemd cgroup driver names it."""
    return f"kubepods-pod{uid.replace('-', '_')}.slice"


def _cgroup_path(uid: str, identifier: str = "") -> str:
    """Of a container below the root, where runc puts `<slice>:<prefix>:<ID>`; without an ID that of the pod."""
    pod = f"{KUBEPODS}/{_slice(uid)}"
    return f"{pod}/{_SCOPE_PREFIX}-{identifier}.scope" if identifier else pod


def terminate(
    processes: "Iterable[subprocess.Popen[bytes]]",
    pod_uid: str,
    container: str = "",
    members: Callable[[], Iterable[int]] = tuple,
) -> None:
    """Ends a pod's processes (or one container's) and what was started in it: SIGTERM, after a grace SIGKILL.

    Args:
        members: those in its cgroup now.
    """
    children = list(processes)
    deadline_s = time.monotonic() + TERMINATION_GRACE_S
    number = signal.SIGTERM
    while True:
        alive = [child for child in children if child.poll() is None]
        known = {child.pid for child in children} | {os.getpid()}
        others = {*_processes_of(pod_uid, container), *members()} - known
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


def nvidia_spec(gpus: Sequence[str], *, memory_hook: bool = False) -> Spec:
    """The spec NVIDIA's container toolkit writes for GPUs (UUIDs by index): devices by index, by UUID, and `all`.

    Args:
        memory_hook: as its device plugin has it written, each GPU with the hook that sets its memory limits.
    """

    def edits(*indices: int) -> ContainerEdits:
        return ContainerEdits(
            device_nodes=tuple(
                DeviceNode(path=f"/dev/nvidia{index}", type="c", major=NVIDIA_MAJOR, minor=index) for index in indices
            ),
            hooks=tuple(_memory_hook(gpus[index]) for index in indices if memory_hook),
        )

    devices = [Device(name=str(index), container_edits=edits(index)) for index in range(len(gpus))]
    devices += [Device(name=uuid, container_edits=edits(index)) for index, uuid in enumerate(gpus)]
    devices.append(Device(name="all", container_edits=edits(*range(len(gpus)))))
    return Spec(
        kind=DEVICE_PLUGIN_KIND if memory_hook else NVIDIA_KIND,
        devices=tuple(devices),
        container_edits=ContainerEdits(
            env=("NVIDIA_VISIBLE_DEVICES=void",),
            device_nodes=(
                DeviceNode(path="/dev/nvidiactl", type="c", major=NVIDIA_MAJOR, minor=255),
                DeviceNode(path="/dev/nvidia-uvm", type="c", major=NVIDIA_UVM_MAJOR),
            ),
        ),
    )


def _memory_hook(uuid: str) -> Hook:
    return Hook(
        hook_name="createRuntime",
        path=_TOOLKIT,
        args=(os.path.basename(_TOOLKIT), "hook", MEMORY_HOOK, "--driver-root", "/", "--gpu-id", uuid),
    )


def write_nvidia_spec(directory: str, gpus: Sequence[str], *, memory_hook: bool = False) -> str:
    """Writes that spec into a CDI directory, as a whole; its path. Raises OSError."""
    spec = nvidia_spec(gpus, memory_hook=memory_hook)
    path = os.path.join(directory, f"{spec.kind.replace('/', '-')}.json")
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(encode_spec(spec))
    os.replace(temporary, path)
    return path
