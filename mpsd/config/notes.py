"""What a valid config will not do, as far as it tells by itself (pure)."""

from mpsd.config.model import AnnotationsConfig, AwayPolicy, GpuRef, NodeConfig, Resource
from mpsd.config.numbering import named_indices


def notes(config: NodeConfig) -> list[str]:
    """One sentence each. What only the node can tell is none."""
    found = []
    if named := named_indices(config):
        found.append(
            f"GPUs are named by index ({', '.join(map(str, sorted(named)))}): the driver numbers them anew when one "
            "falls out or is replaced; name them by UUID (`gpufrac gpus` shows it)"
        )
    include = config.gpus.include
    found += [
        f"{resource.name} will advertise 0: a share lies on {resource.gpu_count} GPUs, and gpus.include names "
        f"{len(include)}"
        for resource in config.resources
        if include is not None and len(include) < resource.gpu_count
    ]
    return found + (_of_annotated(config, config.annotations) if config.annotations is not None else [])


def _of_annotated(config: NodeConfig, annotations: AnnotationsConfig) -> list[str]:
    found = [
        f"{resource.name} will advertise 0: {'all' if resource.gpu_count == 1 else 'too many'} of its GPUs are set "
        "aside for annotated pods (`annotations.gpus`); "
        "`annotations.share: true` lets resources use them, too"
        for resource in config.resources
        if not annotations.share and _all_set_aside(resource, config, annotations)
    ]
    if annotations.when_away is AwayPolicy.STOP and config.kubernetes.access == "off":
        found.append(
            "`annotations.whenAway: stop` will stop nothing: only the Kubernetes API tells which pods start their "
            "containers again: set `kubernetes.access`"
        )
    return found


def _all_set_aside(resource: Resource, config: NodeConfig, annotations: AnnotationsConfig) -> bool:
    """Whether annotated pods have a GPU of everything that a resource could lie on, whatever GPUs the node has."""
    if resource.groups:
        groups = dict(config.groups)
        return all(any(_is_set_aside(ref, annotations) for ref in groups[name]) for name in resource.groups)
    for selection in (resource.gpus, config.gpus):
        if selection.include is None:
            continue
        if sum(not _is_set_aside(ref, annotations) for ref in selection.include) < resource.gpu_count:
            return True
    left = set(annotations.gpus.exclude)
    return annotations.gpus.include is None and left <= {*resource.gpus.exclude, *config.gpus.exclude}


def _is_set_aside(ref: GpuRef, annotations: AnnotationsConfig) -> bool:
    """Whether a GPU is, by the name it has here. One that is excluded by an index or a UUID may be any of the other."""
    include, exclude = annotations.gpus.include, annotations.gpus.exclude
    may_be_excluded = any(other == ref or isinstance(other, int) is not isinstance(ref, int) for other in exclude)
    return (include is None or ref in include) and not may_be_excluded
