"""JSON that arrives in pieces, cut into objects without holding the whole (pure).

A list of a node's pods may have many MiB and a tenant may make it larger still; one pod is bounded by what etcd takes.
"""

import re
from collections.abc import Iterator

from deviceplugin.kubernetes.errors import NonsenseError

_OUTSIDE = re.compile(rb'["{}\[\]]')
_INSIDE = re.compile(rb'["\\]')
_QUOTE, _BACKSLASH = b'"'[0], b"\\"[0]
_OPENING = frozenset(b"{[")
_ITEMS = re.compile(rb'[{,]\s*"items"\s*:\s*\[\Z')
_ITEMS_TAIL_BYTES = 64
_MAX_ENVELOPE_BYTES = 1 << 16


class Lines:
    """Bytes in, whole lines out. A line too long raises NonsenseError; half a line at the end counts for nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._buffer = max_bytes, bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Lines that are complete now, without their newline; empty ones are left out."""
        searched = len(self._buffer)
        self._buffer += data
        start = 0
        while (end := self._buffer.find(b"\n", max(start, searched))) >= 0:
            self._check(end - start)
            if line := bytes(self._buffer[start:end]).strip():
                yield line
            start = end + 1
        del self._buffer[:start]
        self._check(len(self._buffer))

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise NonsenseError(f"cannot take a line of more than {self._max_bytes} bytes")


class Items:
    """The objects of a Kubernetes list, `{..., "items": [{...}, ...]}`, one by one as they arrive.

    It only finds where each ends; that they are JSON is seen by who decodes them. `envelope` is the list without them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._depth = 0
        self._in_string = False
        self._escaped = 0  # bytes of the next piece that a backslash before it escapes
        self._in_items = False
        self._item: bytearray | None = None
        self._envelope = bytearray()

    @property
    def envelope(self) -> bytes:
        """The list with `items` empty. Complete once everything was fed."""
        return bytes(self._envelope)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Items that are complete now. Raises NonsenseError for what is too large or stands between items."""
        kept = 0  # everything before it is where it belongs
        at, self._escaped = self._escaped, 0
        while found := (_INSIDE if self._in_string else _OUTSIDE).search(data, at):
            here, byte = found.start(), data[found.start()]
            at = here + 1
            if byte == _BACKSLASH:
                at += 1
            elif byte == _QUOTE:
                self._in_string = not self._in_string
            elif byte in _OPENING:
                self._depth += 1
                if self._depth == 3 and self._in_items:
                    self._put(data[kept:here])
                    self._item, kept = bytearray(), here
                elif self._depth == 2:
                    self._put(data[kept:at])
                    kept = at
                    self._in_items = _ITEMS.search(self._envelope[-_ITEMS_TAIL_BYTES:]) is not None
            else:
                self._depth -= 1
                if self._depth == 2 and self._item is not None:
                    self._put(data[kept:at])
                    yield bytes(self._item)
                    self._item, kept = None, at
                elif self._depth == 1 and self._in_items:
                    self._put(data[kept:here])
                    self._in_items, kept = False, here
        self._escaped = max(0, at - len(data))
        self._put(data[kept:])

    def _put(self, data: bytes) -> None:
        if self._item is not None:
            self._item += data
            if len(self._item) > self._max_bytes:
                raise NonsenseError(f"cannot take an object of more than {self._max_bytes} bytes")
        elif self._in_items:
            # Taken for an empty list, such nonsense would mean that every pod is gone.
            if data.strip(b" \t\r\n,"):
                raise NonsenseError("cannot take a list in which something stands between the objects")
        else:
            self._envelope += data
            if len(self._envelope) > _MAX_ENVELOPE_BYTES:
                raise NonsenseError(f"cannot take a list with more than {_MAX_ENVELOPE_BYTES} bytes beside its objects")
