"""Records that are not what we would have written are reported and never used."""

from pathlib import Path

import msgspec
import pytest

from deviceplugin.ledger import Ledger
from tests.builders import allocation, uuid

GOOD = allocation("a", f"{uuid(0)}::0")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        msgspec.json.encode(msgspec.structs.replace(GOOD, key="f" * 20)),
        msgspec.json.encode(msgspec.structs.replace(GOOD, gpus=())),
        msgspec.json.encode(msgspec.structs.replace(GOOD, device_ids=())),
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
