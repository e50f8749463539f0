"""The device manager's rules, without gRPC."""

import random
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.sim.kubelet.devicemanager import AllocationError, DeviceManager, Held, NodeResource, PluginError, Slot
from deviceplugin.sim.objects.pods import ContainerSpec, Role

RESOURCE = "example.com/share"


class Fake:
    """An endpoint that grants everything."""

    def __init__(self, preference: Iterable[str] = (), *, choosy: bool = False) -> None:
        self.options = pb.DevicePluginOptions(get_preferred_allocation_available=choosy)
        self.preference = list(preference)
        self.asked: list[list[str]] = []
        self.fails = False

    def allocate(self, device_ids: list[str]) -> pb.AllocateResponse:
        self.asked.append(device_ids)
        if self.fails:
            raise PluginError("rpc error: code = Unknown desc = no")
        return pb.AllocateResponse(container_responses=[pb.ContainerAllocateResponse(envs={"A": "1"})])

    def preferred(self, available: list[str], must_include: list[str], size: int) -> pb.PreferredAllocationResponse:
        chosen = pb.ContainerPreferredAllocationResponse(deviceIDs=self.preference)
        return pb.PreferredAllocationResponse(container_responses=[chosen])

    def pre_start(self, device_ids: list[str]) -> None:
        raise AssertionError


class Node:
    """A device manager with its surroundings."""

    def __init__(self, held: Mapping[Slot, Held] | None = None, registered: Iterable[str] = (), seed: int = 0) -> None:
        self.active: set[str] = set()
        self.saved: list[tuple[dict[Slot, Held], dict[str, list[str]]]] = []
        self.now_s = 0.0
        self.devices = DeviceManager(
            held or {},
            registered,
            active_pods=lambda: self.active,
            save=lambda h, r: self.saved.append((dict(h), {k: list(v) for k, v in r.items()})),
            rng=random.Random(seed),
            monotonic=lambda: self.now_s,
        )

    def offer(self, *ids: str, endpoint: Fake | None = None) -> Fake:
        endpoint = endpoint or Fake()
        self.devices.connected(RESOURCE, endpoint)
        self.devices.listed(RESOURCE, [pb.Device(ID=i, health="Healthy") for i in ids])
        return endpoint

    def admit(self, uid: str, *containers: ContainerSpec, restarting: bool = False) -> None:
        self.active.add(uid)
        self.devices.begin_admission(uid)
        try:
            for container in containers:
                self.devices.allocate(uid, container, restarting=restarting)
        except AllocationError:
            self.active.discard(uid)
            raise
        finally:
            self.devices.end_admission()

    def ids(self, uid: str, name: str = "c") -> frozenset[str]:
        held = self.devices.held(uid, name)
        return held[RESOURCE].ids if RESOURCE in held else frozenset()


def container(count: int, name: str = "c", role: Role = Role.APP) -> ContainerSpec:
    return ContainerSpec(name, {RESOURCE: count}, role)


def test_a_repeat_asks_nobody() -> None:
    node = Node()
    plugin = node.offer("a", "b")
    node.admit("p", container(1))
    node.admit("p", container(1))
    assert len(plugin.asked) == 1


def test_a_changed_request_is_refused() -> None:
    node = Node()
    node.offer("a", "b")
    node.admit("p", container(1))
    with pytest.raises(
        AllocationError, match=r'container "c" changed request for resource "example\.com/share" from 1 to 2'
    ):
        node.admit("p", container(2))


def test_a_resource_known_only_by_allocations_is_unregistered() -> None:
    node = Node({Slot("old", "c", RESOURCE): Held({-1: ("a",)}, b"")})
    node.active.add("old")
    with pytest.raises(AllocationError, match=r"cannot allocate unregistered device example\.com/share"):
        node.admit("p", container(1))


def test_registered_resources_of_the_checkpoint_have_no_capacity_until_their_plugin_is_back() -> None:
    node = Node(registered=[RESOURCE])
    assert node.devices.resources() == {RESOURCE: NodeResource(0, 0)}
    with pytest.raises(AllocationError, match="no healthy devices present"):
        node.admit("p", container(1))
    node.offer("a")
    node.admit("p", container(1))


def test_a_duplicate_id_counts_in_both_sets() -> None:
    node = Node()
    devices = [pb.Device(ID=i, health=h) for i, h in (("a", "Healthy"), ("b", "Healthy"), ("a", "Unhealthy"))]
    node.devices.connected(RESOURCE, Fake())
    node.devices.listed(RESOURCE, devices)
    assert node.devices.resources()[RESOURCE] == NodeResource(3, 2)


def test_a_device_that_vanished_from_the_list_stays_with_its_pod() -> None:
    node = Node()
    node.offer("a")
    node.admit("p", container(1))
    node.devices.listed(RESOURCE, [pb.Device(ID="b", health="Healthy")])
    assert node.ids("p") == {"a"}
    assert node.devices.resources()[RESOURCE] == NodeResource(1, 1)


def test_a_failed_call_leaves_nothing_taken() -> None:
    node = Node()
    plugin = node.offer("a", "b")
    plugin.fails = True
    with pytest.raises(AllocationError, match="rpc error: code = Unknown desc = no"):
        node.admit("p", container(2))
    plugin.fails = False
    node.admit("q", container(2))


def test_a_plugin_that_left_between_pick_and_call_is_unknown() -> None:
    node = Node()

    class Leaves(Fake):
        def preferred(self, available: list[str], must_include: list[str], size: int) -> pb.PreferredAllocationResponse:
            node.devices.disconnected(RESOURCE)
            return pb.PreferredAllocationResponse()

    node.offer("a", endpoint=Leaves(choosy=True))
    with pytest.raises(AllocationError, match=r"unknown Device Plugin example\.com/share"):
        node.admit("p", container(1))


def test_the_checkpoint_is_written_for_every_list_and_every_admission() -> None:
    node = Node()
    node.offer("a", "b")
    assert node.saved == [({}, {RESOURCE: ["a", "b"]})]
    node.admit("p", container(1))
    assert set(node.saved[-1][0]) == {Slot("p", "c", RESOURCE)}
    node.active.clear()
    node.devices.reclaim()
    assert len(node.saved) == 2, "taking back is not written"
    node.devices.listed(RESOURCE, [pb.Device(ID="a", health="Healthy")])
    assert node.saved[-1] == ({}, {RESOURCE: ["a"]})


def test_numa_nodes_are_kept_in_the_checkpoint() -> None:
    node = Node()
    node.devices.connected(RESOURCE, Fake())
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=1)])
    node.devices.listed(RESOURCE, [pb.Device(ID="a", health="Healthy", topology=topology)])
    node.admit("p", container(1))
    assert node.devices.held("p", "c")[RESOURCE].by_numa == {1: ("a",)}


@pytest.mark.parametrize(("elapsed_s", "expected"), [(299.9, NodeResource(1, 0)), (300.0, NodeResource(0, 0))])
def test_capacity_is_kept_for_a_grace(elapsed_s: float, expected: NodeResource) -> None:
    node = Node()
    node.offer("a")
    node.devices.disconnected(RESOURCE)
    node.now_s = elapsed_s
    assert node.devices.resources() == {RESOURCE: expected}


pods = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(Role)), min_size=1, max_size=4), min_size=1, max_size=6
)


@given(pods, st.integers(0, 1000), st.lists(st.sampled_from("abcdefgh"), unique=True), st.booleans())
def test_pods_never_share_devices(
    wishes: list[list[tuple[int, Role]]], seed: int, preference: list[str], choosy: bool
) -> None:
    node = Node(seed=seed)
    node.offer(*"abcdefgh", endpoint=Fake(preference, choosy=choosy))
    for number, wish in enumerate(wishes):
        ordered = sorted(wish, key=lambda pair: pair[1] is Role.APP)
        containers = [container(count, f"c{i}", role) for i, (count, role) in enumerate(ordered)]
        try:
            node.admit(f"p{number}", *containers)
        except AllocationError:
            continue
        for spec in containers:
            assert len(node.ids(f"p{number}", spec.name)) == spec.resources[RESOURCE]
        kept = [node.ids(f"p{number}", spec.name) for spec in containers if spec.role is not Role.INIT]
        assert sum(map(len, kept)) == len(frozenset[str]().union(*kept)), "containers that run together share nothing"
    owners: dict[str, str] = {}
    node.devices.reclaim()
    for uid in node.active:
        for index in range(4):
            for identifier in node.ids(uid, f"c{index}"):
                assert owners.setdefault(identifier, uid) == uid
