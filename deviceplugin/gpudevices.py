"""Where containers get their GPU device nodes: from the node's own NVIDIA CDI specs, or from the nvidia runtime.

Decided before registering and kept once found: the kubelet replays an answer for a pod's whole life, and after a reboot
the specs in /var/run/cdi come back late. Where memory limits can be hard, a kind with the toolkit's hook that sets them
comes first; kinds are of allocations, so a better one serves new ones.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cdi.registry import GPU_KINDS, Registry, find_gpu_kind
from deviceplugin.broker import Broker
from deviceplugin.plan.model import newer
from mpsd.config.model import GpuDevices
from mpsd.log import get_logger
from mpsd.snapshot import GpuStatus, HardLimits, Snapshot

log = get_logger("plugin")

RESCAN_S = 30.0
STATIC_DIRECTORY = "/etc/cdi"


class Choice(msgspec.Struct, frozen=True):
    """`kind` is empty for NVIDIA_VISIBLE_DEVICES. `trouble`: GPU -> why it can't be given to a container now. `hooked`:
    the kinds that set memory limits on every GPU."""

    kind: str
    reason: str = ""
    hooked: frozenset[str] = frozenset()
    trouble: dict[str, str] = msgspec.field(default_factory=dict)


def choose(setting: GpuDevices, registry: Registry, uuids: Sequence[str], before: Choice, *, hard: bool) -> Choice:
    """The kind that carries all GPUs (pure).

    Args:
        before: chosen by an earlier scan or run.
        hard: memory limits can be hard, given a kind that sets them.
    """
    if setting is GpuDevices.ENVVAR:
        return Choice("", "as configured: the nvidia runtime makes devices from NVIDIA_VISIBLE_DEVICES")
    if not uuids:
        return Choice(before.kind, "no GPU is known yet", before.hooked)
    found = find_gpu_kind(registry, uuids, prefer_hooked=hard)
    if found.kind:
        return Choice(found.kind, hooked=found.hooked)
    why = "; ".join(dict.fromkeys(found.reasons.values()))
    if setting is GpuDevices.AUTO and not before.kind:
        return Choice(
            "", f"no CDI kind names every GPU, so the nvidia runtime must make them from NVIDIA_VISIBLE_DEVICES: {why}"
        )
    # What its specs will carry when they are back is what they carried before.
    return Choice(before.kind or GPU_KINDS[0], why, before.hooked, dict(found.reasons))


class DeviceChooser:
    """Chooses now and then, and tells the broker.

    Args:
        scan: reads the CDI directories it is given.
        before: what an earlier run chose.
    """

    def __init__(self, broker: Broker, scan: Callable[[Sequence[str]], Registry], before: Choice) -> None:
        self._broker, self._scan = broker, scan
        self.choice = before
        self._next_s = 0.0
        self._lock = threading.Lock()

    def choose(self, snapshot: Snapshot | None = None) -> None:
        """Looks at the CDI directories now, for what mpsd says or what the broker knows. One look at a time."""
        with self._lock:
            limits = self._broker.hard.limits
            if snapshot is None:
                self._choose(self._broker.gpus(), limits)
            else:
                self._choose(snapshot.gpus, newer(limits, snapshot.hard_limits))

    def _choose(self, gpus: Iterable[GpuStatus], limits: HardLimits) -> None:
        config = self._broker.config
        self._next_s = time.monotonic() + RESCAN_S
        uuids = [gpu.info.uuid for gpu in gpus if not gpu.not_shared]
        registry = self._scan((STATIC_DIRECTORY, config.cdi.directory))
        choice = choose(config.cdi.gpu_devices, registry, uuids, self.choice, hard=not limits.missing)
        if choice.trouble and choice != self.choice:
            log.error("GPUs can't be given to containers", kind=choice.kind, reason=choice.reason)
        self.choice = choice
        self._broker.set_gpu_kind(choice.kind, choice.trouble, choice.hooked)

    def choose_if_due(self) -> None:
        """Looks again after RESCAN_S: specs come and go with driver updates."""
        if time.monotonic() >= self._next_s:
            self.choose()
