"""A drafted config can be used as it stands, fits the GPUs it was drafted for, and says what they give."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from deviceplugin.draft.facts import NodeFacts, told
from deviceplugin.draft.proposal import RESERVE_BYTES, draft
from mpsd.config.load import parse_config
from mpsd.config.model import GIB, MIN_UNIT_BYTES, Enforcement, FixedMemory, NodeConfig
from mpsd.gpu.model import MIB, GpuInfo, Mode
from mpsd.localapi.reasons import HardLimitCode
from mpsd.localapi.snapshot import HardLimits
from mpsd.shares.sizes import ShareSize, share_size, slots, usable_bytes
from tests.builders import info

OLD, NEW = "580.95.05", "615.71.09"
MISSING = HardLimits(missing=("cgroup v2 is not there",), missing_codes=(HardLimitCode.NO_CGROUP_V2,))


def parsed(facts: NodeFacts) -> NodeConfig:
    return parse_config(draft(facts, "gpufrac 1"), "drafted")


def words(facts: NodeFacts) -> str:
    """All comments as one text."""
    return " ".join(" ".join(line.partition("#")[2].split()) for line in draft(facts, "gpufrac 1").splitlines())


def found(*gpus: GpuInfo, driver: str = OLD, **more: object) -> NodeFacts:
    facts = told(1, GIB, driver)
    return structs.replace(facts, gpus=gpus, told=False, **more)


@given(
    gpus=st.lists(st.integers(1, 4 << 20), max_size=8),
    capability=st.sampled_from([(0, 0), (6, 1), (7, 0), (9, 0)]),
    driver=st.sampled_from([OLD, NEW, "", "x"]),
    name=st.text(max_size=40),
    mig=st.booleans(),
)
def test_whatever_the_node_it_can_be_used_and_each_resource_fits_the_smallest_gpu(
    gpus: list[int], capability: tuple[int, int], driver: str, name: str, mig: bool
) -> None:
    infos = tuple(
        info(
            index,
            memory_total_bytes=size * MIB,
            compute_capability=capability,
            name=name,
            mig_enabled=mig and not index,
        )
        for index, size in enumerate(gpus)
    )
    facts = found(*infos, driver=driver, troubles=(name,))
    config = parsed(facts)
    for gpu in infos:
        usable = usable_bytes(gpu, RESERVE_BYTES)
        if not gpu.mig_enabled and usable >= MIN_UNIT_BYTES:
            for resource in config.resources:
                assert isinstance(share_size(resource, usable), ShareSize), resource


@pytest.mark.parametrize("driver", [OLD, NEW])
def test_every_key_that_is_offered_can_be_put_in_force(driver: str) -> None:
    text = draft(told(2, 80 * GIB, driver), "gpufrac 1")
    options = re.findall(r"^#(\w.*)$", text, re.MULTILINE)
    assert len(options) == 4
    parse_config(re.sub(r"^#(?=\w)", "", text, flags=re.MULTILINE), "drafted")


def test_a_driver_before_r615_is_told_what_it_can_not_do() -> None:
    config, text = parsed(told(2, 80 * GIB, OLD)), words(told(2, 80 * GIB, OLD))
    assert {resource.mode for resource in config.resources} == {Mode.SM_SHARING}
    assert [r.name.partition("/")[2] for r in config.resources] == ["gpu-16gi", "gpu-half", "memory-gib"]
    assert config.enforcement_minimum is Enforcement.COOPERATIVE
    assert "Mode advised: sm-sharing: only MPS can hold memory limits here" in text
    assert "MPS: protocol 2;" in text
    assert "no: driver 580.95.05 has no memory limits: install 615 or newer" in text
    assert "GPU 1: 80Gi, of which 79Gi can be shared" in text
    assert "4 on each GPU" in text


def test_where_limits_are_hard_there_is_burst_and_both_modes_are_weighed() -> None:
    config, text = parsed(told(1, 80 * GIB, NEW)), words(told(1, 80 * GIB, NEW))
    burst = next(r.memory for r in config.resources if r.name.endswith("-burst"))
    assert burst == FixedMemory(request_bytes=16 * GIB, limit_bytes=32 * GIB)
    assert "MPS: protocol 3" in text
    assert "Memory limits: hard" in text
    assert "write time-slicing" in text


def test_a_new_driver_without_cgroup_v2_says_what_is_missing() -> None:
    facts = found(info(0), driver=NEW, hard_limits=MISSING)
    assert not any(resource.name.endswith("-burst") for resource in parsed(facts).resources)
    assert "Hard limits: no: cgroup v2 is not there" in words(facts)


def test_gpus_too_old_for_mps_get_time_slicing_without_a_limit_and_are_told_so() -> None:
    facts = found(info(0, compute_capability=(6, 1)))
    config = parsed(facts)
    assert {(r.mode, r.enforcement) for r in config.resources} == {(Mode.TIME_SLICING, Enforcement.NONE)}
    assert "no memory limit can be held here: GPU 0 has compute capability 6.1" in words(facts)
    mixed = found(info(0, compute_capability=(6, 1)), info(1))
    assert {r.mode for r in parsed(mixed).resources} == {Mode.SM_SHARING}
    assert "of which 79Gi can be shared; GPU 0 has compute capability 6.1" in words(mixed)
    hard = found(info(0, compute_capability=(6, 1)), driver=NEW)
    assert {(r.mode, r.enforcement) for r in parsed(hard).resources} == {(Mode.TIME_SLICING, Enforcement.COOPERATIVE)}


def test_sizes_follow_the_smallest_gpu_and_counts_are_told_by_gpu() -> None:
    facts = found(info(0, 80), info(1, 24))
    (fixed, *_) = parsed(facts).resources
    assert fixed.name == "gpufrac.dev/gpu-4gi"
    assert slots(fixed, usable_bytes(facts.gpus[1], RESERVE_BYTES)) >= 4
    assert "19 on GPU 0, 5 on GPU 1" in words(facts)
    assert "39.5Gi on GPU 0, 11.5Gi on GPU 1" in words(facts)


@pytest.mark.parametrize(
    ("facts", "told_"),
    [
        (NodeFacts(troubles=("no driver\nis here",)), "Not found out: no driver is here"),
        (found(info(0, mig_enabled=True)), "MIG is on, so it is left alone As all GPUs have MIG on"),
        (found(), "no GPU was seen"),
    ],
)
def test_without_a_gpu_that_can_be_shared_the_sizes_fit_any(facts: NodeFacts, told_: str) -> None:
    assert [r.name.partition("/")[2] for r in parsed(facts).resources] == ["gpu-quarter", "gpu-half", "memory-gib"]
    assert told_ in words(facts)


def test_the_driver_s_root_is_written_where_it_is_another() -> None:
    assert parsed(found(info(0))).mps.driver_root == "/"
    assert parsed(found(info(0), driver_root="/run/nvidia/driver")).mps.driver_root == "/run/nvidia/driver"
    assert "nvidia-cuda-mps-control was not found" in words(found(info(0), driver_root=None))
