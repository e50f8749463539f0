"""Kinds of objects -> the pods that their controllers would make (pure)."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from deviceplugin.sim.objects.documents import Document
from deviceplugin.sim.objects.fields import Field, kind_of
from deviceplugin.sim.objects.model import MAX_PODS, LoadedPod, Note, RefusedError
from deviceplugin.sim.objects.owner import Owner, suffix
from deviceplugin.sim.objects.podspec import loaded_pod

_MAX_LISTS = 4


def objects(document: Document, depth: int) -> list[LoadedPod | Note]:
    if not isinstance(document.value, Mapping):
        raise RefusedError(f"must be an object with apiVersion and kind, not {kind_of(document.value)}")
    top = Field(document.value, "", "")
    version = top.get("apiVersion").text(required="apiVersion not set")
    kind = top.get("kind").text(required="kind not set")
    if kind.endswith("List") and "items" in document.value:
        if depth >= _MAX_LISTS:
            raise RefusedError(f"lists in lists deeper than {_MAX_LISTS} levels")
        found: list[LoadedPod | Note] = []
        problems = []
        for index, item in enumerate(top.get("items").items()):
            try:
                found += objects(
                    replace(document, value=item.value, source=f"{document.source} items[{index}]"), depth + 1
                )
            except RefusedError as error:
                problems.append(f"items[{index}]: {error}")
        if problems:
            raise RefusedError("; ".join(problems))
        return found
    expected = _KINDS.get(kind)
    group = version.rpartition("/")[0]
    if expected is None or group != expected.version.rpartition("/")[0]:
        return [Note(document.source, f"{version} {kind}: not a kind whose pods this command makes; skipped")]
    if version != expected.version:
        raise RefusedError(f'no matches for kind "{kind}" in version "{version}": it is served in {expected.version}')
    top = Field(document.value, "", f'{kind} in version "{version.rpartition("/")[2]}" cannot be handled as a {kind}')
    return expected.make(Owner(document.source, kind, top))


def _pod(owner: Owner) -> list[LoadedPod | Note]:
    return [loaded_pod(owner, owner.name, owner.top, "")]


def _replicas(owner: Owner, spec: Field, key: str = "replicas") -> int:
    count = spec.get(key).integer(default=1)
    if count < 0:
        raise owner.invalid(f"spec.{key}: Invalid value: {count}: must be greater than or equal to 0")
    return count


def _several(owner: Owner, template: Field, names: Callable[[int], str], count: int) -> list[LoadedPod | Note]:
    """Pods of a template; the template is judged also where there is none."""
    if count > MAX_PODS:
        raise RefusedError(f"{owner.kind} {owner.label} asks for {count} pods: this command takes at most {MAX_PODS}")
    first = loaded_pod(owner, names(0), template, template.path)
    if count == 0:
        return [owner.note("asks for 0 pods")]
    return [replace(first, pod=replace(first.pod, name=names(index))) for index in range(count)]


def _deployment(owner: Owner) -> list[LoadedPod | Note]:
    spec = owner.top.get("spec")
    base = f"{owner.name}-{suffix(owner.name, 'template', 10)}"
    return _several(owner, spec.get("template"), lambda i: f"{base}-{suffix(base, i)}", _replicas(owner, spec))


def _replica_set(owner: Owner) -> list[LoadedPod | Note]:
    spec, name = owner.top.get("spec"), owner.name
    return _several(owner, spec.get("template"), lambda i: f"{name}-{suffix(name, i)}", _replicas(owner, spec))


def _stateful_set(owner: Owner) -> list[LoadedPod | Note]:
    spec = owner.top.get("spec")
    start = spec.get("ordinals").get("start").integer(default=0)
    if start < 0:
        raise owner.invalid(f"spec.ordinals.start: Invalid value: {start}: must be greater than or equal to 0")
    return _several(owner, spec.get("template"), lambda i: f"{owner.name}-{start + i}", _replicas(owner, spec))


def _daemon_set(owner: Owner) -> list[LoadedPod | Note]:
    return _several(owner, owner.top.get("spec").get("template"), lambda i: f"{owner.name}-{suffix(owner.name, i)}", 1)


def _job(owner: Owner) -> list[LoadedPod | Note]:
    return _job_pods(owner, owner.top.get("spec"), owner.name)


def _cron_job(owner: Owner) -> list[LoadedPod | Note]:
    spec = owner.top.get("spec")
    if spec.get("suspend").boolean():
        return [owner.note("is suspended: no pods")]
    run = str(int(hashlib.sha256(owner.name.encode()).hexdigest(), 16))[:8]
    return [owner.note("one run of it"), *_job_pods(owner, spec.get("jobTemplate").get("spec"), f"{owner.name}-{run}")]


def _job_pods(owner: Owner, spec: Field, name: str) -> list[LoadedPod | Note]:
    count = _replicas(owner, spec, "parallelism")
    if not spec.get("completions").absent:
        completions = _replicas(owner, spec, "completions")
        count = min(count, completions)
    if spec.get("suspend").boolean():
        return [owner.note("is suspended: no pods")]
    indexed = spec.get("completionMode").text() == "Indexed"
    return _several(
        owner,
        spec.get("template"),
        lambda i: f"{name}-{i}-{suffix(name, i)}" if indexed else f"{name}-{suffix(name, i)}",
        count,
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    version: str
    make: Callable[[Owner], list[LoadedPod | Note]]


_KINDS = {
    "Pod": _Kind("v1", _pod),
    "ReplicationController": _Kind("v1", _replica_set),
    "Deployment": _Kind("apps/v1", _deployment),
    "ReplicaSet": _Kind("apps/v1", _replica_set),
    "StatefulSet": _Kind("apps/v1", _stateful_set),
    "DaemonSet": _Kind("apps/v1", _daemon_set),
    "Job": _Kind("batch/v1", _job),
    "CronJob": _Kind("batch/v1", _cron_job),
}
