"""An allocation -> what changes in the container that is being created (pure).

The same environment and mounts as in its CDI file. Names that are set already are removed first, so that whoever reads
the first of two equal entries sees ours, and no other NRI plugin's claim on a name stands against us.
"""

from deviceplugin.nri.model import Adjustment, Mount
from deviceplugin.plan import render
from deviceplugin.plan.allocation import Allocation

RESERVED_ENV = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_GPU_MEMORY_", "GPUFRAC_", "CUDA_MPS_")
"""How the names of all variables begin that we set."""


def adjustment(
    allocation: Allocation,
    pipe_directory: str,
    shared_memory: str = "",
    *,
    writable: bool,
    by_cdi: bool,
    settable: bool = False,
) -> Adjustment:
    """Everything a container of the allocation needs.

    Args:
        pipe_directory, shared_memory, writable, settable: see render.spec.
        by_cdi: devices and mounts come from CDI files; else the mounts are given here, and the nvidia runtime makes
            devices from NVIDIA_VISIBLE_DEVICES. The environment is given here in both cases: what stands in the spec
            already is removed, whether before or after the runtime injects CDI devices.
    """
    env = render.environment(allocation, settable=settable)
    if by_cdi:
        mounts: tuple[Mount, ...] = ()
    else:
        mounts = tuple(
            Mount(
                inside,
                host,
                options=("rbind", "ro" if render.is_read_only(inside, writable=writable) else "rw", "nosuid", "nodev"),
            )
            for inside, host in render.mounts(allocation, pipe_directory, shared_memory)
        )
    return Adjustment(
        removed_env=tuple(name for name, _ in env),
        env=env,
        removed_mounts=tuple(mount.destination for mount in mounts),
        mounts=mounts,
        cdi_devices=render.answer(allocation, pipe_directory, shared_memory).cdi_devices if by_cdi else (),
    )


def lowered(allocation: Allocation, *, by_cdi: bool, settable: bool = False) -> Adjustment:
    """What changes in a container of a share whose limit its pod's annotations lower: its environment only, as the
    rest came by the kubelet's answer.

    Args:
        by_cdi: its CDI device is named once more, which sets what the file says by now.
        settable: see render.spec.
    """
    env = render.environment(allocation, settable=settable)
    names = (f"{render.KIND}={render.device_name(allocation.key)}",) if by_cdi else ()
    return Adjustment(removed_env=tuple(name for name, _ in env), env=env, cdi_devices=names)
