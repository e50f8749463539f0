"""No sequence of requests, releases, reloads, GPU changes, drains and restarts books memory twice, mixes modes on a GPU
or loses a held share; with groups of GPUs and GPUs alone side by side, with hard limits and borrowers. And no container
runs with a limit that reads back wrong unreported, whoever starts, drifts, restarts or goes."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from deviceplugin.grants.broker import Broker
from deviceplugin.grants.drains import Drains
from deviceplugin.grants.holders.model import Holder, Observation
from deviceplugin.grants.holders.turns import Instance
from deviceplugin.grants.inspection import Inspection
from deviceplugin.grants.ledger import Ledger
from deviceplugin.plan.allocation import Allocation, ContainerAsk, ContainerRef, Refusal
from deviceplugin.plan.reasons import RefusalCode
from deviceplugin.plan.start import start_objection
from deviceplugin.reconcile.hardlimits import VERIFIED_S
from mpsd.common.processes import PodProcess
from mpsd.config.model import (
    GIB,
    AnnotationsConfig,
    Enforcement,
    GpuSelection,
    NodeConfig,
    ShortfallPolicy,
    TrustPolicy,
)
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuClient, HardLimits
from tests.builders import (
    CAN,
    CANNOT,
    HOOKED_KIND,
    config,
    fixed,
    fraction,
    info,
    ready,
    reported,
    resource,
    snapshot,
    units,
)
from tests.world import World, answer_with

RESOURCES = (
    resource("a", fixed(8)),
    resource("b", fixed(30)),
    resource("h", fraction(0.5)),
    resource("u", units(2)),
    resource("t", fixed(16), Mode.TIME_SLICING),
)
BURST = (
    resource("a", fixed(8), enforcement=Enforcement.HARD),
    resource("t", fixed(16), Mode.TIME_SLICING),
    resource("ab", fixed(8, 20)),
    resource("hb", fraction(0.3, 0.9)),
    resource("tb", fixed(6, 23), Mode.TIME_SLICING),
    resource("pb", fixed(10, 12), groups=("pair0",)),
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
BURST_CONFIGS = [
    config(*BURST),
    config(*BURST[1:], groups=(("pair0", (2, 3)),)),
    config(*RESOURCES[:2], RESOURCES[-1]),
]
MEMORY_GIB = (80, 24, 40, 40)


class Node(RuleBasedStateMachine):
    """A broker with a kubelet-like client: it takes Healthy IDs that no live container of it holds."""

    configs: ClassVar = CONFIGS
    drivers: ClassVar = [(2, CANNOT), (2, HardLimits()), (3, CANNOT), (3, CAN)]
    """The MPS protocol, and what mpsd says of hard limits."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="gf-", dir="/tmp")
        self.now_s = 0.0
        self.config: NodeConfig = CONFIGS[0]
        self.healths = [GpuHealth.OK] * len(MEMORY_GIB)
        self.daemon: DaemonStatus | None = None
        self.protocol = 2
        self.limits: HardLimits = HardLimits()
        self.hooked = True
        self.running: dict[str, Allocation] = {}

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.protocol, self.limits = data.draw(st.sampled_from(self.drivers))
        self.config = data.draw(st.sampled_from(self.configs))
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
        self.broker.set_gpu_kind(HOOKED_KIND, {}, frozenset({HOOKED_KIND}) if self.hooked else frozenset())
        self.broker.observe_snapshot(snapshot(*gpus, hard_limits=self.limits))
        self.broker.publish()

    def listed(self) -> Inspection:
        """What is known, once the lists say it."""
        now = self.broker.inspect()
        if now.lists_are_new:
            return now
        self.broker.publish()
        return self.broker.inspect()

    def offered(self, name: str, obedient: bool) -> list[str]:
        published = self.broker.wait_list(name, -1, 0, lambda: False)
        held = {share for a in self.running.values() if a.resource == name for share in a.device_ids}
        assert published is not None
        return [d.id for d in published.advertisement.devices if (d.healthy or not obedient) and d.id not in held]

    @precondition(lambda self: self.config.resources)
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

    @rule(data=st.data(), told=st.booleans())
    def reload(self, data: st.DataObject, told: bool) -> None:
        self.config = data.draw(st.sampled_from(self.configs))
        self.broker.apply_config(self.config)
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

    @rule(
        limits=st.sampled_from([CAN, CAN, CANNOT, HardLimits()]),
        hooked=st.sampled_from([True, True, False]),
        protocol=st.sampled_from([3, 3, 2]),
    )
    def ability_changes(self, limits: HardLimits, hooked: bool, protocol: int) -> None:
        """A driver goes up or down, a toolkit comes or goes."""
        self.limits, self.hooked, self.protocol = limits, hooked, protocol
        if self.daemon is not None:
            self.daemon = structs.replace(self.daemon, protocol=protocol)
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
            passed_on = {key for a in on_gpu for key in a.after}
            shares = {(a.resource, share): 0 for a in on_gpu for share in a.device_ids}
            for a in on_gpu:
                for share in a.device_ids:
                    if a.container is None or a.key not in passed_on:
                        shares[a.resource, share] = max(shares[a.resource, share], a.share_bytes)
            granted_bytes = inspection.held[gpu.uuid].granted_bytes
            assert sum(shares.values()) <= granted_bytes <= gpu.usable_bytes
            if not any(a.container and a.key in passed_on for a in on_gpu):
                assert sum(shares.values()) == granted_bytes
            assert len({a.mode for a in on_gpu}) <= 1

    @invariant()
    def who_borrows_does_so_among_those_whose_memory_the_driver_guarantees(self) -> None:
        if not hasattr(self, "broker"):
            return
        inspection = self.broker.inspect()
        for gpu in inspection.view.gpus.values():
            on_gpu = [a for a in inspection.allocations if gpu.uuid in a.gpus]
            borrowers = [a for a in on_gpu if a.may_borrow]
            assert all(a.enforcement is Enforcement.HARD and a.limit_bytes <= gpu.usable_bytes for a in borrowers)
            assert all(a.soft_bytes in (0, a.request_bytes) for a in on_gpu)
            if borrowers and not all(a.takes_back for a in on_gpu):
                assert inspection.held[gpu.uuid].limit_bytes <= gpu.usable_bytes
            assert all(a.enforcement.rank >= a.minimum.rank for a in on_gpu)

    @invariant()
    def what_runs_is_recorded_and_healthy_unless_a_gpu_of_it_is_lost(self) -> None:
        if not hasattr(self, "broker"):
            return
        inspection = self.listed()
        assert set(self.running) <= {a.key for a in inspection.allocations}
        lost = {info(i).uuid for i, health in enumerate(self.healths) if health is GpuHealth.LOST}
        for a in self.running.values():
            health = {d.id: d.healthy for d in inspection.lists[a.resource].advertisement.devices}
            assert all(health[share] is lost.isdisjoint(a.gpus) for share in a.device_ids)

    @invariant()
    def nothing_is_offered_on_a_drained_gpu(self) -> None:
        if not hasattr(self, "broker"):
            return
        inspection = self.listed()
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
        gpus = {gpu.info.uuid: gpu for gpu in self.broker.node.gpus}
        can = not self.limits.missing or self.limits == HardLimits()
        for key, (allocation, _) in self.broker.permissions().permitted.items():
            assert start_objection(allocation, gpus, self.broker.node.hard) is None
            granted = next(a for a in self.broker.allocations() if a.key == key)
            assert allocation.enforcement.rank >= granted.minimum.rank
            set_by_us = granted.container is not None
            assert allocation.enforcement is not Enforcement.HARD or ((self.hooked or set_by_us) and can)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
        shutil.rmtree(self.directory)


Node.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestNode = Node.TestCase


class Borrowers(Node):
    """The same where memory may be borrowed."""

    configs = BURST_CONFIGS
    drivers: ClassVar = [(3, CAN)]


Borrowers.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestBorrowers = Borrowers.TestCase


PODS = [
    ContainerRef(namespace="ns", pod=f"p{pod}", pod_uid=f"uid-{pod}", container=container)
    for pod in range(5)
    for container in "ab"
]


class AnnotatedPods(Node):
    """The same with annotated pods on some GPUs, beside the shares of the device plugin or apart from them."""

    configs: ClassVar = [
        config(
            *resources,
            annotations=AnnotationsConfig(
                gpus=GpuSelection(include=include),
                share=share,
                enforcement=minimum,
                trust=TrustPolicy.ANY,
                shortfall=ShortfallPolicy.REDUCE if share else ShortfallPolicy.REFUSE,
            ),
            groups=groups,
        )
        for resources, include, share, minimum, groups in (
            (RESOURCES, None, True, Enforcement.NONE, ()),
            (BURST, None, True, Enforcement.COOPERATIVE, (("pair0", (2, 3)),)),
            (RESOURCES, (1, 2), False, Enforcement.COOPERATIVE, ()),
            (GROUPED, (0, 2, 3), True, Enforcement.HARD, (("pair0", (2, 3)), ("pair1", (1,)))),
            ((), (0, 1, 2, 3), False, Enforcement.NONE, (("pair0", (3, 1)),)),
        )
    ] + [config(*RESOURCES)]

    def __init__(self) -> None:
        super().__init__()
        self.pods: dict[str, ContainerRef] = {}
        self.containers: dict[str, ContainerRef] = {}
        """Those that run, by the runtime's ID."""

    @rule(
        container=st.sampled_from(PODS),
        request=st.sampled_from([1, 6, 13, 40, 79, 90]),
        more=st.sampled_from([0, 0, 0, 5, 30]),
        mode=st.sampled_from(Mode),
        gpus=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
        by_cdi=st.booleans(),
        lasting=st.sets(st.sampled_from("ab")),
    )
    def create(
        self,
        container: ContainerRef,
        request: int,
        more: int,
        mode: Mode,
        gpus: list[int],
        by_cdi: bool,
        lasting: set[str],
    ) -> None:
        ask = ContainerAsk(
            container=container,
            request_bytes=request * GIB,
            limit_bytes=(request + more) * GIB,
            mode=mode,
            gpus=tuple(info(index).uuid for index in gpus),
        )
        outcome = self.broker.allocate_container(ask, by_cdi=by_cdi, lasting=lasting)
        if isinstance(outcome, Refusal):
            assert outcome.message
            if outcome.code == RefusalCode.BEING_RELEASED:
                self.pods = {key: c for key, c in self.pods.items() if c != container}
            return
        identifier = f"{container.id}/{len(self.containers)}/{self.now_s}"
        self.broker.container_runs(Instance(identifier, container.id, container.pod_uid))
        self.containers[identifier] = container
        runs = {a.key for a in self.broker.allocations() if a.container in self.containers.values()}
        assert runs.isdisjoint(outcome.after), "it takes the turn of one that runs"
        self.pods[outcome.key] = container
        self.pods = {key: c for key, c in self.pods.items() if c != container or key == outcome.key}
        assert self.broker.allocate_container(ask, by_cdi=by_cdi, lasting=lasting) == outcome
        asked = (ask.request_bytes, ask.limit_bytes)
        got = (outcome.request_bytes, outcome.limit_bytes)
        assert outcome.mode is mode
        annotations = self.config.annotations
        if annotations is None or annotations.shortfall is ShortfallPolicy.REFUSE:
            assert got == asked
        assert all(little <= much <= 2 * little for little, much in zip(got, asked, strict=True))
        assert set(outcome.gpus) == set(ask.gpus)

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), told=st.booleans())
    def end(self, data: st.DataObject, told: bool) -> None:
        uid = data.draw(st.sampled_from(sorted({container.pod_uid for container in self.pods.values()})))
        self.pods = {key: container for key, container in self.pods.items() if container.pod_uid != uid}
        self.containers = {i: container for i, container in self.containers.items() if container.pod_uid != uid}
        if told:
            self.broker.run_ended(uid)
            self.broker.pod_stopped(uid)
        else:
            self.synchronize(heard=True)

    @precondition(lambda self: self.containers)
    @rule(data=st.data())
    def container_ends(self, data: st.DataObject) -> None:
        identifier = data.draw(st.sampled_from(sorted(self.containers)))
        del self.containers[identifier]
        self.broker.run_ended(identifier)

    @rule(heard=st.booleans())
    def synchronize(self, heard: bool) -> None:
        self.broker.observe_pods({container.pod_uid for container in self.pods.values()} if heard else None)
        if heard:
            self.broker.observe_containers({i: Instance(i, c.id, c.pod_uid) for i, c in self.containers.items()})

    @rule(seconds=st.sampled_from([0.5, 5, 20, 100]), pressed=st.booleans())
    def look(self, seconds: float, pressed: bool) -> None:
        super().look(seconds)
        for allocation in self.broker.releasable(pressed=pressed):
            assert allocation.key not in self.pods
            assert allocation.key not in self.running or not allocation.container
            if allocation.container is not None and self.broker.begin_release(allocation.key, pressed=pressed):
                self.broker.release(allocation.key)

    @invariant()
    def annotated_containers_that_run_are_recorded(self) -> None:
        if hasattr(self, "broker"):
            assert set(self.pods) <= {a.key for a in self.broker.allocations()}

    @invariant()
    def gpus_set_aside_hold_nothing_else_new(self) -> None:
        if not hasattr(self, "broker") or self.config.annotations is None or self.config.annotations.share:
            return
        inspection = self.listed()
        held = {(a.resource, share) for a in inspection.allocations for share in a.device_ids}
        for name, published in inspection.lists.items():
            for device in published.advertisement.devices:
                if device.healthy and (name, device.id) not in held:
                    for gpu in inspection.view.groups[device.id.partition("::")[0]].members:
                        assert not self.config.annotations.gpus.admits(gpu.info)


AnnotatedPods.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAnnotatedPods = AnnotatedPods.TestCase


class Limits(RuleBasedStateMachine):
    """Containers with hard limits, some of which may borrow, on a node whose every part may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="gf-", dir="/tmp")
        self.world = World(Path(self.directory), config(*RESOURCES, *BURST[2:5]), gpus=2)
        self.world.daemon = structs.replace(ready(), protocol=3)
        self.world.hard_limits = CAN
        self.world.broker.set_gpu_kind(HOOKED_KIND, {}, frozenset({HOOKED_KIND}))
        self.world.tell()
        self.cgroups: dict[str, str] = {}

    @rule(data=st.data(), name=st.sampled_from(["a", "ab", "t", "tb", "u"]), by_hook=st.booleans())
    def start(self, data: st.DataObject, name: str, by_hook: bool) -> None:
        world = self.world
        world.broker.publish()
        published = world.broker.wait_list(f"gpufrac.dev/{name}", -1, 0, lambda: False)
        held = {share for a in world.broker.allocations() if a.resource.endswith(f"/{name}") for share in a.device_ids}
        assert published is not None
        free = [d.id for d in published.advertisement.devices if d.healthy and d.id not in held]
        if not free:
            return
        outcome = world.broker.allocate(f"gpufrac.dev/{name}", [data.draw(st.sampled_from(free))])
        if not isinstance(outcome, Allocation):
            return
        world.tell()
        world.keeper.attach()
        world.run(outcome, pod=outcome.key)
        if outcome.key in world.specs.files:
            self.cgroups[outcome.key] = world.start(outcome)
            if not by_hook:
                self.drift_of(outcome.key, None)

    def drift_of(self, key: str, hard_bytes: int | None) -> None:
        limits = self.world.mpsd.limits_of
        for place in [place for place in limits if place[1] == self.cgroups[key]]:
            limits[place] = structs.replace(limits[place], hard_bytes=hard_bytes)

    @precondition(lambda self: self.cgroups)
    @rule(data=st.data(), hard_gib=st.sampled_from([None, 1, 8, 60]))
    def drift(self, data: st.DataObject, hard_gib: int | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.cgroups)))
        self.drift_of(key, None if hard_gib is None else hard_gib * GIB)

    @precondition(lambda self: self.cgroups)
    @rule(data=st.data())
    def restart_container(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.cgroups)))
        self.world.end(self.cgroups.pop(key))
        (allocation,) = (a for a in self.world.broker.allocations() if a.key == key)
        if key in self.world.specs.files:
            self.cgroups[key] = self.world.start(allocation)

    @precondition(lambda self: self.cgroups)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.cgroups)))
        self.world.end(self.cgroups.pop(key))
        self.world.kubelet.containers.pop(("ns", key, "c"))
        self.world.pass_time(40)

    @rule(down=st.booleans(), refuses=st.sampled_from(["", "permission denied"]))
    def mpsd_changes(self, down: bool, refuses: str) -> None:
        self.world.mpsd.down, self.world.mpsd.refuses = down, refuses

    @rule(limits=st.sampled_from([CAN, CAN, CANNOT, HardLimits()]))
    def driver_changes(self, limits: HardLimits) -> None:
        self.world.hard_limits = limits
        self.world.tell()
        self.world.keeper.attach()

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule()
    def a_wrong_limit_is_said_after_the_next_full_look(self) -> None:
        world = self.world
        places = {directory: key for key, directory in self.cgroups.items()}
        live = {a.key: a for a in world.broker.allocations()}
        wrong = {
            places[directory]
            for (_, directory), found in world.mpsd.limits_of.items()
            if live[places[directory]].enforcement is Enforcement.HARD
            and found.hard_bytes != live[places[directory]].limit_bytes
        }
        world.now_s += VERIFIED_S
        world.keeper.observe()
        world.keeper.check_limits()
        shown = {a.key: a for a in world.picture().allocations}
        for key in wrong:
            assert shown[key].reason, "a limit reads back wrong, and nobody says so"
            if not world.mpsd.down:
                assert shown[key].enforcement != "hard"
        hard = world.broker.node.hard
        if not (world.mpsd.down or world.mpsd.refuses or (hard.known and hard.limits.missing)):
            for (_, directory), found in world.mpsd.limits_of.items():
                allocation = live[places[directory]]
                if allocation.enforcement is not Enforcement.HARD:
                    continue
                assert found.hard_bytes is not None
                assert found.hard_bytes <= allocation.limit_bytes, "one that is lower is never raised"
                if found.hard_bytes == allocation.limit_bytes:
                    assert found.soft_bytes == allocation.soft_bytes

    def teardown(self) -> None:
        self.world.ledger.close()
        shutil.rmtree(self.directory)


Limits.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestLimits = Limits.TestCase


class ModelPod(msgspec.Struct, eq=False):
    """A pod of the modelled kubelet. `granted`: container -> its allocation; `plain` are plain init containers.
    `active`: the kubelet counts it; `runs`: its process lives; `on_gpu`: and holds memory of a GPU."""

    uid: str
    name: str
    granted: dict[str, Allocation]
    plain: tuple[str, ...] = ()
    active: bool = True
    started: bool = False
    runs: bool = False
    on_gpu: bool = False

    @property
    def shares(self) -> set[tuple[str, str]]:
        return {(a.resource, share) for a in self.granted.values() for share in a.device_ids}


class Pods(RuleBasedStateMachine):
    """Pods come and go on few shares, as a kubelet admits and forgets them: plain init containers pass shares on, pods
    are deleted by force while their processes live, names come back, entries of the checkpoint go stale, and kubelet
    and plugin restart. No share has two pods' processes, and no allocation two pods."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="gf-", dir="/tmp")
        self.world = World(Path(self.directory), config(resource("b", fixed(30)), resource("u", units(10))), gpus=1)
        self.pods: list[ModelPod] = []
        self.count = 0

    # --- the kubelet

    def active(self) -> list[ModelPod]:
        return [pod for pod in self.pods if pod.active]

    def show(self) -> None:
        """What PodResources lists: app containers of the pods that count."""
        self.world.kubelet.containers = {
            ("ns", pod.name, container): {a.resource: a.device_ids}
            for pod in self.active()
            for container, a in pod.granted.items()
            if container not in pod.plain
        }

    def write_checkpoint(self) -> None:
        """As at each allocation; entries of others stay until then."""
        self.world.write_checkpoint(
            [
                self.world.checkpoint(a, pod.uid) | {"ContainerName": container, "AllocResp": answer_with(a.key)}
                for pod in self.active()
                for container, a in pod.granted.items()
            ]
        )

    def pod_directory(self, pod: ModelPod) -> Path:
        return self.world.root / "pods" / pod.uid

    def ask(self, pod: ModelPod, container: str, name: str, ids: Sequence[str]) -> Allocation | None:
        self.show()
        outcome = self.world.broker.allocate(name, ids, self.world.keeper.recheck)
        if isinstance(outcome, Refusal):
            return None
        pod.granted[container] = outcome
        self.show()
        self.write_checkpoint()
        return outcome

    @rule(
        data=st.data(),
        name=st.sampled_from(["b", "u"]),
        init=st.sampled_from([0, 0, 1, 2]),
        more=st.integers(0, 2),
        as_before=st.booleans(),
        between=st.sampled_from(["", "", "look", "attach"]),
    )
    def admit(self, data: st.DataObject, name: str, init: int, more: int, as_before: bool, between: str) -> None:
        """`init`: units, or the one share, that a plain init container asks for first."""
        world, resource_name = self.world, f"gpufrac.dev/{name}"
        self.count += 1
        known = {pod.name for pod in self.active()}
        free_names = sorted({pod.name for pod in self.pods} - known) if as_before else []
        pod = ModelPod(f"uid-{self.count}", free_names[0] if free_names else f"p{self.count}", {})
        published = world.broker.wait_list(resource_name, -1, 0, lambda: False)
        taken = {share for other in self.active() for share in other.shares}
        assert published is not None
        free = [d.id for d in published.advertisement.devices if d.healthy and (resource_name, d.id) not in taken]
        init = min(init, 1) if name == "b" else init
        size = 1 if name == "b" else max(1, init + more)
        if len(free) < size:
            return
        ids = data.draw(st.permutations(free))[:size]
        self.pods.append(pod)
        earlier = {a.key for other in self.pods if self.is_known(other) for a in other.granted.values()}
        if init:
            pod.plain = ("i",)
            first = self.ask(pod, "i", resource_name, ids[:init])
            if between == "attach":
                world.tell()
                world.keeper.attach()
            elif between == "look":
                world.now_s += 2
                world.keeper.observe()
            if first is not None:
                again = self.ask(pod, "c", resource_name, ids)
                if again is not None and len(ids) == init:
                    assert again == first, "containers of one pod lost each other's allocation"
        else:
            self.ask(pod, "c", resource_name, ids)
        if "c" not in pod.granted:
            pod.active = False  # refused
            return
        self.pod_directory(pod).mkdir()
        assert earlier.isdisjoint(a.key for a in pod.granted.values()), "a pod was given another pod's allocation"
        world.tell()
        world.keeper.attach()

    def is_known(self, pod: ModelPod) -> bool:
        """Whether it ran and something tells of it. One that came and went between two looks, process and directory,
        can't be told from the pod that is being admitted: its allocation may be taken over (ADR 0014)."""
        pods = self.world.broker.inspect().pods
        return pod.started and (pod.runs or any(pod.uid in pods.get(a.key, {}) for a in pod.granted.values()))

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), on_gpu=st.booleans())
    def start(self, data: st.DataObject, on_gpu: bool) -> None:
        """A container starts where its files are there."""
        waiting = [pod for pod in self.active() if not pod.runs]
        if not waiting:
            return
        pod = data.draw(st.sampled_from(waiting))
        if any(a.key not in self.world.specs.files for a in pod.granted.values()):
            return
        for other in self.pods:
            assert not (other is not pod and other.runs and other.shares & pod.shares), "a share has two processes"
        pod.started = pod.runs = True
        pod.on_gpu = on_gpu
        self.tell_processes()

    @precondition(lambda self: any(pod.runs for pod in self.pods))
    @rule(data=st.data())
    def take_memory(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([pod for pod in self.pods if pod.runs])).on_gpu = True
        self.tell_processes()

    def tell_processes(self) -> None:
        world = self.world
        world.mpsd.on_gpu = {
            world.infos[0].uuid: tuple(
                GpuClient(pid=n, allocation_key=pod.granted["c"].key, pod_uid=pod.uid)
                for n, pod in enumerate(self.pods, 100)
                if pod.runs and pod.on_gpu
            )
        }
        world.processes = {
            pod.uid: [PodProcess(n, "c", pod.granted["c"].key, "python")]
            for n, pod in enumerate(self.pods, 100)
            if pod.runs
        }

    @precondition(lambda self: any(pod.active for pod in self.pods))
    @rule(data=st.data(), force=st.booleans())
    def delete(self, data: st.DataObject, force: bool) -> None:
        pod = data.draw(st.sampled_from(self.active()))
        pod.active = False
        if not (force and pod.runs):
            self.end(pod)
        self.show()

    @precondition(lambda self: any(pod.runs and not pod.active for pod in self.pods))
    @rule(data=st.data())
    def end_leftover(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from([pod for pod in self.pods if pod.runs and not pod.active])))

    def end(self, pod: ModelPod) -> None:
        pod.runs = pod.on_gpu = False
        if self.pod_directory(pod).exists():
            self.pod_directory(pod).rmdir()
        self.tell_processes()

    @rule(seconds=st.sampled_from([0.3, 1, 5, 20, 100]))
    def look(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        self.world.tell()
        self.world.keeper.attach()

    @rule()
    def kubelet_restarts(self) -> None:
        self.write_checkpoint()  # it starts by dropping what is stale
        self.world.start_kubelet()

    @rule(seen=st.booleans())
    def plugin_restarts(self, seen: bool) -> None:
        """`seen`: it looked at the kubelet before anybody asks."""
        if seen:
            self.world.restart()
        else:
            self.world.kubelet.down = True
            self.world.restart()
            self.world.kubelet.down = False

    # --- what must hold

    @invariant()
    def what_runs_or_is_admitted_is_booked(self) -> None:
        live = {a.key for a in self.world.broker.allocations()}
        for pod in self.pods:
            if pod.active or (pod.runs and pod.on_gpu):
                assert {a.key for c, a in pod.granted.items() if c not in pod.plain} <= live
        gpu = self.world.infos[0]
        held = self.world.broker.inspect().held[gpu.uuid]
        assert held.granted_bytes <= gpu.memory_total_bytes

    def teardown(self) -> None:
        self.world.ledger.close()
        shutil.rmtree(self.directory)


Pods.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPods = Pods.TestCase
