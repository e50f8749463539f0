"""One pod of an object or a template, judged as the API server would (pure).

What is no business of a node's device handling (images, volumes, schedulers) is ignored, with a note where a user would
be misled.
"""

from collections.abc import Sequence

from deviceplugin.plan import isolation
from deviceplugin.sim.objects import strict
from deviceplugin.sim.objects.annotations import SCHEDULER
from deviceplugin.sim.objects.fields import Field, kind_of
from deviceplugin.sim.objects.model import LoadedPod, RefusedError
from deviceplugin.sim.objects.names import LABEL, LABEL_RULE, annotation_problems
from deviceplugin.sim.objects.owner import Owner
from deviceplugin.sim.objects.pods import (
    NODE_LABELS,
    NODE_NAME,
    ContainerSpec,
    FieldRef,
    PodSpec,
    Role,
    field_value,
    is_extended_resource,
)
from mpsd.common.quantity import API_FORMAT_ERROR, API_SUFFIX_ERROR, QuantityError, parse_count, parse_quantity, quoted

_STANDARD_RESOURCES = frozenset(("cpu", "memory", "ephemeral-storage"))
_RESTART_POLICIES = ("Always", "OnFailure", "Never")


def loaded_pod(owner: Owner, name: str, holder: Field, prefix: str, before: Sequence[str] = ()) -> LoadedPod:
    """A pod from an object or template that has `metadata` and `spec`.

    Args:
        before: problems of the object that has the template.
    """
    metadata, spec = holder.get("metadata"), holder.get("spec")
    problems, notes = list(before), _strict(holder, spec)
    if spec.absent:
        raise owner.invalid_for([*problems, f"{prefix + '.' if prefix else ''}spec: Required value"])
    annotations, labels = metadata.get("annotations").texts(), metadata.get("labels").texts()
    problems += annotation_problems(annotations, metadata.get("annotations").path)
    containers = _containers(spec, problems, notes)
    claims = _claims(spec, problems)
    problems += _restart_problems(spec.get("restartPolicy"), owner.kind)
    problems += _pod_level_problems(spec.get("resources"))
    if problems:
        raise owner.invalid_for(problems)
    notes += _placement_notes(spec)
    pod = PodSpec(
        name=name,
        namespace=owner.namespace,
        containers=tuple(containers),
        labels=labels,
        annotations=annotations,
        service_account=spec.get("serviceAccountName").text() or "default",
        restart_policy=spec.get("restartPolicy").text() or "Always",
        scheduler=spec.get("schedulerName").text(),
        node=spec.get("nodeName").text(),
        runtime_class=spec.get("runtimeClassName").text(),
        host_users=spec.get("hostUsers").absent or spec.get("hostUsers").boolean(),
        claims=claims,
    )
    kept_apart = isolation.of_container(pod.runtime_class, user_namespace=not pod.host_users)
    if kept_apart is not None and any(container.resources for container in containers):
        notes.append(f"as on a cluster: {kept_apart}")
    return LoadedPod(pod, owner.source, tuple(notes))


def _strict(holder: Field, spec: Field) -> list[str]:
    """Notes of fields that no pod has. Raises RefusedError for those in a wrong place."""
    problems, notes = strict.in_pod(spec)
    problems = [*strict.beside_spec(holder), *problems]
    for entry in (*spec.get("initContainers").items(), *spec.get("containers").items()):
        wrong, odd = strict.in_container(entry)
        problems += wrong
        notes += odd
    if problems:
        raise RefusedError(f"{holder.handled_as}: {strict.refusal(problems)}")
    return notes


def _restart_problems(policy: Field, kind: str) -> list[str]:
    """A Job's pods end, those of other workloads never do."""
    text = policy.text()
    once = kind in ("Job", "CronJob")
    supported = ("OnFailure", "Never") if once else _RESTART_POLICIES if kind == "Pod" else ("Always",)
    if once and text in ("", "Always"):
        return [f'{policy.path}: Required value: valid values: "OnFailure", "Never"']
    if text in ("", *supported):
        return []
    words = ", ".join(map(quoted, supported))
    return [f"{policy.path}: Unsupported value: {quoted(text)}: supported values: {words}"]


def _pod_level_problems(resources: Field) -> list[str]:
    """Resources of the pod as a whole are processors and memory; devices are for containers."""
    return [
        f"{part.path}[{name}]: Unsupported value: {quoted(name)}: supported values: "
        '"cpu", "hugepages-", "memory"; devices belong under resources.limits of a container'
        for part in (resources.get("limits"), resources.get("requests"))
        for name in part.entries()
        if name not in ("cpu", "memory") and not name.startswith("hugepages-")
    ]


def _claims(spec: Field, problems: list[str]) -> tuple[str, ...]:
    """Names of the pod's resource claims; a container may use those and no others."""
    names = tuple(claim.get("name").text() for claim in spec.get("resourceClaims").items())
    problems += [
        f"{use.path}.name: Not found: {quoted(use.get('name').text())}: the pod's resourceClaims have no such name"
        for container in (*spec.get("initContainers").items(), *spec.get("containers").items())
        for use in container.get("resources").get("claims").items()
        if use.get("name").text() not in names
    ]
    return names


_SCHEDULERS = ("", "default-scheduler", SCHEDULER)
"""The cluster's own, and the one that has a stand-in."""


def _placement_notes(spec: Field) -> list[str]:
    notes = []
    node = spec.get("nodeName").text()
    if node and node != NODE_NAME:
        notes.append(f"nodeName {node} is another node's: admitted here all the same")
    if (scheduler := spec.get("schedulerName").text()) not in _SCHEDULERS and not node:
        notes.append(
            f"schedulerName {scheduler}: placed here as the cluster's own scheduler does; one must have that name"
        )
    selector = spec.get("nodeSelector").texts()
    missing = [f"{key}={value}" for key, value in selector.items() if NODE_LABELS.get(key) != value]
    if missing:
        notes.append(f"nodeSelector {','.join(missing)} does not match the simulated node: it is not looked at here")
    return notes


def _containers(spec: Field, problems: list[str], notes: list[str]) -> list[ContainerSpec]:
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
        elif not LABEL.fullmatch(name) or len(name) > 63:
            rule = LABEL_RULE if len(name) <= 63 else "must be no more than 63 characters"
            problems.append(f"{entry.path}.name: Invalid value: {quoted(name)}: {rule}")
        elif name in names:
            problems.append(f"{entry.path}.name: Duplicate value: {quoted(name)}")
        names.add(name)
        image = entry.get("image").text()
        if not image:
            problems.append(f"{entry.path}.image: Required value")
        elif image != image.strip():
            problems.append(
                f"{entry.path}.image: Invalid value: {quoted(image)}: must not have leading or trailing whitespace"
            )
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


def _resources(resources: Field, container: str, problems: list[str], notes: list[str]) -> dict[str, int]:
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


def _quantities(field: Field, problems: list[str]) -> dict[str, int]:
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
                raise RefusedError(f"{field.handled_as}: {path}: {quoted(error.text)}: {error.reason}") from error
            problems.append(f"{path}: Invalid value: {quoted(error.text)}: {error.reason}")
    return counts


def _check_standard(name: str, entry: Field, path: str, problems: list[str]) -> None:
    if "/" not in name and name not in _STANDARD_RESOURCES and not name.startswith("hugepages-"):
        problems.append(f"{path}: Invalid value: {quoted(name)}: must be a standard resource type or fully qualified")
        return
    if isinstance(entry.value, str | int | float) and not isinstance(entry.value, bool):
        try:
            quantity = parse_quantity(str(entry.value).strip(" "))
        except QuantityError as error:
            raise RefusedError(f"{entry.handled_as}: {path}: {quoted(error.text)}: {API_FORMAT_ERROR}") from error
        if quantity < 0:
            problems.append(f"{path}: Invalid value: {quoted(str(entry.value))}: must be greater than or equal to 0")
    elif entry.value is not None:
        raise RefusedError(f"{entry.handled_as}: {path}: must be a quantity, not {kind_of(entry.value)}")


def _env(
    container: Field, container_name: str, problems: list[str], notes: list[str]
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
