"""Cgroups of pods (cgroup v2) as far as memory limits of GPUs need them: found by name, dmem files read and had.

Names: the kubelet's, with the systemd driver (`kubepods.slice/kubepods-burstable.slice/
kubepods-burstable-pod<UID>.slice`) or without (`kubepods/burstable/pod<UID>`), below a cgroup of the kubelet's own
where it has one. Files: `region bytes` per line; a cgroup has them if its parent's `cgroup.subtree_control` names dmem
(Linux, "Control Group v2", DMEM). A cgroup may go between any two reads: what can't be read counts as absent.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

MAX_BYTES = 1 << 16
MAX_PATH_BYTES = 4096

_BRANCH = re.compile(r"(?:.*-)?(?:kubelet|kubepods|burstable|besteffort|guaranteed)(?:\.slice)?")
_POD = re.compile(r"(?:kube.*-)?pod[0-9A-Za-z_-]+(?:\.slice)?")
_UNLIMITED = "max"
_UNLIMITED_BYTES = (1 << 64) - 1


def is_branch(path: str) -> bool:
    """Whether it is one of the cgroups between the root and those of pods."""
    return _BRANCH.fullmatch(os.path.basename(path)) is not None


def is_pod(path: str) -> bool:
    """Whether it is a pod's, given that it is below a branch."""
    return _POD.fullmatch(os.path.basename(path)) is not None


def branches(root: str) -> Iterator[str]:
    """All between the root and pods, each before those below it."""
    for path in children(root):
        if is_branch(path):
            yield path
            yield from branches(path)


def children(path: str) -> list[str]:
    """The cgroups directly below, by name."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def controllers(path: str, file: str = "cgroup.controllers") -> frozenset[str] | None:
    """What the file names, None where there is none."""
    text = read(f"{path}/{file}")
    return None if text is None else frozenset(text.split())


def has_dmem(path: str) -> bool:
    """Whether limits of GPU memory can be kept there, where the kernel keeps them."""
    return os.path.exists(f"{path}/dmem.max")


def lets_dmem_down(path: str) -> bool:
    """Whether cgroups made below will have dmem files."""
    return "dmem" in (controllers(path, "cgroup.subtree_control") or ())


def let_dmem_down(path: str) -> None:
    """Has the cgroups below, now and later, have dmem files. Raises OSError."""
    if not lets_dmem_down(path):
        with open(f"{path}/cgroup.subtree_control", "w", encoding="ascii") as file:
            file.write("+dmem")


def regions(path: str, file: str) -> Mapping[str, int]:
    """Bytes by region of a dmem file, those of NVIDIA GPUs; empty where there is no such file."""
    found = {}
    for line in (read(f"{path}/{file}") or "").splitlines():
        region, _, value = line.rpartition(" ")
        if region.startswith("nvidia/"):
            with contextlib.suppress(ValueError):
                found[region] = _UNLIMITED_BYTES if value == _UNLIMITED else int(value)
    return found


def region_of(pci_bus_id: str) -> str:
    """The region of a GPU's memory, e.g. `nvidia/00000000:02:00.0/vidmem` (seen on r615). NVML spells the address in
    upper case."""
    return f"nvidia/{pci_bus_id.lower()}/vidmem"


def objection(root: str, path: str) -> str:
    """Why a path from outside names no cgroup below the root, empty when it does."""
    if not path.startswith(f"{root}/") or os.path.normpath(path) != path or "\0" in path:
        return f"it must be a normalised path below {root}"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        return f"its path is longer than {MAX_PATH_BYTES} bytes"
    if not os.path.isdir(path):
        return "there is no such cgroup: its container may be gone"
    if os.path.realpath(path) != os.path.realpath(root) + path.removeprefix(root):
        return "a symbolic link is in its path"
    return ""


def read(path: str) -> str | None:
    """The beginning of a small file, None where it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return None
