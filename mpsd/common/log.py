"""Logs of both processes: one event name and key/value fields per record, to standard error, as text or JSON lines.

Values may come from pods (names, environments, paths), so nothing in them can start a new line or move the cursor.
"""

import json
import logging
import sys
import time
from typing import Literal, TextIO

from mpsd.common.text import plain, plain_lines

_FIELDS = "gpufrac_fields"
_NAMES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN", logging.ERROR: "ERROR"}
_OURS = frozenset({"time", "level", "logger", "event", "stack"})


class Logger:
    """`log.info("daemon ready", gpu=uuid, pid=1)`. Levels and names are those of the standard library's `logging`."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """An error with the stack of the exception being handled: for faults of our own, never for a user's."""
        self._log(logging.ERROR, event, fields, stack=True)

    def _log(self, level: int, event: str, fields: dict[str, object], *, stack: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            # No args: a "%" in the event stays what it is.
            self._logger.log(level, event, exc_info=stack, extra={_FIELDS: fields})


def get_logger(name: str) -> Logger:
    """The logger of one part of a process, e.g. `plugin`, `gpu`, `daemon`."""
    return Logger(logging.getLogger(name))


def configure(
    format: Literal["text", "json"] = "text",  # noqa: A002 - the word of the command line
    level: str | int = "INFO",
    stream: TextIO | None = None,
) -> None:
    """Sends every logger of the process, third-party ones too, to `stream` (standard error). May be called again.

    Raises ValueError for a level that `logging` does not know.
    """
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.setLevel(level.upper() if isinstance(level, str) else level)
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.raiseExceptions = False  # a broken standard error must not break the daemon


def complain(text: str) -> None:
    """Tells the person at the terminal why a process does not run. Several lines are problems that name their own
    places."""
    print(plain_lines(text if "\n" in text else f"gpufrac: {text}"), file=sys.stderr)  # noqa: T201


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that configure() finds it again."""


class _TextFormatter(logging.Formatter):
    """`2026-11-29T17:00:00.123Z INFO  plugin: event key=value`; a stack follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        level = _NAMES.get(record.levelno, record.levelname)
        event, fields, stack = _parts(self, record)
        words = [plain(event), *(f"{plain(key)}={_value(value)}" for key, value in fields.items())]
        lines = [f"{_time(record)} {level:<5} {plain(record.name)}: {' '.join(words)}"]
        lines += [f"    {plain(line)}" for line in stack.splitlines()]
        return "\n".join(lines)


class _JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, event, then the fields; `stack` where there is one. ASCII only."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields, stack = _parts(self, record)
        level = _NAMES.get(record.levelno, record.levelname).lower()
        line: dict[str, object] = {"time": _time(record), "level": level, "logger": record.name, "event": event}
        line.update((f"{key}_" if key in _OURS else key, _scalar(value)) for key, value in fields.items())
        if stack:
            line["stack"] = stack
        return json.dumps(line)


def _parts(formatter: logging.Formatter, record: logging.LogRecord) -> tuple[str, dict[str, object], str]:
    try:
        event = record.getMessage()
    except Exception:  # noqa: BLE001 - a third party's broken format string is no reason to lose its record
        event = str(record.msg)
    stack = formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
    fields = getattr(record, _FIELDS, {})
    return event, fields if isinstance(fields, dict) else {}, stack


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _scalar(value: object) -> object:
    """What JSON can say as it is: finite numbers, booleans, null; all else as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    return str(value)


def _value(value: object) -> str:
    scalar = _scalar(value)
    if not isinstance(scalar, str):
        return json.dumps(scalar)
    if scalar and scalar.isprintable() and not set(scalar) & set(' "=\\'):
        return scalar
    quoted = scalar.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{plain(quoted)}"'
