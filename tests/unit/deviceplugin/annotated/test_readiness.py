"""What a scheduler is told of the node."""

import pytest
from msgspec import structs

from deviceplugin.annotated.frontend import FrontendReport
from deviceplugin.annotated.readiness import readiness
from deviceplugin.plan.model import HardAbility
from mpsd.config.model import AnnotationsConfig, Enforcement, GpuSelection
from mpsd.localapi.snapshot import HardLimits
from tests.builders import CAN, HARD, NOT_HARD

KNOWN = FrontendReport(synchronized=True)


@pytest.mark.parametrize(
    ("changes", "status", "reason", "words"),
    [
        ({}, "True", "AllDaemonsReady", "annotated pods are served"),
        ({"mpsd_error": "mpsd does not answer"}, "False", "NotReady", "mpsd does not answer"),
        ({"session_error": "no such file"}, "False", "NotReady", "not registered at the container runtime"),
        ({"report": FrontendReport()}, "False", "Pending", "has not told of its pods"),
        ({"ledger_error": "No space left on device"}, "False", "NotReady", "No space left"),
        (
            {"hard": HardAbility(CAN, starts_wait=False), "minimum": Enforcement.HARD},
            "False",
            "NotReady",
            "nothing is known to set limits",
        ),
        (
            {"hard": structs.replace(HARD, starts_wait=False, takes_cdi=False), "minimum": Enforcement.HARD},
            "False",
            "NotReady",
            "takes no CDI devices from NRI plugins",
        ),
        ({"driver_version": None}, "False", "GPUDriverVersionMissing", "driver"),
        ({"driver_version": "garbage"}, "False", "GPUDriverVersionMissing", "driver"),
        ({"hard": HardAbility()}, "False", "Pending", "not known yet"),
        ({"hard": NOT_HARD, "driver_version": "580.95.05"}, "True", "AllDaemonsReady", "only containers with mode sm"),
        (
            {"hard": NOT_HARD, "driver_version": "580.95.05", "minimum": Enforcement.HARD},
            "False",
            "GPUDriverVersionUnsupported",
            "install 615",
        ),
        (
            {"hard": HardAbility(HardLimits(missing=("no cgroup v2",))), "minimum": Enforcement.HARD},
            "False",
            "NotReady",
            "no cgroup v2",
        ),
    ],
)
def test_readiness(changes: dict[str, object], status: str, reason: str, words: str) -> None:
    given: dict[str, object] = {
        "report": KNOWN,
        "session_error": "",
        "mpsd_error": "",
        "hard": HARD,
        "driver_version": "615.71.09",
        "minimum": Enforcement.COOPERATIVE,
    } | changes
    minimum = given.pop("minimum")
    config = AnnotationsConfig(gpus=GpuSelection(), enforcement=minimum)  # type: ignore[arg-type]
    told = readiness(config, given.pop("report"), **given)  # type: ignore[arg-type]
    assert (told.status, told.reason) == (status, reason)
    assert words in told.message
    assert told.driver_major in ("", "615", "580")
