"""Comments of a drafted file (pure): nothing in them can end them, whoever wrote it."""

import textwrap
from typing import Final

from mpsd.common.text import one_line

_WIDTH: Final = 110
_COLUMN: Final = 46


def comment(text: str, indent: str = "") -> list[str]:
    """A text as lines of comments."""
    first = f"# {indent}"
    return textwrap.wrap(
        one_line(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=f"{first}  " if indent else first,
        break_long_words=False,
        break_on_hyphens=False,
    )


def aside(line: str, text: str) -> str:
    """A line with a comment behind it."""
    return f"{line.ljust(_COLUMN)} # {one_line(text)}"
