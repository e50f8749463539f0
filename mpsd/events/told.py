"""What was told last of every state, so that nothing is told twice: not again by a process that was restarted (pure).

States are level-triggered: whoever watches one says what it is, however often, and only a change is an event. What was
told is read back from the events' own files.
"""

from collections.abc import Collection, Iterable

from msgspec import structs

from mpsd.events.kinds import STATE_OF, STATES, EventKind, RunCode, State
from mpsd.events.model import Event, Held, Subject

_OF_KEYS = tuple(state.name for state in STATES if state.field == "key")


class Told:
    """The last event of every state that is not at rest."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Event] = {}

    @property
    def held(self) -> Held:
        """All of it, to begin a file with."""
        return Held(tuple(self._last.values()))

    def replay(self, lines: Iterable[Event | Held | None]) -> None:
        """Takes in what a file says, in its order; each file begins with what was told before it."""
        for line in lines:
            if isinstance(line, Held):
                self._last.clear()
                for event in line.held:
                    self.note(event)
            elif line is not None:
                self.note(line)

    def last(self, kind: str, subject: Subject) -> Event | None:
        """The last word on the state that this kind is a value of; None where it is at rest, or none."""
        state = STATE_OF.get(kind)
        return None if state is None else self._last.get((state.name, _identity(state, subject)))

    def news(self, event: Event) -> Event | None:
        """What of it was not told; None for nothing."""
        state = STATE_OF.get(event.kind)
        if state is None or event.kind == EventKind.STARTED:
            return event
        last = self._last.get((state.name, _identity(state, event)))
        if state.counts:
            grown = event.total - (last.total if last is not None and last.pid == event.pid else 0)
            return structs.replace(event, count=grown) if grown > 0 else None
        if last is None:
            return None if event.kind in state.rest else event
        same = (last.kind, last.reason_code, last.pid) == (event.kind, event.reason_code, event.pid)
        return None if same else event

    def unseen(self, event: Event) -> Event | None:
        """What must have happened before an event though nobody saw it; None for nothing: a daemon that serves takes
        the place of another, which ended while mpsd was not there."""
        last = self._last.get(("daemon", event.daemon))
        if event.kind != EventKind.DAEMON_READY or last is None or last.kind != EventKind.DAEMON_READY:
            return None
        if last.pid == event.pid or last.boot != event.boot:
            return None
        text = f"the MPS control daemon (pid {last.pid}) ended while mpsd was not there"
        return structs.replace(
            event,
            kind=str(EventKind.DAEMON_CRASHED),
            pid=last.pid,
            reason=text,
            reason_code=str(RunCode.ENDED_UNSEEN),
            detail="",
        )

    def note(self, event: Event) -> None:
        """It was told. One that stands for several comes late, and may be older than what was told since."""
        state = STATE_OF.get(event.kind)
        if state is None:
            return
        place = (state.name, _identity(state, event))
        last = self._last.get(place)
        if last is not None and last.instance == event.instance and last.number > event.number:
            return
        if event.kind not in state.rest:
            self._last[place] = event
        elif event.kind == EventKind.RELEASED:
            for name in _OF_KEYS:
                self._last.pop((name, event.key), None)
        else:
            self._last.pop(place, None)

    def missing(self, rest: EventKind, there: Collection[str]) -> list[Event]:
        """The last word on each state that ends with `rest` and is of a thing that is not `there`."""
        state = STATE_OF[rest]
        return [e for (name, identity), e in self._last.items() if name == state.name and identity not in there]

    def named(self, subject: Subject) -> Subject:
        """The same with the pod that an allocation is known to be of."""
        known = self._last.get(("pod", subject.key)) if subject.key and not subject.pod else None
        if known is None:
            return subject
        return Subject(
            key=subject.key,
            namespace=known.namespace,
            pod=known.pod,
            container=known.container,
            pod_uid=known.pod_uid,
            resource=subject.resource or known.resource,
            gpus=subject.gpus or known.gpus,
            indices=subject.indices or known.indices,
            daemon=subject.daemon,
        )


def _identity(state: State, of: Event | Subject) -> str:
    """What names the thing that a state is of: of GPUs the first one's UUID."""
    if not state.field:
        return ""
    value = getattr(of, state.field)
    return (value[0] if value else "") if isinstance(value, tuple) else str(value)
