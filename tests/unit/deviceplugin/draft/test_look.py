"""What is looked at on a node: never an error, never a wait without end."""

import shutil
import threading
from pathlib import Path

import pytest

from deviceplugin.draft.look import BINARY, look
from mpsd.config.model import GIB, SimulatedConfig, SimulatedGpu
from mpsd.gpu.backend import GpuError
from mpsd.gpu.model import GpuInfo
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.gpus import SimulatedBackend
from mpsd.sim.model import gpu_uuid
from tests.waiting import WAIT_S


@pytest.fixture
def simulation(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two GPUs, and no MPS in PATH."""
    monkeypatch.setenv("PATH", str(short_tmp))
    directory = str(short_tmp / "sim")
    SimulatedDriver.create(directory, SimulatedConfig(gpus=(SimulatedGpu(memory_bytes=24 * GIB),) * 2))
    return directory


def test_gpus_and_driver_are_found(simulation: str) -> None:
    facts = look(SimulatedBackend(simulation), root=simulation)
    assert [gpu.index for gpu in facts.gpus] == [0, 1]
    assert facts.driver_version == "580.95.05"
    assert facts.troubles == ()
    assert facts.hard_limits.missing[0].startswith("driver 580.95.05 has no memory limits")
    assert facts.driver_root is None


def test_a_gpu_that_can_not_be_read_costs_no_other(simulation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedBackend.info

    def info(self: SimulatedBackend, uuid: str) -> GpuInfo:
        if uuid == gpu_uuid(0):
            raise GpuError("cannot read GPU 0: it is lost")
        return real(self, uuid)

    monkeypatch.setattr(SimulatedBackend, "info", info)
    facts = look(SimulatedBackend(simulation))
    assert [gpu.index for gpu in facts.gpus] == [1]
    assert facts.troubles == ("cannot read GPU 0: it is lost",)


@pytest.mark.parametrize("error", [GpuError("cannot initialise NVML"), RuntimeError("cannot initialise NVML")])
def test_a_node_without_a_driver_says_why(simulation: str, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(SimulatedBackend, "open", fail)
    facts = look(SimulatedBackend(simulation))
    assert (facts.gpus, facts.troubles) == ((), ("cannot initialise NVML",))


def test_a_driver_that_hangs_is_told_and_not_waited_for(simulation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(SimulatedBackend, "open", lambda _: gate.wait(WAIT_S))
    facts = look(SimulatedBackend(simulation), limit_s=0.05)
    gate.set()
    assert "does not answer within 0.05 s" in facts.troubles[0]


def test_the_driver_s_programs_are_found_on_the_node_or_in_its_container(simulation: str, short_tmp: Path) -> None:
    root = short_tmp / "root"
    for place, expected in (("run/nvidia/driver/usr/bin", "/run/nvidia/driver"), ("usr/bin", "/")):
        (root / place).mkdir(parents=True)
        shutil.copy("/bin/true", root / place / BINARY)
        assert look(SimulatedBackend(simulation), root=str(root)).driver_root == expected
