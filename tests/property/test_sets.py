"""Shares on any so many GPUs beside shares on one, in both modes and with both MPS protocols: whatever is granted and
released, and whoever uses GPUs, nothing is granted twice, the listed IDs stay, and what is Healthy of one list can be
granted one after the other, each with a daemon that its container can reach."""

from collections import Counter
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import advertise
from deviceplugin.plan.allocate import plan
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.domains import domain_by_gpu, joining_objection
from deviceplugin.plan.model import NodeView, ResourceView
from deviceplugin.plan.preferred import preferred
from deviceplugin.plan.sound import flaw
from deviceplugin.plan.view import gpu_view, node_view
from mpsd.config.model import Enforcement, GpuSelection, Memory, NamespaceMount, NodeConfig, Resource
from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import GpuClient
from tests.builders import HARD, NOT_HARD, config, fixed, fraction, info, ready, resource, status

MODES = st.sampled_from(Mode)
MEMORIES: st.SearchStrategy[Memory] = st.sampled_from(
    [fixed(7), fixed(20), fixed(40), fraction(0.5), fixed(6, 30), fraction(0.3, 0.9)]
)
SELECTIONS = st.sampled_from([GpuSelection(), GpuSelection(exclude=(0,)), GpuSelection(include=(0, 1, 2))])


@st.composite
def configs(draw: st.DrawFn) -> NodeConfig:
    def made(name: str, count: int) -> Resource:
        memory, mode = draw(MEMORIES), draw(MODES)
        return resource(name, memory, mode, gpu_count=count, gpus=draw(SELECTIONS), enforcement=Enforcement.NONE)

    several = [made(f"s{n}", draw(st.integers(2, 3))) for n in range(draw(st.integers(1, 2)))]
    single = [made(f"o{n}", 1) for n in range(draw(st.integers(0, 2)))]
    grouped = (resource("g", fixed(10), groups=("g",)),) if draw(st.booleans()) else ()
    cfg = config(
        *several,
        *single,
        *grouped,
        groups=(("g", (0, 2)),) if grouped else (),
        shared_groups=("g",) if grouped and draw(st.booleans()) else (),
    )
    mount = draw(st.sampled_from(NamespaceMount))
    limit = draw(st.sampled_from([3, 48]))
    return structs.replace(cfg, mps=structs.replace(cfg.mps, namespace_mount=mount, client_limit=limit))


class Shares(RuleBasedStateMachine):
    sizes_gib: ClassVar = (80, 50, 80, 80, 24)

    def __init__(self) -> None:
        super().__init__()
        self.accounts = Accounts()
        self.generation = 0
        self.users: set[str] = set()
        """Keys of allocations with a client."""
        self.strangers: set[str] = set()
        """GPUs whose daemon has a client of nobody's."""
        self.daemon: dict[str, str] = {}
        """The daemon that serves each GPU."""

    @initialize(cfg=configs(), gpus=st.integers(2, 5), protocol=st.sampled_from([2, 3, 3]), hard=st.booleans())
    def begin(self, cfg: NodeConfig, gpus: int, protocol: int, hard: bool) -> None:
        self.config, self.protocol = cfg, protocol
        self.hard = HARD if hard and protocol == 3 else NOT_HARD
        self.infos = [info(n, size) for n, size in enumerate(self.sizes_gib[:gpus])]
        self.daemon = {gpu.uuid: gpu.uuid for gpu in self.infos}
        self.listed = {name: set(self.devices(view)) for name, view in self.view().resources.items()}

    def view(self, accounts: Accounts | None = None) -> NodeView:
        accounts = self.accounts if accounts is None else accounts
        views = []
        for gpu in self.infos:
            own = [a for a in accounts.on_gpu(gpu.uuid).values() if a.key in self.users]
            clients = [GpuClient(pid=n, allocation_key=a.key, mps=a.needs_daemon) for n, a in enumerate(own, 2)]
            clients += [GpuClient(pid=1, mps=True)] * (gpu.uuid in self.strangers)
            daemon = structs.replace(ready(), name=self.daemon[gpu.uuid], protocol=self.protocol)
            there = status(gpu, daemon=daemon, clients=tuple(clients))
            views.append(gpu_view(there, self.config, protocol=self.protocol))
        return node_view(
            self.config, views, accounts.held_groups(), held_sets=accounts.held_sets(), hard=self.hard, complete=True
        )

    def devices(self, view: ResourceView) -> list[str]:
        return [share for shares in view.device_ids.values() for share in shares]

    def free(self, name: str, view: NodeView, *, healthy: bool = True) -> list[str]:
        found = advertise(view.resources[name], view, self.accounts).devices
        return [d.id for d in found if (d.healthy or not healthy) and not self.accounts.is_held(name, d.id)]

    def grant(self, name: str, share: str, view: NodeView, accounts: Accounts) -> Allocation | None:
        self.generation += 1
        outcome = plan(view.resources[name], view, accounts, [share], generation=self.generation)
        if not isinstance(outcome, Allocation):
            return None
        assert flaw(outcome) == ""
        accounts.add(outcome)
        return outcome

    # --- what happens

    @rule(data=st.data(), by_wish=st.booleans(), healthy=st.sampled_from([True, True, False]))
    def allocate(self, data: st.DataObject, by_wish: bool, healthy: bool) -> None:
        """A list may be stale, so that what is not Healthy any more must be safe to ask for, too."""
        view = self.view()
        name = data.draw(st.sampled_from(sorted(view.resources)))
        free = self.free(name, view, healthy=healthy)
        if free:
            wish = preferred(view.resources[name], view, self.accounts, free, [], 1) if by_wish else []
            share = wish[0] if wish else data.draw(st.sampled_from(free))
            assert self.grant(name, share, view, self.accounts) or not healthy

    @precondition(lambda self: len(self.accounts) > 0)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(a.key for a in self.accounts)))
        self.users.discard(key)
        self.accounts.remove(key)

    @precondition(lambda self: len(self.accounts) > 0)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        ready_ones = [a.key for a in self.accounts if len({self.daemon[gpu] for gpu in a.gpus}) == 1]
        if ready_ones:
            self.users ^= {data.draw(st.sampled_from(sorted(ready_ones)))}

    @rule(data=st.data())
    def stranger(self, data: st.DataObject) -> None:
        self.strangers ^= {data.draw(st.sampled_from(self.infos)).uuid}

    @rule()
    def mpsd_follows(self) -> None:
        self.follow(self.accounts)

    def follow(self, accounts: Accounts) -> None:
        """Daemons become those that are planned, where nobody is in the way of it."""
        owners = domain_by_gpu(self.view(accounts), accounts)
        busy = {self.daemon[gpu] for a in accounts if a.key in self.users for gpu in a.gpus}
        busy |= {self.daemon[gpu] for gpu in self.strangers if gpu in self.daemon}
        for domain in {owner.name: owner for owner in owners.values()}.values():
            if busy.isdisjoint(self.daemon[gpu] for gpu in domain.gpus):
                self.daemon.update(dict.fromkeys(domain.gpus, domain.name))

    # --- what must hold

    @invariant()
    def nothing_is_granted_twice(self) -> None:
        if not self.daemon:
            return
        view = self.view()
        for gpu in view.gpus.values():
            held = list(self.accounts.on_gpu(gpu.uuid).values())
            assert sum(a.share_bytes for a in held) <= gpu.usable_bytes
            assert len({a.mode for a in held}) <= 1
            if held and held[0].mode is Mode.SM_SHARING:
                assert len(held) <= gpu.client_limit
                assert self.protocol == 3 or len({frozenset(a.gpus) for a in held}) == 1, "one daemon has one limit"

    @invariant()
    def listed_ids_stay(self) -> None:
        if not self.daemon:
            return
        view = self.view()
        assert {name: set(self.devices(of)) for name, of in view.resources.items()} == self.listed
        for name, of in view.resources.items():
            shown = Counter(device.id for device in advertise(of, view, self.accounts).devices)
            assert set(shown) == self.listed[name]
            assert set(shown.values()) <= {1}

    @invariant()
    def what_is_held_is_healthy(self) -> None:
        if not self.daemon:
            return
        view = self.view()
        for name, of in view.resources.items():
            health = {device.id: device.healthy for device in advertise(of, view, self.accounts).devices}
            assert all(health[share] for a in self.accounts if a.resource == name for share in a.device_ids)

    @precondition(lambda self: self.daemon)
    @rule(data=st.data())
    def all_that_is_healthy_can_be_granted_one_after_the_other(self, data: st.DataObject) -> None:
        """And each container that got its own uses it before the next one comes."""
        view = self.view()
        before = dict(self.daemon), set(self.users)
        for name, of in view.resources.items():
            accounts = self.accounts.without(())
            for share in data.draw(st.permutations(self.free(name, view))):
                now = self.view(accounts)
                group = now.group(share.partition("::")[0])
                assert group is not None
                apart = joining_objection(group.members, now, accounts)
                granted = self.grant(name, share, now, accounts)
                assert granted is not None, f"{share} of {name} was Healthy"
                assert not (of.on_sets and granted.needs_daemon and apart), apart
                self.follow(accounts)
                if len({self.daemon[gpu] for gpu in granted.gpus}) == 1:
                    self.users.add(granted.key)
            self.daemon, self.users = dict(before[0]), set(before[1])


Shares.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestShares = Shares.TestCase
