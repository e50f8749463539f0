"""A front end for annotated pods with everything around it faked, and the pods that it sees."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec import structs

from deviceplugin.annotated.frontend import AnnotatedFrontend
from deviceplugin.nri.model import Adjustment, Container, Inventory, Pod, Refused, Runtime
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.start import Grant
from mpsd.common.errors import GpufracError
from mpsd.common.reason import Reason
from mpsd.config.model import (
    AnnotationsConfig,
    Enforcement,
    GpuSelection,
    NodeConfig,
    ShortfallPolicy,
    TrustPolicy,
)
from mpsd.localapi.snapshot import LimitReading
from tests.builders import CAN, CANNOT, HOOKED_KIND, ready, uuid
from tests.world import World

GIB = 1 << 30
NEW, OLD = Runtime(name="containerd", version="2.1.9+unknown"), Runtime(name="containerd", version="v2.0.4")
PREFIX = "nvidia.com/container."


class Said:
    """Events, and containers that were stopped."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []
        self.stopped: list[str] = []
        self.restart_policies: dict[str, str] = {}
        self.stop_error = ""
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1

    def pod(self, namespace: str, name: str, uid: str, type: str, reason: str, message: str) -> None:  # noqa: A002
        self.events.append((f"{namespace}/{name}", reason, message))

    def node(self, type: str, reason: str, message: str) -> None:  # noqa: A002
        raise AssertionError("nothing is said of the node")

    def stop(self, container_id: str) -> str:
        self.stopped.append(container_id)
        return self.stop_error


class Node(World):
    """A front end on a world; time stands still while it waits, and what the attacher would do is done at once."""

    opened: ClassVar["list[Node]"] = []

    def __init__(self, directory: Path, cfg: NodeConfig, runtime: Runtime = NEW, *, hard: bool = True) -> None:
        super().__init__(directory, cfg)
        self.opened.append(self)
        self.hard_limits = CAN if hard else CANNOT
        self.daemon = structs.replace(ready(), protocol=3 if hard else 2)
        self.broker.set_gpu_kind(HOOKED_KIND, {}, frozenset({HOOKED_KIND}))
        self.tell()
        self.said = Said()
        self.attaches = True
        self.runtime = runtime
        self.listed: Inventory | GpufracError = ((), ())
        """What the runtime has, or why it does not tell."""
        self.begin_frontend()

    def begin_frontend(self) -> None:
        assert self.broker.node.config.annotations is not None
        self.frontend = AnnotatedFrontend(
            self.broker,
            self.broker.node.config.annotations,
            self,
            self.mpsd,
            self.said,
            stop_container=self.said.stop,
            restart_policy=self.said.restart_policies.get,
            running_pods=lambda: self.processes,
            list_all=self.list_all,
            on_change=self.said.changed,
            wall=lambda: self.now_s,
            monotonic=self.tick,
            pause=lambda _: None,
        )
        self.frontend.connected(self.runtime)
        self.frontend.synchronize((), ())

    def list_all(self) -> Inventory:
        if isinstance(self.listed, GpufracError):
            raise self.listed
        return self.listed

    def tick(self) -> float:
        self.now_s += 0.2
        return self.now_s

    def observe(self, newer_than_s: float = 0.0) -> bool:
        return self.keeper.observe(newer_than_s)

    def containers_of(self, namespace: str, pod: str) -> frozenset[str]:
        return self.keeper.containers_of(namespace, pod)

    def held_back(self, key: str) -> Reason | None:
        return self.keeper.held_back(key)

    def recheck(self, *, release: bool = True) -> None:
        self.keeper.recheck(release=release)

    def wait_attached(self, key: str, timeout_s: float) -> Grant | None:
        assert timeout_s <= 1
        if self.attaches:
            self.tell()
            self.keeper.attach()
        return self.keeper.wait_attached(key, 0)

    def create(self, pod: Pod, container: Container) -> Adjustment:
        return self.frontend.create_container(pod, container)

    def refusal(self, call: Callable[[], object]) -> str:
        with pytest.raises(Refused) as refused:
            call()
        return str(refused.value)

    def holds_nothing(self) -> bool:
        return not self.broker.allocations()

    def cgroup(self, path: str, gpu: str) -> str:
        """A cgroup that the driver knows."""
        directory = "/sys/fs/cgroup" + path
        self.mpsd.limits_of[gpu, directory] = LimitReading()
        return directory


def annotated(*, gpus: tuple[int, ...] | None = None, **changes: object) -> AnnotationsConfig:
    fields: dict[str, object] = {
        "gpus": GpuSelection(include=gpus),
        "share": True,
        "trust": TrustPolicy.ANY,
        "enforcement": Enforcement.COOPERATIVE,
        "shortfall": ShortfallPolicy.REFUSE,
    }
    return AnnotationsConfig(**(fields | changes))  # type: ignore[arg-type]


def keys(container: str = "main", devices: str | None = None, **values: str) -> dict[str, str]:
    """Annotations: `memory_request="4Gi"` is gpu-memory.request."""
    suffixes = {"request": "gpu-memory.request", "limit": "gpu-memory.limit", "mode": "gpu-compute.mode"}
    suffixes["portion"] = "gpu-compute.portion"
    found = {f"{PREFIX}{container}.{suffixes[name]}": value for name, value in values.items()}
    if devices != "":
        found[f"{PREFIX}{container}.gpus.devices"] = devices or uuid(0)
    return found


def pod(annotations: dict[str, str], name: str = "p", namespace: str = "ns", pid: int = 7, sandbox: str = "") -> Pod:
    return Pod(
        id=sandbox or f"sandbox-{name}",
        name=name,
        uid=f"uid-{name}",
        namespace=namespace,
        annotations=annotations,
        pid=pid,
    )


def container(name: str = "main", *env: str, **changes: object) -> Container:
    fields: dict[str, object] = {
        "id": f"id-{name}",
        "pod_id": "sandbox-p",
        "name": name,
        "env": env,
        "cgroups_path": f"kubepods-besteffort-podx.slice:cri-containerd:{name}",
    }
    return Container(**(fields | changes))  # type: ignore[arg-type]


def made_by(adjustment: Adjustment, **changes: object) -> Container:
    """The container as the runtime made it with our answer."""
    return container("main", *(f"{name}={value}" for name, value in adjustment.env), **changes)


SCOPE = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podx.slice/cri-containerd-main.scope"


def env_of(adjustment: Adjustment) -> dict[str, str]:
    assert len(adjustment.env) == len(dict(adjustment.env)), "a runtime refuses a name that is set twice"
    return dict(adjustment.env)


def held_share(node: Node) -> Allocation:
    share = node.grant()
    node.run(share, "p", "main")
    node.keeper.observe()
    return share
