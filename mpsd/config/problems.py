"""What is wrong with a config file: each mistake with its line, path, value and rule (pure)."""

from collections.abc import Sequence
from typing import Final

import msgspec

from mpsd.common.errors import ConfigError

MAX_SHOWN_PROBLEMS: Final = 100


class ConfigProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One mistake. `path` is empty for the file as a whole, `value` and `line` are None where there is none."""

    path: str
    rule: str
    value: str | None = None
    line: int | None = None

    def text(self, source: str) -> str:
        """`FILE:LINE: resources[1].memory.limit: "4Gi": must be at least the request (8Gi)`"""
        where = source if self.line is None else f"{source}:{self.line}"
        parts = [where, self.path, "" if self.value is None else self.value, self.rule]
        return ": ".join(part for part in parts if part)


class ConfigErrors(ConfigError):  # noqa: N818 (several errors at once)
    """Everything wrong with one config file, in the order of its lines. Its text is one line per problem."""

    def __init__(self, source: str, problems: Sequence[ConfigProblem]) -> None:
        self.source = source
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line or 0))
        lines = [problem.text(source) for problem in self.problems[:MAX_SHOWN_PROBLEMS]]
        if (more := len(self.problems) - MAX_SHOWN_PROBLEMS) > 0:
            lines.append(f"{source}: and {more} more problems")
        super().__init__("\n".join(lines))


def file_error(source: str, rule: str, line: int | None = None) -> ConfigErrors:
    """One problem of the file as a whole."""
    return ConfigErrors(source, [ConfigProblem(path="", rule=rule, line=line)])
