"""Where containers get their GPU device nodes: from the node's own NVIDIA CDI specs, or from the nvidia runtime.

Decided before registering and kept once found: the kubelet replays an answer for a pod's whole life, and after a reboot
the specs in /var/run/cdi come back late.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cdi.registry import GPU_KINDS, Registry, find_gpu_kind
from mpsd.config.model import GpuDevices


@dataclass(frozen=True, slots=True)
class Choice:
    """`kind` is empty for NVIDIA_VISIBLE_DEVICES. `trouble`: GPU -> why it can't be given to a container now."""

    kind: str
    reason: str = ""
    trouble: dict[str, str] = field(default_factory=dict)


def choose(setting: GpuDevices, registry: Registry, uuids: Sequence[str], before: str) -> Choice:
    """The kind that carries all GPUs (pure).

    Args:
        before: the kind chosen by an earlier scan or run, empty for none.
    """
    if setting is GpuDevices.ENVVAR:
        return Choice("", "as configured: the nvidia runtime makes devices from NVIDIA_VISIBLE_DEVICES")
    if not uuids:
        return Choice(before, "no GPU is known yet")
    found = find_gpu_kind(registry, uuids)
    if found.kind:
        return Choice(found.kind)
    why = "; ".join(dict.fromkeys(found.reasons.values()))
    if setting is GpuDevices.AUTO and not before:
        return Choice(
            "", f"no CDI kind names every GPU, so the nvidia runtime must make them from NVIDIA_VISIBLE_DEVICES: {why}"
        )
    return Choice(before or GPU_KINDS[0], why, dict(found.reasons))
