"""No sequence of requests, releases, reloads, GPU changes, drains and restarts books memory twice, mixes modes on a GPU
or loses a held share; with groups of GPUs and GPUs alone side by side."""

import shutil
import tempfile
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from deviceplugin.broker import Broker
from deviceplugin.drains import Drains
from deviceplugin.ledger import Ledger
from deviceplugin.plan.model import Allocation
from deviceplugin.plan.start import start_objection
from deviceplugin.presence import Holder, Observation
from mpsd.config.model import Enforcement, NodeConfig
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.snapshot import DaemonState, DaemonStatus
from tests.builders import config, fixed, fraction, info, ready, reported, resource, snapshot, units

RESOURCES = (
    resource("a", fixed(8)),
    resource("b", fixed(30)),
    resource("h", fraction(0.5)),
    resource("u", units(2)),
    resource("t", fixed(16), Mode.TIME_SLICING),
)
GROUPED = (
    *RESOURCES,
    resource("p", fixed(10), groups=("pair0", "pair1")),
    resource("q", fraction(0.4), groups=("pair0",)),
    resource("n", fixed(5), groups=("pair0",), enforcement=Enforcement.NONE),
    resource("s", fixed(6), Mode.TIME_SLICING, groups=("pair0",)),
)
CONFIGS = [
    config(*RESOURCES),
    config(*GROUPED, groups=(("pair0", (2, 3)), ("pair1", (1,)))),
    config(*RESOURCES[:2]),
    config(resource("a", fixed(20)), *RESOURCES[1:]),
    config(*reversed(GROUPED), groups=(("pair0", (3, 1)), ("pair1", (7,)))),
    config(*GROUPED[:5], resource("p", fixed(12), groups=("pair0",)), groups=(("pair0", (0, 1, 2)),)),
]
MEMORY_GIB = (80, 24, 40, 40)


class Node(RuleBasedStateMachine):
    """A broker with a kubelet-like client: it takes Healthy IDs that no live container of it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="gf-", dir="/tmp")
        self.now_s = 0.0
        self.config: NodeConfig = CONFIGS[0]
        self.healths = [GpuHealth.OK] * len(MEMORY_GIB)
        self.daemon: DaemonStatus | None = None
        self.protocol = 2
        self.running: dict[str, Allocation] = {}

    @initialize(protocol=st.sampled_from([2, 3]), chosen=st.sampled_from(CONFIGS))
    def begin(self, protocol: int, chosen: NodeConfig) -> None:
        self.protocol, self.config = protocol, chosen
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(f"{self.directory}/ledger")
        self.broker = Broker(
            self.config,
            self.ledger,
            Drains(f"{self.directory}/drains.json"),
            monotonic=lambda: self.now_s,
            wall=lambda: 1000 + self.now_s,
        )
        self.tell()

    def tell(self) -> None:
        """mpsd has done all that is desired, unless its daemons are down."""
        infos = [info(i, memory_gib=m) for i, m in enumerate(MEMORY_GIB)]
        given = self.daemon
        if given is None and self.protocol == 3:
            given = structs.replace(ready(), protocol=3)
        gpus = reported(self.config, infos, self.broker.desired(), given)
        gpus = [structs.replace(gpu, health=health) for gpu, health in zip(gpus, self.healths, strict=True)]
        self.broker.observe_snapshot(snapshot(*gpus))
        self.broker.publish()

    def offered(self, name: str, obedient: bool) -> list[str]:
        published = self.broker.wait_list(name, -1, 0, lambda: False)
        held = {share for a in self.running.values() if a.resource == name for share in a.device_ids}
        assert published is not None
        return [d.id for d in published.advertisement.devices if (d.healthy or not obedient) and d.id not in held]

    @rule(data=st.data(), count=st.integers(1, 12), packed=st.booleans(), obedient=st.booleans())
    def allocate(self, data: st.DataObject, count: int, packed: bool, obedient: bool) -> None:
        """`obedient` takes Healthy shares only; a list may be stale, so the others must be safe to ask for too."""
        name = data.draw(st.sampled_from([r.name for r in self.config.resources]))
        available = self.offered(name, obedient)
        size = count if name.endswith("/u") else 1
        if len(available) < size:
            return
        if not obedient:
            available = data.draw(st.permutations(available))
        wish = self.broker.preferred(name, available, [], size) if packed else []
        ids: Sequence[str] = wish or available[:size]
        outcome = self.broker.allocate(name, list(reversed(ids)))
        if isinstance(outcome, Allocation):
            self.running[outcome.key] = outcome
            again = self.broker.allocate(name, ids)
            assert again == outcome

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        del self.running[data.draw(st.sampled_from(sorted(self.running)))]

    @rule(seconds=st.sampled_from([0.5, 5, 20, 100]))
    def look(self, seconds: float) -> None:
        self.now_s += seconds
        listed = {(a.resource, a.device_ids): Holder("ns", a.key, "c") for a in self.running.values()}
        judged = self.broker.judgeable()
        self.broker.observe_kubelet(Observation(listed, {}), {}, judged)
        for allocation in self.broker.releasable():
            assert allocation.key not in self.running
            self.broker.release(allocation.key)
        self.broker.publish()

    @rule(chosen=st.sampled_from(CONFIGS), told=st.booleans())
    def reload(self, chosen: NodeConfig, told: bool) -> None:
        self.config = chosen
        self.broker.apply_config(chosen)
        self.broker.publish()
        if told:
            self.tell()

    @rule(index=st.integers(0, 3), health=st.sampled_from([GpuHealth.OK, GpuHealth.LOST, GpuHealth.SICK]))
    def gpu_changes(self, index: int, health: GpuHealth) -> None:
        self.healths[index] = health
        self.tell()

    @rule(up=st.booleans())
    def daemons_change(self, up: bool) -> None:
        self.daemon = None if up else DaemonStatus(state=DaemonState.BACKOFF, reason="it died", protocol=self.protocol)
        self.tell()

    @rule(index=st.integers(0, 3), on=st.booleans())
    def drain(self, index: int, on: bool) -> None:
        (self.broker.drain if on else self.broker.undrain)(info(index).uuid)
        self.broker.publish()

    @rule()
    def restart(self) -> None:
        before = self.broker.allocations()
        self.broker.close()
        self.ledger.close()
        self.open()
        assert self.broker.allocations() == before

    @invariant()
    def never_more_than_usable_and_one_mode_per_gpu(self) -> None:
        if not hasattr(self, "broker"):
            return
        inspection = self.broker.inspect()
        for gpu in inspection.view.gpus.values():
            on_gpu = [a for a in inspection.allocations if gpu.uuid in a.gpus]
            shares = {(a.resource, share): 0 for a in on_gpu for share in a.device_ids}
            for a in on_gpu:
                for share in a.device_ids:
                    shares[a.resource, share] = max(shares[a.resource, share], a.share_bytes)
            assert sum(shares.values()) == inspection.held[gpu.uuid][0] <= gpu.usable_bytes
            assert len({a.mode for a in on_gpu}) <= 1
            assert len({a.group for a in on_gpu}) <= 1, "one daemon owns a GPU"

    @invariant()
    def what_runs_is_recorded_and_healthy_unless_a_gpu_of_it_is_lost(self) -> None:
        if not hasattr(self, "broker"):
            return
        live = {a.key for a in self.broker.allocations()}
        assert set(self.running) <= live
        self.broker.publish()
        lost = {info(i).uuid for i, health in enumerate(self.healths) if health is GpuHealth.LOST}
        for a in self.running.values():
            published = self.broker.wait_list(a.resource, -1, 0, lambda: False)
            assert published is not None
            health = {d.id: d.healthy for d in published.advertisement.devices}
            assert all(health[share] is lost.isdisjoint(a.gpus) for share in a.device_ids)

    @invariant()
    def nothing_is_offered_on_a_drained_gpu(self) -> None:
        if not hasattr(self, "broker"):
            return
        self.broker.publish()
        inspection = self.broker.inspect()
        held = {(a.resource, share) for a in inspection.allocations for share in a.device_ids}
        for name, published in inspection.lists.items():
            for device in published.advertisement.devices:
                if device.healthy and (name, device.id) not in held:
                    group = inspection.view.groups[device.id.partition("::")[0]]
                    assert inspection.drained.keys().isdisjoint(group.gpus)

    @invariant()
    def nothing_may_start_without_a_verified_daemon(self) -> None:
        if not hasattr(self, "broker"):
            return
        gpus = {gpu.info.uuid: gpu for gpu in self.broker.gpus()}
        for allocation, _ in self.broker.permitted().values():
            assert start_objection(allocation, gpus) == ""

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
        shutil.rmtree(self.directory)


Node.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestNode = Node.TestCase
