"""Events: what happened to whom, when and why, and how one is a line of a file (pure)."""

import msgspec

from mpsd.common.ranges import Count, Pid, UnixSeconds
from mpsd.common.reason import Reason, code_of, message_of, reason_of
from mpsd.common.text import plain

MAX_TEXT = 1000
"""Characters of a message; the rest is cut."""
MAX_NAME = 300
MAX_GPUS = 64


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What an event is about; each field is empty where it is about no such thing. `key` is an allocation's, `gpus` are
    UUIDs with the `indices` that they had then, `daemon` the name of an MPS daemon."""

    key: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    pod_uid: str = ""
    resource: str = ""
    gpus: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    daemon: str = ""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One event. `kind` is an `EventKind`; one of another version may be none that is known.

    `instance` is the process that told it (`boot`: in which run of the kernel), `number` counts its events from 1.
    `count`: so many are told by this one, when they came too fast to have a line each; its time is then the last one's.
    `total`: what is counted on from event to event, so many by now, as long as the process with `pid` lives.
    `reason` says why, `detail` is what is worth knowing besides. `pid`: the process that it is about. The other fields
    are those of its `Subject`.
    """

    unix_s: UnixSeconds
    kind: str
    process: str
    instance: str
    number: Count
    boot: str = ""
    count: Count = 1
    total: Count = 0
    key: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    pod_uid: str = msgspec.field(default="", name="podUID")
    resource: str = ""
    gpus: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    daemon: str = ""
    pid: Pid = 0
    detail: str = ""
    reason: str = ""
    reason_code: str = ""

    @property
    def why(self) -> Reason | None:
        """The reason, None where there is none."""
        return reason_of(self.reason, self.reason_code)

    @property
    def subject(self) -> Subject:
        """What it is about."""
        return Subject(**{name: getattr(self, name) for name in Subject.__struct_fields__})


class Held(msgspec.Struct, frozen=True):
    """The first line of a file: the last word on every state when it was begun, as files before it go."""

    held: tuple[Event, ...]


def event(
    kind: str,
    subject: Subject,
    reason: Reason | None,
    *,
    unix_s: float,
    process: str,
    instance: str,
    number: int,
    boot: str = "",
    count: int = 1,
    total: int = 0,
    pid: int = 0,
    detail: str = "",
) -> Event:
    """One event of values from anywhere: its texts are cut to what a line may have, and plain."""
    return Event(
        unix_s=round(max(0.0, unix_s), 6),
        kind=str(kind),
        process=process,
        instance=instance,
        number=number,
        boot=boot,
        count=count,
        total=total,
        key=_name(subject.key),
        namespace=_name(subject.namespace),
        pod=_name(subject.pod),
        container=_name(subject.container),
        pod_uid=_name(subject.pod_uid),
        resource=_name(subject.resource),
        gpus=tuple(map(_name, subject.gpus[:MAX_GPUS])),
        indices=subject.indices[:MAX_GPUS],
        daemon=_name(subject.daemon),
        pid=pid,
        detail=plain(detail[:MAX_TEXT]),
        reason=plain(message_of(reason)[:MAX_TEXT]),
        reason_code=_name(code_of(reason)),
    )


def _name(text: str) -> str:
    return plain(text[:MAX_NAME])


_encoder = msgspec.json.Encoder()
_events = msgspec.json.Decoder(Event)
_held = msgspec.json.Decoder(Held)
_HELD = b'{"held":'


def line_of(value: Event | Held) -> bytes:
    """As a line, with its end."""
    return _encoder.encode(value) + b"\n"


def parse_line(line: bytes) -> Event | Held | None:
    """What a line says; None for one that is torn or none of ours."""
    try:
        return _held.decode(line) if line.startswith(_HELD) else _events.decode(line)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
