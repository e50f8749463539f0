"""What a local API offers: each method with what calling it takes, and which right a caller has (pure)."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from mpsd.common.errors import ProtocolError

T = TypeVar("T")

Call = Callable[[dict[str, Any]], object]
"""Takes the request's params, returns what msgspec can encode; a GpufracError is passed on to the caller.

Params come from outside: see `shaped`. It may block, at most wire.MAX_BLOCK_S.
"""


class Access(StrEnum):
    """What a method does. READ: it looks. OPERATE: it changes what runs, what is granted or what is recorded."""

    READ = "read"
    OPERATE = "operate"


ALL: Final = frozenset(Access)
NONE: Final = frozenset[Access]()


@dataclass(frozen=True, slots=True)
class Method:
    """One row of a server's table."""

    access: Access
    call: Call

    def __call__(self, params: dict[str, Any]) -> object:
        return self.call(params)


def reading(calls: Mapping[str, Call]) -> dict[str, Method]:
    """Rows of methods that look."""
    return {name: Method(Access.READ, call) for name, call in calls.items()}


def operating(calls: Mapping[str, Call]) -> dict[str, Method]:
    """Rows of methods that change something."""
    return {name: Method(Access.OPERATE, call) for name, call in calls.items()}


def rights(uid: int) -> frozenset[Access]:
    """What a user may: root and the user the server runs as everything, nobody else anything. What is read names pods
    and processes of all tenants."""
    return ALL if uid in (0, os.geteuid()) else NONE


def shaped(params: Mapping[str, object], shape: type[T]) -> T:
    """A request's params in the shape that a method takes. Raises ProtocolError."""
    try:
        return msgspec.convert(params, shape)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"cannot read the parameters: {error}") from error
