"""A drained GPU takes nothing new and keeps what it has, whatever happens to the plugin."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.grants.drains import Drain, Drains
from deviceplugin.plan.allocation import Refusal
from mpsd.common.errors import ConfigError, GpufracError, TransientError
from mpsd.gpu.model import Mode
from tests.builders import config, fixed, resource, uuid
from tests.refusals import Kind, kind_of
from tests.world import CONFIG, SHARE, World


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp, structs.replace(CONFIG, resources=(*CONFIG.resources, SLICED)))
    yield made
    made.ledger.close()


SLICED = resource("t", fixed(8), Mode.TIME_SLICING)


def healthy(world: World, name: str) -> list[str]:
    world.broker.publish()
    published = world.broker.wait_list(f"gpufrac.dev/{name}", -1, 0, lambda: False)
    assert published is not None
    return [device.id for device in published.advertisement.devices if device.healthy]


def test_nothing_new_in_any_mode_and_what_is_held_goes_on(world: World) -> None:
    got = world.grant()
    world.run(got)
    world.keeper.observe()
    drain = world.broker.drain(uuid(0), "  fan noise ")
    assert drain.text == "drained by an operator at 1970-01-01 00:01:40Z: fan noise"
    world.keeper.attach()
    for name in ("a", "b", "u", "t"):
        assert {share for share in healthy(world, name) if share.startswith(uuid(0))} == (
            {SHARE} if name == "a" else set()
        )
    assert set(world.specs.files) == {got.key}, "its container may restart"
    refused = world.broker.allocate("gpufrac.dev/a", [f"{uuid(0)}::1"])
    assert isinstance(refused, Refusal)
    assert kind_of(refused) is Kind.NO_ROOM
    assert drain.text in refused.message
    gpus = {gpu.uuid: gpu for gpu in world.picture().gpus}
    assert (gpus[uuid(0)].drained, gpus[uuid(0)].reason, gpus[uuid(1)].drained) == (drain.text, drain.text, "")
    world.broker.undrain(uuid(0))
    assert len(healthy(world, "a")) == 18


def test_it_outlives_restarts_and_reloads(world: World) -> None:
    world.broker.drain(uuid(0), "r")
    world.broker.apply_config(config(resource("a", fixed(4))))
    assert not [share for share in healthy(world, "a") if share.startswith(uuid(0))]
    world.broker = world.open_broker(CONFIG)
    world.tell()
    assert not [share for share in healthy(world, "a") if share.startswith(uuid(0))]
    world.broker.undrain(uuid(0))
    assert Drains(world.drains_path).by_gpu == {}


def test_both_ways_may_be_asked_again(world: World) -> None:
    first = world.broker.drain(uuid(0), "r")
    world.now_s += 60
    assert world.broker.drain(uuid(0), "r") == first
    assert world.broker.drain(uuid(0), "other").at_unix_s == 160
    for _ in range(2):
        world.broker.undrain(uuid(0))


@pytest.mark.parametrize("name", ["GPU-none", "", "0", "x" * 10_000])
def test_an_unknown_gpu_is_refused_with_those_known(world: World, name: str) -> None:
    for call in (world.broker.drain, world.broker.undrain):
        with pytest.raises(GpufracError) as caught:
            call(name)
        assert uuid(1) in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("reason", ["a\nb", "x" * 201, "\x1b[31m"])
def test_a_reason_that_is_no_short_plain_text_is_refused(world: World, reason: str) -> None:
    with pytest.raises(ConfigError):
        world.broker.drain(uuid(0), reason)
    assert len(healthy(world, "a")) == 18


def test_a_drain_of_a_gpu_that_is_gone_can_be_ended(short_tmp: Path) -> None:
    Drains(str(short_tmp / "drains.json")).put(Drain(gpu="GPU-gone", at_unix_s=1))
    world = World(short_tmp)
    world.broker.undrain("GPU-gone")
    assert Drains(world.drains_path).by_gpu == {}
    world.ledger.close()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"version":2,"drained":[]}', b'{"version":1,"drained":[{"gpu":1}]}']
)
def test_a_file_that_cannot_be_read_drains_nothing_and_is_told_and_kept(short_tmp: Path, content: bytes) -> None:
    path = short_tmp / "drains.json"
    path.write_bytes(content)
    world = World(short_tmp)
    assert len(healthy(world, "a")) == 18
    assert any(str(path) in problem and "drain them again" in problem for problem in world.broker.problems)
    assert Path(f"{path}.unreadable").read_bytes() == content
    world.broker.drain(uuid(0))
    assert set(Drains(str(path)).by_gpu) == {uuid(0)}
    world.ledger.close()


def test_a_drain_that_cannot_be_recorded_is_none(world: World) -> None:
    os.mkdir(world.drains_path)
    with pytest.raises(TransientError, match="cannot record"):
        world.broker.drain(uuid(0))
    assert len(healthy(world, "a")) == 18


def test_a_drained_member_drains_its_group(short_tmp: Path) -> None:
    cfg = config(resource("pair", fixed(20), groups=("pair0",)), resource("a", fixed(8)), groups=(("pair0", (0, 1)),))
    world = World(short_tmp, cfg, gpus=3)
    got = world.grant("pair", "pair0::0")
    world.run(got)
    world.keeper.observe()
    drain = world.broker.drain(uuid(1))
    assert healthy(world, "pair") == ["pair0::0"]
    assert len(healthy(world, "a")) == 9
    gpus = world.picture().gpus
    assert [gpu.reason for gpu in gpus] == [f"GPU 1: {drain.text}", drain.text, ""]
    assert [gpu.group for gpu in gpus] == ["pair0", "pair0", ""]
    world.ledger.close()
