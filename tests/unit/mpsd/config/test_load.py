"""The config file: defaults, every rule with its path, value and line, and files that are hardly YAML."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpsd.common.errors import ConfigError
from mpsd.config import document
from mpsd.config.load import ConfigErrors, ConfigProblem, load_config, parse_config
from mpsd.config.model import (
    GIB,
    SOCKET_NAME_MAX_BYTES,
    AnnotationsConfig,
    AwayPolicy,
    CdiConfig,
    Delivery,
    Domains,
    Enforcement,
    FixedMemory,
    FractionMemory,
    GpuDevices,
    GpuSelection,
    KubernetesConfig,
    LeakPolicy,
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
    socket_name,
)
from mpsd.config.show import differing, effective
from mpsd.gpu.model import MIB, Mode

LOGS = "logRoot must not hold the pipe directories of runRoot, nor lie in them: tenants see these"
E_ACUTE = "\u00e9"
UUID_A = "GPU-5fd4d87b-3c5e-4b1f-9f6e-0c1d2e3f4a5b"

FULL = f"""\
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:
  - name: gpufrac.dev/gpu-8gi
    memory: {{request: 8Gi}}
    compute: {{mode: sm-sharing}}
  - name: gpufrac.dev/gpu-8gi-burst
    memory: {{request: 8Gi, limit: 16Gi}}
    compute: {{mode: sm-sharing, threadPercent: 50}}
    enforcement: hard
    gpus: {{include: [0, {UUID_A}], exclude: [3]}}
  - name: gpufrac.dev/gpu-half
    memory: {{fraction: 0.5, limitFraction: .8}}
    compute: {{mode: time-slicing}}
  - name: gpufrac.dev/pair-20gi
    memory: {{request: "20Gi"}}
    compute: {{mode: sm-sharing}}
    gpus: {{groups: [pair0]}}
  - name: gpufrac.dev/memory-gib
    unit: 1Gi
    compute: {{mode: sm-sharing}}
gpus: {{include: all, exclude: [9], groups: {{pair0: [2, 3]}}}}
memory: {{reserve: 512Mi}}
enforcement: {{minimum: none, enableDmem: true, leaks: repair}}
mps:
  protocol: 3
  binary: /opt/bin/mps
  driverRoot: /run/nvidia/driver
  runRoot: /run/gf
  logRoot: /var/log/gf
  sharedMemory: true
  clientLimit: 60
  onWedge: report
  prohibitWhileDown: true
  namespaceMount: daemon
  writableMount: true
  logMaxSize: 1Gi
cdi: {{directory: /etc/cdi, gpuDevices: envvar, delivery: both}}
kubelet: {{root: /var/lib/k0s/kubelet, devicePlugins: /var/lib/k0s/plugins}}
stateRoot: /var/lib/gf
backend: simulated
simulated: {{gpus: [{{memory: 80Gi}}, {{memory: 24564Mi}}], driver: 615.71.09}}
annotations:
  gpus: {{include: [0, {UUID_A}], exclude: [1]}}
  share: true
  domains: node
  trust: {{namespaces: [team-a, "7"]}}
  reservationNamespace: reservations
  prefix: example.com/container.
  enforcement: hard
  shortfall: refuse
  whenAway: stop
  criSocket: /run/crio/crio.sock
nri: {{socket: /run/nri.sock, name: fractions, index: 05}}
kubernetes: {{access: /etc/kubernetes/kubelet.conf, nodeName: node-1.example.com}}
metrics: {{address: ""}}
"""

QUANTITY = "must be a Kubernetes quantity such as 8Gi, 512Mi or 1G"
FRACTION = "must be a number greater than 0 and less than 1, such as 0.5"
NORMAL = "must be a path without `.`, `..`, `//` and a slash at the end"
TOO_LONG = "the path of a socket below it would pass 107 bytes"
TOO_LARGE = "must be less than 8Ei"
NO_METRICS = ', or "" for no metrics'
BYTES = "(a number without a suffix counts bytes)"
TRUE = "must be true or false"
MEANT = "; did you mean true?"
RESOURCE = "{name: gpufrac.dev/gpu-8gi, memory: {request: 8Gi}, compute: {mode: sm-sharing}}"
LIMIT = "must be a whole number from 1 to 60"
NAME = "the name must be lower-case letters, digits and inner dashes"
DOMAIN = "the domain must be lower-case letters, digits, dashes and dots, such as gpufrac.dev"
BASE = "the part behind the slash must be letters, digits and inner `-`, `_`, `.`"

HEAD = "apiVersion: gpufrac.dev/v1\nkind: NodeConfig\n"
RESOURCES = """\
resources:
  - name: gpufrac.dev/gpu-8gi
    memory: {request: 8Gi}
    compute: {mode: sm-sharing}
"""
MINIMAL = HEAD + RESOURCES


@pytest.fixture(params=["C", "Python"])
def any_loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with libyaml, once with the loader that is always there."""
    monkeypatch.setattr(document, "_LOADER", yaml.CSafeLoader if request.param == "C" else yaml.SafeLoader)


def resource(**changes: str) -> str:
    """A file whose one resource has these keys; an empty value leaves a key out."""
    keys = {
        "name": "gpufrac.dev/gpu-8gi",
        "memory": "{request: 8Gi}",
        "compute": "{mode: sm-sharing}",
        **changes,
    }
    lines = [f"{key}: {value}" for key, value in keys.items() if value]
    return HEAD + "resources:\n  - " + "\n    ".join(lines) + "\n"


SEEN = "container runtimes read what is in it"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stateRoot: /var/run/cdi/state", f"must not lie in cdi.directory (/var/run/cdi): {SEEN}"),
        ("stateRoot: /run/cdi", f"must not lie in cdi.directory (/var/run/cdi): {SEEN}"),
        ("cdi: {directory: /var/lib/gpufrac}", f"stateRoot must not lie in cdi.directory (/var/lib/gpufrac): {SEEN}"),
        (
            "mps: {logRoot: /etc/cdi/log}\ncdi: {directory: /etc/cdi}",
            f"mps.logRoot must not lie in cdi.directory (/etc/cdi): {SEEN}",
        ),
        ("mps: {runRoot: /var/run/cdi/g}", f"mps.runRoot must not lie in cdi.directory (/var/run/cdi): {SEEN}"),
        (
            "stateRoot: /run/gpufrac/mps/state",
            "must not lie in mps.runRoot (/run/gpufrac/mps): tenants see what is below its mps/",
        ),
        ("cdi: {directory: /run/gpufrac/mps}", "cdi.directory must not lie in mps.runRoot (/run/gpufrac/mps)"),
        ("cdi: {directory: /var/lib/gpufrac/plugin/allocations}", "cdi.directory must not lie in stateRoot"),
        ("mps: {runRoot: /var/lib/gpufrac/plugin/run}", "mps.runRoot must not lie in stateRoot"),
        (
            "stateRoot: /var/lib/kubelet/pods",
            "must not lie in kubelet.root (/var/lib/kubelet/pods): its pods/ is the kubelet's",
        ),
        ("mps: {logRoot: /var/lib/kubelet/device-plugins/log}", "mps.logRoot must not lie in kubelet.devicePlugins"),
        ("kubelet: {root: /run/gpufrac/mps/kubelet}", "kubelet.root must not lie in mps.runRoot"),
    ],
)
def test_directories_that_others_read_or_clean_hold_none_of_ours(text: str, problem: str) -> None:
    assert problem in the_problem(f"{MINIMAL}{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "stateRoot: /var/run/cdi-state",
        "stateRoot: /run/gpufrac/state",
        "stateRoot: /run/gpufrac",
        "mps: {logRoot: /var/lib/gpufrac/log}",
        "cdi: {directory: /var/lib/gpufrac/cdi}",
        "stateRoot: /var/lib/kubelet/gpufrac",
    ],
)
def test_other_nestings_do_no_harm(text: str) -> None:
    parse_config(f"{MINIMAL}{text}\n", "f")


def problems(content: str | bytes) -> list[str]:
    """The problems as lines, without the file's name."""
    with pytest.raises(ConfigErrors) as caught:
        parse_config(content, "f")
    lines = str(caught.value).split("\n")
    assert all(line.startswith("f:") and line.isprintable() for line in lines)
    return [line.removeprefix("f:").strip() for line in lines]


def the_problem(content: str | bytes) -> str:
    found = problems(content)
    assert len(found) == 1, found
    return found[0]


def test_every_key(any_loader: None) -> None:
    assert parse_config(FULL, "f") == NodeConfig(
        resources=(
            Resource(
                name="gpufrac.dev/gpu-8gi",
                memory=FixedMemory(request_bytes=8 * GIB, limit_bytes=8 * GIB),
                mode=Mode.SM_SHARING,
                enforcement=Enforcement.NONE,
            ),
            Resource(
                name="gpufrac.dev/gpu-8gi-burst",
                memory=FixedMemory(request_bytes=8 * GIB, limit_bytes=16 * GIB),
                mode=Mode.SM_SHARING,
                thread_percent=50,
                enforcement=Enforcement.HARD,
                gpus=GpuSelection(include=(0, UUID_A), exclude=(3,)),
            ),
            Resource(
                name="gpufrac.dev/gpu-half",
                memory=FractionMemory(fraction=0.5, limit_fraction=0.8),
                mode=Mode.TIME_SLICING,
                enforcement=Enforcement.NONE,
            ),
            Resource(
                name="gpufrac.dev/pair-20gi",
                memory=FixedMemory(request_bytes=20 * GIB, limit_bytes=20 * GIB),
                mode=Mode.SM_SHARING,
                enforcement=Enforcement.NONE,
                groups=("pair0",),
            ),
            Resource(
                name="gpufrac.dev/memory-gib",
                memory=UnitMemory(unit_bytes=GIB),
                mode=Mode.SM_SHARING,
                enforcement=Enforcement.NONE,
            ),
        ),
        gpus=GpuSelection(exclude=(9,)),
        groups=(("pair0", (2, 3)),),
        memory_reserve_bytes=512 * MIB,
        enforcement_minimum=Enforcement.NONE,
        enable_dmem=True,
        leaks=LeakPolicy.REPAIR,
        mps=MpsConfig(
            protocol="3",
            binary="/opt/bin/mps",
            driver_root="/run/nvidia/driver",
            run_root="/run/gf",
            log_root="/var/log/gf",
            shared_memory=True,
            client_limit=60,
            on_wedge=WedgePolicy.REPORT,
            prohibit_while_down=True,
            namespace_mount=NamespaceMount.DAEMON,
            writable_mount=True,
            log_max_bytes=1024 * MIB,
        ),
        cdi=CdiConfig(directory="/etc/cdi", gpu_devices=GpuDevices.ENVVAR, delivery=Delivery.BOTH),
        kubelet_root="/var/lib/k0s/kubelet",
        kubelet_device_plugins="/var/lib/k0s/plugins",
        state_root="/var/lib/gf",
        backend="simulated",
        simulated=SimulatedConfig(
            gpus=(SimulatedGpu(memory_bytes=80 * GIB), SimulatedGpu(memory_bytes=24564 * MIB)), driver="615.71.09"
        ),
        annotations=AnnotationsConfig(
            gpus=GpuSelection(include=(0, UUID_A), exclude=(1,)),
            share=True,
            domains=Domains.NODE,
            trust=TrustPolicy.NAMESPACES,
            namespaces=("team-a", "7"),
            reservation_namespace="reservations",
            prefix="example.com/container.",
            enforcement=Enforcement.HARD,
            shortfall=ShortfallPolicy.REFUSE,
            when_away=AwayPolicy.STOP,
            cri_socket="/run/crio/crio.sock",
        ),
        nri=NriConfig(socket="/run/nri.sock", name="fractions", index="05"),
        kubernetes=KubernetesConfig(access="/etc/kubernetes/kubelet.conf", node_name="node-1.example.com"),
        metrics_address="",
    )


def test_defaults(any_loader: None) -> None:
    """Public defaults, pinned: a change here is a change for users."""
    config = parse_config(MINIMAL, "f")
    assert config.gpus == GpuSelection(include=None, exclude=())
    assert config.groups == ()
    assert config.memory_reserve_bytes == GIB
    assert config.enforcement_minimum is config.resources[0].enforcement is Enforcement.COOPERATIVE
    assert (config.enable_dmem, config.leaks) == (False, LeakPolicy.REPORT)
    assert config.mps.protocol == "auto"
    assert config.mps.binary == "nvidia-cuda-mps-control"
    assert (config.mps.driver_root, config.mps.run_root, config.mps.log_root) == (
        *("/", "/run/gpufrac", "/var/log/gpufrac"),
    )
    assert config.mps.shared_memory is False
    assert config.mps.client_limit == 48
    assert config.cdi == CdiConfig(directory="/var/run/cdi", gpu_devices=GpuDevices.AUTO, delivery=Delivery.CDI)
    assert (config.kubelet_root, config.state_root) == ("/var/lib/kubelet", "/var/lib/gpufrac")
    assert config.kubelet_device_plugins == "/var/lib/kubelet/device-plugins"
    assert config.backend == "nvml"
    assert config.metrics_address == "127.0.0.1:9478"
    assert config.resources[0].thread_percent is None
    assert config.annotations is None
    assert config.nri == NriConfig(socket="/var/run/nri/nri.sock", name="gpufrac", index="50")
    assert config.kubernetes == KubernetesConfig(access="off", node_name="")


def test_defaults_for_annotated_pods(any_loader: None) -> None:
    config = parse_config(f"{HEAD}annotations: {{gpus: {{include: all}}}}\nenforcement: {{minimum: none}}\n", "f")
    assert config.resources == ()
    assert config.annotations == AnnotationsConfig(
        gpus=GpuSelection(),
        share=False,
        trust=TrustPolicy.KAI_RESERVATION,
        namespaces=(),
        reservation_namespace="kai-resource-reservation",
        prefix="nvidia.com/container.",
        enforcement=Enforcement.NONE,
        when_away=AwayPolicy.REPORT,
    )


def test_all_problems_at_once_in_the_order_of_lines(any_loader: None) -> None:
    content = """\
apiVersion: gpufrac.dev/v2
kind: NodeConfig
resources:
  - name: gpufrac.dev/a
    memory: {request: 8Gi}
    compute: {mode: sm-sharing}
  - name: gpufrac.dev/b
    memory:
      request: 8Gi
      limit: 4Gi
    compute: {mode: exclusive}
metric: {}
backend: nvml
"""
    assert problems(content) == [
        '1: apiVersion: "gpufrac.dev/v2": must be gpufrac.dev/v1',
        '10: resources[1].memory.limit: "4Gi": must be at least the request (8Gi)',
        '11: resources[1].compute.mode: "exclusive": must be sm-sharing or time-slicing',
        '12: metric: unknown key; did you mean "metrics"?',
    ]


def test_a_problem_is_a_value(any_loader: None) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(resource(memory="{request: 8Gi, limit: 4Gi}"), "/etc/gpufrac/config.yaml")
    assert isinstance(caught.value, ConfigErrors)
    assert caught.value.problems == (
        ConfigProblem(
            path="resources[0].memory.limit", value='"4Gi"', rule="must be at least the request (8Gi)", line=5
        ),
    )
    assert str(caught.value) == (
        '/etc/gpufrac/config.yaml:5: resources[0].memory.limit: "4Gi": must be at least the request (8Gi)'
    )


def test_the_effective_config_is_in_the_spelling_of_the_file() -> None:
    assert effective(parse_config(MINIMAL, "f")) == {
        "apiVersion": "gpufrac.dev/v1",
        "kind": "NodeConfig",
        "resources": [
            {
                "name": "gpufrac.dev/gpu-8gi",
                "memory": {"request": "8Gi", "limit": "8Gi"},
                "compute": {"mode": "sm-sharing"},
                "enforcement": "cooperative",
                "gpus": {"include": "all", "exclude": []},
            }
        ],
        "gpus": {"include": "all", "exclude": [], "groups": {}},
        "memory": {"reserve": "1Gi"},
        "enforcement": {"minimum": "cooperative", "enableDmem": False, "leaks": "report"},
        "mps": {
            "protocol": "auto",
            "binary": "nvidia-cuda-mps-control",
            "driverRoot": "/",
            "runRoot": "/run/gpufrac",
            "logRoot": "/var/log/gpufrac",
            "sharedMemory": False,
            "clientLimit": 48,
            "onWedge": "replace-when-idle",
            "prohibitWhileDown": False,
            "writableMount": False,
            "namespaceMount": "linked",
            "logMaxSize": "16Mi",
        },
        "cdi": {"directory": "/var/run/cdi", "gpuDevices": "auto", "delivery": "cdi"},
        "kubelet": {"root": "/var/lib/kubelet", "devicePlugins": "/var/lib/kubelet/device-plugins"},
        "stateRoot": "/var/lib/gpufrac",
        "backend": "nvml",
        "nri": {"socket": "/var/run/nri/nri.sock", "name": "gpufrac", "index": "50"},
        "kubernetes": {"access": "off", "nodeName": ""},
        "metrics": {"address": "127.0.0.1:9478"},
    }
    again = effective(parse_config(FULL, "f"))
    assert again["simulated"] == {"gpus": [{"memory": "80Gi"}, {"memory": "24564Mi"}], "driver": "615.71.09"}
    assert again["resources"][3]["gpus"] == {"groups": ["pair0"]}
    assert again["annotations"] == {
        "gpus": {"include": [0, UUID_A], "exclude": [1]},
        "share": True,
        "domains": "node",
        "trust": {"namespaces": ["team-a", "7"]},
        "reservationNamespace": "reservations",
        "prefix": "example.com/container.",
        "enforcement": "hard",
        "shortfall": "refuse",
        "whenAway": "stop",
        "criSocket": "/run/crio/crio.sock",
    }
    annotated = parse_config(f"{MINIMAL}annotations: {{gpus: {{include: all}}}}\n", "f")
    assert effective(annotated)["annotations"]["gpus"] == {"include": "all", "exclude": []}
    assert effective(annotated)["annotations"]["trust"] == "kai-reservation"


def test_what_differs_is_named_as_the_file_spells_it() -> None:
    old = parse_config(MINIMAL, "f")
    assert differing(old, old) == ()
    changed = "mps: {clientLimit: 7, logMaxSize: 8Mi}\nstateRoot: /elsewhere\nannotations: {gpus: {include: all}}\n"
    new = parse_config(MINIMAL + changed, "f")
    assert differing(old, new) == ("mps.clientLimit", "mps.logMaxSize", "stateRoot", "annotations")


# -- rounding


@pytest.mark.parametrize(
    ("memory", "request_mib", "limit_mib"),
    [
        ("{request: 8Gi}", 8192, 8192),
        ("{request: 1000M}", 954, 954),
        ("{request: 1000M, limit: 2000M}", 954, 1907),
        ("{request: 1.5Gi, limit: 1536Mi}", 1536, 1536),
        ("{request: 1Mi}", 1, 1),
        ("{request: 1048577}", 2, 2),
        ("{request: 1e9}", 954, 954),
        ('{request: "8Gi"}', 8192, 8192),
    ],
)
def test_requests_are_rounded_up_and_limits_down(memory: str, request_mib: int, limit_mib: int) -> None:
    sizes = parse_config(resource(memory=memory), "f").resources[0].memory
    assert sizes == FixedMemory(request_bytes=request_mib * MIB, limit_bytes=limit_mib * MIB)


def test_units_are_rounded_up() -> None:
    config = parse_config(resource(memory="", unit="100M"), "f")
    assert config.resources[0].memory == UnitMemory(unit_bytes=96 * MIB)


@pytest.mark.parametrize(("text", "mib"), [("0", 0), ("1G", 954), ("1Gi", 1024)])
def test_the_reserve_is_rounded_up_and_may_be_zero(text: str, mib: int) -> None:
    assert parse_config(f"{MINIMAL}memory: {{reserve: {text}}}\n", "f").memory_reserve_bytes == mib * MIB


@pytest.mark.parametrize("text", ["0.5", ".5", "5e-1", "0.50", "5.0e-1"])
def test_fractions(text: str) -> None:
    config = parse_config(resource(memory=f"{{fraction: {text}}}"), "f")
    assert config.resources[0].memory == FractionMemory(fraction=0.5, limit_fraction=0.5)


# -- rules of one resource


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"memory": "{request: 4GiB}"},
            f'memory.request: "4GiB": {QUANTITY}; did you mean "4Gi"?',
        ),
        (
            {"memory": "{request: ' 8Gi'}"},
            f'memory.request: " 8Gi": {QUANTITY}; did you mean "8Gi"?',
        ),
        (
            {"memory": "{request: 0x10}"},
            f'memory.request: "0x10": {QUANTITY}',
        ),
        (
            {"memory": "{request: 1_000}"},
            f'memory.request: "1_000": {QUANTITY}; did you mean "1000"?',
        ),
        (
            {"memory": "{request: .nan}"},
            f'memory.request: ".nan": {QUANTITY}',
        ),
        (
            {"memory": "{request: 1:30}"},
            f'memory.request: "1:30": {QUANTITY}',
        ),
        (
            {"memory": "{request: 1e2147483648}"},
            f'memory.request: "1e2147483648": {TOO_LARGE}',
        ),
        ({"memory": "{request: 16E}"}, f'memory.request: "16E": {TOO_LARGE}; did you mean "16G"?'),
        ({"memory": "{request: 8Ei}"}, f'memory.request: "8Ei": {TOO_LARGE}; did you mean "8Gi"?'),
        (
            {"memory": "{request: 9223372036854775807}"},
            'memory.request: "9223372036854775807": must be less than 8Ei',
        ),
        ({"memory": "{request: -8Gi}"}, 'memory.request: "-8Gi": must be at least 1Mi'),
        ({"memory": "{request: 0}"}, 'memory.request: "0": must be at least 1Mi'),
        (
            {"memory": "{request: 8}"},
            f'memory.request: "8": must be at least 1Mi {BYTES}',
        ),
        ({"memory": "{request: 512Ki}"}, 'memory.request: "512Ki": must be at least 1Mi'),
        ({"memory": "{request: [8Gi]}"}, "memory.request: must be a size such as 8Gi or 512Mi"),
        ({"memory": "{request: }"}, "memory.request: must be a size such as 8Gi or 512Mi"),
        ({"memory": "{request: 8Gi, limit: ~}"}, "memory.limit: must be a size such as 8Gi or 512Mi"),
        ({"memory": "{request: !!binary aGk=}"}, 'memory.request: "aGk=": must be a size such as 8Gi or 512Mi'),
        ({"memory": "{limit: 8Gi}"}, "memory.request: is required: such as 8Gi"),
        ({"memory": "{}"}, "memory.request: is required: such as 8Gi"),
        ({"memory": "8Gi"}, 'memory: "8Gi": must be a mapping, such as {request: 8Gi}'),
        ({"memory": "~"}, "memory: must not be empty: delete the key to get its default"),
        (
            {"memory": "{request: 8Gi, fraction: 0.5}"},
            "memory: must hold request and limit, or fraction and limitFraction, not both",
        ),
        ({"memory": "{request: 8Gi, limitt: 9Gi}"}, 'memory.limitt: unknown key; did you mean "limit"?'),
        (
            {"memory": "{request: 1.5Mi, limit: 1.7Mi}"},
            'memory.limit: "1.7Mi": must be at least the request (2Mi), after rounding down to whole MiB',
        ),
        (
            {"memory": "{request: 1000M, limit: 1000M}"},
            'memory.limit: "1000M": must be at least the request (954Mi), after rounding down to whole MiB',
        ),
        ({"memory": "{request: 8Gi, limit: 4096Mi}"}, 'memory.limit: "4096Mi": must be at least the request (8Gi)'),
        (
            {"memory": "{fraction: 0}"},
            f'memory.fraction: "0": {FRACTION}',
        ),
        (
            {"memory": "{fraction: 1}"},
            f'memory.fraction: "1": {FRACTION}',
        ),
        (
            {"memory": "{fraction: 50%}"},
            f'memory.fraction: "50%": {FRACTION}; did you mean 0.5?',
        ),
        (
            {"memory": "{fraction: '0.5'}"},
            f'memory.fraction: "0.5": {FRACTION}, without quotes',
        ),
        (
            {"memory": "{fraction: .nan}"},
            f'memory.fraction: ".nan": {FRACTION}',
        ),
        (
            {"memory": "{fraction: -.inf}"},
            f'memory.fraction: "-.inf": {FRACTION}',
        ),
        (
            {"memory": "{fraction: 9e999}"},
            f'memory.fraction: "9e999": {FRACTION}',
        ),
        (
            {"memory": "{fraction: 1e-400}"},
            f'memory.fraction: "1e-400": {FRACTION}',
        ),
        (
            {"memory": "{fraction: 0.99999999999999999999}"},
            f'memory.fraction: "0.99999999999999999999": {FRACTION}',
        ),
        (
            {"memory": "{fraction: 0.5, limitFraction: 0.5}"},
            'memory.limitFraction: "0.5": must be greater than the fraction (0.5), or left out',
        ),
        (
            {"memory": "{fraction: 0.5, limitFraction: 0.4}"},
            'memory.limitFraction: "0.4": must be greater than the fraction (0.5), or left out',
        ),
        (
            {"memory": "{fraction: 0.5, limitFraction: 1}"},
            f'memory.limitFraction: "1": {FRACTION}',
        ),
        ({"memory": "{limitFraction: 0.5}"}, "memory.fraction: is required: such as 0.5"),
        ({"memory": ""}, "memory: is required: such as {request: 8Gi} (or unit: 1Gi)"),
        ({"unit": "1Gi"}, 'unit: "1Gi": must not be given beside memory: one of the two sizes a resource'),
        ({"memory": "", "unit": "63Mi"}, 'unit: "63Mi": must be at least 64Mi'),
        ({"memory": "", "unit": "1"}, f'unit: "1": must be at least 64Mi {BYTES}'),
        ({"compute": ""}, "compute.mode: is required: sm-sharing or time-slicing"),
        ({"compute": "{}"}, "compute.mode: is required: sm-sharing or time-slicing"),
        ({"compute": "sm-sharing"}, 'compute: "sm-sharing": must be a mapping, such as {mode: sm-sharing}'),
        (
            {"compute": "{mode: SM-Sharing}"},
            'compute.mode: "SM-Sharing": must be sm-sharing or time-slicing; did you mean "sm-sharing"?',
        ),
        ({"compute": "{mode: [sm-sharing]}"}, "compute.mode: must be sm-sharing or time-slicing, not a list"),
        (
            {"compute": "{mode: time-slicing, threadPercent: 50}"},
            'compute.threadPercent: "50": is only possible with mode sm-sharing',
        ),
        (
            {"compute": "{mode: sm-sharing, thread_percent: 50}"},
            'compute.thread_percent: unknown key; did you mean "threadPercent"?',
        ),
        *(
            (
                {"compute": f"{{mode: sm-sharing, threadPercent: {text}}}"},
                f"compute.threadPercent: {shown}must be a whole number from 1 to 100{why}",
            )
            for text, shown, why in [
                *((text, f'"{text}": ', "") for text in ("0", "101", "-5", "true", "12345678901234567890")),
                *(
                    (text, f'"{text}": ', ", in decimal digits")
                    for text in ("50.0", "050", "5_0", "0x10", "1e1", "50%")
                ),
                ("'50'", '"50": ', ", without quotes"),
                ("!!str 50x", '"50x": ', ""),
                ("!foo 50", '"50": ', ", without a tag"),
                ("~", "", ""),
                ("[50]", "", ", not a list"),
            ]
        ),
        ({"enforcement": "strict"}, 'enforcement: "strict": must be hard, cooperative or none'),
        ({"enforcement": "{minimum: hard}"}, "enforcement: must be hard, cooperative or none, not a mapping"),
        ({"request": "8Gi"}, "request: unknown key: it belongs under memory"),
        ({"mode": "sm-sharing"}, "mode: unknown key: it belongs under compute"),
        ({"colour": "red"}, "colour: unknown key; known here: name, memory, unit, compute, enforcement, gpus"),
        ({"gpus": "[0]"}, "gpus: must be a mapping, such as {include: [0, 1]}"),
        ({"gpus": "{include: []}"}, "gpus.include: must name at least one GPU"),
        ({"gpus": "{include: 0}"}, 'gpus.include: "0": must be all or a list of GPUs, such as [0, 1]'),
        ({"gpus": "{include: none}"}, 'gpus.include: "none": must be all or a list of GPUs, such as [0, 1]'),
        ({"gpus": "{include: {a: 1}}"}, "gpus.include: must be a list of GPUs, such as [0, 1]"),
        ({"gpus": "{include: [0, 0]}"}, 'gpus.include[1]: "0": is named twice in this list'),
        ({"gpus": "{include: ['0']}"}, 'gpus.include[0]: "0": must be a GPU index without quotes'),
        (
            {"gpus": "{groups: [pair0]}"},
            (
                'gpus.groups[0]: "pair0": is no group: gpus.groups declares none; '
                "declare it, as in gpus: {groups: {pair0: [0, 1]}}"
            ),
        ),
        ({"gpus": "{groups: []}"}, "gpus.groups: must name at least one group"),
        ({"gpus": "{groups: pair0}"}, 'gpus.groups: "pair0": must be a list of group names'),
        *(
            (
                {"gpus": f"{{exclude: [{text}]}}"},
                f'gpus.exclude[0]: "{text}": must be a GPU index such as 0, or a UUID such as {UUID_A}{more}',
            )
            for text, more in [
                *(
                    (text, "")
                    for text in (
                        "-1",
                        "-0",
                        "00",
                        "1.0",
                        "0x1",
                        "all",
                        "gpu0",
                        "GPU-5fd4d87b",
                        f"{UUID_A}0",
                    )
                ),
                (UUID_A.upper(), f"; did you mean {UUID_A}?"),
                (UUID_A.removeprefix("GPU-"), f"; did you mean {UUID_A}?"),
                ("0-3", ": write every index, such as [0, ..., 3]"),
                ("MIG-5fd4d87b-3c5e-4b1f-9f6e-0c1d2e3f4a5b", ": MIG devices are not shared"),
            ]
        ),
    ],
)
def test_rules_of_a_resource(changes: dict[str, str], expected: str) -> None:
    number, _, problem = the_problem(resource(**changes)).partition(": ")
    assert problem == f"resources[0].{expected}"
    assert number.isdigit()


@pytest.mark.parametrize(
    "name",
    ["ex.com/gpu.shared", "ex.com/GPU_mem.4Gi", "a/b", "gpufrac.dev/gpu-8gi", f"{'a' * 244}/{'b' * 63}", "x-1.y/0"],
)
def test_resource_names(name: str) -> None:
    assert parse_config(resource(name=name), "f").resources[0].name == name


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("gpu", "must be <domain>/<name> with exactly one slash"),
        ("ex.com/gpu/2", "must be <domain>/<name> with exactly one slash"),
        ("kubernetes.io/gpu", "must not lie in kubernetes.io"),
        ("foo.kubernetes.io/gpu", "must not lie in kubernetes.io"),
        ("requests.ex.com/gpu", "must not start with requests."),
        ("Ex.com/gpu", DOMAIN),
        ("/gpu", DOMAIN),
        ("ex..com/gpu", DOMAIN),
        ("-ex.com/gpu", DOMAIN),
        ("\u00e9x.com/gpu", DOMAIN),
        (f"{'a' * 245}/gpu", "the domain must be at most 244 characters long"),
        (f"ex.com/{'b' * 64}", "the part behind the slash must be at most 63 characters long"),
        ("ex.com/-gpu", BASE),
        ("ex.com/", BASE),
        ("ex.com/gpu\\n", BASE),
        ("ex.com/..", BASE),
    ],
)
def test_bad_resource_names(name: str, rule: str) -> None:
    assert the_problem(resource(name=f'"{name}"')).endswith(rule)


def test_names_are_unique() -> None:
    second = RESOURCES.partition("\n")[2]
    assert the_problem(MINIMAL + second) == (
        '7: resources[1].name: "gpufrac.dev/gpu-8gi": is already the name of resources[0]'
    )


def test_a_resource_needs_a_name() -> None:
    assert the_problem(resource(name="")) == "4: resources[0].name: is required: such as gpufrac.dev/gpu-8gi"


# -- rules of the rest


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            "memory: {reserve: 2}",
            f'memory.reserve: "2": must be 0, or at least 1Mi {BYTES}',
        ),
        ("memory: {reserve: -1Gi}", 'memory.reserve: "-1Gi": must be 0, or at least 1Mi'),
        ("memory: 1Gi", 'memory: "1Gi": must be a mapping, such as {reserve: 1Gi}'),
        ("enforcement: {minimum: off}", 'enforcement.minimum: "off": must be hard, cooperative or none'),
        ("enforcement: {enableDmem: 1}", f'enforcement.enableDmem: "1": {TRUE}{MEANT}'),
        ("enforcement: {leaks: yes}", 'enforcement.leaks: "yes": must be report or repair'),
        ("enforcement: hard", 'enforcement: "hard": must be a mapping, such as {minimum: hard}'),
        ("mps:", "mps: must not be empty: delete the key to get its default"),
        ("mps: {protocol: 4}", 'mps.protocol: "4": must be auto, 2 or 3'),
        ("mps: {protocol: 2.0}", 'mps.protocol: "2.0": must be auto, 2 or 3'),
        ("mps: {binary: bin/mps}", 'mps.binary: "bin/mps": must be the name of a program or an absolute path'),
        ("mps: {binary: ''}", 'mps.binary: "": must be the name of a program or an absolute path'),
        (
            "mps: {binary: /opt/../mps}",
            f'mps.binary: "/opt/../mps": {NORMAL}: write /mps',
        ),
        ("mps: {runRoot: run/gpufrac}", 'mps.runRoot: "run/gpufrac": must be an absolute path'),
        ("mps: {runRoot: ''}", 'mps.runRoot: "": must be an absolute path'),
        ("mps: {runRoot: }", "mps.runRoot: must be an absolute path"),
        ("mps: {runRoot: /}", 'mps.runRoot: "/": must be a directory below /'),
        (
            "mps: {runRoot: /run/gpufrac/}",
            f'mps.runRoot: "/run/gpufrac/": {NORMAL}: write /run/gpufrac',
        ),
        (
            "mps: {runRoot: //run}",
            f'mps.runRoot: "//run": {NORMAL}: write /run',
        ),
        ('mps: {logRoot: "/var/\\nlog"}', 'mps.logRoot: "/var/\\nlog": must not contain control characters'),
        (
            "mps: {runRoot: /" + "r" * 49 + "}",
            f'mps.runRoot: "/{"r" * 49}": must be at most 49 bytes long: {TOO_LONG}',
        ),
        ("mps: {sharedMemory: yes}", f'mps.sharedMemory: "yes": {TRUE}{MEANT}'),
        ("mps: {sharedMemory: 'true'}", f'mps.sharedMemory: "true": {TRUE}, without quotes'),
        ("mps: {sharedMemory: True}", f'mps.sharedMemory: "True": {TRUE}{MEANT}'),
        ("mps: {sharedMemory: 1}", f'mps.sharedMemory: "1": {TRUE}{MEANT}'),
        ("mps: {logRoot: /run/gpufrac}", f"mps: {LOGS}"),
        ("mps: {logRoot: /run/gpufrac/mps/logs}", f"mps: {LOGS}"),
        ("mps: {onWedge: kill}", 'mps.onWedge: "kill": must be report, replace-when-idle or replace'),
        ("mps: {namespaceMount: none}", 'mps.namespaceMount: "none": must be daemon or linked'),
        ("mps: {prohibitWhileDown: 1}", f'mps.prohibitWhileDown: "1": {TRUE}{MEANT}'),
        ("mps: {logMaxSize: 512Ki}", 'mps.logMaxSize: "512Ki": must be at least 1Mi'),
        ("mps: {clientLimit: 61}", f'mps.clientLimit: "61": {LIMIT}'),
        ("mps: {clientLimit: 0}", f'mps.clientLimit: "0": {LIMIT}'),
        ("mps: {clientLimit: 012}", f'mps.clientLimit: "012": {LIMIT}, in decimal digits'),
        ("mps: {run_root: /x}", 'mps.run_root: unknown key; did you mean "runRoot"?'),
        ("runRoot: /x", "runRoot: unknown key: it belongs under mps"),
        ("cdi: {gpuDevices: nvml}", 'cdi.gpuDevices: "nvml": must be auto, cdi or envvar'),
        ("cdi: {delivery: env}", 'cdi.delivery: "env": must be cdi or both'),
        ("cdi: {directory: cdi}", 'cdi.directory: "cdi": must be an absolute path'),
        (
            "kubelet: {devicePlugins: /" + "k" * 64 + "}",
            f'kubelet.devicePlugins: "/{"k" * 59}...": must be at most 64 bytes long: {TOO_LONG}',
        ),
        ("stateRoot: var", 'stateRoot: "var": must be an absolute path'),
        ("stateroot: /var", 'stateroot: unknown key; did you mean "stateRoot"?'),
        ("backend: cuda", 'backend: "cuda": must be nvml or simulated'),
        ("simulated: {}", "simulated: is only possible with backend: simulated"),
        (
            "backend: simulated\nsimulated: {gpus: []}",
            "simulated.gpus: must hold at least one GPU, such as {memory: 80Gi}",
        ),
        (
            "backend: simulated\nsimulated: {gpus: 2}",
            'simulated.gpus: "2": must be a list of GPUs, such as [{memory: 80Gi}]',
        ),
        (
            "backend: simulated\nsimulated: {gpus: [80Gi]}",
            'simulated.gpus[0]: "80Gi": must be a mapping, such as {memory: 80Gi}',
        ),
        (
            "backend: simulated\nsimulated: {gpus: [{memory: 80}]}",
            f'simulated.gpus[0].memory: "80": must be at least 1Mi {BYTES}',
        ),
        (
            "backend: simulated\nsimulated: {gpus: [" + "{}," * 65 + "]}",
            "simulated.gpus: must not hold more than 64 GPUs",
        ),
        (
            "backend: simulated\nsimulated: {driver: latest}",
            'simulated.driver: "latest": must be a driver version such as "580.95.05"',
        ),
        *(
            (
                f"metrics: {{address: {text}}}",
                f'metrics.address: "{text}": must be host:port such as 127.0.0.1:9478 or [::1]:9478{NO_METRICS}',
            )
            for text in (
                *(
                    "localhost",
                    "127.0.0.1:65536",
                    "300.0.0.1:1",
                    "127.0.0.1:0x10",
                    "a b:1",
                    "127.0.0.1:-0",
                    "http://x:1",
                ),
            )
        ),
        ("gpus: {include: [0, 1, 1]}", 'gpus.include[2]: "1": is named twice in this list'),
        ("gpus: {groups: [pair0]}", "gpus.groups: must be a mapping, such as {pair0: [0, 1]}"),
        ("gpus: {groups: {pair0: []}}", "gpus.groups.pair0: must name at least one GPU"),
        ("gpus: {groups: {pair0: 0}}", 'gpus.groups.pair0: "0": must be a list of GPUs, such as [0, 1]'),
        ("gpus: {groups: {pair0: [0, 1], pair1: [1, 2]}}", "gpus.groups.pair1: GPU 1 is already in group pair0"),
        ("gpus: {exclude: [1], groups: {pair0: [0, 1]}}", "gpus.groups.pair0: GPU 1 is excluded by gpus.exclude"),
        (
            "gpus: {groups: {Pair: [0]}}",
            f"gpus.groups.Pair: {NAME}",
        ),
        ("gpus: {groups: {-a: [0]}}", f'gpus.groups."-a": {NAME}'),
        (
            'gpus: {groups: {"a/../b": [0]}}',
            f'gpus.groups."a/../b": {NAME}',
        ),
        (
            "gpus: {groups: {" + "g" * 41 + ": [0]}}",
            f"gpus.groups.{'g' * 41}: the name must be at most 40 characters long",
        ),
    ],
)
def test_rules_of_the_rest(extra: str, expected: str) -> None:
    number, _, problem = the_problem(f"{MINIMAL}{extra}\n").partition(": ")
    assert problem == expected
    assert number == str(7 + extra.count("\n"))


# -- annotated pods

ANY_GPU = "{gpus: {include: all}}"
TRUST = "must be kai-reservation, any or {namespaces: [...]}"
NAMESPACE = "must be a namespace: at most 63 lower-case letters, digits and inner dashes"
PLUGIN = "must be the name of an NRI plugin: at most 63 lower-case letters, digits and inner dashes"
NOT_TEN = ", and not 10: the container toolkit's own plugin has that, and equals come in no order"
INDEX = "must be two digits such as 50"
ACCESS = "must be off, in-cluster or the absolute path of a kubeconfig"
NODE = 'must be the name of a node: at most 253 lower-case letters, digits, dashes and dots, or ""'
SET_ASIDE = "is required: all, or a list of the GPUs that annotated pods may use"
PREFIX_NAME = "the part behind the slash must be letters, digits, `-`, `_` and `.`, and not begin with a sign"
FIT = "a container's name and a key such as .gpu-compute.portion must fit behind it into 63"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "annotations: must not be empty: delete the key to get its default"),
        ("[2]", "annotations: must be a mapping, such as {gpus: {include: [2, 3]}}"),
        ("{}", f"annotations.gpus.include: {SET_ASIDE}"),
        ("{gpus: {}}", f"annotations.gpus.include: {SET_ASIDE}"),
        ("{gpus: {exclude: [1]}}", f"annotations.gpus.include: {SET_ASIDE}"),
        ("{gpus: [2]}", "annotations.gpus: must be a mapping, such as {include: [2, 3]}"),
        ("{gpus: {include: []}}", "annotations.gpus.include: must name at least one GPU"),
        ("{gpus: {include: none}}", 'annotations.gpus.include: "none": must be all or a list of GPUs, such as [0, 1]'),
        (
            "{gpus: {include: all, groups: [pair0]}}",
            "annotations.gpus.groups: unknown key; known here: include, exclude",
        ),
        ("{gpus: {include: all}, share: yes}", f'annotations.share: "yes": {TRUE}{MEANT}'),
        ("{gpus: {include: all}, trust: nobody}", f'annotations.trust: "nobody": {TRUST}'),
        ("{gpus: {include: all}, trust: namespaces}", f'annotations.trust: "namespaces": {TRUST}'),
        ("{gpus: {include: all}, trust: ~}", f"annotations.trust: {TRUST}"),
        ("{gpus: {include: all}, trust: [team-a]}", f"annotations.trust: {TRUST}"),
        (
            "{gpus: {include: all}, trust: {}}",
            "annotations.trust.namespaces: is required: a list of at least one namespace",
        ),
        (
            "{gpus: {include: all}, trust: {namespaces: []}}",
            "annotations.trust.namespaces: must name at least one namespace",
        ),
        (
            "{gpus: {include: all}, trust: {namespaces: a}}",
            'annotations.trust.namespaces: "a": must be a list of namespaces',
        ),
        (
            "{gpus: {include: all}, trust: {namespaces: [a, b, a]}}",
            'annotations.trust.namespaces[2]: "a": is named twice in this list',
        ),
        (
            "{gpus: {include: all}, trust: {namespaces: [Team]}}",
            f'annotations.trust.namespaces[0]: "Team": {NAMESPACE}',
        ),
        (
            "{gpus: {include: all}, trust: {namespaces: [a.b]}}",
            f'annotations.trust.namespaces[0]: "a.b": {NAMESPACE}',
        ),
        (
            "{gpus: {include: all}, reservationNamespace: ''}",
            f'annotations.reservationNamespace: "": {NAMESPACE}',
        ),
        (
            "{gpus: {include: all}, reservationNamespace: " + "n" * 64 + "}",
            f'annotations.reservationNamespace: "{"n" * 64}": {NAMESPACE}',
        ),
        (
            "{gpus: {include: all}, enforcement: soft}",
            'annotations.enforcement: "soft": must be hard, cooperative or none',
        ),
        ("{gpus: {include: all}, whenAway: kill}", 'annotations.whenAway: "kill": must be report or stop'),
        ("{gpus: {include: all}, when_away: stop}", 'annotations.when_away: unknown key; did you mean "whenAway"?'),
    ],
)
def test_rules_for_annotated_pods(text: str, expected: str) -> None:
    assert the_problem(f"{HEAD}annotations: {text}\n") == f"3: {expected}"


@pytest.mark.parametrize(
    ("gpus", "rule"),
    [
        ("{exclude: [2]}", "GPU 2 is excluded by gpus.exclude"),
        ("{include: [0, 1]}", "GPU 2 is not in gpus.include, so it is not shared at all"),
        (f"{{include: [0, {UUID_A}]}}", None),
        ("{include: [1, 2]}", None),
        ("{include: all, exclude: [3]}", None),
    ],
)
def test_gpus_set_aside_are_shared_ones(gpus: str, rule: str | None) -> None:
    content = f"{HEAD}gpus: {gpus}\nannotations: {{gpus: {{include: [2]}}}}\n"
    if rule is None:
        annotations = parse_config(content, "f").annotations
        assert annotations is not None
        assert annotations.gpus.include == (2,)
    else:
        assert the_problem(content) == f"4: annotations.gpus.include: {rule}"


@pytest.mark.parametrize("where", ["gpus", "annotations.gpus", "resources[0].gpus"])
@pytest.mark.parametrize(
    ("include", "exclude", "empty"),
    [
        ("[0]", "[0]", True),
        ("[0, 1]", "[2, 1, 0]", True),
        (f"[{UUID_A}]", f"[{UUID_A}]", True),
        ("[0, 1]", "[0]", False),
        ("[0]", f"[{UUID_A}]", False),
        ("all", "[0]", False),
        ("[0]", "[]", False),
    ],
)
def test_a_selection_that_can_match_nothing(where: str, include: str, exclude: str, empty: bool) -> None:
    gpus = f"gpus: {{include: {include}, exclude: {exclude}}}"
    share = f"{{name: a.b/c, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}, {gpus}}}"
    content = {
        "gpus": f"{MINIMAL}{gpus}\n",
        "annotations.gpus": f"{HEAD}annotations: {{{gpus}}}\n",
        "resources[0].gpus": f"{HEAD}resources: [{share}]\n",
    }[where]
    if empty:
        assert the_problem(content).endswith(f"{where}.exclude: takes away every GPU that include names")
    else:
        parse_config(content, "f")


@pytest.mark.parametrize(
    "prefix",
    ["", "nvidia.com/container.", "example.com/", "x/C_1-.", f"{'a' * 253}/{'b' * 41}.", "a.b-c.d/e.."],
)
def test_prefixes(prefix: str) -> None:
    config = parse_config(f'{HEAD}annotations: {{gpus: {{include: all}}, prefix: "{prefix}"}}\n', "f")
    assert config.annotations is not None
    assert config.annotations.prefix == prefix


@pytest.mark.parametrize(
    ("prefix", "rule"),
    [
        ("container.", "must be <domain>/<start of the name>, such as nvidia.com/container."),
        ("nvidia.com", "must be <domain>/<start of the name>, such as nvidia.com/container."),
        ("Nvidia.com/c.", "the domain must be at most 253 lower-case letters, digits, dashes and dots"),
        ("/c.", "the domain must be at most 253 lower-case letters, digits, dashes and dots"),
        (" nvidia.com/c.", "the domain must be at most 253 lower-case letters, digits, dashes and dots"),
        (f"{'a' * 254}/c.", "the domain must be at most 253 lower-case letters, digits, dashes and dots"),
        ("nvidia.com/c/d.", PREFIX_NAME),
        ("nvidia.com/.c", PREFIX_NAME),
        ("nvidia.com/c ", PREFIX_NAME),
        (f"a/{'b' * 43}", f"the part behind the slash must be at most 42 characters long: {FIT}"),
        *(
            (text, f"must end with a dot, as the container's name comes right behind it; did you mean {text}.?")
            for text in ("nvidia.com/container", "x/C_1-", "a/b.c")
        ),
    ],
)
def test_bad_prefixes(prefix: str, rule: str) -> None:
    content = f'{HEAD}annotations: {{gpus: {{include: all}}, prefix: "{prefix}"}}\n'
    assert the_problem(content).endswith(f": {rule}")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("nri: {socket: nri.sock}", 'nri.socket: "nri.sock": must be an absolute path'),
        (
            "nri: {socket: /" + "s" * 107 + "}",
            f'nri.socket: "/{"s" * 59}...": must be at most 107 bytes long: it is the path of a socket',
        ),
        ("nri: {name: Gpufrac}", f'nri.name: "Gpufrac": {PLUGIN}'),
        ("nri: {name: ''}", f'nri.name: "": {PLUGIN}'),
        ("nri: {index: 5}", f'nri.index: "5": {INDEX}'),
        ("nri: {index: 050}", f'nri.index: "050": {INDEX}'),
        ("nri: {index: -5}", f'nri.index: "-5": {INDEX}'),
        ("nri: {index: ~}", f"nri.index: {INDEX}"),
        *(
            (
                f"nri: {{index: {ten}}}",
                f'nri.index: "10": {INDEX}{NOT_TEN}',
            )
            for ten in ("10", '"10"')
        ),
        ("nri: {path: /x}", "nri.path: unknown key; known here: socket, name, index"),
        ("kubernetes: {access: true}", f'kubernetes.access: "true": {ACCESS}'),
        ("kubernetes: {access: ''}", f'kubernetes.access: "": {ACCESS}'),
        ("kubernetes: {access: kubeconfig}", f'kubernetes.access: "kubeconfig": {ACCESS}'),
        ("kubernetes: {access: /a/../b}", f'kubernetes.access: "/a/../b": {NORMAL}: write /b'),
        ("kubernetes: {nodeName: Node}", f'kubernetes.nodeName: "Node": {NODE}'),
        ("kubernetes: {nodeName: a..b}", f'kubernetes.nodeName: "a..b": {NODE}'),
        ("kubernetes: {nodeName: " + "n" * 254 + "}", f'kubernetes.nodeName: "{"n" * 60}...": {NODE}'),
        ("kubernetes: in-cluster", 'kubernetes: "in-cluster": must be a mapping, such as {access: in-cluster}'),
        ("nodeName: a", "nodeName: unknown key: it belongs under kubernetes"),
        ("trust: any", "trust: unknown key: it belongs under annotations"),
    ],
)
def test_rules_of_what_front_ends_need(extra: str, expected: str) -> None:
    assert the_problem(f"{MINIMAL}{extra}\n") == f"7: {expected}"


@pytest.mark.parametrize("written", ["05", '"05"', "08", "00", "99", "'50'"])
def test_the_index_is_two_digits_however_written(written: str, any_loader: None) -> None:
    config = parse_config(f"{MINIMAL}nri: {{index: {written}}}\n", "f")
    assert config.nri.index == written.strip("\"'")
    assert parse_config(yaml.safe_dump(effective(config)), "f") == config


def test_the_longest_runtime_socket() -> None:
    path = f"/{'s' * 106}"
    assert parse_config(f"{MINIMAL}nri: {{socket: {path}}}\n", "f").nri.socket == path


@pytest.mark.parametrize("access", ["off", "'off'", "in-cluster", "/etc/kubernetes/admin.conf"])
def test_ways_to_the_api_server(access: str, any_loader: None) -> None:
    assert parse_config(f"{MINIMAL}kubernetes: {{access: {access}}}\n", "f").kubernetes.access == access.strip("'")


def test_with_annotations_there_need_be_no_resources(any_loader: None) -> None:
    for resources in ("", "resources: []\n"):
        assert parse_config(f"{HEAD}{resources}annotations: {ANY_GPU}\n", "f").resources == ()
    assert (
        the_problem(f"{HEAD}resources: {{}}\nannotations: {ANY_GPU}\n")
        == f"3: resources: must be a list of resources, such as [{RESOURCE}]"
    )
    assert len(parse_config(f"{MINIMAL}annotations: {ANY_GPU}\n", "f").resources) == 1


def test_all_problems_of_a_section_at_once() -> None:
    content = f"{HEAD}annotations:\n  trust: some\n  prefix: x\n  whenAway: never\nnri: {{index: x, name: X}}\n"
    assert [problem.partition(": ")[2].partition(":")[0] for problem in problems(content)] == [
        "annotations.gpus.include",
        "annotations.trust",
        "annotations.prefix",
        "annotations.whenAway",
        "nri.index",
        "nri.name",
    ]


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:9478", "[::1]:0", "localhost:80", "node-1.example.com:9478", "0.0.0.0:65535"]
)
def test_metrics_addresses(address: str) -> None:
    assert parse_config(f'{MINIMAL}metrics: {{address: "{address}"}}\n', "f").metrics_address == address


@pytest.mark.parametrize("address", [":9478", "::1:9478", "[::1:9478", "[]:1", "[", "[127.0.0.1]:1", "-a:1"])
def test_bad_metrics_addresses(address: str) -> None:
    assert "must be host:port" in the_problem(f'{MINIMAL}metrics: {{address: "{address}"}}\n')


def test_the_longest_paths_fit_in_a_socket_address() -> None:
    config = parse_config(f"{MINIMAL}mps: {{runRoot: /{'r' * 48}}}\nkubelet: {{devicePlugins: /{E_ACUTE * 31}}}\n", "f")
    assert len(f"{config.mps.run_root}/mps/{UUID_A}/pipe/control".encode()) <= 107
    longest = socket_name(f"{'a' * 200}.dev/{'b' * 63}")
    assert len(f"{config.kubelet_device_plugins}/{longest}".encode()) <= 107
    assert "must be at most 64 bytes" in the_problem(f"{MINIMAL}kubelet: {{devicePlugins: /{E_ACUTE * 32}}}\n")


def test_groups_go_with_memory_only_and_with_no_other_selection() -> None:
    groups = "gpus: {groups: {pair0: [0, 1]}}\n"
    unit = resource(memory="", unit="1Gi", gpus="{groups: [pair0]}") + groups
    assert the_problem(unit).endswith(
        "resources[0].gpus: groups are for resources with memory: all units of a container are on one GPU"
    )
    both = resource(gpus="{include: [0], groups: [pair0]}") + groups
    assert the_problem(both).endswith("resources[0].gpus: groups must not be combined with include, exclude or count")
    twice = resource(gpus="{groups: [pair0, pair0]}") + groups
    assert the_problem(twice).endswith('resources[0].gpus.groups[1]: "pair0": is named twice in this list')
    other = resource(gpus="{groups: [pair1]}") + groups
    assert the_problem(other).endswith('resources[0].gpus.groups[0]: "pair1": is no group: gpus.groups declares pair0')


def test_a_share_may_lie_on_any_so_many_of_its_gpus() -> None:
    (read,) = parse_config(resource(gpus="{count: 2, include: [0, 1, 3]}"), "f").resources
    assert (read.gpu_count, read.gpus.include, read.groups) == (2, (0, 1, 3), ())
    (without,) = parse_config(resource(), "f").resources
    assert without.gpu_count == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpus": "{count: 1}"}, 'resources[0].gpus.count: "1": must be a whole number from 2 to 64'),
        ({"gpus": "{count: 65}"}, 'resources[0].gpus.count: "65": must be a whole number from 2 to 64'),
        ({"gpus": "{count: all}"}, 'resources[0].gpus.count: "all": must be a whole number from 2 to 64'),
        (
            {"gpus": "{count: 3, include: [0, 1]}"},
            'resources[0].gpus.count: "3": must not be more than the GPUs that include names (2)',
        ),
        (
            {"gpus": "{count: 2, groups: [pair0]}"},
            "resources[0].gpus: groups must not be combined with include, exclude or count",
        ),
        (
            {"memory": "", "unit": "1Gi", "gpus": "{count: 2}"},
            "resources[0].gpus: count is for resources with memory: all units of a container are on one GPU",
        ),
    ],
)
def test_a_number_of_gpus_that_can_not_be_is_an_error(changes: dict[str, str], expected: str) -> None:
    assert the_problem(resource(**changes) + "gpus: {groups: {pair0: [0, 1]}}\n").endswith(expected)


def test_what_depends_on_the_node_is_no_error() -> None:
    config = parse_config(resource(memory="{request: 100Ti}", gpus=f"{{include: [999, {UUID_A}]}}"), "f")
    assert config.resources[0].gpus.include == (999, UUID_A)


# -- the file as a whole


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty: it must hold a NodeConfig"),
        ("# nothing\n", "is empty: it must hold a NodeConfig"),
        ("---\n", "2: must not be empty"),
        ("null\n", "1: must not be empty"),
        ("- a\n", "1: must be a mapping"),
        ("hello\n", '1: "hello": must be a mapping'),
        ("!!set {a}\n", "1: must be a mapping"),
        ("!foo {a: 1}\n", "1: must be a mapping"),
        (f"{MINIMAL}---\n{MINIMAL}", "7: must hold one YAML document, a second one starts here"),
        (f"\ufeff{MINIMAL}", "1: must not start with a byte order mark: save it as plain UTF-8"),
        (f"{MINIMAL}a: \0\n", "7: must not contain NUL characters"),
        (f"{MINIMAL}a: \ud800\n", "7: must be UTF-8"),
        (MINIMAL.encode() + b"a: \xff\n", "7: must be UTF-8"),
        (MINIMAL.encode("utf-16"), "must be UTF-8: this looks like UTF-16"),
        (f"{MINIMAL}mps:\n\trunRoot: /x\n", "8: is not valid YAML: indented with a tab, use spaces"),
        (f"{MINIMAL}\t\n", None),
        ("[" * 500_000, "1: "),
        ("{a: " * 200_000, "1: must not be nested deeper than 16 levels"),
        ("- " * 200_000, "1: must not be nested deeper than 16 levels"),
        ("[" + "0," * 100_000 + "]", "1: must not hold more than 20000 YAML values"),
        ("#" * (1 << 20) + "\n", "must not be larger than 1Mi"),
        (f"{MINIMAL}gpus: {{include: [*x]}}\n", "7: is not valid YAML: found undefined alias"),
        (f"{MINIMAL}metrics: {{address: 'x}}\n", None),
        (f"{MINIMAL}a: b: c\n", None),
        (f"{MINIMAL}a: \x01\n", None),
    ],
    ids=range(25),
)
def test_hardly_yaml(content: str | bytes, expected: str | None, any_loader: None) -> None:
    problem = the_problem(content)
    if expected is None:
        assert "is not valid YAML: " in problem
    else:
        assert problem.startswith(expected)


def test_keys_of_the_top(any_loader: None) -> None:
    assert problems("{}") == [
        "1: apiVersion: is required: gpufrac.dev/v1",
        "1: kind: is required: NodeConfig",
        "1: resources: is required: a list with at least one resource",
    ]
    assert problems(HEAD.replace("NodeConfig", "nodeconfig") + "resources: []\n") == [
        '2: kind: "nodeconfig": must be NodeConfig',
        "3: resources: must hold at least one resource",
    ]
    assert (
        the_problem(f"{HEAD}resources: {{name: a}}\n")
        == f"3: resources: must be a list of resources, such as [{RESOURCE}]"
    )
    assert the_problem(f"{HEAD}resources: [a]\n") == f'3: resources[0]: "a": must be a mapping, such as {RESOURCE}'


def test_keys_given_twice(any_loader: None) -> None:
    assert the_problem(f"{MINIMAL}backend: nvml\nbackend: nvml\n") == "8: backend: is given twice, first in line 7"
    assert the_problem(resource(compute="{mode: sm-sharing, mode: sm-sharing}")) == (
        "6: resources[0].compute.mode: is given twice, first in line 6"
    )


def test_keys_that_are_no_text(any_loader: None) -> None:
    assert the_problem(f"{MINIMAL}? [a, b]\n: 1\n") == "7: a key must be plain text"
    assert the_problem(f"{MINIMAL}on: 1\n").startswith("7: on: unknown key")
    assert the_problem(f'{MINIMAL}"a\\nf:1: fine\\e": 1\n').startswith('7: "a\\nf:1: fine\\u001b": unknown key')


def test_anchors_are_fine_and_merge_keys_are_not(any_loader: None) -> None:
    shared = f"""{HEAD}resources:
  - name: gpufrac.dev/a
    memory: {{request: 8Gi}}
    compute: &compute {{mode: sm-sharing}}
  - name: gpufrac.dev/b
    memory: {{request: 16Gi}}
    compute: *compute
"""
    assert [r.mode for r in parse_config(shared, "f").resources] == [Mode.SM_SHARING, Mode.SM_SHARING]
    merged = shared.replace("compute: *compute", "compute: {<<: *compute, threadPercent: 5}")
    assert problems(merged) == [
        '9: resources[1].compute."<<": merge keys are not supported: write the values out',
        "9: resources[1].compute.mode: is required: sm-sharing or time-slicing",
    ]


def test_alias_bombs_and_circles_are_bounded(any_loader: None) -> None:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join(f'*a{i - 1}' for _ in range(9))}]\n" for i in range(1, 30)
    )
    assert len(problems(f"{MINIMAL}{bomb}resources: *a29\n")) == 31
    many = f"{HEAD}a: &r {{colour: red}}\nresources: [{','.join(['*r'] * 5000)}]\n"
    assert "4: resources: must not hold more than 256 resources" in problems(many)
    assert the_problem(f"{HEAD}resources: &r [*r]\n") == f"3: resources[0]: must be a mapping, such as {RESOURCE}"


def test_a_flood_of_problems_is_cut(any_loader: None) -> None:
    content = f"{HEAD}resources:\n" + "  - {a: 1, b: 2}\n" * 200
    with pytest.raises(ConfigErrors) as caught:
        parse_config(content, "f")
    assert len(caught.value.problems) == 200 * 5
    lines = str(caught.value).split("\n")
    assert len(lines) == 101
    assert lines[-1] == "f: and 900 more problems"


def test_long_values_are_shown_short() -> None:
    assert len(the_problem(resource(name="x" * 100_000))) < 300


# -- files


def test_a_file(short_tmp: Path) -> None:
    path = short_tmp / "config.yaml"
    path.write_text(MINIMAL)
    assert load_config(path) == load_config(str(path)) == parse_config(MINIMAL, "f")
    path.write_text("kind: 1\n")
    with pytest.raises(ConfigErrors, match=f"^{path}:1: "):
        load_config(path)


def test_files_that_are_none(short_tmp: Path) -> None:
    os.mkfifo(short_tmp / "pipe")
    (short_tmp / "loop").symlink_to("loop")
    (short_tmp / "large").write_bytes(b"#" * ((1 << 20) + 1))
    for name, rule in {
        "missing": "No such file or directory",
        ".": "it is a directory, name the file in it",
        "pipe": "it is not a regular file",
        "loop": "Too many levels of symbolic links",
        "large": "it is larger than 1Mi",
        "a\0b": "embedded null byte",
    }.items():
        path = f"{short_tmp}/{name}"
        with pytest.raises(ConfigErrors) as caught:
            load_config(path)
        assert str(caught.value) == f"{path}: cannot be read: {rule}"


# -- socket names


def test_socket_names() -> None:
    names = [
        f"{domain}/{base}" for domain in ("a.dev", "b.dev") for base in ("gpu", "Gpu", "g" * 63, "g" * 62, "a_b.C-1")
    ]
    sockets = [socket_name(name) for name in names]
    assert len(set(sockets)) == len(names)
    assert sockets == [socket_name(name) for name in names]
    assert max(map(len, sockets)) == SOCKET_NAME_MAX_BYTES == 42
    assert all(s.startswith("gpufrac-") and s.endswith(".sock") and "/" not in s for s in sockets)
    assert socket_name("gpufrac.dev/gpu-8gi").startswith("gpufrac-gpu-8gi-")


def test_a_socket_name_never_leaves_its_directory() -> None:
    hostile: Any = ["../../x", "a/../b", "a/\n", "a/\u00e9", ""]
    for name in hostile:
        text = socket_name(name)
        assert os.path.basename(text) == text
        assert text.isascii()
        assert text.isprintable()
        assert " " not in text


# --- where somebody has to look, and words that help


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ('resources:\n  - name: "a/b\n    memory: {request: 8Gi}\n', 4, "a quote is opened here and never closed"),
        ("stateRoot: 'x\nmps: {}\n", 3, "a quote is opened here and never closed"),
        (
            'resources:\n  - name: "a/b\n    memory: {request: "8Gi"}\n',
            4,
            "a quote is opened here and closed in line 5: is one missing?",
        ),
        ("gpus: {include: [0, 1}\n", 3, ""),
        ("gpus: {include: all\nmps: {}\n", 3, "`{` is opened here and not closed before line 4"),
        ("gpus:\n  include: [0,\n  exclude: [1]\n", 4, "`[` is opened here and not closed before line 5"),
        ("resources:\n  - name:a/b\n    unit: 1Gi\n", 4, "a space is missing behind `name:`"),
        ("resources:\n  - name: @a/b\n", 4, "put the value in quotes"),
        ("resources:\n  - name: a/b\n   unit: 1Gi\n", 5, "is this line indented as those beside it?"),
        ("resources:\n\t- name: a/b\n", 4, "indented with a tab, use spaces"),
        ("resources: {{ .Values.resources }}\n", 3, "is a template, with {{ .Values.resources }} for a value"),
        ("{%- if x %}\nstateRoot: /x\n", 3, "is a template, with {%- if x %} for a value: render it first"),
    ],
)
def test_what_is_no_yaml_names_the_line_to_mend(text: str, line: int, rule: str, any_loader: None) -> None:
    found = the_problem(HEAD + text)
    assert found.startswith(f"{line}: is ")
    assert rule in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("monitoring:\n\n  port: 1\n", "7: monitoring: unknown key; known here"),
        ("mps:\n  deamon:\n    x: 1\n", "8: mps.deamon: unknown key; known here"),
        ("gpus:\n  groups:\n    Pair:\n    - 0\n", "9: gpus.groups.Pair: the name must be lower-case"),
        (
            "metrics:\n  - x\n",
            '7: metrics: must be a mapping, such as {address: "127.0.0.1:9478"}, or {address: ""} for',
        ),
        ("annotations:\n  share: true\n", "7: annotations.gpus.include: is required"),
        ("mps:\n  protocol: auto\nmps: {}\n", "9: mps: is given twice, first in line 7"),
    ],
)
def test_a_problem_of_a_key_has_the_keys_line(text: str, problem: str, any_loader: None) -> None:
    assert the_problem(MINIMAL + text).startswith(problem)


@pytest.mark.parametrize("base", ["gpu", "gpu.shared", "mig-1g.10gb", "gpu-8gi", "x"])
def test_names_of_nvidias_device_plugin_are_not_ours_to_offer(base: str) -> None:
    said = the_problem(resource(name=f"nvidia.com/{base}"))
    assert "must not lie in nvidia.com: names there are NVIDIA's device plugin's" in said
    assert f"write gpufrac.dev/{base}, or a domain of your own" in said


def test_what_is_advised_in_place_of_such_a_name_can_be_had() -> None:
    assert "write one in gpufrac.dev, or" in the_problem(resource(name="nvidia.com/-x"))
    assert parse_config(resource(name="example.nvidia.com/gpu"), "x").resources[0].name == "example.nvidia.com/gpu"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (resource(memory="{fraction: 50}"), "such as 0.5; did you mean 0.5?"),
        (resource(memory="{fraction: '0.5'}"), "such as 0.5, without quotes"),
        (
            resource(memory="{fraction: 0,5}").replace("0,5", "0.5, 5: x"),
            "if it is behind a comma, a decimal point is meant",
        ),
        (resource(compute="{mode: timeslicing}"), 'did you mean "time-slicing"?'),
        (resource(memory="{requests: 8Gi}"), 'memory.requests: unknown key; did you mean "request"?'),
        (resource(compute="", mode="sm-sharing"), "mode: unknown key: it belongs under compute"),
        (resource(memory="", limit="8Gi"), "limit: unknown key: it belongs under memory"),
        (resource(replicas="4"), "how many shares a GPU has follows from their memory"),
        (MINIMAL + "mps: {protocol: v3}\n", 'must be auto, 2 or 3; did you mean "3"?'),
        (MINIMAL + "backend: sim\n", 'did you mean "simulated"?'),
        (MINIMAL + "mps: {sharedMemory: off}\n", "must be true or false; did you mean false?"),
        (MINIMAL + "stateRoot: ~/x\n", "`~` and variables are not expanded"),
        (MINIMAL + "metrics: {address: 9478}\n", 'did you mean "127.0.0.1:9478"?'),
        (MINIMAL + "metrics: {address: '::1:9478'}\n", 'did you mean "[::1]:9478"?'),
        ("version: v1\nsharing: {}\n", "is a config of NVIDIA's device plugin, and no NodeConfig"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {}\n", "is a ConfigMap of v1, and no NodeConfig of gpufrac.dev/v1"),
    ],
)
def test_one_problem_says_what_was_meant(text: str, problem: str) -> None:
    assert problem in the_problem(text)
