"""Kinds of objects -> the pods that their controllers would make (pure)."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from deviceplugin.sim.objects import mistaken, selectors, strict
from deviceplugin.sim.objects.annotations import INPUTS, PREFIX
from deviceplugin.sim.objects.documents import Document
from deviceplugin.sim.objects.fields import Field, kind_of
from deviceplugin.sim.objects.model import MAX_PODS, LoadedPod, Note, RefusedError
from deviceplugin.sim.objects.owner import Owner, suffix
from deviceplugin.sim.objects.pods import is_extended_resource
from deviceplugin.sim.objects.podspec import loaded_pod

_MAX_LISTS, _MAX_DEPTH = 4, 12


def objects(document: Document, depth: int = 0) -> list[LoadedPod | Note]:
    """The pods of one object of a file, and notes on what leads to none. Raises RefusedError."""
    if not isinstance(document.value, Mapping):
        raise RefusedError(f"must be an object with apiVersion and kind, not {kind_of(document.value)}")
    top = Field(document.value, "", "")
    version, kind = top.get("apiVersion").text(), top.get("kind").text()
    if missing := [name for name, value in (("apiVersion", version), ("kind", kind)) if not value]:
        what = mistaken.no_object(document.value)
        raise RefusedError(f"{', '.join(f'{name} not set' for name in missing)}{f': {what}' if what else ''}")
    if kind.endswith("List") and "items" in document.value:
        return _items(document, top, version, kind.removesuffix("List"), depth)
    if what := mistaken.no_manifest(version, kind):
        raise RefusedError(what)
    expected = _KINDS.get(kind)
    group = version.rpartition("/")[0]
    # A group with a dot may be of any CRD; those without one are the API server's own.
    if expected is None or (group != expected.version.rpartition("/")[0] and "." in group):
        what = mistaken.no_workload(version, kind) or _how(top)
        return [Note(document.source, f"{version} {kind}: not a kind whose pods this command makes; skipped{what}")]
    if version != expected.version:
        raise RefusedError(
            f'no matches for kind "{kind}" in version "{version}": it is served in {expected.version}: write that'
        )
    top = Field(document.value, "", f'{kind} in version "{version.rpartition("/")[2]}" cannot be handled as a {kind}')
    return expected.make(Owner(document.source, kind, top))


def _items(document: Document, top: Field, version: str, kind: str, depth: int) -> list[LoadedPod | Note]:
    """The objects of a list; what lacks a kind is of the list's, such as the pods of a PodList."""
    if depth >= _MAX_LISTS:
        raise RefusedError(f"lists in lists deeper than {_MAX_LISTS} levels")
    found: list[LoadedPod | Note] = []
    problems = []
    for index, item in enumerate(top.get("items").items()):
        value = item.value
        if kind and isinstance(value, Mapping) and "kind" not in value:
            value = {"apiVersion": version, **value, "kind": kind}
        try:
            found += objects(replace(document, value=value, source=f"{document.source} items[{index}]"), depth + 1)
        except RefusedError as error:
            problems.append(f"items[{index}]: {error}")
    if problems:
        raise RefusedError("; ".join(problems))
    return found


def _how(top: Field) -> str:
    """How to try the pods of a kind that its own controller makes; empty where it makes none, as far as can be seen."""
    templates = [path for path, value in _mappings(top.value, "", 0) if _is_template(value)]
    if templates:
        return f": its own controller makes them: to try one here, make a Pod of {' or '.join(templates[:4])}"
    asking = [
        f"{path}.limits ({name})"
        for path, value in _mappings(top.value, "", 0)
        if path.endswith(".resources") and isinstance(limits := value.get("limits"), Mapping)
        for name in limits
        if is_extended_resource(str(name))
    ]
    return f": its own controller makes them: to try {asking[0]} here, write a Pod that asks for it" if asking else ""


def _is_template(value: Mapping[object, object]) -> bool:
    spec = value.get("spec")
    return isinstance(spec, Mapping) and isinstance(spec.get("containers"), list)


def _mappings(value: object, path: str, depth: int) -> Iterator[tuple[str, Mapping[object, object]]]:
    """All mappings in a value, with their paths; none that is nested too deeply to be read anyway."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        yield path, value
        for key, part in value.items():
            yield from _mappings(part, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _mappings(part, f"{path}[{index}]", depth + 1)


def _pod(owner: Owner) -> list[LoadedPod | Note]:
    return [loaded_pod(owner, owner.name, owner.top, "")]


def _replicas(owner: Owner, spec: Field, key: str = "replicas") -> int:
    count = spec.get(key).integer(default=1)
    if count < 0:
        raise owner.invalid(f"spec.{key}: Invalid value: {count}: must be greater than or equal to 0")
    return count


def _several(
    owner: Owner, spec: Field, names: Callable[[int], str], count: int, none: str = "asks for 0 pods"
) -> list[LoadedPod | Note]:
    """Pods of a template; the template is judged also where there is none.

    Args:
        none: why there is none, where there is none.
    """
    if count > MAX_PODS:
        raise RefusedError(f"{owner.kind} {owner.label} asks for {count} pods: this command takes at most {MAX_PODS}")
    template = spec.get("template")
    if wrong := strict.beside_template(spec, f"{template.path}.spec"):
        raise RefusedError(f"{spec.handled_as}: {strict.refusal(wrong)}")
    first = loaded_pod(owner, names(0), template, template.path, _selector_problems(owner.kind, spec))
    first = replace(first, notes=(*first.notes, *_annotation_notes(owner, template)))
    if count == 0:
        return [owner.note(none)]
    return [replace(first, pod=replace(first.pod, name=names(index))) for index in range(count)]


def _selector_problems(kind: str, spec: Field) -> list[str]:
    labels = spec.get("template").get("metadata").get("labels")
    if kind in ("Job", "CronJob"):
        return []  # their selector is made for them
    judge = selectors.plain_problems if kind == "ReplicationController" else selectors.problems
    return judge(spec.get("selector"), labels.texts(), labels.path)


def _annotation_notes(owner: Owner, template: Field) -> list[str]:
    """What asks for GPUs on the workload itself: nobody takes it from there to the pods."""
    of_pods = template.get("metadata").get("annotations")
    return [
        f"annotation {key} stands on the {owner.kind} and not on its pods: it belongs under {of_pods.path}"
        for key in owner.metadata.get("annotations").entries()
        if (key in INPUTS or key.startswith(PREFIX)) and key not in of_pods.entries()
    ]


def _deployment(owner: Owner) -> list[LoadedPod | Note]:
    spec = owner.top.get("spec")
    base = f"{owner.name}-{suffix(owner.name, 'template', 10)}"
    return _several(owner, spec, lambda i: f"{base}-{suffix(base, i)}", _replicas(owner, spec))


def _replica_set(owner: Owner) -> list[LoadedPod | Note]:
    spec, name = owner.top.get("spec"), owner.name
    return _several(owner, spec, lambda i: f"{name}-{suffix(name, i)}", _replicas(owner, spec))


def _stateful_set(owner: Owner) -> list[LoadedPod | Note]:
    spec = owner.top.get("spec")
    start = spec.get("ordinals").get("start").integer(default=0)
    if start < 0:
        raise owner.invalid(f"spec.ordinals.start: Invalid value: {start}: must be greater than or equal to 0")
    return _several(owner, spec, lambda i: f"{owner.name}-{start + i}", _replicas(owner, spec))


def _daemon_set(owner: Owner) -> list[LoadedPod | Note]:
    return _several(owner, owner.top.get("spec"), lambda i: f"{owner.name}-{suffix(owner.name, i)}", 1)


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
    suspended = spec.get("suspend").boolean()
    indexed = spec.get("completionMode").text() == "Indexed"
    return _several(
        owner,
        spec,
        lambda i: f"{name}-{i}-{suffix(name, i)}" if indexed else f"{name}-{suffix(name, i)}",
        0 if suspended else count,
        "is suspended: no pods" if suspended else "asks for 0 pods",
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
