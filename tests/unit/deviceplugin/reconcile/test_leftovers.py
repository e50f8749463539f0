"""An uninstall leaves nothing of the plugin, and says who still holds shares."""

import json
import os
from pathlib import Path

import pytest
from msgspec import structs

from cdi.writer import SpecDirectory
from deviceplugin.grants.ledger import Ledger
from deviceplugin.kubelet.checkpoint import FILE_NAME
from deviceplugin.plan import render
from deviceplugin.plan.allocation import ANNOTATED, Allocation, ContainerRef, allocation_key
from deviceplugin.reconcile.leftovers import clear
from mpsd.localapi.snapshot import Places
from tests.builders import allocation, uuid
from tests.places import places


class Node:
    """A node whose plugin was stopped: two shares and an annotated container, with their files."""

    def __init__(self, root: Path) -> None:
        self.places: Places = places(root)
        self.root = root
        container = ContainerRef(namespace="ns", pod="kai", pod_uid="uid-kai", container="main")
        annotated = structs.replace(
            allocation("x", f"{uuid(1)}::9"),
            key=allocation_key(ANNOTATED, (container.id,), 1),
            resource=ANNOTATED,
            device_ids=(container.id,),
            container=container,
        )
        self.allocations = [allocation("a", f"{uuid(0)}::{n}") for n in range(2)] + [annotated]
        ledger = Ledger(f"{root}/state/plugin/allocations")
        with SpecDirectory(f"{root}/cdi", render.VENDOR, render.CLASS) as specs:
            for made in self.allocations:
                ledger.put(made)
                specs.put(made.key, render.spec(made, "/run/mps"))
        ledger.close()
        (root / "cdi" / "nvidia.yaml").write_text("cdiVersion: 0.5.0")
        for name in ("node.json", "drains.json"):
            (root / "state" / "plugin" / name).write_text("{}")
        (root / "state" / "mpsd.json").write_text("{}")
        Path(self.places.device_plugins).mkdir(parents=True)
        Path(self.places.pods).mkdir()
        self.checkpoint()

    def checkpoint(self, *held: tuple[Allocation, str]) -> None:
        """These pods hold shares, and are there."""
        entries = [
            {
                "PodUID": uid,
                "ContainerName": "main",
                "ResourceName": share.resource,
                "DeviceIDs": {"-1": list(share.device_ids)},
                "AllocResp": None,
            }
            for share, uid in held
        ]
        path = Path(self.places.device_plugins) / FILE_NAME
        path.write_text(json.dumps({"Data": {"PodDeviceEntries": entries}, "Checksum": 0}))

    def there(self, uid: str) -> None:
        (Path(self.places.pods) / uid).mkdir()

    def state(self) -> set[str]:
        return {str(path.relative_to(self.root / "state")) for path in (self.root / "state").rglob("*")}


@pytest.fixture
def node(short_tmp: Path) -> Node:
    return Node(short_tmp)


def test_nothing_of_the_plugin_is_left_when_nobody_holds_a_share(node: Node) -> None:
    node.checkpoint((node.allocations[0], "uid-gone"))  # a stale entry: its pod has no directory
    assert clear(node.places) == []
    assert os.listdir(node.root / "cdi") == ["nvidia.yaml"]
    assert node.state() == {"mpsd.json"}
    assert clear(node.places) == []


def test_who_holds_a_share_is_named_and_its_record_stays(node: Node) -> None:
    share, _, annotated = node.allocations
    node.checkpoint((share, "uid-1"))
    node.there("uid-1")
    node.there("uid-kai")
    assert sorted(clear(node.places)) == [
        "a share of annotations is held: container main of the pod with UID uid-kai: delete that pod first",
        "a share of gpufrac.dev/a is held: container main of the pod with UID uid-1: delete that pod first",
    ]
    assert os.listdir(node.root / "cdi") == ["nvidia.yaml"]
    kept = {name.removeprefix("plugin/allocations/") for name in node.state() if name.startswith("plugin/allocations/")}
    assert kept == {f"{share.key}.json", f"{annotated.key}.json"}
    assert "plugin/node.json" in node.state()


def test_what_the_kubelet_does_not_tell_is_not_taken_for_nobody(node: Node) -> None:
    (Path(node.places.device_plugins) / FILE_NAME).unlink()
    left = clear(node.places)
    assert len(left) == 2
    assert all("cannot read the kubelet's checkpoint" in line for line in left)


def test_where_pods_cannot_be_seen_nobody_is_taken_for_gone(node: Node) -> None:
    share, _, annotated = node.allocations
    node.checkpoint((share, "uid-1"))
    Path(node.places.pods).rmdir()
    left = clear(node.places)
    assert len(left) == 2
    assert all(f"can't be told, as {node.places.pods} is not to be seen" in line for line in left)
    kept = {name for name in node.state() if name.endswith(".json") and "/allocations/" in name}
    assert kept == {f"plugin/allocations/{key}.json" for key in (share.key, annotated.key)}


def test_a_node_that_never_had_a_plugin_is_clean_and_stays_so(short_tmp: Path) -> None:
    assert clear(places(short_tmp)) == []
    assert list(short_tmp.iterdir()) == []
