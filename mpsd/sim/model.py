"""GPUs and contexts as the simulated driver knows them: values. Light: the emulator imports it."""

MIB = 1024 * 1024

PLAIN = "plain"
"""A context of a CUDA process without MPS."""
SERVER = "mps-server"
"""The context of an MPS server: the only one that EXCLUSIVE_PROCESS counts for all its clients."""
CLIENT = "mps-client"

DEFAULT, EXCLUSIVE_PROCESS, PROHIBITED = "DEFAULT", "EXCLUSIVE_PROCESS", "PROHIBITED"


class SimulatedGpuFacts:
    """One GPU of the simulated driver; memory in bytes."""

    __slots__ = (
        "compute_capability",
        "index",
        "memory_bytes",
        "name",
        "numa_node",
        "pci_bus_id",
        "reserved_bytes",
        "uuid",
    )

    def __init__(
        self,
        uuid: str,
        index: int,
        name: str,
        memory_bytes: int,
        reserved_bytes: int,
        compute_capability: tuple[int, int],
        numa_node: int,
        pci_bus_id: str,
    ) -> None:
        self.uuid = uuid
        self.index = index
        self.name = name
        self.memory_bytes = memory_bytes
        self.reserved_bytes = reserved_bytes
        self.compute_capability = compute_capability
        self.numa_node = numa_node
        self.pci_bus_id = pci_bus_id


class Context:
    """One process' hold on one GPU. `kind` is PLAIN, SERVER or CLIENT."""

    __slots__ = ("kind", "pid", "start_ticks", "used_bytes")

    def __init__(self, pid: int, start_ticks: int, kind: str, used_bytes: int) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self.kind = kind
        self.used_bytes = used_bytes


def gpu_uuid(index: int) -> str:
    """The stable UUID of the simulated GPU at this index."""
    return f"GPU-51000000-0000-4000-8000-{index:012x}"


def gpu_facts(index: int, memory_bytes: int) -> SimulatedGpuFacts:
    """A GPU as a driver would show it: about 0.6 % of its memory reserved, NUMA nodes taking turns."""
    return SimulatedGpuFacts(
        uuid=gpu_uuid(index),
        index=index,
        name=f"Simulated H100 {memory_bytes // (1024 * MIB)}GB",
        memory_bytes=memory_bytes,
        reserved_bytes=memory_bytes * 6 // 1000 // MIB * MIB,
        compute_capability=(9, 0),
        numa_node=index % 2,
        pci_bus_id=f"00000000:{index + 1:02X}:00.0",
    )


def region_of(gpu: SimulatedGpuFacts) -> str:
    """The GPU's region in dmem files, such as `nvidia/00000000:02:00.0/vidmem`."""
    return f"nvidia/{gpu.pci_bus_id.lower()}/vidmem"
