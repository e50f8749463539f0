"""Facts about driver, kernel and cgroups -> whether this node can hold containers to memory limits (pure)."""

import re
from enum import StrEnum
from typing import NamedTuple

from mpsd.localapi.snapshot import HardLimits

MIN_DRIVER = 615
"""The first driver branch with memory limits for cgroups (NVIDIA, memory partitioning; NVML API reference, v615)."""


class Hierarchy(StrEnum):
    """What is mounted where cgroups belong."""

    UNIFIED = "unified"
    HYBRID = "hybrid"
    """cgroup v1, and v2 beside it without the controllers."""
    MISSING = "missing"
    """cgroup v1, or nothing."""
    PART = "part"
    """cgroup v2, seen from a cgroup namespace: not the top of it."""


class Verdict(StrEnum):
    """What one GPU's driver says to the calls for memory limits."""

    OFFERED = "offered"
    IN_DRIVER = "in-driver"
    """Offered, and kept in the driver itself."""
    REFUSED = "refused"
    UNTOLD = "untold"
    """Its answer may be due to the cgroup that it was asked about."""
    SILENT = "silent"
    """The GPU does not answer, for reasons of its own."""


class Answer(NamedTuple):
    """`text` is the driver's error, empty where limits are offered."""

    verdict: Verdict
    text: str = ""


class Facts(NamedTuple):
    """What was found. Where driver or hierarchy are not fit, nothing else is looked at.

    `gap`: the first cgroup on the way down to containers below which the kernel keeps no dmem limits, empty without;
    `gap_error`: why it could not be closed.
    """

    driver_version: str
    root: str
    hierarchy: Hierarchy
    dmem: bool = False
    """Whether the kernel keeps account of the driver's memory: it has a region of it."""
    gap: str = ""
    gap_error: str = ""
    answers: tuple[Answer, ...] = ()


def is_new_enough(driver_version: str) -> bool:
    """Whether the driver is of a branch that has memory limits."""
    match = re.match(r"\d{1,9}(?=\.|$)", driver_version)
    return match is not None and int(match.group()) >= MIN_DRIVER


def is_fit(driver_version: str, hierarchy: Hierarchy) -> bool:
    """Whether there is any use in looking further."""
    return is_new_enough(driver_version) and hierarchy is Hierarchy.UNIFIED


def judge(facts: Facts) -> HardLimits:
    """One reason for each thing that is missing, with what to do.

    Where the kernel has a region of the driver's memory, the driver keeps limits there unless it proved otherwise.
    """
    missing = []
    if not is_new_enough(facts.driver_version):
        missing.append(f"driver {facts.driver_version} has no memory limits: install {MIN_DRIVER} or newer")
    if facts.hierarchy is not Hierarchy.UNIFIED:
        missing.append(_of_hierarchy(facts))
    if not is_fit(facts.driver_version, facts.hierarchy):
        return HardLimits(missing=tuple(missing))
    in_kernel = facts.dmem and all(answer.verdict is not Verdict.IN_DRIVER for answer in facts.answers)
    if facts.gap and in_kernel:
        missing.append(_of_gap(facts))
    if reason := _of_calls(facts.answers):
        missing.append(reason)
    return HardLimits(backend="dmem" if in_kernel else "misc", missing=tuple(missing))


def _of_hierarchy(facts: Facts) -> str:
    unified = "boot with systemd.unified_cgroup_hierarchy=1"
    if facts.hierarchy is Hierarchy.HYBRID:
        return f"cgroup v2 is not at {facts.root} but beside v1, without its controllers: {unified}"
    if facts.hierarchy is Hierarchy.PART:
        return (
            f"{facts.root} is not the top of the cgroup hierarchy: mount the host's /sys/fs/cgroup there in mpsd's pod"
        )
    return f"{facts.root} is no cgroup v2: {unified}, and mount the host's /sys/fs/cgroup there in mpsd's pod"


def _of_gap(facts: Facts) -> str:
    gap = f"the kernel's dmem controller does not reach the cgroups below {facts.gap}"
    if facts.gap_error:
        return f"{gap}, and mpsd can't switch it on: {facts.gap_error}: run mpsd as root, with {facts.root} writable"
    return f"{gap}: set enforcement.enableDmem: true or enable it yourself: +dmem in each cgroup.subtree_control"


def _of_calls(answers: tuple[Answer, ...]) -> str:
    for answer in answers:
        if answer.verdict is Verdict.REFUSED:
            return f"the driver's calls for memory limits are not to be had: {answer.text}"
    if all(answer.verdict is Verdict.SILENT for answer in answers):
        why = answers[0].text if answers else "there is none without MIG that is well"
        return f"no GPU can be asked for memory limits: {why}"
    return ""
