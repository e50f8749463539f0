"""The plugin is ready while a pod that comes now would be served."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from deviceplugin.annotated.readiness import READY
from deviceplugin.kubelet.reasons import KubeletCode
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.reconcile.reasons import FileCode
from deviceplugin.status.health import not_ready
from deviceplugin.status.model import PluginStatus
from deviceplugin.status.reasons import ProcessCode
from tests.unit.deviceplugin.status.annotatedstatus import annotated_status
from tests.world import World


@pytest.fixture
def well(short_tmp: Path) -> Iterator[PluginStatus]:
    """All is well."""
    world = World(short_tmp)
    world.tell()
    world.keeper.observe()
    picture = world.picture()
    resources = tuple(structs.replace(one, registration="registered") for one in picture.resources)
    yield structs.replace(picture, resources=resources)
    world.ledger.close()


def codes(plugin: PluginStatus, **changes: Any) -> list[str]:
    return [reason.code for reason in not_ready(structs.replace(plugin, **changes))]


def test_it_is_ready_where_all_is_well_and_where_a_resource_offers_nothing(well: PluginStatus) -> None:
    assert codes(well) == []
    closed = [structs.replace(r, listed=0, reason="too large", reason_code=OfferCode.TOO_LARGE) for r in well.resources]
    assert codes(well, resources=tuple(closed)) == []
    assert codes(well, problems=("hostPID",), problem_codes=(ProcessCode.PROCESSES_NOT_SEEN,)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mpsd_error": "mpsd does not answer", "mpsd_error_code": OfferCode.MPSD_AWAY}, OfferCode.MPSD_AWAY),
        ({"kubelet_error": "no", "kubelet_error_code": KubeletCode.PODS_NOT_SHOWN}, KubeletCode.PODS_NOT_SHOWN),
        ({"cdi_error": "disk full", "cdi_error_code": FileCode.NOT_AS_PERMITTED}, FileCode.NOT_AS_PERMITTED),
        ({"problems": ("disk full",), "problem_codes": (OfferCode.NO_RECORDS,)}, OfferCode.NO_RECORDS),
        ({"annotated": annotated_status(readiness="False", readiness_code="NotReady")}, "NotReady"),
    ],
)
def test_what_keeps_it_from_serving_is_told_with_its_code(
    well: PluginStatus, changes: dict[str, Any], expected: str
) -> None:
    assert codes(well, **changes) == [expected]


def test_annotated_pods_that_are_served_are_well(well: PluginStatus) -> None:
    assert codes(well, annotated=annotated_status(readiness_code=READY)) == []


def test_resources_that_the_kubelet_does_not_know_are_named_together(well: PluginStatus) -> None:
    lost = [
        structs.replace(r, registration="failed", registration_error="refused", registration_error_code="NotRegistered")
        for r in well.resources
    ]
    (why,) = not_ready(structs.replace(well, resources=tuple(lost)))
    assert why.code == "NotRegistered"
    assert all(r.name in why.message for r in lost[:3])


def test_that_annotated_pods_are_not_served_is_no_second_line_for_the_same_cause(well: PluginStatus) -> None:
    annotated = annotated_status(readiness="False", readiness_code="NotReady")
    assert codes(well, annotated=annotated, mpsd_error="away", mpsd_error_code="MpsdAway") == ["MpsdAway"]
