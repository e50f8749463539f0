"""Keys that were meant for us: what is told of them, what is not, and that hostile ones cost little."""

import time
from collections.abc import Callable

import pytest

from deviceplugin.annotated.contract import MAX_FINDINGS, SUFFIXES, Finding, findings

PREFIX = "nvidia.com/container."
MEANT_LIMIT = f"{PREFIX}main.gpu-memory.limit"


def the_finding(key: str, prefix: str = PREFIX) -> Finding:
    (finding,) = findings({key: "1Gi"}, prefix)
    assert finding.key == key
    return finding


BEGIN = f"keys begin with {PREFIX}"
OLD = f"its prefix is an old one, with sizes in decimal MB: keys begin with {PREFIX} now"
CASE = "upper and lower case count"
NONE_NAMED = "it names no container"
NO_LABEL = "a container's name is lower-case letters, digits and inner dashes"
UNKNOWN = (
    "behind the container's name must come .gpu-memory.request, .gpu-memory.limit, .gpu-compute.mode, "
    ".gpu-compute.portion or .gpus.devices"
)


@pytest.mark.parametrize(
    ("key", "problem", "nearest"),
    [
        # misspelt suffix, plural, wrong separators
        (f"{PREFIX}main.gpu-memory.limits", "no such key", MEANT_LIMIT),
        (f"{PREFIX}main.gpu-memory.requests", "no such key", f"{PREFIX}main.gpu-memory.request"),
        (f"{PREFIX}main.gpu-mem.limit", "no such key", MEANT_LIMIT),
        (f"{PREFIX}main.gpu-memroy.limit", "no such key", MEANT_LIMIT),
        (f"{PREFIX}main.memory.limit", "no such key", MEANT_LIMIT),
        (f"{PREFIX}main.gpu-memory", "no such key", MEANT_LIMIT),
        (f"{PREFIX}main.gpu_memory.limit", "no such key", MEANT_LIMIT),
        (f"{PREFIX}main.gpu.memory.limit", "no such key", MEANT_LIMIT),
        (f"{PREFIX}main.gpu-memory-limit", "no such key", MEANT_LIMIT),
        (f"{PREFIX}main-gpu-memory-limit", "no such key", MEANT_LIMIT),
        (f"{PREFIX}main.gpu.devices", "no such key", f"{PREFIX}main.gpus.devices"),
        (f"{PREFIX}main.gpus.device", "no such key", f"{PREFIX}main.gpus.devices"),
        (f"{PREFIX}main.devices", "no such key", f"{PREFIX}main.gpus.devices"),
        (f"{PREFIX}main.gpu-compute.modes", "no such key", f"{PREFIX}main.gpu-compute.mode"),
        (f"{PREFIX}main.gpu-compute.portions", "no such key", f"{PREFIX}main.gpu-compute.portion"),
        (f"{PREFIX}main.colour", UNKNOWN, ""),
        (f"{PREFIX}main", UNKNOWN, ""),
        # wrong case
        (f"{PREFIX}main.GPU-Memory.limit", CASE, MEANT_LIMIT),
        (f"{PREFIX}Main.gpu-memory.limit", CASE, MEANT_LIMIT),
        ("NVIDIA.com/Container.main.gpu-memory.limit", CASE, MEANT_LIMIT),
        # container
        (PREFIX, NONE_NAMED, ""),
        (f"{PREFIX}gpu-memory.limit", NONE_NAMED, f"{PREFIX}<container>.gpu-memory.limit"),
        (f"{PREFIX}.gpu-memory.limit", NONE_NAMED, f"{PREFIX}<container>.gpu-memory.limit"),
        ("nvidia.com/gpu-memory.limit", NONE_NAMED, f"{PREFIX}<container>.gpu-memory.limit"),
        ("nvidia.com/gpu.memory", NONE_NAMED, f"{PREFIX}<container>.gpu-memory.limit"),
        ("nvidia.com/gpumem", NONE_NAMED, f"{PREFIX}<container>.gpu-memory.limit"),
        ("kai.scheduler/gpu-memory", NONE_NAMED, f"{PREFIX}<container>.gpu-memory.limit"),
        (f"{PREFIX}my.app.gpu-memory.limit", NO_LABEL, f"{PREFIX}<container>.gpu-memory.limit"),
        (f"{PREFIX}my_app.gpu-memory.limit", NO_LABEL, f"{PREFIX}<container>.gpu-memory.limit"),
        # prefix
        ("nvidia.com/containers.main.gpu-memory.limit", BEGIN, MEANT_LIMIT),
        ("nvidia.com/container-main.gpu-memory.limit", BEGIN, MEANT_LIMIT),
        ("nvidia.com/main.gpu-memory.limit", BEGIN, MEANT_LIMIT),
        ("nvidia.com/main.gpu-memory.limits", BEGIN, MEANT_LIMIT),
        ("nvida.com/container.main.gpu-memory.limit", BEGIN, MEANT_LIMIT),
        ("nvidia.co/container.main.gpu-memory.limit", BEGIN, MEANT_LIMIT),
        ("gpu.nvidia.com/container.main.gpu-memory.limit", BEGIN, MEANT_LIMIT),
        ("kai.scheduler/container.main.gpu-memory.limit", BEGIN, MEANT_LIMIT),
        ("container.main.gpu-memory.limit", BEGIN, MEANT_LIMIT),
        ("main.gpu-memory.limit", BEGIN, MEANT_LIMIT),
        ("nvidia.com/gpu-memory.container.main.gpu-memory.limit", OLD, MEANT_LIMIT),
        ("nvidia.com/gpu-memory.container.main.limit", OLD, MEANT_LIMIT),
        ("nvidia.com/gpu-memory.container.main.requests", OLD, f"{PREFIX}main.gpu-memory.request"),
    ],
)
def test_keys_meant_for_us(key: str, problem: str, nearest: str) -> None:
    finding = the_finding(key)
    meant = f"; did you mean {nearest}?" if nearest else ""
    assert (finding.problem, finding.nearest) == (f"is not read: {problem}{meant}", nearest)
    assert str(finding) == f'annotation "{key}" is not read: {problem}{meant}'


@pytest.mark.parametrize("key", ["nvidia.com/gpu-fraction", "kai.scheduler/gpu-fraction", "nvidia.com/gpu.share"])
def test_kais_fraction_has_no_domain(key: str) -> None:
    assert "as a key of KAI's scheduler it is gpu-fraction" in str(the_finding(key))


@pytest.mark.parametrize("suffix", ["request", "limit", "percentage", "fraction"])
def test_a_share_of_compute_is_a_schedulers_to_write(suffix: str) -> None:
    """KAI refuses its users `.gpu-compute.portion`; from 0.20 on they write `.gpu-compute.request`."""
    finding = the_finding(f"{PREFIX}main.gpu-compute.{suffix}")
    assert finding.nearest == "", "no version takes .portion from a user"
    assert "KAI from 0.20 on makes it of .gpu-compute.request" in finding.problem
    assert ("no such key" in finding.problem) is (suffix != "request")


def test_a_share_of_compute_that_its_scheduler_acted_on_is_no_finding() -> None:
    annotations = {
        f"{PREFIX}main.gpu-compute.request": "0.5",
        f"{PREFIX}main.gpu-compute.portion": "0.50",
        f"{PREFIX}main.gpu-compute.mode": "sm-sharing",
        MEANT_LIMIT: "1Gi",
    }
    assert findings(annotations, PREFIX) == ()


@pytest.mark.parametrize(
    ("containers", "problem"),
    [
        (None, ""),
        (("main", "proxy"), ""),
        (("mian",), f"the pod has no container main; did you mean {PREFIX}mian.gpu-memory.limit?"),
        (("web", "db"), "the pod has no container main: it has db, web"),
    ],
)
def test_keys_of_a_container_that_the_pod_does_not_have(containers: tuple[str, ...] | None, problem: str) -> None:
    found = findings({MEANT_LIMIT: "1Gi"}, PREFIX, containers)
    assert [finding.problem for finding in found] == ([f"has no effect: {problem}"] if problem else [])
    mode = {f"{PREFIX}main.gpu-compute.mode": "sm-sharing"}
    assert len(findings(mode, PREFIX, containers)) == bool(problem)


def test_kais_portion_limit_under_our_prefix() -> None:
    meant = "kai.scheduler/container.main.gpu-memory.portion.limit"
    finding = the_finding(f"{PREFIX}main.gpu-memory.portion.limit")
    assert (finding.problem, finding.nearest) == (f"is not read: as a key of KAI's scheduler it is {meant}", meant)
    assert not findings({meant: "0.5"}, PREFIX)


def test_a_container_with_too_long_a_name() -> None:
    """A legal key for it can't be suggested: Kubernetes allows 63 characters behind the slash."""
    finding = the_finding(f"{PREFIX}{'n' * 35}.gpu-mem.request")
    assert finding.nearest == ""
    assert finding.problem.endswith("name is too long for .gpu-memory.request, as a key has 63 characters at most")
    assert the_finding(f"{PREFIX}{'n' * 34}.gpu-mem.request").nearest == f"{PREFIX}{'n' * 34}.gpu-memory.request"


@pytest.mark.parametrize(
    "key",
    [
        "gpu-memory",
        "gpu-memory.limit",
        "gpu-fraction",
        "gpu-fraction.limit",
        "gpu-fraction-num-devices",
        "gpu-fraction-container-name",
        "received-resource-type",
        "kai.scheduler/numa-placement-predicted",
        "kai.scheduler/container.main.gpu-memory.portion.limit",
        "run.ai/reserve_for_gpu_index",
        "runai/shared-gpu-configmap",
        "kubectl.kubernetes.io/last-applied-configuration",
        "cdi.k8s.io/gpu",
        "nvidia.com/gpu",
        "nvidia.com/use-gpuuuid",
        "nvidia.com/gpu.compute.major",
        "nvidia.com/container-toolkit.version",
        "amd.com/container.main.gpu-memory.limit",
        "example.com/container.main.gpu-memory.limit",
        "my-gpu-memory-limit",
        "",
        "/",
        f"{PREFIX}{'x' * 317}",
    ],
)
def test_keys_of_others(key: str) -> None:
    assert not findings({key: ""}, PREFIX)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("prefix", [PREFIX, "example.com/container.", "example.com/", ""])
def test_legal_keys_are_no_findings(prefix: str, suffix: str) -> None:
    annotations = {
        f"{prefix}main{suffix}": "x",
        f"{prefix}main.gpu-memory.limit": "x",
        f"{prefix}main.gpu-compute.mode": "sm-sharing",
    }
    assert findings(annotations, prefix) == ()


@pytest.mark.parametrize(
    ("prefix", "key", "nearest"),
    [
        ("example.com/container.", MEANT_LIMIT, "example.com/container.main.gpu-memory.limit"),
        (
            "example.com/container.",
            "exampel.com/container.main.gpus.devices",
            "example.com/container.main.gpus.devices",
        ),
        ("example.com/gpu-of.", "example.com/gpu-of-main.gpus.devices", "example.com/gpu-of.main.gpus.devices"),
        ("example.com/", "example.com/main.gpu-memory.limits", "example.com/main.gpu-memory.limit"),
        ("example.com/", "example.com/container.main.gpu-memory.limit", "example.com/<container>.gpu-memory.limit"),
        ("", MEANT_LIMIT, "main.gpu-memory.limit"),
        ("", "main-gpu-memory-limit", "main.gpu-memory.limit"),
        ("", "main.gpu-memory.limits", "main.gpu-memory.limit"),
    ],
)
def test_other_prefixes(prefix: str, key: str, nearest: str) -> None:
    assert the_finding(key, prefix).nearest == nearest


@pytest.mark.parametrize(
    ("prefix", "key"),
    [("example.com/", "example.com/owner"), ("example.com/", "example.com/a.b"), ("", "gpu-memory.limit"), ("", "a.b")],
)
def test_other_prefixes_and_keys_of_others(prefix: str, key: str) -> None:
    assert not findings({key: ""}, prefix)


# -- legal keys without effect


def test_keys_without_a_memory_key() -> None:
    annotations = {
        f"{PREFIX}a.gpus.devices": "0",
        f"{PREFIX}b.gpu-compute.portion": "0.5",
        f"{PREFIX}b.gpu-compute.mode": "sm-sharing",
        f"{PREFIX}c.gpus.devices": "0",
        f"{PREFIX}c.gpu-memory.request": "1Gi",
    }
    found = findings(annotations, PREFIX)
    assert [(finding.key.removeprefix(PREFIX), finding.nearest.removeprefix(PREFIX)) for finding in found] == [
        ("a.gpus.devices", "a.gpu-memory.limit"),
        ("b.gpu-compute.mode", "b.gpu-memory.limit"),
        ("b.gpu-compute.portion", "b.gpu-memory.limit"),
    ]
    assert str(found[0]) == (
        f'annotation "{PREFIX}a.gpus.devices" has no effect without a memory key of the same container: '
        f"add {PREFIX}a.gpu-memory.limit"
    )


def test_a_mode_alone_is_what_kais_reservation_pods_have() -> None:
    assert findings({f"{PREFIX}resource-reservation.gpu-compute.mode": "sm-sharing"}, PREFIX) == ()


@pytest.mark.parametrize(("mode", "told"), [("sm-sharing", False), (" time-slicing ", True), (None, True)])
def test_a_portion_caps_sm_sharing_only(mode: str | None, told: bool) -> None:
    annotations = {MEANT_LIMIT: "1Gi", f"{PREFIX}main.gpu-compute.portion": "0.5"}
    if mode is not None:
        annotations[f"{PREFIX}main.gpu-compute.mode"] = mode
    found = findings(annotations, PREFIX)
    text = (
        f'annotation "{PREFIX}main.gpu-compute.portion" has no effect with time-slicing: '
        f"a portion caps sm-sharing, which {PREFIX}main.gpu-compute.mode can ask for"
    )
    assert [str(finding) for finding in found] == ([text] if told else [])


# -- hostile input

HOSTILE: dict[str, Callable[[int], str]] = {
    "misspelt": lambda i: f"{PREFIX}{i}.gpu-memroy.limit",
    "near": lambda i: f"nvidia.com/{i}.gpu-memory-limits",
    "legal": lambda i: f"{PREFIX}{i}.gpus.devices",
    "many": str,
    "domains": lambda i: f"{i}.com/main.gpu-memory.limit",
    "long": lambda i: f"{i}{'nvidia.' * 34}com/{i}{'gpu' * 14}",
    "separators": lambda i: f"nvidia.com/{i}gpu{'-' * 44}",
    "huge": lambda i: f"{PREFIX}{i}{'gpu-memory.' * 10_000}",
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_thousands_of_keys_cost_little(make: Callable[[int], str]) -> None:
    annotations: dict[str, str] = {}
    size = 0
    while size < 256 * 1024:
        key = make(len(annotations))
        annotations[key] = ""
        size += len(key)
    before_s = time.process_time()
    found = findings(annotations, PREFIX)
    assert time.process_time() - before_s < 1
    assert len(found) <= MAX_FINDINGS
    assert all(len(str(finding)) < 700 and str(finding).isprintable() for finding in found)
