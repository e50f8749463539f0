"""How commands print: kubectl-like tables for people, stable JSON for programs, errors with an exit code."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import click
import msgspec

from mpsd.common.errors import ConfigError, GpufracError, NotReachableError
from mpsd.common.quantity import format_bytes
from mpsd.common.text import one_line, plain_lines
from mpsd.config.model import GIB
from mpsd.gpu.model import MIB

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAILURE, EXIT_CONFIG, EXIT_UNREACHABLE = 1, 2, 3

output_option = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."
)


class Failure(click.ClickException):
    """A user-facing error: its text on stderr, no stack trace, and the exit code. Where JSON was asked for, stdout has
    it as `{"error": ...}`, too, so that it is never empty."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(text)
        vars(self)["exit_code"] = exit_code  # click declares it on the class
        self.as_json = False

    def show(self, file: Any = None) -> None:
        if self.as_json:
            with contextlib.suppress(OSError):  # the exit code has to get out
                print_json({"error": self.message})
        complain(self.message)


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Prints lines. Everything that commands print goes through here: names in it may be anybody's."""
    click.echo(plain_lines(text), err=err, nl=nl)


def complain(text: str) -> None:
    """Says what is wrong on stderr, each line with our name."""
    for line in filter(None, text.split("\n")):
        say(f"gpufrac: {line}", err=True)


def failures(function: Callable[P, R]) -> Callable[P, R]:
    """Turns our errors into exit codes: config 2, not reachable 3, others 1."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BrokenPipeError:
            raise  # click ends quietly
        except (Failure, GpufracError, OSError) as error:
            failure = _failure(error)
            failure.as_json = kwargs.get("output") == "json"
            raise failure from error

    return wrapped


def _failure(error: Failure | GpufracError | OSError) -> Failure:
    if isinstance(error, Failure):
        return error
    if isinstance(error, OSError):
        return Failure(f"cannot finish: {error.strerror or error}")
    if isinstance(error, ConfigError):
        return Failure(str(error), EXIT_CONFIG)
    return Failure(str(error), EXIT_UNREACHABLE if isinstance(error, NotReachableError) else EXIT_FAILURE)


def is_terminal() -> bool:
    """Whether there is a person to ask."""
    return sys.stdin.isatty()


def confirm(question: str) -> None:
    """Asks on stderr; stdout is for results.

    Raises:
        Failure: nobody can be asked (exit 2).
        click.Abort: the answer is no.
    """
    if not is_terminal():
        raise Failure(f"cannot ask {question!r}: standard input is no terminal: add --yes to go on", EXIT_CONFIG)
    click.confirm(plain_lines(question), abort=True, err=True)


def print_json(value: object) -> None:
    """One indented JSON document with keys in a stable order."""
    say(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], empty: str, *, err: bool = False) -> None:
    """Left-aligned columns two blanks apart; `empty` is the sentence for no rows."""
    if not rows:
        say(empty, err=err)
        return
    cells = [tuple(columns), *(tuple(cell(value) for value in row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip(), err=err)


def cell(value: object) -> str:
    """A value as one table cell, and one line; nothing is `-`."""
    if value is None or value == "":
        return "-"
    return one_line(str(value))


def size(value_bytes: int | None) -> str:
    """Bytes as a Kubernetes quantity; negative ones keep their sign."""
    if value_bytes is None:
        return "-"
    return f"-{format_bytes(-value_bytes)}" if value_bytes < 0 else format_bytes(value_bytes)


def rounded(value_bytes: int | None) -> str:
    """Bytes as people read them, to a whole MiB: what a process uses is seldom a round number."""
    return "-" if value_bytes is None else size(-(-value_bytes // MIB) * MIB)


def gib(value_bytes: int) -> str:
    """Bytes as a number of GiB, so that two of them compare at a glance."""
    return f"{value_bytes / GIB:.2f}".rstrip("0").rstrip(".")


def shortened(text: str, length: int = 300) -> str:
    """One line of at most about that length, cut between words. The whole is in the JSON output."""
    if len(text) <= length:
        return text
    head = text[: length - 4]
    return (head.rpartition(" ")[0] or head) + " ..."


def counted(count: int, noun: str) -> str:
    """`1 client`, `2 clients`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def some(names: Iterable[str], shown: int = 10) -> str:
    """The names by comma, each once; of many the first ones."""
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return ", ".join(listed[:shown]) + more


def age(since_unix_s: float) -> str:
    """How long ago a time was, `-` for none."""
    return span(time.time() - since_unix_s) if since_unix_s else "-"


def span(time_s: float) -> str:
    """A time in its largest unit that says enough."""
    seconds = max(0, int(time_s))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
