"""All reason codes of gpufrac: from their enums, which say what each means and what to do (docs/reasons.md)."""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import deviceplugin
import mpsd
from mpsd.common.reason import Code


class Place(NamedTuple):
    """Where something has a code now: the field it stands in, and the message beside it."""

    field: str
    message: str


def subjects() -> list[type[Code]]:
    """All enums of codes, in the order of their modules. Imports all of the product, so it takes a moment."""
    for package in (mpsd, deviceplugin):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            parts = module.name.split(".")
            if not {"sim", "api", "__main__"} & set(parts):
                importlib.import_module(module.name)
    return sorted(Code.__subclasses__(), key=lambda code: (code.__module__, code.__name__))


def named(name: str, enums: Iterable[type[Code]]) -> list[Code]:
    """The codes of that name, upper or lower case: more than one subject may have it (pure)."""
    return [code for enum in enums for code in enum if code.value.lower() == name.lower()]


def near(name: str, enums: Iterable[type[Code]]) -> list[str]:
    """The codes whose names are most like that one, best first (pure)."""
    values = {code.value.lower(): code.value for enum in enums for code in enum}
    return [values[found] for found in difflib.get_close_matches(name.lower(), values, n=3)]


def places(document: object, code: str, field: str = "") -> Iterator[Place]:
    """Where a document of builtins has a code: as `{code, message}`, or with `_code` or `Code` behind the name
    of the message's field; of several, `_codes` or `Codes` (pure)."""
    if isinstance(document, Mapping):
        if document.get("code") == code:
            yield Place(field, str(document.get("message", "")))
        for key, value in document.items():
            yield from _beside(document, str(key), value, code, field)
            yield from places(value, code, f"{field}.{key}" if field else str(key))
    elif isinstance(document, list | tuple):
        for number, item in enumerate(document):
            yield from places(item, code, f"{field}[{number}]")


def _beside(document: Mapping[Any, Any], key: str, value: object, code: str, field: str) -> Iterator[Place]:
    of = f"{field}." if field else ""
    if value == code and (name := _without(key, ("_code", "Code"))):
        yield Place(f"{of}{name}", str(document.get(name, "")))
    elif name := _without(key, ("_codes", "Codes")):
        name = f"{name}s" if f"{name}s" in document else name
        messages = _numbered(document.get(name))
        for at, item in _numbered(value).items():
            if item == code:
                yield Place(f"{of}{name}[{at}]", str(messages.get(at, "")))


def _without(key: str, endings: Iterable[str]) -> str:
    """A field's name without one of the endings; empty where it has none."""
    return next((key.removesuffix(ending) for ending in endings if key.endswith(ending)), "")


def _numbered(value: object) -> Mapping[Any, Any]:
    """Several messages or codes by what they are of: their number, or a name."""
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}
