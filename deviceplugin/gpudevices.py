"""Where containers get their GPU device nodes: from the node's own NVIDIA CDI specs, or from the nvidia runtime.

Decided before registering and kept once found: the kubelet replays an answer for a pod's whole life, and after a reboot
the specs in /var/run/cdi come back late.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cdi.registry import GPU_KINDS, Registry, find_gpu_kind
from deviceplugin.broker import Broker
from mpsd.config.model import GpuDevices
from mpsd.log import get_logger
from mpsd.snapshot import GpuStatus

log = get_logger("plugin")

RESCAN_S = 30.0
STATIC_DIRECTORY = "/etc/cdi"


class Choice(msgspec.Struct, frozen=True):
    """`kind` is empty for NVIDIA_VISIBLE_DEVICES. `trouble`: GPU -> why it can't be given to a container now."""

    kind: str
    reason: str = ""
    trouble: dict[str, str] = msgspec.field(default_factory=dict)


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


class DeviceChooser:
    """Chooses now and then, and tells the broker.

    Args:
        scan: reads the CDI directories it is given.
        kind: what an earlier run chose.
    """

    def __init__(self, broker: Broker, scan: Callable[[Sequence[str]], Registry], kind: str) -> None:
        self._broker, self._scan = broker, scan
        self.choice = Choice(kind)
        self._next_s = 0.0
        self._lock = threading.Lock()

    def choose(self, gpus: Iterable[GpuStatus] | None = None) -> None:
        """Looks at the CDI directories now, for these GPUs or those the broker knows. One look at a time."""
        with self._lock:
            self._choose(self._broker.gpus() if gpus is None else gpus)

    def _choose(self, gpus: Iterable[GpuStatus]) -> None:
        config = self._broker.config
        self._next_s = time.monotonic() + RESCAN_S
        uuids = [gpu.info.uuid for gpu in gpus if not gpu.not_shared]
        registry = self._scan((STATIC_DIRECTORY, config.cdi.directory))
        choice = choose(config.cdi.gpu_devices, registry, uuids, self.choice.kind)
        if choice.trouble and choice != self.choice:
            log.error("GPUs can't be given to containers", kind=choice.kind, reason=choice.reason)
        self.choice = choice
        self._broker.set_gpu_kind(choice.kind, choice.trouble)

    def choose_if_due(self) -> None:
        """Looks again after RESCAN_S: specs come and go with driver updates."""
        if time.monotonic() >= self._next_s:
            self.choose()
