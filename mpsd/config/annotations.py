"""`annotations` of the config file: pods described by annotations."""

import re
from collections.abc import Sequence

import msgspec
import yaml

from mpsd.config.model import (
    AnnotationsConfig,
    AwayPolicy,
    Domains,
    Enforcement,
    GpuRef,
    GpuSelection,
    ShortfallPolicy,
    TrustPolicy,
)
from mpsd.config.names import MAX_DOMAIN, is_domain, label
from mpsd.config.selection import read_selection
from mpsd.config.value import Readers, Value

_MAX_PREFIX_NAME = (
    63 - len("a") - len(".gpu-compute.portion")
)  # room for the shortest container name and longest suffix
_PREFIX_NAME = re.compile(r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*)?")


def read_annotations(value: Value, minimum: Enforcement, shared: GpuSelection) -> AnnotationsConfig | None:
    """The section `annotations`, None where there is none; problems are noted at its values."""
    readers: Readers = {
        "share": ("share", Value.boolean),
        "domains": ("domains", lambda v: v.choice(Domains)),
        "reservationNamespace": ("reservation_namespace", lambda v: label(v, "a namespace")),
        "prefix": ("prefix", _annotation_prefix),
        "enforcement": ("enforcement", lambda v: v.choice(Enforcement)),
        "shortfall": ("shortfall", lambda v: v.choice(ShortfallPolicy)),
        "whenAway": ("when_away", lambda v: v.choice(AwayPolicy)),
        "criSocket": ("cri_socket", lambda v: v.path_text(socket_below="")),
    }
    entries = value.mapping(("gpus", "trust", *readers), like="{gpus: {include: [2, 3]}}")
    if entries is None:
        return None
    fields = {readers[key][0]: readers[key][1](entry) for key, entry in entries.items() if key in readers}
    trust, namespaces = _trust(entries["trust"]) if "trust" in entries else (TrustPolicy.KAI_RESERVATION, ())
    default = AnnotationsConfig(
        gpus=_set_aside(value, entries.get("gpus"), shared),
        trust=trust,
        namespaces=namespaces,
        enforcement=minimum,
    )
    return msgspec.structs.replace(default, **{name: field for name, field in fields.items() if field is not None})


def _set_aside(annotations: Value, value: Value | None, shared: GpuSelection) -> GpuSelection:
    """There is no default: whole GPUs would silently change hands. `shared`: `gpus`, which must admit them."""
    rule = "all, or a list of the GPUs that annotated pods may use"
    if value is None:
        annotations.missing("gpus.include", rule)
        return GpuSelection()
    entries = value.mapping(("include", "exclude"), like="{include: [2, 3]}")
    if entries is None:
        return GpuSelection()
    if "include" not in entries:
        value.missing("include", rule)
    selection = read_selection(entries)
    for ref in selection.include or ():
        if ref in shared.exclude:
            entries["include"].note(f"GPU {ref} is excluded by gpus.exclude")
        # Where one list has indices and the other UUIDs, only the node knows.
        elif shared.include is not None and ref not in shared.include and _same_kind(ref, shared.include):
            entries["include"].note(f"GPU {ref} is not in gpus.include, so it is not shared at all")
    return selection


def _same_kind(ref: GpuRef, refs: Sequence[GpuRef]) -> bool:
    return all(isinstance(other, int) == isinstance(ref, int) for other in refs)


def _trust(value: Value) -> tuple[TrustPolicy, tuple[str, ...]]:
    rule = f"must be {TrustPolicy.KAI_RESERVATION}, {TrustPolicy.ANY} or {{namespaces: [...]}}"
    if isinstance(value.node, yaml.ScalarNode):
        text = value.text(rule)
        if text in (TrustPolicy.KAI_RESERVATION, TrustPolicy.ANY):
            return TrustPolicy(text), ()
        if text is not None:
            value.note(rule)
        return TrustPolicy.KAI_RESERVATION, ()
    if not isinstance(value.node, yaml.MappingNode):
        value.note(rule)
        return TrustPolicy.KAI_RESERVATION, ()
    entries = value.mapping(("namespaces",))
    if entries is not None and "namespaces" in entries:
        return TrustPolicy.NAMESPACES, _namespaces(entries["namespaces"])
    value.missing("namespaces", "a list of at least one namespace")
    return TrustPolicy.NAMESPACES, ()


def _namespaces(value: Value) -> tuple[str, ...]:
    items = value.items("namespaces")
    if items is not None and not items:
        value.note("must name at least one namespace")
    names: list[str] = []
    for item in items or ():
        name = label(item, "a namespace")
        if name is not None and name in names:
            item.note("is named twice in this list")
        elif name is not None:
            names.append(name)
    return tuple(names)


def _annotation_prefix(value: Value) -> str | None:
    """With a container's name and a suffix it must be able to be the key of an annotation."""
    text = value.text('must be the start of an annotation\'s key such as nvidia.com/container., or ""')
    if text is None or text == "":
        return text
    domain, slash, name = text.partition("/")
    if not slash:
        value.note("must be <domain>/<start of the name>, such as nvidia.com/container.")
    elif not is_domain(domain):
        value.note(f"the domain must be at most {MAX_DOMAIN} lower-case letters, digits, dashes and dots")
    elif not _PREFIX_NAME.fullmatch(name):
        value.note("the part behind the slash must be letters, digits, `-`, `_` and `.`, and not begin with a sign")
    elif len(name) > _MAX_PREFIX_NAME:
        rest = "a container's name and a key such as .gpu-compute.portion must fit behind it into 63"
        value.note(f"the part behind the slash must be at most {_MAX_PREFIX_NAME} characters long: {rest}")
    elif name and not name.endswith("."):
        value.note(f"must end with a dot, as the container's name comes right behind it; did you mean {text}.?")
    else:
        return text
    return None
