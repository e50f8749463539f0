"""An allocation -> the CDI spec of its container, the kubelet's Allocate answer and what mpsd is told, as plain values
(pure).

Limits travel in CDI containerEdits, which a pod spec can't override; `delivery: both` repeats them in the answer.
"""

import msgspec

from cdi.model import ContainerEdits, Device, Mount, Spec
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.faults import fault_id
from mpsd.common.marker import MARKER
from mpsd.config.model import Delivery, Enforcement
from mpsd.gpu.model import MIB, Mode
from mpsd.localapi.snapshot import DesiredAllocation

VENDOR = "gpufrac.dev"
CLASS = "allocation"
KIND = f"{VENDOR}/{CLASS}"

CGROUP_LIMITS = ("NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT")
"""What the container toolkit's hook reads, in MiB: it acts when either is set."""

CONTAINER_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108
"""Where a CUDA client looks for the daemon when it has lost its environment (MPS protocol 2 default)."""


SHARED_MEMORY = "/dev/shm"  # noqa: S108


class Answer(msgspec.Struct, frozen=True):
    """What Allocate returns for one container."""

    cdi_devices: tuple[str, ...]
    envs: tuple[tuple[str, str], ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    """(container path, host path)"""
    annotations: tuple[tuple[str, str], ...] = ()


def device_name(key: str) -> str:
    """The CDI device of an allocation. The prefix keeps it legal in specs below 0.5.0, where no digit may lead."""
    return f"s{key}"


def spec(
    allocation: Allocation,
    pipe_directory: str,
    shared_memory: str = "",
    *,
    writable: bool = False,
    settable: bool = False,
) -> Spec:
    """The CDI file of one allocation; directories on the host, see `environment`, `mounts` and `is_read_only`."""
    edits = ContainerEdits(
        env=tuple(f"{name}={value}" for name, value in environment(allocation, settable=settable)),
        mounts=tuple(
            Mount(
                host_path=host,
                container_path=container,
                options=("rbind", "ro" if is_read_only(container, writable=writable) else "rw", "nosuid", "nodev"),
            )
            for container, host in mounts(allocation, pipe_directory, shared_memory)
        ),
    )
    return Spec(kind=KIND, devices=(Device(name=device_name(allocation.key), container_edits=edits),))


def environment(allocation: Allocation, *, settable: bool = False) -> tuple[tuple[str, str], ...]:
    """The container's environment, in a fixed order, the same for the whole life of the allocation.

    CUDA_VISIBLE_DEVICES is the pod's own, also on several GPUs. A container has device nodes for its GPUs only, and
    CUDA numbers these whichever others its MPS daemon has: NVIDIA's own device plugin and fractioning operator give
    containers a part of a daemon's GPUs without that variable. Named here it would have to be by UUID (numbers are the
    daemon's), which ends vLLM at its start (int() of each entry, 0.20 still), and a pod could not take it back.

    Args:
        settable: the driver takes memory limits of cgroups. Then the toolkit's hook is told ours whatever the level is,
            or it would act on the pod's own. Elsewhere it would fail, and no container start.
    """
    visible = "void" if allocation.gpu_kind else ",".join(allocation.gpus)
    fraction = allocation.limit_bytes / allocation.memory_total_bytes if allocation.memory_total_bytes else 0.0
    pairs = [
        ("NVIDIA_VISIBLE_DEVICES", visible),
        (MARKER, allocation.key),
        ("GPUFRAC_MEMORY_REQUEST_BYTES", str(allocation.request_bytes)),
        ("GPUFRAC_MEMORY_LIMIT_BYTES", str(allocation.limit_bytes)),
        ("GPUFRAC_MEMORY_FRACTION", f"{int(fraction * 10_000) / 10_000:.4f}"),
        ("GPUFRAC_COMPUTE_MODE", str(allocation.mode)),
        ("GPUFRAC_ENFORCEMENT", str(allocation.enforcement)),
        ("GPUFRAC_FAULT_DOMAIN", fault_id(allocation)),
    ]
    if allocation.enforcement is Enforcement.HARD or settable:
        # For the container toolkit's hook, which wants both, in MiB, and reads them before the process starts.
        pairs += zip(
            CGROUP_LIMITS, (str(allocation.soft_bytes // MIB), str(allocation.limit_bytes // MIB)), strict=True
        )
    if allocation.needs_daemon:
        pairs.append(("CUDA_MPS_PIPE_DIRECTORY", CONTAINER_PIPE_DIRECTORY))
    if allocation.mode is Mode.SM_SHARING:
        if len(allocation.gpus) == 1:
            # Keyed by the ordinal as the container sees it. On several GPUs a rank that narrows CUDA_VISIBLE_DEVICES
            # would drop every limit, so there the daemon's default holds, or the namespace (MPS protocol 3). Beside a
            # namespace these two are kept: the lower value holds, and the namespace has the same.
            pairs.append(("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", f"0={allocation.limit_bytes // MIB}M"))
        if allocation.thread_percent is not None:
            pairs.append(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(allocation.thread_percent)))
    return tuple(pairs)


def mounts(allocation: Allocation, pipe_directory: str, shared_memory: str = "") -> tuple[tuple[str, str], ...]:
    """(container path, host path) pairs, none where no daemon is used.

    Args:
        pipe_directory: the daemon's, that of the allocation's namespace, or the one that links the main socket.
        shared_memory: what the daemon sees as /dev/shm, empty for the node's (`mps.sharedMemory`). It takes the place
            of the pod's own, and tenants of the daemon share it.
    """
    if not allocation.needs_daemon:
        return ()
    pairs = ((CONTAINER_PIPE_DIRECTORY, pipe_directory),)
    return (*pairs, (SHARED_MEMORY, shared_memory)) if shared_memory else pairs


def is_read_only(container: str, *, writable: bool) -> bool:
    """Whether a mount is read-only. Sockets work all the same (seen with containerd 2.1.9), and clients that are not
    root could never write there.

    Args:
        writable: `mps.writableMount`.
    """
    return container != SHARED_MEMORY and not writable


def answer(allocation: Allocation, pipe_directory: str, shared_memory: str = "", *, settable: bool = False) -> Answer:
    """What the kubelet caches and replays for the pod's whole life: names that stay valid until the release."""
    names = tuple(f"{allocation.gpu_kind}={uuid}" for uuid in allocation.gpus) if allocation.gpu_kind else ()
    names = (*names, f"{KIND}={device_name(allocation.key)}")
    annotations = ((f"{VENDOR}/{CLASS}", allocation.key),)
    if allocation.delivery is Delivery.CDI:
        return Answer(names, annotations=annotations)
    # A runtime that ignores CDI still needs the GPUs by name.
    envs = tuple(
        (k, ",".join(allocation.gpus) if k == "NVIDIA_VISIBLE_DEVICES" else v)
        for k, v in environment(allocation, settable=settable)
    )
    return Answer(names, envs, mounts(allocation, pipe_directory, shared_memory), annotations)


def key_of_device(qualified_name: str) -> str | None:
    """The allocation key in one of our qualified device names, None for other names."""
    kind, _, name = qualified_name.partition("=")
    return name[1:] if kind == KIND and name.startswith("s") and is_key(name[1:]) else None


def is_key(text: str) -> bool:
    """Whether a text from outside has the form of an allocation key: it becomes part of file names."""
    return len(text) == 20 and all(character in "0123456789abcdef" for character in text)


def desired_allocation(allocation: Allocation) -> DesiredAllocation:
    """As mpsd is told of it."""
    return DesiredAllocation(
        key=allocation.key,
        resource=allocation.resource,
        group=allocation.group,
        gpus=allocation.gpus,
        mode=allocation.mode,
        limit_bytes=allocation.limit_bytes,
        thread_percent=allocation.thread_percent,
        slot=allocation.slot,
        default_socket=allocation.default_socket,
    )
