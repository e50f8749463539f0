"""Prometheus metrics of the node, rendered from the same picture as status.

The text format (version 0.0.4) is written here: the client library adds 12 MiB to a process that may have 55 (see
docs/adr). Labels name GPUs, resources and states, never pods.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from deviceplugin.plan.allocation import ANNOTATED
from deviceplugin.status.model import PluginStatus
from mpsd.common.text import plain
from mpsd.config.model import Enforcement

Sample = tuple[dict[str, str], float]
ALLOCATION_STATES = ("attached", "waiting", "leaving")


def render(status: PluginStatus, failures: Mapping[str, int] | None = None) -> str:
    """The whole exposition (pure). `failures`: of threads, see mpsd.threads."""
    gpus, resources = status.gpus, status.resources
    lines: list[str] = []

    def gauge(name: str, text: str, samples: Iterable[Sample], kind: str = "gauge") -> None:
        lines.append(f"# HELP gpufrac_{name} {text}")
        lines.append(f"# TYPE gpufrac_{name} {kind}")
        lines.extend(f"gpufrac_{name}{_labels(labels)} {number(value)}" for labels, value in samples)

    gauge("mpsd_up", "1 while mpsd answers and sees GPUs.", [({}, not status.mpsd_error)])
    gauge("kubelet_up", "1 while the kubelet shows its pods.", [({}, not status.kubelet_error)])
    gauge("config_ok", "0 while a refused config file waits to be mended.", [({}, not status.config_error)])
    gauge(
        "cdi_ok",
        "0 while CDI files do not match what is permitted.",
        [({}, not (status.cdi_error or status.cdi_objections))],
    )
    gauge(
        "gpu_usable_bytes",
        "Memory that shares of the GPU may add up to.",
        [({"gpu_uuid": g.uuid}, g.usable_bytes) for g in gpus],
    )
    gauge("gpu_granted_bytes", "Sum of granted requests.", [({"gpu_uuid": g.uuid}, g.granted_bytes) for g in gpus])
    gauge("gpu_limit_bytes", "Sum of granted limits.", [({"gpu_uuid": g.uuid}, g.limit_bytes) for g in gpus])
    gauge("gpu_allocations", "Live allocations.", [({"gpu_uuid": g.uuid}, g.allocations) for g in gpus])
    gauge("gpu_domain_gpus", "GPUs of its MPS daemon.", [({"gpu_uuid": g.uuid}, len(g.domain)) for g in gpus])
    gauge(
        "gpu_hit_together",
        "Containers that a fault on the GPU hits at most.",
        [({"gpu_uuid": g.uuid}, g.hit_together) for g in gpus],
    )
    gauge("gpu_blocked", "1 while the GPU takes nothing new.", [({"gpu_uuid": g.uuid}, bool(g.reason)) for g in gpus])
    gauge(
        "gpu_reason",
        "1 with the code of why the GPU takes nothing new.",
        [({"gpu_uuid": g.uuid, "reason": g.reason_code}, 1) for g in gpus if g.reason],
    )
    gauge("gpu_drained", "1 while an operator drains the GPU.", [({"gpu_uuid": g.uuid}, bool(g.drained)) for g in gpus])
    gauge(
        "resource_registered",
        "1 while registered at the kubelet.",
        [({"resource": r.name}, r.registration == "registered") for r in resources],
    )
    gauge("resource_listed", "Shares listed.", [({"resource": r.name}, r.listed) for r in resources])
    gauge("resource_healthy", "Shares listed as Healthy.", [({"resource": r.name}, r.healthy) for r in resources])
    gauge("resource_held", "Shares that live allocations hold.", [({"resource": r.name}, r.held) for r in resources])
    gauge("resource_free", "Shares that can still be had.", [({"resource": r.name}, r.free) for r in resources])
    gauge(
        "resource_reason",
        "1 with the code of why nothing more of it can be had.",
        [({"resource": r.name, "reason": r.reason_code}, 1) for r in resources if r.reason],
    )
    counts = dict.fromkeys(ALLOCATION_STATES, 0)
    for allocation in status.allocations:
        counts[allocation.state] += 1
    gauge("allocations", "Live allocations by state.", [({"state": state}, count) for state, count in counts.items()])
    reasons = Counter((a.state, a.reason_code) for a in status.allocations if a.reason)
    gauge(
        "allocation_reasons",
        "Live allocations of which status has something to say, by the code of that.",
        [({"state": state, "reason": reason}, count) for (state, reason), count in sorted(reasons.items())],
    )
    unenforced = sum(1 for a in status.allocations if a.enforcement in ("none", *_below(a.granted_enforcement)))
    gauge("allocations_unenforced", "Live allocations without a limit enforced as granted.", [({}, unenforced)])
    gauge("limit_drift_total", "Hard limits found not in force.", [({}, status.limit_drifts)], "counter")
    over = sum(1 for a in status.allocations if a.over_limit)
    gauge(
        "allocations_over_limit", "Live allocations whose processes together use more than their limit.", [({}, over)]
    )
    claimed = sum(1 for a in status.allocations if a.claimed_by)
    gauge("allocations_claimed", "Live allocations that processes of other pods call theirs.", [({}, claimed)])
    refused = {**status.refusals, **({ANNOTATED: status.annotated.refusals} if status.annotated else {})}
    gauge(
        "refusals_total",
        "Allocates that were refused, by the code of why; for annotated pods creations and starts.",
        [
            ({"resource": resource, "reason": reason}, count)
            for resource, by_reason in refused.items()
            for reason, count in by_reason.items()
        ],
        "counter",
    )
    if (annotated := status.annotated) is not None:
        gauge("nri_connected", "1 while registered at the container runtime.", [({}, bool(annotated.runtime))])
        gauge("nri_registrations_total", "Times registered there.", [({}, annotated.registrations)], "counter")
        gauge(
            "nri_late_answers_total",
            "Answers that were given without a decision, as it took too long.",
            [({}, annotated.late)],
            "counter",
        )
        gauge("annotated_granted_total", "Annotated containers granted.", [({}, annotated.granted)], "counter")
        gauge("annotated_refused_total", "Creations and starts refused.", [({}, annotated.refused)], "counter")
        refusing = Counter(one.reason_code for one in annotated.refusing)
        gauge(
            "annotated_refusal_reasons",
            "Containers that are refused now, by the code of why.",
            [({"reason": reason}, count) for reason, count in sorted(refusing.items())],
        )
        gauge("annotated_refusing", "Containers that are refused now.", [({}, len(annotated.refusing))])
        gauge("annotated_unenforced", "Annotated containers without their limit.", [({}, len(annotated.unenforced))])
        gauge("annotated_ignored_keys", "Annotations without effect.", [({}, len(annotated.ignored))])
    gauge(
        "thread_failures_total",
        "What bodies of the plugin's threads raised; they went on.",
        [({"thread": name}, count) for name, count in sorted((failures or {}).items())],
        "counter",
    )
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Exact: a counter of millions that is rounded stands still for its readers."""
    return str(int(value)) if value == int(value) else repr(value)


def _below(granted: str) -> tuple[str, ...]:
    """The levels below the one granted."""
    return tuple(lesser for lesser in Enforcement if granted and lesser.rank < Enforcement(granted).rank)


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    escaped = (f'{name}="{_escape(value)}"' for name, value in labels.items())
    return "{" + ",".join(escaped) + "}"


def _escape(value: str) -> str:
    return plain(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
