"""The kinds of events, and which of them are states: of these only what changes is an event (pure)."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from mpsd.common.reason import Code


class EventKind(Code):
    """What happened on the node: the kinds of `gpufrac events` and of `gpufrac_events_total`."""

    STARTED = ("Started", "The process began to run.", "Nothing. `EndedInSilence` beside it: read its log.")
    STOPPED = ("Stopped", "The process ended as it was asked to.", "Nothing.")
    CONFIG_RELOADED = ("ConfigReloaded", "A changed config file is in force.", "Restart what the message names.")
    CONFIG_REFUSED = (
        "ConfigRefused",
        "A changed config file has errors; the one before it stays in force.",
        "Correct what the message names: gpufrac config check FILE.",
    )
    TROUBLE_BEGUN = (
        "TroubleBegun",
        "Something of the node is not as it should be, by the reason's code.",
        "What the message says; `gpufrac status` has all that is wrong now.",
    )
    TROUBLE_ENDED = ("TroubleEnded", "What was told to be wrong, by the reason's code, is over.", "Nothing.")
    EVENTS_DROPPED = (
        "EventsDropped",
        "So many events could not be written, and are only counted.",
        "Look for a full or read-only disk below `stateRoot`; the log may have them.",
    )
    # Of allocations.
    GRANTED = ("Granted", "A container was granted a share of a GPU.", "Nothing.")
    REFUSED = (
        "Refused",
        "A container was refused what it asked for.",
        "What the message says: it names what was asked and what is free.",
    )
    RELEASED = ("Released", "A share was given back: its pod and all its processes are gone.", "Nothing.")
    POD_KNOWN = ("PodKnown", "The kubelet shows which container has a share.", "Nothing.")
    PERMISSION_GIVEN = ("PermissionGiven", "The container of a share may start: its limits are verified.", "Nothing.")
    PERMISSION_DELAYED = (
        "PermissionDelayed",
        "The container of a share may not start yet.",
        "What the message says. It starts by itself once that is over.",
    )
    PERMISSION_WITHDRAWN = (
        "PermissionWithdrawn",
        "The container of a share may not (re)start any more; one that runs goes on.",
        "What the message says. It may start again by itself once that is over.",
    )
    # Of MPS daemons.
    DAEMON_READY = (
        "DaemonReady",
        "An MPS daemon serves: it answered, and every limit was read back. It is new, or was in trouble.",
        "Nothing.",
    )
    DAEMON_TROUBLED = (
        "DaemonTroubled",
        "An MPS daemon runs and is not ready: no container starts there until it is.",
        "What the message says; `gpufrac daemons` shows its last log lines.",
    )
    DAEMON_WEDGED = (
        "DaemonWedged",
        "An MPS daemon does not answer as it should, again and again.",
        "gpufrac clients shows who uses it; gpufrac mpsd replace --now ends it whoever does.",
    )
    DAEMON_CRASHED = (
        "DaemonCrashed",
        "An MPS daemon's process ended by itself. Its clients have lost the GPU.",
        "Nothing: another is started after a pause. Its log says why.",
    )
    DAEMON_REPLACED = (
        "DaemonReplaced",
        "An MPS daemon is ended for the reason given, and another takes its place.",
        "Nothing.",
    )
    DAEMON_FAILED = (
        "DaemonFailed",
        "An MPS daemon can't be started, or not be ended.",
        "What the message says: `gpufrac daemons` has it, and the last log lines.",
    )
    DAEMON_STOPPED = ("DaemonStopped", "An MPS daemon ended as it was to: nothing needs it any more.", "Nothing.")
    # Of GPUs.
    GPU_LOST = (
        "GpuLost",
        "A GPU is gone: no process can use it, and its shares are Unhealthy.",
        "Look for NVRM and Xid in the kernel's log; reset the GPU or reboot.",
    )
    GPU_SICK = (
        "GpuSick",
        "A GPU must not be relied on: nothing new is given there.",
        "What the message says.",
    )
    GPU_SILENT = (
        "GpuSilent",
        "The driver does not answer for a GPU: nothing new is given there.",
        "Look for NVRM and Xid in the kernel's log; reboot if it stays.",
    )
    GPU_BACK = ("GpuBack", "A GPU is well again.", "Nothing.")
    XID = (
        "Xid",
        "The driver reported an error (XID) of a GPU; the message says which, and what it means.",
        "What the message says: most are a program's fault.",
    )
    COMPUTE_MODE_CHANGED = (
        "ComputeModeChanged",
        "Somebody else changed the compute mode of a GPU that is bound; it is set back.",
        "Find what runs nvidia-smi -c, or another MPS agent, on the node.",
    )
    EVICTED = (
        "Evicted",
        "MPS ended the GPU use of a client that was above its request, for another within its own.",
        "Nothing, or give the container a larger request.",
    )


class RunCode(Code):
    """How something came to run, or ended, that nobody saw."""

    ENDED_IN_SILENCE = (
        "EndedInSilence",
        "The process before it ended without a word: it was killed, it crashed, or the node went down.",
        "Read its log and the kernel's, and see whether the node was restarted.",
    )
    ENDED_UNSEEN = (
        "EndedUnseen",
        "The MPS daemon ended while mpsd was not there.",
        "Nothing: another was started. Its log says why.",
    )


WARNINGS: Final = frozenset(
    {
        EventKind.CONFIG_REFUSED,
        EventKind.TROUBLE_BEGUN,
        EventKind.EVENTS_DROPPED,
        EventKind.REFUSED,
        EventKind.PERMISSION_DELAYED,
        EventKind.PERMISSION_WITHDRAWN,
        EventKind.DAEMON_TROUBLED,
        EventKind.DAEMON_WEDGED,
        EventKind.DAEMON_CRASHED,
        EventKind.DAEMON_FAILED,
        EventKind.GPU_LOST,
        EventKind.GPU_SICK,
        EventKind.GPU_SILENT,
        EventKind.XID,
        EventKind.COMPUTE_MODE_CHANGED,
        EventKind.EVICTED,
    }
)
"""Kinds that an operator may have to do something about."""


class State(NamedTuple):
    """Kinds that are values of one state of one thing, so that the last word on it counts.

    `field` of an event is what names the thing. `rest` are the values that need no telling where nothing else was told
    before; after one of them nothing is remembered. `counts`: what is told is a total, and an event is what it grew by
    for one process (`pid`).
    """

    name: str
    field: str
    kinds: tuple[EventKind, ...]
    rest: tuple[EventKind, ...] = ()
    counts: bool = False


_K = EventKind
STATES: Final = (
    State("process", "", (_K.STARTED, _K.STOPPED)),
    State("trouble", "reason_code", (_K.TROUBLE_BEGUN, _K.TROUBLE_ENDED), (_K.TROUBLE_ENDED,)),
    State("grant", "key", (_K.GRANTED, _K.RELEASED), (_K.RELEASED,)),
    State("pod", "key", (_K.POD_KNOWN,)),
    State("permission", "key", (_K.PERMISSION_GIVEN, _K.PERMISSION_DELAYED, _K.PERMISSION_WITHDRAWN)),
    State(
        "daemon",
        "daemon",
        (
            _K.DAEMON_READY,
            _K.DAEMON_TROUBLED,
            _K.DAEMON_WEDGED,
            _K.DAEMON_CRASHED,
            _K.DAEMON_REPLACED,
            _K.DAEMON_FAILED,
            _K.DAEMON_STOPPED,
        ),
        (_K.DAEMON_STOPPED,),
    ),
    State("gpu", "gpus", (_K.GPU_LOST, _K.GPU_SICK, _K.GPU_SILENT, _K.GPU_BACK), (_K.GPU_BACK,)),
    State("evicted", "gpus", (_K.EVICTED,), counts=True),
)

STATE_OF: Final[Mapping[str, State]] = {str(kind): state for state in STATES for kind in state.kinds}
"""Of the kinds that are values of a state; what any other kind tells is an event each time."""
