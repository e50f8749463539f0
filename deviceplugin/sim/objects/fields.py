"""One value of an object, and its path: readers that refuse a wrong type in the API server's way (pure)."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from deviceplugin.sim.objects.model import RefusedError
from mpsd.common.quantity import quoted


class Field:
    """A value of a manifest and its path. Readers refuse a wrong type; null and a missing key are the same."""

    __slots__ = ("handled_as", "path", "value")

    def __init__(self, value: object, path: str, handled_as: str) -> None:
        self.value = value
        self.path = path
        self.handled_as = handled_as

    @property
    def absent(self) -> bool:
        return self.value is None

    def get(self, key: str) -> "Field":
        """A key of a mapping, absent where the mapping is."""
        return Field(self.mapping().get(key), f"{self.path}.{key}" if self.path else key, self.handled_as)

    def mapping(self) -> Mapping[Any, object]:
        if self.value is None:
            return {}
        if not isinstance(self.value, Mapping):
            self._refuse("an object")
        return self.value

    def entries(self) -> dict[str, "Field"]:
        return {
            self._key(key): Field(value, f"{self.path}.{key}" if self.path else str(key), self.handled_as)
            for key, value in self.mapping().items()
        }

    def items(self) -> list["Field"]:
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            self._refuse("a list")
        return [Field(value, f"{self.path}[{i}]", self.handled_as) for i, value in enumerate(self.value)]

    def text(self, *, required: str = "") -> str:
        if self.value is None or self.value == "":
            if required:
                raise RefusedError(required)
            return ""
        if not isinstance(self.value, str):
            self._refuse("a string")
        return self.value

    def texts(self) -> dict[str, str]:
        return {key: entry.text() for key, entry in self.entries().items()}

    def integer(self, *, default: int) -> int:
        if self.value is None:
            return default
        if isinstance(self.value, float) and self.value.is_integer():
            return int(self.value)
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self._refuse("a whole number")
        if abs(self.value) > 2**31 - 1:
            self._refuse("a whole number of 32 bits")
        return self.value

    def boolean(self) -> bool:
        if self.value is None:
            return False
        if not isinstance(self.value, bool):
            self._refuse("true or false")
        return self.value

    def _key(self, key: object) -> str:
        # YAML keys that are no text become text on their way to JSON.
        return key if isinstance(key, str) else json.dumps(key, default=str)

    def _refuse(self, expected: str) -> NoReturn:
        before = f"{self.handled_as}: " if self.handled_as else ""
        hint = ""
        if expected == "a string" and isinstance(self.value, bool | int | float):
            hint = f'; write it in quotes: "{json.dumps(self.value)}"'
        raise RefusedError(f"{before}{self.path or 'it'}: must be {expected}, not {kind_of(self.value)}{hint}")


def kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {short(str(value))}"
        case str():
            return f"the string {quoted(value)}"
        case Mapping():
            return "an object"
        case list():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def short(text: str) -> str:
    return text if len(text) <= 64 else f"{text[:60]}..."
