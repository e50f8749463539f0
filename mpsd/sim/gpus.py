"""Simulated GPUs behind `mpsd.gpu.backend.GpuBackend`, as NVML is: over a simulated driver's directory."""

import os
import threading
from collections.abc import Sequence

from mpsd.gpu.backend import (
    GpuBackend,
    GpuError,
    GpuLostError,
    GpuNotSupportedError,
    MemoryLimits,
    NoLimitError,
    XidEvent,
)
from mpsd.gpu.model import ComputeMode, GpuInfo, GpuProcess
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.files import names_in
from mpsd.sim.memorylimits import LimitError
from mpsd.sim.model import SimulatedGpuFacts

UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 1, 3, 4, 6
DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, UNKNOWN = 9, 13, 15, 18, 999
"""nvmlReturn_t"""

_TICK_S = 0.25


class SimulatedBackend:
    """GPUs of the simulated driver in `directory`. Faults are read at each call.

    A hanging call returns when its fault is cleared or the backend closes.
    """

    def __init__(self, directory: str) -> None:
        self._driver = SimulatedDriver(directory)
        self._closed = threading.Event()
        self._closed.set()
        self._lock = threading.Lock()
        self._version = ""
        self._xid_offset = 0

    def open(self) -> None:
        """See GpuBackend."""
        text = self._driver.fault("init-error")
        if text is not None:
            raise GpuError(
                f"cannot initialise the simulated driver: {text.strip() or 'Driver Not Loaded'}", DRIVER_NOT_LOADED
            )
        try:
            version = self._driver.version()
        except FileNotFoundError as error:
            raise GpuError(str(error), DRIVER_NOT_LOADED) from error
        with self._lock:
            self._version = version
            self._xid_offset = self._xid_size()  # only events from now on, as event registration does
        self._closed.clear()

    def close(self) -> None:
        """See GpuBackend."""
        self._closed.set()

    def driver_version(self) -> str:
        """See GpuBackend."""
        self._enter("driver_version")
        return self._version

    def uuids(self) -> Sequence[str]:
        """See GpuBackend."""
        self._enter("uuids")
        self._driver.settle_cgroups()
        return tuple(gpu.uuid for gpu in self._gpus() if not self._driver.lost(gpu.uuid))

    def unnamed(self) -> int:
        """See GpuBackend."""
        return sum(self._driver.lost(gpu.uuid) for gpu in self._gpus())

    def info(self, uuid: str) -> GpuInfo:
        """See GpuBackend."""
        gpu = self._enter_gpu("info", uuid)
        missing = [self._driver.fault("not-supported"), self._driver.fault("not-supported", uuid)]

        def offers(fact: str) -> bool:
            return not any(names_in(text, fact) for text in missing)

        return GpuInfo(
            uuid=gpu.uuid,
            index=gpu.index,
            name=gpu.name,
            memory_total_bytes=gpu.memory_bytes,
            memory_reserved_bytes=gpu.reserved_bytes if offers("reserved") else 0,
            compute_capability=gpu.compute_capability if offers("compute_capability") else (0, 0),
            numa_node=gpu.numa_node if offers("numa_node") else None,
            pci_bus_id=gpu.pci_bus_id if offers("pci_bus_id") else "",
        )

    def compute_mode(self, uuid: str) -> ComputeMode:
        """See GpuBackend."""
        self._enter_gpu("compute_mode", uuid)
        try:
            return ComputeMode(self._driver.compute_mode(uuid))
        except ValueError:
            return ComputeMode.UNKNOWN

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        """See GpuBackend."""
        self._enter_gpu("set_compute_mode", uuid)
        if mode is ComputeMode.UNKNOWN:
            raise GpuError("cannot set the compute mode of a GPU to UNKNOWN: name one of the others", 2)
        self._driver.set_compute_mode(uuid, mode.value)

    def processes(self, uuid: str) -> Sequence[GpuProcess]:
        """See GpuBackend. MPS servers are among them, as the driver reports them."""
        self._enter_gpu("processes", uuid)
        return tuple(GpuProcess(pid=c.pid, used_bytes=c.used_bytes) for c in self._driver.contexts(uuid))

    def recovery_action(self, uuid: str) -> int:
        """See GpuBackend."""
        self._enter_gpu("recovery_action", uuid)
        return int(self._driver.fault("recovery-action", uuid) or 0)

    @property
    def cgroup_root(self) -> str:
        """Where this node's cgroups are."""
        return self._driver.cgroups.root

    def memory_limits(self, uuid: str, cgroup: str) -> MemoryLimits:
        """See GpuBackend."""
        gpu = self._enter_gpu("memory_limits", uuid)
        try:
            limits, used_bytes = self._driver.memory_limits(gpu, cgroup)
        except LimitError as error:
            raise _refused("read", error) from error
        return MemoryLimits(limits.soft_bytes, limits.hard_bytes, used_bytes)

    def set_memory_limits(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        """See GpuBackend."""
        gpu = self._enter_gpu("set_memory_limits", uuid)
        try:
            self._driver.set_memory_limits(gpu, cgroup, soft_bytes, hard_bytes)
        except LimitError as error:
            raise _refused("set", error) from error

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        """See GpuBackend. Returns None early when the backend closes."""
        self._enter("wait_xid")
        remaining_s = timeout_s
        while True:
            event = self._next_xid()
            if event is not None or remaining_s <= 0:
                return event
            if self._closed.wait(min(_TICK_S, remaining_s)):
                return None
            remaining_s -= _TICK_S

    def _xid_size(self) -> int:
        try:
            return os.stat(self._driver.xid_path).st_size
        except FileNotFoundError:
            return 0

    def _next_xid(self) -> XidEvent | None:
        with self._lock:
            while self._xid_size() > self._xid_offset:
                with open(self._driver.xid_path, "rb") as file:
                    file.seek(self._xid_offset)
                    line = file.readline()
                if not line.endswith(b"\n"):
                    return None  # an operator is still writing it
                self._xid_offset += len(line)
                words = line.decode(errors="replace").split()
                if len(words) == 2 and words[1].isdigit():
                    return XidEvent(words[0], int(words[1]))
        return None

    def _gpus(self) -> list[SimulatedGpuFacts]:
        try:
            return self._driver.gpus()
        except FileNotFoundError as error:
            raise GpuError(str(error), DRIVER_NOT_LOADED) from error

    def _enter(self, call: str, uuid: str | None = None) -> None:
        """What every call goes through: state of the library, then the faults of the node, then those of the GPU."""
        if self._closed.is_set():
            raise GpuError(f"cannot call {call} of the simulated driver: open it first", UNINITIALIZED)
        for scope in (None,) if uuid is None else (None, uuid):
            while names_in(self._driver.fault("hang", scope), call):
                if self._closed.wait(_TICK_S):
                    raise GpuError(f"cannot finish {call}: the simulated driver was closed", UNINITIALIZED)
            if names_in(self._driver.fault("not-supported", scope), call):
                raise GpuNotSupportedError(f"cannot call {call}: Not Supported", NOT_SUPPORTED)
            if names_in(self._driver.fault("no-permission", scope), call):
                raise GpuError(f"cannot call {call}: Insufficient Permissions; run as root", NO_PERMISSION)
            if names_in(self._driver.fault("fail", scope), call):
                raise GpuError(f"cannot call {call}: Unknown Error", UNKNOWN)
        try:
            version = self._driver.version()
        except FileNotFoundError as error:
            raise GpuError(str(error), DRIVER_NOT_LOADED) from error
        if version != self._version:
            raise GpuError(
                f"cannot call {call}: Driver/library version mismatch ({self._version}, now {version}); open again",
                LIB_RM_VERSION_MISMATCH,
            )

    def _enter_gpu(self, call: str, uuid: str) -> SimulatedGpuFacts:
        self._enter(call, uuid)
        if self._driver.lost(uuid):
            raise GpuLostError(f"cannot reach GPU {uuid}: GPU is lost; reset it or reboot the node", GPU_IS_LOST)
        gpu = next((gpu for gpu in self._gpus() if gpu.uuid == uuid), None)
        if gpu is None:
            raise GpuLostError(f"cannot find GPU {uuid}: Not Found", NOT_FOUND)
        return gpu


def _refused(verb: str, error: LimitError) -> GpuError:
    kind = {NOT_FOUND: NoLimitError, NOT_SUPPORTED: GpuNotSupportedError, FUNCTION_NOT_FOUND: GpuNotSupportedError}
    return kind.get(error.code, GpuError)(f"cannot {verb} memory limits: {error}", error.code)


_proof: type[GpuBackend] = SimulatedBackend
