"""No sequence of requests, releases, reloads, GPU changes and restarts books memory twice or mixes modes."""

import shutil
import tempfile
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deviceplugin.broker import Broker, start_objection
from deviceplugin.ledger import Ledger
from deviceplugin.plan.model import Allocation
from deviceplugin.presence import Holder, Observation
from mpsd.config.model import NodeConfig
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.snapshot import DaemonState, DaemonStatus
from tests.builders import config, fixed, fraction, info, ready, resource, snapshot, status, units

RESOURCES = (
    resource("a", fixed(8)),
    resource("b", fixed(30)),
    resource("h", fraction(0.5)),
    resource("u", units(2)),
    resource("t", fixed(16), Mode.TIME_SLICING),
)
CONFIGS = [
    config(*RESOURCES),
    config(*RESOURCES[:2]),
    config(resource("a", fixed(20)), *RESOURCES[1:]),
    config(*reversed(RESOURCES)),
]
MEMORY_GIB = (80, 24, 40)


class Node(RuleBasedStateMachine):
    """A broker with a kubelet-like client: it takes Healthy IDs that no live container of it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="gf-", dir="/tmp")
        self.now_s = 0.0
        self.config: NodeConfig = CONFIGS[0]
        self.sizes = list(MEMORY_GIB)
        self.healths = [GpuHealth.OK] * 3
        self.daemons: list[DaemonStatus] = [ready()] * 3
        self.running: dict[str, Allocation] = {}

    @initialize()
    def begin(self) -> None:
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.directory)
        self.broker = Broker(self.config, self.ledger, monotonic=lambda: self.now_s, wall=lambda: 1000 + self.now_s)
        self.tell()

    def tell(self) -> None:
        gpus = [
            status(info(i, memory_gib=m), health=h, daemon=d, mode=self.mode_at_mpsd(i))
            for i, (m, h, d) in enumerate(zip(self.sizes, self.healths, self.daemons, strict=True))
        ]
        self.broker.observe_snapshot(snapshot(*gpus))
        self.broker.publish()

    def mode_at_mpsd(self, index: int) -> Mode | None:
        return next((gpu.mode for gpu in self.broker.desired().gpus if gpu.uuid == info(index).uuid), None)

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

    @rule(chosen=st.sampled_from(CONFIGS))
    def reload(self, chosen: NodeConfig) -> None:
        self.config = chosen
        self.broker.apply_config(chosen)
        self.broker.publish()

    @rule(index=st.integers(0, 2), health=st.sampled_from([GpuHealth.OK, GpuHealth.LOST, GpuHealth.SICK]))
    def gpu_changes(self, index: int, health: GpuHealth) -> None:
        self.healths[index] = health
        self.tell()

    @rule(index=st.integers(0, 2), state=st.sampled_from([DaemonState.READY, DaemonState.BACKOFF]))
    def daemon_changes(self, index: int, state: DaemonState) -> None:
        self.daemons[index] = ready() if state is DaemonState.READY else DaemonStatus(state=state, reason="it died")
        self.tell()

    @rule(known=st.booleans())
    def restart(self, known: bool) -> None:
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
            on_gpu = [a for a in inspection.allocations if a.gpus[0] == gpu.uuid]
            shares = {(a.resource, share): 0 for a in on_gpu for share in a.device_ids}
            for a in on_gpu:
                for share in a.device_ids:
                    shares[a.resource, share] = max(shares[a.resource, share], a.share_bytes)
            assert sum(shares.values()) == inspection.held[gpu.uuid][0] <= gpu.usable_bytes
            assert len({a.mode for a in on_gpu}) <= 1

    @invariant()
    def what_runs_is_recorded_and_healthy_unless_lost(self) -> None:
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
            assert all(health[share] is (a.gpus[0] not in lost) for share in a.device_ids)

    @invariant()
    def nothing_may_start_without_a_verified_daemon(self) -> None:
        if not hasattr(self, "broker"):
            return
        gpus = {gpu.info.uuid: gpu for gpu in self.broker.gpus()}
        for allocation, _ in self.broker.permitted().values():
            assert start_objection(allocation, gpus[allocation.gpus[0]]) == ""

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
        shutil.rmtree(self.directory)


Node.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestNode = Node.TestCase
