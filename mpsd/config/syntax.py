"""What is wrong with a text that is no YAML: the line where somebody has to look, and why (pure).

A YAML reader names the place where it could not go on. What is missing is often lines before: a quote, a bracket, a
space behind a colon.
"""

import re
from typing import Any

import yaml

_TEMPLATE = re.compile(r"(?:^|[:-])\s*(\{\{[^{}]*\}\}|\{%[^%]*%\})")
_NO_SPACE = re.compile(r"^\s*(?:- +)*([A-Za-z][A-Za-z0-9_]*:)(?=[^\s:/])")


def template(text: str) -> tuple[str, int] | None:
    """Where a template's action stands in place of a value, and what to do."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TEMPLATE.search(line):
            return f"is a template, with {' '.join(match[1].split())} for a value: render it first", number
    return None


def explain(error: yaml.MarkedYAMLError, text: str, loader: Any) -> tuple[str, int | None]:
    """The rule that is broken, and the line to look at."""
    mark = error.problem_mark or error.context_mark
    problem = " ".join(str(error.problem or error.context).split())
    if mark is None:
        return f"is not valid YAML: {problem}", None
    lines = text.splitlines() or [""]
    number = min(mark.line, len(lines) - 1) + 1
    line = lines[number - 1]
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "is not valid YAML: indented with a tab, use spaces", number
    what, where = _cause(error, text, loader, lines, number) or (problem + _advice(problem), number)
    return f"is not valid YAML: {what}", where


def _cause(
    error: yaml.MarkedYAMLError, text: str, loader: Any, lines: list[str], number: int
) -> tuple[str, int] | None:
    context = error.context or ""
    opened = error.context_mark.line + 1 if error.context_mark is not None else number
    if "scanning a quoted scalar" in context:
        return "a quote is opened here and never closed", opened
    if (quote := _long_quote(text, loader)) is not None and quote[1] == number:
        return f"a quote is opened here and closed in line {number}: is one missing?", quote[0]
    for what, bracket in (("flow mapping", "{"), ("flow sequence", "[")):
        if what in context and opened < number:
            return f"`{bracket}` is opened here and not closed before line {number}", opened
    if "mapping values are not allowed" in (error.problem or ""):
        for near in (number, number - 1):
            if near >= 1 and (match := _NO_SPACE.match(lines[near - 1])):
                return f"a space is missing behind `{match[1]}`", near
    return None


def _long_quote(text: str, loader: Any) -> tuple[int, int] | None:
    """The first and last line of the last quoted text that goes over lines, as far as the text can be read."""
    found = None
    try:
        for token in yaml.scan(text, Loader=loader):
            if isinstance(token, yaml.ScalarToken) and token.style in ("'", '"'):
                first, last = token.start_mark.line + 1, token.end_mark.line + 1
                found = (first, last) if last > first else found
    except yaml.YAMLError:
        return found
    return found


def _advice(problem: str) -> str:
    if "cannot start any token" in problem:
        return ": put the value in quotes"
    if "'-' indicator" in problem or "expected key" in problem or "block end" in problem:
        return ": is this line indented as those beside it?"
    return ""
