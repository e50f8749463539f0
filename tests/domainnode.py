"""A broker and an mpsd that is nothing but its plan: which daemons there are follows what is granted and who uses them.
For tests of what may live together; no processes, no files but the ledger."""

from collections.abc import Iterable, Sequence

from msgspec import structs

from deviceplugin.grants.broker import Broker
from deviceplugin.grants.drains import Drains
from deviceplugin.grants.ledger import Ledger
from deviceplugin.plan.allocation import Allocation, ContainerAsk, ContainerRef, Refusal
from mpsd.config.model import GIB, AnnotationsConfig, Domains, Enforcement, GpuSelection, NodeConfig, ShortfallPolicy
from mpsd.daemon.paths import daemon_dirs
from mpsd.daemon.plan import DaemonSpec, DomainPlan, can_move, mount_of, needs_daemon, plan
from mpsd.gpu.model import GpuInfo, Mode
from mpsd.localapi.reasons import DaemonCode
from mpsd.localapi.snapshot import (
    Attached,
    DaemonState,
    DaemonStatus,
    Desired,
    DesiredAllocation,
    GpuClient,
    GpuStatus,
)
from mpsd.shares.domains import domain_of
from tests.builders import CAN, HOOKED_KIND, config, info, ready, snapshot, status, uuid


def annotated(domains: Domains = Domains.AUTO) -> NodeConfig:
    """A node for annotated pods alone."""
    return config(
        annotations=AnnotationsConfig(
            gpus=GpuSelection(),
            domains=domains,
            enforcement=Enforcement.COOPERATIVE,
            shortfall=ShortfallPolicy.REFUSE,
        )
    )


class ModelMpsd:
    """Daemons of protocol 3 that start and end at once, when mpsd's own rules let them.

    `daemons`: those that run: name -> GPUs. `clients`: allocations with a process on their GPUs: key -> its PID.
    """

    def __init__(self, cfg: NodeConfig, infos: Sequence[GpuInfo]) -> None:
        self.config, self.infos = cfg, tuple(infos)
        self.desired = Desired()
        self.daemons: dict[str, tuple[str, ...]] = {}
        self.clients: dict[str, int] = {}

    def settle(self) -> None:
        """Does all that can be done now."""
        while self.step():
            pass

    def step(self) -> bool:
        """Ends one daemon or starts one. Whether there was something to do."""
        plans = self.plans()
        for name, gpus in self.daemons.items():
            if name not in plans and not self._is_needed(name, gpus, plans.values()):
                del self.daemons[name]
                return True
        for name, planned in plans.items():
            taken = {gpu for gpus in self.daemons.values() for gpu in gpus}
            if name not in self.daemons and taken.isdisjoint(planned.domain.gpus):
                self.daemons[name] = planned.domain.gpus
                return True
        return False

    def plans(self) -> dict[str, DomainPlan]:
        """What mpsd plans now, by the domains' names."""
        kept = {
            name: gpus
            for name, gpus in self.daemons.items()
            if len(gpus) > 1 and (self._has_users(gpus) or any(self._stays(a, gpus) for a in self._allocations()))
        }
        found = plan(self.config, self.infos, self._allocations(), lambda _: 3, kept)
        return {domain_plan.domain.name: domain_plan for domain_plan in found}

    def served_by(self, gpus: Iterable[str]) -> str | None:
        """The daemon that runs and has all these GPUs."""
        return next((name for name, owned in self.daemons.items() if set(gpus) <= set(owned)), None)

    def _allocations(self) -> tuple[DesiredAllocation, ...]:
        return self.desired.allocations

    def _has_users(self, gpus: Iterable[str]) -> bool:
        there = set(gpus)
        return any(
            a.key in self.clients and needs_daemon(a) and not there.isdisjoint(a.gpus) for a in self._allocations()
        )

    def _stays(self, allocation: DesiredAllocation, gpus: Iterable[str]) -> bool:
        return set(allocation.gpus) <= set(gpus) and not self._can_move(allocation)

    def _can_move(self, allocation: DesiredAllocation) -> bool:
        dirs = daemon_dirs(self.config.mps, allocation.group)
        return can_move(allocation, DaemonSpec(allocation.group, allocation.gpus, 3, 0, dirs, ()))

    def _is_needed(self, name: str, gpus: tuple[str, ...], plans: Iterable[DomainPlan]) -> bool:
        served = [set(domain_plan.domain.gpus) for domain_plan in plans]
        return self._has_users(gpus) or any(
            needs_daemon(a)
            and set(a.gpus) <= set(gpus)
            and not (self._can_move(a) and any(members.issuperset(a.gpus) for members in served))
            for a in self._allocations()
        )

    def statuses(self) -> list[GpuStatus]:
        """What it says of its GPUs."""
        owners = domain_of(domain_plan.domain for domain_plan in self.plans().values())
        modes = {gpu: a.mode for a in self._allocations() for gpu in a.gpus}
        return [
            status(
                gpu,
                group=owners[gpu.uuid].name,
                daemon=self._status(owners[gpu.uuid].name),
                mode=modes.get(gpu.uuid),
                clients=tuple(self._clients(gpu.uuid)),
            )
            for gpu in self.infos
        ]

    def _clients(self, gpu: str) -> Iterable[GpuClient]:
        for a in self._allocations():
            if a.key in self.clients and gpu in a.gpus:
                mps = a.mode is Mode.SM_SHARING
                yield GpuClient(pid=self.clients[a.key], allocation_key=a.key, mps=mps, command="python")

    def _status(self, name: str) -> DaemonStatus:
        if name not in self.daemons:
            waits = DaemonCode.OTHERS_STILL_THERE
            text = "it takes the place of others"
            return DaemonStatus(state=DaemonState.ABSENT, name=name, protocol=3, reason=text, reason_code=waits)
        dirs, gpus = daemon_dirs(self.config.mps, name), set(self.daemons[name])
        attached = tuple(
            Attached(a.key, mount_of(a, dirs, name), a.limit_bytes)
            for a in self._allocations()
            if needs_daemon(a) and set(a.gpus) <= gpus
        )
        return structs.replace(ready(), name=name, protocol=3, attached=attached)


class DomainNode:
    """A node with hard limits and MPS protocol 3, whose pods are the test's."""

    def __init__(self, directory: str, cfg: NodeConfig, gpus: int) -> None:
        self.directory, self.config = directory, cfg
        self.mpsd = ModelMpsd(cfg, [info(index) for index in range(gpus)])
        self.now_s = 0.0
        self.pods: dict[str, Allocation] = {}
        """What the pods that are there hold, by their names."""
        self._clients = 0
        self._open()
        self.follow()

    def _open(self) -> None:
        self.ledger = Ledger(f"{self.directory}/ledger")
        drains = Drains(f"{self.directory}/drains.json")
        self.broker = Broker(
            self.config, self.ledger, drains, monotonic=lambda: self.now_s, wall=lambda: 1000 + self.now_s
        )
        self.broker.restore(tuple(self.mpsd.statuses()), CAN)
        self.broker.set_gpu_kind(HOOKED_KIND, {}, frozenset({HOOKED_KIND}))

    def restart_plugin(self) -> None:
        """Knows what is on disk, and what the runtime has."""
        self.close()
        self._open()
        self.broker.observe_pods(set(self.pods))

    def close(self) -> None:
        self.broker.close()
        self.ledger.close()

    def tell(self) -> None:
        """The plugin hears from mpsd."""
        self.broker.observe_snapshot(snapshot(*self.mpsd.statuses(), hard_limits=CAN))
        self.broker.publish()

    def follow(self) -> None:
        """mpsd does what the plugin wants by now, as far as it can, and says so."""
        self.mpsd.desired = self.broker.desired()
        self.mpsd.settle()
        self.tell()

    def create(self, ask: ContainerAsk) -> Allocation | Refusal:
        """Asks for a container, once. One that is refused holds nothing."""
        outcome = self.broker.allocate_container(ask, by_cdi=True)
        if isinstance(outcome, Allocation):
            self.pods[ask.container.pod_uid] = outcome
        else:
            self.pods.pop(ask.container.pod_uid, None)
        return outcome

    def may_start(self, pod: str) -> bool:
        return self.pods[pod].key in self.broker.permissions().permitted

    def begin_client(self, pod: str, *, told: bool = True) -> None:
        """A process of it uses its GPUs. `told`: and the plugin hears of it."""
        self._clients += 1
        self.mpsd.clients[self.pods[pod].key] = 100 + self._clients
        if told:
            self.tell()

    def end_client(self, pod: str) -> None:
        self.mpsd.clients.pop(self.pods[pod].key, None)
        self.follow()

    def delete(self, pod: str) -> None:
        """It ends, and what it held is released."""
        self.mpsd.clients.pop(self.pods.pop(pod).key, None)
        self.broker.observe_pods(set(self.pods))
        self.broker.pod_stopped(pod)
        for allocation in self.broker.releasable(pressed=True):
            if self.broker.begin_release(allocation.key, pressed=True):
                self.broker.release(allocation.key)


def ask(pod: str, gpus: Iterable[int], mode: Mode, request_gib: int, limit_gib: int | None = None) -> ContainerAsk:
    """A request for the only container of a pod. GPUs by their indices."""
    return ContainerAsk(
        container=ContainerRef(namespace="ns", pod=pod, pod_uid=pod, container="main"),
        request_bytes=request_gib * GIB,
        limit_bytes=(limit_gib or request_gib) * GIB,
        mode=mode,
        gpus=tuple(uuid(index) for index in gpus),
    )
