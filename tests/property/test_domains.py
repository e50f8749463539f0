"""Containers on one to four of eight GPUs come and go in both modes, in any order and with restarts between.

No memory is booked twice, no GPU has two modes, nobody may start without a daemon that has all of its GPUs, nobody's
daemon ends under it, every refusal names who it waits for and is over when that is, and in the end every GPU has a
daemon of its own.
"""

import shutil
import tempfile
from collections.abc import Collection

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import Allocation, ContainerAsk, Refusal
from deviceplugin.plan.domains import domain_by_gpu
from deviceplugin.plan.reasons import OfferCode
from mpsd.config.model import Domains, Enforcement
from mpsd.gpu.model import Mode
from tests.domainnode import DomainNode, annotated, ask

GPUS = 8
PODS = st.sampled_from([f"p{n}." for n in range(10)])
"""Names of which none is a part of another, as texts go on after them."""
SEVERAL = st.lists(st.integers(0, GPUS - 1), min_size=2, max_size=4, unique=True)
SIZES = st.sampled_from([(4, 4), (4, 4), (4, 10), (20, 20), (20, 50), (45, 45), (45, 75)])
"""Request and limit in GiB; of the last ones not all fit beside each other."""
RARELY = st.sampled_from([False, False, False, False, True])


class Placements(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="gf-", dir="/tmp")
        self.waiting: dict[str, ContainerAsk] = {}
        """Those that were refused: the kubelet tries again."""
        self.asks: dict[str, ContainerAsk] = {}
        """What the pods that are there asked for."""
        self.before_restart: set[str] = set()
        """Keys that a plugin before this one granted: it can't know whether containers of them were made."""

    @initialize(domains=st.sampled_from([Domains.AUTO, Domains.AUTO, Domains.NODE]), mode=st.sampled_from(Mode))
    def begin(self, domains: Domains, mode: Mode) -> None:
        """`mode`: of most containers."""
        self.mode = mode
        self.node = DomainNode(self.directory, annotated(domains), GPUS)

    # --- what happens

    @rule(pod=PODS, gpu=st.integers(0, GPUS - 1), size=SIZES, other=RARELY, runs=st.booleans())
    def arrive_on_one(self, pod: str, gpu: int, size: tuple[int, int], other: bool, runs: bool) -> None:
        """`runs`: and its program uses it as soon as it may."""
        self.arrive(pod, [gpu], size, other, runs)

    @rule(pod=PODS, gpus=SEVERAL, size=SIZES, other=RARELY, runs=st.booleans())
    def arrive_on_several(self, pod: str, gpus: list[int], size: tuple[int, int], other: bool, runs: bool) -> None:
        self.arrive(pod, gpus, size, other, runs)

    def arrive(self, pod: str, gpus: list[int], size: tuple[int, int], other: bool, runs: bool) -> None:
        if pod in self.node.pods:
            return
        mode = next(mode for mode in Mode if (mode is self.mode) is not other)
        outcome = self.try_to_create(ask(pod, gpus, mode, *size))
        if runs and isinstance(outcome, Allocation):
            self.mpsd_follows()
            self.begin_client(pod, told=True)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def try_again(self, data: st.DataObject) -> None:
        self.try_to_create(self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))])

    @rule()
    def mpsd_follows(self) -> None:
        self.node.follow()
        self.permitted_have_their_daemon()
        self.both_know_the_same_domains()

    @rule(told=st.booleans())
    def mpsd_comes_one_step_further(self, told: bool) -> None:
        self.node.mpsd.desired = self.node.broker.desired()
        self.node.mpsd.step()
        if told:
            self.node.tell()
            self.permitted_have_their_daemon()

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), told=st.booleans())
    def use_gpus(self, data: st.DataObject, told: bool) -> None:
        self.begin_client(data.draw(st.sampled_from(self.idle())), told=told)

    def begin_client(self, pod: str, *, told: bool) -> None:
        """Where it may start, and its daemon is there."""
        allocation = self.node.pods[pod]
        reaches = not allocation.needs_daemon or self.node.mpsd.served_by(allocation.gpus) is not None
        if self.node.may_start(pod) and reaches:
            self.node.begin_client(pod, told=told)

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def leave_gpus(self, data: st.DataObject) -> None:
        self.node.end_client(data.draw(st.sampled_from(self.busy())))

    @precondition(lambda self: self.node.pods)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.node.delete(data.draw(st.sampled_from(sorted(self.node.pods))))

    @rule(told=st.booleans())
    def plugin_restarts(self, told: bool) -> None:
        before = {a.key: a for a in self.node.broker.allocations()}
        self.node.restart_plugin()
        self.before_restart.update(before)
        assert {a.key: a for a in self.node.broker.allocations()} == before
        if told:
            self.node.tell()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def whoever_is_named_goes_until_it_is_granted(self, data: st.DataObject) -> None:
        """As long as it takes, and no longer than there are others."""
        wanted = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        for _ in range(2 * len(self.node.pods) + 1):
            self.node.follow()
            outcome = self.try_to_create(wanted)
            if isinstance(outcome, Allocation):
                return
            for pod in self.in_the_way(wanted, outcome):
                if outcome.code == OfferCode.DAEMONS_IN_USE:
                    self.node.end_client(pod)
                else:
                    self.node.delete(pod)
        raise AssertionError("everybody that it named is gone, and it waits still")

    @rule()
    def all_that_could_not_start_try_again(self) -> None:
        """Then nobody keeps GPUs that it can't use: it may start, or has them no more and says for whom it waits."""
        node = self.node
        node.follow()
        for pod in [pod for pod in node.pods if not node.may_start(pod)]:
            self.try_to_create(self.asks[pod])
        node.follow()
        assert all(node.may_start(pod) or a.key in self.before_restart for pod, a in node.pods.items())

    # --- with what

    def idle(self) -> list[str]:
        return sorted(pod for pod, a in self.node.pods.items() if a.key not in self.node.mpsd.clients)

    def busy(self) -> list[str]:
        return sorted(pod for pod, a in self.node.pods.items() if a.key in self.node.mpsd.clients)

    def try_to_create(self, wanted: ContainerAsk) -> Allocation | Refusal:
        pod = wanted.container.pod_uid
        outcome = self.node.create(wanted)
        if isinstance(outcome, Refusal):
            self.waiting[pod] = wanted
            # Of a pod that is gone already its process is named, until mpsd was heard again.
            assert self.in_the_way(wanted, outcome) or "process " in outcome.message, outcome.message
            return outcome
        self.waiting.pop(pod, None)
        self.asks[pod] = wanted
        assert outcome.enforcement is Enforcement.HARD
        assert (outcome.request_bytes, outcome.limit_bytes) == (wanted.request_bytes, wanted.limit_bytes)
        assert outcome.soft_bytes == wanted.request_bytes
        assert outcome.gpus == wanted.gpus
        return outcome

    def in_the_way(self, wanted: ContainerAsk, refusal: Refusal) -> Collection[str]:
        """Pods whose end it waits for, or that of their clients, by what it says."""
        node = self.node
        there = {pod: a for pod, a in node.pods.items() if not set(a.gpus).isdisjoint(wanted.gpus)}
        if refusal.code == OfferCode.MODE_BOUND:
            return [pod for pod, a in there.items() if a.mode is not wanted.mode]
        if refusal.code == OfferCode.MEMORY_TAKEN:
            usable_bytes = node.broker.inspect().view.gpus[wanted.gpus[0]].usable_bytes
            held = {gpu: sum(a.request_bytes for a in there.values() if gpu in a.gpus) for gpu in wanted.gpus}
            assert max(held.values()) + wanted.request_bytes > usable_bytes, "in every order"
            return [*there]
        assert refusal.code in (OfferCode.DAEMONS_IN_USE, OfferCode.NOT_GUARANTEED), refusal
        named = [pod for pod in node.pods if f"ns/{pod}/main" in refusal.message]
        if refusal.code == OfferCode.DAEMONS_IN_USE:
            assert wanted.mode is Mode.SM_SHARING
            assert set(named) <= set(self.busy()), "who does not use it is not in the way"
        return named

    # --- what must hold

    def permitted_have_their_daemon(self) -> None:
        """mpsd has just been heard."""
        for allocation, way in self.node.broker.permissions().permitted.values():
            if allocation.needs_daemon:
                assert self.node.mpsd.served_by(allocation.gpus) is not None
                assert way.pipe_directory

    def both_know_the_same_domains(self) -> None:
        inspection = self.node.broker.inspect()
        accounts = Accounts()
        for allocation in inspection.allocations:
            accounts.add(allocation)
        ours = {gpu: domain.name for gpu, domain in domain_by_gpu(inspection.view, accounts).items()}
        theirs = {gpu: name for name, planned in self.node.mpsd.plans().items() for gpu in planned.domain.gpus}
        assert ours == theirs

    @invariant()
    def never_more_than_usable_and_one_mode_per_gpu(self) -> None:
        if not hasattr(self, "node"):
            return
        inspection = self.node.broker.inspect()
        for gpu in inspection.view.gpus.values():
            on_gpu = [a for a in inspection.allocations if gpu.uuid in a.gpus]
            assert sum(a.request_bytes for a in on_gpu) <= gpu.usable_bytes
            assert len({a.mode for a in on_gpu}) <= 1
            if any(a.may_borrow for a in on_gpu) and not all(a.takes_back for a in on_gpu):
                assert sum(a.limit_bytes for a in on_gpu) <= gpu.usable_bytes, "nobody takes it back for them"

    @invariant()
    def nobodys_daemon_ends_under_it(self) -> None:
        if not hasattr(self, "node"):
            return
        mpsd = self.node.mpsd
        owned = [gpu for gpus in mpsd.daemons.values() for gpu in gpus]
        assert len(owned) == len(set(owned)), "one daemon owns a GPU"
        for allocation in self.node.pods.values():
            if allocation.key in mpsd.clients and allocation.needs_daemon:
                assert mpsd.served_by(allocation.gpus) is not None

    def teardown(self) -> None:
        try:
            if hasattr(self, "node"):
                self.everything_drains()
        finally:
            shutil.rmtree(self.directory)

    def everything_drains(self) -> None:
        node = self.node
        for pod in sorted(node.pods):
            node.delete(pod)
        node.follow()
        assert not node.broker.allocations()
        owned = {gpu.uuid: (gpu.uuid,) for gpu in node.mpsd.infos}
        assert node.config.annotations is not None
        if node.config.annotations.domains is Domains.NODE:
            assert [*node.mpsd.daemons.values()] == [tuple(owned)]
        else:
            assert node.mpsd.daemons == owned
        node.close()


Placements.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPlacements = Placements.TestCase
