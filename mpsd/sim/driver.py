"""The simulated GPU driver: one directory that every simulated process shares, as they would share a kernel module.

| file below the directory        | content and effect                                                             |
|---------------------------------|--------------------------------------------------------------------------------|
| driver.json                     | driver version and GPUs, written by `create`                                   |
| xid                             | critical XIDs, one `<GPU UUID> <number>` a line, appended                      |
| gpus/<UUID>/compute-mode        | DEFAULT (also when missing), EXCLUSIVE_PROCESS or PROHIBITED                   |
| gpus/<UUID>/ledger              | contexts: `<pid> <start ticks> <kind> <bytes>` a line, under flock on ledger.lock |
| faults/init-error               | a backend cannot open, with this text                                          |
| faults/no-gpus                  | the driver reports 0 GPUs                                                      |
| faults/driver-version           | another version than driver.json's, for backends opened from now on            |
| faults/hang                     | calls named here block until they are no longer named; an empty file: all calls |
| faults/not-supported            | calls or GPU facts named here are NOT_SUPPORTED; an empty file: all            |
| faults/no-permission            | calls named here are refused; an empty file: all                               |
| faults/fail                     | calls named here fail with Unknown Error (999); an empty file: all             |
| gpus/<UUID>/faults/<same name>  | hang, not-supported, no-permission and fail for one GPU                        |
| gpus/<UUID>/faults/lost         | this GPU fell off the bus                                                      |
| gpus/<UUID>/faults/recovery-action | the number of what the driver asks for, see `mpsd.gpu.recovery`             |
| cgroup/                         | the cgroup v2 tree, see `mpsd.sim.cgroups` and `mpsd.sim.memorylimits`         |
| faults/cgroup-v1                | the node has no cgroup v2                                                      |
| faults/no-dmem                  | the kernel has no dmem controller, as before Linux 6.14                        |
| faults/dmem-not-delegated       | kubelet and runtime do not pass the dmem controller on to the cgroups they make |
| faults/memacct                  | the driver's own setting (RmMemacctMode): `off` or `misc`                      |
| faults/limit-forgotten          | set_memory_limits succeeds and sets nothing                                    |
| faults/limit-drifts             | every hard limit turns into this one (`9G`; empty: none), once; then it is removed |
| mps-faults/, mps-switches/      | of the MPS emulator, see `mpsd.sim.mps.faults` and `mpsd.sim.switches`         |

limit-forgotten and limit-drifts, too, may be set for one GPU.
Calls: driver_version, uuids, info, compute_mode, set_compute_mode, processes, memory_limits, set_memory_limits,
wait_xid.
Facts: reserved, compute_capability, numa_node, pci_bus_id.

The emulator's servers import this module too, so nothing heavy is imported here.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from mpsd.sim.cgroups import CgroupTree, memparse
from mpsd.sim.cudaerrors import CudaError
from mpsd.sim.files import process_start_ticks, read_text, remove, write_text
from mpsd.sim.memorylimits import (
    DMEM,
    FIRST_DRIVER,
    MISC,
    NVML_FUNCTION_NOT_FOUND,
    NVML_NOT_SUPPORTED,
    OFF,
    LimitError,
    Limits,
    MemoryLimits,
)
from mpsd.sim.model import (
    CLIENT,
    DEFAULT,
    EXCLUSIVE_PROCESS,
    PROHIBITED,
    Context,
    SimulatedGpuFacts,
    gpu_facts,
    region_of,
)
from mpsd.sim.switches import major

TYPE_CHECKING = False  # typing itself costs each emulator process 0.6 MiB
if TYPE_CHECKING:
    from mpsd.config.model import SimulatedConfig

KUBEPODS = "kubepods.slice"
"""The cgroup of all pods, below the root."""


class GpuFullError(CudaError):
    """OUT_OF_MEMORY because the GPU itself is full, not for a limit: it may help to evict somebody."""

    def __init__(self) -> None:
        super().__init__("OUT_OF_MEMORY")


class SimulatedDriver:
    """Handle on the directory: cheap, holds nothing open, safe from several threads and processes."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.cgroups = CgroupTree(directory)

    @staticmethod
    def create(directory: str, config: SimulatedConfig) -> SimulatedDriver:
        """Writes the driver's files, or leaves them where they already say the same. What is in use stays in use."""
        gpus = [gpu_facts(index, gpu.memory_bytes) for index, gpu in enumerate(config.gpus)]
        rows = [{name: getattr(gpu, name) for name in SimulatedGpuFacts.__slots__} for gpu in gpus]
        text = json.dumps({"version": config.driver, "gpus": rows}, indent=1) + "\n"
        for name in ("faults", "mps-faults", "mps-switches"):
            os.makedirs(os.path.join(directory, name), exist_ok=True)
        for gpu in gpus:
            os.makedirs(os.path.join(directory, "gpus", gpu.uuid, "faults"), exist_ok=True)
        path = os.path.join(directory, "driver.json")
        if read_text(path) != text:
            write_text(path, text)
        driver = SimulatedDriver(directory)
        if not os.path.isdir(os.path.join(driver.cgroups.root, KUBEPODS)):
            driver.make_cgroup(KUBEPODS)  # the kubelet's, at its start
        driver.settle_cgroups()
        return driver

    def _read(self) -> dict[str, object]:
        text = read_text(self._path("driver.json"))
        if text is None:
            raise FileNotFoundError(f"cannot find a simulated driver in {self.directory}: start the simulation first")
        value = json.loads(text)
        assert isinstance(value, dict)
        return value

    def _path(self, *parts: str) -> str:
        return os.path.join(self.directory, *parts)

    def version(self) -> str:
        """Driver version. Raises FileNotFoundError where there is no simulated driver."""
        return (self.fault("driver-version") or "").strip() or str(self._read()["version"])

    def gpus(self) -> list[SimulatedGpuFacts]:
        """The GPUs by index, lost ones included. Raises FileNotFoundError where there is no simulated driver."""
        rows = self._read()["gpus"]
        assert isinstance(rows, list)
        if self.fault("no-gpus") is not None:
            return []
        return [SimulatedGpuFacts(**{**row, "compute_capability": tuple(row["compute_capability"])}) for row in rows]

    def gpu(self, uuid: str) -> SimulatedGpuFacts | None:
        return next((gpu for gpu in self.gpus() if gpu.uuid == uuid), None)

    # Faults and events

    def _fault_path(self, name: str, uuid: str | None) -> str:
        return self._path("faults", name) if uuid is None else self._path("gpus", uuid, "faults", name)

    def fault(self, name: str, uuid: str | None = None) -> str | None:
        """Text of a fault, None where it is off. With a UUID: of this GPU alone."""
        return read_text(self._fault_path(name, uuid))

    def set_fault(self, name: str, text: str = "", uuid: str | None = None) -> None:
        write_text(self._fault_path(name, uuid), text)

    def clear_fault(self, name: str, uuid: str | None = None) -> None:
        remove(self._fault_path(name, uuid))

    def lost(self, uuid: str) -> bool:
        return self.fault("lost", uuid) is not None

    @property
    def xid_path(self) -> str:
        return self._path("xid")

    def inject_xid(self, uuid: str, xid: int) -> None:
        """Reports a critical XID to every backend that is open now."""
        descriptor = os.open(self.xid_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, f"{uuid} {xid}\n".encode())
        finally:
            os.close(descriptor)

    # Compute mode and contexts

    def compute_mode(self, uuid: str) -> str:
        return (read_text(self._path("gpus", uuid, "compute-mode")) or DEFAULT).strip()

    def set_compute_mode(self, uuid: str, mode: str) -> None:
        write_text(self._path("gpus", uuid, "compute-mode"), mode + "\n")

    @contextmanager
    def _ledger(self, uuid: str) -> Iterator[list[Context]]:
        """The living contexts of a GPU under its lock; what the block leaves in the list is written back."""
        path = self._path("gpus", uuid, "ledger")
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = read_text(path) or ""
            contexts = [
                c for c in map(_parse_context, text.splitlines()) if process_start_ticks(c.pid) == c.start_ticks
            ]
            yield contexts
            now = "".join(f"{c.pid} {c.start_ticks} {c.kind} {c.used_bytes}\n" for c in contexts)
            if now != text:
                write_text(path, now)
                if (limits := self._limits()) is not None and (gpu := self.gpu(uuid)) is not None:
                    limits.publish(gpu, contexts)
        finally:
            os.close(lock)

    def contexts(self, uuid: str) -> list[Context]:
        """Contexts of living processes on a GPU; those of dead ones are dropped on the way."""
        if not os.path.isdir(self._path("gpus", uuid)):
            return []
        with self._ledger(uuid) as contexts:
            return list(contexts)

    def open_context(self, uuid: str, pid: int, kind: str, used_bytes: int = 0) -> None:
        """Gives a process its context on a GPU. Raises CudaError NO_DEVICE, DEVICE_UNAVAILABLE, OUT_OF_MEMORY."""
        gpu = self.gpu(uuid)
        if gpu is None or self.lost(uuid):
            raise CudaError("NO_DEVICE")
        start_ticks = process_start_ticks(pid)
        if start_ticks is None:
            raise CudaError("NOT_PERMITTED")
        with self._ledger(uuid) as contexts:
            if kind != CLIENT:
                mode = self.compute_mode(uuid)
                owners = [c for c in contexts if c.kind != CLIENT and c.pid != pid]
                if mode == PROHIBITED or (mode == EXCLUSIVE_PROCESS and owners):
                    raise CudaError("DEVICE_UNAVAILABLE")
            if not any(c.pid == pid for c in contexts):
                self._check_room(gpu, contexts, pid, used_bytes)
                contexts.append(Context(pid, start_ticks, kind, used_bytes))

    def allocate(self, uuid: str, pid: int, size_bytes: int) -> None:
        """Charges memory to a process' context. Raises CudaError OUT_OF_MEMORY (GpuFullError where no limit is the
        reason), INVALID_CONTEXT."""
        gpu = self.gpu(uuid)
        if gpu is None or self.lost(uuid):
            raise CudaError("NO_DEVICE")
        with self._ledger(uuid) as contexts:
            for context in contexts:
                if context.pid == pid:
                    self._check_room(gpu, contexts, pid, size_bytes)
                    context.used_bytes += size_bytes
                    return
        raise CudaError("INVALID_CONTEXT")

    def used_bytes(self, uuid: str, pid: int) -> int:
        """What a process holds on a GPU, 0 without a context."""
        return sum(c.used_bytes for c in self.contexts(uuid) if c.pid == pid)

    def release(self, uuid: str, pid: int) -> None:
        """Takes a process' context on a GPU and its memory; none is fine."""
        with self._ledger(uuid) as contexts:
            contexts[:] = [c for c in contexts if c.pid != pid]

    def _check_room(self, gpu: SimulatedGpuFacts, contexts: list[Context], pid: int, size_bytes: int) -> None:
        limits = self._limits() if size_bytes else None
        room_bytes = None if limits is None else limits.room_bytes(gpu, contexts, pid)
        if room_bytes is not None and size_bytes > room_bytes:
            raise CudaError("OUT_OF_MEMORY")
        if size_bytes > gpu.memory_bytes - gpu.reserved_bytes - sum(c.used_bytes for c in contexts):
            raise GpuFullError

    def memory_info(self, uuid: str, pid: int) -> tuple[int, int]:
        """Free and total bytes of a GPU as a process sees it, limits of MPS aside (cudaMemGetInfo)."""
        gpu = self.gpu(uuid)
        if gpu is None:
            raise CudaError("NO_DEVICE")
        contexts = self.contexts(uuid)
        free_bytes = gpu.memory_bytes - gpu.reserved_bytes - sum(c.used_bytes for c in contexts)
        limits = self._limits()
        if limits is None:
            return free_bytes, gpu.memory_bytes
        room_bytes = limits.room_bytes(gpu, contexts, pid)
        return max(0, min(free_bytes, free_bytes if room_bytes is None else room_bytes)), limits.total_bytes(gpu, pid)

    # Memory limits of cgroups

    def settle_cgroups(self) -> None:
        """Has the kernel look at what was written into the cgroup tree, and at the faults."""
        supported = major(self.version()) >= FIRST_DRIVER
        self.cgroups.settle(
            {region_of(gpu): gpu.memory_bytes - gpu.reserved_bytes for gpu in self.gpus()} if supported else {},
            v2=self.fault("cgroup-v1") is None,
            dmem=self.fault("no-dmem") is None,
        )

    def make_cgroup(self, path: str) -> str:
        """Makes the cgroup at this path below the root, as kubelet and runtime do; its directory."""
        directory = self.cgroups.make(path, delegate_dmem=self.fault("dmem-not-delegated") is None)
        self.settle_cgroups()
        return directory

    def limits_backend(self) -> str:
        """`dmem`, `misc` or `off`: where limits are kept."""
        mode = (self.fault("memacct") or "").strip()
        if major(self.version()) < FIRST_DRIVER or mode == OFF or not self.cgroups.is_v2():
            return OFF
        return DMEM if self.cgroups.has_dmem() and mode != MISC else MISC

    def _limits(self) -> MemoryLimits | None:
        backend = self.limits_backend()
        return None if backend == OFF else MemoryLimits(self.cgroups, backend)

    def _limits_for_call(self) -> MemoryLimits:
        self.settle_cgroups()
        limits = self._limits()
        if limits is None:
            if major(self.version()) < FIRST_DRIVER:
                raise LimitError(NVML_FUNCTION_NOT_FOUND, "the driver is older than r615: Function Not Found")
            raise LimitError(NVML_NOT_SUPPORTED, "memory limits are off or there is no cgroup v2: Not Supported")
        return limits

    def memory_limits(self, gpu: SimulatedGpuFacts, cgroup: str) -> tuple[Limits, int]:
        """Limits in force for a cgroup, and what is charged to them in bytes. Raises LimitError."""
        limits = self._limits_for_call()
        for scope in (None, gpu.uuid):
            if (text := self.fault("limit-drifts", scope)) is not None:
                self.clear_fault("limit-drifts", scope)
                for each in self.gpus() if scope is None else (gpu,):
                    limits.drift(each, memparse(text.strip()))
        return limits.get(gpu, self.contexts(gpu.uuid), cgroup)

    def set_memory_limits(self, gpu: SimulatedGpuFacts, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        """Sets both limits of a cgroup. Raises LimitError."""
        limits = self._limits_for_call()
        if all(self.fault("limit-forgotten", scope) is None for scope in (None, gpu.uuid)):
            limits.set(gpu, cgroup, soft_bytes, hard_bytes)

    def is_protected(self, uuid: str, pid: int, size_bytes: int) -> bool:
        """Whether a process stays within its cgroup's soft limit when it gets this much more."""
        limits, gpu = self._limits(), self.gpu(uuid)
        if limits is None or gpu is None:
            return False
        return limits.is_protected(gpu, self.contexts(uuid), pid, size_bytes)

    def over_soft(self, uuid: str) -> dict[int, int]:
        """By PID, how many bytes its cgroup is above its soft limit on a GPU: who may be evicted."""
        limits, gpu = self._limits(), self.gpu(uuid)
        return {} if limits is None or gpu is None else limits.over_soft(gpu, self.contexts(uuid))


def _parse_context(line: str) -> Context:
    pid, start_ticks, kind, used_bytes = line.split()
    return Context(int(pid), int(start_ticks), kind, int(used_bytes))
