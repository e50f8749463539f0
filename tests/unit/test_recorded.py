"""What the last version wrote and said, read by this one: nothing is refused, and no field of it is lost."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cdi.decode import decode_json
from cdi.encode import encode_spec
from deviceplugin.grants import lastknown
from deviceplugin.grants.drains import Drains
from deviceplugin.grants.ledger import Ledger
from deviceplugin.selftest import record as selftest
from deviceplugin.status.clients import GpuClientsStatus
from deviceplugin.status.model import AllocationStatus, PluginStatus
from mpsd.common.reason import OlderCode, Reason
from mpsd.config.load import parse_config
from mpsd.config.show import effective
from mpsd.daemon.state import StateFile
from mpsd.localapi.snapshot import Desired, Snapshot
from tests.recorded.scene import BOOT, RECORDED, ROOT, SCENES
from tests.recorded.shape import missing, shape

THIS_BOOT = "00000000-0000-4000-8000-000000000000"
ANSWERS = {
    "mpsd-snapshot": Snapshot,
    "mpsd-desired": Desired,
    "plugin-status": PluginStatus,
    "plugin-allocations": tuple[AllocationStatus, ...],
    "plugin-clients": tuple[GpuClientsStatus, ...],
}


def lost(old: Any, new: Any, path: str = "") -> list[str]:
    """Where a JSON value does not have what the old one has; what came beside it does not count."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [each for key in old for each in lost(old[key], new.get(key, "(gone)"), f"{path}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [each for i, item in enumerate(old) for each in lost(item, new[i], f"{path}[{i}]")]
    return [] if old == new else [f"{path} was {old!r} and is {new!r}"]


def as_json(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


@pytest.fixture(params=SCENES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What was recorded of one scene, as files of a node there."""
    place: Path = tmp_path / request.param
    for path in filter(Path.is_file, (RECORDED / request.param).rglob("*")):
        copy = place / path.relative_to(RECORDED / request.param)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace(ROOT, str(place)).replace(BOOT, THIS_BOOT))
    return place


def test_allocation_records(node: Path) -> None:
    directory = node / "state" / "plugin" / "allocations"
    old = {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
    ledger = Ledger(str(directory))
    allocations, problems = ledger.load()
    assert (len(allocations), problems) == (5, [])
    for allocation in allocations:
        assert not lost(old[allocation.key], as_json(allocation))
        ledger.put(allocation)
        assert not lost(old[allocation.key], json.loads((directory / f"{allocation.key}.json").read_text()))
    ledger.close()


def test_what_was_known_of_the_node(node: Path) -> None:
    path = node / "state" / "plugin" / "node.json"
    old = json.loads(path.read_text())
    new = as_json(lastknown.load(str(path), THIS_BOOT))
    assert not lost({**old, "hooked": sorted(old["hooked"])}, {**new, "hooked": sorted(new["hooked"])})


def test_drains(node: Path) -> None:
    path = node / "state" / "plugin" / "drains.json"
    (old,) = json.loads(path.read_text())["drained"]
    drains = Drains(str(path))
    assert not drains.problem
    assert not lost([old], as_json(list(drains.by_gpu.values())))


@pytest.mark.parametrize("first", [True, False])
def test_what_mpsd_remembers(node: Path, *, first: bool) -> None:
    path = node / "state" / "mpsd.json"
    old = json.loads(path.read_text())
    if not first:
        path.rename(node / "copy.json")
    file = StateFile(str(path), THIS_BOOT, str(node / "copy.json"))
    assert not file.begins_anew
    assert not lost(old, as_json(file.saved))


def test_the_last_self_test(node: Path) -> None:
    old = json.loads((node / "state" / "selftest.json").read_text())
    assert not lost(old, as_json(selftest.load(str(node / "state"))))


def test_cdi_files(node: Path) -> None:
    files = list((node / "cdi").iterdir())
    assert len(files) == 5
    for file in files:
        _, spec = decode_json(file.read_bytes())
        assert encode_spec(spec).strip() == file.read_bytes().strip()


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_the_local_sockets(node: Path, name: str) -> None:
    """The process that is replaced last speaks with one of the other version."""
    old = json.loads((node / "answers" / f"{name}.json").read_text())
    assert not lost(old, as_json(msgspec.convert(old, ANSWERS[name])))


def test_an_mpsd_of_the_last_version_gives_messages_without_codes(node: Path) -> None:
    old = (node / "answers" / "mpsd-snapshot.json").read_text()
    snapshot = msgspec.json.decode(old, type=Snapshot)
    assert snapshot.why_config_refused == Reason(OlderCode.UNKNOWN, json.loads(old)["config_error"])
    assert snapshot.why is None
    assert [gpu.why for gpu in snapshot.gpus] == [None] * len(snapshot.gpus)
    assert [str(reason) for reason in snapshot.hard_limits.why_not] == json.loads(old)["hard_limits"]["missing"]


def test_configs(node: Path) -> None:
    """As somebody wrote it, and with every key."""
    text = (RECORDED / node.name / "node.yaml").read_text().replace(ROOT, "/tmp/gf-node")  # sockets need a short path
    assert not lost(json.loads(text), as_json(effective(parse_config(text, "node.yaml"))))
    parse_config((node / "config.yaml").read_bytes(), "config.yaml")


def test_shapes_tell_what_is_gone_and_what_is_new() -> None:
    old = shape({"gpus": [{"uuid": "a", "mode": None}, {"uuid": "b", "mode": "x"}], "env": {"A_B": "1"}})
    assert old == {
        "env": "object",
        "env.*": "string",
        "gpus": "array",
        "gpus[]": "object",
        "gpus[].mode": "null|string",
        "gpus[].uuid": "string",
    }
    new = shape({"gpus": [{"uuid": 1, "mode": None, "code": "X"}], "env": {}})
    assert missing(old, new) == ["env.* is gone", "gpus[].uuid was string and is number"]
