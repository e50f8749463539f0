"""Log lines as text and as JSON."""

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.common import log

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Leaves the root logger as it was."""
    root = logging.getLogger()
    handlers, level, raising = list(root.handlers), root.level, logging.raiseExceptions
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(level)
    logging.raiseExceptions = raising


def written(format: Literal["text", "json"], event: str, /, **fields: object) -> str:  # noqa: A002
    stream = io.StringIO()
    log.configure(format, "INFO", stream)
    log.get_logger("plugin").info(event, **fields)
    return stream.getvalue()


def test_text_line() -> None:
    line = written("text", "daemon ready", gpu="GPU-a", pid=1, ok=True, ratio=0.5, none=None)
    expected = rf"{TIME} INFO  plugin: daemon ready gpu=GPU-a pid=1 ok=true ratio=0\.5 none=null\n"
    assert re.fullmatch(expected, line), line


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("two words", '"two words"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("a=b", '"a=b"'),
        ("back\\slash", '"back\\\\slash"'),
        ("évolué", "évolué"),
        ("a\nb", '"a\\nb"'),
        ("\x1b[31m", '"\\u001b[31m"'),
        ("\x7f\x9b", '"\\u007f\\u009b"'),
        ("\u2028\u202e", '"\\u2028\\u202e"'),
        ("\udcff", '"\\udcff"'),
        (float("nan"), "nan"),
        (ValueError("cannot do"), '"cannot do"'),
    ],
)
def test_text_values(value: object, shown: str) -> None:
    assert written("text", "e", v=value).endswith(f"plugin: e v={shown}\n")


def test_events_and_keys_are_escaped_and_percent_signs_kept() -> None:
    line = written("text", "100%s\nforged", **{"bad\nkey": 1})
    assert line.count("\n") == 1
    assert line.endswith("100%s\\nforged bad\\nkey=1\n")


def test_json_line() -> None:
    line = json.loads(written("json", "daemon ready", gpu="GPU-a", pid=1, ratio=float("inf"), level="x", event="y"))
    assert re.fullmatch(TIME, line.pop("time"))
    assert line == {
        "level": "info", "logger": "plugin", "event": "daemon ready",
        "gpu": "GPU-a", "pid": 1, "ratio": "inf", "level_": "x", "event_": "y",
    }  # fmt: skip


@given(event=st.text(), value=st.text(alphabet=st.characters(exclude_categories=[])), more=st.integers() | st.floats())
def test_one_record_is_one_line(event: str, value: str, more: float) -> None:
    text = written("text", event, v=value, more=more)
    assert text[:-1].isprintable()
    assert text.endswith("\n")
    line: dict[str, Any] = json.loads(written("json", event, v=value, more=more))
    assert written("json", event, v=value).isascii()
    assert (line["event"], line["v"]) == (event, value)


@pytest.mark.parametrize("format_", ["text", "json"])
def test_stack_of_an_exception(format_: Literal["text", "json"]) -> None:
    stream = io.StringIO()
    log.configure(format_, "INFO", stream)
    try:
        raise ValueError("forged\n2026-01-01 INFO")
    except ValueError:
        log.get_logger("gpu").exception("probe failed", gpu="GPU-a")
    lines = stream.getvalue().splitlines()
    if format_ == "json":
        assert len(lines) == 1
        assert "ValueError: forged" in json.loads(lines[0])["stack"]
    else:
        assert "ERROR gpu: probe failed gpu=GPU-a" in lines[0]
        assert all(line.startswith("    ") for line in lines[1:])


def test_levels_and_reconfiguration() -> None:
    silent = io.StringIO()
    log.configure("text", logging.WARNING, silent)
    log.get_logger("a").info("quiet")
    assert silent.getvalue() == ""
    first = io.StringIO()
    log.configure("text", "debug", first)
    log.get_logger("a").debug("one")
    second = io.StringIO()
    log.configure("text", "INFO", second)
    log.get_logger("a").debug("two")
    log.get_logger("a").warning("three")
    log.get_logger("a").error("four")
    assert "DEBUG a: one" in first.getvalue()
    assert re.fullmatch(rf"{TIME} WARN  a: three\n{TIME} ERROR a: four\n", second.getvalue())
    with pytest.raises(ValueError, match="LOUD"):
        log.configure("text", "loud")


def test_records_of_third_parties_are_formatted_too() -> None:
    stream = io.StringIO()
    log.configure("json", "INFO", stream)
    logging.getLogger("grpc").warning("port %d\n", 7)
    logging.getLogger("grpc").warning("broken %d", "x")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["event"]) == ("warn", "grpc", "port 7\n")
    assert second["event"] == "broken %d"
