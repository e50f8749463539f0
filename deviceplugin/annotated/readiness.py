"""Can annotated pods be served here now? What a scheduler is told, as a node condition (pure)."""

from typing import TYPE_CHECKING

from deviceplugin.kubernetes.model import NodeReadiness
from deviceplugin.plan.enforcement import not_hard
from deviceplugin.plan.model import HardAbility
from mpsd.config.model import AnnotationsConfig, Delivery, Enforcement
from mpsd.limits.judge import MIN_DRIVER

if TYPE_CHECKING:
    from deviceplugin.annotated.frontend import FrontendReport

READY = "AllDaemonsReady"
"""The reason gpu-fractioning's operator gives; KAI wants the condition to be True."""


def readiness(
    config: AnnotationsConfig,
    report: "FrontendReport",
    *,
    session_error: str,
    mpsd_error: str,
    hard: HardAbility,
    driver_version: str | None,
    ledger_error: str = "",
) -> NodeReadiness:
    """Whether a pod that a scheduler sends here now would get what it was promised.

    Args:
        session_error: why the runtime does not know us, empty when it does.
        ledger_error: why nothing can be granted, as it can't be recorded.
    """
    major = (driver_version or "").partition(".")[0]
    major = major if major.isascii() and major.isdigit() else ""

    def no(reason: str, message: str) -> NodeReadiness:
        return NodeReadiness("False", reason, message, major)

    if mpsd_error or ledger_error:
        return no("NotReady", mpsd_error or ledger_error)
    if session_error:
        return no("NotReady", f"gpufrac is not registered at the container runtime: {session_error}")
    if not report.synchronized:
        return no("Pending", "the container runtime has not told of its pods yet")
    if not major:
        return no("GPUDriverVersionMissing", "the version of the GPU driver is not known")
    if not hard.known:
        return no("Pending", "whether memory limits can be hard is not known yet")
    missing = not_hard(Delivery.CDI, hard.of_annotated())
    if missing and config.enforcement is Enforcement.HARD:
        old = int(major) < MIN_DRIVER
        return no("GPUDriverVersionUnsupported" if old else "NotReady", f"memory limits can't be hard here: {missing}")
    message = "annotated pods are served"
    if missing and config.enforcement is Enforcement.COOPERATIVE:
        message = f"only containers with mode sm-sharing and a limit equal to the request are served: {missing}"
    return NodeReadiness("True", READY, message, major)
