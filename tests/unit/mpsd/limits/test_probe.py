"""Facts are found in a tree of cgroups and a driver's answers, whatever of it is missing."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mpsd.gpu.backend import GpuError, GpuLostError, GpuNotSupportedError
from mpsd.limits.probe import Probed, probe
from tests.unit.mpsd.limits.fakes import BURSTABLE, GPU, POD, Kernel

CONTAINER = f"{POD}/cri-containerd-1.scope"
CGROUPFS = "kubepods/burstable/pod1-2"


def look(kernel: Kernel, driver: str = "615.71.09", *, enable_dmem: bool = False) -> Probed:
    return probe(kernel, driver, (GPU,), enable_dmem=enable_dmem)


def the_reason(probed: Probed) -> str:
    (reason,) = probed.limits.missing
    return reason


@pytest.mark.parametrize(
    "pod",
    [POD, CGROUPFS, "kubepods.slice/kubepods-pod1_2.slice", "kubepods/pod0123456789abcdef",
     "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod1.slice"],
)  # fmt: skip
def test_a_pod_of_either_cgroup_driver_is_proof(short_tmp: Path, pod: str) -> None:
    kernel = Kernel(short_tmp, "system.slice/x.service", f"{pod}/c1")
    probed = look(kernel)
    assert (probed.limits.backend, probed.limits.missing) == ("dmem", ())
    assert (probed.judged_by, probed.final) == (kernel.path(pod), True)


@pytest.mark.parametrize(("cgroups", "stand_in"), [((), ""), (("kubepods.slice",), "kubepods.slice")])
def test_without_pods_the_way_to_them_has_to_do_for_now(
    short_tmp: Path, cgroups: tuple[str, ...], stand_in: str
) -> None:
    kernel = Kernel(short_tmp, *cgroups)
    probed = look(kernel)
    assert (probed.limits.missing, probed.judged_by, probed.final) == ((), kernel.path(stand_in), False)
    kernel.write("", "cgroup.subtree_control", "cpu")
    for cgroup in cgroups:
        os.unlink(f"{kernel.path(cgroup)}/dmem.max")
    assert f"below {kernel.cgroup_root}:" in the_reason(look(kernel))


def stop_at(kernel: Kernel, cgroup: str) -> None:
    """Dmem reaches no cgroup below this one."""
    for place, _, files in os.walk(kernel.path(cgroup)):
        Path(place, "cgroup.subtree_control").write_text("cpu")
        if place != kernel.path(cgroup) and "dmem.max" in files:
            os.unlink(f"{place}/dmem.max")


@pytest.mark.parametrize("cgroup", ["", "kubepods.slice", BURSTABLE, POD])
def test_where_dmem_ends_is_told_and_closed_only_on_demand(short_tmp: Path, cgroup: str) -> None:
    kernel = Kernel(short_tmp, CONTAINER)
    stop_at(kernel, cgroup)
    assert f"below {kernel.path(cgroup)}:" in the_reason(look(kernel))
    assert Path(kernel.path(cgroup), "cgroup.subtree_control").read_text() == "cpu"
    for _ in range(2):
        assert look(kernel, enable_dmem=True).limits.missing == ()
    assert os.path.exists(f"{kernel.path(CONTAINER)}/dmem.max")


def test_dmem_that_cannot_be_switched_on(short_tmp: Path) -> None:
    kernel = Kernel(short_tmp, CONTAINER)
    stop_at(kernel, POD)
    os.unlink(f"{kernel.path(POD)}/cgroup.subtree_control")
    os.mkdir(f"{kernel.path(POD)}/cgroup.subtree_control")
    assert f"cannot write {kernel.path(POD)}/cgroup.subtree_control" in the_reason(look(kernel, enable_dmem=True))


def no_v2(kernel: Kernel) -> None:
    os.unlink(f"{kernel.cgroup_root}/cgroup.controllers")


def hybrid(kernel: Kernel) -> None:
    no_v2(kernel)
    kernel.write("unified", "cgroup.controllers", "")


def namespaced(kernel: Kernel) -> None:
    kernel.write("", "cgroup.type", "domain")


@pytest.mark.parametrize(
    ("spoil", "words"), [(no_v2, "is no cgroup v2"), (hybrid, "beside v1"), (namespaced, "is not the top")]
)
def test_another_hierarchy(short_tmp: Path, spoil: Callable[[Kernel], None], words: str) -> None:
    kernel = Kernel(short_tmp, CONTAINER)
    spoil(kernel)
    assert words in the_reason(look(kernel, enable_dmem=True))


def test_an_old_driver_is_not_asked(short_tmp: Path) -> None:
    kernel = Kernel(short_tmp, CONTAINER)
    kernel.fail["memory_limits"] = AssertionError()  # type: ignore[assignment]
    assert "580.95.05" in the_reason(look(kernel, "580.95.05"))


@pytest.mark.parametrize("capacity", [True, False])
def test_a_driver_that_keeps_limits_in_itself_is_told_from_one_that_keeps_none(short_tmp: Path, capacity: bool) -> None:
    kernel = Kernel(short_tmp, CONTAINER, mode="misc")
    if not capacity:
        os.unlink(f"{kernel.cgroup_root}/dmem.capacity")
    for _ in range(2):
        probed = look(kernel)
        assert (probed.limits.backend, probed.limits.missing) == ("misc", ())
        kernel.limits.clear()
    kernel.mode = "off"
    assert "Not Supported" in the_reason(look(kernel))


def test_limits_of_the_root_are_never_touched(short_tmp: Path) -> None:
    kernel = Kernel(short_tmp, mode="misc")
    kernel.fail["set_memory_limits"] = AssertionError()  # type: ignore[assignment]
    assert look(kernel).limits.missing == ()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("memory_limits", GpuNotSupportedError("Function Not Found", 13), "Function Not Found"),
        ("memory_limits", GpuError("Insufficient Permissions", 4), "Insufficient Permissions"),
        ("memory_limits", GpuError("Unknown Error", 999), "no GPU can be asked for memory limits: Unknown Error"),
        ("memory_limits", GpuLostError("lost", 15), "no GPU can be asked for memory limits: lost"),
        ("set_memory_limits", GpuError("Insufficient Permissions", 4), "Insufficient Permissions"),
        ("set_memory_limits", GpuLostError("lost", 15), "no GPU can be asked for memory limits: lost"),
    ],
)
def test_what_the_driver_says_is_passed_on(short_tmp: Path, call: str, error: GpuError, words: str) -> None:
    kernel = Kernel(short_tmp, CONTAINER, mode="misc")
    kernel.fail[call] = error
    assert words in the_reason(look(kernel))
