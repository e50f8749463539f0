"""A list on the wire is what was advertised, whatever of it was serialised before."""

from collections.abc import Callable

import pytest

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.kubelet import listbytes
from deviceplugin.kubelet.listbytes import ListBytes
from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.advertise import Advertisement, advertise
from deviceplugin.plan.ids import device_id
from deviceplugin.plan.model import Device
from tests.builders import allocation, config, fixed, info, node, resource, uuid

VIEW = node(config(resource("a", fixed(8))), info(0), info(1), info(2))


def listed(accounts: Accounts, before: Advertisement | None = None) -> Advertisement:
    return advertise(VIEW.resources["gpufrac.dev/a"], VIEW, accounts, before=before.parts if before else {})


def told(data: bytes) -> list[tuple[str, bool, tuple[int, ...]]]:
    devices = pb.ListAndWatchResponse.FromString(data).devices
    return [(d.ID, d.health == "Healthy", tuple(node.ID for node in d.topology.nodes)) for d in devices]


def meant(advertisement: Advertisement) -> list[tuple[str, bool, tuple[int, ...]]]:
    return [(d.id, d.healthy, d.numa_nodes) for d in advertisement.devices]


@pytest.fixture
def serialised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many devices were serialised, one entry per part."""
    counts: list[int] = []
    real: Callable[[tuple[Device, ...]], bytes] = listbytes._serialised

    def count(devices: tuple[Device, ...]) -> bytes:
        counts.append(len(devices))
        return real(devices)

    monkeypatch.setattr(listbytes, "_serialised", count)
    return counts


def test_a_list_says_what_is_advertised_and_only_what_changed_is_serialised(serialised: list[int]) -> None:
    lists, accounts = ListBytes(), Accounts()
    first = listed(accounts)
    assert told(lists.of(first)) == meant(first)
    assert serialised == [9, 9, 9]
    for slot in range(9):  # until the GPU is full
        accounts.add(allocation("a", device_id(uuid(1), slot)))
    full = listed(accounts, first)
    assert told(lists.of(full)) == meant(full)
    accounts.add(allocation("a", device_id(uuid(2), 0), gib=40))
    less = listed(accounts, full)
    assert less.healthy < full.healthy
    assert told(lists.of(less)) == meant(less)
    assert serialised == [9, 9, 9, 9], "held shares stay Healthy: the full GPU's part is the one that was there"
    assert lists.of(Advertisement({})) == b""
    assert told(lists.of(less)) == meant(less)
    assert serialised[4:] == [9, 9, 9], "nothing is kept of what was not in the last list"


def test_parts_that_stay_the_same_are_the_same_objects() -> None:
    accounts = Accounts()
    first = listed(accounts)
    accounts.add(allocation("a", device_id(uuid(0), 4)))
    second = listed(accounts, first)
    assert [first.parts[uuid(n)] is second.parts[uuid(n)] for n in range(3)] == [False, True, True]
    assert second.lists_as(first), "a held share is Healthy as before"
    assert second.parts[uuid(0)].devices is first.parts[uuid(0)].devices
