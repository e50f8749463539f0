"""Protobuf by table, as far as the CRI calls of these tests need it: no generated code, no runtime's proto files.

A message is a mapping of field names; a table says each field's number and kind. Fields that are not in the table are
skipped on reading.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

Message = dict[str, Any]

STRING: Final = "string"
INT: Final = "int"  # and bool, and enum: varints, none of ours negative
MAP: Final = "map<string, string>"


class Field(msgspec.Struct, frozen=True):
    """`kind` is STRING, INT, MAP or the table of a message; `many`: a repeated field, a list."""

    number: int
    kind: Any = STRING
    many: bool = False


Table = Mapping[str, Field]
_ENTRY: Final[Table] = {"key": Field(1), "value": Field(2)}


def encode(table: Table, message: Mapping[str, Any]) -> bytes:
    """Empty values are left out, as proto3 does; but a message that is given stays, even an empty one."""
    out = bytearray()
    for name, value in message.items():
        field = table[name]
        if field.kind == MAP:
            values: Sequence[Any] = [{"key": k, "value": v} for k, v in value.items()]
        else:
            values = value if field.many else [value]
        for one in values:
            if field.kind == INT:
                if one or field.many:
                    out += _varint(field.number << 3) + _varint(int(one))
                continue
            if field.kind == STRING:
                data = one.encode()
                if not data and not field.many:
                    continue
            else:
                data = encode(_ENTRY if field.kind == MAP else field.kind, one)
            out += _varint(field.number << 3 | 2) + _varint(len(data)) + data
    return bytes(out)


def decode(table: Table, data: bytes) -> Message:
    """Every field of the table is there: absent ones as "", 0, {} or []; an absent message as one of absent fields."""
    message: Message = {name: _absent(field) for name, field in table.items()}
    names = {field.number: name for name, field in table.items()}
    for number, raw in _fields(data):
        if (name := names.get(number)) is None:
            continue
        field, value = table[name], raw
        if isinstance(raw, bytes):
            if field.kind == STRING:
                value = raw.decode()
            elif field.kind == MAP:
                entry = decode(_ENTRY, raw)
                message[name][entry["key"]] = entry["value"]
                continue
            else:
                value = decode(field.kind, raw)
        if field.many:
            message[name].append(value)
        else:
            message[name] = value
    return message


def _absent(field: Field) -> Any:
    if field.many:
        return []
    if field.kind == STRING:
        return ""
    if field.kind == INT:
        return 0
    return {} if field.kind == MAP else decode(field.kind, b"")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(data):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
            case 2:
                length = varint()
                yield key >> 3, data[at : at + length]
                at += length
            case 1:
                at += 8
            case 5:
                at += 4
            case other:
                raise ValueError(f"wire type {other} is not one of protobuf's")
