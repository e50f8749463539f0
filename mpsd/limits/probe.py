"""Looks whether memory limits of containers can be set and will hold here: cgroups, dmem, the driver's calls.

Real cgroups of pods stand for those to come. Where no pod is, as on a simulated node that just began, the deepest
cgroup on the way to them does: what is found is only as good as that, so look again once there is one.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from mpsd.gpu.backend import GpuBackend, GpuError, GpuLostError, GpuNotSupportedError, NoLimitError
from mpsd.limits import cgroups
from mpsd.limits.judge import Answer, Facts, Hierarchy, Verdict, is_fit, judge
from mpsd.localapi.snapshot import HardLimits

_NOT_SUPPORTED, _NO_PERMISSION = 3, 4
"""nvmlReturn_t"""


class Probed(NamedTuple):
    """`judged_by`: the cgroup that stood for those of containers; `final`: it is a pod's."""

    limits: HardLimits
    judged_by: str
    final: bool


def probe(backend: GpuBackend, driver_version: str, uuids: Sequence[str], *, enable_dmem: bool) -> Probed:
    """Asks kernel and driver. May hang where the driver does.

    Args:
        uuids: the GPUs to ask, all must offer limits: MIG can't, and one that hangs would keep the others waiting.
        enable_dmem: whether the dmem controller may be switched on, from the root down to pods.
    """
    root = backend.cgroup_root
    hierarchy = _hierarchy(root)
    if not is_fit(driver_version, hierarchy):
        return Probed(judge(Facts(driver_version, root, hierarchy)), root, final=True)
    pods = [path for branch in cgroups.branches(root) for path in cgroups.children(branch) if cgroups.is_pod(path)]
    target = pods[0] if pods else max(cgroups.branches(root), key=len, default=root)
    dmem = bool(cgroups.regions(root, "dmem.capacity"))
    gap = _gap(root, pods) if dmem else ""
    gap_error = _enable(root, pods) if gap and enable_dmem else ""
    answers = tuple(_ask(backend, uuid, target) for uuid in uuids)
    gap = _gap(root, pods) if gap else ""
    facts = Facts(driver_version, root, hierarchy, dmem, gap, gap_error, answers)
    return Probed(judge(facts), target, final=bool(pods))


def _hierarchy(root: str) -> Hierarchy:
    if cgroups.controllers(root) is not None:
        # All but the top have a type ("Control Group v2", Core Interface Files).
        return Hierarchy.PART if os.path.exists(f"{root}/cgroup.type") else Hierarchy.UNIFIED
    return Hierarchy.HYBRID if cgroups.controllers(f"{root}/unified") is not None else Hierarchy.MISSING


def _gap(root: str, pods: Sequence[str]) -> str:
    """The cgroup below which dmem ends before it reaches containers, empty without. The kernel leaves no holes: who has
    dmem files has ancestors that have them."""
    for pod in pods:
        if not cgroups.has_dmem(pod):
            return _end(root, os.path.dirname(pod))
        containers = cgroups.children(pod)
        if containers and not any(cgroups.has_dmem(container) for container in containers):
            return pod
    if pods:
        return ""
    for branch in cgroups.branches(root):  # whoever made this one makes pods, too
        if not cgroups.has_dmem(branch):
            return _end(root, os.path.dirname(branch))
    return "" if any(cgroups.branches(root)) or cgroups.lets_dmem_down(root) else root


def _end(root: str, path: str) -> str:
    """The highest cgroup from the root to `path` that does not let dmem down; `path` where all say they do."""
    end = path
    while path != root:
        path = os.path.dirname(path)
        end = end if cgroups.lets_dmem_down(path) else path
    return end


def _enable(root: str, pods: Sequence[str]) -> str:
    """From the root down to pods, which the kernel demands; says what is in the way. A pod that goes meanwhile is not.

    Pods to come have it from their runtime, which enables what their parents have (runc does).
    """
    try:
        for path in (root, *cgroups.branches(root)):
            cgroups.let_dmem_down(path)
        for pod in pods:
            if os.path.isdir(pod):
                cgroups.let_dmem_down(pod)
    except OSError as error:
        return f"cannot write {error.filename}: {error.strerror}"
    return ""


def _ask(backend: GpuBackend, uuid: str, cgroup: str) -> Answer:
    try:
        backend.memory_limits(uuid, cgroup)
    except NoLimitError:
        return Answer(Verdict.OFFERED)
    except GpuNotSupportedError as error:
        if error.code != _NOT_SUPPORTED:
            return Answer(Verdict.REFUSED, str(error))
        if cgroup == backend.cgroup_root:
            return Answer(Verdict.UNTOLD, str(error))
        return _try_clearing(backend, uuid, cgroup)
    except GpuError as error:
        return Answer(Verdict.REFUSED if error.code == _NO_PERMISSION else Verdict.SILENT, str(error))
    return Answer(Verdict.OFFERED)


def _try_clearing(backend: GpuBackend, uuid: str, cgroup: str) -> Answer:
    """Asked about a cgroup where no limit is near, a driver that keeps limits in itself says NOT_SUPPORTED, as does one
    that has none at all. Taking away limits that are not there changes nothing, and tells them apart."""
    try:
        backend.set_memory_limits(uuid, cgroup, 0, None)
    except NoLimitError as error:
        return Answer(Verdict.UNTOLD, str(error))
    except GpuLostError as error:
        return Answer(Verdict.SILENT, str(error))
    except GpuError as error:
        return Answer(Verdict.REFUSED, str(error))
    return Answer(Verdict.IN_DRIVER)
