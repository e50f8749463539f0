"""What is shown of a config loads again as the same config; whatever text comes is a config or a list of problems."""

import json

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsd.config.load import ConfigErrors, parse_config
from mpsd.config.model import (
    AnnotationsConfig,
    AwayPolicy,
    CdiConfig,
    Delivery,
    Enforcement,
    FixedMemory,
    FractionMemory,
    GpuDevices,
    GpuRef,
    GpuSelection,
    KubernetesConfig,
    Memory,
    MpsConfig,
    NamespaceMount,
    NodeConfig,
    NriConfig,
    Resource,
    ShortfallPolicy,
    SimulatedConfig,
    SimulatedGpu,
    TrustPolicy,
    UnitMemory,
    WedgePolicy,
)
from mpsd.config.show import effective
from mpsd.gpu.model import MIB, Mode

MIBS = st.integers(1, 2**40)
LABELS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,6}[a-z0-9])?", fullmatch=True)
NAMES = st.builds(
    "{}/{}".format,
    st.lists(LABELS, min_size=1, max_size=3).map(".".join),
    st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,20}[A-Za-z0-9])?", fullmatch=True),
).filter(lambda name: not name.startswith("requests."))
PATHS = st.lists(st.from_regex(r"[A-Za-z0-9_\-][A-Za-z0-9 .:_\-]{0,6}", fullmatch=True), min_size=1, max_size=4).map(
    lambda parts: "/" + "/".join(parts)
)
REFS: st.SearchStrategy[GpuRef] = st.integers(0, 99) | st.uuids().map("GPU-{}".format)
FRACTIONS = st.floats(0, 1, exclude_min=True, exclude_max=True)


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    match draw(st.sampled_from(("fixed", "fraction", "unit"))):
        case "fixed":
            low, high = sorted((draw(MIBS), draw(MIBS)))
            return FixedMemory(request_bytes=low * MIB, limit_bytes=high * MIB)
        case "fraction":
            low_fraction, high_fraction = sorted((draw(FRACTIONS), draw(FRACTIONS)))
            return FractionMemory(fraction=low_fraction, limit_fraction=high_fraction)
        case _:
            return UnitMemory(unit_bytes=draw(st.integers(64, 2**30)) * MIB)


SELECTIONS = st.builds(
    GpuSelection,
    include=st.none() | st.lists(REFS, min_size=1, max_size=4, unique=True).map(tuple),
    exclude=st.lists(REFS, max_size=3, unique=True).map(tuple),
).filter(lambda selection: selection.include is None or not set(selection.include) <= set(selection.exclude))


@st.composite
def resources(draw: st.DrawFn, name: str, groups: list[str]) -> Resource:
    mode = draw(st.sampled_from(Mode))
    memory = draw(memories())
    selection = draw(SELECTIONS)
    most = 64 if selection.include is None else len(selection.include)
    several = most > 1 and not isinstance(memory, UnitMemory) and draw(st.booleans())
    in_groups = groups and not isinstance(memory, UnitMemory) and draw(st.booleans())
    return Resource(
        name=name,
        memory=memory,
        mode=mode,
        enforcement=draw(st.sampled_from(Enforcement)),
        thread_percent=draw(st.none() | st.integers(1, 100)) if mode is Mode.SM_SHARING else None,
        gpus=GpuSelection() if in_groups else selection,
        gpu_count=draw(st.integers(2, most)) if several and not in_groups else 1,
        groups=tuple(draw(st.lists(st.sampled_from(groups), min_size=1, unique=True))) if in_groups else (),
    )


PREFIXES = st.just("") | st.builds(
    "{}/{}".format,
    st.lists(LABELS, min_size=1, max_size=3).map(".".join),
    st.just("") | st.from_regex(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,19}\.", fullmatch=True),
)


@st.composite
def annotations(draw: st.DrawFn) -> AnnotationsConfig:
    trust = draw(st.sampled_from(TrustPolicy))
    named = trust is TrustPolicy.NAMESPACES
    return AnnotationsConfig(
        gpus=draw(SELECTIONS),
        share=draw(st.booleans()),
        trust=trust,
        namespaces=tuple(draw(st.lists(LABELS, min_size=1, max_size=3, unique=True))) if named else (),
        reservation_namespace=draw(LABELS),
        prefix=draw(PREFIXES),
        enforcement=draw(st.sampled_from(Enforcement)),
        shortfall=draw(st.sampled_from(ShortfallPolicy)),
        when_away=draw(st.sampled_from(AwayPolicy)),
        cri_socket=draw(st.sampled_from(["/run/containerd/containerd.sock", "/run/crio.sock"])),
    )


@st.composite
def configs(draw: st.DrawFn) -> NodeConfig:
    group_names = draw(st.lists(LABELS, max_size=3, unique=True))
    annotated = draw(st.none() | annotations())
    names = draw(st.lists(NAMES, min_size=1 if annotated is None else 0, max_size=3, unique=True))
    all_gpus = annotated is not None or draw(st.booleans())
    backend = draw(st.sampled_from(("nvml", "simulated")))
    simulated = SimulatedConfig(
        gpus=tuple(SimulatedGpu(memory_bytes=mib * MIB) for mib in draw(st.lists(MIBS, min_size=1, max_size=3))),
        driver=draw(st.from_regex(r"[1-9][0-9]{2}(\.[0-9]{1,3}){1,2}", fullmatch=True)),
    )
    return NodeConfig(
        resources=tuple(draw(resources(name, group_names)) for name in names),
        gpus=GpuSelection(include=None if all_gpus else (0, 1)),
        groups=tuple((name, (100 + i,)) for i, name in enumerate(group_names)),
        memory_reserve_bytes=draw(st.integers(0, 2**20)) * MIB,
        enforcement_minimum=draw(st.sampled_from(Enforcement)),
        mps=MpsConfig(
            protocol=draw(st.sampled_from(("auto", "2", "3"))),
            binary=draw(st.just("nvidia-cuda-mps-control") | PATHS),
            driver_root=draw(st.just("/") | PATHS),
            run_root=draw(PATHS.map(lambda path: f"/r{path}")),
            log_root=draw(PATHS.map(lambda path: f"/l{path}")),
            shared_memory=draw(st.booleans()),
            client_limit=draw(st.integers(1, 60)),
            on_wedge=draw(st.sampled_from(WedgePolicy)),
            prohibit_while_down=draw(st.booleans()),
            writable_mount=draw(st.booleans()),
            namespace_mount=draw(st.sampled_from(NamespaceMount)),
            log_max_bytes=draw(st.integers(1, 2**20)) * MIB,
        ),
        cdi=CdiConfig(
            directory=draw(PATHS.map(lambda path: f"/c{path}")),
            gpu_devices=draw(st.sampled_from(GpuDevices)),
            delivery=draw(st.sampled_from(Delivery)),
        ),
        kubelet_root=draw(PATHS.map(lambda path: f"/k{path}")),
        kubelet_device_plugins=draw(PATHS.map(lambda path: f"/p{path}")),
        state_root=draw(PATHS.map(lambda path: f"/s{path}")),
        backend=backend,
        simulated=simulated if backend == "simulated" else SimulatedConfig(),
        annotations=annotated,
        nri=NriConfig(
            socket=draw(PATHS),
            name=draw(LABELS),
            index=draw(st.integers(0, 99).filter(lambda index: index != 10).map("{:02d}".format)),
        ),
        kubernetes=KubernetesConfig(
            access=draw(st.sampled_from(("off", "in-cluster")) | PATHS),
            node_name=draw(st.just("") | st.lists(LABELS, min_size=1, max_size=3).map(".".join)),
        ),
        metrics_address=draw(st.sampled_from(("", "127.0.0.1:0", "[::1]:65535", "node-1.example:9478"))),
    )


@settings(deadline=None)
@given(configs())
def test_what_is_shown_loads_again(config: NodeConfig) -> None:
    shown = effective(config)
    assert parse_config(yaml.safe_dump(shown, sort_keys=False), "yaml") == config
    assert parse_config(json.dumps(shown), "json") == config


SCALARS = st.sampled_from(
    ("8Gi", "~", "true", "0.5", "[]", "{}", "'x'", "all", "&a x", "*a", "<<", "-1", "\t", '"\\n"')
)
KEYS = st.sampled_from(
    (
        *("resources", "memory", "request", "compute", "mode", "gpus", "groups", "mps", "<<", "kind", "[a]"),
        *("annotations", "trust", "namespaces", "nri", "index", "kubernetes"),
    )
)
LINES = st.builds("{}{}{}: {}".format, st.sampled_from(("", "  ", "    ")), st.sampled_from(("", "- ")), KEYS, SCALARS)


@settings(deadline=None)
@given(st.text() | st.lists(LINES, max_size=12).map("\n".join) | st.binary())
def test_any_text_is_a_config_or_problems(content: str | bytes) -> None:
    try:
        parse_config(content, "f")
    except ConfigErrors as error:
        lines = str(error).split("\n")
        assert all(line.startswith("f: ") or line.split(":")[1].isdigit() for line in lines)
        assert all(map(str.isprintable, lines))
    else:
        raise AssertionError("such a text is no config")
