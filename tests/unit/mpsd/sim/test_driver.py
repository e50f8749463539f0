"""The simulated driver's directory: facts, ledger, compute mode."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.config.model import GIB, SimulatedConfig, SimulatedGpu
from mpsd.gpu.model import MIB
from mpsd.sim.cudaerrors import CudaError
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.model import CLIENT, EXCLUSIVE_PROCESS, PLAIN, PROHIBITED, SERVER, gpu_uuid

A = gpu_uuid(0)


@pytest.fixture
def driver(short_tmp: Path) -> SimulatedDriver:
    config = SimulatedConfig(gpus=(SimulatedGpu(memory_bytes=80 * GIB), SimulatedGpu(memory_bytes=24 * GIB)))
    return SimulatedDriver.create(str(short_tmp / "sim"), config)


@pytest.fixture
def other() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def other_pid(other: "subprocess.Popen[bytes]") -> int:
    return other.pid


def test_facts(driver: SimulatedDriver) -> None:
    first, second = driver.gpus()
    assert (first.uuid, first.memory_bytes, first.compute_capability) == (A, 80 * GIB, (9, 0))
    assert (second.index, second.numa_node, second.memory_bytes) == (1, 1, 24 * GIB)
    assert 0 < first.reserved_bytes < first.memory_bytes // 100
    assert first.reserved_bytes % MIB == 0
    assert driver.version() == "580.95.05"


def test_creating_the_same_again_changes_nothing(driver: SimulatedDriver, short_tmp: Path) -> None:
    path = short_tmp / "sim" / "driver.json"
    before = path.stat().st_ino
    driver.set_compute_mode(A, EXCLUSIVE_PROCESS)
    config = SimulatedConfig(gpus=(SimulatedGpu(memory_bytes=80 * GIB), SimulatedGpu(memory_bytes=24 * GIB)))
    SimulatedDriver.create(driver.directory, config)
    assert path.stat().st_ino == before
    SimulatedDriver.create(driver.directory, SimulatedConfig(driver="615.71.09"))
    assert driver.version() == "615.71.09"
    assert len(driver.gpus()) == 1
    assert driver.compute_mode(A) == EXCLUSIVE_PROCESS


def test_without_a_driver_the_error_says_what_to_do(short_tmp: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^cannot find a simulated driver .*: start the simulation"):
        SimulatedDriver(str(short_tmp)).gpus()


def test_memory_is_physical_over_all_processes(driver: SimulatedDriver, other_pid: int) -> None:
    gpu = driver.gpus()[0]
    usable = gpu.memory_bytes - gpu.reserved_bytes
    driver.open_context(A, os.getpid(), PLAIN)
    driver.open_context(A, other_pid, PLAIN)
    driver.allocate(A, os.getpid(), usable - 10)
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        driver.allocate(A, other_pid, 11)
    driver.allocate(A, other_pid, 10)
    driver.release(A, os.getpid())
    assert [(c.pid, c.used_bytes) for c in driver.contexts(A)] == [(other_pid, 10)]


def test_what_a_dead_process_held_is_free(driver: SimulatedDriver, other: "subprocess.Popen[bytes]") -> None:
    driver.open_context(A, other.pid, PLAIN)
    driver.allocate(A, other.pid, GIB)
    assert driver.used_bytes(A, other.pid) == GIB
    other.communicate(b"\n")
    assert driver.contexts(A) == []


def test_memory_needs_a_context(driver: SimulatedDriver) -> None:
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        driver.allocate(A, os.getpid(), 1)


def test_exclusive_process_counts_the_server_and_not_its_clients(driver: SimulatedDriver, other_pid: int) -> None:
    driver.set_compute_mode(A, EXCLUSIVE_PROCESS)
    driver.open_context(A, other_pid, SERVER)
    with pytest.raises(CudaError) as caught:
        driver.open_context(A, os.getpid(), PLAIN)
    assert (caught.value.name, caught.value.code) == ("CUDA_ERROR_DEVICE_UNAVAILABLE", 46)
    driver.open_context(A, os.getpid(), CLIENT)
    driver.open_context(gpu_uuid(1), os.getpid(), PLAIN)  # the mode is one GPU's


def test_prohibited_admits_nobody(driver: SimulatedDriver) -> None:
    driver.set_compute_mode(A, PROHIBITED)
    with pytest.raises(CudaError, match="DEVICE_UNAVAILABLE"):
        driver.open_context(A, os.getpid(), PLAIN)


def test_a_lost_gpu_takes_nothing(driver: SimulatedDriver) -> None:
    driver.set_fault("lost", uuid=A)
    with pytest.raises(CudaError, match="NO_DEVICE"):
        driver.open_context(A, os.getpid(), PLAIN)
