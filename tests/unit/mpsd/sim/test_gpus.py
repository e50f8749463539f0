"""The simulated backend and its faults."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsd.config.model import SimulatedConfig, SimulatedGpu
from mpsd.gpu.backend import GpuBackend, GpuError, GpuLostError, GpuNotSupportedError, XidEvent
from mpsd.gpu.model import ComputeMode
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.gpus import SimulatedBackend
from mpsd.sim.model import PLAIN, gpu_uuid
from tests.waiting import WAIT_S

A, B = gpu_uuid(0), gpu_uuid(1)


@pytest.fixture
def driver(short_tmp: Path) -> SimulatedDriver:
    return SimulatedDriver.create(str(short_tmp), SimulatedConfig(gpus=(SimulatedGpu(),) * 2))


@pytest.fixture
def backend(driver: SimulatedDriver) -> Iterator[SimulatedBackend]:
    backend = SimulatedBackend(driver.directory)
    backend.open()
    yield backend
    backend.close()


def test_it_shows_what_the_driver_has(driver: SimulatedDriver, backend: GpuBackend) -> None:
    assert backend.driver_version() == "580.95.05"
    assert list(backend.uuids()) == [A, B]
    info = backend.info(B)
    assert (info.index, info.numa_node, info.compute_capability, info.mig_enabled) == (1, 1, (9, 0), False)
    assert info.pci_bus_id
    driver.open_context(A, os.getpid(), PLAIN)
    driver.allocate(A, os.getpid(), 123)
    assert [(p.pid, p.used_bytes) for p in backend.processes(A)] == [(os.getpid(), 123)]
    assert backend.processes(B) == ()


def test_compute_mode_is_shared_between_processes(driver: SimulatedDriver, backend: GpuBackend) -> None:
    assert backend.compute_mode(A) is ComputeMode.DEFAULT
    backend.set_compute_mode(A, ComputeMode.EXCLUSIVE_PROCESS)
    assert SimulatedDriver(driver.directory).compute_mode(A) == "EXCLUSIVE_PROCESS"
    assert backend.compute_mode(A) is ComputeMode.EXCLUSIVE_PROCESS
    with pytest.raises(GpuError, match=r"^cannot"):
        backend.set_compute_mode(A, ComputeMode.UNKNOWN)


def test_open_fails_where_there_is_no_driver(short_tmp: Path) -> None:
    with pytest.raises(GpuError, match=r"^cannot find a simulated driver"):
        SimulatedBackend(str(short_tmp / "none")).open()


def test_calls_need_open(driver: SimulatedDriver) -> None:
    with pytest.raises(GpuError) as caught:
        SimulatedBackend(driver.directory).uuids()
    assert caught.value.code == 1


def test_init_failure_heals(driver: SimulatedDriver) -> None:
    backend = SimulatedBackend(driver.directory)
    driver.set_fault("init-error", "Driver Not Loaded")
    with pytest.raises(GpuError, match="Driver Not Loaded"):
        backend.open()
    driver.clear_fault("init-error")
    backend.open()
    assert backend.uuids()


def test_no_gpus_at_boot(driver: SimulatedDriver, backend: GpuBackend) -> None:
    driver.set_fault("no-gpus")
    assert list(backend.uuids()) == []
    driver.clear_fault("no-gpus")
    assert len(backend.uuids()) == 2


def test_a_lost_gpu(driver: SimulatedDriver, backend: GpuBackend) -> None:
    driver.set_fault("lost", uuid=A)
    assert list(backend.uuids()) == [B]
    with pytest.raises(GpuLostError) as caught:
        backend.info(A)
    assert caught.value.code == 15
    assert backend.info(B).uuid == B


def test_an_unknown_gpu(backend: GpuBackend) -> None:
    with pytest.raises(GpuLostError):
        backend.compute_mode("GPU-00000000-0000-0000-0000-000000000000")


def test_not_supported_calls_raise_and_facts_take_their_defaults(driver: SimulatedDriver, backend: GpuBackend) -> None:
    driver.set_fault("not-supported", "processes reserved numa_node", A)
    with pytest.raises(GpuNotSupportedError) as caught:
        backend.processes(A)
    assert caught.value.code == 3
    assert (backend.info(A).memory_reserved_bytes, backend.info(A).numa_node) == (0, None)
    assert backend.info(B).memory_reserved_bytes > 0
    assert backend.processes(B) == ()


@pytest.mark.parametrize(("fault", "code"), [("no-permission", 4), ("fail", 999)])
def test_failing_calls(driver: SimulatedDriver, backend: GpuBackend, fault: str, code: int) -> None:
    driver.set_fault(fault, "set_compute_mode")
    with pytest.raises(GpuError) as caught:
        backend.set_compute_mode(A, ComputeMode.DEFAULT)
    assert caught.value.code == code
    assert backend.compute_mode(A) is ComputeMode.DEFAULT


def test_a_new_driver_needs_a_new_open(driver: SimulatedDriver, backend: GpuBackend) -> None:
    driver.set_fault("driver-version", "615.71.09")
    with pytest.raises(GpuError) as caught:
        backend.uuids()
    assert caught.value.code == 18
    backend.close()
    backend.open()
    assert backend.driver_version() == "615.71.09"


def _in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except GpuError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_a_hanging_call_goes_on_when_the_fault_is_cleared(driver: SimulatedDriver, backend: GpuBackend) -> None:
    driver.set_fault("hang", "info", A)
    thread, results = _in_thread(lambda: backend.info(A))
    assert backend.info(B).uuid == B
    assert thread.is_alive()
    assert results == []
    driver.clear_fault("hang", A)
    thread.join(WAIT_S)
    assert results == [backend.info(A)]


def test_close_releases_a_hanging_call(driver: SimulatedDriver, backend: GpuBackend) -> None:
    driver.set_fault("hang")
    thread, results = _in_thread(backend.uuids)
    backend.close()
    thread.join(WAIT_S)
    assert isinstance(results[0], GpuError)


def test_xids_reach_every_open_backend_once(driver: SimulatedDriver, backend: GpuBackend) -> None:
    driver.inject_xid(A, 31)
    late = SimulatedBackend(driver.directory)
    late.open()
    driver.inject_xid(B, 79)
    assert backend.wait_xid(1) == XidEvent(A, 31)
    assert backend.wait_xid(1) == XidEvent(B, 79)
    assert backend.wait_xid(0) is None
    assert late.wait_xid(1) == XidEvent(B, 79)


def test_waiting_for_an_xid_ends_with_the_event_or_with_close(driver: SimulatedDriver, backend: GpuBackend) -> None:
    thread, results = _in_thread(lambda: backend.wait_xid(30))
    driver.inject_xid(A, 48)
    thread.join(WAIT_S)
    assert results == [XidEvent(A, 48)]
    thread, results = _in_thread(lambda: backend.wait_xid(30))
    backend.close()
    thread.join(WAIT_S)
    assert len(results) == 1
