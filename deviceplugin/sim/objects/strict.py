"""Fields that no object has, or not in that place: kubectl has the API server refuse them (pure).

Its strict validation knows the schema of every kind. Here are the fields of a pod and a container (Kubernetes 1.36),
and where what asks for devices belongs. A field that is in no near miss of these is only noted: a newer cluster may
have it.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence

from deviceplugin.sim.objects.fields import Field

POD_FIELDS = frozenset(
    [
        "activeDeadlineSeconds",
        "affinity",
        "automountServiceAccountToken",
        "containers",
        "dnsConfig",
        "dnsPolicy",
        "enableServiceLinks",
        "ephemeralContainers",
        "hostAliases",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "hostUsers",
        "hostname",
        "hostnameOverride",
        "imagePullSecrets",
        "initContainers",
        "nodeName",
        "nodeSelector",
        "os",
        "overhead",
        "preemptionPolicy",
        "priority",
        "priorityClassName",
        "readinessGates",
        "resourceClaims",
        "resources",
        "restartPolicy",
        "runtimeClassName",
        "schedulerName",
        "schedulingGates",
        "schedulingGroup",
        "securityContext",
        "serviceAccount",
        "serviceAccountName",
        "setHostnameAsFQDN",
        "shareProcessNamespace",
        "subdomain",
        "terminationGracePeriodSeconds",
        "tolerations",
        "topologySpreadConstraints",
        "volumes",
        "workloadRef",
    ]
)
CONTAINER_FIELDS = frozenset(
    [
        "args",
        "command",
        "env",
        "envFrom",
        "image",
        "imagePullPolicy",
        "lifecycle",
        "livenessProbe",
        "name",
        "ports",
        "readinessProbe",
        "resizePolicy",
        "resources",
        "restartPolicy",
        "restartPolicyRules",
        "securityContext",
        "startupProbe",
        "stdin",
        "stdinOnce",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "tty",
        "volumeDevices",
        "volumeMounts",
        "workingDir",
    ]
)
RESOURCES_FIELDS = frozenset(("limits", "requests", "claims"))

_IN_RESOURCES = ("limits", "requests", "limit", "request", "claims")


def refusal(found: Sequence[str]) -> str:
    """All of them, as the API server tells them after what it could not handle."""
    return f"strict decoding error: {', '.join(found)}"


def unknown(field: Field, known: Collection[str], places: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Problems, and notes, of the keys that a mapping should not have.

    Args:
        places: where a key belongs that is often written here.
    """
    problems, notes = [], []
    for key, entry in field.entries().items():
        if key in known:
            continue
        text = f'unknown field "{entry.path}"'
        place = places.get(key) or ("resources.limits of a container" if "/" in key else "")
        near = difflib.get_close_matches(key[:64], known, n=1, cutoff=0.8)
        if place:
            problems.append(f"{text}: it belongs under {place}")
        elif near:
            problems.append(f'{text}; did you mean "{near[0]}"?')
        else:
            notes.append(f'unknown field "{entry.path}": kubectl has the API server refuse it; other clients lose it')
    return problems, notes


def in_pod(spec: Field) -> tuple[list[str], list[str]]:
    """See unknown: of a pod's spec."""
    places = dict.fromkeys(_IN_RESOURCES, "resources of a container")
    places |= {"resource": "resources of a container", "annotations": "metadata", "labels": "metadata"}
    return unknown(spec, POD_FIELDS, places)


def in_container(container: Field) -> tuple[list[str], list[str]]:
    """See unknown: of a container and its resources."""
    places = dict.fromkeys(_IN_RESOURCES, "resources")
    places |= dict.fromkeys(("nodeSelector", "tolerations", "runtimeClassName", "schedulerName"), "the pod's spec")
    problems, notes = unknown(container, CONTAINER_FIELDS, places)
    resources = container.get("resources")
    short = {"limit": "limits", "request": "requests", "claim": "claims"}
    for key, entry in resources.entries().items():
        if key in RESOURCES_FIELDS:
            continue
        meant = f'; did you mean "{short[key]}"?' if key in short else ": it belongs under limits" if "/" in key else ""
        known = "" if meant else "; known here: limits, requests, claims"
        problems.append(f'unknown field "{entry.path}"{meant}{known}')
    return problems, notes


def beside_spec(holder: Field) -> list[str]:
    """Problems of a pod or template whose spec's fields stand beside its spec."""
    return [
        f'unknown field "{entry.path}": it belongs under spec'
        for key, entry in holder.entries().items()
        if key in POD_FIELDS
    ]


def beside_template(spec: Field, template: str) -> list[str]:
    """Problems of a workload whose pods' fields stand beside its template.

    Args:
        template: the path of the template's spec.
    """
    return [
        f'unknown field "{entry.path}": it belongs under {template}'
        for key, entry in spec.entries().items()
        if key in ("containers", "initContainers", "resources", "nodeSelector", "restartPolicy", "schedulerName")
    ]
