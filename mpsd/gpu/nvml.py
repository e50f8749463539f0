"""The real GPUs: `GpuBackend` over NVIDIA's binding nvidia-ml-py, the only importer of it. Vendor errors end here.

Numbers are NVML's return codes (nvmlReturn_t). NVML itself may be called from several threads.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from mpsd.gpu.backend import GpuError, GpuLostError, GpuNotSupportedError, MemoryLimits, NoLimitError, XidEvent
from mpsd.gpu.model import ComputeMode, GpuInfo, GpuProcess

_UNINITIALIZED, _INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND, _INSUFFICIENT_SIZE = 1, 2, 3, 4, 6, 7
_DRIVER_NOT_LOADED, _TIMEOUT, _LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND = 9, 10, 12, 13
_GPU_IS_LOST, _RESET_REQUIRED, _VERSION_MISMATCH, _ARGUMENT_VERSION_MISMATCH, _GPU_NOT_FOUND = 15, 16, 18, 25, 28

_LOST: Final = frozenset({_GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND})
_NOT_OFFERED: Final = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH})

_ADVICE: Final = {
    _NO_PERMISSION: "run as root",
    _DRIVER_NOT_LOADED: "load the nvidia kernel module (modprobe nvidia) and look for its messages in the kernel log",
    _LIBRARY_NOT_FOUND: "install the NVIDIA driver, or make libnvidia-ml.so.1 visible to this process",
    _GPU_IS_LOST: "look for XID messages in the kernel log; the GPU needs a reset or the node a reboot",
    _RESET_REQUIRED: "stop its processes and reset it with `nvidia-smi --gpu-reset`",
    _VERSION_MISMATCH: "the driver's libraries were updated while its old kernel module stays loaded: "
    "reload the module or reboot the node, then restart this process",
}

_LIMIT_ADVICE: Final = _ADVICE | {
    _NO_PERMISSION: "run as root; the driver says this, too, where the node can't hold limits: it takes cgroup v2",
    _NOT_SUPPORTED: "it takes driver r615 or newer with memory accounting on (no RmMemacctMode=0), and no MIG",
    _FUNCTION_NOT_FOUND: "libnvidia-ml.so.1 is older than driver r615: upgrade the driver",
    _NOT_FOUND: "there is no limit on this cgroup, or it has no dmem files",
}
"""NVML API reference, nvmlDeviceSetMemoryLimits_v1, and NVIDIA's documentation of memory partitioning (r615)."""

_COMPUTE_MODES: Final = {0: ComputeMode.DEFAULT, 2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE_PROCESS}
"""nvmlComputeMode_t. 1 is EXCLUSIVE_THREAD, gone since CUDA 8."""

_RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION."""

_EVENT_SLICE_MS = 500
"""Longest single wait for events, so that close() never waits longer for it."""
_IDLE_S = 2.0
"""Longest wait of close() for calls in other threads."""


class NvmlBackend:
    """`GpuBackend` on libnvidia-ml.so.1. `sysfs` is where the kernel's PCI devices are read (NUMA node)."""

    cgroup_root = "/sys/fs/cgroup"

    def __init__(self, sysfs: str = "/sys") -> None:
        self._sysfs = sysfs
        self._nvml: Any = None
        self._lock = threading.Lock()  # open and close, one at a time
        self._initialised = False
        self._calls = 0
        self._idle = threading.Condition()
        self._listed: tuple[str, ...] = ()
        self._unnamed = 0
        self._events_lock = threading.Lock()  # the event set, held while waiting on it, and to drop it
        self._events: Any = None
        self._events_of: tuple[str, ...] = ()
        self._event_devices: dict[int, str] = {}

    def open(self) -> None:
        """Initialises NVML, afresh when it already was. Raises GpuError with what to do."""
        with self._lock:
            self._shutdown()
            import pynvml  # 17 ms and 5 MiB: only where there is hardware to ask

            self._nvml = pynvml
            with self._translated("initialise NVML"):
                pynvml.nvmlInit()
            self._initialised = True

    def close(self) -> None:
        """Releases NVML; never raises. Calls in other threads may finish first; later ones fail."""
        with self._lock:
            self._shutdown()

    def _shutdown(self) -> None:
        if not self._initialised:
            return  # NVML counts initialisations: one too many shutdowns would end another user's
        self._initialised = False
        with self._idle:
            if not self._idle.wait_for(lambda: self._calls == 0, _IDLE_S):
                return  # shutting NVML down under a hanging call is worse than leaving it open
        # A waiting thread that comes now finds NVML closed, and drops the events as well: one of us at a time.
        with self._events_lock:
            self._drop_events()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def driver_version(self) -> str:
        with self._translated("read the driver version"):
            return _text(self._api().nvmlSystemGetDriverVersion())

    def uuids(self) -> Sequence[str]:
        with self._translated("count the GPUs"):
            count = int(self._api().nvmlDeviceGetCount())
            found = tuple(uuid for index in range(count) if (uuid := self._uuid_at(index)))
        self._listed, self._unnamed = found, count - len(found)
        return found

    def unnamed(self) -> int:
        return self._unnamed

    def info(self, uuid: str) -> GpuInfo:
        with self._translated("read", uuid):
            nvml, device = self._api(), self._device(uuid)
            total_bytes, reserved_bytes = self._memory(device)
            current_mig, _ = _offered(lambda: nvml.nvmlDeviceGetMigMode(device), (0, 0))
            pci = _offered(lambda: nvml.nvmlDeviceGetPciInfo(device), None)
            return GpuInfo(
                uuid=uuid,
                index=int(nvml.nvmlDeviceGetIndex(device)),
                name=_text(_offered(lambda: nvml.nvmlDeviceGetName(device), "")),
                memory_total_bytes=total_bytes,
                memory_reserved_bytes=reserved_bytes,
                compute_capability=_offered(lambda: nvml.nvmlDeviceGetCudaComputeCapability(device), (0, 0)),
                numa_node=self._numa_node(device, pci),
                pci_bus_id=_text(pci.busId) if pci is not None else "",
                mig_enabled=current_mig == 1,
            )

    def compute_mode(self, uuid: str) -> ComputeMode:
        with self._translated("read the compute mode of", uuid):
            return _COMPUTE_MODES.get(self._api().nvmlDeviceGetComputeMode(self._device(uuid)), ComputeMode.UNKNOWN)

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        numbers = {known: number for number, known in _COMPUTE_MODES.items()}
        if mode not in numbers:
            raise GpuError(f"cannot set the compute mode of GPU {uuid} to {mode}: the driver has no such mode")
        with self._translated(f"set the compute mode {mode} of", uuid):
            self._api().nvmlDeviceSetComputeMode(self._device(uuid), numbers[mode])

    def processes(self, uuid: str) -> Sequence[GpuProcess]:
        """Ordered by PID, each once: a driver may list an MPS client among the compute processes, too."""
        with self._translated("list the processes of", uuid):
            nvml, device = self._api(), self._device(uuid)
            listed = (
                *_processes(nvml, device, "nvmlDeviceGetComputeRunningProcesses"),
                *_processes(nvml, device, "nvmlDeviceGetMPSComputeRunningProcesses"),
            )
        used: dict[int, int | None] = {}
        for process in listed:
            known = [b for b in (used.get(process.pid), process.usedGpuMemory) if b is not None]
            used[int(process.pid)] = max(known, default=None)
        return tuple(GpuProcess(pid=pid, used_bytes=used_bytes) for pid, used_bytes in sorted(used.items()))

    def recovery_action(self, uuid: str) -> int:
        """Field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which older drivers and bindings lack."""
        with self._translated("read the recovery action of", uuid):
            nvml = self._api()
            (value,) = nvml.nvmlDeviceGetFieldValues(self._device(uuid), [_RECOVERY_ACTION])
            if value.nvmlReturn == _INVALID_ARGUMENT:  # of a field that it does not know
                raise nvml.NVMLError(_NOT_SUPPORTED)
            if value.nvmlReturn:
                raise nvml.NVMLError(value.nvmlReturn)
            return int(value.value.uiVal)

    def memory_limits(self, uuid: str, cgroup: str) -> MemoryLimits:
        with self._translated(f"read the memory limits of {cgroup} on", uuid, _LIMIT_ADVICE, NoLimitError):
            nvml = self._api()
            limits = nvml.c_nvmlGetMemoryLimits_v1_t(os.fsencode(cgroup))
            nvml.nvmlDeviceGetMemoryLimits_v1(self._device(uuid), limits)
            hard_bytes = None if limits.hardLimit == nvml.NVML_DEVICE_MEMORY_LIMIT_MAX else int(limits.hardLimit)
            return MemoryLimits(int(limits.softLimit), hard_bytes, int(limits.currentUsed))

    def set_memory_limits(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        with self._translated(f"set the memory limits of {cgroup} on", uuid, _LIMIT_ADVICE, NoLimitError):
            nvml = self._api()
            hard = nvml.NVML_DEVICE_MEMORY_LIMIT_MAX if hard_bytes is None else hard_bytes
            limits = nvml.c_nvmlSetMemoryLimits_v1_t(os.fsencode(cgroup), soft_bytes, hard)
            nvml.nvmlDeviceSetMemoryLimits_v1(self._device(uuid), limits)

    def wait_xid(self, timeout_s: float) -> XidEvent | None:
        """Events of the GPUs last listed by uuids(); one that can't be registered is left out."""
        slices = max(1, round(timeout_s * 1000 / _EVENT_SLICE_MS))
        for _ in range(slices):
            with self._events_lock, self._translated("wait for XID events"):
                try:
                    event = self._next_event(min(_EVENT_SLICE_MS, max(1, int(timeout_s * 1000))))
                except Exception:
                    self._drop_events()  # registered afresh by the next call, without the GPUs that are lost
                    raise
            if event is not None:
                return event
        return None

    def _next_event(self, wait_ms: int) -> XidEvent | None:
        nvml = self._api()
        if self._events is None or self._events_of != self._listed:
            self._register_events(self._listed)
        try:
            data = nvml.nvmlEventSetWait(self._events, wait_ms)
        except nvml.NVMLError as exc:
            if exc.value == _TIMEOUT:
                return None
            raise
        if data.eventType != nvml.nvmlEventTypeXidCriticalError:
            return None
        # A GPU that fell off the bus no longer tells its UUID: the handle is looked up among the registered ones.
        uuid = self._event_devices.get(_address(data.device)) or _text(nvml.nvmlDeviceGetUUID(data.device))
        return XidEvent(uuid=uuid, xid=int(data.eventData))

    def _register_events(self, uuids: tuple[str, ...]) -> None:
        self._drop_events()
        nvml, devices = self._nvml, dict[int, str]()
        self._events = nvml.nvmlEventSetCreate()
        for uuid in uuids:
            with suppress(nvml.NVMLError):
                device = self._device(uuid)
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, self._events)
                devices[_address(device)] = uuid
        if not devices:
            raise GpuNotSupportedError("cannot wait for XID events: no GPU of this node offers them", _NOT_SUPPORTED)
        self._events_of, self._event_devices = uuids, devices

    def _drop_events(self) -> None:
        """With the events lock: a set that is freed twice, or under a wait, is a crash in the driver's library."""
        events, self._events = self._events, None
        self._events_of, self._event_devices = (), {}
        if events is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(events)

    def _api(self) -> Any:
        if not self._initialised:
            raise GpuError("cannot use NVML: it is not open", _UNINITIALIZED)
        return self._nvml

    def _uuid_at(self, index: int) -> str | None:
        nvml = self._nvml
        try:
            return _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError:
            return None

    def _device(self, uuid: str) -> Any:
        """The handle, looked up each time: indices shift when a GPU leaves the bus.

        The look-up by UUID is documented to fail with GPU_IS_LOST when *any* GPU is lost, so the others are then
        found by index (NVML API reference, nvmlDeviceGetHandleByUUID).
        """
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as exc:
            if exc.value == _NOT_FOUND:
                raise nvml.NVMLError(_GPU_NOT_FOUND) from exc
            if exc.value not in _LOST:
                raise
            for index in range(int(nvml.nvmlDeviceGetCount())):
                if self._uuid_at(index) == uuid:
                    return nvml.nvmlDeviceGetHandleByIndex(index)
            raise

    def _memory(self, device: Any) -> tuple[int, int]:
        """(total, reserved by driver and firmware) in bytes; reserved is 0 where only version 1 of the call exists."""
        nvml = self._nvml
        memory = _offered(lambda: nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2), None)
        if memory is not None:
            return int(memory.total), int(memory.reserved)
        memory = _offered(lambda: nvml.nvmlDeviceGetMemoryInfo(device), None)
        return (int(memory.total), 0) if memory is not None else (0, 0)

    def _numa_node(self, device: Any, pci: Any) -> int | None:
        """The node of the CPUs next to the GPU: the kernel's `numa_node` of the PCI device, -1 where it has none.

        NVML's own answer is asked only where sysfs has none: on boards whose GPU memory is a NUMA node of its own it
        names that node, which has no CPUs (NVML API reference, nvmlDeviceGetNumaNodeId).
        """
        node = -1
        try:
            if pci is None:
                raise FileNotFoundError
            address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
            with open(f"{self._sysfs}/bus/pci/devices/{address}/numa_node", encoding="ascii") as file:
                node = int(file.read(32))
        except (OSError, ValueError):
            node = int(_offered(lambda: self._nvml.nvmlDeviceGetNumaNodeId(device), -1))
        return node if node >= 0 else None

    @contextmanager
    def _translated(
        self, what: str, uuid: str = "", advice: Mapping[int, str] = _ADVICE, not_found: type[GpuError] = GpuError
    ) -> Iterator[None]:
        """Around every call of NVML: counts it, and turns vendor errors into ours, "cannot <what> ..."."""
        with self._idle:
            self._calls += 1
        try:
            yield
        except Exception as exc:
            if self._nvml is None or not isinstance(exc, self._nvml.NVMLError):
                raise
            code = int(exc.value)
            subject = f"{what} GPU {uuid}" if uuid else what
            to_do = f": {advice[code]}" if code in advice else ""
            text = f"cannot {subject}: {str(exc).rstrip('.')} (NVML {code}){to_do}"
            if code in _LOST:
                raise GpuLostError(text, code) from exc
            if code in _NOT_OFFERED:
                raise GpuNotSupportedError(text, code) from exc
            raise (not_found if code == _NOT_FOUND else GpuError)(text, code) from exc
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()


def _text(value: Any) -> str:
    """Older releases of the binding hand out bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _address(device: Any) -> int:
    return int(ctypes.cast(device, ctypes.c_void_p).value or 0)


def _offered(call: Callable[[], Any], default: Any) -> Any:
    """What the call gives, `default` where driver or GPU do not offer it. Other NVML errors pass."""
    try:
        return call()
    except Exception as exc:
        if getattr(exc, "value", None) in _NOT_OFFERED:
            return default
        raise


def _processes(nvml: Any, device: Any, function: str) -> Sequence[Any]:
    """One process list, from the newest version of the call that this driver has; empty where it has none."""
    for version in ("_v3", "_v2"):
        call = getattr(nvml, function + version, None)
        if call is None:
            continue
        for _ in range(3):  # the list may outgrow the buffer between the binding's two calls
            try:
                listed: Sequence[Any] = call(device)
                return listed
            except nvml.NVMLError as exc:
                if exc.value in _NOT_OFFERED:
                    break
                if exc.value != _INSUFFICIENT_SIZE:
                    raise
        else:
            raise nvml.NVMLError(_INSUFFICIENT_SIZE)
    return ()
