"""What a simulated node runs with: a config moved into its directory (pure)."""

import json

import msgspec

from deviceplugin.nri import runtimes
from deviceplugin.nri.model import Runtime
from mpsd.common.errors import ConfigError
from mpsd.config.load import ConfigErrors, parse_config
from mpsd.config.model import (
    GIB,
    AnnotationsConfig,
    CdiConfig,
    Enforcement,
    FixedMemory,
    GpuSelection,
    KubernetesConfig,
    MpsConfig,
    NodeConfig,
    Resource,
    SimulatedConfig,
    SimulatedGpu,
    TrustPolicy,
    UnitMemory,
)
from mpsd.config.show import effective
from mpsd.gpu.model import MIB, Mode

DEFAULT_DRIVER = "580.95.05"
DEFAULT_GPU_MEMORY_BYTES = 80 * GIB

FILE_NAME = "config.yaml"
RUNTIME = ("containerd", "2.1.9")
"""Name and version of the container runtime, as NRI plugins are told."""
_PATHS = (
    "mps.runRoot",
    "mps.logRoot",
    "cdi.directory",
    "kubelet.root",
    "kubelet.devicePlugins",
    "stateRoot",
    "nri.socket",
    "annotations.criSocket",
)


def default_config() -> NodeConfig:
    """What a simulated node offers when no config is given."""

    def offer(name: str, memory: FixedMemory | UnitMemory) -> Resource:
        return Resource(
            name=f"gpufrac.dev/{name}", memory=memory, mode=Mode.SM_SHARING, enforcement=Enforcement.COOPERATIVE
        )

    return NodeConfig(
        resources=(
            offer("gpu-8gi", FixedMemory(request_bytes=8 * GIB, limit_bytes=8 * GIB)),
            offer("gpu-16gi", FixedMemory(request_bytes=16 * GIB, limit_bytes=16 * GIB)),
            offer("memory-gib", UnitMemory(unit_bytes=GIB)),
        ),
        annotations=AnnotationsConfig(
            gpus=GpuSelection(), share=True, trust=TrustPolicy.ANY, enforcement=Enforcement.COOPERATIVE
        ),
    )


def node_config(
    config: NodeConfig,
    directory: str,
    *,
    gpus: int | None = None,
    gpu_memory_bytes: int | None = None,
    driver: str | None = None,
) -> NodeConfig:
    """`config` moved onto a simulated node in `directory` (pure): what it offers stays, where it lives does not.

    Args:
        gpus, gpu_memory_bytes, driver: override the config's own simulation. None: as there, otherwise 1 GPU (or as
            many as the config names by index), 80Gi, DEFAULT_DRIVER.
    """
    before = config.simulated if config.backend == "simulated" else None
    count = gpus or (len(before.gpus) if before else max(1, _highest_index(config) + 1))
    sizes = [gpu.memory_bytes for gpu in before.gpus] if before else []
    memory = [
        gpu_memory_bytes or (sizes[min(index, len(sizes) - 1)] if sizes else DEFAULT_GPU_MEMORY_BYTES)
        for index in range(count)
    ]
    simulated = SimulatedConfig(
        gpus=tuple(SimulatedGpu(memory_bytes=size_bytes // MIB * MIB) for size_bytes in memory),
        driver=driver or (before.driver if before else DEFAULT_DRIVER),
    )
    standard = MpsConfig()
    mps = msgspec.structs.replace(
        config.mps,
        run_root=f"{directory}/run",
        log_root=f"{directory}/log",
        binary=standard.binary,
        driver_root=standard.driver_root,
    )
    cdi: CdiConfig = msgspec.structs.replace(config.cdi, directory=f"{directory}/cdi")
    annotated = config.annotations
    if annotated is not None:
        annotated = msgspec.structs.replace(annotated, cri_socket=f"{directory}/run/cri.sock")
    return msgspec.structs.replace(
        config,
        mps=mps,
        cdi=cdi,
        kubelet_root=f"{directory}/kubelet",
        kubelet_device_plugins=f"{directory}/kubelet/device-plugins",
        annotations=annotated,
        nri=msgspec.structs.replace(config.nri, socket=f"{directory}/run/nri.sock"),
        kubernetes=KubernetesConfig(),
        state_root=f"{directory}/state",
        backend="simulated",
        simulated=simulated,
        metrics_address="",
    )


def takes_cdi(runtime: tuple[str, str]) -> bool:
    """Whether a container runtime takes CDI devices from NRI plugins; one we don't know does."""
    name, version = runtime
    return runtimes.takes_cdi(Runtime(name=name, version=version), unknown=True)


def _highest_index(config: NodeConfig) -> int:
    selections = [config.gpus, *(resource.gpus for resource in config.resources)]
    if config.annotations is not None:
        selections.append(config.annotations.gpus)
    named = [ref for selection in selections for ref in (*(selection.include or ()), *selection.exclude)]
    for _, members in config.groups:
        named += members
    return max((ref for ref in named if isinstance(ref, int)), default=-1)


def config_text(config: NodeConfig, directory: str) -> str:
    """The config as its file says it. Raises ConfigError where no node could run with it in this directory."""
    text = json.dumps(effective(config), indent=2) + "\n"
    try:
        parse_config(text, FILE_NAME)
    except ConfigErrors as error:
        others = [problem for problem in error.problems if problem.path not in _PATHS]
        if others:
            problems = "; ".join(f"{problem.path}: {problem.value or ''} {problem.rule}" for problem in others)
            raise ConfigError(f"cannot simulate this node: {problems}") from error
        raise ConfigError(
            f"cannot use directory {directory}: its path is too long for the sockets below it, or has characters "
            "that a path in a config may not have; name another"
        ) from error
    return text
