"""What the kubelet runs without a record of ours, or by an answer that we would not give any more."""

import pytest
from msgspec import structs

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.ids import device_id
from mpsd.config.model import CdiConfig, Delivery, Enforcement, GpuDevices
from tests.builders import config, fixed, resource, uuid
from tests.world import CONFIG, SHARE, World, answer_with


def test_a_container_without_a_record_is_adopted_under_its_key(world: World) -> None:
    import base64

    key = "f" * 20
    answer = pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=f"gpufrac.dev/allocation=s{key}")])
    world.kubelet.containers["ns", "old", "c"] = {"gpufrac.dev/a": (SHARE,)}
    entry: dict[str, object] = {
        "PodUID": "uid-1",
        "ContainerName": "c",
        "ResourceName": "gpufrac.dev/a",
        "DeviceIDs": {"-1": [SHARE]},
        "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
    }
    world.write_checkpoint([entry])
    (world.root / "pods" / "uid-1").mkdir(exist_ok=True)
    world.keeper.observe()
    world.tell()
    world.keeper.attach()
    (adopted,) = world.broker.allocations()
    assert (adopted.key, adopted.adopted, adopted.device_ids) == (key, True, (SHARE,))
    assert set(world.specs.files) == {key}


@pytest.mark.parametrize("part", [{"delivery": Delivery.BOTH}, {"gpu_devices": GpuDevices.CDI}])
def test_a_pod_on_shares_answered_differently_now_gets_the_new_answer(world: World, part: dict[str, object]) -> None:
    world.broker.apply_config(config(resource("a", fixed(8), enforcement=Enforcement.NONE), *CONFIG.resources[1:]))
    old = world.grant()
    world.run(old)
    world.keeper.observe()
    world.kubelet.containers.clear()
    world.broker.apply_config(structs.replace(world.broker.node.config, cdi=CdiConfig(**part)))  # type: ignore[arg-type]
    if "gpu_devices" in part:
        world.broker.set_gpu_kind("nvidia.com/gpu", {})
    new = world.broker.allocate(old.resource, old.device_ids, world.keeper.recheck)
    assert isinstance(new, Allocation)
    assert new.key != old.key
    assert new.delivery is part.get("delivery", Delivery.CDI)
    assert bool(new.gpu_kind) is ("gpu_devices" in part)


def test_a_pod_on_shares_whose_size_changed_gets_the_new_size_once_the_old_pod_is_gone(world: World) -> None:
    old = world.grant()
    world.run(old)
    world.keeper.observe()
    world.broker.apply_config(config(resource("a", fixed(16)), *CONFIG.resources[1:]))
    again = world.broker.allocate(old.resource, old.device_ids, world.keeper.recheck)
    assert again == old  # its pod lives: another container of it
    world.keeper.observe()
    world.kubelet.containers.clear()
    new = world.broker.allocate(old.resource, old.device_ids, world.keeper.recheck)
    assert isinstance(new, Allocation)
    assert new.request_bytes == 16 << 30


def test_an_init_container_without_a_record_is_adopted_and_a_dead_pods_key_is_not_taken(world: World) -> None:
    lost = world.grant("u", device_id(uuid(0), 5))
    world.broker.release(lost.key)
    (world.root / "pods" / "uid-live").mkdir()
    entries = [world.checkpoint(lost, "uid-live"), world.checkpoint(lost, "uid-dead")]
    entries[0]["AllocResp"], entries[1]["AllocResp"] = answer_with("a" * 20), answer_with("d" * 20)
    world.write_checkpoint(entries)
    world.keeper.observe()
    assert [(a.key, a.device_ids) for a in world.broker.allocations()] == [("a" * 20, lost.device_ids)]


def test_records_of_versions_without_groups_are_of_their_only_gpu(world: World) -> None:
    got = world.grant()
    world.ledger.put(structs.replace(got, group="", slot=None))
    assert world.open_broker(CONFIG).allocations() == [structs.replace(got, slot=None)]
