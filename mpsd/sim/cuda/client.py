"""The CUDA driver inside one simulated process: finds its GPUs and its MPS daemon as the real one would.

Environment, besides what CUDA reads (CUDA_VISIBLE_DEVICES, CUDA_MPS_PIPE_DIRECTORY, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT,
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE):
  GPUFRAC_SIM_DIRECTORY  the simulation directory; required
  GPUFRAC_SIM_DEVICES    UUIDs of the GPUs that the container was given, by comma; absent: all, as on the host
  GPUFRAC_SIM_MOUNTS     JSON, container path to host path; what is below none does not exist. Absent: on the host
                         In a container's cgroup its confinement counts instead of these two, whatever they say.
  GPUFRAC_SIM_UID        the user to appear as, since a simulated node has no root
NVIDIA_VISIBLE_DEVICES is not read: it is for the container runtime, CUDA does not know it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence

from mpsd.sim.cudaerrors import CudaError, from_code
from mpsd.sim.driver import GpuFullError, SimulatedDriver
from mpsd.sim.model import CLIENT, PLAIN
from mpsd.sim.pinnedlimits import client_limits, visible_devices
from mpsd.sim.switches import read_switch
from mpsd.sim.wire import LineReader, send_line

DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 - the driver's default

EVICTION_BACKOFF_S = 0.01
"""Before the second try; each later pause is twice as long."""


class Cuda:
    """The CUDA driver inside one process, after cuInit.

    Gives `devices` (UUIDs as renumbered), `limits` (bytes by UUID, of what MPS caps), `mps` and `thread_percent`.
    Limits on its cgroup hold besides, with MPS or without.
    Without a reachable daemon it runs without MPS and without limits, silently, as the real driver does.
    Raises CudaError where initialisation fails; blocks while a server starts or a server of another user is busy.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        directory = environment.get("GPUFRAC_SIM_DIRECTORY")
        if not directory:
            raise FileNotFoundError("cannot find the simulated driver: set GPUFRAC_SIM_DIRECTORY")
        self._directory = directory
        self._driver = SimulatedDriver(directory)
        self._connection: socket.socket | None = None
        self._reader: LineReader | None = None
        self._protocol = 3
        self._error: CudaError | None = None
        self.mps = False
        """Whether this process shares the context of an MPS server."""
        self._device: str | None = None
        self.limits: dict[str, int] = {}
        self.thread_percent = 100.0
        self.server_pid: int | None = None
        present = [gpu.uuid for gpu in self._driver.gpus() if not self._driver.lost(gpu.uuid)]
        devices, mounts = self._confinement(environment)
        if devices is not None:
            present = [uuid for uuid in present if uuid in devices]
        spec = environment.get("CUDA_VISIBLE_DEVICES")
        self._connection = _connect(environment, mounts)
        self.devices: list[str] = []
        try:
            if self._connection is not None:
                self._join(self._connection, environment, present, spec)
            if not self.mps:
                self.devices = visible_devices(present, spec)
            if not self.devices:
                raise CudaError("NO_DEVICE")
        except BaseException:
            self.close()
            raise

    def _confinement(self, environment: Mapping[str, str]) -> tuple[Sequence[str] | None, Mapping[str, str] | None]:
        """The GPUs and mounts of the container that this process is in; None: as on the host."""
        tree, pid = self._driver.cgroups, os.getpid()
        confinement = tree.confinement_of(pid)
        if confinement is not None:
            with contextlib.suppress(FileNotFoundError):  # it is being ended
                tree.add(tree.cgroup_of(pid), pid)  # a kernel lists every process: it stays when its ancestor has gone
            return confinement.devices, confinement.mounts
        devices, mounts = environment.get("GPUFRAC_SIM_DEVICES"), environment.get("GPUFRAC_SIM_MOUNTS")
        return None if devices is None else devices.split(","), None if mounts is None else json.loads(mounts)

    def _join(
        self, connection: socket.socket, environment: Mapping[str, str], present: Sequence[str], spec: str | None
    ) -> None:
        """Becomes a client of the daemon, as far as that has it."""
        uid = environment.get("GPUFRAC_SIM_UID") or "-"
        send_line(connection, f"CLIENT {uid}")
        self._reader = LineReader(connection.fileno())
        lines: list[str] | None = []
        while lines == []:
            lines = self._reader.read()
        if lines is None:
            raise CudaError("MPS_CONNECTION_FAILED")
        verb, _, text = lines[0].partition(" ")
        if verb == "registered":
            return
        if verb == "plain":
            self._leave()
            return
        if verb == "error":
            raise from_code(int(text))
        answer = json.loads(text)
        self.mps = True
        self._protocol = answer["protocol"]
        self.server_pid = int(answer["server"])
        self.devices = visible_devices([uuid for uuid in answer["devices"] if uuid in present], spec)
        self.limits = client_limits(
            answer["limits"],
            environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
            self.devices,
            malformed_drops=read_switch(self._directory, "malformed-limit") == "drop-all",
            invisible_drops_server=read_switch(self._directory, "invisible-entry") == "drop-all",
        )
        self.thread_percent = float(answer["threads"])
        if answer["protocol"] == 2 or read_switch(self._directory, "client-percentage") == "lowers":
            with contextlib.suppress(ValueError):
                own = float(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
                self.thread_percent = min(self.thread_percent, own)

    def open_device(self, ordinal: int = 0) -> str:
        """Makes the context on a device, by ordinal as this process sees it; its UUID. Raises CudaError."""
        if not 0 <= ordinal < len(self.devices):
            raise CudaError("INVALID_DEVICE")
        uuid = self.devices[ordinal]
        self._driver.open_context(uuid, os.getpid(), CLIENT if self.mps else PLAIN)
        self._device = uuid
        if self.mps and self._connection is not None:
            send_line(self._connection, f"context {uuid}")
            self._charge(int(read_switch(self._directory, "client-context-bytes")))
        return uuid

    @property
    def limit_bytes(self) -> int | None:
        """The limit on the open device, None where there is none."""
        return self.limits.get(self._device or "")

    @property
    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the open device (cudaMemGetInfo). A limit of MPS only lowers what is free."""
        uuid = self._device or ""
        free_bytes, total_bytes = self._driver.memory_info(uuid, os.getpid())
        if uuid in self.limits:
            free_bytes = min(free_bytes, self.limits[uuid] - self._driver.used_bytes(uuid, os.getpid()))
        return free_bytes, total_bytes

    def allocate(self, size_bytes: int) -> int:
        """cuMemAlloc on the open device: the bytes granted. Raises CudaError, OUT_OF_MEMORY beyond limit or GPU."""
        if size_bytes <= 0:
            raise CudaError("INVALID_VALUE")
        self._charge(size_bytes)
        return size_bytes

    def _charge(self, size_bytes: int) -> None:
        self.wait(0)
        if self._device is None:
            raise CudaError("INVALID_CONTEXT")
        used_bytes = self._driver.used_bytes(self._device, os.getpid())
        if self._device in self.limits and used_bytes + size_bytes > self.limits[self._device]:
            raise CudaError("OUT_OF_MEMORY")
        tries = 1 + int(read_switch(self._directory, "eviction-retries"))
        for number in range(tries):
            try:
                self._driver.allocate(self._device, os.getpid(), size_bytes)
                return
            except GpuFullError:
                if number + 1 == tries or not self._have_evicted(self._device, size_bytes):
                    raise
                time.sleep(EVICTION_BACKOFF_S * 2**number)

    def _have_evicted(self, uuid: str, size_bytes: int) -> bool:
        """Asks MPS to end somebody over its soft limit; whether to try again. Only who stays within its own may ask."""
        if self._connection is None or self._reader is None or self._protocol != 3:
            return False
        if not self._driver.is_protected(uuid, os.getpid(), size_bytes):
            return False
        send_line(self._connection, f"evict {uuid}")
        while (lines := self._reader.read()) is not None:
            for line in lines:
                if line.startswith("error "):
                    self._fail(line)
                return line == "retry"
        return False

    def launch(self, faulty: bool = False) -> None:
        """Starts GPU work: without end, or with a fatal fault, which all clients of the server see.

        Raises CudaError LAUNCH_FAILED without MPS.
        """
        if self.mps and self._connection is not None:
            send_line(self._connection, "fault" if faulty else "busy")
        elif faulty:
            raise CudaError("LAUNCH_FAILED")

    def descriptors(self) -> list[int]:
        """Readable when MPS has something to say: see `wait`. Empty without MPS."""
        return [] if self._connection is None else [self._connection.fileno()]

    def wait(self, timeout_s: float | None) -> None:
        """Waits for trouble with MPS. Raises CudaError for it: server gone, client terminated, a peer's fault."""
        if self._error is not None:
            raise self._error
        if self._connection is None or self._reader is None:
            return
        if not select.select([self._connection], [], [], timeout_s)[0]:
            return
        lines = self._reader.read()
        if lines is None:
            self._leave()
            if self.mps:
                self._error = CudaError("MPS_RPC_FAILURE")
                raise self._error
            return  # it was only registered there, and goes on alone
        for line in lines:
            self._fail(line)

    def _fail(self, line: str) -> None:
        """Raises what MPS sent. This process can't do without the context that it has lost."""
        self._error = from_code(int(line.split()[1]))
        raise self._error

    def close(self) -> None:
        """Ends the process' use of CUDA: memory and contexts are free again."""
        if self._device is not None:
            self._driver.release(self._device, os.getpid())
            self._device = None
        self._leave()

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connect(environment: Mapping[str, str], mounts: Mapping[str, str] | None) -> socket.socket | None:
    path = environment.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORY
    host_path = path if mounts is None else host_path_of(path, mounts)
    if host_path is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.path.join(host_path, "control"))
    except OSError:  # no directory, no daemon, no permission, a path too long: all silent
        connection.close()
        return None
    return connection


def host_path_of(path: str, mounts: Mapping[str, str]) -> str | None:
    """Where a path of the container is on the host, by its longest mount; None below no mount."""
    path = os.path.normpath(path)
    for container in sorted(mounts, key=len, reverse=True):
        base = os.path.normpath(container)
        if path == base or path.startswith(base.rstrip("/") + "/"):
            return os.path.normpath(os.path.join(mounts[container], os.path.relpath(path, base)))
    return None
