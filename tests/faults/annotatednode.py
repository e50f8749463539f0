"""mpsd and plugin as processes, and a container runtime over NRI whose pods are the test's."""

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from deviceplugin.nri.model import Container, ContainerState, Pod
from deviceplugin.sim.runtime.nri import NriError, NriRuntime
from deviceplugin.sim.runtime.nvidia import write_nvidia_spec
from deviceplugin.status import metrics
from deviceplugin.status.model import PluginStatus
from mpsd.sim.driver import KUBEPODS, SimulatedDriver
from mpsd.sim.model import gpu_uuid
from tests.e2e.pluginnode import PluginNode, kill
from tests.waiting import WAIT_S

SHARE = "gpufrac.dev/gpu-8gi"
SHARES = f"\n  - {{name: {SHARE}, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}}}\n"
MORE = """
annotations: {{gpus: {{include: all}}, share: true, trust: {trust}, shortfall: refuse}}
nri: {{socket: {root}/nri.sock}}
"""
PREFIX = "nvidia.com/container"
PATIENT = {"deviceplugin.nri.session.ANSWER_S": 0.9 * WAIT_S}
"""A runtime that waits, and a plugin that makes use of it: a late answer is no fault of any test here."""


class AnnotatedNode:
    """Two GPUs with driver r615. Everything that runs on it is ended by `close`.

    Args:
        constants: see PluginNode.
    """

    def __init__(self, root: Path, trust: str = "any", constants: Mapping[str, float] | None = None) -> None:
        self.root = root
        values = PATIENT | dict(constants or {})
        self.plugin = PluginNode(root, 2, SHARES, MORE.format(root=root, trust=trust), "615.71.09", constants=values)
        self.driver = SimulatedDriver(self.plugin.mpsd.simulation)
        self.socket = f"{root}/nri.sock"
        self.pods: dict[str, tuple[Pod, Container]] = {}
        self._count = 0
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.plugin.close)

    def start(self) -> None:
        for hooked in (False, True):
            write_nvidia_spec(str(self.root / "cdi"), [gpu_uuid(0), gpu_uuid(1)], memory_hook=hooked)
        self.start_runtime()
        self.plugin.kubelet.start()
        self.mpsd = self.plugin.mpsd.start()
        self.plugin.mpsd.until_ready()
        self.process = self.plugin.start_plugin()
        self.plugin.until(lambda: self.plugin.allocatable(SHARE) > 0)
        self.until_ready()

    def start_runtime(self) -> None:
        self.runtime = NriRuntime(self.socket, request_timeout_s=WAIT_S, inventory=self._inventory)
        self.runtime.start()
        self._stack.callback(self.runtime.close)

    def _inventory(self) -> tuple[list[Pod], list[Container]]:
        """What has ended is not shown."""
        running = [container for _, container in self.pods.values() if container.state is ContainerState.RUNNING]
        return [pod for pod, _ in self.pods.values()], running

    def kill_plugin(self) -> None:
        kill(self.process)

    def start_plugin(self) -> None:
        self.process = self.plugin.start_plugin()
        self.until_ready()

    def kill_mpsd(self) -> None:
        self.mpsd.send_signal(signal.SIGKILL)
        self.mpsd.wait()
        self.until(lambda s: s.mpsd_error)

    def start_mpsd_alone(self) -> None:
        """Without waiting for the plugin to hear of it."""
        self.mpsd = self.plugin.mpsd.start()

    def start_mpsd(self) -> None:
        self.start_mpsd_alone()
        self.until(lambda s: not s.mpsd_error)

    def until(self, condition: Callable[[PluginStatus], object]) -> PluginStatus:
        return self.plugin.until_status(condition)

    def until_ready(self) -> PluginStatus:
        return self.until(lambda s: s.annotated is not None and s.annotated.readiness == "True")

    def metrics(self) -> str:
        """What a scrape would give."""
        return metrics.render(self.plugin.status())

    def ask(
        self,
        gpu: int | Sequence[int] = 0,
        mode: str = "sm-sharing",
        limit: str = "8Gi",
        containers: Sequence[str] = ("main",),
    ) -> tuple[Pod, Container]:
        """A pod each of whose containers asks for a part of a GPU, or of several, and the first one; its sandbox is
        made."""
        self._count += 1
        name = f"p{self._count}"
        named = ",".join(map(gpu_uuid, [gpu] if isinstance(gpu, int) else gpu))
        values = {"gpu-memory.limit": limit, "gpu-compute.mode": mode, "gpus.devices": named}
        annotations = {f"{PREFIX}.{one}.{key}": value for one in containers for key, value in values.items()}
        pod = Pod(id=f"s-{name}", name=name, uid=f"uid-{name}", namespace="ns", annotations=annotations, pid=1)
        cgroups_path = f"{KUBEPODS.removesuffix('.slice')}-pod{name}.slice:cri-containerd:{name}"
        (self.root / "kubelet" / "pods" / pod.uid).mkdir(parents=True, exist_ok=True)
        self.runtime.run_pod(pod)
        return pod, Container(id=name, pod_id=pod.id, name=containers[0], cgroups_path=cgroups_path)

    def another(self, container: Container, name: str) -> Container:
        """Another container of the same pod."""
        path = f"{container.cgroups_path}-{name}"
        return structs.replace(container, id=f"{container.id}-{name}", name=name, cgroups_path=path)

    def end(self, pod: Pod) -> None:
        """The container of a pod that was made last ends, and its sandbox stays."""
        _, container = self.pods[pod.name]
        self.pods[pod.name] = (pod, structs.replace(container, state=ContainerState.STOPPED))
        self.runtime.stop_container(pod, container)

    def make(self, pod: Pod, container: Container) -> str:
        """Creates and starts it, and tries until that is allowed, as the kubelet does; its pod's name."""
        self.plugin.until(lambda: not self._refusal(pod, container))
        return pod.name

    def until_refused(self, pod: Pod, container: Container, said: str) -> None:
        """Tries until that is the reason why it may not start. What is made meanwhile fails the test."""

        def refused() -> bool:
            text = self._refusal(pod, container)
            assert text, "it was made"
            return said in text

        self.plugin.until(refused)

    def _refusal(self, pod: Pod, container: Container) -> str:
        """Tries to create and to start it once. Why it is refused, empty where it runs now."""
        try:
            given = self.runtime.create_container(pod, container)
            env = tuple(f"{name}={value}" for name, value in given.env)
            assert any(entry.startswith("GPUFRAC_ALLOCATION=") for entry in env), "it would run without its limit"
            made = structs.replace(container, state=ContainerState.RUNNING, env=env)
            slices, _, name = container.cgroups_path.split(":")
            self.driver.make_cgroup(f"{KUBEPODS}/{slices}/cri-containerd-{name}.scope")
            self.runtime.start_container(pod, made)
        except NriError as refused:
            return str(refused)
        self.pods[pod.name] = (pod, made)
        return ""

    def stop(self, pod: Pod) -> None:
        """Its sandbox and its directory go."""
        self.runtime.stop_pod(pod)
        self.runtime.remove_pod(pod)
        (self.root / "kubelet" / "pods" / pod.uid).rmdir()

    def holders(self) -> dict[str, str]:
        """Pod -> key of what it holds."""
        return {a.pod: a.key for a in self.plugin.status().allocations}

    def close(self) -> None:
        self._stack.close()
