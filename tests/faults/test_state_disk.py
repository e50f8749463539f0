"""The disk of the state is full: what is offered, what is said, and when it is over."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.grants.ledger import PROBE_BYTES, Ledger, LedgerError
from deviceplugin.plan.ids import device_id
from mpsd.common.reason import message_of
from tests.builders import allocation, told, uuid
from tests.world import World

NAME = "gpufrac.dev/a"


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    world = World(short_tmp)
    yield world
    world.broker.close()
    world.ledger.close()


@pytest.fixture
def room(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets how many bytes each write to the ledger's disk still finds; files without content always fit. None: all."""
    left: list[int | None] = [None]
    write = os.write

    def limited(fd: int, data: memoryview) -> int:
        there = os.readlink(f"/proc/self/fd/{fd}").startswith(world.ledger.directory)
        if there and left[0] is not None and len(data) > left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("cdi.atomic.os.write", limited)

    def change(size_bytes: int | None) -> None:
        left[0] = size_bytes

    return change


def free(world: World) -> int:
    world.broker.publish()
    published = world.broker.wait_list(NAME, -1, 0, lambda: False)
    assert published is not None
    held = {share for a in world.broker.allocations() for share in a.device_ids}
    return sum(d.healthy and d.id not in held for d in published.advertisement.devices)


def ask(world: World, slot: int) -> None:
    world.broker.allocate(NAME, [device_id(uuid(0), slot)], world.keeper.recheck)


@pytest.mark.parametrize("left_bytes", [0, 100, PROBE_BYTES - 1])
def test_a_full_disk_refuses_one_pod_and_offers_nothing_until_records_fit(
    world: World, room: Callable[[int | None], None], caplog: pytest.LogCaptureFixture, left_bytes: int
) -> None:
    """A probe that is easier than a record lies: each refused pod is final, and its controller makes the next one."""
    caplog.set_level("INFO")
    world.keeper.note_ledger()
    before = free(world)
    room(min(left_bytes, 100))
    with pytest.raises(LedgerError, match="No space left on device: free some space there"):
        ask(world, 0)
    room(left_bytes)
    for _ in range(5):
        world.keeper.note_ledger()
        assert free(world) == 0
    (line,) = [r for r in caplog.records if "can't be recorded" in r.getMessage()]
    assert line.levelname == "ERROR"
    picture = structs.replace(world.picture(), problems=(message_of(world.broker.ledger_error),))
    assert any("No space left on device" in said for said in told(None, picture))
    room(None)
    world.keeper.note_ledger()
    assert free(world) == before
    assert "can be recorded again" in caplog.records[-1].getMessage()
    assert not list(Path(world.ledger.directory).iterdir())


def test_a_disk_that_is_full_at_the_start_costs_no_pod(world: World, room: Callable[[int | None], None]) -> None:
    room(0)
    assert free(world) > 0
    world.keeper.note_ledger()
    assert free(world) == 0


def test_a_failure_that_is_over_at_once_is_told(
    world: World, room: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world.keeper.note_ledger()
    room(0)
    with pytest.raises(LedgerError):
        ask(world, 0)
    room(None)
    world.keeper.note_ledger()
    assert ["can't be recorded" in r.getMessage() for r in caplog.records[-2:]] == [True, False]


def test_the_probe_is_never_easier_than_what_failed(world: World, room: Callable[[int | None], None]) -> None:
    """Hundreds of units have a record larger than any usual one."""
    large = allocation("u", *(f"{uuid(0)}::{n}" for n in range(2000)))
    room(PROBE_BYTES)
    with pytest.raises(LedgerError):
        world.ledger.put(large)
    with pytest.raises(LedgerError):
        world.ledger.probe()
    room(None)
    world.ledger.probe()


def test_a_record_that_cannot_be_removed_closes_nothing_while_others_can_be_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its allocation stays booked; the offer must not go to 0 and back with every look."""
    got = world.grant()
    before = free(world)

    def refuse(key: str) -> None:
        raise LedgerError(f"cannot remove the record {key}: Operation not permitted")

    monkeypatch.setattr(world.ledger, "remove", refuse)
    with pytest.raises(LedgerError):
        world.broker.release(got.key)
    assert world.broker.ledger_error is None
    assert free(world) == before
    assert [a.key for a in world.broker.allocations()] == [got.key]


def test_a_real_disk_that_is_full(short_tmp: Path) -> None:
    """The same on a file system with a size, where one can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(short_tmp)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("file systems can't be mounted here")
    try:
        ledger = Ledger(str(short_tmp / "ledger"))
        (short_tmp / "filler").write_bytes(bytes(16 * 4096))
        with pytest.raises(LedgerError, match="No space left"):
            ledger.put(allocation("a", f"{uuid(0)}::0"))
        with pytest.raises(LedgerError, match="No space left"):
            ledger.probe()
        ledger.close()
    finally:
        subprocess.run(["umount", str(short_tmp)], check=True)
