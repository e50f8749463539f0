"""What a simulated node has in place of the real thing: the one module of the product that imports the simulation, and
only where it is called (`backend: simulated`)."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from mpsd.config.model import NodeConfig
from mpsd.gpu.backend import GpuBackend

if TYPE_CHECKING:
    from mpsd.sim.place import SimulatedPlace
    from mpsd.sim.selftest import SimulatedCgroup


def backend(config: NodeConfig) -> GpuBackend:
    """The simulated GPUs, made where they are not there yet, with the emulator unless the config names a control
    binary by its path."""
    from mpsd.sim.driver import SimulatedDriver
    from mpsd.sim.gpus import SimulatedBackend
    from mpsd.sim.mps.install import install_emulator

    directory = config.simulation_directory
    SimulatedDriver.create(directory, config.simulated)
    if not config.mps.binary.startswith("/"):
        install_emulator(os.path.join(directory, "bin"), directory)
    return SimulatedBackend(directory)


def with_emulator(config: NodeConfig) -> NodeConfig:
    """On a simulated node the control binary is the emulator, unless the config names one by its path."""
    if config.backend != "simulated" or config.mps.binary.startswith("/"):
        return config
    binary = os.path.join(config.simulation_directory, "bin", "nvidia-cuda-mps-control")
    return msgspec.structs.replace(config, mps=msgspec.structs.replace(config.mps, binary=binary, driver_root="/"))


def place(config: NodeConfig) -> "SimulatedPlace":
    """Where daemons are started."""
    from mpsd.sim.place import SimulatedPlace

    return SimulatedPlace(shared_memory=config.mps.shared_memory)


def cgroups_of(config: NodeConfig) -> Callable[[Iterable[int]], Mapping[int, str]] | None:
    """Finds the cgroup of each process, by PID; None on a real node."""
    if config.backend != "simulated":
        return None
    from mpsd.sim.cgroups import CgroupTree

    return CgroupTree(config.simulation_directory).cgroups_of


def cgroup(simulation: str, name: str) -> "SimulatedCgroup":
    """A cgroup below the root, for the self-test's processes."""
    from mpsd.sim.selftest import SimulatedCgroup

    return SimulatedCgroup(simulation, name)


def cuda_command(simulation: str) -> list[str]:
    """Runs a simulated CUDA process, which takes `--allocate BYTES` and `--hold`."""
    from mpsd.sim.cuda import program

    return [*program.cuda_command(), "--simulation", simulation]
