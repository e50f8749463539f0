"""How commands print: kubectl-like tables for people, stable JSON for programs, errors with an exit code."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import click
import msgspec

from mpsd.errors import ConfigError, GpufracError, NotReachableError
from mpsd.quantity import format_bytes

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAILURE, EXIT_CONFIG, EXIT_UNREACHABLE = 1, 2, 3

output_option = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."
)


class Failure(click.ClickException):
    """A user-facing error: its text on stderr, no stack trace, and the exit code."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(text)
        vars(self)["exit_code"] = exit_code  # click declares it on the class

    def show(self, file: Any = None) -> None:
        click.echo(f"gpufrac: {self.message}", err=True)


def failures(function: Callable[P, R]) -> Callable[P, R]:
    """Turns our errors into exit codes: config 2, not reachable 3, others 1."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise Failure(str(error), EXIT_CONFIG) from error
        except NotReachableError as error:
            raise Failure(str(error), EXIT_UNREACHABLE) from error
        except GpufracError as error:
            raise Failure(str(error)) from error
        except BrokenPipeError:
            raise  # click ends quietly
        except OSError as error:
            raise Failure(f"cannot finish: {error.strerror or error}") from error

    return wrapped


def print_json(value: object) -> None:
    """One indented JSON document with keys in a stable order."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
    """Left-aligned columns two blanks apart; `empty` is the sentence for no rows."""
    if not rows:
        click.echo(empty)
        return
    cells = [tuple(columns), *(tuple(cell(value) for value in row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def cell(value: object) -> str:
    """A value as one table cell; nothing is `-`. Line breaks would break the table."""
    if value is None or value == "":
        return "-"
    return " ".join(str(value).split())


def size(value_bytes: int | None) -> str:
    """Bytes as a Kubernetes quantity; negative ones keep their sign."""
    if value_bytes is None:
        return "-"
    return f"-{format_bytes(-value_bytes)}" if value_bytes < 0 else format_bytes(value_bytes)
