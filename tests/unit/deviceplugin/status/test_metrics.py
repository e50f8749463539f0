"""What is measured, and that it is said in the docs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.grants.nodeview import DAEMON_GRACE_S
from deviceplugin.status import metrics
from mpsd.localapi.snapshot import DaemonState, DaemonStatus
from tests.builders import config, fixed, resource, uuid
from tests.unit.deviceplugin.status.annotatedstatus import annotated_status
from tests.world import World

OPERATIONS = Path(__file__).parents[4] / "docs" / "operations.md"


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    cfg = config(resource("a", fixed(8)), resource("p", fixed(8), groups=("pair0",)), groups=(("pair0", (0, 1)),))
    made = World(short_tmp, cfg, gpus=3)
    for n in range(5):
        made.run(made.grant("a", f"{uuid(2)}::{n}"), pod=f"p{n}")
    made.run(made.grant("p", "pair0::0"), pod="q")
    made.keeper.observe()
    yield made
    made.ledger.close()


def test_all_metrics_are_in_the_docs_and_no_others_are(world: World) -> None:
    picture = structs.replace(
        world.picture(),
        annotated=annotated_status(refusals={"NoGpuNamed": 2}),
        refusals={"gpufrac.dev/a": {"MemoryTaken": 1}},
    )
    exported = re.findall(r"^# TYPE (\S+)", metrics.render(picture), re.MULTILINE)
    documented = re.findall(r"^\| `(gpufrac_\w+)` \|", OPERATIONS.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(exported)


def test_labels_are_those_of_the_docs(world: World) -> None:
    world.broker.drain(uuid(2), "fan")
    picture = structs.replace(world.picture(), refusals={"gpufrac.dev/a": {"MemoryTaken": 1}})
    shown = metrics.render(picture, {"observer": 1})
    rows = re.findall(r"^\| `(gpufrac_\w+)` \|([^|]*)\|", OPERATIONS.read_text(), re.MULTILINE)
    documented = {name: re.findall(r"`(\w+)`", labels) for name, labels in rows}
    found = {
        name: re.findall(r'(\w+)="', labels or "")
        for name, labels in re.findall(r"^(gpufrac_\w+)(\{.*\})? ", shown, re.MULTILINE)
    }
    assert found == {name: documented[name] for name in found}
    assert {"gpufrac_gpu_reason", "gpufrac_refusals_total", "gpufrac_thread_failures_total"} <= found.keys()


def test_refusals_are_counted_by_what_was_asked_for_and_why(world: World) -> None:
    picture = structs.replace(
        world.picture(),
        annotated=annotated_status(refusals={"NoGpuNamed": 2}),
        refusals={"gpufrac.dev/a": {"AllTaken": 3, "MemoryTaken": 1}},
    )
    lines = metrics.render(picture).splitlines()
    assert [line for line in lines if line.startswith("gpufrac_refusals_total{")] == [
        'gpufrac_refusals_total{resource="gpufrac.dev/a",reason="AllTaken"} 3',
        'gpufrac_refusals_total{resource="gpufrac.dev/a",reason="MemoryTaken"} 1',
        'gpufrac_refusals_total{resource="annotations",reason="NoGpuNamed"} 2',
    ]


def test_what_is_measured_of_annotated_pods(world: World) -> None:
    lines = metrics.render(structs.replace(world.picture(), annotated=annotated_status())).splitlines()
    assert {"gpufrac_nri_connected 1", "gpufrac_annotated_granted_total 3", "gpufrac_annotated_refused_total 4"} <= {
        *lines
    }
    assert not any("nri" in line for line in metrics.render(world.picture()).splitlines())


def test_counters_go_on_above_a_million(world: World) -> None:
    for count in (999_999, 1_000_000, 1_000_001):
        picture = structs.replace(world.picture(), limit_drifts=count)
        lines = metrics.render(picture, {"observer": count}).splitlines()
        assert f"gpufrac_limit_drift_total {count}" in lines
        assert f'gpufrac_thread_failures_total{{thread="observer"}} {count}' in lines


def test_metrics_name_the_code_of_what_waits(world: World) -> None:
    world.daemon = DaemonStatus(state=DaemonState.BACKOFF, reason="it died")
    world.tell()
    world.keeper.attach()
    world.now_s += DAEMON_GRACE_S
    world.tell()
    world.keeper.attach()
    lines = metrics.render(world.picture()).splitlines()
    waiting = [line for line in lines if line.startswith("gpufrac_allocation_reasons{")]
    count = sum(1 for allocation in world.picture().allocations if allocation.state == "waiting")
    assert waiting == [f'gpufrac_allocation_reasons{{state="waiting",reason="WaitsForDaemon"}} {count}']
    assert sum(line.startswith("gpufrac_gpu_reason{") and "DaemonNotReady" in line for line in lines) == 3
