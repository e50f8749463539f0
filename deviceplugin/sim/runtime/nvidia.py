"""The CDI specs that NVIDIA's container toolkit and device plugin write for the GPUs of a node."""

import os
from collections.abc import Sequence

from cdi.encode import encode_spec
from cdi.model import ContainerEdits, Device, DeviceNode, Hook, Spec
from cdi.registry import MEMORY_HOOK

NVIDIA_MAJOR, NVIDIA_UVM_MAJOR = 195, 510
NVIDIA_KIND, DEVICE_PLUGIN_KIND = "nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu"
"""Kinds of whole GPUs: the container toolkit's, and the device plugin's, which alone carries the memory hook."""

_TOOLKIT = "/usr/bin/nvidia-ctk"


def nvidia_spec(gpus: Sequence[str], *, memory_hook: bool = False) -> Spec:
    """The spec NVIDIA's container toolkit writes for GPUs (UUIDs by index): devices by index, by UUID, and `all`.

    Args:
        memory_hook: as its device plugin has it written, each GPU with the hook that sets its memory limits.
    """

    def edits(*indices: int) -> ContainerEdits:
        return ContainerEdits(
            device_nodes=tuple(
                DeviceNode(path=f"/dev/nvidia{index}", type="c", major=NVIDIA_MAJOR, minor=index) for index in indices
            ),
            hooks=tuple(memory_hook_of(gpus[index]) for index in indices if memory_hook),
        )

    devices = [Device(name=str(index), container_edits=edits(index)) for index in range(len(gpus))]
    devices += [Device(name=uuid, container_edits=edits(index)) for index, uuid in enumerate(gpus)]
    devices.append(Device(name="all", container_edits=edits(*range(len(gpus)))))
    return Spec(
        kind=DEVICE_PLUGIN_KIND if memory_hook else NVIDIA_KIND,
        devices=tuple(devices),
        container_edits=ContainerEdits(
            env=("NVIDIA_VISIBLE_DEVICES=void",),
            device_nodes=(
                DeviceNode(path="/dev/nvidiactl", type="c", major=NVIDIA_MAJOR, minor=255),
                DeviceNode(path="/dev/nvidia-uvm", type="c", major=NVIDIA_UVM_MAJOR),
            ),
        ),
    )


def memory_hook_of(uuid: str) -> Hook:
    """The hook that sets the memory limits of one GPU."""
    return Hook(
        hook_name="createRuntime",
        path=_TOOLKIT,
        args=(os.path.basename(_TOOLKIT), "hook", MEMORY_HOOK, "--driver-root", "/", "--gpu-id", uuid),
    )


def write_nvidia_spec(directory: str, gpus: Sequence[str], *, memory_hook: bool = False) -> str:
    """Writes that spec into a CDI directory, as a whole; its path. Raises OSError."""
    spec = nvidia_spec(gpus, memory_hook=memory_hook)
    path = os.path.join(directory, f"{spec.kind.replace('/', '-')}.json")
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(encode_spec(spec))
    os.replace(temporary, path)
    return path
