"""Facts about driver, kernel and cgroups -> whether this node can hold containers to memory limits (pure)."""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from mpsd.common.reason import Reason
from mpsd.localapi.reasons import HardLimitCode
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
        text = f"driver {facts.driver_version} has no memory limits: install {MIN_DRIVER} or newer"
        missing.append(Reason(HardLimitCode.DRIVER_TOO_OLD, text))
    if facts.hierarchy is not Hierarchy.UNIFIED:
        missing.append(_of_hierarchy(facts))
    if not is_fit(facts.driver_version, facts.hierarchy):
        return _limits("", missing)
    in_kernel = facts.dmem and all(answer.verdict is not Verdict.IN_DRIVER for answer in facts.answers)
    if facts.gap and in_kernel:
        missing.append(_of_gap(facts))
    if reason := _of_calls(facts.answers):
        missing.append(reason)
    return _limits("dmem" if in_kernel else "misc", missing)


def _limits(backend: str, missing: Sequence[Reason]) -> HardLimits:
    return HardLimits(
        backend=backend,
        missing=tuple(reason.message for reason in missing),
        missing_codes=tuple(reason.code for reason in missing),
    )


def _of_hierarchy(facts: Facts) -> Reason:
    unified = "boot with systemd.unified_cgroup_hierarchy=1"
    if facts.hierarchy is Hierarchy.HYBRID:
        text = f"cgroup v2 is not at {facts.root} but beside v1, without its controllers: {unified}"
        return Reason(HardLimitCode.NO_CGROUP_V2, text)
    if facts.hierarchy is Hierarchy.PART:
        return Reason(
            HardLimitCode.NOT_THE_TOP,
            f"{facts.root} is not the top of the cgroup hierarchy: mount the host's /sys/fs/cgroup there in mpsd's pod",
        )
    text = f"{facts.root} is no cgroup v2: {unified}, and mount the host's /sys/fs/cgroup there in mpsd's pod"
    return Reason(HardLimitCode.NO_CGROUP_V2, text)


def _of_gap(facts: Facts) -> Reason:
    gap = f"the kernel's dmem controller does not reach the cgroups below {facts.gap}"
    if facts.gap_error:
        todo = f"run mpsd as root, with {facts.root} writable"
        return Reason(HardLimitCode.DMEM_NOT_ENABLED, f"{gap}, and mpsd can't switch it on: {facts.gap_error}: {todo}")
    todo = "set enforcement.enableDmem: true or enable it yourself: +dmem in each cgroup.subtree_control"
    return Reason(HardLimitCode.DMEM_GAP, f"{gap}: {todo}")


def _of_calls(answers: tuple[Answer, ...]) -> Reason | None:
    for answer in answers:
        if answer.verdict is Verdict.REFUSED:
            text = f"the driver's calls for memory limits can't be made: {answer.text}"
            return Reason(HardLimitCode.REFUSED, text)
    if all(answer.verdict is Verdict.SILENT for answer in answers):
        why = answers[0].text if answers else "there is none without MIG that is well"
        return Reason(HardLimitCode.NO_GPU_TO_ASK, f"no GPU can be asked for memory limits: {why}")
    return None
