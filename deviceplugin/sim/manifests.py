"""Kubernetes manifests -> the pods that their controllers would make, judged as the API server would.

YAML and JSON, several documents in a file, as kubectl reads them. What is no business of a node's device handling
(images, volumes, schedulers, other kinds) is ignored, with a note where a user would be misled; what the API server
refuses is an error with its words. Fields it does not know are ignored.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import yaml

from deviceplugin.sim.pods import (
    NODE_LABELS,
    NODE_NAME,
    ContainerSpec,
    FieldRef,
    PodSpec,
    Role,
    field_value,
    is_extended_resource,
)
from mpsd.errors import ConfigError
from mpsd.quantity import API_FORMAT_ERROR, API_SUFFIX_ERROR, QuantityError, parse_count, parse_quantity, quoted

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_PODS = 1000
"""Pods of one run. A real kubelet takes 110 by default."""
MAX_PROBLEMS = 50
_MAX_DEPTH, _MAX_VALUES, _MAX_LISTS = 64, 200_000, 4

_SAFE = "bcdfghjklmnpqrstvwxz2456789"
"""The characters of generated names (k8s.io/apimachinery util/rand)."""
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_NAME_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_NAME_PART_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_MAX_ANNOTATIONS_BYTES = 256 * 1024
_STANDARD_RESOURCES = frozenset(("cpu", "memory", "ephemeral-storage"))
_RESTART_POLICIES = ("Always", "OnFailure", "Never")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class LoadedPod:
    """A pod that a manifest leads to. `source`: `FILE (document N)`; `notes`: what its author may not expect."""

    pod: PodSpec
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """Something in a manifest that leads to no pod here, and why."""

    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"


class ManifestError(ConfigError):
    """Manifests that can't be read or that the API server would refuse: one line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = list(self.problems[:MAX_PROBLEMS])
        if (more := len(self.problems) - MAX_PROBLEMS) > 0:
            lines.append(f"and {more} more problems")
        super().__init__("\n".join(lines))


def load_manifests(path: str) -> list[LoadedPod | Note]:
    """The pods of a manifest file, `-` for standard input.

    Raises:
        ManifestError: it can't be read, is no YAML or JSON, or the API server would refuse some of it; all problems.
    """
    source = "<stdin>" if path == "-" else path
    return parse_manifests(read_manifest(path), source)


def load_all(paths: Iterable[str]) -> list[LoadedPod | Note]:
    """As load_manifests for several files, with the problems of all of them, and names unique over all of them."""
    texts: list[tuple[str, bytes]] = []
    problems: list[str] = []
    for path in paths:
        try:
            texts.append(("<stdin>" if path == "-" else path, read_manifest(path)))
        except ManifestError as error:
            problems += error.problems
    try:
        found = parse_all(texts)
    except ManifestError as error:
        raise ManifestError([*problems, *error.problems]) from error
    if problems:
        raise ManifestError(problems)
    return found


def parse_all(texts: Iterable[tuple[str, bytes]]) -> list[LoadedPod | Note]:
    """Manifests of several sources: (what error texts call it, content)."""
    found: list[LoadedPod | Note] = []
    problems: list[str] = []
    for source, text in texts:
        try:
            found += parse_manifests(text, source)
        except ManifestError as error:
            problems += error.problems
    if not problems:
        problems = _duplicates(found)
    if sum(isinstance(item, LoadedPod) for item in found) > MAX_PODS:
        problems.append(f"cannot admit more than {MAX_PODS} pods at a time: lower the replicas")
    if problems:
        raise ManifestError(problems)
    return found


def read_manifest(path: str) -> bytes:
    """The bytes of a manifest, `-` for standard input. Raises ManifestError."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, IsADirectoryError):
            reason = "it is a directory; name the files in it"
        raise ManifestError([f"cannot read manifest {path}: {reason}"]) from error
    if len(data) > MAX_FILE_BYTES:
        raise ManifestError([f"cannot read manifest {path}: it is larger than {MAX_FILE_BYTES} bytes"])
    return data


def parse_manifests(data: bytes, source: str) -> list[LoadedPod | Note]:
    """The pods of one file's content; `source` is what error texts call it. Raises ManifestError."""
    found: list[LoadedPod | Note] = []
    problems: list[str] = []
    documents = 0
    for document in _documents(data, source):
        documents += 1
        try:
            found += _objects(document, 0)
        except _RefusedError as error:
            problems.append(f"{document.place}: {error}")
    if not documents:
        raise ManifestError([f"cannot read manifest {source}: no objects in it"])
    if not problems:
        problems = _duplicates(found)
    if problems:
        raise ManifestError(problems)
    return found


def _duplicates(found: Iterable[LoadedPod | Note]) -> list[str]:
    seen: dict[str, str] = {}
    problems = []
    for item in found:
        if isinstance(item, LoadedPod):
            name = item.pod.full_name
            if name in seen:
                problems.append(
                    f'{item.source}: pods "{item.pod.name}" already exists in namespace "{item.pod.namespace}": '
                    f"first in {seen[name]}"
                )
            seen.setdefault(name, item.source)
    return problems


# -- text -> documents


@dataclass(frozen=True, slots=True)
class _Document:
    """One object of a file. `place`: `FILE:LINE (document N)`."""

    value: object
    source: str
    place: str


class _RefusedError(Exception):
    """One object is not usable; the text says why."""


def _documents(data: bytes, source: str) -> Iterator[_Document]:
    text = _decoded(data, source)
    if text.lstrip().startswith("{"):
        values = _json_values(text)
        if values is not None:
            for number, (line, value) in enumerate(values, 1):
                yield _document(value, source, number, line)
            return
    _check_shape(text, source)
    loader = _Loader(text)
    number = 0
    try:
        while loader.check_node():
            number += 1
            node = loader.get_node()
            value = loader.construct_document(node)
            if value is not None:
                yield _document(value, source, number, node.start_mark.line + 1)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise _unreadable(error, source, max(1, number)) from error
    finally:
        loader.dispose()


def _unreadable(error: Exception, source: str, number: int) -> ManifestError:
    """`FILE:LINE (document N): cannot read manifest: ...`"""
    mark = (error.problem_mark or error.context_mark) if isinstance(error, yaml.MarkedYAMLError) else None
    text = error.problem or error.context if isinstance(error, yaml.MarkedYAMLError) else str(error)
    where = source if mark is None else f"{source}:{mark.line + 1}"
    reason = " ".join(str(text or "nested too deeply").split())
    return ManifestError([f"{where} (document {number}): cannot read manifest: not valid YAML: {reason}"])


def _document(value: object, source: str, number: int, line: int) -> _Document:
    return _Document(value, f"{source} (document {number})", f"{source}:{line} (document {number})")


def _decoded(data: bytes, source: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ManifestError([f"cannot read manifest {source}: it must be UTF-8, this looks like UTF-16"])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ManifestError([f"{source}:{line}: cannot read manifest: it must be UTF-8"]) from error


class _TwiceError(ValueError):
    pass


def _json_values(text: str) -> list[tuple[int, object]] | None:
    """The JSON values of a file one after the other, None where it is no JSON (flow style YAML looks like it)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise _TwiceError
        return fields

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    decoder = json.JSONDecoder(object_pairs_hook=unique, parse_constant=refuse)
    values: list[tuple[int, object]] = []
    position = 0
    try:
        while (match := re.compile(r"\s*").match(text, position)) is not None and match.end() < len(text):
            value, position = decoder.raw_decode(text, match.end())
            values.append((text.count("\n", 0, match.end()) + 1, value))
    except (ValueError, RecursionError):
        return None  # the YAML reader knows the line
    return values


class _Loader(_LOADER):  # type: ignore[misc]
    """Reads as kubectl does: dates stay text, a key may not come twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    text = f"key {quoted(key.value)} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
                seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: loader.construct_scalar(node))


def _check_shape(text: str, source: str) -> None:
    """Reads the whole stream, and bounds it before a tree is built: the composer recurses."""
    depth = count = number = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            number += isinstance(event, yaml.DocumentStartEvent)
            count += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
            if count > _MAX_VALUES:
                raise ValueError(f"more than {_MAX_VALUES} values")
    except (yaml.YAMLError, ValueError) as error:
        raise _unreadable(error, source, max(1, number)) from error


# -- documents -> pods


def _objects(document: _Document, depth: int) -> list[LoadedPod | Note]:
    if not isinstance(document.value, Mapping):
        raise _RefusedError(f"must be an object with apiVersion and kind, not {_kind_of(document.value)}")
    top = _Field(document.value, "", "")
    version = top.get("apiVersion").text(required="apiVersion not set")
    kind = top.get("kind").text(required="kind not set")
    if kind.endswith("List") and "items" in document.value:
        if depth >= _MAX_LISTS:
            raise _RefusedError(f"lists in lists deeper than {_MAX_LISTS} levels")
        found: list[LoadedPod | Note] = []
        problems = []
        for index, item in enumerate(top.get("items").items()):
            try:
                found += _objects(
                    replace(document, value=item.value, source=f"{document.source} items[{index}]"), depth + 1
                )
            except _RefusedError as error:
                problems.append(f"items[{index}]: {error}")
        if problems:
            raise _RefusedError("; ".join(problems))
        return found
    expected = _KINDS.get(kind)
    group = version.rpartition("/")[0]
    if expected is None or group != expected.version.rpartition("/")[0]:
        return [Note(document.source, f"{version} {kind}: not a kind whose pods this command makes; skipped")]
    if version != expected.version:
        raise _RefusedError(f'no matches for kind "{kind}" in version "{version}": it is served in {expected.version}')
    top = _Field(document.value, "", f'{kind} in version "{version.rpartition("/")[2]}" cannot be handled as a {kind}')
    return expected.make(_Owner(document.source, kind, top))


@dataclass(frozen=True, slots=True)
class _Owner:
    """The object a manifest holds, while its pods are made."""

    source: str
    kind: str
    top: "_Field"

    def note(self, text: str) -> Note:
        return Note(self.source, f"{self.kind} {self.label}: {text}")

    @property
    def label(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def metadata(self) -> "_Field":
        return self.top.get("metadata")

    @property
    def name(self) -> str:
        """The object's name; a generated one where only generateName is given."""
        given = self.metadata.get("name").text()
        prefix = self.metadata.get("generateName").text()
        if not given and not prefix:
            rule = "Required value: name or generateName is required"
            raise _RefusedError(f'{self.kind} "" is invalid: metadata.name: {rule}')
        name = given or prefix[:58] + _suffix(prefix, self.source)
        if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
            rule = _SUBDOMAIN_RULE if len(name) <= 253 else "must be no more than 253 characters"
            raise _RefusedError(
                f'{self.kind} "{_short(name)}" is invalid: metadata.name: Invalid value: {quoted(name)}: {rule}'
            )
        return name

    @property
    def namespace(self) -> str:
        name = self.metadata.get("namespace").text() or "default"
        if not _LABEL.fullmatch(name) or len(name) > 63:
            raise self.invalid(f"metadata.namespace: Invalid value: {quoted(name)}: {_LABEL_RULE}")
        return name

    def invalid(self, text: str) -> _RefusedError:
        return _RefusedError(f'{self.kind} "{self.name}" is invalid: {text}')


def _pod(owner: _Owner) -> list[LoadedPod | Note]:
    return [_loaded(owner, owner.name, owner.top, "")]


def _replicas(owner: _Owner, spec: "_Field", key: str = "replicas") -> int:
    count = spec.get(key).integer(default=1)
    if count < 0:
        raise owner.invalid(f"spec.{key}: Invalid value: {count}: must be greater than or equal to 0")
    return count


def _several(owner: _Owner, template: "_Field", names: Callable[[int], str], count: int) -> list[LoadedPod | Note]:
    """Pods of a template; the template is judged also where there is none."""
    if count > MAX_PODS:
        raise _RefusedError(f"{owner.kind} {owner.label} asks for {count} pods: this command takes at most {MAX_PODS}")
    first = _loaded(owner, names(0), template, template.path)
    if count == 0:
        return [owner.note("asks for 0 pods")]
    return [replace(first, pod=replace(first.pod, name=names(index))) for index in range(count)]


def _deployment(owner: _Owner) -> list[LoadedPod | Note]:
    spec = owner.top.get("spec")
    base = f"{owner.name}-{_suffix(owner.name, 'template', 10)}"
    return _several(owner, spec.get("template"), lambda i: f"{base}-{_suffix(base, i)}", _replicas(owner, spec))


def _replica_set(owner: _Owner) -> list[LoadedPod | Note]:
    spec, name = owner.top.get("spec"), owner.name
    return _several(owner, spec.get("template"), lambda i: f"{name}-{_suffix(name, i)}", _replicas(owner, spec))


def _stateful_set(owner: _Owner) -> list[LoadedPod | Note]:
    spec = owner.top.get("spec")
    start = spec.get("ordinals").get("start").integer(default=0)
    if start < 0:
        raise owner.invalid(f"spec.ordinals.start: Invalid value: {start}: must be greater than or equal to 0")
    return _several(owner, spec.get("template"), lambda i: f"{owner.name}-{start + i}", _replicas(owner, spec))


def _daemon_set(owner: _Owner) -> list[LoadedPod | Note]:
    return _several(owner, owner.top.get("spec").get("template"), lambda i: f"{owner.name}-{_suffix(owner.name, i)}", 1)


def _job(owner: _Owner) -> list[LoadedPod | Note]:
    return _job_pods(owner, owner.top.get("spec"), owner.name)


def _cron_job(owner: _Owner) -> list[LoadedPod | Note]:
    spec = owner.top.get("spec")
    if spec.get("suspend").boolean():
        return [owner.note("is suspended: no pods")]
    run = str(int(hashlib.sha256(owner.name.encode()).hexdigest(), 16))[:8]
    return [owner.note("one run of it"), *_job_pods(owner, spec.get("jobTemplate").get("spec"), f"{owner.name}-{run}")]


def _job_pods(owner: _Owner, spec: "_Field", name: str) -> list[LoadedPod | Note]:
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
        lambda i: f"{name}-{i}-{_suffix(name, i)}" if indexed else f"{name}-{_suffix(name, i)}",
        count,
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    version: str
    make: Callable[[_Owner], list[LoadedPod | Note]]


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


def _suffix(base: object, salt: object, length: int = 5) -> str:
    """Looks like a generated suffix, and is the same each time."""
    number = int(hashlib.sha256(f"{base}\0{salt}".encode()).hexdigest(), 16)
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(_SAFE))
        digits.append(_SAFE[digit])
    return "".join(digits)


# -- one pod


def _loaded(owner: _Owner, name: str, holder: "_Field", prefix: str) -> LoadedPod:
    """A pod from an object or template that has `metadata` and `spec`."""
    metadata, spec = holder.get("metadata"), holder.get("spec")
    if spec.absent:
        raise owner.invalid(f"{prefix + '.' if prefix else ''}spec: Required value")
    annotations, labels = metadata.get("annotations").texts(), metadata.get("labels").texts()
    problems: list[str] = []
    notes: list[str] = []
    problems += _annotation_problems(annotations, metadata.get("annotations").path)
    containers = _containers(spec, problems, notes)
    restart_policy = spec.get("restartPolicy")
    if restart_policy.text() not in ("", *_RESTART_POLICIES):
        supported = ", ".join(f'"{policy}"' for policy in _RESTART_POLICIES)
        problems.append(
            f"{restart_policy.path}: Unsupported value: {quoted(restart_policy.text())}: supported values: {supported}"
        )
    if problems:
        raise owner.invalid(problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]")
    notes += _placement_notes(spec)
    pod = PodSpec(
        name=name,
        namespace=owner.namespace,
        containers=tuple(containers),
        labels=labels,
        annotations=annotations,
        service_account=spec.get("serviceAccountName").text() or "default",
        restart_policy=restart_policy.text() or "Always",
        scheduler=spec.get("schedulerName").text(),
        node=spec.get("nodeName").text(),
    )
    return LoadedPod(pod, owner.source, tuple(notes))


def _annotation_problems(annotations: Mapping[str, str], path: str) -> list[str]:
    """The API server's rules for keys (as for labels) and for the size of all. A long container name makes a key of
    that container too long."""
    problems = []
    for key in annotations:
        prefix, slash, name = key.rpartition("/")
        if slash and (not _SUBDOMAIN.fullmatch(prefix.lower()) or len(prefix) > 253):
            rule = _SUBDOMAIN_RULE if len(prefix) <= 253 else "must be no more than 253 characters"
            problems.append(f"{path}: Invalid value: {quoted(key)}: prefix part {rule}")
        if len(name) > 63:
            problems.append(f"{path}: Invalid value: {quoted(key)}: name part must be no more than 63 characters")
        elif not _NAME_PART.fullmatch(name):
            problems.append(f"{path}: Invalid value: {quoted(key)}: {_NAME_PART_RULE}")
    size_bytes = sum(len(_utf8(key)) + len(_utf8(value)) for key, value in annotations.items())
    if size_bytes > _MAX_ANNOTATIONS_BYTES:
        problems.append(f"{path}: Too long: may not be more than {_MAX_ANNOTATIONS_BYTES} bytes")
    return problems


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may hold half of a pair


def _placement_notes(spec: "_Field") -> list[str]:
    notes = []
    node = spec.get("nodeName").text()
    if node and node != NODE_NAME:
        notes.append(f"nodeName {node} is another node's: admitted here all the same")
    selector = spec.get("nodeSelector").texts()
    missing = [f"{key}={value}" for key, value in selector.items() if NODE_LABELS.get(key) != value]
    if missing:
        notes.append(f"nodeSelector {','.join(missing)} does not match the simulated node: admitted here all the same")
    return notes


def _containers(spec: "_Field", problems: list[str], notes: list[str]) -> list[ContainerSpec]:
    containers: list[ContainerSpec] = []
    names: set[str] = set()
    apps = spec.get("containers")
    if not apps.items():
        problems.append(f"{apps.path}: Required value")
    for entry in (*spec.get("initContainers").items(), *apps.items()):
        entry.mapping()
        is_init = entry.path.rpartition(".")[2].startswith("initContainers")
        always = entry.get("restartPolicy").text() == "Always"
        role = Role.APP if not is_init else Role.SIDECAR if always else Role.INIT
        name = entry.get("name").text()
        if not name:
            problems.append(f"{entry.path}.name: Required value")
        elif not _LABEL.fullmatch(name) or len(name) > 63:
            rule = _LABEL_RULE if len(name) <= 63 else "must be no more than 63 characters"
            problems.append(f"{entry.path}.name: Invalid value: {quoted(name)}: {rule}")
        elif name in names:
            problems.append(f"{entry.path}.name: Duplicate value: {quoted(name)}")
        names.add(name)
        if not entry.get("image").text():
            notes.append(f"container {name} has no image: a cluster would not take it")
        containers.append(
            ContainerSpec(
                name=name,
                resources=_resources(entry.get("resources"), name, problems, notes),
                role=role,
                env=_env(entry, name, problems, notes),
                mount_paths=tuple(
                    path for mount in entry.get("volumeMounts").items() if (path := mount.get("mountPath").text())
                ),
            )
        )
    return containers


def _resources(resources: "_Field", container: str, problems: list[str], notes: list[str]) -> dict[str, int]:
    """Extended resources of one container by name; zero counts are left out, with a note."""
    limits = _quantities(resources.get("limits"), problems)
    requests = _quantities(resources.get("requests"), problems)
    for name, count in requests.items():
        if name not in limits:
            text = f"{resources.path}.limits: Required value: Limit must be set for non overcommitable resources"
            if text not in problems:
                problems.append(text)
        elif limits[name] != count:
            problems.append(
                f'{resources.path}.requests: Invalid value: "{count}": must be equal to {name} limit of {limits[name]}'
            )
    for name, count in limits.items():
        if count == 0:
            notes.append(f"container {container} asks for 0 {name}: the device plugin is not asked, it gets no device")
    return {name: count for name, count in limits.items() if count > 0}


def _quantities(field: "_Field", problems: list[str]) -> dict[str, int]:
    """Counts of extended resources. Others are checked and left out."""
    counts: dict[str, int] = {}
    for name, entry in field.entries().items():
        path = f"{field.path}[{name}]"
        if not is_extended_resource(name):
            _check_standard(name, entry, path, problems)
            continue
        try:
            counts[name] = parse_count(entry.value)
        except QuantityError as error:
            if error.reason in (API_FORMAT_ERROR, API_SUFFIX_ERROR):
                raise _RefusedError(f"{field.handled_as}: {path}: {quoted(error.text)}: {error.reason}") from error
            problems.append(f"{path}: Invalid value: {quoted(error.text)}: {error.reason}")
    return counts


def _check_standard(name: str, entry: "_Field", path: str, problems: list[str]) -> None:
    if "/" not in name and name not in _STANDARD_RESOURCES and not name.startswith("hugepages-"):
        problems.append(f"{path}: Invalid value: {quoted(name)}: must be a standard resource type or fully qualified")
        return
    if isinstance(entry.value, str | int | float) and not isinstance(entry.value, bool):
        try:
            quantity = parse_quantity(str(entry.value).strip(" "))
        except QuantityError as error:
            raise _RefusedError(f"{entry.handled_as}: {path}: {quoted(error.text)}: {API_FORMAT_ERROR}") from error
        if quantity < 0:
            problems.append(f"{path}: Invalid value: {quoted(str(entry.value))}: must be greater than or equal to 0")
    elif entry.value is not None:
        raise _RefusedError(f"{entry.handled_as}: {path}: must be a quantity, not {_kind_of(entry.value)}")


def _env(
    container: "_Field", container_name: str, problems: list[str], notes: list[str]
) -> tuple[tuple[str, str | FieldRef], ...]:
    env: list[tuple[str, str | FieldRef]] = []
    elsewhere: list[str] = []
    for entry in container.get("env").items():
        entry.mapping()
        name = entry.get("name").text()
        if not name or "=" in name or not name.isascii() or not name.isprintable():
            rule = f"Invalid value: {quoted(name)}: must be printable ASCII without '='" if name else "Required value"
            problems.append(f"{entry.path}.name: {rule}")
            continue
        source = entry.get("valueFrom")
        if source.absent:
            env.append((name, entry.get("value").text()))
            continue
        path = source.get("fieldRef").get("fieldPath").text()
        if path and field_value(PodSpec("", ()), "", path) is not None:
            env.append((name, FieldRef(path)))
        else:
            elsewhere.append(name)
    sets = [
        entry.get("configMapRef").get("name").text() or entry.get("secretRef").get("name").text()
        for entry in container.get("envFrom").items()
    ]
    if elsewhere or sets:
        what = ", ".join([*elsewhere, *(f"all of {name}" for name in sets)])
        notes.append(f"container {container_name}: env from objects of a cluster is left out ({what})")
    return tuple(env)


# -- one value


class _Field:
    """A value of a manifest and its path. Readers refuse a wrong type; null and a missing key are the same."""

    __slots__ = ("handled_as", "path", "value")

    def __init__(self, value: object, path: str, handled_as: str) -> None:
        self.value = value
        self.path = path
        self.handled_as = handled_as

    @property
    def absent(self) -> bool:
        return self.value is None

    def get(self, key: str) -> "_Field":
        """A key of a mapping, absent where the mapping is."""
        return _Field(self.mapping().get(key), f"{self.path}.{key}" if self.path else key, self.handled_as)

    def mapping(self) -> Mapping[Any, object]:
        if self.value is None:
            return {}
        if not isinstance(self.value, Mapping):
            self._refuse("an object")
        return self.value

    def entries(self) -> dict[str, "_Field"]:
        return {
            self._key(key): _Field(value, f"{self.path}.{key}", self.handled_as)
            for key, value in self.mapping().items()
        }

    def items(self) -> list["_Field"]:
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            self._refuse("a list")
        return [_Field(value, f"{self.path}[{i}]", self.handled_as) for i, value in enumerate(self.value)]

    def text(self, *, required: str = "") -> str:
        if self.value is None or self.value == "":
            if required:
                raise _RefusedError(required)
            return ""
        if not isinstance(self.value, str):
            self._refuse("a string")
        return self.value

    def texts(self) -> dict[str, str]:
        return {key: entry.text() for key, entry in self.entries().items()}

    def integer(self, *, default: int) -> int:
        if self.value is None:
            return default
        if isinstance(self.value, float) and self.value.is_integer():
            return int(self.value)
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self._refuse("a whole number")
        if abs(self.value) > 2**31 - 1:
            self._refuse("a whole number of 32 bits")
        return self.value

    def boolean(self) -> bool:
        if self.value is None:
            return False
        if not isinstance(self.value, bool):
            self._refuse("true or false")
        return self.value

    def _key(self, key: object) -> str:
        # YAML keys that are no text become text on their way to JSON.
        return key if isinstance(key, str) else json.dumps(key, default=str)

    def _refuse(self, expected: str) -> NoReturn:
        before = f"{self.handled_as}: " if self.handled_as else ""
        hint = ""
        if expected == "a string" and isinstance(self.value, bool | int | float):
            hint = f'; write it in quotes: "{json.dumps(self.value)}"'
        raise _RefusedError(f"{before}{self.path or 'it'}: must be {expected}, not {_kind_of(self.value)}{hint}")


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {_short(str(value))}"
        case str():
            return f"the string {quoted(value)}"
        case Mapping():
            return "an object"
        case list():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def _short(text: str) -> str:
    return text if len(text) <= 64 else f"{text[:60]}..."
