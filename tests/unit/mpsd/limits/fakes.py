"""A kernel and a driver that keep memory limits of cgroups in a directory of the test, as documented for r615."""

import os
from pathlib import Path

from mpsd.gpu.backend import GpuError, GpuNotSupportedError, MemoryLimits, NoLimitError
from tests.unit.mpsd.supervision.fakes import FakeBackend

GPU = "GPU-1"
BUS_ID = "00000000:02:00.0"
REGION = f"nvidia/{BUS_ID}/vidmem"
BURSTABLE = "kubepods.slice/kubepods-burstable.slice"
POD = f"{BURSTABLE}/kubepods-burstable-pod1_2.slice"


class Kernel(FakeBackend):
    """`mode`: where the driver keeps limits: dmem, misc or off. Files act when the driver is called, or by `settle`."""

    def __init__(self, root: Path, *cgroups: str, mode: str = "dmem") -> None:
        super().__init__()
        self.cgroup_root = str(root / "cgroup")
        self.mode = mode
        self.write("", "cgroup.controllers", "cpu dmem\n")
        self.write("", "cgroup.subtree_control", "cpu dmem\n")
        self.write("", "dmem.capacity", f"{REGION} 85899345920\n")
        for cgroup in cgroups:
            self.make(cgroup)

    def path(self, cgroup: str) -> str:
        return f"{self.cgroup_root}/{cgroup}" if cgroup else self.cgroup_root

    def write(self, cgroup: str, file: str, text: str) -> None:
        os.makedirs(self.path(cgroup), exist_ok=True)
        Path(self.path(cgroup), file).write_text(text)

    def make(self, cgroup: str, *, delegate: bool = True) -> str:
        """Makes a cgroup and those above it; all of them pass dmem on, unless `delegate` says otherwise."""
        path = self.cgroup_root
        for part in cgroup.split("/"):
            path = f"{path}/{part}"
            os.makedirs(path, exist_ok=True)
            if delegate:
                Path(path, "cgroup.subtree_control").write_text("dmem")
        self.settle()
        return path

    def settle(self) -> None:
        for place, names, files in os.walk(self.cgroup_root):
            passed = ""
            if "cgroup.subtree_control" in files:
                passed = Path(place, "cgroup.subtree_control").read_text().replace("+", "")
                Path(place, "cgroup.subtree_control").write_text(passed)
            for name in names:
                for file, value in (("dmem.max", "max"), ("dmem.min", "0")):
                    if "dmem" in passed and not (path := Path(place, name, file)).exists():
                        path.write_text(f"{REGION} {value}\n")

    def remove(self, cgroup: str) -> None:
        """As when a container ends: nobody clears anything."""
        for name in os.listdir(self.path(cgroup)):
            os.unlink(f"{self.path(cgroup)}/{name}")
        os.rmdir(self.path(cgroup))

    def minimum(self, cgroup: str) -> int:
        return int(Path(self.path(cgroup), "dmem.min").read_text().split()[1])

    def memory_limits(self, uuid: str, cgroup: str) -> MemoryLimits:
        self._enter("memory_limits", uuid)
        self.settle()
        if self.mode == "dmem":
            if not os.path.exists(f"{cgroup}/dmem.max"):
                raise GpuNotSupportedError("Not Supported", 3)
            hard = Path(cgroup, "dmem.max").read_text().split()[1]
            return MemoryLimits(self._soft(cgroup), None if hard == "max" else int(hard))
        if self.mode == "off" or (uuid, cgroup) not in self.limits:
            raise GpuNotSupportedError("Not Supported", 3)
        return self.limits[uuid, cgroup]

    def set_memory_limits(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        self._enter("set_memory_limits", uuid)
        if self.mode == "off":
            raise GpuNotSupportedError("Not Supported", 3)
        if self.mode == "misc":
            self.limits[uuid, cgroup] = MemoryLimits(soft_bytes, hard_bytes)
            return
        if not os.path.exists(f"{cgroup}/dmem.max"):
            raise NoLimitError("Not Found", 6)
        if not cgroup.startswith(self.cgroup_root):
            raise GpuError("Invalid Argument", 2)
        grown = soft_bytes - self._soft(cgroup)
        Path(cgroup, "dmem.max").write_text(f"{REGION} {'max' if hard_bytes is None else hard_bytes}\n")
        while os.path.exists(f"{cgroup}/dmem.min"):
            Path(cgroup, "dmem.min").write_text(f"{REGION} {self._soft(cgroup) + grown}\n")
            cgroup = os.path.dirname(cgroup)

    def _soft(self, cgroup: str) -> int:
        return int(Path(cgroup, "dmem.min").read_text().split()[1])
