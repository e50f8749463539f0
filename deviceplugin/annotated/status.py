"""What is shown of annotated pods: wire values, and how they are made (pure)."""

from typing import TYPE_CHECKING

import msgspec

from deviceplugin.annotated.reasons import ServingCode
from mpsd.common.reason import code_of, message_of

if TYPE_CHECKING:
    from deviceplugin.annotated.frontend import FrontendReport
    from deviceplugin.kubernetes.model import NodeReadiness
    from deviceplugin.nri.session import NriState
    from mpsd.config.model import AnnotationsConfig

RENAME = "camel"


class RefusedStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """A container that was refused `count` times and not made since; `reason` is that of the last time."""

    namespace: str
    pod: str
    container: str
    reason: str
    since_unix_s: float
    count: int
    reason_code: str = ""


class IgnoredStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """An annotation of a pod that does not do what its author meant."""

    pod: str
    reason: str
    reason_code: str = ""


class UnenforcedStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """An annotated container that runs without its limit, and what becomes of it."""

    namespace: str
    pod: str
    container: str
    reason: str
    plan: str
    reason_code: str = ""


class AnnotatedStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """Annotated pods on this node. `runtime` is the one we are registered at, empty while at none: then `error` says
    why. `readiness`, `readiness_message`: what a scheduler is told. `answer_s` is the time we give ourselves for an
    answer, `late` counts those that were given without a decision, `slowest_s` is the longest by kind of request.
    `refused` counts creations and starts, `refusals` the same by the code of why. `unguarded`: why the runtime makes
    containers without us while we are away, empty when it waits. `uncompared`: why a container of which the runtime
    told nothing would not be found.
    """

    runtime: str
    error: str
    since_unix_s: float
    registrations: int
    answer_s: float
    late: int
    slowest_s: dict[str, float]
    trust: str
    readiness: str
    readiness_message: str
    granted: int
    refused: int
    unguarded: str
    refusing: tuple[RefusedStatus, ...] = ()
    ignored: tuple[IgnoredStatus, ...] = ()
    unenforced: tuple[UnenforcedStatus, ...] = ()
    uncompared: str = ""
    refusals: dict[str, int] = {}
    error_code: str = ""
    readiness_code: str = ""
    unguarded_code: str = ""
    uncompared_code: str = ""


def annotated_status(
    config: "AnnotationsConfig", state: "NriState", report: "FrontendReport", readiness: "NodeReadiness"
) -> AnnotatedStatus:
    """The front end as it is now, from what its parts say."""
    return AnnotatedStatus(
        runtime=f"{state.runtime.name} {state.runtime.version}" if state.runtime else "",
        error=message_of(state.error),
        error_code=code_of(state.error),
        since_unix_s=state.since_unix_s,
        registrations=state.registrations,
        answer_s=state.answer_s,
        late=state.late,
        slowest_s=dict(state.slowest_s),
        trust=", ".join(config.namespaces) if config.namespaces else str(config.trust),
        readiness=readiness.status,
        readiness_message=readiness.message,
        readiness_code=readiness.reason,
        granted=report.granted,
        refused=sum(report.refusals.values()),
        refusals=dict(report.refusals),
        unguarded=report.unguarded,
        unguarded_code=ServingCode.RUNTIME_DOES_NOT_WAIT if report.unguarded else "",
        uncompared=report.uncompared,
        uncompared_code=ServingCode.NOT_COMPARED if report.uncompared else "",
        refusing=tuple(
            RefusedStatus(
                namespace=one.container.namespace,
                pod=one.container.pod,
                container=one.container.container,
                reason=one.reason.message,
                reason_code=one.reason.code,
                since_unix_s=one.since_unix_s,
                count=one.count,
            )
            for one in report.refusing
        ),
        ignored=tuple(
            IgnoredStatus(pod=pod, reason=str(finding), reason_code=ServingCode.ANNOTATION_IGNORED)
            for pod, finding in report.findings
        ),
        unenforced=tuple(
            UnenforcedStatus(
                namespace=one.container.namespace,
                pod=one.container.pod,
                container=one.container.container,
                reason=one.reason.message,
                reason_code=one.reason.code,
                plan=one.plan,
            )
            for one in report.unenforced
        ),
    )
