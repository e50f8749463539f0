"""What of the events is shown: of whom, since when, and with the names that others give (pure)."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec import structs

from mpsd.events.model import Event, Held

LEAST_UUID: Final = 4
"""Characters of a UUID that name a GPU by its beginning."""


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which events are asked for: of any of these pods (`[NAMESPACE/]POD[/CONTAINER]`, or a UID) and of any of these
    GPUs (index, UUID or its beginning, or a group); empty: of all. `since_unix_s`: not older."""

    pods: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    since_unix_s: float = 0.0

    def takes(self, event: Event) -> bool:
        """Whether it is asked for."""
        return (
            event.unix_s >= self.since_unix_s
            and (not self.pods or any(_is_of_pod(event, pod) for pod in self.pods))
            and (not self.gpus or any(_is_of_gpu(event, gpu) for gpu in self.gpus))
        )


def _is_of_pod(event: Event, text: str) -> bool:
    if not event.pod:
        return bool(text) and text == event.pod_uid
    parts = (event.namespace, event.pod, event.container)
    asked = text.split("/")
    return text == event.pod_uid or (
        asked == [event.pod] if len(asked) == 1 else tuple(asked) == parts[: len(asked)] and len(asked) <= len(parts)
    )


def _is_of_gpu(event: Event, text: str) -> bool:
    if text == event.daemon or text in map(str, event.indices):
        return bool(text)
    return any(uuid == text or (len(text) >= LEAST_UUID and uuid.startswith(text)) for uuid in event.gpus)


class Names:
    """Whose an allocation is, and which index a GPU has, as events of either process say it."""

    def __init__(self) -> None:
        self._owners: dict[str, Event] = {}
        self._indices: dict[str, int] = {}

    def learn(self, lines: Iterable[Event | Held]) -> None:
        """Takes in what any line says of that."""
        for line in lines:
            for event in line.held if isinstance(line, Held) else (line,):
                if event.key and event.pod:
                    self._owners[event.key] = event
                if len(event.gpus) == len(event.indices):
                    self._indices.update(zip(event.gpus, event.indices, strict=True))

    def name(self, event: Event) -> Event:
        """The same event with its pod and the indices of its GPUs, where these are known and it does not have them."""
        if event.gpus and not event.indices and all(uuid in self._indices for uuid in event.gpus):
            event = structs.replace(event, indices=tuple(self._indices[uuid] for uuid in event.gpus))
        owner = self._owners.get(event.key) if event.key and not event.pod else None
        if owner is None:
            return event
        return structs.replace(
            event, namespace=owner.namespace, pod=owner.pod, container=owner.container, pod_uid=owner.pod_uid
        )


def merged(of_each: Iterable[Sequence[Event | Held]]) -> list[Event]:
    """The events of several processes by time; those of one process that have one time stay in order."""
    events = ([line for line in lines if isinstance(line, Event)] for lines in of_each)
    return list(heapq.merge(*(sorted(one, key=_time) for one in events), key=_time))


def _time(event: Event) -> float:
    return event.unix_s


def rfc3339(unix_s: float, *, digits: int = 6) -> str:
    """A time as RFC 3339 has it, in UTC: `2026-11-29T17:00:00.123456Z`."""
    text = datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
    return f"{text[: len(text) - 6 + digits].rstrip('.')}Z"


def document(event: Event) -> Mapping[str, object]:
    """For programs: all fields, those without a value, too, and the time as text."""
    values = {name: getattr(event, name) for name in Event.__struct_fields__ if name != "unix_s"}
    named = zip(Event.__struct_encode_fields__, Event.__struct_fields__, strict=True)
    return {"time": rfc3339(event.unix_s)} | {encoded: values[name] for encoded, name in named if name in values}


def about(event: Event) -> str:
    """What it is about, for people: the container, or the resource or daemon, and the GPUs."""
    who = "/".join(filter(None, (event.namespace, event.pod, event.container)))
    who = who or (f"pod {event.pod_uid}" if event.pod_uid else "") or event.resource
    gpus = f"GPU {', '.join(map(str, event.indices))}" if event.indices else ", ".join(event.gpus)
    return " on ".join(filter(None, (who, gpus))) or event.process


def what(event: Event) -> str:
    """What is said of it, for people."""
    return "; ".join(filter(None, (event.detail, event.reason)))
