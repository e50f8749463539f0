"""The kinds of events, and which of them are states: of these only what changes is an event (pure)."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from mpsd.common.reason import Code


class EventKind(Code):
    """What happened on the node: the kinds of `gpufrac events`, of `gpufrac_events_total` and of the log's lines."""

    STARTED = ("Started", "The process began to run.", "Nothing. `EndedInSilence` beside it: read its log.")
    STOPPED = ("Stopped", "The process ended as it was asked to.", "Nothing.")
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


class RunCode(Code):
    """How a process came to run."""

    ENDED_IN_SILENCE = (
        "EndedInSilence",
        "The process before it ended without a word: it was killed, it crashed, or the node went down.",
        "Read its log and the kernel's, and see whether the node was restarted.",
    )


WARNINGS: Final = frozenset(
    {
        EventKind.EVENTS_DROPPED,
        EventKind.REFUSED,
        EventKind.PERMISSION_DELAYED,
        EventKind.PERMISSION_WITHDRAWN,
    }
)
"""Kinds that an operator may have to do something about."""


class State(NamedTuple):
    """Kinds that are values of one state of one thing, so that the last word on it counts.

    `field` of the subject is what names the thing. `rest` are the values that need no telling where nothing else was
    told before; after one of them nothing is remembered.
    """

    name: str
    field: str
    kinds: tuple[EventKind, ...]
    rest: tuple[EventKind, ...] = ()


STATES: Final = (
    State("process", "", (EventKind.STARTED, EventKind.STOPPED)),
    State("grant", "key", (EventKind.GRANTED, EventKind.RELEASED), (EventKind.RELEASED,)),
    State("pod", "key", (EventKind.POD_KNOWN,)),
    State(
        "permission",
        "key",
        (EventKind.PERMISSION_GIVEN, EventKind.PERMISSION_DELAYED, EventKind.PERMISSION_WITHDRAWN),
    ),
)

STATE_OF: Final[Mapping[str, State]] = {str(kind): state for state in STATES for kind in state.kinds}
"""Of the kinds that are values of a state; what any other kind tells is an event each time."""
