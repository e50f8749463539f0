"""A node for tests of the plugin: real mpsd and plugin processes, a stub kubelet in this process, one directory."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from deviceplugin.plan.allocation import Allocation
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from deviceplugin.sim.kubelet.pod import AdmittedPod
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec, Role
from deviceplugin.sim.runtime.nri import NriRuntime
from deviceplugin.status.model import PluginStatus
from mpsd.common.errors import GpufracError
from mpsd.localapi.call import call
from mpsd.sim.model import gpu_uuid
from tests.e2e.mpsdnode import ROOT, MpsdNode, end
from tests.waiting import WAIT_S

SMALL, BIG, UNITS, SLICED = (f"gpufrac.dev/{name}" for name in ("gpu-8gi", "gpu-40gi", "memory-gib", "sliced-8gi"))
RESOURCES = f"""
  - {{name: {SMALL}, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}}}
  - {{name: {BIG}, memory: {{request: 39Gi}}, compute: {{mode: sm-sharing}}}}
  - {{name: {UNITS}, unit: 1Gi, compute: {{mode: sm-sharing}}}}
  - {{name: {SLICED}, memory: {{request: 8Gi}}, compute: {{mode: time-slicing}}, enforcement: none}}
"""
GRACE_S = 1.0
"""The release grace of these plugins: the shipped one would make every test wait 15 s."""
_RUN = """
import sys; sys.path.insert(0, {root!r})
from importlib import import_module
from deviceplugin.reconcile import hardlimits, keeper
from deviceplugin.grants.holders import pods, shares
shares.ABSENT_S, shares.ABSENT_AFTER_RESTART_S = {grace}, 3 * {grace}
pods.GONE_S = {grace}
keeper.OBSERVE_S, keeper.SETTLE_S = 0.3, 0.1
hardlimits.VERIFIED_S = 0.6
for name, value in {constants!r}.items():
    setattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2], value)
from deviceplugin.app import run
sys.exit(run({path!r}))
"""


class PluginNode:
    """Everything that runs on it is ended by `close`.

    Args:
        more: further sections of the config.
        runtime_sockets: the stub kubelet's container runtime takes NRI plugins at `nri.sock`, and stops containers that
            it is asked to at `cri.sock`.
        root_dir: the kubelet's --root-dir, below `root`; its directory for device plugins does not follow it.
        constants: the plugin's process has these values, by module and name, such as `deviceplugin.keeper.OBSERVE_S`.
    """

    def __init__(
        self,
        root: Path,
        gpus: int = 2,
        resources: str = RESOURCES,
        more: str = "",
        driver: str = "",
        *,
        runtime_sockets: bool = False,
        root_dir: str = "kubelet",
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self.root = root
        self._more, self._driver, self._constants = more, driver, dict(constants or {})
        self.mpsd = MpsdNode(root, gpus)
        self.kubelet_root, self.device_plugins = root / root_dir, root / "kubelet" / "device-plugins"
        self.config = root / "config.yaml"
        self.write_config(resources)
        (root / "cdi").mkdir()
        self.kubelet = StubKubelet(
            self.kubelet_root,
            [str(root / "cdi")],
            device_plugins=str(self.device_plugins),
            gpus=[gpu_uuid(index) for index in range(gpus)],
            simulation_directory=self.mpsd.simulation,
            nri=(lambda inventory: NriRuntime(f"{root}/nri.sock", inventory=inventory)) if runtime_sockets else None,
            cri_socket=f"{root}/cri.sock" if runtime_sockets else "",
            rng=random.Random(7),
        )
        self._count = 0
        self._stack = contextlib.ExitStack()

    def write_config(self, resources: str = RESOURCES) -> None:
        """Replaces the config in one step."""
        gpus = ", ".join(["{memory: 80Gi}"] * self.mpsd.gpus)
        temporary = self.config.with_suffix(".new")
        temporary.write_text(
            f"""
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:{resources}
mps: {{runRoot: {self.root}/run, logRoot: {self.root}/log}}
cdi: {{directory: {self.root}/cdi}}
kubelet: {{root: {self.kubelet_root}, devicePlugins: {self.device_plugins}}}
stateRoot: {self.root}/state
backend: simulated
simulated: {{gpus: [{gpus}]{f", driver: {self._driver}" if self._driver else ""}}}
metrics: {{address: ""}}
{self._more}
"""
        )
        temporary.rename(self.config)

    def start_plugin(self) -> "subprocess.Popen[bytes]":
        self._count += 1
        code = _RUN.format(root=ROOT, grace=GRACE_S, path=str(self.config), constants=self._constants)
        with open(self.root / f"plugin{self._count}.log", "wb") as log:
            plugin = subprocess.Popen(
                [sys.executable, "-I", "-c", code], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._stack.callback(end, plugin)
        return plugin

    def start(self, *names: str) -> "subprocess.Popen[bytes]":
        """The whole node, until these resources can be had (all of RESOURCES) and daemons are ready. The plugin's
        process."""
        self.kubelet.start()
        self.mpsd.start()
        self.mpsd.until_ready()
        plugin = self.start_plugin()
        self.until(lambda: all(self.allocatable(name) > 0 for name in names or (SMALL, BIG, UNITS, SLICED)))
        return plugin

    def log(self) -> str:
        """What the plugin started last wrote."""
        return (self.root / f"plugin{self._count}.log").read_text()

    def until(self, condition: Callable[[], object], wait_s: float = WAIT_S) -> None:
        """Waits until something that nobody announces is so."""
        deadline_s = time.monotonic() + wait_s
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < deadline_s, f"it did not happen; log:\n{self.log() if self._count else ''}"
            pause.wait(0.02)

    def allocatable(self, resource: str) -> int:
        found = self.kubelet.resources.get(resource)
        return found.allocatable if found else 0

    def status(self) -> PluginStatus:
        return call(f"{self.root}/run/plugin.sock", "status", {}, PluginStatus)

    def call(self, method: str, **params: object) -> Any:
        """Asks the plugin."""
        return call(f"{self.root}/run/plugin.sock", method, params, object)

    def until_status(self, condition: Callable[[PluginStatus], object]) -> PluginStatus:
        """Waits for a status that fits."""
        found: list[PluginStatus] = []

        def look() -> bool:
            with contextlib.suppress(GpufracError):
                found[:] = [self.status()]
                return bool(condition(found[0]))
            return False

        self.until(look)
        return found[0]

    def admit(self, name: str, resource: str = SMALL, count: int = 1, *more: ContainerSpec) -> AdmittedPod:
        """A pod with one app container, after `more` containers."""
        containers = (*more, ContainerSpec("main", {resource: count}))
        return self.kubelet.admit(PodSpec(name, containers))

    def admit_running(self, name: str, resource: str = SMALL, count: int = 1, *more: ContainerSpec) -> AdmittedPod:
        """The same, and its containers run."""
        pod = self.admit(name, resource, count, *more)
        assert pod.phase == "Admitted", pod.message
        assert self.kubelet.wait_settled([pod], WAIT_S), [c.message for c in pod.containers]
        return pod

    def records(self) -> list[Allocation]:
        """What the ledger holds on disk. Read from outside: opening a second ledger would tidy up the first."""
        found = []
        for path in (self.root / "state" / "plugin" / "allocations").glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # released just now
                found.append(msgspec.json.decode(path.read_bytes(), type=Allocation))
        return sorted(found, key=lambda record: record.generation)

    def cdi_keys(self) -> set[str]:
        """Keys of our CDI files."""
        prefix = "gpufrac.dev-allocation_"
        return {path.stem.removeprefix(prefix) for path in (self.root / "cdi").glob(f"{prefix}*.json")}

    def checkpoint(self) -> list[dict[str, object]]:
        """Entries of the stub kubelet's checkpoint."""
        data = json.loads((self.device_plugins / "kubelet_internal_checkpoint").read_text())
        entries = data["Data"]["PodDeviceEntries"] or []
        assert isinstance(entries, list)
        return entries

    def close(self) -> None:
        self._stack.close()
        self.kubelet.close()
        self.mpsd.close()


@contextlib.contextmanager
def plugin_node(
    root: Path, gpus: int = 2, resources: str = RESOURCES, more: str = "", driver: str = ""
) -> Iterator[PluginNode]:
    """`more` are further sections of the config."""
    node = PluginNode(root, gpus, resources, more, driver)
    try:
        yield node
    finally:
        node.close()


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)


def init(resource: str, count: int = 1, role: Role = Role.INIT) -> ContainerSpec:
    return ContainerSpec(f"{role}-{resource.rpartition('/')[2]}-{count}", {resource: count}, role=role)
