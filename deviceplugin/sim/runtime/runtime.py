"""What the stub kubelet's container runtime does: resolve CDI devices, ask NRI plugins, start a process, end it.

A container is one idle process in a session of its own. Its environment is exactly the container's, plus what stands
for the kernel's isolation on a simulated node (GPUFRAC_SIM_*). With a simulated driver it is also in a cgroup of its
own there, which holds whatever becomes of its environment. Everything in that, or with the pod's UID in its
environment, counts as the container's.

Of OCI hooks one is acted on: the container toolkit's `apply-cuda-memory-limits` (see hooks.py).

Creation and start are two steps, as in CRI. What kubelet and runtime say when one fails is spelled as kubelet 1.36.2
with containerd 2.1.9 was seen to, but without the runtime's name: it may stand for another one.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cdi.errors import CdiError
from cdi.inject import OciSpec
from cdi.registry import MEMORY_HOOK
from cdi.scan import scan
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.nri import model as nri
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec, environment
from deviceplugin.sim.runtime.adjust import ConflictError, adjusted
from deviceplugin.sim.runtime.container import CreateContainerError, Created, StartContainerError
from deviceplugin.sim.runtime.edits import Edits, edits_of, merged_answer, oci_spec
from deviceplugin.sim.runtime.hooks import HookError, apply_memory_limits, option
from deviceplugin.sim.runtime.nri import NriError
from deviceplugin.sim.runtime.nvidia import memory_hook_of
from deviceplugin.sim.runtime.processes import terminate
from deviceplugin.sim.runtime.sandboxes import NriFactory, Sandboxes, container_keys
from mpsd.sim.cgroups import Confinement
from mpsd.sim.driver import KUBEPODS, SimulatedDriver

_SCOPE_PREFIX = "cri-containerd"
_NOT_CREATED = "failed to create container"
_NO_TASK = "failed to create task: failed to create shim task: OCI runtime create failed"
_NONE_VISIBLE = frozenset(("", "void", "none"))


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
            apply_memory_limits(self._simulation_directory, option(arguments, "--gpu-id"), env, cgroup)
        except HookError as error:
            raise StartContainerError(
                f"{_NO_TASK}: runc create failed: error running createRuntime hook #{number}: exit status 1, stdout: , "
                f"stderr: {error}"
            ) from error

    def _injected_hooks(self, edits: Edits) -> list[Mapping[str, Any]]:
        """Those that the nvidia runtime adds for the GPUs it makes itself."""
        uuids = self._made_by_nvidia_runtime(edits) if self._nvidia_hook else ()
        return [{"args": list(memory_hook_of(uuid).args)} for uuid in uuids]

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


def _slice(uid: str) -> str:
    """The slice of a pod, as the systemd cgroup driver names it."""
    return f"kubepods-pod{uid.replace('-', '_')}.slice"


def _cgroup_path(uid: str, identifier: str = "") -> str:
    """Of a container below the root, where runc puts `<slice>:<prefix>:<ID>`; without an ID that of the pod."""
    pod = f"{KUBEPODS}/{_slice(uid)}"
    return f"{pod}/{_SCOPE_PREFIX}-{identifier}.scope" if identifier else pod
