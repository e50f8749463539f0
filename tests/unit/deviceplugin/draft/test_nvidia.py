"""A config of NVIDIA's device plugin becomes one of ours that can be used, or a sentence that says why not."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.draft.convert import Converted, convert, fraction
from deviceplugin.draft.nvidia import read
from mpsd.common.errors import ConfigError
from mpsd.config.load import parse_config
from mpsd.config.model import Enforcement, FractionMemory, NodeConfig
from mpsd.gpu.model import MIB, Mode
from mpsd.shares.sizes import slots

UUID = "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"
SLICED = {"version": "v1", "sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}}


def done(config: object, name: str | None = None) -> Converted:
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    return convert(read(text.encode(), "FILE", name), "FILE", "gpufrac 1")


def ours(config: object, name: str | None = None) -> NodeConfig:
    return parse_config(done(config, name).text, "converted")


def sharing(strategy: str = "timeSlicing", flags: Any = None, more: Any = None, **resource: Any) -> dict[str, Any]:
    entry = {"name": "nvidia.com/gpu", "replicas": 4, **resource}
    made = {"version": "v1", "sharing": {strategy: {"resources": [entry], **(more or {})}}}
    return made | ({"flags": flags} if flags is not None else {})


def refused(config: object, name: str | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        done(config, name)
    return str(error.value)


def test_time_slicing_stays_time_slicing_that_nothing_has_to_hold() -> None:
    (resource,) = ours(SLICED).resources
    assert (resource.name, resource.mode, resource.enforcement) == (
        "gpufrac.dev/gpu",
        Mode.TIME_SLICING,
        Enforcement.NONE,
    )
    assert resource.memory == FractionMemory(fraction=0.25, limit_fraction=0.25)
    differs = " ".join(done(SLICED).differs)
    assert "`gpufrac.dev/gpu` instead of `nvidia.com/gpu`" in differs
    assert "with NVIDIA's time-slicing nobody is limited" in differs
    assert "a container gets exactly one share" in differs
    assert done(SLICED).left_out == ()


def test_mps_stays_mps_with_its_part_of_memory_and_threads() -> None:
    (resource,) = ours(sharing("mps", replicas=10)).resources
    assert (resource.mode, resource.thread_percent) == (Mode.SM_SHARING, 10)
    assert resource.memory == FractionMemory(fraction=0.1, limit_fraction=0.1)
    differs = " ".join(done(sharing("mps")).differs)
    assert "limits each client to its part of all memory" in differs
    assert "exactly one share" not in differs, "it is so under MPS, unless switched off"
    relaxed = done(sharing("mps", more={"failRequestsGreaterThanOne": False}))
    assert "exactly one share" in " ".join(relaxed.differs)


def test_as_many_clients_are_let_on_a_gpu_as_mps_takes() -> None:
    assert ours(sharing("mps", replicas=48)).mps.client_limit == 48
    assert ours(sharing("mps", replicas=52)).mps.client_limit == 52
    many = sharing("mps", replicas=200)
    assert ours(many).mps.client_limit == 60
    assert ours(many).resources[0].thread_percent == 1
    assert "MPS takes 60 clients on a GPU at most" in " ".join(done(many).differs)


@pytest.mark.parametrize("replicas", range(2, 61))
def test_all_replicas_fit_and_hardly_one_more(replicas: int) -> None:
    (resource,) = ours(sharing(replicas=replicas)).resources
    assert slots(resource, 79 * 1024 * MIB) == replicas


def test_more_replicas_than_anybody_has_are_still_a_part() -> None:
    assert float(fraction(20_000)) > 0
    assert ours(sharing(replicas=20_000)).resources


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "gpufrac.dev/gpu"),
        ({"name": "gpu"}, "gpufrac.dev/gpu"),
        ({"more": {"renameByDefault": True}}, "gpufrac.dev/gpu.shared"),
        ({"rename": "nvidia.com/small"}, "gpufrac.dev/small"),
        ({"rename": "small", "more": {"renameByDefault": True}}, "gpufrac.dev/small"),
        ({"rename": "example.com/small"}, "example.com/small"),
    ],
)
def test_names_are_those_that_pods_asked_for_under_our_domain(changes: dict[str, Any], expected: str) -> None:
    assert [resource.name for resource in ours(sharing(**changes)).resources] == [expected]


def test_one_name_for_several_sizes_becomes_several_names() -> None:
    config = sharing(devices=[0])
    for index, replicas in ((1, 8), (2, 8)):
        config["sharing"]["timeSlicing"]["resources"].append(
            {"name": "nvidia.com/gpu", "replicas": replicas, "devices": [index]}
        )
    names = [resource.name for resource in ours(config).resources]
    assert names == ["gpufrac.dev/gpu", "gpufrac.dev/gpu-1of8", "gpufrac.dev/gpu-1of8-3"]


def test_devices_are_carried_over_by_index_and_uuid() -> None:
    config = sharing(devices=[0, "1", UUID.replace("b", "B", 1), 1])
    (resource,) = ours(config).resources
    assert resource.gpus.include == (0, 1, UUID)
    assert "`devices`: NVIDIA's plugin passes over" in " ".join(done(config).differs)
    assert ours(sharing(devices="all")).resources[0].gpus.include is None
    counted = sharing(devices=2)
    assert ours(counted).resources[0].gpus.include is None
    assert "`devices: 2` of `nvidia.com/gpu`: it is on all GPUs" in " ".join(done(counted).differs)


def test_mig_is_left_out_by_name_and_by_device() -> None:
    config = sharing(devices=[0, "0:1", f"MIG-{UUID}/3/0"], flags={"migStrategy": "mixed"})
    config["sharing"]["timeSlicing"]["resources"].append(
        {"name": "nvidia.com/mig-1g.5gb", "replicas": 2, "rename": "x"}
    )
    assert [resource.gpus.include for resource in ours(config).resources] == [(0,)]
    left_out = done(config).left_out
    assert f"`nvidia.com/gpu`: of its devices 0:1, MIG-{UUID}/3/0, which are MIG devices and not shared" in left_out
    assert any(text.startswith("`nvidia.com/mig-1g.5gb`: GPUs with MIG on are not shared") for text in left_out)
    assert "`flags.migStrategy: mixed`: GPUs with MIG on are left alone" in left_out
    assert "cannot carry over anything of FILE" in refused(sharing(name="nvidia.com/mig-1g.5gb"))
    assert "GPUs with MIG on are not shared" in refused(sharing(devices=["0:0"]))


def test_what_is_not_shared_is_not_carried_over() -> None:
    assert "with `replicas: 1` a GPU is not shared" in refused(sharing(replicas=1))
    assert "its list of devices is empty" in refused(sharing(devices=[]))


def test_flags_that_matter_are_carried_over_or_told() -> None:
    flags = {
        "migStrategy": "none",
        "failOnInitError": True,
        "nvidiaDriverRoot": "/run/nvidia/driver",
        "gdsEnabled": False,
        "mofedEnabled": True,
        "plugin": {"passDeviceSpecs": True, "deviceListStrategy": ["envvar"], "deviceIDStrategy": "uuid"},
        "gfd": {"oneshot": False, "sleepInterval": "60s"},
        "somethingNew": 7,
    }
    config = sharing(flags=flags) | {"imex": {"channelIDs": [0], "required": False}, "resources": {"gpus": []}}
    assert ours(config).mps.driver_root == "/run/nvidia/driver"
    told = done(config).left_out
    assert [text.partition(":")[0].strip("`") for text in told] == [
        "flags.mofedEnabled",
        "flags.plugin.passDeviceSpecs",
        "flags.somethingNew",
        "imex.channelIDs",
        "flags.gfd",
        "resources",
    ]


def test_unknown_keys_are_told_and_cost_nothing() -> None:
    config = sharing(memoryGB=2, more={"strategy": "packed"}) | {"individualGPU": {"enabled": True}}
    told = done(config).left_out
    for key in ("individualGPU", "sharing.timeSlicing.strategy", "sharing.timeSlicing.resources[0].memoryGB"):
        assert f"`{key}`: the format has no such key" in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "FILE: is empty: it must hold a config of NVIDIA's device plugin"),
        ("[]", "must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("version: v1\nflags: {migStrategy: none}", "has no `sharing`: NVIDIA's plugin offers whole GPUs"),
        ("version: v1\nsharing:", "has no `sharing`"),
        (
            "version: v2\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}",
            'FILE:1: version: "v2": must be v1',
        ),
        ("sharing: {timeSlcing: {}}", 'must have timeSlicing or mps, and has "timeSlcing"'),
        ("sharing: {}", "must have timeSlicing or mps"),
        ("sharing: 3", "must be a mapping"),
        (
            "sharing: {timeSlicing: {resources: [{name: a, replicas: 2}]}, mps: {resources: [{name: a, replicas: 2}]}}",
            "must have timeSlicing or mps, not both",
        ),
        ("sharing: {mps: {}}", "sharing.mps.resources: is required"),
        ("sharing: {mps: {resources: []}}", "must hold at least one resource"),
        ("sharing: {mps: {resources: {name: a}}}", "must be a list of resources"),
        ("sharing: {mps: {resources: [gpu]}}", "must be a mapping"),
        ("sharing: {mps: {resources: [{replicas: 2}]}}", "resources[0].name: is required"),
        ("sharing: {mps: {resources: [{name: gpu}]}}", "resources[0].replicas: is required"),
        ('sharing: {mps: {resources: [{name: gpu, replicas: "4"}]}}', "must be a whole number from 1 to 20000"),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 0}]}}", "must be a whole number from 1 to 20000"),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2, devices: some}]}}", "must be all, a number of GPUs"),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2, devices: 0}]}}", "must be all, a number of GPUs"),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2, devices: [x]}]}}", "devices[0]"),
        ("sharing: {mps: {renameByDefault: yes, resources: [{name: a, replicas: 2}]}}", "must be true or false"),
        ("sharing: {mps: {resources: [{name: 'a b', replicas: 2}]}}", 'cannot carry over the name "nvidia.com/a b"'),
        (
            "apiVersion: gpufrac.dev/v1\nkind: NodeConfig\nresources: []",
            "is a NodeConfig: it must be a config of NVIDIA's",
        ),
        ("apiVersion: v1\nkind: Secret\ndata: {}", "is a Secret: it must be a config of NVIDIA's device plugin"),
        ("apiVersion: v1\nkind: ConfigMap", "holds no config of NVIDIA's device plugin"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {a: {version: v1}}", "data.a: must be a text"),
        ("version: {{ .Values.v }}", "is a template"),
    ],
)
def test_what_can_not_be_read_is_said_with_its_place(text: str, said: str) -> None:
    assert said in refused(text)


def named(**configs: object) -> dict[str, Any]:
    return {name: yaml.safe_dump(config) for name, config in configs.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda texts: {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": texts},
        lambda texts: {"image": {"tag": "v1"}, "config": {"default": "any", "map": texts}},
    ],
)
def test_named_configs_are_chosen_by_name(wrap: Any) -> None:
    several = wrap(named(any=SLICED, big=sharing(replicas=2)))
    assert ours(several, "big").resources[0].memory == FractionMemory(fraction=0.5, limit_fraction=0.5)
    assert ours(wrap(named(only=SLICED))).resources
    text = refused(several)
    assert 'holds several configs: "any", "big": say which with --name' in text
    assert 'holds no config "small": there is "any", "big"' in refused(several, "small")
    assert refused(wrap(named(any={"version": "v1"}))).startswith("FILE (any): has no `sharing`")
    assert "leave out --name" in refused(SLICED, "any")


SHARING_KEYS = ["version", "flags", "sharing", "timeSlicing", "mps", "resources"]
KEYS = [*SHARING_KEYS, "name", "replicas", "devices", "rename", "data", "nvidiaDriverRoot"]
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 70), st.text(max_size=6), st.sampled_from(["all", "v1", "gpu", "/a/"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(
    config=VALUES
    | st.builds(
        sharing,
        st.sampled_from(["timeSlicing", "mps"]),
        VALUES,
        name=st.text(max_size=8) | st.just("nvidia.com/gpu"),
        replicas=st.integers(0, 100),
        rename=VALUES,
        devices=VALUES,
    )
)
def test_whatever_comes_is_converted_into_what_can_be_used_or_refused_in_words(config: object) -> None:
    try:
        converted = done(config)
    except ConfigError:
        return
    parse_config(converted.text, "converted")


@pytest.mark.parametrize(
    ("root", "expected"),
    [("/run/nvidia/driver/", "/run/nvidia/driver"), ("//a/../b", "/b"), ("/", "/"), ("", "/"), ("relative", "/")],
)
def test_the_root_of_the_driver_is_one_path_or_told(root: str, expected: str) -> None:
    config = sharing(flags={"nvidiaDriverRoot": root})
    assert ours(config).mps.driver_root == expected
    assert bool(done(config).left_out) == (root == "relative")


@pytest.mark.parametrize("evil", ["/x\nbackend: simulated", "/x, binary: /evil", "/x} #", '/x"', "/x\x1b[2J"])
def test_what_is_written_there_adds_no_line_of_its_own(evil: str) -> None:
    for config in (
        sharing(flags={"nvidiaDriverRoot": evil}),
        sharing(flags={"migStrategy": evil, "mpsRoot": evil}),
        sharing() | {evil: 1},
    ):
        try:
            converted = done(config)
            parsed = parse_config(converted.text, "converted")
        except ConfigError:
            continue
        assert parsed.backend == "nvml"
        assert parsed.mps.binary == "nvidia-cuda-mps-control"
        assert "\x1b" not in converted.text
