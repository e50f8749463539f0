"""YAML of a spec file as plain values. The only importer of PyYAML: import this module when such a file is read."""

from typing import Any

import yaml

from cdi.errors import MalformedSpecError, shorten

# The C parser is about ten times faster; not every build of PyYAML has it.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]  # the base is chosen at run time
    """Safe types only; a key given twice is an error; dates stay text.

    Merge keys are refused: they can make a small file grow without bound, and spec files do not use them.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise MalformedSpecError([f"line {line}: merge keys are not read"])
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                raise MalformedSpecError([f"line {line}: a key must be text"])
            if key in seen:
                raise MalformedSpecError([f"line {line}: key {shorten(str(key))} appears more than once"])
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}


def parse(data: bytes) -> object:
    """The document in `data`. Raises MalformedSpecError."""
    try:
        return yaml.load(data, Loader=_Loader)  # noqa: S506  # a SafeLoader
    except yaml.YAMLError as exc:
        raise MalformedSpecError([f"not YAML: {' '.join(str(exc).split())}"]) from exc
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        # What PyYAML lets through for values that do not fit their tag, such as `!!timestamp x`.
        raise MalformedSpecError([f"not YAML: {exc}"]) from exc
