"""Records that are not what we would have written are reported, set aside and never used."""

from pathlib import Path

import msgspec
import pytest

from deviceplugin.grants.ledger import Ledger
from deviceplugin.plan.allocation import ANNOTATED, ContainerRef, allocation_key
from tests.builders import allocation, uuid
from tests.world import World

GOOD = allocation("a", f"{uuid(0)}::0")
REF = ContainerRef(namespace="ns", pod="p", pod_uid="u", container="c")

OF_ANOTHER = allocation_key(ANNOTATED, GOOD.device_ids, GOOD.generation)
"""The key of a record that names a container, and a share instead of it."""


def changed(**values: object) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(GOOD) | msgspec.to_builtins(values))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        changed(key="f" * 20),
        changed(gpus=()),
        changed(device_ids=()),
        changed(request_bytes=-GOOD.request_bytes),
        changed(limit_bytes=-GOOD.limit_bytes),
        changed(limit_bytes=0),
        changed(limit_bytes=GOOD.memory_total_bytes + 1),
        changed(limit_bytes=2**63),
        changed(request_bytes=2 * GOOD.share_bytes),
        changed(share_bytes=1),
        changed(soft_bytes=GOOD.request_bytes + 1),
        changed(thread_percent=0),
        changed(thread_percent=101),
        changed(created_unix_s=1e300),
        changed(generation=-1),
        changed(slot=7),
        changed(group=uuid(1)),
        changed(gpus=[uuid(0), uuid(0)]),
        changed(gpus=["../../etc"]),
        changed(device_ids=[f"{uuid(1)}::0"]),
        changed(device_ids=["no share of ours"]),
        changed(device_ids=["no share of ours"], key=allocation_key(GOOD.resource, ("no share of ours",), 1)),
        changed(resource=ANNOTATED),
        changed(container=REF),
        changed(resource=ANNOTATED, container=REF, key=OF_ANOTHER),
        changed(gpu_kind="a\nb"),
        changed(resource="gpufrac.dev/b"),
        changed(generation=2),
        changed(group=uuid(1), gpus=[uuid(1)], device_ids=[f"{uuid(1)}::0"]),
        changed(limit_bytes=70 << 30),
        changed(limit_bytes=70 << 30, enforcement="none"),
        changed(mode="time-slicing"),
        changed(after=[GOOD.key]),
        changed().replace(b"gpufrac.dev/a", b"gpufrac.dev/\xff"),
    ],
)
def test_a_bad_record_is_reported_and_the_others_are_used(short_tmp: Path, content: bytes) -> None:
    other = allocation("a", f"{uuid(0)}::1")
    ledger = Ledger(str(short_tmp))
    ledger.put(other)
    (short_tmp / f"{GOOD.key}.json").write_bytes(content)
    found, problems = ledger.load()
    ledger.close()
    assert found == [other]
    assert len(problems) == 1
    assert str(short_tmp) in problems[0]
    assert "None" not in problems[0]
    aside = short_tmp / f"{GOOD.key}.json.unreadable"
    assert problems[0].endswith(f"; the file is kept as {aside}")
    assert aside.read_bytes() == content
    assert not (short_tmp / f"{GOOD.key}.json").exists()


def test_an_allocation_whose_record_is_bad_is_adopted_again_under_its_key(short_tmp: Path) -> None:
    """The kubelet holds it, and answers it again: with the limit that is planned, never with the one that was read."""
    world = World(short_tmp)
    got = world.grant()
    world.run(got)
    path = Path(world.ledger.directory, f"{got.key}.json")
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(got, limit_bytes=2**60)))
    world.restart()
    world.keeper.collect()
    (again,) = world.broker.allocations()
    assert (again.adopted, again.limit_bytes, again.device_ids) == (True, got.limit_bytes, got.device_ids)
    assert len(world.broker.problems) == 1
    world.broker.close()
    world.ledger.close()


def test_what_is_put_is_found_after_a_restart_and_what_is_removed_is_not(short_tmp: Path) -> None:
    ledger = Ledger(str(short_tmp))
    ledger.put(GOOD)
    ledger.remove("0" * 20)
    ledger.close()
    again = Ledger(str(short_tmp))
    assert again.load() == ([GOOD], [])
    again.remove(GOOD.key)
    assert again.load() == ([], [])
    again.close()
