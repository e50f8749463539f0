"""Where containers get their GPU device nodes: from the node's own NVIDIA CDI specs, or from the nvidia runtime, which
injects CDI devices itself by NVIDIA_VISIBLE_DEVICES, and with them the hook for memory limits where its toolkit has it.

Decided before registering and kept once found: the kubelet replays an answer for a pod's whole life, and after a reboot
the specs in /var/run/cdi come back late. Where memory limits can be hard, a kind with the toolkit's hook that sets them
comes first; kinds are of allocations, so a better one serves new ones.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from cdi.registry import GPU_KINDS, Registry, find_gpu_kind
from deviceplugin.grants.broker import Broker
from deviceplugin.plan import render
from deviceplugin.plan.model import newer
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.reconcile.reasons import DevicesCode
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.config.model import GpuDevices
from mpsd.localapi.snapshot import GpuStatus, HardLimits, Snapshot

log = get_logger("plugin")

RESCAN_S = 30.0
STATIC_DIRECTORY = "/etc/cdi"
OURS = f"{render.VENDOR}-{render.CLASS}_"
"""How the names of our own specs begin."""
RUNTIME = ""
"""Stands for a CDI kind: the nvidia runtime makes the devices."""


class Choice(msgspec.Struct, frozen=True):
    """`kind` is empty for NVIDIA_VISIBLE_DEVICES; `reason` says why it is that, or not enough. `trouble`: GPU -> why it
    can't be given to a container now. `hooked`: the kinds that set memory limits on every GPU, the empty one among them
    where the nvidia runtime does."""

    kind: str
    reason: Reason | None = None
    hooked: frozenset[str] = frozenset()
    trouble: dict[str, Reason] = msgspec.field(default_factory=dict)


def choose(
    setting: GpuDevices,
    registry: Registry,
    uuids: Sequence[str],
    before: Choice,
    *,
    hard: bool,
    toolkit: bool | None = None,
) -> Choice:
    """The kind that carries all GPUs (pure).

    Args:
        before: chosen by an earlier scan or run.
        hard: memory limits can be hard, given a kind that sets them.
        toolkit: whether the nvidia runtime injects the toolkit's hook, None where its version is not known.
    """
    if not uuids:
        kind = "" if setting is GpuDevices.ENVVAR else before.kind
        return Choice(kind, Reason(DevicesCode.NO_GPU_KNOWN, "no GPU is known yet"), before.hooked)
    found = find_gpu_kind(registry, uuids, prefer_hooked=hard)
    # A toolkit that writes the hook into a spec has it in its runtime, too.
    hooks = bool(found.hooked) or bool(toolkit) or (toolkit is None and not found.kind and RUNTIME in before.hooked)
    hooked = found.hooked | {RUNTIME} if hooks else found.hooked
    if setting is GpuDevices.ENVVAR:
        text = "as configured: the nvidia runtime makes devices from NVIDIA_VISIBLE_DEVICES"
        return Choice(RUNTIME, Reason(DevicesCode.CONFIGURED, text), hooked)
    if found.kind:
        return Choice(found.kind, hooked=hooked)
    why = "; ".join(dict.fromkeys(found.reasons.values()))
    if setting is GpuDevices.AUTO and not before.kind:
        text = f"no CDI kind names every GPU, so the nvidia runtime must make them from NVIDIA_VISIBLE_DEVICES: {why}"
        return Choice(RUNTIME, Reason(DevicesCode.NO_KIND, text), hooked)
    # What its specs will carry when they are back is what they carried before.
    trouble = {uuid: Reason(OfferCode.NO_CDI_DEVICE, reason) for uuid, reason in found.reasons.items()}
    return Choice(before.kind or GPU_KINDS[0], Reason(DevicesCode.KIND_INCOMPLETE, why), before.hooked, trouble)


class DeviceChooser:
    """Chooses now and then, and tells the broker.

    Args:
        scan: reads the CDI directories it is given.
        before: what an earlier run chose.
        toolkit: whether the nvidia runtime injects the hook for memory limits; may take seconds, so it is asked when it
            is due only, never on the way to a registration.
    """

    def __init__(
        self,
        broker: Broker,
        scan: Callable[[Sequence[str]], Registry],
        before: Choice,
        toolkit: Callable[[], bool | None] = lambda: None,
    ) -> None:
        self._broker, self._scan, self._toolkit = broker, scan, toolkit
        self._toolkit_hooks = True if RUNTIME in before.hooked else None
        self.choice = before
        self._next_s = 0.0
        self._specs: frozenset[tuple[str, int, int]] | None = None
        self._asked = False
        self._lock = threading.Lock()

    def choose(self, snapshot: Snapshot | None = None) -> None:
        """Looks at the CDI directories now, for what mpsd says or what the broker knows. One look at a time."""
        with self._lock:
            limits = self._broker.node.hard.limits
            if snapshot is None:
                self._choose(self._broker.node.gpus, limits)
            else:
                self._choose(snapshot.gpus, newer(limits, snapshot.hard_limits))

    def _choose(self, gpus: Iterable[GpuStatus], limits: HardLimits) -> None:
        config = self._broker.node.config
        self._next_s = time.monotonic() + RESCAN_S
        uuids = [gpu.info.uuid for gpu in gpus if not gpu.not_shared]
        registry = self._scan((STATIC_DIRECTORY, config.cdi.directory))
        choice = choose(
            config.cdi.gpu_devices, registry, uuids, self.choice, hard=not limits.missing, toolkit=self._toolkit_hooks
        )
        if choice.trouble and choice != self.choice:
            log.error("GPUs can't be given to containers", kind=choice.kind, reason=choice.reason)
        self.choice = choice
        self._broker.set_gpu_kind(choice.kind, choice.trouble, choice.hooked)

    def specs_changed(self) -> bool:
        """Whether others' files in the CDI directories are other ones than when asked last; a look is due then. After a
        reboot specs come back when this process already runs."""
        now = frozenset(
            found
            for directory in (STATIC_DIRECTORY, self._broker.node.config.cdi.directory)
            for found in _specs_of_others(directory)
        )
        before, self._specs = self._specs, now
        if before is None or before == now:
            return False
        self._next_s = 0.0
        return True

    def choose_if_due(self) -> None:
        """Looks again after RESCAN_S, or once specs have changed: they come and go with driver updates."""
        if time.monotonic() < self._next_s and self._asked:
            return
        self._asked = True
        hooks = self._toolkit()
        with self._lock:
            self._toolkit_hooks = hooks
        self.choose()


def _specs_of_others(directory: str) -> Iterator[tuple[str, int, int]]:
    """Path, inode and time of change of each file that is not ours."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((".json", ".yaml")) and not entry.name.startswith(OURS):
                with contextlib.suppress(OSError):  # gone just now
                    status = entry.stat()
                    yield entry.path, status.st_ino, status.st_mtime_ns
